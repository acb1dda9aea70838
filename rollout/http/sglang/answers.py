"""Answers of `/generate` in SGLang's form: whole, or as a stream of events. Each event repeats the whole answer so far.

Promises: the total size of all events of a stream is at most about `GROWTH` + 1 times the size of the last event.
Therefore, the cost of a stream does not grow with the square of its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....engine.request import Columns, SampleOutput, ScoreOutput, WeightSpan, columns_of
from ..answers import Binary, Rows, TokenBytes, rows
from ..logprobs import numbers, top_rows
from ..pieces import Piece, Usage, named_spans

GROWTH = 8
"""A stream sends another event once the answer has grown by 1 / `GROWTH` since the last event."""
ENTRY_BYTES = TokenBytes.ID + TokenBytes.NUMBER + 8
"""Estimated size of a log-prob with its token, in bytes."""


@dataclass
class _Growing:
    """The part of a streamed sample that has arrived. `num_told`: number of tokens in the last event."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parts: list[Columns] = field(default_factory=list)
    num_told: int = 0

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        named = dict(logprobs=piece.logprobs, top_token_ids=piece.top_token_ids, top_logprobs=piece.top_logprobs)
        self.parts.append({name: values for name, values in named.items() if values is not None} | piece.records)

    @property
    def is_due(self) -> bool:
        """Return whether the sample has grown enough for another event."""
        return len(self.token_ids) - self.num_told > self.num_told // GROWTH

    def columns(self) -> Columns:
        self.parts = [{name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}]
        return self.parts[0]


@dataclass(frozen=True)
class GenerateForm:
    """Writes samples in SGLang's form.

    `names`: the name of each prompt's request. `prompts`: the prompts. `has_logprobs`: whether answers have log-probs.
    `start`: index of the first prompt token in the answer's list of log-probs. `num_top`: number of most probable
    tokens per position. `scores`: for each prompt, the scores of the tokens after `start`, or None. `experts_start`:
    index of the first token for which the answer has routed experts. `num_samples`: number of samples per prompt.
    `is_list`: whether the answer is a list. `only_scores`: whether the request only scores its prompts.
    """

    names: list[str]
    prompts: list[list[int]]
    has_logprobs: bool
    start: int
    num_top: int
    scores: list[ScoreOutput | None]
    experts_start: int
    num_samples: int
    is_list: bool
    only_scores: bool
    _growing: dict[tuple[int, int], _Growing] = field(default_factory=dict)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any] | Rows:
        answers = (self._finished(piece, piece.text) for piece in pieces)
        return Rows(answers, None) if self.is_list else next(answers)

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        key = piece.position, piece.index
        growing = self._growing.setdefault(key, _Growing())
        if piece.ended is not None:
            del self._growing[key]
            return [self._indexed(piece, self._finished(piece, "".join(growing.texts) + piece.text))]
        growing.add(piece)
        if not growing.is_due:
            return []
        growing.num_told = len(growing.token_ids)
        growing.texts = ["".join(growing.texts)]
        told = self._answer(piece, growing.texts[0], growing.token_ids, growing.columns())
        return [self._indexed(piece, told)]

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def _indexed(self, piece: Piece, told: dict[str, Any]) -> dict[str, Any]:
        return told | ({"index": piece.position * self.num_samples + piece.index} if self.is_list else {})

    def _finished(self, piece: Piece, text: str) -> dict[str, Any]:
        sample = piece.ended
        assert sample is not None
        told = self._answer(piece, text, sample.token_ids, columns_of(sample))
        score = self.scores[piece.position]
        spans = sample.weight_versions or (() if score is None else score.weight_versions)
        told["meta_info"] |= {"finish_reason": _finish_reason(sample), "cached_tokens": sample.num_cached_tokens}
        told["meta_info"] |= _told_versions(spans)
        if sample.old_kv:
            told["meta_info"]["old_kv"] = named_spans(sample.old_kv)
        if (routed := sample.routed_experts) is not None:
            told["meta_info"]["routed_experts"] = _int32(routed[self.experts_start :])
            told["meta_info"]["routed_experts_start_len"] = self.experts_start
        return told

    def _answer(self, piece: Piece, text: str, token_ids: list[int], columns: Columns) -> dict[str, Any]:
        name = self.names[piece.position]
        meta: dict[str, Any] = {
            "id": name if self.num_samples == 1 else f"{name}_{piece.index}",
            "finish_reason": None,
            "prompt_tokens": len(self.prompts[piece.position]),
            "completion_tokens": len(token_ids),
        }
        if self.has_logprobs:
            meta |= self._told_prompt(piece.position) | _told_logprobs(token_ids, columns)
        if "kept_counts" in columns:
            offsets = np.concatenate(([0], columns["kept_counts"].cumsum(dtype=np.int64)))
            meta |= {"top_p_token_ids": _int32(columns["kept_token_ids"]), "top_p_token_offsets": _int32(offsets)}
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _told_prompt(self, position: int) -> dict[str, Any]:
        """Return the log-probs of the prompt from token `start` on. The first entry has null in place of a log-prob,
        because the first token of a prompt has no log-prob.
        """
        if not 0 <= self.start < len(self.prompts[position]):
            return {"input_token_logprobs": []}
        score, token_ids = self.scores[position], self.prompts[position][self.start :]
        logprobs = [None, *([] if score is None else numbers(score.logprobs))]
        told: dict[str, Any] = {"input_token_logprobs": _entries(token_ids, logprobs)}
        if score is not None and (tops := top_rows(score.top_token_ids, score.top_logprobs)) is not None:
            told["input_top_logprobs"] = Rows(_with_null(map(_top, tops)), self.num_top)
        return told


def _with_null(entries: Iterator[list[list[Any]]]) -> Iterator[list[list[Any]] | None]:
    yield None
    yield from entries


def _told_logprobs(token_ids: Sequence[int], columns: Columns) -> dict[str, Any]:
    told = {
        "output_token_logprobs": _entries(token_ids, numbers(columns["logprobs"])),
        "output_token_logprobs_length": len(token_ids),
    }
    if (tops := top_rows(columns.get("top_token_ids"), columns.get("top_logprobs"))) is not None:
        told["output_top_logprobs"] = rows(map(_top, tops), len(token_ids), columns["top_token_ids"].shape[1])
    return told


def _entries(token_ids: Sequence[int], logprobs: Sequence[float | None]) -> Rows | list[Any]:
    """Return `[log-prob, token id, null]` for each token. SGLang can return the token's text in place of null."""
    pairs = zip(logprobs, token_ids, strict=True)
    return rows(([logprob, token_id, None] for logprob, token_id in pairs), len(token_ids))


def _top(best: list[tuple[int, float]]) -> list[list[Any]]:
    return [[logprob, token_id, None] for token_id, logprob in best]


def _int32(array: np.ndarray) -> Binary:
    """Return the elements of an array as int32 in base64, without a header."""
    return Binary(array.astype("<i4"), has_header=False)


def _finish_reason(sample: SampleOutput) -> dict[str, Any]:
    if sample.finish_reason == "stop":
        return {"type": "stop", "matched": sample.stop_reason}
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(sample.token_ids)}
    return {"type": "abort", "message": "the request was aborted", "status_code": None, "err_type": None}


def _told_versions(spans: Sequence[WeightSpan]) -> dict[str, Any]:
    return {"weight_version": str(spans[-1].version), "weight_versions": named_spans(spans)} if spans else {}
