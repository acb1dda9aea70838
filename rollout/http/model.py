"""The served model: its name, limits and tokenizer, and the client of the worker that runs the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trueroll.errors import InvalidRequestError, brief

from ...engine.request import MAX_BAD_WORD_TOKENS, SamplingParams
from ..client.client import AsyncRolloutClient
from ..protocol import new_id
from ..text import ANY, TooMany, num_chars
from .answers import TokenBytes, check_answer
from .errors import HttpError, model_not_found
from .images import Images
from .texts import Texts
from .watch import Watch

_LEAST_LONGEST_TOKEN = 16
"""Lower bound for the length of the longest token, in characters. Tokenizers may drop spaces or join characters, so a
token can represent more characters than the longest entry of the vocabulary has.
"""


@dataclass(frozen=True)
class ServedModel:
    """The served model, or one of its named adapters.

    `name`: the name that clients use. `watch`: polls the worker. `adapter`: the adapter that answers; None for the base
    weights. `max_prompts`: maximum number of prompts in a request, which is the worker's
    `max_queued_requests`. `images`: reads the images of requests. `created`: start of this front end, in seconds since
    1970. `max_text_chars`, `max_answer_bytes`: see `HttpConfig`. `salted`: adds the client's cache salt to the
    parameters of a request. `vocab_size`, `route_bytes`: as in `EngineInfo`.
    """

    client: AsyncRolloutClient
    watch: Watch
    texts: Texts
    images: Images
    name: str
    max_model_len: int
    max_prompts: int
    eos_token_ids: frozenset[int]
    created: int
    max_text_chars: int
    max_answer_bytes: int
    vocab_size: int
    route_bytes: int
    salted: Callable[[SamplingParams], SamplingParams] = field(default=lambda params: params)
    adapter: str | None = None

    @property
    def salt(self) -> str | None:
        """The cache salt of requests without `cache_salt`."""
        return self.salted(SamplingParams()).cache_salt

    @property
    def max_prompt_chars(self) -> int:
        """Maximum length of a prompt in characters, reached if every token of the context is the longest token."""
        return self.max_model_len * max(self.texts.longest_token, _LEAST_LONGEST_TOKEN)

    async def named(self, name: str | None) -> ServedModel:
        """Return the model for a request with the `model` field `name`: this model, or one of its adapters. None means
        this model.

        Raise HttpError if the worker serves no adapter with this name.
        """
        if name is None or name == self.name:
            return self
        if not await self.watch.serves(name):
            note = f"the served model is {self.name!r}, and it has no adapter with this name"
            raise model_not_found(name, note)
        return self.adapted(name)

    def adapted(self, adapter: str) -> ServedModel:
        """Return the adapter `adapter` of this model in the form of a `ServedModel`."""
        return replace(self, name=adapter, adapter=adapter)

    def check_count(self, num_prompts: int) -> None:
        """Raise InvalidRequestError if a request has more prompts than the worker's queue can hold."""
        if num_prompts > self.max_prompts:
            raise InvalidRequestError(
                f"prompt: {num_prompts} prompts are too many (limit {self.max_prompts}, the worker's "
                "max_queued_requests); send several requests",
                field="prompt",
                value=num_prompts,
                limit=self.max_prompts,
            )

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_tokens: int | None, field: str = "prompt") -> None:
        """Raise an error about `field` if a prompt is empty, or if a prompt plus its new tokens exceed the context."""
        if not prompts or not all(prompts):
            text = "prompt: a prompt has no tokens; give at least one token per prompt"
            raise InvalidRequestError(text, field=field, value=0, limit=1)
        longest = max(map(len, prompts))
        if (most := longest + (max_tokens or 1)) > self.max_model_len:
            raise HttpError(
                400,
                f"prompt: {longest} prompt tokens and {max_tokens or 1} new tokens exceed the model's maximum context "
                f"length ({self.max_model_len}); shorten the prompt or lower max_tokens",
                field=field,
                value=most,
                limit=self.max_model_len,
                code="context_length_exceeded",
            )

    def check_texts(self, texts: Sequence[str], fits_context: bool = True) -> None:
        """Raise HttpError if the total length of the texts exceeds the limit.

        With `fits_context`, also raise HttpError if a single text is too long for the context.
        """
        self._check_chars("prompt", sum(map(len, texts)), max(map(len, texts), default=0) if fits_context else 0)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt. Raise HttpError if the prompt is longer than the context."""
        try:
            return await self.texts.encode(text, add_special_tokens, self.max_model_len)
        except TooMany as error:
            raise self._too_long("prompt", error) from None

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """For each word, return its token sequence at the beginning of a text, and its token sequence after a space.

        Raise InvalidRequestError if a word has more than `MAX_BAD_WORD_TOKENS` tokens.
        """
        found = dict[tuple[int, ...], None]()
        for index, word in enumerate(words):
            bare = word.lstrip(" ")
            for text in dict.fromkeys((bare, f" {bare}") if bare else (word,)):
                try:
                    token_ids = await self.texts.encode(text, False, MAX_BAD_WORD_TOKENS)
                except TooMany as error:
                    raise InvalidRequestError(
                        f"bad_words: {brief(word)} has {error.count} {error.what} (limit {MAX_BAD_WORD_TOKENS} "
                        "tokens); give a shorter word",
                        field=f"bad_words[{index}]",
                        value=error.count,
                        limit=MAX_BAD_WORD_TOKENS,
                    ) from None
                found[tuple(token_ids)] = None
        return [list(token_ids) for token_ids in found if token_ids]

    async def encode_conversation(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any], most: int | None
    ) -> list[int]:
        """Return the token ids of a conversation. Raise HttpError if the conversation has more than `most` tokens.

        If the number of characters already implies too many tokens, the error is raised before the chat template is
        rendered.
        """
        count = self.check_conversation((messages, arguments), most is not None)
        most_chars = self.max_text_chars if most is None else min(self.max_text_chars, self.max_prompt_chars)
        try:
            return await self.texts.encode_conversation(messages, arguments, count, most_chars, most or ANY)
        except TooMany as error:
            if error.what == "characters" and most_chars == self.max_text_chars:
                raise self._too_much_text("messages", error.count) from None
            raise self._too_long("messages", error) from None

    def check_conversation(self, conversation: Any, fits_context: bool = True) -> int:
        """Return the number of characters in a conversation. `conversation`: a JSON value that includes the arguments
        of the chat template.

        Raise HttpError if the number of characters exceeds the limit or, with `fits_context`, if the conversation is
        too long for the context.
        """
        count = num_chars(conversation)
        self._check_chars("messages", count, count if fits_context else 0)
        return count

    def _check_chars(self, field: str, total: int, longest: int) -> None:
        """Raise HttpError if a request has too many characters of text.

        `total`: number of characters in all texts. `longest`: number of characters in the longest text that must fit in
        the context.
        """
        if longest > self.max_prompt_chars:
            raise self._too_long(field, TooMany("characters", longest))
        if total > self.max_text_chars:
            raise self._too_much_text(field, total)

    def _too_much_text(self, field: str, total: int) -> HttpError:
        return HttpError(
            400,
            f"{field}: {total} characters are too many (limit {self.max_text_chars}); send several requests, or raise "
            "--max-text-chars",
            field=field,
            value=total,
            limit=self.max_text_chars,
            code="text_too_long",
            setting="max_text_chars",
        )

    def _too_long(self, field: str, found: TooMany) -> HttpError:
        return HttpError(
            400,
            f"{field}: {found.count} {found.what} exceed the model's maximum context length ({self.max_model_len} "
            f"tokens, at most {self.max_prompt_chars} characters); shorten the prompt",
            field=field,
            value=found.count,
            limit=self.max_prompt_chars if found.what == "characters" else self.max_model_len,
            code="context_length_exceeded",
            setting="max_model_len",
        )

    def check_answer(self, prompts: list[list[int]], params: SamplingParams, token_bytes: TokenBytes) -> None:
        """Raise HttpError if the estimated size of an answer without `stream` exceeds the limit."""
        check_answer(prompts, params, self.max_model_len, token_bytes, self.max_answer_bytes)

    def new_id(self, kind: str) -> str:
        """Return a new id for an answer. `kind`: prefix of the id."""
        return f"{kind}-{new_id()}"

    def now(self) -> int:
        """Return the time in seconds since 1970."""
        return int(time.time())
