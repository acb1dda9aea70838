"""Generation for all endpoints: get samples from a source, and convert each sample to a choice, as a whole or in
pieces.

An endpoint describes the request with a `Task`, and the format of the answer with a `Form`. The source of samples is
the worker or, for an agent's request to a session, the session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from trueroll.errors import WorkerLostError

from ...engine.media import ImageInput
from ...engine.request import (
    KEPT,
    TARGETS,
    Columns,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    WeightSpan,
    columns_of,
    cut_columns,
)
from ..client.client import AsyncRolloutClient
from ..sessions.session import DELTA_SECONDS
from .answers import STEP_ENTRIES, Rows
from .errors import HttpError
from .samples import SampleLog
from .texts import GrowingText, Texts
from .turns import Turns

DECODED_TOKENS = 4096
"""Number of tokens decoded to text in one step. A step takes about a millisecond."""

_RECORDS = {column.name for column in (TARGETS, *KEPT)}


@dataclass(frozen=True)
class Piece:
    """A part of a choice: all tokens of the choice, or the tokens since the previous piece.

    `position`: index of the prompt in the request. `index`: index of the sample within its group. `start`: the
    position, within the sample, of the piece's first token. `text`: the new text; the text of the latest tokens may be
    in a later piece. `logprobs`: float32 [num_tokens], or None. `top_token_ids`, `top_logprobs`: [num_tokens, k], or
    None. `records`: the columns for `target_token_ids` and `return_sampling_mask`, if requested. `ended`: the finished
    sample in the last piece of a choice; None in earlier pieces.
    """

    position: int
    index: int
    start: int
    text: str
    token_ids: list[int]
    logprobs: np.ndarray | None
    top_token_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    records: Columns
    ended: SampleOutput | None

    @property
    def num_entries_by_token(self) -> int:
        """Number of log-probs per token: the log-prob of the token, and the log-probs of the most probable tokens."""
        return 1 if self.top_token_ids is None else 1 + self.top_token_ids.shape[1]


@dataclass
class Usage:
    """Token counts of an answer.

    `prompt_tokens`: number of prompt tokens. The tokens of a prompt are counted once, not once per sample.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """Number of cached prompt tokens, by position of the prompt in the request."""

    def add(self, position: int, sample: SampleOutput) -> None:
        self.completion_tokens += len(sample.token_ids)
        self.cached_tokens[position] = max(sample.num_cached_tokens, self.cached_tokens.get(position, 0))

    def told(self) -> dict[str, Any]:
        """Return the token counts in the format of OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


class Form(Protocol):
    """The answer format of an endpoint."""

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any] | Rows:
        """Return the whole answer. Each of `pieces` is a complete choice."""
        ...

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the stream events for a piece."""
        ...

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the last events of a stream. The last events contain the token counts, if the request asks for token
        counts.
        """
        ...


@dataclass(frozen=True)
class Task:
    """A request (the arguments of `AsyncRolloutClient.generate(prompts, params, seed=seed, media=media)`) and the
    options for its answer.

    `message`: the beginning of the last user message of a conversation, for the page at `/ui`. `marks`: texts that
    stand for some tokens in the text of the answer, see `Texts.decode`. `is_kept`: whether the samples are kept for the
    page at `/ui`. `keeps_stop`: whether the text of a sample contains the stop token or stop string that ended the
    sample. `request_ids`: ids of the requests to the worker, one for each prompt; None means new ids. `adapter`: the
    named adapter that generates the samples; None for the base weights.
    """

    prompts: list[list[int]]
    media: list[tuple[ImageInput, ...]]
    params: SamplingParams
    seed: int | None
    is_stream: bool
    skip_special_tokens: bool = True
    message: str | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    is_kept: bool = True
    keeps_stop: bool = False
    request_ids: list[str] | None = None
    adapter: str | None = None


class Source(Protocol):
    """The source of the samples of a task."""

    async def samples(self) -> list[list[SampleOutput]]:
        """Return the samples of each prompt."""
        ...

    def stream(self) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]:
        """Yield (position of the prompt, new tokens or finished sample), as `AsyncRolloutClient.stream` does."""
        ...


@dataclass(frozen=True)
class FromWorker:
    """Gets the samples of a task by a request to the worker."""

    client: AsyncRolloutClient
    task: Task

    async def samples(self) -> list[list[SampleOutput]]:
        task = self.task
        named: dict[str, Any] = dict(seed=task.seed, media=task.media, request_ids=task.request_ids)
        named["adapter"] = task.adapter
        groups = await self.client.generate(task.prompts, task.params, **named)
        return [[*group.samples] for group in groups]

    def stream(self) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]:
        task = self.task
        wishes: dict[str, Any] = dict(deltas=True, delta_seconds=DELTA_SECONDS, seed=task.seed, media=task.media)
        wishes |= dict(request_ids=task.request_ids, adapter=task.adapter)
        return self.client.stream(task.prompts, task.params, **wishes)


class Asker:
    """Gets the samples of a task from `source`, and keeps finished groups in `samples`.

    `texts`: the tokenizer; None if the answers contain no text. `eos_token_ids`: end-of-sequence tokens of the model.
    `user`: the user of the request; None if clients have no names.
    """

    def __init__(
        self,
        source: Source,
        texts: Texts | None,
        eos_token_ids: frozenset[int],
        samples: SampleLog,
        turns: Turns,
        user: str | None = None,
    ) -> None:
        self._source, self._texts, self._eos_token_ids, self._samples = source, texts, eos_token_ids, samples
        self._turns, self._user = turns, user

    async def whole(self, task: Task, form: Form) -> dict[str, Any] | Rows:
        """Return the complete answer to a task. The task must not ask for a stream."""
        groups = await self._source.samples()
        for position, group in enumerate(groups):
            self._keep(task, position, group)
        usage = Usage(sum(map(len, task.prompts)))
        pieces: list[Piece] = []
        num_waiting = 0
        for position, sample in ((i, sample) for i, group in enumerate(groups) for sample in group):
            pieces.append(self._choice(task, position, sample, usage))
            if (num_waiting := num_waiting + len(sample.token_ids)) >= DECODED_TOKENS:
                num_waiting = 0
                await self._turns.next()
        return form.whole(pieces, usage)

    async def events(self, task: Task, form: Form) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed task. Each event is yielded as soon as it is ready."""
        usage = Usage(sum(map(len, task.prompts)))
        choices: defaultdict[tuple[int, int], _Choice] = defaultdict(lambda: _Choice(self._text(task)))
        finished: list[list[SampleOutput]] = [[] for _ in task.prompts]
        async with aclosing(self._source.stream()) as stream:
            async for position, got in stream:
                choice = choices[position, got.index]
                if isinstance(got, SampleDelta):
                    for i, part in enumerate(choice.take_unsent(got)):
                        if i:
                            await self._turns.next()
                        for event in form.events(_piece(position, part, choice.text_of(part), part.start, None)):
                            yield event
                    continue
                finished[position].append(got)
                if len(finished[position]) == task.params.n:
                    self._keep(task, position, finished[position])
                usage.add(position, got)
                for event in form.events(_end(position, got, choice.finish(got))):
                    yield event
        for event in form.last_events(usage):
            yield event

    def _keep(self, task: Task, position: int, samples: Iterable[SampleOutput]) -> None:
        if task.is_kept:
            prompt, images = task.prompts[position], task.media[position]
            about: dict[str, Any] = dict(message=task.message, images=images, adapter=task.adapter)
            self._samples.add(prompt, task.params, task.seed, samples, self._user, **about)

    def _choice(self, task: Task, position: int, sample: SampleOutput, usage: Usage) -> Piece:
        check_sample(sample)
        usage.add(position, sample)
        text = self._text(task)
        return _piece(position, sample, text.finish(sample) if text else "", 0, sample)

    def _text(self, task: Task) -> GrowingText | None:
        if self._texts is None:
            return None
        stop_token_ids = self._eos_token_ids.union(task.params.stop_token_ids)
        return GrowingText(
            self._texts, task.params.stop, stop_token_ids, task.skip_special_tokens, task.marks, task.keeps_stop
        )


def check_sample(sample: SampleOutput) -> None:
    """Raise HttpError if the sample ended with an error."""
    if sample.finish_reason == "error":
        raise HttpError(500, f"sample {sample.index}: {sample.error}", code="sample_failed")


def parts_of(delta: SampleDelta) -> Iterator[SampleDelta]:
    """Split a delta into deltas of at most `STEP_ENTRIES` log-probs, so that each delta can be written in one step."""
    width = 1 if delta.top_token_ids is None else 1 + delta.top_token_ids.shape[1]
    if delta.kept_counts is not None:
        width += int(delta.kept_counts.max(initial=0))
    size = max(1, STEP_ENTRIES // width)
    for start in range(0, max(1, len(delta.token_ids)), size):
        yield delta if start == 0 and len(delta.token_ids) <= size else _cut(delta, start, start + size)


def _cut(delta: SampleDelta, start: int, end: int) -> SampleDelta:
    """Return the part of a delta with the tokens [start, end)."""
    token_ids, columns = delta.token_ids[start:end], cut_columns(columns_of(delta), start, end)
    return replace(delta, start=delta.start + start, token_ids=token_ids, **columns)


class _Choice:
    """A streamed choice, with the tokens and log-probs that the stream has already sent.

    `text`: the decoder of the choice's text; None if the stream contains no text.

    A sample may restart from its first token, for example on another worker of a fleet after the first worker was lost.
    The stream continues if the restarted sample begins with the tokens and log-probs that were already sent. With the
    same weights, a restarted sample always has the same tokens and log-probs.
    """

    def __init__(self, text: GrowingText | None) -> None:
        self._text = text
        self._token_ids: list[int] = []
        self._logprobs: list[int] = []  # the bits of the float32 values

    def take_unsent(self, delta: SampleDelta) -> Iterator[SampleDelta]:
        """Yield the unsent tokens of a delta, in parts. Each part can be written in one step. All yielded tokens count
        as sent.

        Raise WorkerLostError if the delta differs from the tokens and log-probs that were already sent.
        """
        tokens, logprobs = delta.token_ids, [] if delta.logprobs is None else delta.logprobs.view(np.int32).tolist()
        again, place = len(self._token_ids) - delta.start, slice(delta.start, delta.start + len(tokens))
        if again < 0 or self._token_ids[place] != tokens[:again] or self._logprobs[place] != logprobs[:again]:
            raise _void()
        self._token_ids += tokens[again:]
        self._logprobs += logprobs[again:]
        if again == 0:
            yield from parts_of(delta)
        elif tokens[again:]:
            yield from parts_of(_cut(delta, again, len(tokens)))

    def text_of(self, part: SampleDelta) -> str:
        """Return the text that becomes known with the tokens of `part`, a part of a delta."""
        return self._text.add(part.token_ids) if self._text else ""

    def finish(self, sample: SampleOutput) -> str:
        """Return the remaining text of the finished sample.

        Raise HttpError if the sample ended with an error, and WorkerLostError if the sample differs from the tokens
        that were already sent.
        """
        check_sample(sample)
        if sample.token_ids != self._token_ids:
            raise _void()
        return self._text.finish(sample) if self._text else ""


def _void() -> WorkerLostError:
    return WorkerLostError(
        "worker: restarted the sample with different weights, so the part already sent is invalid; send the request "
        "again"
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
        records={name: values for name, values in columns_of(got).items() if name in _RECORDS},
        ended=ended,
    )


def _end(position: int, sample: SampleOutput, text: str) -> Piece:
    """Return the last piece of a streamed choice. The piece has no new tokens, but contains the finished sample."""
    return Piece(position, sample.index, len(sample.token_ids), text, [], None, None, None, {}, sample)


def ending(piece: Piece, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Return the fields that describe the end of a choice.

    `stop_reason`: the stop string or stop token that ended the choice; None for an end-of-sequence token of the model.
    `weight_versions`: the weight version, start and end of each span of tokens, as in vLLM; missing until the choice
    has ended. `old_kv`: the spans of tokens that were drawn with KV from older weights, in the form of
    `weight_versions`; missing if there are no such spans.
    """
    if piece.ended is None:
        return {"finish_reason": None, "stop_reason": None}
    stop_reason = piece.ended.stop_reason
    told = {
        "finish_reason": piece.ended.finish_reason,
        "stop_reason": None if stop_reason in eos_token_ids else stop_reason,
        "weight_versions": named_spans(piece.ended.weight_versions),
    }
    return told | ({"old_kv": named_spans(piece.ended.old_kv)} if piece.ended.old_kv else {})


def named_spans(spans: Iterable[WeightSpan]) -> list[dict[str, Any]]:
    """Return the version, start and end of each span of tokens that were generated with one weight version, as in vLLM
    and SGLang.
    """
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans]


def told_spans(spans: Iterable[WeightSpan]) -> list[list[int]]:
    """Return `[version, start, end]` for each `WeightSpan`."""
    return [[span.version, span.start, span.end] for span in spans]
