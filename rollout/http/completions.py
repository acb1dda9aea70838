"""`/v1/completions`: read prompts as text or token ids, and write completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from trueroll.errors import InvalidRequestError

from ...engine.request import SamplingParams, ScoreOutput, TokenId
from .answers import Rows, TokenBytes
from .fields import NumTop, TextFields, TokenIds, checked, given, recording, take_sampling, unsupported
from .images import ImageList, Prompt
from .logprobs import (
    TokenName,
    completion_logprobs,
    completion_logprobs_bytes,
    name_by_id,
    numbers,
    piece_columns,
    top_rows,
)
from .model import ServedModel
from .pieces import Piece, Task, Usage, ending
from .records import check_records, prompt_distribution, prompt_records, record_bytes, told_records

DEFAULT_MAX_TOKENS = 16
"""The default `max_tokens` of OpenAI's API and of vLLM."""
_FAIL_FAST = Field(fail_fast=True)


class CompletionFields(TextFields):
    """Fields of a completion.

    `logprobs`: how many of the most probable tokens to return per position; each generated token's log-prob is also
    returned. `echo`: also return the prompt. `images`: the images of the prompt; a request with images must have a
    single prompt of token ids.
    """

    prompt: str | TokenIds | Annotated[list[str], _FAIL_FAST] | Annotated[list[TokenIds], _FAIL_FAST]
    logprobs: NumTop | None = None
    echo: bool = False
    add_special_tokens: bool = True
    images: ImageList = []


@dataclass
class CompletionForm:
    """Writes completions.

    `prefixes`: for each prompt, the text and log-probs that `echo` puts before each completion. `told_prompts`: for
    each prompt, the fields with which the answer reports the log-probs of the prompt.
    """

    id: str
    created: int
    model: str
    fields: CompletionFields
    num_samples: int
    prompts: list[Prompt]
    name: TokenName
    eos_token_ids: frozenset[int]
    told_prompts: list[dict[str, Any]]
    prefixes: list[dict[str, Any]] | None = None
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        return self._envelope(Rows(map(self._choice, pieces), None)) | {"usage": usage.told()}

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._envelope([self._choice(piece)]) | self._no_usage()]

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        if not self.fields.stream_options.include_usage:
            return []
        return [self._envelope([]) | {"usage": usage.told()}]

    def _envelope(self, choices: list[dict[str, Any]] | Rows) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return head | {"choices": choices}

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self.fields.stream_options.include_usage else {}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        prefix = self.prefixes[piece.position] if self.prefixes is not None else {"text": ""}
        choice = {
            "index": piece.position * self.num_samples + piece.index,
            "text": prefix["text"] + piece.text,
            "logprobs": self._logprobs(piece, prefix),
        } | ending(piece, self.eos_token_ids)
        choice |= told_records(piece, self.fields)
        if piece.ended is not None and piece.index == 0:
            choice |= self.told_prompts[piece.position]
        if self.fields.return_token_ids:
            choice["token_ids"] = piece.token_ids
            prompt = self.prompts[piece.position]
            choice["prompt_token_ids"] = prompt.token_ids if piece.start == 0 else None
            if prompt.told and piece.start == 0:
                choice["prompt_images"] = prompt.told
        return choice

    def _logprobs(self, piece: Piece, prefix: dict[str, Any]) -> dict[str, Any] | None:
        if self.fields.logprobs is None:
            return None
        token_ids, (logprobs, tops) = piece.token_ids, piece_columns(piece)
        key = piece.position, piece.index
        offset = self._offsets.get(key, 0)
        if "token_ids" in prefix:
            token_ids, logprobs = prefix["token_ids"] + token_ids, prefix["logprobs"] + logprobs
            tops = None if tops is None else chain(_prompt_tops(prefix["score"]), tops)
        if piece.ended is None:  # this is a piece of a stream
            self._offsets[key] = offset + sum(len(self.name(token_id)) for token_id in token_ids)
        return completion_logprobs(token_ids, logprobs, tops, self.name, offset, piece.num_entries_by_token)


async def read_completion(body: dict[str, Any], served: ServedModel) -> tuple[Task, CompletionForm]:
    """Parse a request for completions. Raise InvalidRequestError or HttpError if the request is not supported."""
    fields = given(body)
    params, seed = await take_sampling(fields, DEFAULT_MAX_TOKENS, served.encode_words)
    own = checked(CompletionFields, fields)
    served = await served.named(own.model)
    given_prompts = _prompts(own.prompt)
    served.check_count(len(given_prompts))
    served.check_texts([each for each in given_prompts if isinstance(each, str)])
    _check_images(own, given_prompts)
    prompts = [await _token_ids(each, own, served) for each in given_prompts]
    served.check_lengths(prompts, params.max_tokens)
    if own.echo and own.stream:
        raise unsupported("echo", "false for a stream", own.echo)
    check_records(own, prompts, own.stream, params)
    if not own.stream:
        served.check_answer(prompts, params, _token_bytes(own) + record_bytes(own, params, served))
    read = [await served.images.receive(each, own.images) for each in prompts]
    params = served.salted(recording(params, own.logprobs))
    for parsed in (body, fields):
        parsed.clear()  # `own` has a compact copy of long lists
    form = CompletionForm(
        id=served.new_id("cmpl"),
        created=served.now(),
        model=served.name,
        fields=own,
        num_samples=params.n,
        prompts=read,
        name=name_by_id if own.return_tokens_as_token_ids else served.texts.token,
        eos_token_ids=served.eos_token_ids,
        told_prompts=await prompt_records(own, read, params, served),
    )
    if own.echo:
        form.prefixes = await _prefixes(own, read, params, served)
    task = Task(
        prompts=prompts,
        media=[each.images for each in read],
        params=params,
        seed=seed,
        is_stream=own.stream,
        skip_special_tokens=own.skip_special_tokens,
        adapter=served.adapter,
    )
    return task, form


def _prompts(prompt: str | list[str] | list[TokenId] | list[list[TokenId]]) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def _check_images(own: CompletionFields, prompts: list[str | list[int]]) -> None:
    if own.images and (len(prompts) > 1 or isinstance(prompts[0], str)):
        raise InvalidRequestError(
            "images: a completion takes processed images only with a single prompt of token ids, in which each token "
            "of an image is a placeholder; send such a prompt, or use /v1/chat/completions",
            field="images",
        )


async def _token_ids(prompt: str | list[int], own: CompletionFields, served: ServedModel) -> list[int]:
    return await served.encode(prompt, own.add_special_tokens) if isinstance(prompt, str) else prompt


def _token_bytes(own: CompletionFields) -> TokenBytes:
    told = TokenBytes.TEXT + completion_logprobs_bytes(own.logprobs)
    ids = TokenBytes.ID * own.return_token_ids
    return TokenBytes(told + ids, told * own.echo + ids)


async def _prefixes(
    own: CompletionFields, prompts: list[Prompt], params: SamplingParams, served: ServedModel
) -> list[dict[str, Any]]:
    """Return, for each prompt, the prefix that `echo` puts before the completions of the prompt.

    A prefix contains the text of the prompt. If `logprobs` is set, a prefix also contains the log-probs of the prompt's
    tokens. The log-probs of the prompt's tokens are computed with the temperature and the filters of the request. Edits
    of logits, such as penalties, have no effect on these log-probs, because the edits apply only to drawn tokens. The
    first token of a prompt has no log-prob.
    """
    prefixes = [
        {"text": each if isinstance(each, str) else await served.texts.decode_long(each, own.skip_special_tokens)}
        for each in _prompts(own.prompt)
    ]
    if own.logprobs is None:
        return prefixes
    scored = [prompt for prompt in prompts if len(prompt.token_ids) > 1]
    sequences, media = [prompt.token_ids for prompt in scored], [prompt.images for prompt in scored]
    scores = list[ScoreOutput]()
    if scored:
        scores = await served.client.score(
            sequences,
            media=media,
            distribution=prompt_distribution(params),
            adapter=served.adapter,
            cache_salt=params.cache_salt,
            top_logprobs=params.top_logprobs,
        )
    found = iter(scores)
    for prefix, prompt in zip(prefixes, prompts, strict=True):
        prefix |= _prompt_columns(prompt.token_ids, next(found) if len(prompt.token_ids) > 1 else None)
    return prefixes


def _prompt_columns(prompt: list[int], score: ScoreOutput | None) -> dict[str, Any]:
    logprobs = [] if score is None else numbers(score.logprobs)
    return {"token_ids": prompt, "logprobs": [None, *logprobs], "score": score}


def _prompt_tops(score: ScoreOutput | None) -> Iterator[list[tuple[int, float]] | None]:
    """Yield the most probable tokens at each position of a prompt; None for the first token."""
    rows = None if score is None else top_rows(score.top_token_ids, score.top_logprobs)
    return chain([None], rows or [])
