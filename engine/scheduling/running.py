"""The sequences that run, and all that each of them holds: a lane, blocks of KV memory, a slot of recurrent state.

Owns which sequences run, the lowest `order` first, and the copies of blocks that forks have left to do. Does not own
which one gets what (`scheduler`), nor why one ends.
"""

from __future__ import annotations

from array import array
from bisect import insort

import numpy as np

from ..cache.prefix_cache import PrefixCache
from ..cache.states import StateSlots
from ..cache.tables import Table
from ..outputs.open_requests import OpenSample
from .lanes import Lanes
from .recurrent import Intervals, RecurrentStates, Slots
from .sequence import Generation, Sequence
from .waiting import order_of, remove_from


class Running:
    """At most `capacity` sequences. `sequences`: sorted. `lanes`: their counters. `states`: their recurrent states."""

    def __init__(self, cache: PrefixCache, capacity: int, slots: StateSlots, intervals: Intervals) -> None:
        self.lanes = Lanes(capacity, len(cache.tables.windows))
        self.states = RecurrentStates(slots, self.lanes, cache.block_size, intervals)
        self.sequences: list[Sequence] = []
        self._cache, self._capacity = cache, capacity
        self._order: np.ndarray | None = None  # the lanes of `sequences`, until these change
        # Of a block that was given back since, nothing is read before it is written.
        self._block_copies = self._no_copies()

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_room(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.sequences) < self._capacity

    def in_order(self) -> np.ndarray:
        """The lanes of the sequences, int64."""
        if self._order is None:
            self._order = np.array([sequence.lane for sequence in self.sequences], np.int64)
        return self._order

    def enter(self, sequence: Sequence, table: Table, num_computed: int, slots: Slots) -> None:
        """A sequence begins to run, with a table that has KV of its first `num_computed` tokens."""
        sequence.table = table
        insort(self.sequences, sequence, key=order_of)
        self.lanes.enter(sequence, num_computed, *slots)
        self._order = None

    def leave(self, sequence: Sequence) -> None:
        """A sequence runs no longer: take all that it holds."""
        self._cache.claims.withdraw(sequence.chain)
        self._cache.tables.release(sequence.table)
        self.states.release(sequence)
        sequence.table = Table()
        remove_from(self.sequences, sequence)
        self.lanes.leave(sequence)
        self._order = None

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence so many more blocks of each group; there are enough."""
        self._cache.tables.extend(sequence.table, num_blocks)
        self.lanes.add_blocks(sequence)

    def fork(self, parent: Sequence, sample: OpenSample, token: int) -> Sequence:
        """A second sequence, for `sample`, with the tokens and the KV of `parent`, all of whose tokens are computed,
        and then its own first `token`.

        It shares the full blocks; the one that is left, if any, is copied before the next step. Without room to run, or
        if the parent has lost its blocks, the second one does not run: it holds nothing.
        """
        chain, tokens = parent.chain.fork(), parent.tokens + array("i", (token,))
        child = Sequence(sample.order, tokens, parent.num_prompt_tokens, chain, Generation([sample]))
        child.num_cached_tokens = parent.num_cached_tokens
        child.routes = None if parent.routes is None else parent.routes.fork()
        num_fresh = len(parent.table) - parent.num_computed // self._cache.block_size
        has_room = self.has_room and num_fresh <= self._cache.tables.num_available
        slots = self.states.fork(parent) if has_room and parent.table else None
        if slots is not None:
            table, copies = self._cache.tables.fork(parent.table, parent.num_computed)
            self.enter(child, table, parent.num_computed, slots)
            for pending, new in zip(self._block_copies, copies, strict=True):
                pending.update(new)
        return child

    def take_block_copies(self) -> list[dict[int, int]]:
        """What has to be copied before the next step computes anything, once: of each group destination to source."""
        copies, self._block_copies = self._block_copies, self._no_copies()
        return copies

    def check_integrity(self) -> None:
        """Raise RuntimeError unless these sequences account for every block, slot and lane."""
        self._cache.check_integrity(sequence.table for sequence in self.sequences)
        self.states.check_integrity(self.sequences)
        self.lanes.check(self.sequences)

    def _no_copies(self) -> list[dict[int, int]]:
        return [{} for _ in self._cache.tables.windows]
