"""Which workers of a fleet got which beginnings of prompts.

Owns: as many beginnings as were used last, and the workers that got each. Does not own what a worker's cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .loads import Worker

Holders: TypeAlias = tuple[Worker, ...]


class HolderIndex:
    """`capacity`: how many beginnings are remembered at most, and half as many of those used last in any case."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Beginning to the workers that got it: of those placed last, and as many before them. Beginnings share the
        # tuples: a container for each would have Python's garbage collector go through the process again and again.
        self._newer: dict[int, Holders] = {}
        self._older: dict[int, Holders] = {}

    @property
    def beginnings(self) -> set[int]:
        """Those of which it is known which workers got them."""
        return self._newer.keys() | self._older.keys()

    def find(self, prompt: Sequence[int]) -> list[Holders]:
        """The workers that got the beginnings of a prompt, as far as they are known. One that got a beginning got all
        those before it.
        """
        found = []
        for beginning in prompt:
            holders = self._newer.get(beginning) or self._older.get(beginning)
            if holders is None:
                break
            found.append(holders)
        return found

    def add(self, prompt: Sequence[int], holders: list[Holders], known: int, worker: Worker, num_workers: int) -> None:
        """Note that one of `num_workers` workers, which had `known` beginnings of a prompt, gets them all. Those of a
        prompt are always noted together, so that none is forgotten before those that go on from it. `holders`: what
        `find` found.
        """
        room = self.capacity // 2 - len(self._newer)
        if len(prompt) > room and sum(beginning not in self._newer for beginning in prompt) > room:
            self._newer, self._older = {}, self._newer
        self._newer.update(zip(prompt, holders, strict=False))
        self._newer.update(dict.fromkeys(prompt[len(holders) :], worker.alone))
        before, more = (), worker.alone
        for i in reversed(range(known, len(holders))):
            if holders[i] is not before:
                if len(holders[i]) == num_workers or worker in holders[i]:
                    break
                before, more = holders[i], (*holders[i], worker)
            self._newer[prompt[i]] = more

    def remove(self, gone: Worker) -> None:
        """A worker is gone, and its cache with it."""
        for index in (self._newer, self._older):
            for beginning, holders in [(beginning, got) for beginning, got in index.items() if gone in got]:
                index[beginning] = tuple(holder for holder in holders if holder is not gone)
                if not index[beginning]:
                    del index[beginning]

    def clear(self) -> None:
        """No worker has any beginning any more."""
        self._newer.clear()
        self._older.clear()
