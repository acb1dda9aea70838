"""The interface of drafters, and a drafter that calls a function."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from typing import NamedTuple, Protocol

from ..scheduling.sequence import Sequence


class Draft(NamedTuple):
    """Guesses of the next tokens of a sequence.

    `chances`: for each token, the estimated probability that the token is right if all earlier tokens of the draft are
    right.
    """

    tokens: AnySequence[int]
    chances: AnySequence[float]


NO_DRAFT = Draft((), ())


class Drafter(Protocol):
    """Guesses the next tokens of sequences. No bit of a sample depends on the guesses. `name`: for statistics."""

    name: str

    def draft(self, sequence: Sequence, seed: int, most: int) -> Draft:
        """Guess the next tokens of a running sequence, but no more than `most` tokens.

        `seed`: the seed of the sequence's only sample.
        """
        ...

    def end(self, sequence: Sequence, seed: int) -> None:
        """Learn from a sequence after its only sample has ended. `seed`: the seed of this sample."""
        ...


class FunctionDrafter:
    """Drafts the tokens that `function(tokens, most)` returns. Used in tests and research.

    `tokens`: the tokens of the prompt and of the sample so far. The function must not change `tokens` or keep a view of
    it.
    """

    name = "function"

    def __init__(self, function: Callable[[array[int], int], AnySequence[int]]) -> None:
        self._function = function

    def draft(self, sequence: Sequence, seed: int, most: int) -> Draft:
        tokens = self._function(sequence.tokens, most)
        return Draft(tokens, [1.0] * len(tokens))

    def end(self, sequence: Sequence, seed: int) -> None:
        """Do nothing, because the function itself must remember anything that it learns."""
