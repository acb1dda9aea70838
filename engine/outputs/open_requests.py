"""What an accepted request is while it is open: samples that grow, or scores that fill up, and what becomes of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..columns import LOGPROBS, Columns, GrowingColumns, cut, fields, new_columns
from ..request import FinishReason, GenerateRequest, SampleDelta, SampleOutput, ScoreOutput, ScoreRequest, WeightSpan
from .draw_records import DrawRecord
from .stop_strings import StopStrings


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
    None if nobody asked for deltas.
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

    def append(self, token_id: int, logprob: float, commit: Commit, record: Sequence[bytes] | None = None) -> None:
        """Records a token that the weights of `commit` produced. `record`: of each of `records`, if these are kept."""
        if not self.commits or self.commits[-1][0] is not commit:
            self.commits.append((commit, len(self.token_ids)))
        self.token_ids.append(token_id)
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        if self.records is not None and record is not None:
            self.records.append(record)

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
            **fields(self._columns()),
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
            **fields(self._columns(start)),
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
        columns = self.columns if reason == "stop" else cut(self.columns, 0, 0)
        rows = len(columns[LOGPROBS.name])
        return ScoreOutput(
            request_id=self.request.id,
            finish_reason=reason,
            weight_versions=(WeightSpan(version, 0, rows),) if rows else (),
            routed_experts=routed_experts,
            **fields(columns),
        )
