"""The likely causes of differences between an engine and a trainer, from measurements alone.

An engine does not tell its dtype, so the size of the differences does: rounding to bfloat16, float16 or float32 moves
log-probs by typical amounts, which the same checkpoint shows in these dtypes. The engine's difference from exact
log-probs and the trainer's are compared token by token, because rounding moves some tokens much more than others. The
geometric mean of these ratios has a known spread: the logarithm of the ratio of two independent normal errors has the
standard deviation pi/2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, pi, sqrt

import numpy as np

from trueroll.errors import ConfigError

from ..auditing import Cause
from .trainer import DISTRIBUTIONS, DistributionName

MOST_ROUNDING = sqrt(2.0)
"""The largest ratio of differences that rounding alone explains: that of an engine that rounds twice as often as
transformers. If the ratio is certainly larger, the engine has other weights.
"""
SPREADS = 3.0
"""A ratio is certainly larger than a limit if it is larger by this many standard deviations. For an engine at the
limit, one of 700 audits names `weights`.
"""
CLEARLY = 2.0
"""A distribution is the engine's if the differences under every other distribution are this many times larger."""
_CERTAIN = -0.05
"""Tokens with a higher log-prob are left out: rounding hardly moves a probability near 1."""
_FINER = {
    dtype: f". If the engine was started in {finer}, its weights differ slightly: compare versions"
    for dtype, finer in (("bfloat16", "float16 or float32"), ("float16", "float32"))
}
_OF_FLOAT32 = 2.0**-16
"""The rounding step of float32, in those of bfloat16."""


@dataclass(frozen=True)
class Ratio:
    """How many times larger the engine's differences from exact log-probs are than the trainer's in one dtype.

    `value`: the geometric mean of the tokens' ratios. `low`, `high`: `SPREADS` standard deviations below and above it.
    """

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.value:.2g} ({self.low:.2g} to {self.high:.2g})"


@dataclass(frozen=True)
class Verdict:
    """What the sizes of the differences say.

    `dtype`: the dtype in which the engine computes; None if the engine's weights are other weights. `distribution`: the
    distribution of the engine's log-probs. `is_clear`: whether no other distribution comes near. `distance`: the median
    |engine - trainer in float32|. `ratio`: to the trainer in `dtype`, or in bfloat16 for other weights.
    """

    dtype: str | None
    distribution: DistributionName
    is_clear: bool
    distance: float
    ratio: Ratio


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

    `told`: the engine's log-probs of all tokens of misses alone, float32 [tokens]. `is_greedy`: whether each
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
    own = {dtype: each[distribution][is_open] for dtype, each in by_dtype.items()}
    ratios = {name: _ratio(told[is_open], own[name], own["float32"]) for name in ("bfloat16", "float16")}
    ratios["float32"] = ratios["bfloat16"].times(1 / _OF_FLOAT32)
    is_other = ratios["bfloat16"].low > MOST_ROUNDING
    nearest = "bfloat16" if is_other else min(ratios, key=lambda name: abs(log(ratios[name].value)))
    distance = _median(told[is_open], own["float32"])
    return Verdict(None if is_other else nearest, distribution, is_clear, distance, ratios[nearest])


def _median(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.median(np.nan_to_num(np.abs(one - other), nan=inf, posinf=inf)))


def _ratio(engine: np.ndarray, trainer: np.ndarray, exact: np.ndarray) -> Ratio:
    """Compare |engine - exact| with |trainer - exact|, each at least the rounding step of the exact value. Tokens that
    the trainer's filters exclude are left out.
    """
    is_kept = np.isfinite(exact) & np.isfinite(trainer)
    exact = exact[is_kept]
    step = np.spacing(np.abs(exact))
    own, other = (np.log(np.maximum(np.abs(each[is_kept] - exact), step)) for each in (trainer, engine))
    middle, spread = float(np.mean(other - own)), max(pi / 2, float(np.std(other - own))) / sqrt(len(exact))
    return Ratio(exp(middle), exp(middle - SPREADS * spread), exp(middle + SPREADS * spread))


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
            f"ones, {verdict.ratio} times as large as those of transformers): its kernels round in other places than "
            "the trainer's. Weights that differ by less are not distinguishable from rounding, unless the engine is "
            "started in float32. Correct the ratio in the loss, or serve and train with one arithmetic (`trueroll "
            "serve`, `align`)"
        )
        causes.append(Cause("rounding", text))
    return tuple(causes)


def _of_sizes(verdict: Verdict, dtype: str, temperature: float) -> list[Cause]:
    if verdict.dtype is None:
        text = (
            f"the differences from exact log-probs (median {verdict.distance:.2g} nats) are {verdict.ratio} times as "
            f"large as rounding to bfloat16 makes them, which explains at most {MOST_ROUNDING:.2g} times: the engine "
            "serves other weights than the checkpoint (another model or version, another config.json, an adapter, "
            "quantized weights or KV cache); compare the engine's model and version with the trainer's"
        )
        return [Cause("weights", text)]
    causes = []
    if verdict.dtype != dtype:
        text = (
            f"the differences have the size of {verdict.dtype} (median {verdict.distance:.2g} nats from exact "
            f"log-probs), but the checkpoint's dtype is {dtype}; start the engine with --dtype {dtype}, or train in "
            f"{verdict.dtype}{_FINER.get(verdict.dtype, '')}"
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
