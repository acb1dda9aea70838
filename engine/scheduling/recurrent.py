"""Recurrent states: the slots that running sequences read and write, and the checkpoints of their states.

A slot holds the state of all recurrent layers for one sequence, after one of its tokens. A running sequence has a
`slot` of its own. It reads its state from `source` and writes it to `target`:

- `source` is its own slot after a step, no slot if the sequence starts from nothing, or the slot of a checkpoint or a
  parent from which it resumes. The slot of a checkpoint or a parent is not changed.
- `target` is its own slot, or a slot reserved for a checkpoint.

A sequence holds a reference to each of these slots, and a step in flight holds a reference to the checkpoint that it
writes. `slot`, `source` and `target` are counters of the sequence's lane (`sequence.Counters`), so that restoring a
checkpoint, forking and taking a checkpoint copy no state.

`StateSlots` owns the references to each slot, the free slots, and the checkpoints (entry of the prefix index -> slot)
within their budget. `Branches` owns the places where prompts branch and a checkpoint is still pending.
`RecurrentStates` connects them to the lanes. Not owned here: the tensors of the slots (`model_runner`) and the known
prefixes (`prefix_cache`).

Checkpoints lie at absolute positions on block boundaries. Chunks are cut there:

- every `Intervals.prompts` tokens in tokens that are computed in chunks: a prompt, or all tokens after a preemption;
- at the last block boundary within a prompt from which a repetition of the same prompt can resume;
- where prompts branch: at the end of the tokens that a sequence found in the cache but had to compute, because there
  was no checkpoint. Prompts that arrive meanwhile wait for this checkpoint as they wait for a prefix that is being
  computed;
- every `Intervals.decodes` tokens while decoding.

A checkpoint is reserved when the step that ends at it is planned, and ready when that step is done. It is pinned while
a sequence resumes from it. It is dropped with its entry, with the epoch, or if another checkpoint or a live state needs
its slot. If there is no slot for a checkpoint, it is skipped: no sequence waits for it, and the chunk is not cut. Where
chunks are cut does not change a bit of the results.

Promises:

- A slot that a sequence reads or writes is never handed out.
- There are at most `budget` checkpoints, including reserved ones.
- A live state never waits for a slot that only a checkpoint holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kernels.contract import NO_SLOT
from ..cache.prefix_cache import Entry
from .sequence import Chunks, Lanes, Sequence


@dataclass
class StateStats:
    """Lifetime counters of checkpoints, and gauges of the current moment.

    `skipped`: checkpoints for which there was no slot within the budget. `evicted`: checkpoints that gave up their slot
    to another checkpoint or to a live state. `restored`: how often a sequence resumed from a checkpoint. `ready`:
    checkpoints that can be restored now. `reserved`: checkpoints that steps in flight write.
    """

    skipped: int = 0
    evicted: int = 0
    restored: int = 0
    ready: int = 0
    reserved: int = 0


class StateSlots:
    """`num_slots` slots, of which at most `budget` hold checkpoints."""

    def __init__(self, num_slots: int, budget: int) -> None:
        self.num_slots = num_slots
        self.budget = budget
        self.stats = StateStats()
        self._references = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._ready: OrderedDict[Entry, int] = OrderedDict()

    @property
    def num_available(self) -> int:
        """The number of slots available to live states."""
        return len(self._free) + sum(self._references[slot] == 1 for slot in self._ready.values())

    def take(self) -> int | None:
        """Take a slot for a live state, or return None if all slots are in use.

        If no slot is free, evict the least recently used checkpoint that is not being read.
        """
        if not self._free:
            self._evict()
        return self._new() if self._free else None

    def share(self, slot: int) -> int:
        """Add a reference to a slot and return the slot."""
        self._references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Drop a reference to a slot."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            self._free.append(slot)

    def reserve(self) -> int | None:
        """Reserve a slot for a checkpoint that a step will write, if necessary by evicting another checkpoint.

        Return None if all slots are in use.
        """
        if not self._can_reserve:
            self._evict()
        if not self._can_reserve:
            self.stats.skipped += 1
            return None
        self.stats.reserved += 1
        return self._new()

    def cancel(self, slot: int) -> None:
        """Release a reserved slot."""
        self.stats.reserved -= 1
        self.release(slot)

    def make_ready(self, entry: Entry, slot: int) -> None:
        """Turn a written, reserved slot into the checkpoint at the end of an entry's block.

        If the entry has a checkpoint already, release the slot.
        """
        if entry in self._ready:
            self.cancel(slot)
            return
        self._ready[entry] = slot
        self.stats.reserved -= 1
        self.stats.ready += 1

    def is_ready(self, entry: Entry) -> bool:
        """Return whether there is a checkpoint at the end of an entry's block."""
        return entry in self._ready

    def restore(self, entry: Entry) -> int:
        """Return the slot of an entry's checkpoint, with one more reference, so that the slot is kept."""
        self._ready.move_to_end(entry)
        return self.share(self._ready[entry])

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop the checkpoints of removed entries. Sequences that read them keep their references."""
        for entry in entries:
            slot = self._ready.pop(entry, None)
            if slot is not None:
                self.stats.ready -= 1
                self.release(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless `held` accounts for all references.

        `held`: one slot for each reference of a sequence or a step.
        """
        counts = [0] * self.num_slots
        for slot in (*held, *self._ready.values()):
            counts[slot] += 1
        wrong = {slot for slot in range(self.num_slots) if counts[slot] != self._references[slot]}
        wrong |= {slot for slot in range(self.num_slots) if (counts[slot] == 0) != (slot in self._free)}
        is_counted = self.stats.ready == len(self._ready) and self.stats.reserved + self.stats.ready <= self.budget
        if wrong or len(set(self._free)) != len(self._free) or not is_counted:
            raise RuntimeError(f"states: slots {sorted(wrong)} are not counted exactly once, or exceed the budget")

    @property
    def _can_reserve(self) -> bool:
        return self.stats.reserved + self.stats.ready < self.budget and bool(self._free)

    def _new(self) -> int:
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def _evict(self) -> None:
        """Drop the least recently used checkpoint that is not being read, if there is one."""
        entry = next((entry for entry, slot in self._ready.items() if self._references[slot] == 1), None)
        if entry is not None:
            self.forget([entry])
            self.stats.evicted += 1


@dataclass(frozen=True)
class Intervals:
    """Numbers of tokens between checkpoints, multiples of the block size; 0: no checkpoints.

    `prompts`: the interval for tokens that are computed in chunks. `decodes`: the interval while decoding.
    """

    prompts: int
    decodes: int


NO_CHECKPOINTS = Intervals(0, 0)


class Slots(NamedTuple):
    """The slots with which a sequence starts to run: a slot of its own, and the slot from which its state resumes."""

    own: int
    source: int


NO_SLOTS = Slots(NO_SLOT, NO_SLOT)


class Branches:
    """The places where prompts branch and a checkpoint is pending.

    Maps the hash of the last block before the branch to the sequence that will take the checkpoint.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._takers: dict[bytes, Sequence] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether a sequence will take a checkpoint at the end of this block."""
        return key in self._takers

    def find(self, sequence: Sequence, num_resumed: int, num_hits: int) -> bytes | None:
        """Return the hash of the last block at which another sequence will take a checkpoint, or None.

        Only blocks [num_resumed, num_hits) count. Without the checkpoint, the sequence would have to compute these
        blocks although they are cached.
        """
        keys = sequence.chain.hashes[num_resumed:num_hits]
        return next((key for key in reversed(keys) if key in self._takers), None)

    def expect(self, sequence: Sequence, num_hits: int) -> None:
        """Make a starting sequence take a checkpoint at the end of the blocks that it found in the cache."""
        sequence.branch = num_hits * self._block_size
        self._takers.setdefault(sequence.chain.hashes[num_hits - 1], sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget the branch of a sequence, which has taken its checkpoint or will not take one."""
        if sequence.branch:
            key = sequence.chain.hashes[sequence.branch // self._block_size - 1]
            if self._takers.get(key) is sequence:
                del self._takers[key]
            sequence.branch = 0


class RecurrentStates:
    """The slots of running sequences, and the checkpoints that their steps take."""

    def __init__(self, slots: StateSlots, lanes: Lanes, block_size: int, intervals: Intervals) -> None:
        self.slots = slots
        self.branches = Branches(block_size)
        self._lanes = lanes
        self._block_size = block_size
        self._intervals = intervals
        self._pending: dict[tuple[Sequence, int], int] = {}  # for steps in flight: sequence and position -> slot

    def begin(self, hits: list[Entry]) -> Slots | None:
        """Return the slots for a sequence that is about to run from the state at the end of `hits`.

        Return None, with nothing changed, if all slots are in use.
        """
        # Restore first, so that taking a slot cannot evict the checkpoint.
        source = self.slots.restore(hits[-1]) if hits else NO_SLOT
        own = self.slots.take()
        if own is None:
            self._drop(source)
            return None
        self.slots.stats.restored += source != NO_SLOT
        return Slots(own, source)

    def fork(self, parent: Sequence) -> Slots | None:
        """Return slots for a child that continues from its parent's state, which does not change from now on.

        Return None if there are not enough slots left.
        """
        lanes, lane = self._lanes, parent.lane
        is_own = lanes.source[lane] == lanes.slot[lane]
        if self.slots.num_available < 1 + is_own:
            return None
        if is_own:
            lanes.slot[lane] = lanes.target[lane] = self._taken()
        return Slots(self._taken(), self.slots.share(int(lanes.source[lane])))

    def cut(self, sequence: Sequence, size: int) -> int:
        """Return how many of the next `size` tokens to compute in one chunk.

        If the tokens reach the next checkpoint, reserve a slot for it and end the chunk there. If there is no slot,
        skip the checkpoint and return `size`.
        """
        place = self._next(sequence) if self.slots.budget else 0
        if place == 0 or sequence.num_computed + size < place:
            return size
        reserved = self.slots.reserve()
        if reserved is None:
            if sequence.num_computed + size >= sequence.branch:
                self.branches.leave(sequence)
            return size
        self._lanes.target[sequence.lane] = reserved
        return place - sequence.num_computed

    def cuts_decodes(self, lanes: np.ndarray) -> bool:
        """Return whether the next token of a sequence in one of these lanes ends at a decode checkpoint."""
        interval = self._intervals.decodes if self.slots.budget else 0
        return interval > 0 and bool(((self._lanes.num_computed[lanes] + 1) % interval == 0).any())

    def advance(self, chunks: Chunks) -> None:
        """Record that a step writes the states of `chunks` to their targets, from which the next step continues."""
        slot, source, target = self._lanes.slot, self._lanes.source, self._lanes.target
        for place in np.flatnonzero(source[chunks.lanes] != target[chunks.lanes]).tolist():
            lane, end = chunks.lanes[place], int(chunks.ends[place])
            if source[lane] != slot[lane]:
                self._drop(int(source[lane]))
            if target[lane] != slot[lane]:
                self._pending[chunks.sequences[place], end] = self.slots.share(int(target[lane]))
            source[lane], target[lane] = target[lane], slot[lane]

    def publish(self, chunks: Chunks, epoch: int) -> None:
        """Make the checkpoints at the ends of `chunks` ready; their blocks must be published.

        Checkpoints of an earlier epoch, and of sequences that have lost their blocks since, are dropped.
        """
        if not self._pending:
            return
        for sequence, _, end in chunks:
            slot = self._pending.pop((sequence, end), None)
            if slot is None:
                continue
            if end == sequence.branch:
                self.branches.leave(sequence)
            if sequence.table and sequence.chain.epoch == epoch:
                self.slots.make_ready(sequence.chain.entries[end // self._block_size - 1], slot)
            else:
                self.slots.cancel(slot)

    def release(self, sequence: Sequence) -> None:
        """Release the slots of a sequence that is about to leave its lane. Cancel a checkpoint reserved by `cut`."""
        self.branches.leave(sequence)
        slot, source, target = self._held(sequence)
        if slot == NO_SLOT:
            return
        if target != slot:
            self.slots.cancel(target)
        if source != slot:
            self._drop(source)
        self.slots.release(slot)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless each slot is accounted for."""
        held = [slot for sequence in running for slot in {*self._held(sequence)} - {NO_SLOT}]
        self.slots.check_integrity([*held, *self._pending.values()])

    def _held(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return slot, source and target of a running sequence."""
        lanes, lane = self._lanes, sequence.lane
        return int(lanes.slot[lane]), int(lanes.source[lane]), int(lanes.target[lane])

    def _next(self, sequence: Sequence) -> int:
        """Return the position of the next checkpoint of a sequence, or 0 if there is none within its tokens."""
        start, last = sequence.num_computed, sequence.num_tokens - 1
        if sequence.num_uncomputed == 1:
            return _multiple(self._intervals.decodes, start, last + 1)
        border = (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size
        places = _multiple(self._intervals.prompts, start, last), border, sequence.branch
        return min((place for place in places if place > start), default=0)

    def _taken(self) -> int:
        slot = self.slots.take()
        assert slot is not None
        return slot

    def _drop(self, slot: int) -> None:
        if slot != NO_SLOT:
            self.slots.release(slot)


def _multiple(interval: int, start: int, last: int) -> int:
    """Return the first multiple of an interval in (start, last], or 0 if there is none."""
    place = (start // interval + 1) * interval if interval else 0
    return place if place <= last else 0
