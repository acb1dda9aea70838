"""Infer the likely causes of the differences between an engine and a trainer from measurements alone.

An engine does not report its dtype, so the dtype is inferred from the size of the differences. Rounding to bfloat16,
float16 or float32 changes log-probs by typical amounts. To find the typical amounts, the trainer computes the same
checkpoint in all three dtypes. The trainer's log-probs in float32 count as exact. For each token, and for bfloat16 and
float16, the difference between the engine's log-prob and the exact log-prob is divided by the difference between the
trainer's log-prob in this dtype and the exact log-prob. The division is necessary because rounding changes the
log-probs of some tokens much more than the log-probs of other tokens. The geometric mean of the ratios of all tokens
has a known spread: the logarithm of the ratio of two independent normal errors has the standard deviation pi/2.
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
"""The largest ratio of differences that rounding alone explains, namely the ratio of an engine that rounds twice as
often as transformers. If the ratio is certainly larger, the engine has different weights.
"""
SPREADS = 3.0
"""A ratio counts as certainly larger than a limit if it exceeds the limit by this many standard deviations. If an
engine's true ratio equals the limit, one in 700 audits wrongly reports the cause `weights`.
"""
CLEARLY = 2.0
"""A distribution is clearly the engine's distribution if the differences under every other distribution are at least
this many times larger.
"""
_CERTAIN = -0.05
"""Tokens with a higher log-prob are left out: rounding hardly moves a probability near 1."""
_FINER = {
    dtype: f". If the engine was started in {finer}, its weights differ slightly: compare versions"
    for dtype, finer in (("bfloat16", "float16 or float32"), ("float16", "float32"))
}
_OF_FLOAT32 = 2.0**-16
"""The rounding step of float32, as a fraction of the rounding step of bfloat16."""


@dataclass(frozen=True)
class Ratio:
    """The engine's differences from exact log-probs, divided by the differences of a trainer that computes in one
    dtype.

    `value`: the geometric mean of the ratios of all tokens. `low`, `high`: bounds of the true value. Their logarithms
    are the logarithm of `value` minus and plus `SPREADS` standard deviations.
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
    """The conclusions from the sizes of the differences between engine and trainer.

    `dtype`: the dtype in which the engine computes; None if the engine has other weights than the checkpoint.
    `distribution`: the distribution under which the engine computes log-probs. `is_clear`: whether every other
    distribution fits clearly worse. `distance`: the median difference between the engine's log-probs and a float32
    trainer's log-probs. `ratio`: the `Ratio` of the engine to a trainer that computes in `dtype`, or in bfloat16 if
    `dtype` is None.
    """

    dtype: str | None
    distribution: DistributionName
    is_clear: bool
    distance: float
    ratio: Ratio


@dataclass(frozen=True)
class Change:
    """How the greedy samples of the same requests differ between two conditions.

    `num_tokens`: number of compared tokens. `num_other`: number of positions with different tokens. `num_bits`: number
    of positions with different log-prob bits, among the positions before the first different token.
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

    `told`: the engine's log-probs of all tokens under the conditions in which each request runs alone and misses the
    cache, float32 [tokens]. `is_greedy`: bool [tokens], whether each token belongs to a greedy sample. The log-prob of
    a token of a greedy sample is the same under every distribution. `by_dtype`: the trainer's log-probs of the same
    tokens, float32 [tokens], in bfloat16, float16 and float32.

    Raise ConfigError if every token of a non-greedy sample has a probability near 1, because such tokens show no
    difference.
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
    """For each token, compute the ratio of |engine - exact| to |trainer - exact|. Return the geometric mean of these
    ratios, with its bounds. A difference that is smaller than the rounding step of
    the exact value counts as one rounding step. Tokens that the trainer's filters exclude are left out.
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
    """Return the likely causes. `dtype`: the trainer's dtype. `changes`: see `_of_conditions`. `is_exact`: whether all
    log-probs of the first condition have the trainer's bits. `temperature`: the temperature of the samples that are not
    greedy.
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
    """Return the causes that follow from comparing the conditions. `changes`: how the samples differ from the samples
    of requests that run alone and miss the cache, under three conditions: `again` (the requests are repeated), `cache`
    (the requests hit the cache) and `batch` (the requests run together with other requests).

    If even the repeated requests have different bits, the differences under the other conditions prove nothing.
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
