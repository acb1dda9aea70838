"""Stop strings: the one reason why a worker knows a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .errors import InvalidRequestError


class StopStrings:
    """Watches the text of one sample for any of `stops`, token by token."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tail = ""

    def feed(self, token_id: int) -> bool:
        """Whether the text, with this token added, holds a stop string that ends in the token's text."""
        text = self._tail + (self._stream.step(self._tokenizer, token_id) or "")
        longest = max(map(len, self._stops))
        self._tail = text[max(0, len(text) - longest + 1) :]
        return any(stop in text for stop in self._stops)


@cache
def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raise InvalidRequestError if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequestError(f"stop: expected {path}, found no such file; use stop_token_ids instead")
    return Tokenizer.from_file(str(path))
