"""Recurrent state: which slot each running sequence reads and writes, and where checkpoints are taken.

A slot holds what all recurrent layers remember of one sequence after one of its tokens. A running sequence has a `slot`
of its own. It reads its `source`: its own after a step, none if it begins, a checkpoint's or a parent's if it goes on
from there, which stays as it is. It writes its `target`: its own, or one reserved for a checkpoint. It holds a
reference to each, and a step under way holds one to the checkpoint that it writes. All three are counters of its lane
(`sequence.Counters`). So nothing is copied to restore a checkpoint, to fork, or to take a checkpoint.

`StateSlots` owns each slot's references, the free slots, and the checkpoints: entry of the prefix index -> slot, within
their budget. `Branches` owns where prompts branch of which a checkpoint is still to come. `RecurrentStates` joins them
to the lanes. Not owned here: the tensors that slots are made of (`model_runner`), and which prefixes there are
(`prefix_cache`).

Checkpoints lie at absolute positions, all of them borders of blocks, and chunks are cut there:

- every `interval` tokens of what is computed in chunks: a prompt, or all tokens after a preemption;
- at the last border of blocks within a prompt that the prompt can be resumed from when it comes again;
- where the tokens end that a sequence found in the cache but had to compute for want of a checkpoint: prompts branch
  there, and those that come meanwhile wait for this one as they wait for a prefix that is being computed;
- every `decode_interval` tokens while decoding.

A checkpoint is reserved when the step that will end at it is planned, ready once that step is done, pinned while a
sequence goes on from it, and forgotten when its entry goes, when another one needs its place, or with the epoch. One
for which there is no slot is skipped: nothing waits for it, and where a chunk is cut changes no bit.

Promises: a slot that a sequence reads or writes is never handed out; there are at most `budget` checkpoints, reserved
ones included; a live state never waits for a slot that only a checkpoint holds.
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
    """Lifetime counters of checkpoints, and gauges of this moment.

    `skipped`: those that found no place in the budget. `evicted`: those that gave their place to another one or to a
    live state. `restored`: how often a sequence went on from one. `ready`: those that can be restored now; `reserved`:
    those that steps under way write.
    """

    skipped: int = 0
    evicted: int = 0
    restored: int = 0
    ready: int = 0
    reserved: int = 0


class StateSlots:
    """`num_slots` slots, at most `budget` of which are checkpoints."""

    def __init__(self, num_slots: int, budget: int) -> None:
        self.num_slots = num_slots
        self.budget = budget
        self.stats = StateStats()
        self._references = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._ready: OrderedDict[Entry, int] = OrderedDict()

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
        if not self._can_reserve:
            self._evict()
        if not self._can_reserve:
            self.stats.skipped += 1
            return None
        self.stats.reserved += 1
        return self._new()

    def cancel(self, slot: int) -> None:
        """Gives back a slot that was reserved."""
        self.stats.reserved -= 1
        self.release(slot)

    def make_ready(self, entry: Entry, slot: int) -> None:
        """Makes a reserved slot, now written, the checkpoint at the end of an entry's block, unless that has one."""
        if entry in self._ready:
            self.cancel(slot)
            return
        self._ready[entry] = slot
        self.stats.reserved -= 1
        self.stats.ready += 1

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
                self.stats.ready -= 1
                self.release(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless `held`, a slot for each reference of a sequence or a step, accounts for all."""
        counts = [0] * self.num_slots
        for slot in (*held, *self._ready.values()):
            counts[slot] += 1
        wrong = {slot for slot in range(self.num_slots) if counts[slot] != self._references[slot]}
        wrong |= {slot for slot in range(self.num_slots) if (counts[slot] == 0) != (slot in self._free)}
        is_counted = self.stats.ready == len(self._ready) and self.stats.reserved + self.stats.ready <= self.budget
        if wrong or len(set(self._free)) != len(self._free) or not is_counted:
            raise RuntimeError(f"states: slots {sorted(wrong)} are not counted exactly once, or beyond the budget")

    @property
    def _can_reserve(self) -> bool:
        return self.stats.reserved + self.stats.ready < self.budget and bool(self._free)

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


@dataclass(frozen=True)
class Intervals:
    """Tokens from checkpoint to checkpoint, multiples of the block size; 0: none. `prompts`: while chunks are computed.
    `decodes`: while decoding.
    """

    prompts: int
    decodes: int


NO_CHECKPOINTS = Intervals(0, 0)


class Slots(NamedTuple):
    """What a sequence begins to run with: a slot of its own, and the one whose state it goes on from."""

    own: int
    source: int


NO_SLOTS = Slots(NO_SLOT, NO_SLOT)


class Branches:
    """Where prompts branch of which no checkpoint is there: by the hash of the last block before it, the sequence that
    is about to take one.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._takers: dict[bytes, Sequence] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether a sequence is about to take a checkpoint at the end of this block."""
        return key in self._takers

    def find(self, sequence: Sequence, num_resumed: int, num_hits: int) -> bytes | None:
        """Of the blocks that a sequence would have to compute though they are cached, the last one at whose end another
        sequence is about to take a checkpoint.
        """
        keys = sequence.chain.hashes[num_resumed:num_hits]
        return next((key for key in reversed(keys) if key in self._takers), None)

    def expect(self, sequence: Sequence, num_hits: int) -> None:
        """Lets a sequence that begins take a checkpoint at the end of the blocks that it found in the cache."""
        sequence.branch = num_hits * self._block_size
        self._takers.setdefault(sequence.chain.hashes[num_hits - 1], sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has taken its checkpoint, or takes none."""
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
        self._pending: dict[tuple[Sequence, int], int] = {}  # of steps under way: sequence and position -> slot

    def begin(self, hits: list[Entry]) -> Slots | None:
        """Slots for a sequence that is about to run, with the state at the end of `hits`. None, with nothing changed,
        if there is none left.
        """
        # First what is restored, so that taking a slot cannot evict it.
        source = self.slots.restore(hits[-1]) if hits else NO_SLOT
        own = self.slots.take()
        if own is None:
            self._drop(source)
            return None
        self.slots.stats.restored += source != NO_SLOT
        return Slots(own, source)

    def fork(self, parent: Sequence) -> Slots | None:
        """Slots for a child that goes on from its parent's state, which stays as it is from now on. None if there is
        none left.
        """
        lanes, lane = self._lanes, parent.lane
        is_own = lanes.source[lane] == lanes.slot[lane]
        if self.slots.num_available < 1 + is_own:
            return None
        if is_own:
            lanes.slot[lane] = lanes.target[lane] = self._taken()
        return Slots(self._taken(), self.slots.share(int(lanes.source[lane])))

    def cut(self, sequence: Sequence, size: int) -> int:
        """As much of the next `size` tokens as ends at the next checkpoint, for which a slot is then reserved."""
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
        """Whether the next token of the sequence of one of these lanes ends at a checkpoint of decodes."""
        interval = self._intervals.decodes if self.slots.budget else 0
        return interval > 0 and bool(((self._lanes.num_computed[lanes] + 1) % interval == 0).any())

    def advance(self, chunks: Chunks) -> None:
        """Records that a step leaves the states of `chunks` in their targets: the next one goes on from there."""
        slot, source, target = self._lanes.slot, self._lanes.source, self._lanes.target
        for place in np.flatnonzero(source[chunks.lanes] != target[chunks.lanes]).tolist():
            lane, end = chunks.lanes[place], int(chunks.ends[place])
            if source[lane] != slot[lane]:
                self._drop(int(source[lane]))
            if target[lane] != slot[lane]:
                self._pending[chunks.sequences[place], end] = self.slots.share(int(target[lane]))
            source[lane], target[lane] = target[lane], slot[lane]

    def publish(self, chunks: Chunks, epoch: int) -> None:
        """Makes the checkpoints ready at which `chunks` end, now that these are published; those of an earlier epoch,
        and of sequences that lost their blocks since, are dropped.
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
        """Takes the slots of a sequence that is about to leave its lane; what `cut` reserved is not computed."""
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
        """Slot, source and target of a running sequence."""
        lanes, lane = self._lanes, sequence.lane
        return int(lanes.slot[lane]), int(lanes.source[lane]), int(lanes.target[lane])

    def _next(self, sequence: Sequence) -> int:
        """Where the next checkpoint of a sequence lies; 0 if there is none within its tokens."""
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
    """The first multiple of an interval in (start, last]; 0 if there is none."""
    place = (start // interval + 1) * interval if interval else 0
    return place if place <= last else 0
