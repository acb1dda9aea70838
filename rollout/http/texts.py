"""Tokenizing and detokenizing in the front end. Child processes tokenize texts. The tokens of a sample are decoded as
they arrive.

Guarantees that short texts never wait behind long texts. Work for a client that has disconnected is dropped or stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TypeVar

from trueroll.errors import InvalidRequestError, ModelError

from ...engine.models.child_process import IsAbandoned
from ...engine.models.detokenizer import REPLACEMENT, Detokenizer
from ...engine.request import SampleOutput
from ..text import ANY, TextModel, before_stop, decode_marked, is_long, place_in, texts_of_marks

T = TypeVar("T")
_KNOWN_TOKENS = 2**16
_MANY_TOKENS = 2**12
"""Maximum number of tokens that are decoded in this process. Longer sequences are decoded in a child process."""


class Texts:
    """A model's tokenizer and chat template.

    `model`: the underlying `TextModel`, which blocks its callers. `longest_token`: length of the longest token, in
    characters. `token`: cached function that returns the text of a token.
    """

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.longest_token = model.longest_token
        self._threads = {False: ThreadPoolExecutor(1, "texts"), True: ThreadPoolExecutor(1, "long-texts")}
        self.token = lru_cache(_KNOWN_TOKENS)(self._token)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The texts of the chat templates, by name."""
        return self.model.chat_templates

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that were added to the vocabulary, by text."""
        return self.model.added_tokens

    def image_texts(self, placeholder: int) -> tuple[str, ...]:
        """Return the texts that stand for an image in a rendered conversation."""
        return self.model.image_texts(placeholder)

    async def encode(self, text: str, add_special_tokens: bool, most: int = ANY) -> list[int]:
        """Return the token ids of a text. Raise TooMany if the text has more than `most` tokens."""
        return await self._run(is_long(len(text)), partial(self.model.encode, text, add_special_tokens, most))

    async def encode_conversation(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any], num_chars: int, most_chars: int, most: int
    ) -> list[int]:
        """Return the token ids of a conversation of `num_chars` characters.

        `arguments`: arguments of the chat template. Raise InvalidRequestError if the template rejects the conversation,
        and TooMany if the rendered text has more than `most_chars` characters or `most` tokens.
        """
        work = partial(self.model.encode_conversation, messages, arguments, most_chars, most)
        try:
            return await self._run(is_long(num_chars), work)
        except ModelError as error:
            raise InvalidRequestError(f"messages: {error}", field="messages") from None

    async def decode_long(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of any number of tokens without blocking the event loop."""
        if len(token_ids) > _MANY_TOKENS:
            return await self._run(True, partial(self.model.decode_long, token_ids, skip_special_tokens))
        return self.decode(token_ids, skip_special_tokens)

    async def by_token(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        If several tokens form one character, the result has the character at the last token and empty strings at the
        earlier tokens.
        """
        return await self._run(True, partial(self._by_token, token_ids))

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool, marks: Mapping[int, str] = MappingProxyType({})
    ) -> str:
        """Return the text of tokens. This call blocks, so use `decode_long` for many tokens.

        `marks`: as in `text.decode_marked`.
        """
        return decode_marked(self.model.decode, token_ids, skip_special_tokens, marks)

    def detokenizer(self, skip_special_tokens: bool, marks: Mapping[int, str] = MappingProxyType({})) -> Detokenizer:
        """Return a decoder for tokens that arrive one at a time. `marks`: as in `decode`."""

        def decode(token_ids: list[int]) -> str:
            if len(token_ids) == 1 and token_ids[0] not in marks:  # a fast path: half of all calls have 1 token
                return self.token(token_ids[0], skip_special_tokens)
            return self.decode(token_ids, skip_special_tokens, marks)

        return Detokenizer(decode, partial(self.model.is_silent, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """End the threads and the processes."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self.model.close()

    def _by_token(self, token_ids: Sequence[int], is_abandoned: IsAbandoned) -> list[str]:
        text = self.detokenizer(skip_special_tokens=False)
        return [text.add(token_id) for token_id in takewhile(lambda _: not is_abandoned(), token_ids)]

    def _token(self, token_id: int, skip_special_tokens: bool = False) -> str:
        return self.model.decode([token_id], skip_special_tokens)

    async def _run(self, is_long: bool, work: Callable[..., T]) -> T:
        """Run `work` on the thread for long texts or the thread for short texts, and return the result.

        `work` gets the argument `is_abandoned`, a function that returns whether to stop. If this coroutine is
        cancelled, pending work never starts, and running work is told to stop.
        """
        abandoned, waiting = threading.Event(), [work]
        try:
            running = self._threads[is_long].submit(lambda: waiting.pop()(is_abandoned=abandoned.is_set))
            return await asyncio.wrap_future(running)
        finally:
            abandoned.set()
            waiting.clear()  # the pool keeps a cancelled call in its queue, but must not keep the text in memory


class GrowingText:
    """The text of one sample, decoded while tokens arrive. The text ends before the stop token or stop string of the
    sample.

    The concatenation of the returned parts is the text of all tokens, with the exceptions that `Detokenizer` documents.
    Text is withheld while it may be the beginning of a stop string or of a multi-byte character. The text of a token in
    `stop_token_ids` is also withheld. `marks`: as in `Texts.decode`. `keeps_stop`: whether the text ends after the stop
    token or stop string instead of before it.
    """

    def __init__(
        self,
        texts: Texts,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        skip_special_tokens: bool,
        marks: Mapping[int, str] = MappingProxyType({}),
        keeps_stop: bool = False,
    ) -> None:
        self._stops, self._stop_token_ids, self._keeps_stop = stops, stop_token_ids, keeps_stop
        self._mark_texts = texts_of_marks(texts.decode, marks)
        self._decode = partial(texts.decode, skip_special_tokens=skip_special_tokens, marks=marks)
        self._detokenizer = texts.detokenizer(skip_special_tokens, marks)
        self._kept_back = max(map(len, stops), default=1) - 1
        self._held: list[int] = []
        self._text, self._plain = "", ""  # the text, and its version without marks, to search for stop strings
        self._num_told = self._num_plain_told = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Return the new text that later tokens cannot change."""
        return "".join([self._add(token_id) for token_id in token_ids])

    def _add(self, token_id: int) -> str:
        ready = [*self._held, token_id]
        self._held = [ready.pop()] if token_id in self._stop_token_ids else []
        new = "".join(map(self._detokenizer.add, ready))
        self._text += new
        if not self._stops:
            return self._tell(len(self._text))
        old = len(self._plain)
        self._plain += new.translate(self._mark_texts)
        ends = [len(self._plain) - self._kept_back]
        ends += [at for stop in self._stops if (at := self._plain.find(stop, max(0, old - len(stop) + 1))) >= 0]
        end, self._num_plain_told = place_in(
            self._text, min(ends), self._mark_texts, self._num_told, self._num_plain_told
        )
        return self._tell(end)

    def finish(self, sample: SampleOutput) -> str:
        """Return the remaining text of the finished sample."""
        token_ids, stop = sample.token_ids, sample.stop_reason
        text = self._decode(token_ids[:-1] if isinstance(stop, int) and not self._keeps_stop else token_ids)
        if isinstance(stop, str):
            text = self._cut(text, stop, token_ids) + self._kept(stop)
        if not text.startswith(self._text[: self._num_told]):
            text = self._end_as_told(stop)
        self._text = text
        return self._tell(len(text))

    def _end_as_told(self, stop: int | str | None) -> str:
        """Return a text of the whole sample that begins with the parts that were already returned. Called if the text
        of the finished sample, decoded at once, does not begin with the parts that were already returned.
        """
        held = [] if isinstance(stop, int) and not self._keeps_stop else self._held
        text = self._text + "".join(map(self._detokenizer.add, held)) + self._detokenizer.rest()
        if not isinstance(stop, str):
            return text
        return before_stop(text, stop, self._num_plain_told, self._mark_texts) + self._kept(stop)

    def _kept(self, stop: str) -> str:
        return stop if self._keeps_stop else ""

    def _cut(self, text: str, stop: str, token_ids: Sequence[int]) -> str:
        """Return the part of `text` that precedes the stop string. The last token of the sample completes the stop
        string.
        """
        before = self._decode(token_ids[:-1]).rstrip(REPLACEMENT).translate(self._mark_texts)
        return before_stop(text, stop, max(0, len(before) - len(stop) + 1), self._mark_texts)

    def _tell(self, end: int) -> str:
        new = self._text[self._num_told : max(end, self._num_told)]
        self._num_told += len(new)
        return new
