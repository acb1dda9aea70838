"""Use a trueroll worker in `GRPOTrainer`, either through TRL's `rollout_func` or in place of vLLM.

Owns: the decision of when to push weights, and the seed of each group. Does not own: the client and the publisher,
which callers create and close. Guarantees: a sample that does not come from the last pushed weights raises
WeightsError. Two training runs with the same seed get the same samples.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeAlias

import torch

from trueroll.errors import ConfigError, ModelError

from ....engine.media import ImageInput
from ....engine.request import SampleOutput, SamplingParams
from ....kernels.families import describe
from ....kernels.wrappers import plain_class, unwrapped
from ...client.client import RolloutClient
from ...grammar import GrammarMasks
from ...publisher.publisher import WeightPublisher
from ..images import TrainerImages
from .common import Prompt, check_samples, encode, logprobs, sampling_params, tokenizer_of
from .seams import TrlMissingError, check_grpo

try:
    grpo_trainer: Any = importlib.import_module("trl.trainer.grpo_trainer")
except ImportError as error:
    raise TrlMissingError(f"trl: version 1.16 is required ({error}); run `pip install 'trueroll[trl]'`") from error
check_grpo(grpo_trainer)

RolloutFunc: TypeAlias = Callable[[list[Prompt], Any], dict[str, list[Any]]]
"""(prompts, trainer) -> `prompt_ids`, `completion_ids` and `logprobs`, each with one entry per prompt."""


def rollout_func(client: RolloutClient, publisher: WeightPublisher) -> RolloutFunc:
    """Return a function for `GRPOTrainer(rollout_func=...)`. The function generates samples with a worker, and pushes
    the trainer's weights after each update.

    `client`, `publisher`: a client and a publisher that are connected to the same worker. TRL's loss ignores the
    log-probs that the function returns. For a loss that uses the worker's log-probs, use `trueroll_generation`. The
    function raises ConfigError for a trainer with several processes, for prompts with images and for settings that a
    worker does not support. The function raises WeightsError for samples from weights other than the weights of the
    last push.
    """
    pushed_state, pushed_version = None, 0

    def roll_out(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        nonlocal pushed_state, pushed_version
        _check_single_process(trainer.accelerator)
        state, version = trainer.state, trainer.state.global_step + 1  # a worker without pushes serves version 0
        if state is not pushed_state or version != pushed_version:  # a different state means another training run
            model, is_new = trainer.accelerator.unwrap_model(trainer.model), state is not pushed_state
            publisher.push(model, version, allow_older=is_new)  # each training run counts versions from 1
            pushed_state, pushed_version = state, version
        params = sampling_params(vars(trainer.args), trainer.eos_token_ids)
        options = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        tokenizer = tokenizer_of(trainer.processing_class)
        prompt_ids = [encode(tokenizer, prompt, options) for prompt in prompts]
        samples = _sample_each(client, prompt_ids, [[] for _ in prompts], params, version)
        completion_ids = [sample.token_ids for sample in samples]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs(samples)}

    return roll_out


@contextlib.contextmanager
def trueroll_generation(client: RolloutClient, publisher: WeightPublisher) -> Iterator[None]:
    """Context manager in which each new `GRPOTrainer(use_vllm=True, vllm_mode="server")` uses trueroll instead of vLLM.

    With trueroll, TRL applies its importance sampling correction to the worker's log-probs, and reports the difference
    between the log-probs of worker and trainer as `sampling/sampling_logp_difference`. Inside the context,
    `TruerollGeneration` replaces TRL's class `VLLMGeneration`. A trainer that was created inside the context keeps
    using trueroll after the context exits. `client`, `publisher`: a client and a publisher that are connected to the
    same worker.
    """
    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = functools.partial(TruerollGeneration, client, publisher)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original


class TruerollGeneration:
    """The generation backend of `GRPOTrainer`, see `trueroll_generation`.

    TRL creates the object. All arguments except `client` and `publisher` come from TRL. Raise ConfigError for a trainer
    with several processes and for settings that a worker does not support.

    `params`: the sampling parameters of all samples, without the number of samples and the seed.
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
        self._client, self._publisher, self._model, self._accelerator = client, publisher, model, accelerator
        self._processor = processing_class
        self.params = sampling_params(settings, [tokenizer_of(processing_class).eos_token_id])
        self._version = 0
        self.vllm_client = self

    def get_server_info(self) -> dict[str, Any]:
        """Tell TRL that the log-probs include the effect of temperature and filters (`processed_logprobs`), as TRL
        requires.
        """
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        """Push the trainer's weights. If the weights have changed, TRL calls this method before TRL generates
        samples.
        """
        self._version += 1
        model = self._accelerator.unwrap_model(self._model)
        # The worker may serve a version of an earlier trainer, which also counted from 1.
        self._publisher.push(model, self._version, allow_older=self._version == 1)

    def generate(
        self, prompts: list[list[int]], images: list[list[Any] | None] | None, num_generations: int, profiler: Any
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Return one sample for each of the B entries of `prompts`. In `prompts`, TRL has already repeated each prompt
        `num_generations` times in a row.

        `images`: None, or the PIL images of each prompt. TRL has already expanded the placeholders of the images. The
        trainer's processor preprocesses the images. Raise InvalidRequestError if the images do not match the
        placeholders. Raise AlignmentError or ModelError if there are images but the model has no vision tower that a
        worker can serve.

        Return (prompts, token ids, log-probs, None). The token ids are [B][T], where T is the length of each sample.
        The log-probs are [B][T][1]: TRL expects vLLM's format, which can have several log-probs per position. The last
        element of the tuple, for the token ids of additional log-probs, is None, because only the sampled tokens have
        log-probs.
        """
        with profiler:
            placed = [[] for _ in prompts] if images is None else self._images.place(prompts, images)
            samples = _sample_each(self._client, prompts, placed, self.params, self._version)
        of_each = [[[value] for value in values] for values in logprobs(samples)]
        return prompts, [sample.token_ids for sample in samples], of_each, None

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence tokens of the worker's model."""
        return (self._client.health().engine or {})["eos_token_ids"]

    @cached_property
    def masks(self) -> GrammarMasks | None:
        """The masks of the samples' grammar; None if the samples have no grammar."""
        if self.params.structured_outputs is None:
            return None
        return GrammarMasks(self.params, tokenizer_of(self._processor), self._client.health().engine or {})

    @cached_property
    def _images(self) -> TrainerImages:
        model = unwrapped(self._accelerator.unwrap_model(self._model))
        tower = describe(model.config.to_dict() | {"architectures": [plain_class(type(model)).__name__]}).tower
        if tower is None:
            raise ModelError(
                f"images: {type(model).__name__} has no vision tower; use a model with a vision tower, or no images"
            )
        return TrainerImages(self._processor, tower)


def _check_single_process(accelerator: Any) -> None:
    if accelerator.num_processes != 1:
        raise ConfigError(
            f"trainer: must run in one process (got {accelerator.num_processes}); start the trainer without a "
            "launcher, or use AsyncGRPOTrainer, which generates in one process for all processes"
        )


def _sample_each(
    client: RolloutClient,
    prompts: list[list[int]],
    images: list[list[ImageInput]],
    params: SamplingParams,
    version: int,
) -> list[SampleOutput]:
    """Return one sample for each prompt, generated with the weights of `version`. `images`: the images of each prompt.

    Equal adjacent prompts with equal images form one group. The seed of each group comes from torch's random number
    generator, so the seeds depend on TRL's seed. The sequence of seeds continues when training resumes from a
    checkpoint.
    """
    runs = [list(same) for _, same in itertools.groupby(zip(prompts, images, strict=True), _content)]
    seeds = torch.randint(2**63 - 1, [len(runs)]).tolist()
    each = [params.model_copy(update={"n": len(run), "seed": seed}) for run, seed in zip(runs, seeds, strict=True)]
    media = [run[0][1] for run in runs] if any(images) else None
    groups = client.generate([run[0][0] for run in runs], each, media=media)
    samples = [sample for group in groups for sample in group.samples]
    check_samples(samples, oldest=version, newest=version)
    return samples


def _content(prompt: tuple[list[int], list[ImageInput]]) -> tuple[list[int], list[bytes]]:
    token_ids, images = prompt
    return token_ids, [image.content_hash for image in images]
