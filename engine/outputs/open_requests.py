"""What an accepted request is while it is open: samples that grow, or scores that fill up, and what becomes of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from ..request import FinishReason, GenerateRequest, SampleDelta, SampleOutput, ScoreOutput, ScoreRequest, WeightSpan
from .draw_records import DrawRecord
from .stop_strings import StopStrings
from .tops import Top, TopColumns


@dataclass(frozen=True, eq=False, slots=True)
class Commit:
    """One set of weights, from the commit that brought it to the next one; two may have the same version."""

    version: int


@dataclass(eq=False, slots=True)
class OpenSample:
    """One completion in the making.

    `draw`: how its tokens are drawn. `ending_tokens`: those it stops with. `banned`: those again, for draws before
    `min_tokens`. `logprobs`: None if not asked for. `commits`: each set of weights that produced tokens of it, and how
    many tokens there were before. `error` says what went wrong, if it ends with that. `joined`: its prompt is computed
    by another request. `num_told`: the tokens that deltas have told of; None if nobody asked for deltas.
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
    tops: TopColumns | None = None
    joined: bool = False
    num_told: int | None = None

    def append(self, token_id: int, logprob: float, commit: Commit, top: Top | None = None) -> None:
        """Records a token that the weights of `commit` produced."""
        if not self.commits or self.commits[-1][0] is not commit:
            self.commits.append((commit, len(self.token_ids)))
        self.token_ids.append(token_id)
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        if self.tops is not None and top is not None:
            self.tops.append(top)

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
            logprobs=None if self.logprobs is None else np.array(self.logprobs, np.float32),
            finish_reason=reason,
            seed=self.seed,
            num_cached_tokens=len(self.request.prompt_token_ids) if self.joined else num_hits,
            weight_versions=self._spans(),
            error=self.error,
            stop_reason=self.stop_reason,
            routed_experts=routed_experts,
            **({} if self.tops is None else self.tops.arrays()),
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
            None if self.logprobs is None else np.array(self.logprobs[start:], np.float32),
            **({} if self.tops is None else self.tops.arrays(start)),
        )

    def _spans(self) -> tuple[WeightSpan, ...]:
        ends = [start for _, start in self.commits[1:]] + [len(self.token_ids)]
        spans = zip(self.commits, ends, strict=False)
        return tuple(WeightSpan(commit.version, start, end) for (commit, start), end in spans)


@dataclass(eq=False, slots=True)
class OpenScore:
    """A score request in the making, whose columns fill up as chunks are computed.

    `columns`: `logprobs`, and with `top_logprobs` also `entropy`, `top_token_ids` and `top_logprobs` of `ScoreOutput`.
    """

    request: ScoreRequest
    columns: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, request: ScoreRequest) -> OpenScore:
        """One of which nothing is computed."""
        rows, k = len(request.token_ids) - 1, request.top_logprobs
        columns = (np.zeros(rows, np.float32),)
        if k is not None:
            tops = np.zeros(rows, np.float32), np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32)
            columns += tops
        return cls(request, columns)

    def output(self, reason: FinishReason, version: int, routed_experts: np.ndarray | None = None) -> ScoreOutput:
        """All of its log-probs, which the weights of `version` produced; none unless it is complete. `routed_experts`:
        those of all that was fed.
        """
        logprobs, *tops = self.columns if reason == "stop" else [column[:0] for column in self.columns]
        spans = (WeightSpan(version, 0, len(logprobs)),) if len(logprobs) else ()
        return ScoreOutput(self.request.id, logprobs, reason, spans, *tops, routed_experts=routed_experts)
