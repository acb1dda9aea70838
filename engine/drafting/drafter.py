"""The interface of drafters, and a drafter that calls a function."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from typing import NamedTuple, Protocol

from ..scheduling.sequence import Sequence


class Draft(NamedTuple):
    """Guesses of the next tokens of a sequence.

    `chances`: for each token the estimated chance that it is right if the tokens before it are.
    """

    tokens: AnySequence[int]
    chances: AnySequence[float]


NO_DRAFT = Draft((), ())


class Drafter(Protocol):
    """Guesses the next tokens of sequences. No bit of a sample depends on the guesses. `name`: for statistics."""

    name: str

    def draft(self, sequence: Sequence, seed: int, most: int) -> Draft:
        """Guess at most `most` tokens that follow the tokens of a running sequence.

        `seed`: the seed of the sequence's only sample.
        """
        ...

    def end(self, sequence: Sequence, seed: int) -> None:
        """Learn from a sequence that a sample with this seed leaves for good."""
        ...


class FunctionDrafter:
    """Drafts what `function(tokens, most)` returns, for tests and research.

    `tokens`: prompt and sample so far. The function must not change them.
    """

    name = "function"

    def __init__(self, function: Callable[[array[int], int], AnySequence[int]]) -> None:
        self._function = function

    def draft(self, sequence: Sequence, seed: int, most: int) -> Draft:
        tokens = self._function(sequence.tokens, most)
        return Draft(tokens, [1.0] * len(tokens))

    def end(self, sequence: Sequence, seed: int) -> None:
        """Do nothing: the function has its own memory, if any."""
