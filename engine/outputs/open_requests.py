"""The open requests: samples that gain tokens, and scores that gain log-probs.

Also defines how the tokens of a sample are drawn (`DrawRecord`), tracks the streamed samples that gained tokens since
their last delta (`Grown`), and counts the bytes of all records (`RecordBudget`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, LOWEST_TEMPERATURE, SAMPLE
from ...kernels.edits import Editor, Rules
from ..commits import Commit
from ..grammars.masks import Place
from ..request import (
    KEPT_COUNTS,
    KEPT_IDS,
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
    new_columns,
)
from .stop_strings import StopStrings

BASES = ("processed", "temperature", "raw")
"""The distributions that log-probs can refer to. `DrawRecord.basis` is an index into this tuple."""


class DrawRecord(NamedTuple):
    """How the tokens of one sample are drawn.

    `seed`, `target`, `temperature`: as in `seeds`, `targets` and `temperatures` of `kernels.contract.Wanted`.
    `has_filters`, `top_k`, `top_p`, `min_p`: the filters, as in `Distribution`. `basis`: the distribution under which
    log-probs are computed, given as an index into `BASES`.
    `num_tops`: how many of the most probable tokens are recorded, in addition to the entropy. If `num_tops` is -1,
    neither tokens nor the entropy are recorded. `is_special`: whether filters apply, or the most probable tokens or
    targets are recorded. `has_targets`: whether log-probs of given tokens are recorded. `has_mask`: whether the tokens
    that could be drawn are recorded; without filters and edits, recording these tokens needs no computation.
    `edits_end`: from this position on, no logit is edited. `reads_tokens`: whether the edits depend on the
    sample's earlier tokens. `end`: the position after the last token that `max_tokens` allows.
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
    is_special: bool = False
    has_targets: bool = False
    has_mask: bool = False
    edits_end: int = 0
    reads_tokens: bool = False
    end: int = 2**62

    @classmethod
    def of(cls, params: SamplingParams, seed: int, num_prompt_tokens: int, rules: Rules | None) -> DrawRecord:
        """Return the draw record of a sample.

        `params`: parameters with `max_tokens` set. `seed`: the sample's own seed, unsigned 64-bit. `rules`: the edits
        of logits, or None.
        """
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
            params.has_filters or params.top_logprobs is not None or bool(params.target_token_ids),
            bool(params.target_token_ids),
            params.return_sampling_mask,
            num_prompt_tokens + rules.end if rules else 0,
            rules is not None and rules.reads_tokens,
            num_prompt_tokens + params.max_tokens,
        )

    @classmethod
    def of_scores(cls, distribution: Distribution) -> DrawRecord:
        """Return the draw record for a request that scores given tokens. Only the fields that describe the distribution
        are set.
        """
        filters = distribution.has_filters, distribution.top_k, distribution.top_p, distribution.min_p
        return cls(0, SAMPLE, divisor(distribution), *filters)


DRAW = np.dtype(list(zip(DrawRecord._fields, "q q f ? q f f b q ? ? ? q ? q".split(), strict=True)), align=True)
"""`DrawRecord` as a numpy dtype."""


def divisor(distribution: Distribution) -> float:
    """Return the float32 value by which logits are divided. Temperatures above the float32 range become infinity.

    For greedy sampling the divisor is 1.
    """
    value = 1.0 if distribution.is_greedy else max(distribution.temperature, LOWEST_TEMPERATURE)
    # For numbers above the float32 range, array("f") returns infinity, torch raises and numpy warns.
    return array("f", (value,))[0]


def as_signed(seed: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed


@dataclass(eq=False, slots=True)
class OpenSample:
    """An unfinished sample.

    `order`: (order of arrival of the request, sample index). `draw`: how tokens are drawn. `ending_tokens`: the tokens
    that end the sample. `editor`: edits the logits of the next token; None without edits. `place`: the progress of the
    sample in the text that its grammar restricts; None without a grammar. `logprobs`: None if not requested. `records`:
    the columns requested by `top_logprobs`, or None. `targets`, `target_ids`: the column requested by
    `target_token_ids`, and the target tokens (int64 [K]), or None. `kept`: the columns requested by
    `return_sampling_mask`, or None. `commits`: the commits under which tokens were drawn. Each commit comes with the
    index of the first token that was drawn under the commit. `old_kv`: as in `SampleOutput`, without the KV that the
    sample reads now. `old_kv_now`: the version of the weights that computed the oldest part of the KV, and the first
    token that was drawn after a commit kept the KV; None if the KV belongs to the current weights. `error`: a
    description of the error that ends the sample, or None. `joined`: whether the prompt is computed by the sequence of
    an earlier request. `num_told`: the number of tokens that deltas have reported; None if deltas were not requested.
    `num_drafted`, `num_accepted`: as in `SampleOutput`.
    """

    request: GenerateRequest
    index: int
    order: tuple[int, int]
    seed: int
    draw: DrawRecord
    ending_tokens: frozenset[int]
    editor: Editor | None
    stop_strings: StopStrings | None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] | None = field(default_factory=lambda: array("f"))
    commits: list[tuple[Commit, int]] = field(default_factory=list)
    old_kv: tuple[WeightSpan, ...] = ()
    old_kv_now: tuple[int, int] | None = None
    error: str | None = None
    stop_reason: int | str | None = None
    records: GrowingColumns | None = None
    targets: GrowingColumns | None = None
    target_ids: np.ndarray | None = None
    kept: GrowingColumns | None = None
    joined: bool = False
    num_told: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    place: Place | None = None

    @property
    def num_fed(self) -> int:
        """The number of tokens fed to the model: all tokens of the prompt and the sample, except the last one. Before
        the first draw, the number of fed tokens is 0.
        """
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1 if self.token_ids else 0

    @property
    def is_plain(self) -> bool:
        """Whether a token that does not end the sample changes only `token_ids`, `logprobs` and the state that `follow`
        updates.
        """
        records_nothing = self.kept is None and self.records is None and self.targets is None and self.num_told is None
        return records_nothing and self.stop_strings is None

    def follow(self, token_id: int) -> None:
        """Pass a drawn token to `editor` and `place`, on which the edits of the next token's logits depend."""
        if self.editor is not None:
            self.editor.append(token_id)
        if self.place is not None:
            self.place.token_ids.append(token_id)

    @property
    def record_bytes(self) -> int:
        """The size of the columns that `top_logprobs`, `target_token_ids` and `return_sampling_mask` requested."""
        return sum([each.num_bytes for each in (self.records, self.targets, self.kept) if each is not None])

    def keep_kv(self, version: int) -> None:
        """Record that the next tokens are drawn over the current KV, although the weights change. `version`: the
        version of the weights before the change.
        """
        if self.old_kv_now is None:
            self.old_kv_now = version, len(self.token_ids)

    def renew_kv(self) -> None:
        """Record that the next tokens are drawn over KV of the current weights."""
        self.old_kv, self.old_kv_now = self._old_kv_spans(), None

    def output(self, reason: FinishReason, num_hits: int, routed_experts: np.ndarray | None = None) -> SampleOutput:
        """Return the output of the sample in its current state.

        `num_hits`: the number of tokens that the sequence found in the cache when it first started. `routed_experts`:
        the experts of all tokens fed to the model.
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
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            old_kv=self._old_kv_spans(),
            routed_experts=routed_experts,
            **as_fields(self._columns()),
        )

    def take_delta(self) -> SampleDelta:
        """Return the tokens that no delta has reported yet. Deltas of the sample must have been requested."""
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
        """Return the columns of the tokens from `start` on."""
        columns = {} if self.logprobs is None else {LOGPROBS.name: np.array(self.logprobs[start:], LOGPROBS.dtype)}
        for each in self._recorded():
            columns |= each.arrays(start)
        return columns

    def _recorded(self) -> list[GrowingColumns]:
        return [each for each in (self.records, self.targets, self.kept) if each is not None]

    def _spans(self) -> tuple[WeightSpan, ...]:
        ends = [start for _, start in self.commits[1:]] + [len(self.token_ids)]
        spans = zip(self.commits, ends, strict=False)
        return tuple(WeightSpan(commit.version, start, end) for (commit, start), end in spans)

    def _old_kv_spans(self) -> tuple[WeightSpan, ...]:
        if self.old_kv_now is None or self.old_kv_now[1] == len(self.token_ids):
            return self.old_kv
        version, start = self.old_kv_now
        return (*self.old_kv, WeightSpan(version, start, len(self.token_ids)))


@dataclass(eq=False, slots=True)
class OpenScore:
    """An unfinished score request.

    `order`: (order of arrival of the request, 0). `rules`: the edits of logits, or None. `place`: the progress of the
    scored tokens in the text that their grammar restricts; None without a grammar. `columns`: as in `ScoreOutput`,
    filled as chunks are computed; empty until `allocate` is called, so that a waiting score needs no memory.
    `kept_ids`: the kept ids of each scored token, which `output` joins to the column `kept_token_ids`; empty unless
    kept ids are requested. `error`: a description of the error that ends the score, or None.
    """

    request: ScoreRequest
    order: tuple[int, int]
    rules: Rules | None
    place: Place | None = None
    columns: Columns = field(default_factory=dict)
    kept_ids: list[np.ndarray] = field(default_factory=list)
    error: str | None = None

    @property
    def num_rows(self) -> int:
        """The number of scored tokens."""
        return len(self.request.token_ids) - self.request.start

    @property
    def record_bytes(self) -> int:
        """The size that the columns have after `allocate`, plus the size of the kept ids computed so far."""
        fixed = self.num_rows * sum(values.nbytes for values in self._new_columns(1).values())
        num_kept = int(self.columns[KEPT_COUNTS.name].sum(dtype=np.int64)) if self.kept_ids else 0
        return fixed + num_kept * np.dtype(KEPT_IDS.dtype).itemsize

    def allocate(self) -> None:
        """Allocate the columns, with no log-probs computed yet."""
        self.columns = self._new_columns(self.num_rows)
        if (no_ids := self.columns.pop(KEPT_IDS.name, None)) is not None:
            self.kept_ids = [no_ids] * self.num_rows

    def put(self, end: int, found: Sequence[np.ndarray]) -> None:
        """Record the columns of the scored tokens before row `end`, in the form of `StepResults.scores`, but without
        the kept ids. After this call, `record_bytes` already includes the size of the kept ids of these tokens, which
        `keep` records later.
        """
        rows = slice(end - len(found[0]), end)
        for column, values in zip(self.columns.values(), found, strict=True):
            column[rows] = values

    def keep(self, end: int, counts: np.ndarray, ids: np.ndarray) -> None:
        """Record the kept ids of the scored tokens before row `end`. `counts`: the number of kept ids of each token.
        `ids`: the kept ids of all these tokens, concatenated.
        """
        self.kept_ids[end - len(counts) : end] = np.split(ids, counts.cumsum()[:-1])

    def output(self, reason: FinishReason, version: int, routed_experts: np.ndarray | None = None) -> ScoreOutput:
        """Return the output of the score. Unless the finish reason is `stop`, the output has no log-probs.

        `version`: the version of the weights that computed the log-probs. `routed_experts`: the experts of all tokens
        fed to the model.
        """
        columns = self.columns if reason == "stop" else self._new_columns(0)
        rows = len(columns[LOGPROBS.name])
        if rows and self.kept_ids:
            columns = {**columns, KEPT_IDS.name: np.concatenate(self.kept_ids)}
        return ScoreOutput(
            request_id=self.request.id,
            finish_reason=reason,
            weight_versions=(WeightSpan(version, 0, rows),) if rows else (),
            error=self.error,
            routed_experts=routed_experts,
            **as_fields(columns),
        )

    def _new_columns(self, rows: int) -> Columns:
        request, targets = self.request, self.request.target_token_ids
        num_targets = 0 if targets is None else targets.shape[1]
        return new_columns(request.top_logprobs, num_targets, request.return_sampling_mask, rows)


class Grown:
    """The streamed samples that gained tokens since their last delta."""

    def __init__(self) -> None:
        self._samples: list[OpenSample] = []

    def follow(self, samples: Iterable[OpenSample]) -> None:
        """Include `samples` in the deltas from now on, beginning with the tokens drawn so far."""
        for sample in samples:
            if sample.num_told is None:
                sample.num_told = 0
                self._samples += [sample] * bool(sample.token_ids)

    def note(self, sample: OpenSample) -> None:
        """Record that a streamed sample got a token."""
        self._samples.append(sample)

    def take(self, is_open: Callable[[OpenSample], bool]) -> list[SampleDelta]:
        """Return the tokens drawn for open samples since the last call."""
        grown, self._samples = self._samples, []
        return [sample.take_delta() for sample in dict.fromkeys(grown) if is_open(sample)]


class RecordBudget:
    """Counts the bytes that the records of unfinished samples and scores take, and chooses the sample or score that
    ends if the bytes exceed a limit.

    The records of a sample are the columns that `top_logprobs`, `target_token_ids` and `return_sampling_mask` request.
    The records of a score are its columns. `limit`: maximum of `num_bytes`, the bytes of all records. `num_errors`: the
    number of samples and scores that were chosen to end.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.num_errors = 0
        self._held: dict[OpenSample | OpenScore, int] = {}

    def hold(self, entry: OpenSample | OpenScore) -> None:
        """Count the current records of a sample, or the columns of a score. The new count replaces the previous one."""
        num_bytes = entry.record_bytes
        self.num_bytes += num_bytes - self._held.get(entry, 0)
        self._held[entry] = num_bytes

    def release(self, entry: OpenSample | OpenScore) -> None:
        """Stop counting a sample or a score that has ended."""
        self.num_bytes -= self._held.pop(entry, 0)

    def take_excess(self) -> OpenSample | OpenScore | None:
        """Return the sample or score that must end, and set its `error`; None if the records are within the limit.

        The chosen sample or score has the most record bytes. If several samples or scores have equally many bytes, the
        last one to arrive is chosen.
        """
        if self.num_bytes <= self.limit:
            return None
        entry = max(self._held, key=lambda each: (self._held[each], each.order))
        what = "score" if isinstance(entry, OpenScore) else "sample"
        entry.error = (
            f"records: the records of unfinished requests take {self.num_bytes} bytes (limit {self.limit}, "
            f"max_record_bytes), and this {what}'s {self._held[entry]} bytes are the most; record less, request fewer "
            "tokens, or raise the limit"
        )
        self.num_errors += 1
        return entry
