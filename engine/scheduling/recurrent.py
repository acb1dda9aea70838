"""Recurrent states: the slots that running sequences read and write, and the checkpoints of their states.

A slot holds the state that all recurrent layers have after a given token of a sequence. Each running sequence has a
`slot` of its own. A step reads the sequence's state from slot `source` and writes the new state to slot `target`:

- `source` is the slot that the previous step wrote, normally the sequence's own slot. If the sequence resumes from a
  checkpoint on the device, `source` is at first the slot of the checkpoint. If the sequence is a fork, `source` is at
  first the slot of its parent. The slot of a checkpoint or of a parent is only read. If the sequence starts without a
  state, `source` is `NO_SLOT` at first. If the sequence resumes from a checkpoint on the host, the checkpoint is copied
  to the sequence's own slot.
- `target` is the sequence's own slot, or a slot reserved for a checkpoint.

A sequence holds a reference to each of its slots, and a step in flight holds a reference to the checkpoint that it
writes. `slot`, `source` and `target` are stored in the sequence's lane (`sequence.Counters`). Restoring a checkpoint
that is on the device, taking a checkpoint, and forking copy no state: they change only `slot`, `source` and `target`.

`StateSlots` owns the reference counts, the free slots, and up to `budget` checkpoints (a map from entries of the prefix
index to slots). `Branches` owns each position at which prompts branch, as long as the checkpoint at this position is
pending. `RecurrentStates` connects `StateSlots` and `Branches` to the lanes. This module does not own the tensors of
the slots (`model_runner`) or the published prefixes (`prefix_cache`).

A chunk ends where a checkpoint is taken. All checkpoints are taken at block boundaries:

- A checkpoint is taken every `Intervals.prompts` tokens while tokens are computed in chunks (a prompt, or all tokens
  after a preemption).
- A checkpoint is taken at the last block boundary before the last token of a prompt, so that a request with the same
  prompt can resume from the checkpoint.
- A checkpoint is taken where prompts branch: at the end of the blocks that a sequence found in the cache, but must
  compute again because a checkpoint is missing. Other prompts with the same blocks wait for the checkpoint at the
  branch.
- A checkpoint is taken every `Intervals.decodes` tokens while a sequence decodes.

A checkpoint is reserved when the scheduler plans the step that writes it. A reserved checkpoint is ready when the step
that writes it is done. A checkpoint cannot be evicted while a sequence reads it. A checkpoint is dropped when its index
entry is removed or when the epoch changes. When another checkpoint or a live state needs the slot of a checkpoint, the
checkpoint is copied to the host tier, or dropped if the host has no slot. If no slot is available for a checkpoint, the
checkpoint is skipped: no sequence waits for the checkpoint, and the chunk does not end early. The results have the same
bits wherever chunks end.

Guarantees:

- A slot that a sequence reads or writes is never given to another sequence or checkpoint.
- There are at most `budget` checkpoints, including reserved checkpoints.
- A live state never waits for a slot that holds an unused checkpoint: the checkpoint is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...kernels.contract import NO_SLOT
from ..cache.host_tier import Copies, HostTier
from ..cache.prefix_cache import Chain, Entry
from .sequence import Chunks, Lanes, Sequence


@dataclass
class StateStats:
    """Lifetime counters and current gauges of checkpoints.

    `skipped`: checkpoints that were not taken, because no slot was available within the budget. `evicted`: checkpoints
    that lost their slot to another checkpoint or a live state. `restored`: how often a sequence resumed from a
    checkpoint. `ready`: checkpoints that can be restored now. `reserved`: checkpoints that the steps in flight will
    complete.
    """

    skipped: int = 0
    evicted: int = 0
    restored: int = 0
    ready: int = 0
    reserved: int = 0


class StateSlots:
    """The reference counts of `num_slots` slots. At most `budget` of the slots hold checkpoints.

    `host_slots`: the number of evicted checkpoints that the host can hold. `host`: the evicted checkpoints. `copies`:
    the copies of states that the next step must make first.
    """

    def __init__(self, num_slots: int, budget: int, host_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.budget = budget
        self.copies = Copies()
        self.host = HostTier[Entry]([host_slots], [self.copies], lambda _, entry: self._places.pop(entry))
        self._places: dict[Entry, int] = {}
        self.stats = StateStats()
        self._references = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._ready: OrderedDict[Entry, int] = OrderedDict()

    def has_available(self, count: int) -> bool:
        """Return whether `count` slots are free, or hold checkpoints that can be evicted."""
        evictable = (slot for slot in self._ready.values() if self._references[slot] == 1)
        missing = max(0, count - len(self._free))
        return sum(1 for _ in islice(evictable, missing)) == missing

    def take(self) -> int | None:
        """Return a slot for a live state, or None if all slots are in use.

        If no slot is free, evict the least recently used checkpoint that no sequence reads.
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
        """Return a slot for a checkpoint that a step will write. Evict another checkpoint if necessary.

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
        """Store a reserved slot as the checkpoint at the end of an entry's block. A step must have written the slot.

        If the entry has a checkpoint already, release the slot.
        """
        if entry in self._ready:
            self.cancel(slot)
            return
        self._drop_on_host(entry)
        self._ready[entry] = slot
        self.stats.reserved -= 1
        self.stats.ready += 1

    def is_ready(self, entry: Entry) -> bool:
        """Return whether there is a checkpoint at the end of an entry's block, on the device or on the host."""
        return entry in self._ready or entry in self._places

    def is_on_host(self, entry: Entry) -> bool:
        """Return whether the checkpoint at the end of an entry's block is on the host."""
        return entry in self._places

    def restore(self, entry: Entry) -> int:
        """Return the slot of an entry's checkpoint, and add a reference, so that the checkpoint cannot be evicted."""
        self._ready.move_to_end(entry)
        return self.share(self._ready[entry])

    def take_from_host(self, entry: Entry) -> int | None:
        """Return a slot for a live state that begins as the checkpoint of an entry. The checkpoint must be on the host,
        and stays there.

        Return None if all slots are in use.
        """
        place = self._places[entry]
        self.host.hold(0, [place])  # `take` may store another checkpoint
        slot = self.take()
        if slot is not None:
            self.host.restore(0, place, slot)
        self.host.release(0, place)
        return slot

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop the checkpoints of removed entries. A slot that a sequence still reads stays in use."""
        for entry in entries:
            slot = self._ready.pop(entry, None)
            if slot is not None:
                self.stats.ready -= 1
                self.release(slot)
            self._drop_on_host(entry)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless `held` accounts for all references.

        `held`: one slot for each reference that a sequence or a step holds.
        """
        counts = [0] * self.num_slots
        for slot in (*held, *self._ready.values()):
            counts[slot] += 1
        wrong = {slot for slot in range(self.num_slots) if counts[slot] != self._references[slot]}
        wrong |= {slot for slot in range(self.num_slots) if (counts[slot] == 0) != (slot in self._free)}
        listed = {slot: entry for entry, slot in self._places.items()}
        wrong |= self.host.pools[0].miscounted([])
        if listed != {~slot: entry for slot, entry in self.host.pools[0].published.items()}:
            raise RuntimeError("states: the checkpoints on the host do not match the slots of the host")
        is_counted = self.stats.ready == len(self._ready) and self.stats.reserved + self.stats.ready <= self.budget
        if wrong or len(set(self._free)) != len(self._free) or not is_counted:
            raise RuntimeError(
                f"states: slots {sorted(wrong)} have wrong reference counts, or there are more checkpoints than the "
                "budget allows"
            )

    @property
    def _can_reserve(self) -> bool:
        return self.stats.reserved + self.stats.ready < self.budget and bool(self._free)

    def _new(self) -> int:
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def _evict(self) -> None:
        """Move a checkpoint to the host: the least recently used checkpoint that no sequence reads, if there is one. If
        the host has no slot, drop the checkpoint.
        """
        entry = next((entry for entry, slot in self._ready.items() if self._references[slot] == 1), None)
        if entry is None:
            return
        slot = self._ready.pop(entry)
        place = self.host.store(0, slot, entry)
        if place is not None:
            self._places[entry] = place
        self.release(slot)
        self.stats.ready -= 1
        self.stats.evicted += 1

    def _drop_on_host(self, entry: Entry) -> None:
        place = self._places.pop(entry, None)
        if place is not None:
            self.host.drop(0, place)


@dataclass(frozen=True)
class Intervals:
    """The numbers of tokens between checkpoints: multiples of the block size, or 0 for no checkpoints.

    `prompts`: the interval for tokens that are computed in chunks. `decodes`: the interval for tokens that are decoded.
    """

    prompts: int
    decodes: int


NO_CHECKPOINTS = Intervals(0, 0)


class Slots(NamedTuple):
    """The slots of a sequence that starts to run: its own slot, and the slot from which it reads its first state."""

    own: int
    source: int


NO_SLOTS = Slots(NO_SLOT, NO_SLOT)


class Branches:
    """The positions at which prompts branch, as long as the checkpoints at these positions are pending.

    Each position is identified by the hash of the block before it, and mapped to the sequence that will take the
    checkpoint.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._takers: dict[bytes, Sequence] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether a sequence will take a checkpoint at the end of the block with this hash."""
        return key in self._takers

    def find(self, sequence: Sequence, num_resumed: int, num_hits: int) -> bytes | None:
        """Return the hash of the last block at which another sequence will take a checkpoint, or None.

        The search is limited to blocks [num_resumed, num_hits). Blocks in this range are cached, but `sequence` must
        compute them again unless it waits for a checkpoint there.
        """
        keys = sequence.chain.hashes[num_resumed:num_hits]
        return next((key for key in reversed(keys) if key in self._takers), None)

    def expect(self, sequence: Sequence, num_hits: int) -> None:
        """When a sequence starts to run, plan a checkpoint at the end of the blocks that it found in the cache."""
        sequence.branch = num_hits * self._block_size
        self._takers.setdefault(sequence.chain.hashes[num_hits - 1], sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence's branch, because the sequence has taken the checkpoint at the branch or will never take
        the checkpoint.
        """
        if sequence.branch:
            key = sequence.chain.hashes[sequence.branch // self._block_size - 1]
            if self._takers.get(key) is sequence:
                del self._takers[key]
            sequence.branch = 0


class RecurrentStates:
    """The slots of running sequences, and the checkpoints that steps write."""

    def __init__(self, slots: StateSlots, lanes: Lanes, block_size: int, intervals: Intervals) -> None:
        self.slots = slots
        self.branches = Branches(block_size)
        self._lanes = lanes
        self._block_size = block_size
        self._intervals = intervals
        self._pending: dict[tuple[Sequence, int], int] = {}  # checkpoints in flight: (sequence, position) -> slot

    @property
    def _decode_interval(self) -> int:
        """The number of tokens between checkpoints while decoding; 0 for no checkpoints."""
        return self._intervals.decodes if self.slots.budget else 0

    def begin(self, hits: list[Entry]) -> Slots | None:
        """Return the slots for a sequence that starts from the state at the end of `hits`.

        Return None, with nothing changed, if all slots are in use.
        """
        if hits and self.slots.is_on_host(hits[-1]):
            source = own = self.slots.take_from_host(hits[-1])
        else:
            # Restore the checkpoint first, so that `take` cannot evict it.
            source = self.slots.restore(hits[-1]) if hits else NO_SLOT
            own = self.slots.take()
        if source is None or own is None:
            self._drop(NO_SLOT if source is None else source)
            return None
        self.slots.stats.restored += source != NO_SLOT
        return Slots(own, source)

    def fork(self, parent: Sequence) -> Slots | None:
        """Return slots for a child that continues from the current state of its parent.

        The parent's current state is not overwritten after this call.

        Return None if too few slots are available.
        """
        lanes, lane = self._lanes, parent.lane
        is_own = lanes.states.source[lane] == lanes.states.slot[lane]
        if not self.slots.has_available(1 + bool(is_own)):
            return None
        if is_own:
            lanes.states.slot[lane] = lanes.states.target[lane] = self._taken()
        return Slots(self._taken(), self.slots.share(int(lanes.states.source[lane])))

    def cut(self, sequence: Sequence, size: int) -> int:
        """Return how many of the next `size` tokens to compute in one chunk.

        If the tokens reach the position of the next checkpoint, reserve a slot and end the chunk at that position. If
        no slot is available, skip the checkpoint and return `size`.
        """
        place = self._next(sequence) if self.slots.budget else 0
        if place == 0 or sequence.num_computed + size < place:
            return size
        reserved = self.slots.reserve()
        if reserved is None:
            if sequence.num_computed + size >= sequence.branch:
                self.branches.leave(sequence)
            return size
        self._lanes.states.target[sequence.lane] = reserved
        return place - sequence.num_computed

    def cuts_decodes(self, lanes: np.ndarray) -> bool:
        """Return whether a sequence in one of these lanes reaches a decode checkpoint with its next token."""
        interval = self._decode_interval
        return interval > 0 and bool(((self._lanes.num_computed[lanes] + 1) % interval == 0).any())

    def most_drafted(self, ends: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Return how many of `most` tokens may be drafted after chunks that end at `ends`. All arrays are int64 [N].

        A checkpoint is taken after a row that is not drafted, so drafts end before the next decode checkpoint.
        """
        interval = self._decode_interval
        return np.minimum(most, (-ends % interval - 1).clip(0)) if interval else most

    def advance(self, chunks: Chunks) -> None:
        """Record that a step writes the states of `chunks` to their target slots, which the next step reads."""
        slot, source, target = self._lanes.states.slot, self._lanes.states.source, self._lanes.states.target
        for place in np.flatnonzero(source[chunks.lanes] != target[chunks.lanes]).tolist():
            lane, end = chunks.lanes[place], int(chunks.ends[place])
            if source[lane] != slot[lane]:
                self._drop(int(source[lane]))
            if target[lane] != slot[lane]:
                self._pending[chunks.sequences[place], end] = self.slots.share(int(target[lane]))
            source[lane], target[lane] = target[lane], slot[lane]

    def publish(self, chunks: Chunks, is_current: Callable[[Chain], bool]) -> None:
        """Mark the checkpoints at the ends of `chunks` as ready. The blocks of `chunks` must be published.
        `is_current`: as `BlockIdentity.is_current`.

        Drop checkpoints of an earlier epoch, and checkpoints of sequences that have lost their blocks.
        """
        if not self._pending:
            return
        for sequence, _, end in chunks:
            slot = self._pending.pop((sequence, end), None)
            if slot is None:
                continue
            if end == sequence.branch:
                self.branches.leave(sequence)
            if sequence.table and is_current(sequence.chain):
                self.slots.make_ready(sequence.chain.entries[end // self._block_size - 1], slot)
            else:
                self.slots.cancel(slot)

    def release(self, sequence: Sequence) -> None:
        """Release the slots of a sequence that leaves its lane. Cancel a checkpoint that `cut` reserved."""
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
        """Raise RuntimeError unless `running` and the steps in flight account for all references to slots."""
        held = [slot for sequence in running for slot in {*self._held(sequence)} - {NO_SLOT}]
        self.slots.check_integrity([*held, *self._pending.values()])

    def _held(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return slot, source and target of a running sequence."""
        lanes, lane = self._lanes, sequence.lane
        return int(lanes.states.slot[lane]), int(lanes.states.source[lane]), int(lanes.states.target[lane])

    def _next(self, sequence: Sequence) -> int:
        """Return the position of the next checkpoint within a sequence's tokens, or 0 if there is none."""
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
    """Return the first multiple of `interval` that is in (start, last], or 0 if there is none."""
    place = (start // interval + 1) * interval if interval else 0
    return place if place <= last else 0
