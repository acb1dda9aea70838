"""`GRPOTrainer` on a trueroll worker: as its rollout function, or in place of vLLM.

Owns: when weights are pushed, and the seed of each group. Does not own the client and the publisher, which callers make
and close. Promises: every sample comes from the weights that were pushed last, or WeightsError is raised; the same seed
of the trainer gives the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from trueroll.errors import ConfigError

from ....engine.request import SampleOutput, SamplingParams
from ...client.client import RolloutClient
from ...publisher.publisher import WeightPublisher
from .common import Prompt, check_samples, encode, logprobs, sampling_params
from .seams import TrlMissingError, check_grpo

try:
    grpo_trainer: Any = importlib.import_module("trl.trainer.grpo_trainer")
except ImportError as error:
    raise TrlMissingError(f"trl: expected version 1.16, found: {error}; run `pip install 'trueroll[trl]'`") from error
check_grpo(grpo_trainer)

RolloutFunc: TypeAlias = Callable[[list[Prompt], Any], dict[str, list[Any]]]
"""From prompts and the trainer to `prompt_ids`, `completion_ids` and `logprobs`, with an entry for each prompt."""


def rollout_func(client: RolloutClient, publisher: WeightPublisher) -> RolloutFunc:
    """For `GRPOTrainer(rollout_func=...)`: generates with the worker of `client`, and pushes after each update.

    `publisher` is connected to that worker. The log-probs that it returns do not reach TRL's loss; with
    `trueroll_generation` they do. Raises ConfigError for a trainer of several processes, or for settings that a worker
    does not have, and WeightsError.
    """
    pushed_state, pushed_version = None, 0

    def roll_out(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        nonlocal pushed_state, pushed_version
        _check_single_process(trainer.accelerator)
        state, version = trainer.state, trainer.state.global_step + 1  # a worker that got no push serves version 0
        if state is not pushed_state or version != pushed_version:  # another state: another training
            model, is_new = trainer.accelerator.unwrap_model(trainer.model), state is not pushed_state
            publisher.push(model, version, allow_older=is_new)  # for another training counts from its own beginning
            pushed_state, pushed_version = state, version
        params = sampling_params(vars(trainer.args), trainer.eos_token_ids)
        options = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        prompt_ids = [encode(trainer.processing_class, prompt, options) for prompt in prompts]
        samples = _sample_each(client, prompt_ids, params, version)
        completion_ids = [sample.token_ids for sample in samples]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs(samples)}

    return roll_out


@contextlib.contextmanager
def trueroll_generation(client: RolloutClient, publisher: WeightPublisher) -> Iterator[None]:
    """Inside, each new `GRPOTrainer` with `use_vllm=True, vllm_mode="server"` uses trueroll in place of vLLM.

    TRL then corrects by the ratio between the trainer's log-probs and the worker's, and reports their distance as
    `sampling/sampling_logp_difference`. It puts `TruerollGeneration` where TRL looks for its own class, and takes it
    back at the end; trainers made inside go on with it. `publisher` is connected to the worker of `client`.
    """
    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = functools.partial(TruerollGeneration, client, publisher)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original


class TruerollGeneration:
    """What `GRPOTrainer` generates with; see `trueroll_generation`. TRL makes it, and gives everything from `model` on.

    Raises ConfigError for a trainer of several processes, or for settings that a worker does not have.
    """

    def __init__(
        self,
        client: RolloutClient,
        publisher: WeightPublisher,
        model: torch.nn.Module,
        accelerator: Any,
        processing_class: Any,
        **settings: Any,
    ) -> None:
        _check_single_process(accelerator)
        if settings["structured_outputs_regex"] is not None:
            raise ConfigError("vllm_structured_outputs_regex is not supported; set it to None")
        self._client, self._publisher, self._model, self._accelerator = client, publisher, model, accelerator
        self._params = sampling_params(settings, [processing_class.eos_token_id])
        self._version = 0
        self.vllm_client = self

    def get_server_info(self) -> dict[str, Any]:
        """Tells TRL that log-probs are those after temperature and filters, as it wants them."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        """Push the trainer's weights. TRL calls it before it generates, if it has updated them."""
        self._version += 1
        model = self._accelerator.unwrap_model(self._model)
        # The worker may serve the versions of an earlier trainer, which counted from 1 as well.
        self._publisher.push(model, self._version, allow_older=self._version == 1)

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: Any
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """One sample for each of the B prompts, which come repeated `num_generations` times.

        Returns the prompts; the token ids [B][T], T being the length of each; their log-probs [B][T][1], as vLLM may
        give those of more tokens at each position; and None, as the ids of such tokens are not needed.
        """
        if images is not None:
            raise ConfigError("prompts: expected text, found images, which workers cannot take; remove them")
        with profiler:
            samples = _sample_each(self._client, prompts, self._params, self._version)
        of_each = [[[value] for value in values] for values in logprobs(samples)]
        return prompts, [sample.token_ids for sample in samples], of_each, None


def _check_single_process(accelerator: Any) -> None:
    if accelerator.num_processes != 1:
        raise ConfigError(
            f"trainer: expected one process, found {accelerator.num_processes}; start it without a launcher, or use "
            "AsyncGRPOTrainer, which generates in one process for all"
        )


def _sample_each(
    client: RolloutClient, prompts: list[list[int]], params: SamplingParams, version: int
) -> list[SampleOutput]:
    """One sample for each prompt, from weights `version`. Equal neighbours are one group; torch's generator gives each
    group its seed, so that TRL's seed decides, and its checkpoints resume it.
    """
    runs = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
    seeds = torch.randint(2**63 - 1, [len(runs)]).tolist()
    each = [params.model_copy(update={"n": n, "seed": seed}) for (_, n), seed in zip(runs, seeds, strict=True)]
    groups = client.generate([prompt for prompt, _ in runs], each)
    samples = [sample for group in groups for sample in group.samples]
    check_samples(samples, oldest=version, newest=version)
    return samples
