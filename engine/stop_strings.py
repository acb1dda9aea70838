"""Stop strings: the one reason why a worker knows a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from .errors import InvalidRequestError


class StopStrings:
    """Watches the text of one sample for any of `stops`, token by token."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._longest = max(map(len, stops))
        self._window: list[int] = []
        self._num_read = 0
        self._tail = ""

    def feed(self, token_id: int) -> bool:
        """Whether the text, with this token added, holds a stop string that ends in the token's text."""
        old, text = self._tail, self._tail + self._read(token_id)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return any(text.find(stop, max(0, len(old) - len(stop) + 1)) >= 0 for stop in self._stops)

    def _read(self, token_id: int) -> str:
        """The text that this token completes; none while it may end in the middle of a character's bytes.

        It is what the token adds to the text of the tokens read just before, as a decoder may treat the first token of
        a text in a way of its own. (`tokenizers.decoders.DecodeStream` raises where tokens are no valid UTF-8.)
        """
        self._window.append(token_id)
        before, now = self._decode(self._window[: self._num_read]), self._decode(self._window)
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


@cache
def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raise InvalidRequestError if it has none that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequestError(f"stop: expected {path}, found no such file; use stop_token_ids instead")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # of no narrower class
        raise InvalidRequestError(
            f"stop: expected a tokenizer in {path}, found a fault: {error}; save it again, or use stop_token_ids"
        ) from error
