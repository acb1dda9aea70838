"""What an accepted request is while it is open: samples that grow, or scores that fill up.

Also how the tokens of a sample are drawn (`DrawRecord`), and which samples have grown since their deltas were told
(`Grown`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, LOWEST_TEMPERATURE, SAMPLE
from ..request import (
    LOGPROBS,
    Columns,
    Distribution,
    FinishReason,
    GenerateRequest,
    GrowingColumns,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    WeightSpan,
    as_fields,
    cut_columns,
    new_columns,
)
from .stop_strings import StopStrings

BASES = ("processed", "temperature", "raw")
"""What log-probs can be of, in the order of the numbers of `DrawRecord.basis`."""


class DrawRecord(NamedTuple):
    """`seed`, `target`, `temperature`: those of `Wanted`. `has_filters`, `top_k`, `top_p`, `min_p`: the filters of
    `Distribution`. `basis`: the place in BASES of what log-probs are of. `num_tops`: how many of the most probable
    tokens are listed beside the entropy, -1 if neither is recorded. `first_free`: the first position where no token is
    banned. `end`: the first position beyond `max_tokens`.
    """

    seed: int = 0
    target: int = SAMPLE
    temperature: float = 1.0
    has_filters: bool = False
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    basis: int = 0
    num_tops: int = -1
    first_free: int = 0
    end: int = 2**62

    @classmethod
    def of(cls, params: SamplingParams, seed: int, num_prompt_tokens: int, bans: bool) -> DrawRecord:
        """That of a sample with `max_tokens` and an unsigned 64-bit seed. `bans`: some tokens are banned at first."""
        assert params.max_tokens is not None
        temperature = divisor(params)
        return cls(
            as_signed(seed),
            GREEDY if params.is_greedy else SAMPLE,
            temperature,
            params.has_filters,
            params.top_k,
            params.top_p,
            params.min_p,
            BASES.index(params.logprobs or "processed"),
            -1 if params.top_logprobs is None else params.top_logprobs,
            num_prompt_tokens + (params.min_tokens if bans else 0),
            num_prompt_tokens + params.max_tokens,
        )

    @classmethod
    def of_scores(cls, distribution: Distribution) -> DrawRecord:
        """What counts for tokens that are given: the distribution."""
        filters = distribution.has_filters, distribution.top_k, distribution.top_p, distribution.min_p
        return cls(0, SAMPLE, divisor(distribution), *filters)


DRAW = np.dtype(list(zip(DrawRecord._fields, "q q f ? q f f b q q q".split(), strict=True)), align=True)
"""The same as an element of an array."""


def divisor(distribution: Distribution) -> float:
    """What logits are divided by, a float32: infinity for a temperature beyond it. Greedy rows keep theirs."""
    value = 1.0 if distribution.is_greedy else max(distribution.temperature, LOWEST_TEMPERATURE)
    # array("f") makes that infinity; torch refuses such a number, and numpy warns.
    return array("f", (value,))[0]


def as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed


@dataclass(frozen=True, eq=False, slots=True)
class Commit:
    """One set of weights, from the commit that brought it to the next one; two may have the same version."""

    version: int


@dataclass(eq=False, slots=True)
class OpenSample:
    """One completion in the making.

    `draw`: how its tokens are drawn. `records`: what `top_logprobs` asked for. `ending_tokens`: those it stops with.
    `banned`: those again, for draws before `min_tokens`. `logprobs`: None if not asked for. `commits`: each set of
    weights that produced tokens of it, and how many tokens there were before. `error` says what went wrong, if it ends
    with that. `joined`: its prompt is computed by another request. `num_told`: the tokens that deltas have told of;
    None if deltas were not asked for.
    """

    request: GenerateRequest
    index: int
    order: tuple[int, int]
    seed: int
    draw: DrawRecord
    ending_tokens: frozenset[int]
    banned: array[int]
    stop_strings: StopStrings | None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] | None = field(default_factory=lambda: array("f"))
    commits: list[tuple[Commit, int]] = field(default_factory=list)
    error: str | None = None
    stop_reason: int | str | None = None
    records: GrowingColumns | None = None
    joined: bool = False
    num_told: int | None = None

    @property
    def num_fed(self) -> int:
        """The tokens of prompt and sample that were fed to the model: all but the last; 0 while there is none."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1 if self.token_ids else 0

    def output(self, reason: FinishReason, num_hits: int, routed_experts: np.ndarray | None = None) -> SampleOutput:
        """The sample as it is now. `num_hits`: tokens that its sequence found in the cache when it was admitted.
        `routed_experts`: those of all that was fed.
        """
        return SampleOutput(
            request_id=self.request.id,
            index=self.index,
            token_ids=self.token_ids.tolist(),
            finish_reason=reason,
            seed=self.seed,
            num_cached_tokens=len(self.request.prompt_token_ids) if self.joined else num_hits,
            weight_versions=self._spans(),
            error=self.error,
            stop_reason=self.stop_reason,
            routed_experts=routed_experts,
            **as_fields(self._columns()),
        )

    def take_delta(self) -> SampleDelta:
        """What no delta has told of yet, of a sample whose deltas were asked for."""
        assert self.num_told is not None
        start, self.num_told = self.num_told, len(self.token_ids)
        return SampleDelta(
            self.request.id,
            self.index,
            start,
            self.token_ids[start:].tolist(),
            **as_fields(self._columns(start)),
        )

    def _columns(self, start: int = 0) -> Columns:
        """Those of the tokens from `start` on."""
        columns = {} if self.logprobs is None else {LOGPROBS.name: np.array(self.logprobs[start:], LOGPROBS.dtype)}
        return columns if self.records is None else columns | self.records.arrays(start)

    def _spans(self) -> tuple[WeightSpan, ...]:
        ends = [start for _, start in self.commits[1:]] + [len(self.token_ids)]
        spans = zip(self.commits, ends, strict=False)
        return tuple(WeightSpan(commit.version, start, end) for (commit, start), end in spans)


@dataclass(eq=False, slots=True)
class OpenScore:
    """A score request in the making, whose columns fill up as chunks are computed.

    `columns`: those of `ScoreOutput`.
    """

    request: ScoreRequest
    columns: Columns

    @classmethod
    def of(cls, request: ScoreRequest) -> OpenScore:
        """One of which nothing is computed."""
        return cls(request, new_columns(True, request.top_logprobs, len(request.token_ids) - 1))

    def output(self, reason: FinishReason, version: int, routed_experts: np.ndarray | None = None) -> ScoreOutput:
        """All of its log-probs, which the weights of `version` produced; none unless it is complete. `routed_experts`:
        those of all that was fed.
        """
        columns = self.columns if reason == "stop" else cut_columns(self.columns, 0, 0)
        rows = len(columns[LOGPROBS.name])
        return ScoreOutput(
            request_id=self.request.id,
            finish_reason=reason,
            weight_versions=(WeightSpan(version, 0, rows),) if rows else (),
            routed_experts=routed_experts,
            **as_fields(columns),
        )


class Grown:
    """The streamed samples that have new tokens."""

    def __init__(self) -> None:
        self._samples: list[OpenSample] = []

    def follow(self, samples: Iterable[OpenSample]) -> None:
        """Tell how these grow from now on, first of all what they have."""
        for sample in samples:
            if sample.num_told is None:
                sample.num_told = 0
                self._samples += [sample] * bool(sample.token_ids)

    def note(self, sample: OpenSample) -> None:
        """A sample that is followed has got a token."""
        self._samples.append(sample)

    def take(self, is_open: Callable[[OpenSample], bool]) -> list[SampleDelta]:
        """What the open ones have got since this was called last."""
        grown, self._samples = self._samples, []
        return [sample.take_delta() for sample in dict.fromkeys(grown) if is_open(sample)]
