"""The scheduler: chooses the tokens that a step computes, and allocates blocks to sequences.

Each sequence has `num_tokens` and `num_computed`. Every step increases `num_computed` towards `num_tokens`, within a
token budget. The scheduler therefore has no separate cases for prefill, chunked prefill, decode, resumed prefixes and
recomputation after a preemption.

`SharedPrompts` owns the index of prompts that are being computed, so that a request with the same prompt can share the
computation. `Waiting` owns the waiting sequences. `Running` owns the running sequences, with the blocks, lanes and
states that they hold. `Starter` decides whether a waiting sequence can start. `Scheduler` plans the step. This module
does not know how tokens are sampled or why a sequence ends.

A step is filled with running decodes first, then with chunks of running prompts, then with chunks of newly admitted
sequences. A prompt of any length therefore delays a decode by at most one chunk. Blocks are reserved chunk by chunk. If
a sequence needs a block and no block is free, the newest running sequence is preempted. A sequence is never preempted
for a newer sequence. The oldest running sequence therefore always advances, and every accepted request finishes. If
running sequences compute the next blocks of a waiting sequence, the waiting sequence is set aside until the last of
these blocks is published. Later sequences may be admitted before a sequence that is set aside. The time to plan a step
does not grow with the number of waiting sequences.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter

import numpy as np

from ..cache.host_tier import Copies
from ..cache.prefix_cache import Chain, Entry, PrefixCache, Table
from ..cache.routes import RouteRecords
from ..outputs.open_requests import OpenSample
from ..outputs.routes import Routes
from ..request import ContentSpan
from .encodings import Encodings
from .recurrent import NO_CHECKPOINTS, NO_SLOTS, Intervals, RecurrentStates, Slots, StateSlots
from .sequence import Chunks, Generation, Lanes, Sequence

_Key = tuple[bytes, bytes, tuple[ContentSpan, ...], bool]
_MOST_GONE = 1024
"""The heap of `Waiting` holds up to twice as many keys as there are ready sequences, plus this number."""


class SharedPrompts:
    """The sequences that compute prompts. A sequence is removed from this collection in the step that draws the
    sequence's first tokens.

    A sequence is found by the tokens of its prompt and everything else that identifies the prompt's blocks.
    """

    def __init__(self) -> None:
        self._sequences: dict[_Key, Sequence] = {}

    def find(self, tokens: array[int], chain: Chain) -> Sequence | None:
        """Return the sequence that computes the prompt `tokens`, or None. Further samples may be added to the returned
        sequence.

        The returned sequence records routed experts if and only if `chain` does.
        """
        return self._sequences.get(_key_of(tokens, chain))

    def add(self, sequence: Sequence) -> None:
        """Let other requests join a sequence. The sequence must have no decoded tokens."""
        self._sequences[_key_of(sequence.tokens, sequence.chain)] = sequence

    def close(self, sequence: Sequence) -> None:
        """Prevent further requests from joining `sequence`."""
        key = _key_of(sequence.tokens, sequence.chain)
        if self._sequences.get(key) is sequence:
            del self._sequences[key]

    def clear(self) -> None:
        """Prevent further requests from joining the sequences that compute prompts now."""
        self._sequences.clear()


def _key_of(tokens: array[int], chain: Chain) -> _Key:
    return tokens.tobytes(), chain.salt, tuple(chain.spans), chain.has_records


@dataclass
class SchedulerStats:
    """Lifetime counters.

    `steps`: steps that computed something. `prefix_queries`: prompt tokens looked up in the cache when a sequence first
    starts. `prefix_hits`: prompt tokens that were found in the cache when a sequence first started. `shortened_hits`:
    tokens that were found in the cache but computed again, because their routed experts were requested but missing, or
    because the checkpoint of their recurrent state was missing. `preemptions`: how often an older sequence took the
    blocks of a running sequence. `recomputed`: how often `recompute_running` took the blocks of a running sequence.
    `deferred_admissions`: the number of sequences that waited for a prefix, summed over all steps.
    """

    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    shortened_hits: int = 0
    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    deferred_admissions: int = 0


order_of: Callable[[Sequence], tuple[int, int]] = attrgetter("order")
"""The sort key of a sequence. Each sequence has a different key."""


def remove_from(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a sorted list."""
    position = bisect_left(sequences, sequence.order, key=order_of)
    assert sequences[position] is sequence
    del sequences[position]


class Waiting:
    """The waiting sequences: ready sequences, and sequences that are set aside until a block is published.

    To decide whether a ready sequence can start, the scheduler hashes the sequence's prompt. Sequences that are set
    aside are not considered, so they cost no time. Each change takes time proportional to the logarithm of the number
    of sequences.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple[int, int], Sequence] = {}
        self._heap: list[tuple[int, int]] = []  # the keys of `_ready`, and keys of sequences that are no longer ready
        self._aside: dict[bytes, set[Sequence]] = {}  # by the awaited block

    def __len__(self) -> int:
        return len(self._ready) + self.num_aside

    @property
    def num_aside(self) -> int:
        """The number of sequences that are set aside."""
        return sum(map(len, self._aside.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, sorted."""
        return iter(sorted({*self._ready.values()}.union(*self._aside.values()), key=order_of))

    @property
    def first(self) -> Sequence | None:
        """The ready sequence with the lowest order; None if no sequence is ready."""
        while self._heap and self._heap[0] not in self._ready:
            heappop(self._heap)
        return self._ready[self._heap[0]] if self._heap else None

    def add(self, sequence: Sequence) -> None:
        """Make a sequence ready."""
        self._ready[sequence.order] = sequence
        heappush(self._heap, sequence.order)
        if len(self._heap) > 2 * len(self._ready) + _MOST_GONE:
            self._heap = sorted(self._ready)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, ready or set aside."""
        if sequence.claim is None:
            del self._ready[sequence.order]
        else:
            self._aside[sequence.claim].remove(sequence)

    def set_aside(self, sequence: Sequence, claim: bytes) -> None:
        """Set a ready sequence aside until the block with hash `claim` is published or abandoned."""
        self.remove(sequence)
        sequence.claim = claim
        self._aside.setdefault(claim, set()).add(sequence)

    def take_back(self, is_under_way: Callable[[bytes], bool]) -> None:
        """Make sequences ready again if the block for which they wait was published or abandoned."""
        over = [key for key in self._aside if not is_under_way(key)]
        for sequence in [sequence for key in over for sequence in self._aside.pop(key)]:
            sequence.claim = None
            self.add(sequence)


class Running:
    """At most `capacity` running sequences.

    `sequences`: the sequences, sorted. `lanes`: the counters of the running sequences. `states`: the recurrent states
    of the sequences, or None if the model has no recurrent layers. `encodings`: the encoded images, or None.
    """

    def __init__(
        self,
        cache: PrefixCache,
        capacity: int,
        slots: StateSlots | None,
        intervals: Intervals,
        encodings: Encodings | None = None,
    ) -> None:
        self.encodings = encodings
        self.lanes = Lanes(capacity, len(cache.tables.windows))
        self.states = None if slots is None else RecurrentStates(slots, self.lanes, cache.block_size, intervals)
        self.sequences: list[Sequence] = []
        self._cache, self._capacity = cache, capacity
        self._order: np.ndarray | None = None  # the lanes of `sequences`, until `sequences` changes

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_room(self) -> bool:
        """Return whether fewer than `capacity` sequences run."""
        return len(self.sequences) < self._capacity

    def in_order(self) -> np.ndarray:
        """Return an int64 array with the lanes of the sequences, in the order of `sequences`."""
        if self._order is None:
            self._order = np.array([sequence.lane for sequence in self.sequences], np.int64)
        return self._order

    def enter(self, sequence: Sequence, table: Table, num_computed: int, slots: Slots) -> None:
        """Start to run a sequence. `table`: the blocks with the KV of the sequence's first `num_computed` tokens."""
        sequence.table = table
        insort(self.sequences, sequence, key=order_of)
        self.lanes.enter(sequence, num_computed, *slots)
        self._order = None

    def leave(self, sequence: Sequence) -> None:
        """Stop running a sequence and release everything that it holds."""
        self._cache.claims.withdraw(sequence.chain)
        self._cache.tables.release(sequence.table)
        if self.states is not None:
            self.states.release(sequence)
        sequence.table = Table()
        remove_from(self.sequences, sequence)
        self.lanes.leave(sequence)
        self._order = None

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence `num_blocks` more blocks of each group. Enough blocks must be free."""
        self._cache.tables.extend(sequence.table, num_blocks)
        self.lanes.add_blocks(sequence)

    def extend_if_free(self, sequence: Sequence, count: int) -> int:
        """Give a running sequence free blocks for up to `count` tokens after its last token, without preempting other
        sequences.

        Return how many of the `count` tokens have blocks afterwards.
        """
        tables, end = self._cache.tables, sequence.num_tokens
        needed = min(tables.blocks_for(end + count) - len(sequence.table), tables.num_available)
        if needed > 0:
            self.extend(sequence, needed)
        return max(min(count, len(sequence.table) * tables.block_size - end), 0)

    def with_images(self, sequence: Sequence, size: int) -> int:
        """Return how many of the next `size` tokens of a sequence with images can be computed with the images that are
        encoded.
        """
        assert sequence.media is not None and self.encodings is not None
        need = partial(self.encodings.need, order=sequence.order)
        return sequence.media.cut(sequence.num_computed, size, need)

    def fork(self, parent: Sequence, sample: OpenSample, token: int) -> Sequence:
        """Return a new sequence for `sample`. The new sequence has the KV and the tokens of `parent`, followed by
        `token`, the sample's first token.

        All tokens of the parent must be computed. Full blocks are shared. A partial last block is copied before the
        next step. If there is no room for the new sequence, or if the parent has lost its blocks, the new sequence does
        not run and holds no blocks.
        """
        chain, tokens = parent.chain.fork(), parent.tokens + array("i", (token,))
        child = Sequence(sample.order, tokens, parent.num_prompt_tokens, chain, Generation([sample]))
        child.num_cached_tokens = parent.num_cached_tokens
        child.routes, child.media = None if parent.routes is None else parent.routes.fork(), parent.media
        num_fresh = len(parent.table) - parent.num_computed // self._cache.block_size
        has_room = self.has_room and num_fresh <= self._cache.tables.num_available
        slots = None
        if has_room and parent.table:
            slots = NO_SLOTS if self.states is None else self.states.fork(parent)
        if slots is not None:
            self.enter(child, self._cache.tables.fork(parent.table, parent.num_computed), parent.num_computed, slots)
        return child

    def take_block_copies(self) -> list[Copies]:
        """Return the copies that the next step must make first: one list for each group of blocks and, for a model with
        recurrent layers, one for the slots of states. Each copy is returned only once.

        A copy into a block that has been released is harmless, because every block is written before it is read.
        """
        pending = [*self._cache.tables.copies, *([] if self.states is None else [self.states.slots.copies])]
        taken = [copies.copy() for copies in pending]
        for copies in pending:
            copies.clear()
        return taken

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the running sequences account for every block, slot and lane."""
        self._cache.check_integrity(sequence.table for sequence in self.sequences)
        if self.states is not None:
            self.states.check_integrity(self.sequences)
        self.lanes.check(self.sequences)


class Outcome(Enum):
    """The result of an attempt to start a waiting sequence."""

    STARTED = auto()
    WAIT_FOR_PREFIX = auto()
    WAIT_FOR_BLOCKS = auto()


class Starter:
    """Moves sequences from `waiting` to `running`.

    `routes`: the routed experts of published prefixes, for models with experts. `chunk`: the maximum number of tokens
    that a sequence computes in a step.
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
        """Start a waiting sequence at the end of its longest reusable prefix, if there is room for all its tokens.

        A sequence that must wait for a prefix is set aside.
        """
        cache = self._cache
        if not cache.identity.is_current(sequence.chain):
            self._renew(sequence)
        num_tokens = sequence.num_tokens
        # The last token is always computed, because its logits are needed. Scores need the logits of all tokens.
        limit = num_tokens - 1 if isinstance(sequence.purpose, Generation) else 0
        found = cache.lookup(sequence.chain, sequence.tokens, limit)
        hits = self._outside_images(sequence, self._recorded(sequence, found))
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
        """Return whether the block with hash `key`, or the checkpoint at its end, is still being computed."""
        return key in self._cache.claims or (self._states is not None and key in self._states.branches)

    def _renew(self, sequence: Sequence) -> None:
        """Give a sequence a chain of the current epoch."""
        sequence.chain = self._cache.identity.restart(sequence.chain)
        if sequence.routes is not None:
            sequence.routes.fresh = sequence.routes.num_rows

    def _recorded(self, sequence: Sequence, hits: list[Entry]) -> list[Entry]:
        """Return the hits that a sequence can use.

        A sequence that needs routed experts can use only the hits before the first hit without recorded experts. The
        tokens of the first hit without recorded experts, and of all later hits, are computed again.
        """
        if self._routes is None or not sequence.needs_routes:
            return hits
        recorded = self._routes.recorded(hits)
        return recorded if len(recorded) == len(hits) else self._cache.deepest(recorded)

    def _outside_images(self, sequence: Sequence, hits: list[Entry]) -> list[Entry]:
        """Return the longest prefix of `hits` after which the sequence can continue. If the tokens of an image attend
        to each other, the prefix must not end within an image.
        """
        if sequence.media is None:
            return hits
        while hits and not sequence.media.can_resume(len(hits) * self._cache.block_size):
            hits = self._cache.deepest(hits[:-1])
        return hits

    def _begin(self, sequence: Sequence, hits: list[Entry], slots: Slots) -> None:
        cache = self._cache
        if isinstance(sequence.purpose, Generation):
            for sample in sequence.purpose.samples:
                sample.renew_kv()
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


# The maximum number of lookups in a step that end with a sequence being set aside. The number is limited, because a
# lookup hashes the prompt of a sequence and searches the cache block by block.
_MOST_LOOKUPS_IN_VAIN = 32


@dataclass
class _Plan:
    """The plan of a step. `budget`: remaining tokens. `may_preempt`: as for `Scheduler.schedule`. `decoding`: the lanes
    that `decode` has planned, int64. `sizes`: for each other planned lane, the number of tokens to compute.
    """

    budget: int
    may_preempt: bool = True
    decoding: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: dict[int, int] = field(default_factory=dict)
    short_of_blocks: bool = False

    def add(self, lane: int, size: int) -> None:
        self.sizes[lane] = size
        self.budget -= size

    def decode(self, lanes: np.ndarray) -> None:
        """Plan one token for each lane in `lanes`."""
        self.decoding = lanes
        self.budget -= len(lanes)

    def remove(self, lane: int) -> None:
        kept = self.decoding[self.decoding != lane]
        self.budget += self.sizes.pop(lane, 0) + len(self.decoding) - len(kept)
        self.decoding = kept

    def chunks(self, lanes: Lanes) -> Chunks:
        """Return the planned chunks."""
        found, sizes = self.decoding, np.int64(1)
        if self.sizes:
            others = np.array([*self.sizes.items()], np.int64)
            found = np.concatenate((found, others[:, 0]))
            sizes = np.concatenate((np.ones(len(self.decoding), np.int64), others[:, 1]))
        starts = lanes.num_computed[found]
        return lanes.chunks(found, starts, starts + sizes)


class Scheduler:
    """Chooses the tokens that each step computes, for any number of sequences.

    At most `max_num_seqs` sequences run, with at most `max_num_batched_tokens` tokens per step. `slots`: the slots for
    recurrent states, or None if the model has no recurrent layers. `intervals`: the intervals of state checkpoints.
    `routes`: the routed experts of published prefixes, for models with experts. `num_steps`: the number of steps in
    flight, among which the decoding sequences are divided, so that each stage of the model has a step to compute.
    `encodings`: the encoded images, for a model with a vision tower.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        slots: StateSlots | None = None,
        intervals: Intervals = NO_CHECKPOINTS,
        routes: RouteRecords | None = None,
        num_steps: int = 1,
        encodings: Encodings | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_steps = num_steps
        self.running = Running(cache, max_num_seqs, slots, intervals, encodings)
        self.waiting = Waiting()
        self.routes = routes
        self.stats = SchedulerStats()
        self._starter = Starter(cache, self.waiting, self.running, routes, max_num_batched_tokens, self.stats)

    def schedule(self, may_preempt: bool = True) -> Chunks:
        """Reserve blocks for the next step, and return the chunks of the step.

        The result is empty only if there are no sequences, or if all sequences wait for results of the steps in flight
        (tokens, blocks or prefixes) or for encoded images. `may_preempt`: whether sequences may lose their blocks to
        older sequences. If `may_preempt` is False, a sequence that finds no free block waits.
        """
        plan, lanes = _Plan(self.max_num_batched_tokens, may_preempt), self.running.lanes
        running = self.running.in_order()
        uncomputed = lanes.num_tokens[running] - lanes.num_computed[running]
        is_decode = uncomputed == 1
        if self.running.encodings is not None:
            self.running.encodings.begin_plan()
            is_decode &= lanes.num_computed[running] >= lanes.media_end[running]
        one_by_one = self._decode(running[is_decode][: -(-len(running) // self.num_steps)], plan)
        if len(plan.decoding) < len(running):
            for sequence in lanes.sequences[np.concatenate((one_by_one, running[(uncomputed > 0) & ~is_decode]))]:
                if sequence.lane >= 0:  # not preempted by an earlier sequence
                    self._continue(sequence, plan)
        if not plan.short_of_blocks:
            self._start_waiting(plan)
        return plan.chunks(lanes)

    def advance(self, chunks: Chunks) -> None:
        """Record that a step computes the KV of `chunks`, so that the next step continues after the chunks.

        `chunks`: the chunks without their drafted tokens, because drafted tokens may be rejected.
        """
        lanes = self.running.lanes
        self.stats.steps += 1
        lanes.num_computed[chunks.lanes], lanes.states.num_repeated[chunks.lanes] = chunks.ends, 0
        if self.running.states is not None:
            self.running.states.advance(chunks)
        sizes = lanes.num_prompt_tokens[chunks.lanes]
        of_prompts = np.minimum(chunks.ends, sizes) - np.minimum(chunks.starts, sizes)
        self.stats.computed_tokens += int((chunks.ends - chunks.starts).sum())
        self.stats.computed_prompt_tokens += int(of_prompts.sum())

    def publish(self, chunks: Chunks) -> None:
        """Publish the blocks that `chunks` filled, then release the blocks that have left an attention window.

        All tokens of the published blocks must be known to the host. Sequences that no longer hold blocks are skipped.
        """
        cache, size = self.cache, self.cache.block_size
        filled = (chunks.ends - chunks.ends % size > chunks.starts).nonzero()[0]
        if len(filled):
            self._publish(chunks.take(filled))
        if self.running.states is not None:
            self.running.states.publish(chunks, cache.identity.is_current)
        if cache.tables.windowed:
            leaves = cache.tables.leaves_block(chunks.starts, chunks.ends)
            for sequence, _, end in chunks.take(leaves.nonzero()[0]):
                if sequence.table:
                    cache.tables.give_back(sequence.table, end)

    def fork(self, parent: Sequence, sample: OpenSample, token: int) -> Sequence:
        """Call `Running.fork`.

        If the new sequence cannot run yet, it waits. When the new sequence starts, it finds the blocks of its parent in
        the cache.
        """
        child = self.running.fork(parent, sample, token)
        if not child.table:
            self.waiting.add(child)
        return child

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and release its blocks."""
        if sequence.lane >= 0:
            self.running.leave(sequence)
        else:
            self.waiting.remove(sequence)

    def recompute_running(self, keeps_decoding: bool = False) -> None:
        """Take all blocks from the running sequences, and requeue the sequences to compute them again.

        `keeps_decoding`: whether the sequences that only decode keep their blocks, because all their tokens but the
        last are computed.
        """

        def is_kept(sequence: Sequence) -> bool:
            return keeps_decoding and sequence.num_decoded > 0 and sequence.num_uncomputed == 1

        self.recompute([sequence for sequence in self.running.sequences if not is_kept(sequence)])

    def recompute(self, sequences: Iterable[Sequence]) -> None:
        """Take all blocks from running sequences, and requeue the sequences to compute them again."""
        for sequence in sequences:
            self._suspend(sequence)
            self.stats.recomputed += 1

    def keep_kv(self, version: int) -> None:
        """Record in the samples of all running sequences that the sequences keep KV of `version` while the weights
        change. All running sequences must decode.
        """
        for sequence in self.running.sequences:
            assert isinstance(sequence.purpose, Generation)
            for sample in sequence.purpose.samples:
                sample.keep_kv(version)

    def started(self) -> list[Sequence]:
        """Return the running sequences, and the waiting sequences that have decoded tokens."""
        return self.running.sequences + [
            sequence for sequence in self.waiting if sequence.num_tokens > sequence.num_prompt_tokens
        ]

    def check_integrity(self) -> None:
        """Raise RuntimeError if a waiting sequence holds a block, or if the running sequences do not account for every
        block.
        """
        if any(sequence.table for sequence in self.waiting):
            raise RuntimeError("scheduler: a waiting sequence holds blocks")
        self.running.check_integrity()
        for sequence in self.running.sequences:
            is_current = self.cache.identity.is_current(sequence.chain)
            if not is_current and self.cache.tables.publishes(sequence.table):
                raise RuntimeError("scheduler: a block with KV of an earlier epoch is published")
        if self.routes is not None:
            self.routes.check_integrity(self.cache.entries)

    def _publish(self, filled: Chunks) -> None:
        """Publish the blocks that the chunks `filled` have filled."""
        cache = self.cache
        self.running.lanes.deliver_for(filled)
        for sequence, _, end in filled:
            if sequence.table:
                num_known = len(sequence.chain.entries)
                cache.publish(sequence.chain, sequence.tokens, sequence.table, end)
                if self.routes is not None and sequence.routes is not None:
                    _attach_routes(self.routes, sequence.chain.entries, num_known, sequence.routes, cache.block_size)

    def _decode(self, decoding: np.ndarray, plan: _Plan) -> np.ndarray:
        """Plan one token for each sequence in the lanes `decoding`, if enough blocks are free for all these tokens.

        Return the lanes that the caller must plan one by one: none if every token is planned, otherwise all lanes
        within the budget.
        """
        decoding, lanes = decoding[: plan.budget], self.running.lanes
        if self.running.states is not None and self.running.states.cuts_decodes(decoding):
            return decoding
        lacking = decoding[lanes.num_computed[decoding] == lanes.num_blocks[decoding] * self.cache.block_size]
        if len(lacking):
            if len(lacking) > self.cache.tables.num_available:
                return decoding
            for sequence in lanes.sequences[lacking]:
                self.running.extend(sequence, 1)
        plan.decode(decoding)
        return decoding[:0]

    def _continue(self, sequence: Sequence, plan: _Plan) -> None:
        start, media, least = sequence.num_computed, sequence.media, 0
        size = min(sequence.num_tokens - start, plan.budget)
        if media is not None and start < media.end:
            least = media.size_of_span(start)
            if size < least:
                plan.budget = 0  # otherwise, newer sequences could use up the budget in every step
            size = self.running.with_images(sequence, size)
        size = self._reserve(sequence, start, size, plan, least)
        if media is not None and start < media.end:
            size = self.running.with_images(sequence, size)  # too few blocks may be free for the whole image
        if size > 0:
            states = self.running.states
            plan.add(sequence.lane, size if states is None else states.cut(sequence, size))

    def _reserve(self, sequence: Sequence, start: int, size: int, plan: _Plan, least: int = 0) -> int:
        """Give a running sequence blocks for tokens [start, start + size), or for as many of these tokens as possible.
        If blocks for the first `least` tokens (at least one token) are lacking, newer sequences are preempted.

        Return how many of the `size` tokens have blocks afterwards.
        """
        tables, running = self.cache.tables, self.running.sequences
        needed = tables.blocks_for(start + size) - len(sequence.table)
        if needed > tables.num_available:
            plan.short_of_blocks = True
            wanted = min(needed, max(1, tables.blocks_for(start + least) - len(sequence.table)))
            while plan.may_preempt and tables.num_available < wanted and running[-1] is not sequence:
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
        """Take all blocks from a running sequence and requeue it. The sequence's published blocks can still be hit."""
        self.running.leave(sequence)
        self.waiting.add(sequence)

    def _start_waiting(self, plan: _Plan) -> None:
        self.waiting.take_back(self._starter.is_under_way)
        lookups_in_vain = 0
        while (sequence := self.waiting.first) is not None and lookups_in_vain < _MOST_LOOKUPS_IN_VAIN:
            if plan.budget == 0 or not self.running.has_room:
                break
            outcome = self._starter.start(sequence)
            if outcome is Outcome.WAIT_FOR_BLOCKS:
                break
            if outcome is Outcome.STARTED:
                self._continue(sequence, plan)
            lookups_in_vain += outcome is Outcome.WAIT_FOR_PREFIX
        self.stats.deferred_admissions += self.waiting.num_aside


def _attach_routes(records: RouteRecords, entries: list[Entry], num_known: int, routes: Routes, size: int) -> None:
    """Attach the routed experts of a sequence to the sequence's entries in the index, beginning with entry `num_known`.
    An entry is skipped if some of its rows were computed with earlier weights.
    """
    for i in range(max(num_known, -(-routes.fresh // size)), len(entries)):
        records.attach(entries[i], routes.rows(i * size, (i + 1) * size))
