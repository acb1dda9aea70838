"""Slots of recurrent state: who uses each, and which hold a checkpoint that a prefix can be resumed from.

A slot holds what all recurrent layers remember of one sequence after one of its tokens. A running sequence has a slot
of its own, which its steps write, and reads the one that it goes on from: its own, or another, which stays as it is. So
nothing is copied to restore a checkpoint, to fork, or to take a checkpoint: a step that ends at one writes a slot that
is reserved for it, and the next step goes on from there.

| owned here                                                | owned elsewhere                                      |
|-----------------------------------------------------------|------------------------------------------------------|
| each slot's reference count, and the free slots           | the tensors that slots are made of (`model_runner`)  |
| checkpoints: entry of the prefix index -> slot, and which | which prefixes there are (`prefix_cache`)            |
| was used least recently                                   | which slot a sequence reads and writes (`sequence`)  |
| the budget of checkpoints                                 | where checkpoints are taken (`scheduler`)            |

A checkpoint is reserved when the step that will end at it is planned, ready once that step is done, pinned while a
sequence goes on from it, and forgotten when its entry goes, when another one needs its place, or with the epoch.
Promises: a slot that a sequence reads or writes is never handed out; there are at most `budget` checkpoints, reserved
ones included; a live state never waits for a slot that only a checkpoint holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from .chains import Entry


@dataclass
class StateStats:
    """Lifetime counters of checkpoints.

    `skipped`: those that found no place in the budget. `evicted`: those that gave their place to another one or to a
    live state. `restored`: how often a sequence went on from one.
    """

    skipped: int = 0
    evicted: int = 0
    restored: int = 0


class StateSlots:
    """`num_slots` slots, at most `budget` of which are checkpoints."""

    def __init__(self, num_slots: int, budget: int) -> None:
        self.num_slots = num_slots
        self.budget = budget
        self.stats = StateStats()
        self.num_reserved = 0
        self._references = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._ready: OrderedDict[Entry, int] = OrderedDict()

    @property
    def num_ready(self) -> int:
        """Checkpoints that can be restored."""
        return len(self._ready)

    @property
    def num_available(self) -> int:
        """Slots that live states can take."""
        return len(self._free) + sum(self._references[slot] == 1 for slot in self._ready.values())

    def take(self) -> int | None:
        """A slot for a live state, perhaps that of the checkpoint used least recently; None if all are in use."""
        if not self._free:
            self._evict()
        return self._new() if self._free else None

    def share(self, slot: int) -> int:
        """One more reference to a slot: the slot."""
        self._references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Takes a reference from a slot."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            self._free.append(slot)

    def reserve(self) -> int | None:
        """A slot for a checkpoint that a step will write, perhaps that of another one; None if all are in use."""
        if self.num_reserved + len(self._ready) >= self.budget or not self._free:
            self._evict()
        if self.num_reserved + len(self._ready) >= self.budget or not self._free:
            self.stats.skipped += 1
            return None
        self.num_reserved += 1
        return self._new()

    def cancel(self, slot: int) -> None:
        """Gives back a slot that was reserved."""
        self.num_reserved -= 1
        self.release(slot)

    def make_ready(self, entry: Entry, slot: int) -> None:
        """Makes a reserved slot, now written, the checkpoint at the end of an entry's block, unless that has one."""
        if entry in self._ready:
            self.cancel(slot)
            return
        self.num_reserved -= 1
        self._ready[entry] = slot

    def is_ready(self, entry: Entry) -> bool:
        """Whether there is a checkpoint at the end of an entry's block."""
        return entry in self._ready

    def restore(self, entry: Entry) -> int:
        """The slot of an entry's checkpoint, with a reference more, so that it stays."""
        self._ready.move_to_end(entry)
        return self.share(self._ready[entry])

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drops the checkpoints of some entries, which go. Who reads them goes on."""
        for entry in entries:
            slot = self._ready.pop(entry, None)
            if slot is not None:
                self.release(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless `held`, a slot for each reference of a sequence or a step, accounts for all."""
        counts = [0] * self.num_slots
        for slot in (*held, *self._ready.values()):
            counts[slot] += 1
        wrong = {slot for slot in range(self.num_slots) if counts[slot] != self._references[slot]}
        wrong |= {slot for slot in range(self.num_slots) if (counts[slot] == 0) != (slot in self._free)}
        if wrong or len(set(self._free)) != len(self._free) or self.num_reserved + self.num_ready > self.budget:
            raise RuntimeError(f"states: slots {sorted(wrong)} are not counted exactly once, or beyond the budget")

    def _new(self) -> int:
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def _evict(self) -> None:
        """Drops the least recently used checkpoint that nobody reads, if there is one."""
        entry = next((entry for entry, slot in self._ready.items() if self._references[slot] == 1), None)
        if entry is not None:
            self.forget([entry])
            self.stats.evicted += 1
