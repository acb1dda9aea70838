"""An index from prompt prefixes to the holders of each prefix: the workers that got a prompt with this prefix.

Owns: the most recently used prefixes and their holders. Does not own: the contents of the workers' caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .loads import Worker

Holders: TypeAlias = tuple[Worker, ...]


class HolderIndex:
    """The index from prompt prefixes to their holders. `capacity`: maximum number of prefixes. The `capacity // 2` most
    recently used prefixes are always kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # The holders of each prefix. `_newer` has the latest prefixes, and `_older` has earlier prefixes. Prefixes
        # share tuples, because a container per prefix would trigger full garbage collections too often.
        self._newer: dict[int, Holders] = {}
        self._older: dict[int, Holders] = {}

    @property
    def beginnings(self) -> set[int]:
        """The hashes of the known prefixes."""
        return self._newer.keys() | self._older.keys()

    def find(self, prompt: Sequence[int]) -> list[Holders]:
        """Return the holders of each prefix of a prompt, up to the first unknown prefix. `prompt`: hashes of all
        prefixes of the prompt, the shortest prefix first. A holder of a prefix is also a holder of all shorter prefixes
        of the prompt.
        """
        found = []
        for beginning in prompt:
            holders = self._newer.get(beginning) or self._older.get(beginning)
            if holders is None:
                break
            found.append(holders)
        return found

    def add(self, prompt: Sequence[int], holders: list[Holders], known: int, worker: Worker, num_workers: int) -> None:
        """Record that a worker gets a prompt.

        `prompt`: hashes of all prefixes of the prompt. `holders`: the result of `find`. `known`: number of the prompt's
        prefixes that the worker already holds. `num_workers`: size of the fleet. All prefixes of a prompt are recorded
        together, so a prefix is never forgotten before a longer prefix of the same prompt.
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
        """Remove a worker from the holders of all prefixes."""
        for index in (self._newer, self._older):
            for beginning, holders in [(beginning, got) for beginning, got in index.items() if gone in got]:
                index[beginning] = tuple(holder for holder in holders if holder is not gone)
                if not index[beginning]:
                    del index[beginning]

    def clear(self) -> None:
        """Forget all prefixes."""
        self._newer.clear()
        self._older.clear()
