"""The likely causes of differences between an engine and a trainer, from measurements alone.

An engine does not tell its dtype, so the size of the differences does: rounding to bfloat16, float16 or float32 moves
log-probs by typical amounts, which the same checkpoint shows in these dtypes. Medians are compared, so that a few
tokens on the edge of a filter do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Literal, TypeAlias

import numpy as np

from trueroll.errors import ConfigError

from .trainer import DISTRIBUTIONS, DistributionName

CauseName: TypeAlias = Literal["weights", "dtype", "distribution", "nondeterminism", "cache", "batch", "rounding"]
BEYOND_ROUNDING = 4.0
"""Differences that are this many times larger than those of bfloat16 come from other weights. Engines that round in
other places than transformers stay well below.
"""
CLEARLY = 2.0
"""A distribution is the engine's if the differences under every other distribution are this many times larger."""
_CERTAIN = -0.05
"""Tokens with a higher log-prob are left out: rounding hardly moves a probability near 1."""
_OF_FLOAT32 = 2.0**-16
"""The rounding step of float32, in those of bfloat16."""


@dataclass(frozen=True)
class Cause:
    """A likely cause. `text`: what was measured, and what to do."""

    name: CauseName
    text: str


@dataclass(frozen=True)
class Verdict:
    """What the sizes of the differences say.

    `dtype`: the dtype in which the engine computes; None if the engine's weights are other weights. `distribution`: the
    distribution of the engine's log-probs. `is_clear`: whether no other distribution comes near. `distance`: the median
    |engine - trainer in float32|. `noise`: the same for the trainer in bfloat16.
    """

    dtype: str | None
    distribution: DistributionName
    is_clear: bool
    distance: float
    noise: float


@dataclass(frozen=True)
class Change:
    """How greedy samples under one condition differ from the same requests under another condition.

    `num_tokens`: number of compared tokens; `num_other`: number of positions with another token; `num_bits`: number of
    positions before the first other token with other log-prob bits.
    """

    num_tokens: int
    num_other: int
    num_bits: int

    def __bool__(self) -> bool:
        return bool(self.num_other or self.num_bits)

    def __str__(self) -> str:
        return f"{self.num_other} of {self.num_tokens} greedy tokens and the bits of {self.num_bits} log-probs change"


def compare(
    before: Sequence[tuple[Sequence[int], np.ndarray]], after: Sequence[tuple[Sequence[int], np.ndarray]]
) -> Change:
    """Compare the samples (token ids, log-probs in float32) of the same requests under two conditions."""
    tokens, other, bits = 0, 0, 0
    for (old, old_probs), (new, new_probs) in zip(before, after, strict=True):
        same = [a == b for a, b in zip(old, new, strict=False)]
        tokens += max(len(old), len(new))
        other += max(len(old), len(new)) - sum(same)
        shared = next((i for i, is_same in enumerate(same) if not is_same), len(same))
        bits += int((old_probs[:shared].view(np.int32) != new_probs[:shared].view(np.int32)).sum())
    return Change(tokens, other, bits)


def judge(
    told: np.ndarray, is_greedy: np.ndarray, by_dtype: Mapping[str, Mapping[DistributionName, np.ndarray]]
) -> Verdict:
    """Find the dtype and the distribution of an engine's log-probs.

    `told`: the engine's log-probs of all tokens of the first condition, float32 [tokens]. `is_greedy`: whether each
    token is of a greedy sample: its log-prob has the same value under every distribution, bool [tokens]. `by_dtype`:
    the trainer's log-probs of the same tokens, float32 [tokens], in bfloat16, float16 and float32.

    Raise ConfigError if the trainer is almost certain of every token that is not greedy.
    """
    exact = by_dtype["float32"]
    is_open = exact["raw"] < _CERTAIN
    is_drawn = is_open & ~is_greedy
    if not is_drawn.any():
        raise ConfigError("prompts: the model is almost certain of every sampled token; give prompts with open ends")
    by_name = {
        name: min(_median(told[is_drawn], each[name][is_drawn]) for each in by_dtype.values()) for name in DISTRIBUTIONS
    }
    distribution = min(DISTRIBUTIONS, key=by_name.__getitem__)
    others = [distance for name, distance in by_name.items() if name != distribution]
    is_clear = min(others) > CLEARLY * by_name[distribution]
    right = exact[distribution][is_open]
    noises = {name: _median(by_dtype[name][distribution][is_open], right) for name in ("bfloat16", "float16")}
    noise = noises["bfloat16"]
    noises["float32"] = noise * _OF_FLOAT32
    distance = _median(told[is_open], right)
    if distance > BEYOND_ROUNDING * noise:
        return Verdict(None, distribution, is_clear, distance, noise)
    dtype = min(noises, key=lambda name: _apart(distance, noises[name])) if distance else "float32"
    return Verdict(dtype, distribution, is_clear, distance, noise)


def _median(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.median(np.nan_to_num(np.abs(one - other), nan=inf, posinf=inf)))


def _apart(distance: float, noise: float) -> float:
    """Return how many times one is larger than the other, as a logarithm."""
    return abs(log(distance / noise)) if 0 < noise < inf else inf


def find_causes(
    verdict: Verdict, dtype: str, changes: Mapping[str, Change], is_exact: bool, temperature: float
) -> tuple[Cause, ...]:
    """Return the likely causes. `dtype`: the trainer's. `changes`: `again`, `cache` and `batch`, see `_of_conditions`.
    `is_exact`: whether all log-probs of the first condition have the trainer's bits. `temperature`: of the samples that
    are not greedy.
    """
    causes = [*_of_sizes(verdict, dtype, temperature), *_of_conditions(changes)]
    if not is_exact and verdict.dtype == dtype and not any(cause.name == "nondeterminism" for cause in causes):
        text = (
            f"the engine's log-probs are off by the rounding of {dtype} (median {verdict.distance:.2g} nats from exact "
            f"ones; transformers: {verdict.noise:.2g}): its kernels round in other places than the trainer's; correct "
            "the ratio in the loss, or serve and train with one arithmetic (`trueroll serve`, `align`)"
        )
        causes.append(Cause("rounding", text))
    return tuple(causes)


def _of_sizes(verdict: Verdict, dtype: str, temperature: float) -> list[Cause]:
    if verdict.dtype is None:
        text = (
            f"the median difference is {verdict.distance:.2g} nats, but rounding to bfloat16 explains only "
            f"{verdict.noise:.2g}: the engine serves other weights than the checkpoint (another model or version, an "
            "adapter, quantized weights); compare the engine's model and version with the trainer's"
        )
        return [Cause("weights", text)]
    causes = []
    if verdict.dtype != dtype:
        text = (
            f"the differences have the size of {verdict.dtype} (median {verdict.distance:.2g} nats from exact "
            f"log-probs), but the checkpoint's dtype is {dtype}; start the engine with --dtype {dtype}, or train in "
            f"{verdict.dtype}. If the engine's dtype is {dtype}, its weights differ slightly: compare versions"
        )
        causes.append(Cause("dtype", text))
    if verdict.distribution == "raw" and verdict.is_clear:
        text = (
            f"samples at temperature {temperature:g} come with log-probs at temperature 1, not with those of the "
            "distribution from which tokens are drawn; start vLLM with --logprobs-mode processed_logprobs, SGLang "
            "without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1"
        )
        causes.append(Cause("distribution", text))
    return causes


def _of_conditions(changes: Mapping[str, Change]) -> list[Cause]:
    """Return the causes that the conditions show. `changes`: `again` (the same misses alone, once more), `cache` (hits
    and misses alone), `batch` (misses in company and alone).

    If even the same misses alone have other bits, the other changes prove nothing.
    """
    if changes["again"]:
        text = (
            f"the same requests, repeated alone, give other results ({changes['again']}); look for atomics in kernels"
        )
        return [Cause("nondeterminism", f"{text}, speculative decoding, or other users of the server")]
    causes = []
    if changes["cache"]:
        text = f"hits of the prefix cache give other results than misses ({changes['cache']})"
        causes.append(
            Cause(
                "cache",
                f"{text}; turn the prefix cache off (vLLM: --no-enable-prefix-caching, SGLang: "
                "--disable-radix-cache), or serve with trueroll, in which hits have the bits of misses",
            )
        )
    if changes["batch"]:
        text = f"other requests in the batch change results ({changes['batch']})"
        causes.append(
            Cause(
                "batch",
                f"{text}; turn on batch invariance (vLLM: VLLM_BATCH_INVARIANT=1, SGLang: "
                "--enable-deterministic-inference), or serve with trueroll",
            )
        )
    return causes
