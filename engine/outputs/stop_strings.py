"""Stop strings, the only feature for which a worker needs a tokenizer.

Guarantees: the cost per token does not grow with the length of the text. Whatever a tokenizer raises, `StopStrings` and
`load_vocabulary` raise an `Exception` of this package, so that a failure affects no other sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from trueroll.errors import InvalidRequestError, ModelError, UnavailableError

from ..models.detokenizer import REPLACEMENT, Detokenizer
from ..models.tokenizer import load_tokenizer


class TokenizerError(Exception):
    """A tokenizer failed. The error's message describes how the tokenizer failed."""


class Vocabulary:
    """A tokenizer for decoding only.

    Errors that the tokenizer raises are propagated, even a `BaseException` that is not an `Exception`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def is_silent(self, token_id: int) -> bool:
        """Return whether the token is special or unknown, and therefore never adds text."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """Searches the text of one sample for the strings `stops`, token by token."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self._vocabulary, self._stops = vocabulary, stops
        self._longest = max(map(len, stops))
        self._text = Detokenizer(vocabulary.decode, vocabulary.is_silent)
        self._tail = ""

    def feed_prior(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that precede the sample's first token. Call this method before `feed`.

        Only the last tokens, in which a stop string could begin, are decoded.

        Raise TokenizerError if the tokenizer fails.
        """
        count = self._longest
        while count < len(token_ids) and self._is_short(token_ids[-count:]):
            count *= 2
        for token_id in token_ids[-count:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str | None:
        """Add a token. Return the stop string that ends first in the new text, or None if there is none.

        Raise TokenizerError if the tokenizer fails.
        """
        with _explained():
            new = self._text.add(token_id)
        old, text = self._tail, self._tail + new
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        found = [(text.find(stop, max(0, len(old) - len(stop) + 1)), stop) for stop in self._stops]
        ends = [(at + len(stop), -len(stop), stop) for at, stop in found if at >= 0]
        return min(ends)[2] if ends else None

    def _is_short(self, token_ids: Sequence[int]) -> bool:
        """Return whether `token_ids` are too few tokens for `feed_prior` to start from.

        Earlier tokens are needed if a stop string may begin before `token_ids`, or if the text of `token_ids`
        begins within a character. A partial character is decoded as one or more replacement characters.
        """
        with _explained():
            text = self._vocabulary.decode(list(token_ids))
        return text.startswith(REPLACEMENT) or len(text.replace(REPLACEMENT, "")) <= self._longest


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise TokenizerError(f"{type(error).__name__}: {error}") from error


@cache
def load_vocabulary(folder: Path) -> Vocabulary:
    """Load the tokenizer of a model folder for decoding.

    Raise InvalidRequestError if the folder has no tokenizer that can be loaded. Raise UnavailableError if the process
    for the trial load cannot be started.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        text = f"stop: {path} does not exist; use stop_token_ids instead"
        raise InvalidRequestError(text, field="stop")
    try:
        return Vocabulary(load_tokenizer(path))
    except ModelError as error:
        raise InvalidRequestError(f"stop: {error}, or use stop_token_ids instead of stop", field="stop") from error
    except (KeyboardInterrupt, SystemExit, UnavailableError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise InvalidRequestError(
            f"stop: cannot load the tokenizer {path}: {error}; save the tokenizer again, or use stop_token_ids",
            field="stop",
        ) from error
