"""Decides which tokens are computed in a step, and which sequence holds which blocks.

One idea: each sequence has `num_tokens` and `num_computed`, and every step lets the second catch up with the first
under a token budget. Prefill, chunked prefill, decode, a resumed prefix and the re-prefill after a preemption are that
one case.

`SharedPrompts` owns which prompts are being computed, so that a request with the same one can join; `Waiting` the
sequences that wait, `Running` those that run, with all that each of them holds; `Starter` decides whether a waiting one
can start, and `Scheduler` plans the step. None of them knows what is sampled or why a sequence ends.

A step takes running decodes first, then chunks of running prompts, then admissions, so that a prompt of any length
delays a decode by one chunk at most. Blocks are reserved chunk by chunk. A sequence that lacks a block takes it from
the newest running one, never from an older one; thus the oldest running one always advances, and everything that was
accepted finishes. A waiting sequence whose next blocks are being computed by running ones is set aside until the last
of them is there; those after it may be admitted before. Planning a step costs no more the more sequences wait.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ..cache.prefix_cache import Chain, Entry, PrefixCache, Table
from ..cache.routes import RouteRecords
from ..outputs.open_requests import OpenSample
from ..outputs.routes import Routes
from ..request import ContentSpan
from .recurrent import NO_CHECKPOINTS, NO_SLOTS, Intervals, RecurrentStates, Slots, StateSlots
from .sequence import Chunks, Generation, Lanes, Sequence

_Key = tuple[bytes, bytes, tuple[ContentSpan, ...], bool]


class SharedPrompts:
    """By the tokens of a prompt and what else identifies its blocks: the sequence that computes it, until its first
    token is drawn.
    """

    def __init__(self) -> None:
        self._sequences: dict[_Key, Sequence] = {}

    def find(self, tokens: array[int], chain: Chain) -> Sequence | None:
        """The sequence that computes the prompt of these tokens and this chain; its samples may still grow in number.
        A chain with records finds only a sequence with records, and one without only one without.
        """
        return self._sequences.get(_key_of(tokens, chain))

    def add(self, sequence: Sequence) -> None:
        """Lets others join a sequence that has a prompt and nothing else."""
        self._sequences[_key_of(sequence.tokens, sequence.chain)] = sequence

    def close(self, sequence: Sequence) -> None:
        """No further request may join this computation of a prompt."""
        key = _key_of(sequence.tokens, sequence.chain)
        if self._sequences.get(key) is sequence:
            del self._sequences[key]

    def clear(self) -> None:
        """No further request may join any of them."""
        self._sequences.clear()


def _key_of(tokens: array[int], chain: Chain) -> _Key:
    return tokens.tobytes(), chain.salt, tuple(chain.spans), chain.has_records


@dataclass
class SchedulerStats:
    """Lifetime counters.

    `prefix_queries`, `prefix_hits`: prompt tokens asked for and found, at first admission. `shortened_hits`: tokens
    that were found, and computed all the same for want of a checkpoint of their state, or of the routed experts that
    were asked for. `preemptions`: how often a running sequence gave its blocks to an older one; `recomputed`: how often
    one lost them to `recompute_running`.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    shortened_hits: int = 0
    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    deferred_admissions: int = 0


def order_of(sequence: Sequence) -> tuple[int, int]:
    """The sort key of sequences; no two have the same."""
    return sequence.order


def remove_from(sequences: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of a sorted list."""
    position = bisect_left(sequences, sequence.order, key=order_of)
    assert sequences[position] is sequence
    del sequences[position]


class Waiting:
    """Waiting sequences: `ready` ones, sorted, and those set aside until a block that they need is there.

    Looking at a sequence means hashing its prompt; one that is set aside costs nothing.
    """

    def __init__(self) -> None:
        self.ready: list[Sequence] = []
        self._aside: dict[bytes, set[Sequence]] = {}  # by the block that they wait for

    def __len__(self) -> int:
        return len(self.ready) + self.num_aside

    @property
    def num_aside(self) -> int:
        """How many sequences are set aside."""
        return sum(map(len, self._aside.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, sorted."""
        return iter(sorted({*self.ready}.union(*self._aside.values()), key=order_of))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the ready ones."""
        insort(self.ready, sequence, key=order_of)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, ready or set aside."""
        if sequence.claim is None:
            remove_from(self.ready, sequence)
        else:
            self._aside[sequence.claim].remove(sequence)

    def set_aside(self, sequence: Sequence, claim: bytes) -> None:
        """Set a ready sequence aside until the block `claim` is there, or nothing computes it any more."""
        remove_from(self.ready, sequence)
        sequence.claim = claim
        self._aside.setdefault(claim, set()).add(sequence)

    def take_back(self, is_under_way: Callable[[bytes], bool]) -> None:
        """Make sequences ready again whose block is no longer under way: it is there, or nothing computes it."""
        over = [key for key in self._aside if not is_under_way(key)]
        for sequence in [sequence for key in over for sequence in self._aside.pop(key)]:
            sequence.claim = None
            self.ready.append(sequence)
        if over:
            self.ready.sort(key=order_of)


class Running:
    """At most `capacity` sequences. `sequences`: sorted. `lanes`: their counters. `states`: their recurrent states, of
    a model that has such.
    """

    def __init__(self, cache: PrefixCache, capacity: int, slots: StateSlots | None, intervals: Intervals) -> None:
        self.lanes = Lanes(capacity, len(cache.tables.windows))
        self.states = None if slots is None else RecurrentStates(slots, self.lanes, cache.block_size, intervals)
        self.sequences: list[Sequence] = []
        self._cache, self._capacity = cache, capacity
        self._order: np.ndarray | None = None  # the lanes of `sequences`, until these change
        # A copy into a block that was given back meanwhile does no harm: a block is written before it is read.
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
        if self.states is not None:
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
        slots = None
        if has_room and parent.table:
            slots = NO_SLOTS if self.states is None else self.states.fork(parent)
        if slots is not None:
            table, copies = self._cache.tables.fork(parent.table, parent.num_computed)
            self.enter(child, table, parent.num_computed, slots)
            for pending, new in zip(self._block_copies, copies, strict=True):
                pending.update(new)
        return child

    def take_block_copies(self) -> list[dict[int, int]]:
        """The block copies to make before the next step computes anything, of each group destination to source.
        Returns each once.
        """
        copies, self._block_copies = self._block_copies, self._no_copies()
        return copies

    def check_integrity(self) -> None:
        """Raise RuntimeError unless these sequences account for every block, slot and lane."""
        self._cache.check_integrity(sequence.table for sequence in self.sequences)
        if self.states is not None:
            self.states.check_integrity(self.sequences)
        self.lanes.check(self.sequences)

    def _no_copies(self) -> list[dict[int, int]]:
        return [{} for _ in self._cache.tables.windows]


class Outcome(Enum):
    """What became of a waiting sequence in this step."""

    STARTED = auto()
    WAIT_FOR_PREFIX = auto()
    WAIT_FOR_BLOCKS = auto()


class Starter:
    """Moves sequences from `waiting` to `running`. `routes`: of a model with experts, which ones were chosen in
    published prefixes. `chunk`: the most tokens that a sequence computes in a step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: Waiting,
        running: Running,
        routes: RouteRecords | None,
        chunk: int,
        stats: SchedulerStats,
    ) -> None:
        self._cache, self._routes, self._chunk, self._stats = cache, routes, chunk, stats
        self._waiting, self._running, self._states = waiting, running, running.states

    def start(self, sequence: Sequence) -> Outcome:
        """Starts a waiting sequence behind the longest prefix it can reuse, once all of its tokens have room. One that
        waits for a prefix is set aside.
        """
        cache = self._cache
        if sequence.chain.epoch != cache.identity.epoch:
            self._renew(sequence)
        num_tokens = sequence.num_tokens
        # The last token is always computed: its logits are needed. A score request needs the logits of every token.
        limit = num_tokens - 1 if isinstance(sequence.purpose, Generation) else 0
        found = cache.lookup(sequence.chain, sequence.tokens, limit)
        hits = self._recorded(sequence, found)
        resumed = hits if self._states is None else cache.deepest(hits, self._states.slots.is_ready)
        awaited = cache.find_claim(sequence.chain, len(hits), limit)
        if awaited is None and self._states is not None:
            awaited = self._states.branches.find(sequence, len(resumed), len(hits))
        if awaited is not None:
            self._waiting.set_aside(sequence, awaited)
            return Outcome.WAIT_FOR_PREFIX
        if not cache.tables.can_hold(resumed, num_tokens, self._chunk):
            return Outcome.WAIT_FOR_BLOCKS
        slots = NO_SLOTS if self._states is None else self._states.begin(resumed)
        if slots is None:
            return Outcome.WAIT_FOR_BLOCKS
        if self._states is not None and self._states.slots.budget and len(resumed) < len(hits):
            self._states.branches.expect(sequence, len(hits))
        self._begin(sequence, resumed, slots)
        self._stats.shortened_hits += (len(found) - len(resumed)) * cache.block_size
        return Outcome.STARTED

    def is_under_way(self, key: bytes) -> bool:
        """Whether a block that others wait for, or the checkpoint at its end, is still to come."""
        return key in self._cache.claims or (self._states is not None and key in self._states.branches)

    def _renew(self, sequence: Sequence) -> None:
        """Gives a sequence a chain of the current epoch."""
        sequence.chain = self._cache.identity.restart(sequence.chain)
        if sequence.routes is not None:
            sequence.routes.fresh = sequence.routes.num_rows

    def _recorded(self, sequence: Sequence, hits: list[Entry]) -> list[Entry]:
        """What a sequence can use of its hits: where it needs their routed experts, those before the first one without.
        The others it computes again.
        """
        if self._routes is None or not sequence.needs_routes:
            return hits
        recorded = self._routes.recorded(hits)
        return recorded if len(recorded) == len(hits) else self._cache.deepest(recorded)

    def _begin(self, sequence: Sequence, hits: list[Entry], slots: Slots) -> None:
        cache = self._cache
        sequence.chain.entries = hits
        if self._routes is not None and sequence.routes is not None and sequence.needs_routes:
            sequence.routes.begin(self._routes.rows(hits))
        cache.claims.add(sequence.chain)
        self._waiting.remove(sequence)
        self._running.enter(sequence, cache.tables.allocate(hits, 0), len(hits) * cache.block_size, slots)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            self._stats.prefix_queries += sequence.num_tokens if isinstance(sequence.purpose, Generation) else 0
            self._stats.prefix_hits += sequence.num_computed


# A lookup hashes the prompt of a sequence, and then finds block by block what is cached of it.
_MOST_LOOKUPS_IN_VAIN = 32


@dataclass
class _Plan:
    """`sizes`: the tokens that the sequence of each lane computes in the step."""

    budget: int
    sizes: dict[int, int] = field(default_factory=dict)
    short_of_blocks: bool = False

    def add(self, lane: int, size: int) -> None:
        self.sizes[lane] = size
        self.budget -= size

    def remove(self, lane: int) -> None:
        self.budget += self.sizes.pop(lane, 0)

    def chunks(self, lanes: Lanes) -> Chunks:
        """The chunks that are planned."""
        found = np.fromiter(self.sizes, np.int64, len(self.sizes))
        starts = lanes.num_computed[found]
        sizes = np.fromiter(self.sizes.values(), np.int64, len(found))
        return Chunks(lanes.sequences[found].tolist(), found, starts, starts + sizes)


class Scheduler:
    """Plans steps for any number of sequences, at most `max_num_seqs` running, `max_num_batched_tokens` per step.

    `slots`: of the recurrent states of a model that has such; `intervals`: where their checkpoints lie. `routes`: of a
    model with experts, which ones were chosen in published prefixes.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        slots: StateSlots | None = None,
        intervals: Intervals = NO_CHECKPOINTS,
        routes: RouteRecords | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running = Running(cache, max_num_seqs, slots, intervals)
        self.waiting = Waiting()
        self.routes = routes
        self.stats = SchedulerStats()
        self._starter = Starter(cache, self.waiting, self.running, routes, max_num_batched_tokens, self.stats)

    def schedule(self) -> Chunks:
        """The chunks of the next step, with blocks reserved for them.

        Empty only if nothing is unfinished, or all waits for what the step under way draws, publishes or frees.
        """
        plan, lanes = _Plan(self.max_num_batched_tokens), self.running.lanes
        running = self.running.in_order()
        uncomputed = lanes.num_tokens[running] - lanes.num_computed[running]
        one_by_one = self._decode(running[uncomputed == 1], plan)
        for sequence in lanes.sequences[np.concatenate((one_by_one, running[uncomputed > 1]))]:
            if sequence.table:  # not preempted by one before it
                self._continue(sequence, plan)
        if not plan.short_of_blocks:
            self._start_waiting(plan)
        return plan.chunks(lanes)

    def advance(self, chunks: Chunks) -> None:
        """Records that a step computes the KV of `chunks`: the next one goes on from their ends."""
        lanes = self.running.lanes
        lanes.num_computed[chunks.lanes] = chunks.ends
        if self.running.states is not None:
            self.running.states.advance(chunks)
        of_prompts = np.minimum(chunks.ends, lanes.num_prompt_tokens[chunks.lanes]) - chunks.starts
        self.stats.computed_tokens += int((chunks.ends - chunks.starts).sum())
        self.stats.computed_prompt_tokens += int(of_prompts.clip(0).sum())

    def publish(self, chunks: Chunks) -> None:
        """Publishes the blocks that `chunks` filled, now that their tokens are known, and then gives those back that
        are behind a window; sequences that lost their blocks since are passed over.
        """
        cache, size = self.cache, self.cache.block_size
        for sequence, _, end in chunks.take(np.flatnonzero(chunks.ends // size > chunks.starts // size)):
            if sequence.table:
                num_known = len(sequence.chain.entries)
                cache.publish(sequence.chain, sequence.tokens, sequence.table, end)
                if self.routes is not None and sequence.routes is not None:
                    _attach_routes(self.routes, sequence.chain.entries, num_known, sequence.routes, size)
        if self.running.states is not None:
            self.running.states.publish(chunks, cache.identity.epoch)
        if cache.tables.windowed:
            leaves = cache.tables.leaves_block(chunks.starts, chunks.ends)
            for sequence, _, end in chunks.take(np.flatnonzero(leaves)):
                if sequence.table:
                    cache.tables.give_back(sequence.table, end)

    def fork(self, parent: Sequence, sample: OpenSample, token: int) -> Sequence:
        """What `Running.fork` gives. If it does not run, it waits, and finds the shared blocks again when it starts."""
        child = self.running.fork(parent, sample, token)
        if not child.table:
            self.waiting.add(child)
        return child

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, waiting or running, and gives its blocks back."""
        if sequence.lane >= 0:
            self.running.leave(sequence)
        else:
            self.waiting.remove(sequence)

    def recompute_running(self) -> None:
        """Takes all blocks from every running sequence; they wait, and are computed anew when their turn comes."""
        self.stats.recomputed += len(self.running)
        for sequence in self.running.sequences.copy():
            self._suspend(sequence)

    def started(self) -> list[Sequence]:
        """The sequences that run, and those that wait after they got decoded tokens."""
        return self.running.sequences + [
            sequence for sequence in self.waiting if sequence.num_tokens > sequence.num_prompt_tokens
        ]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is accounted for by the running sequences alone."""
        if any(sequence.table for sequence in self.waiting):
            raise RuntimeError("scheduler: a waiting sequence holds blocks")
        self.running.check_integrity()
        if self.routes is not None:
            self.routes.check_integrity(self.cache.entries)

    def _decode(self, decoding: np.ndarray, plan: _Plan) -> np.ndarray:
        """Lets the sequences of the lanes `decoding` compute one token each, in this order, if there are blocks for all
        of them. Returns the lanes that then have to be planned one by one: all of them, or none.
        """
        decoding, lanes = decoding[: plan.budget], self.running.lanes
        if self.running.states is not None and self.running.states.cuts_decodes(decoding):
            return decoding
        lacking = decoding[lanes.num_computed[decoding] == lanes.num_blocks[decoding] * self.cache.block_size]
        if len(lacking) > self.cache.tables.num_available:
            return decoding
        for sequence in lanes.sequences[lacking]:
            self.running.extend(sequence, 1)
        plan.sizes = dict.fromkeys(decoding.tolist(), 1)
        plan.budget -= len(decoding)
        return decoding[:0]

    def _continue(self, sequence: Sequence, plan: _Plan) -> None:
        start = sequence.num_computed
        size = self._reserve(sequence, start, min(sequence.num_tokens - start, plan.budget), plan)
        if size > 0:
            states = self.running.states
            plan.add(sequence.lane, size if states is None else states.cut(sequence, size))

    def _reserve(self, sequence: Sequence, start: int, size: int, plan: _Plan) -> int:
        """Gives a running sequence, computed up to `start`, blocks for up to `size` more tokens; returns for how many
        it has them.
        """
        tables, running = self.cache.tables, self.running.sequences
        needed = tables.blocks_for(start + size) - len(sequence.table)
        if needed > tables.num_available:
            plan.short_of_blocks = True
            while tables.num_available == 0 and running[-1] is not sequence:
                self._preempt(running[-1], plan)
            needed = min(needed, tables.num_available)
        if needed > 0:
            self.running.extend(sequence, needed)
        return min(size, len(sequence.table) * tables.block_size - start)

    def _preempt(self, sequence: Sequence, plan: _Plan) -> None:
        plan.remove(sequence.lane)
        self._suspend(sequence)
        self.stats.preemptions += 1

    def _suspend(self, sequence: Sequence) -> None:
        """Takes all blocks from a running sequence. It waits to be computed anew; its published blocks may be hit."""
        self.running.leave(sequence)
        self.waiting.add(sequence)

    def _start_waiting(self, plan: _Plan) -> None:
        self.waiting.take_back(self._starter.is_under_way)
        lookups_in_vain = 0
        while self.waiting.ready and lookups_in_vain < _MOST_LOOKUPS_IN_VAIN:
            if plan.budget == 0 or not self.running.has_room:
                break
            sequence = self.waiting.ready[0]
            outcome = self._starter.start(sequence)
            if outcome is Outcome.WAIT_FOR_BLOCKS:
                break
            if outcome is Outcome.STARTED:
                self._continue(sequence, plan)
            lookups_in_vain += outcome is Outcome.WAIT_FOR_PREFIX
        self.stats.deferred_admissions += self.waiting.num_aside


def _attach_routes(records: RouteRecords, entries: list[Entry], num_known: int, routes: Routes, size: int) -> None:
    """Gives the entries of a sequence from the first `num_known` on the routed experts of their blocks, if it has those
    of these weights.
    """
    for i in range(max(num_known, -(-routes.fresh // size)), len(entries)):
        records.attach(entries[i], routes.rows(i * size, (i + 1) * size))
