"""Stop strings: the one reason why a worker knows a tokenizer.

Promises: watching costs the same for each token, whatever came before; whatever a tokenizer raises, `StopStrings` and
`load_vocabulary` raise an Exception of ours, so that it harms no other sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from trueroll.errors import InvalidRequestError, ModelError, UnavailableError

from ..models.tokenizer import load_tokenizer

# The last bytes of a text may belong to a character that is not complete: at most three, in as many tokens.
_MOST_INCOMPLETE = 3
_REPLACEMENT = "\ufffd"


class TokenizerError(Exception):
    """A tokenizer failed: the text says how."""


class Vocabulary:
    """A tokenizer, asked for text alone. Lets through whatever that raises, also what is no `Exception`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token adds no text, after whatever it stands: it is special, or unknown."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, without that of special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """Watches the text of one sample for any of `stops`, token by token."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self._vocabulary, self._stops = vocabulary, stops
        self._longest = max(map(len, stops))
        self._window: list[int] = []
        self._num_settled = 0
        self._num_read = 0
        self._tail = ""

    def feed_prior(self, token_ids: Sequence[int]) -> None:
        """Start behind these tokens, of which no more are read than a stop string can reach back into. Raise
        TokenizerError.
        """
        count = self._longest
        while count < len(token_ids) and self._is_short(token_ids[-count:]):
            count *= 2
        for token_id in token_ids[-count:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str | None:
        """The stop string that ends first in the text of this token, added to the text; None if none does.

        Raise TokenizerError if the tokenizer fails.
        """
        with _explained():
            new = self._read(token_id)
        old, text = self._tail, self._tail + new
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        found = [(text.find(stop, max(0, len(old) - len(stop) + 1)), stop) for stop in self._stops]
        ends = [(at + len(stop), -len(stop), stop) for at, stop in found if at >= 0]
        return min(ends)[2] if ends else None

    def _is_short(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string may reach back beyond the tokens, or their text begins within a character: its bytes
        are then shown as one mark or as several.
        """
        with _explained():
            text = self._vocabulary.decode(list(token_ids))
        return text.startswith(_REPLACEMENT) or len(text.replace(_REPLACEMENT, "")) <= self._longest

    def _read(self, token_id: int) -> str:
        """The text that this token completes; none while it may end in the middle of a character's bytes.

        It is what the token adds to the text of the tokens read just before, as a decoder may treat the first token of
        a text in a way of its own. (`tokenizers.decoders.DecodeStream` raises where tokens are no valid UTF-8.)
        `_window` holds those tokens, `_num_settled` of them, and then the pending ones, which have not completed any
        text; `_num_read` characters of its text were returned before.
        """
        self._window.append(token_id)
        text = self._vocabulary.decode(self._window)
        if len(text) > self._num_read and not text.endswith(_REPLACEMENT):
            return self._advance(text, self._num_settled, unread=0)
        if self._vocabulary.is_silent(token_id):
            self._window.pop()
        elif len(self._window) - self._num_settled > _MOST_INCOMPLETE:
            # No character has so many tokens: only what its bytes may be shown as until then can still change.
            num_marks = len(text) - len(text.rstrip(_REPLACEMENT))
            return self._advance(text, len(self._window) - _MOST_INCOMPLETE, unread=min(num_marks, _MOST_INCOMPLETE))
        return ""

    def _advance(self, text: str, num_dropped: int, unread: int) -> str:
        """What is new in `text`, that of the window, but for its last `unread` characters; drops the first tokens."""
        new = text[self._num_read : len(text) - unread]
        self._window = self._window[num_dropped:]
        self._num_settled = 0 if unread else len(self._window)
        self._num_read = max(0, len(self._vocabulary.decode(self._window)) - unread)
        return new


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerError(f"{type(error).__name__}: {error}") from error


@cache
def load_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a model folder. Raise InvalidRequestError if it has none that can be read, UnavailableError
    where the machine has no room for the process that tries it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        text = f"stop: expected {path}, found no such file; use stop_token_ids instead"
        raise InvalidRequestError(text, field="stop")
    try:
        return Vocabulary(load_tokenizer(path))
    except ModelError as error:
        raise InvalidRequestError(f"stop: {error}, or use stop_token_ids", field="stop") from error
    except (KeyboardInterrupt, SystemExit, UnavailableError):
        raise
    except BaseException as error:  # of no narrower class
        raise InvalidRequestError(
            f"stop: the tokenizer in {path} fails: {error}; save it again, or use stop_token_ids", field="stop"
        ) from error
