"""Convert a group of samples to training rows of `AsyncGRPOTrainer`: rewards, advantages and arrays."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trueroll.errors import ConfigError

from ....engine.request import SampleOutput
from .common import Prompt, logprobs_of
from .seams import check_sample

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import (
        RolloutSample,
    )

RewardFunc: TypeAlias = Callable[..., Any]
"""A reward function. `TruerollWorker` documents its arguments and results."""

_NOT_FOR_REWARDS = {"prompt", "prompts", "completion", "completions", "completion_ids"}


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    - `row`: the prompt's row in the dataset
    - `completions`: texts or messages of the samples, for reward functions
    """

    id: int
    row: Mapping[str, Any]
    prompt_ids: list[int]
    samples: tuple[SampleOutput, ...]
    completions: list[Any]


async def call_reward(func: RewardFunc, group: Group) -> list[float]:
    """Return the reward that `func` gives to each sample, with NaN instead of None. `func` may be a coroutine function.

    Raise ConfigError unless `func` returns one finite number or None for each sample.
    """
    count = len(group.samples)
    columns = {name: [value] * count for name, value in group.row.items() if name not in _NOT_FOR_REWARDS}
    columns["prompts"] = [group.row["prompt"]] * count
    columns["completion_ids"] = [sample.token_ids for sample in group.samples]
    call = functools.partial(func, completions=group.completions, **columns)
    values = await asyncio.to_thread(_without_stop_iteration, call)
    if inspect.isawaitable(values):
        values = await values
    try:
        rewards = [float("nan") if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name_of(func)}: must return {count} numbers (got {values!r:.80}: {error})") from error
    if len(rewards) != count:
        raise ConfigError(f"{name_of(func)}: must return {count} rewards, one for each sample (got {len(rewards)})")
    if any(map(math.isinf, rewards)):
        raise ConfigError(
            f"{name_of(func)}: must return finite rewards (got {rewards!r:.80}); use None for unknown rewards"
        )
    return rewards


def _without_stop_iteration(call: Callable[[], Any]) -> Any:
    """Return the result of `call`. Convert StopIteration to RuntimeError: a future cannot hold StopIteration, and
    without the conversion the caller would wait forever.
    """
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("a reward function raised StopIteration") from error


def rollout_samples(group: Group, names: list[str], rewards: np.ndarray) -> Iterator[RolloutSample]:
    """Yield a training row for each sample. A sample for which all rewards are unknown gets advantage 0.

    `rewards`: float64 [num_functions, num_samples], NaN for unknown rewards.
    """
    # Imported here because the import warns that the module is experimental. The warning is irrelevant for users of
    # GRPOTrainer.
    from trl.experimental.async_grpo import async_rollout_worker

    check_sample(async_rollout_worker.RolloutSample)
    unknown = np.all(np.isnan(rewards), axis=0)
    totals = np.where(unknown, np.nan, np.nansum(rewards, axis=0))
    known = totals[~unknown]
    std = float(known.std()) if len(known) else float("nan")
    for i, sample in enumerate(group.samples):
        each = {f"rewards/{name}": value for name, value in zip(names, rewards[:, i].tolist(), strict=True)}
        yield async_rollout_worker.RolloutSample(
            prompt=group.row["prompt"],
            completion=group.completions[i],
            **_arrays(group.prompt_ids, sample),
            advantage=0.0 if unknown[i] else float((totals[i] - known.mean()) / (std + 1e-8)),
            model_version=min(span.version for span in sample.weight_versions),
            group_id=group.id,
            metrics={"reward": float(totals[i]), "reward_std": std, **each},
            enqueued_at=time.time(),
        )


def _arrays(prompt_ids: list[int], sample: SampleOutput) -> dict[str, np.ndarray]:
    """Return the arrays of a training row. Each array covers the tokens of prompt and completion."""
    no_logprobs, is_prompt = np.zeros(len(prompt_ids), np.float32), np.zeros(len(prompt_ids), np.int64)
    return {
        "input_ids": np.array([*prompt_ids, *sample.token_ids], np.int64),
        "completion_mask": np.concatenate([is_prompt, np.ones(len(sample.token_ids), np.int64)]),
        "old_log_probs": np.concatenate([no_logprobs, logprobs_of(sample)]),
    }


def length_metrics(samples: Sequence[SampleOutput]) -> dict[str, float | tuple[float, float]]:
    """Return metrics of sample lengths, with TRL's metric names. For a pair (sum, count), TRL reports the mean, sum /
    count.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    cut_off = sum(sample.finish_reason == "length" for sample in samples)
    return {
        "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": (float(cut_off), float(len(lengths))),
    }


def name_of(func: RewardFunc) -> str:
    """Return a reward function's name for metrics and errors: the name of the function or of its class.

    For a `functools.partial`, return the name of the wrapped function.
    """
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


def as_completion(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """Return the sampled text in the form of its prompt: a text if the prompt is a text, a message if the prompt is a
    conversation.
    """
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
