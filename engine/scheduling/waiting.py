"""The sequences that wait: those that may be looked at, and those set aside until a block is there.

Owns the order in which they are looked at: the lowest `order` first. Does not own why one is set aside.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain

from .sequence import Sequence


def order_of(sequence: Sequence) -> tuple[int, int]:
    """By which sequences are sorted; no two have the same."""
    return sequence.order


def remove_from(sequences: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of a sorted list."""
    position = bisect_left(sequences, sequence.order, key=order_of)
    assert sequences[position] is sequence
    del sequences[position]


class Waiting:
    """`ready`: those to be looked at, sorted. To look up one is to hash its prompt, so those set aside cost nothing."""

    def __init__(self) -> None:
        self.ready: list[Sequence] = []
        self._aside: dict[bytes, set[Sequence]] = {}  # by the block that they wait for

    def __len__(self) -> int:
        return len(self.ready) + self.num_aside

    @property
    def num_aside(self) -> int:
        """How many are set aside."""
        return sum(map(len, self._aside.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, for whatever, sorted."""
        return iter(sorted([*self.ready, *chain.from_iterable(self._aside.values())], key=order_of))

    def add(self, sequence: Sequence) -> None:
        """One more to be looked at."""
        insort(self.ready, sequence, key=order_of)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more, wherever it is."""
        if sequence.claim is None:
            remove_from(self.ready, sequence)
        else:
            self._aside[sequence.claim].remove(sequence)

    def set_aside(self, sequence: Sequence, claim: bytes) -> None:
        """Not to be looked at before the block `claim` is there."""
        remove_from(self.ready, sequence)
        sequence.claim = claim
        self._aside.setdefault(claim, set()).add(sequence)

    def take_back(self, is_under_way: Callable[[bytes], bool]) -> None:
        """Lets those be looked at again for whom there is nothing to wait for any more."""
        over = [key for key in self._aside if not is_under_way(key)]
        for sequence in [sequence for key in over for sequence in self._aside.pop(key)]:
            sequence.claim = None
            self.ready.append(sequence)
        if over:
            self.ready.sort(key=order_of)
