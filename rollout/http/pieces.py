"""What an answer is made of: choices, each whole or in pieces, and how they are asked for.

An endpoint says what it wants by a `Task` and how it is written by a `Form`; this module asks the worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from trueroll.errors import WorkerLostError

from ...engine.request import SampleDelta, SampleOutput, SamplingParams, WeightSpan, columns_of, cut_columns
from ..client.client import AsyncRolloutClient
from .answers import STEP_ENTRIES
from .errors import HttpError
from .samples import SampleLog
from .texts import GrowingText, Texts
from .turns import Turns

DECODED_TOKENS = 4096
"""So many tokens become text in one step: about a millisecond."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of a choice and what belongs to them: all of them, or those since the piece before.

    `position`: of the prompt. `start`: which of the sample's tokens is the first one here. `logprobs`: float32, or
    None. `top_token_ids`, `top_logprobs`: [num_tokens, k], or None. `text` and the tokens need not be of the same
    extent, as text may be kept back. `ended`: the sample, if it has ended with this piece.
    """

    position: int
    index: int
    start: int
    text: str
    token_ids: list[int]
    logprobs: np.ndarray | None
    top_token_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    ended: SampleOutput | None

    @property
    def num_entries_by_token(self) -> int:
        """How many log-probs a token has."""
        return 1 if self.top_token_ids is None else 1 + self.top_token_ids.shape[1]


@dataclass
class Usage:
    """Of an answer. `prompt_tokens` counts each prompt once, whatever its number of samples."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """By the prompt's position."""

    def add(self, position: int, sample: SampleOutput) -> None:
        self.completion_tokens += len(sample.token_ids)
        self.cached_tokens[position] = max(sample.num_cached_tokens, self.cached_tokens.get(position, 0))

    def told(self) -> dict[str, Any]:
        """As OpenAI tells it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


class Form(Protocol):
    """How an endpoint writes its answer."""

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        """All of it, of pieces that are whole choices."""
        ...

    def event(self, piece: Piece) -> dict[str, Any]:
        """An event of a stream."""
        ...

    def last_event(self, usage: Usage) -> dict[str, Any]:
        """The event that tells the usage."""
        ...


@dataclass(frozen=True)
class Task:
    """What to ask the worker for: `AsyncRolloutClient.generate(prompts, params, seed=seed)`."""

    prompts: list[list[int]]
    params: SamplingParams
    seed: int | None
    is_stream: bool
    tells_usage: bool
    skip_special_tokens: bool = True


class Asker:
    """Asks the worker, and keeps what it answers in `samples`. `texts` None: the answers have no text. `eos_token_ids`:
    the model's own. `user`: who asks; None where clients have no names.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        texts: Texts | None,
        eos_token_ids: frozenset[int],
        samples: SampleLog,
        turns: Turns,
        user: str | None = None,
    ) -> None:
        self._client, self._texts, self._eos_token_ids, self._samples = client, texts, eos_token_ids, samples
        self._turns, self._user = turns, user

    async def whole(self, task: Task, form: Form) -> dict[str, Any]:
        """The answer to a task that is no stream."""
        groups = await self._client.generate(task.prompts, task.params, seed=task.seed)
        for prompt, group in zip(task.prompts, groups, strict=True):
            self._samples.add(prompt, task.params, task.seed, group.samples, self._user)
        usage = Usage(sum(map(len, task.prompts)))
        pieces: list[Piece] = []
        num_waiting = 0
        for position, sample in ((i, sample) for i, group in enumerate(groups) for sample in group.samples):
            pieces.append(self._choice(task, position, sample, usage))
            if (num_waiting := num_waiting + len(sample.token_ids)) >= DECODED_TOKENS:
                num_waiting = 0
                await self._turns.next()
        return form.whole(pieces, usage)

    async def events(self, task: Task, form: Form) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a task that is a stream, as they come."""
        usage = Usage(sum(map(len, task.prompts)))
        streams: dict[tuple[int, int], tuple[GrowingText | None, _Told]] = {}
        finished: list[list[SampleOutput]] = [[] for _ in task.prompts]
        stream = self._client.stream(task.prompts, task.params, deltas=True, seed=task.seed)
        async with aclosing(stream) as pieces:
            async for position, got in pieces:
                if (choice := (position, got.index)) not in streams:
                    streams[choice] = self._text(task), _Told()
                text, before = streams[choice]
                if isinstance(got, SampleDelta):
                    if (rest := before.rest_of(got)) is None:
                        continue
                    for i, part in enumerate(parts_of(rest)):
                        if i:
                            await self._turns.next()
                        new = text.add(part.token_ids) if text else ""
                        yield form.event(_piece(position, part, new, part.start, None))
                else:
                    finished[position].append(got)
                    if len(finished[position]) == task.params.n:
                        samples = finished[position]
                        self._samples.add(task.prompts[position], task.params, task.seed, samples, self._user)
                    check_sample(got)
                    before.check_whole(got)
                    usage.add(position, got)
                    yield form.event(_end(position, got, text.finish(got) if text else ""))
        if task.tells_usage:
            yield form.last_event(usage)

    def _choice(self, task: Task, position: int, sample: SampleOutput, usage: Usage) -> Piece:
        check_sample(sample)
        usage.add(position, sample)
        text = self._text(task)
        return _piece(position, sample, text.finish(sample) if text else "", 0, sample)

    def _text(self, task: Task) -> GrowingText | None:
        if self._texts is None:
            return None
        stop_token_ids = self._eos_token_ids.union(task.params.stop_token_ids)
        return GrowingText(self._texts, task.params.stop, stop_token_ids, task.skip_special_tokens)


def check_sample(sample: SampleOutput) -> None:
    """Raise HttpError for one that could not be finished."""
    if sample.finish_reason == "error":
        raise HttpError(500, f"sample {sample.index}: {sample.error}", code="sample_failed")


def parts_of(delta: SampleDelta) -> Iterator[SampleDelta]:
    """Split a delta into deltas with as many log-probs as are written in one step."""
    width = 1 if delta.top_token_ids is None else 1 + delta.top_token_ids.shape[1]
    size = max(1, STEP_ENTRIES // width)
    for start in range(0, max(1, len(delta.token_ids)), size):
        yield delta if start == 0 and len(delta.token_ids) <= size else _cut(delta, start, start + size)


def _cut(delta: SampleDelta, start: int, end: int) -> SampleDelta:
    """Its tokens [start, end)."""
    token_ids, columns = delta.token_ids[start:end], cut_columns(columns_of(delta), start, end)
    return replace(delta, start=delta.start + start, token_ids=token_ids, **columns)


class _Told:
    """What a stream has told of a choice. A sample that is begun anew, as by another worker of a fleet after the first
    was lost, goes on from there if its tokens and log-probs are those that were told, as they are by the same weights.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[int] = []  # the bits

    def rest_of(self, delta: SampleDelta) -> SampleDelta | None:
        """What of a piece was not told; None if all was. Raise WorkerLostError if what was told is other than that."""
        tokens, logprobs = delta.token_ids, [] if delta.logprobs is None else delta.logprobs.view(np.int32).tolist()
        again, place = len(self._token_ids) - delta.start, slice(delta.start, delta.start + len(tokens))
        if again < 0 or self._token_ids[place] != tokens[:again] or self._logprobs[place] != logprobs[:again]:
            raise _void()
        self._token_ids += tokens[again:]
        self._logprobs += logprobs[again:]
        if again == 0:
            return delta
        return _cut(delta, again, len(tokens)) if tokens[again:] else None

    def check_whole(self, sample: SampleOutput) -> None:
        """Raise WorkerLostError if what was told is not the sample."""
        if sample.token_ids != self._token_ids:
            raise _void()


def _void() -> WorkerLostError:
    return WorkerLostError(
        "worker: it began the sample anew, with other weights, so what was sent is void; send the request again"
    )


def _piece(position: int, got: SampleDelta | SampleOutput, text: str, start: int, ended: SampleOutput | None) -> Piece:
    return Piece(
        position=position,
        index=got.index,
        start=start,
        text=text,
        token_ids=got.token_ids,
        logprobs=got.logprobs,
        top_token_ids=got.top_token_ids,
        top_logprobs=got.top_logprobs,
        ended=ended,
    )


def _end(position: int, sample: SampleOutput, text: str) -> Piece:
    """What ends a stream: no more tokens, and why."""
    return Piece(position, sample.index, len(sample.token_ids), text, [], None, None, None, sample)


def ending(piece: Piece, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """How a choice ended. `stop_reason`: the string or the token that did; None if it was one of the model's own.
    `weight_versions`: of each span of tokens the version, and where it begins and ends; not there before the end.
    """
    if piece.ended is None:
        return {"finish_reason": None, "stop_reason": None}
    stop_reason = piece.ended.stop_reason
    return {
        "finish_reason": piece.ended.finish_reason,
        "stop_reason": None if stop_reason in eos_token_ids else stop_reason,
        "weight_versions": told_spans(piece.ended.weight_versions),
    }


def told_spans(spans: Iterable[WeightSpan]) -> list[list[int]]:
    """`[version, start, end]` of each span of tokens."""
    return [[span.version, span.start, span.end] for span in spans]
