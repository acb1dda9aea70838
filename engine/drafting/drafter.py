"""The interface of drafters, and a drafter that calls a function."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AnySequence
from typing import Protocol

from ..scheduling.sequence import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of sequences. No bit of a sample depends on the guesses. `name`: for statistics.

    In each step, the engine calls `expect` for each decoding sequence, decides how many tokens to draft, and then calls
    `draft` once.
    """

    name: str

    def expect(self, sequence: Sequence, seed: int, most: int) -> AnySequence[float]:
        """Return the chances of up to `most` tokens that could be drafted now for a running sequence. A token's chance
        is the estimated probability that the token is right if all earlier drafted tokens are right.

        `seed`: the seed of the sequence's only sample.
        """
        ...

    def draft(self, counts: Mapping[Sequence, int]) -> AnySequence[AnySequence[int]]:
        """Guess the next tokens of some sequences. Return the guesses in the order of `counts`.

        `counts`: how many tokens to draft for each sequence; at most the number of chances that `expect` returned. The
        sequences have blocks for the drafted tokens. A drafter may return fewer tokens than `counts` requests.
        """
        ...

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn from a step in which the first `accepted` of `drafted` tokens were right."""
        ...

    def end(self, sequence: Sequence, seed: int) -> None:
        """Learn from a sequence after its only sample has ended. `seed`: the seed of the sample that has ended."""
        ...


class FunctionDrafter:
    """Drafts the tokens that `function(tokens, most)` returns. Used in tests and research.

    `tokens`: the tokens of the prompt and of the sample so far. The function must not change `tokens` or keep a view of
    it.
    """

    name = "function"

    def __init__(self, function: Callable[[array[int], int], AnySequence[int]]) -> None:
        self._function = function
        self._guesses: dict[Sequence, AnySequence[int]] = {}

    def expect(self, sequence: Sequence, seed: int, most: int) -> AnySequence[float]:
        self._guesses[sequence] = self._function(sequence.tokens, most)
        return [1.0] * len(self._guesses[sequence])

    def draft(self, counts: Mapping[Sequence, int]) -> AnySequence[AnySequence[int]]:
        return [self._guesses[sequence][:count] for sequence, count in counts.items()]

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Do nothing, because the function itself must remember anything that it learns."""

    def end(self, sequence: Sequence, seed: int) -> None:
        self._guesses.pop(sequence, None)
