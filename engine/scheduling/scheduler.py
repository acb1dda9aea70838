"""Decides which tokens are computed in a step, and which sequence holds which blocks.

One idea: each sequence has `num_tokens` and `num_computed`, and every step lets the second catch up with the first
under a token budget. Prefill, chunked prefill, decode, a resumed prefix and the re-prefill after a preemption are that
one case.

Owns the waiting and the running sequences, of which the lowest `order` goes first. Does not know what is sampled or why
one ends.

A step takes running decodes first, then chunks of running prompts, then admissions, so that a prompt of any length
delays a decode by one chunk at most. Blocks are reserved chunk by chunk. A sequence that lacks a block takes it from
the newest running one, never from an older one; thus the oldest running one always advances, and everything that was
accepted finishes. A waiting sequence whose next blocks are being computed by running ones is set aside until the last
of them is there; those after it may be admitted before. Planning a step costs no more the more sequences wait.
"""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from trueroll.errors import InvalidRequestError

from ..cache.chains import Entry
from ..cache.prefix_cache import PrefixCache
from ..cache.routes import RouteRecords
from ..cache.states import StateSlots
from ..cache.tables import Table
from ..outputs.open_requests import OpenSample
from .lanes import Lanes
from .recurrent import NO_CHECKPOINTS, Intervals, RecurrentStates, Slots
from .sequence import Chunks, Generation, Sequence
from .waiting import Waiting, order_of, remove_from

# To look up a sequence is to hash its prompt, and then to find block by block what is cached of it.
_MOST_LOOKUPS_IN_VAIN = 32


class Outcome(Enum):
    """What became of a waiting sequence in this step."""

    ADMITTED = auto()
    WAIT_FOR_PREFIX = auto()
    WAIT_FOR_BLOCKS = auto()


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
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lanes = Lanes(max_num_seqs, len(cache.tables.windows))
        self.states = RecurrentStates(slots or StateSlots(0, 0), self.lanes, cache.block_size, intervals)
        self.routes = routes
        self.running: list[Sequence] = []  # sorted
        self.waiting = Waiting()
        self._running_lanes: np.ndarray | None = None  # of `running`, until that changes
        # Of a block that was given back since, nothing is read before it is written.
        self._block_copies = self._no_copies()
        self.stats = SchedulerStats()

    def check_fits(self, num_tokens: int) -> None:
        """Raise InvalidRequestError if a sequence of `num_tokens` could not run even alone."""
        for needed, pool in zip(self.cache.tables.blocks_needed(num_tokens), self.cache.tables.pools, strict=True):
            if needed > pool.num_blocks:
                raise InvalidRequestError(
                    f"request needs {needed} KV blocks of {self.cache.block_size} tokens for {num_tokens} tokens, but "
                    f"there are {pool.num_blocks}; ask for fewer tokens or start the worker with more KV memory",
                    value=needed,
                    limit=pool.num_blocks,
                )

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence that holds no blocks wait for its turn."""
        self.waiting.add(sequence)

    def schedule(self) -> Chunks:
        """The chunks of the next step, with blocks reserved for them.

        Empty only if nothing is unfinished, or all waits for what the step under way draws, publishes or frees.
        """
        plan = _Plan(self.max_num_batched_tokens)
        if self._running_lanes is None:
            self._running_lanes = np.array([sequence.lane for sequence in self.running], np.int64)
        running = self._running_lanes
        uncomputed = self.lanes.num_tokens[running] - self.lanes.num_computed[running]
        alone = self._decode(running[uncomputed == 1], plan)
        for sequence in self.lanes.sequences[np.concatenate((alone, running[uncomputed > 1]))]:
            if sequence.table:  # not preempted by one before it
                self._continue(sequence, plan)
        if not plan.short_of_blocks:
            self._admit_waiting(plan)
        return self._chunks(plan)

    def _chunks(self, plan: _Plan) -> Chunks:
        lanes = np.fromiter(plan.sizes, np.int64, len(plan.sizes))
        starts = self.lanes.num_computed[lanes]
        sizes = np.fromiter(plan.sizes.values(), np.int64, len(lanes))
        return Chunks(self.lanes.sequences[lanes].tolist(), lanes, starts, starts + sizes)

    def advance(self, chunks: Chunks) -> None:
        """Records that a step computes the KV of `chunks`: the next one goes on from their ends."""
        self.lanes.num_computed[chunks.lanes] = chunks.ends
        self.states.advance(chunks)
        of_prompts = np.minimum(chunks.ends, self.lanes.num_prompt_tokens[chunks.lanes]) - chunks.starts
        self.stats.computed_tokens += int((chunks.ends - chunks.starts).sum())
        self.stats.computed_prompt_tokens += int(of_prompts.clip(0).sum())

    def publish(self, chunks: Chunks) -> None:
        """Publishes the blocks that `chunks` filled, now that their tokens are known, and then gives those back that
        are behind a window; sequences that lost their blocks since are passed over.
        """
        size = self.cache.block_size
        for sequence, _, end in chunks.take(np.flatnonzero(chunks.ends // size > chunks.starts // size)):
            if sequence.table:
                num_known = len(sequence.chain.entries)
                self.cache.publish(sequence.chain, sequence.tokens, sequence.table, end)
                self._attach_routes(sequence, num_known)
        self.states.publish(chunks, self.cache.epoch)
        for sequence, _, end in chunks.take(
            np.flatnonzero(self.cache.tables.leave_windows(chunks.starts, chunks.ends))
        ):
            if sequence.table:
                self.cache.tables.give_back(sequence.table, end)

    def _attach_routes(self, sequence: Sequence, num_known: int) -> None:
        """Gives the entries of a sequence from the first `num_known` on the routed experts of their blocks, if it has
        those of these weights.
        """
        if self.routes is None or (routes := sequence.routes) is None:
            return
        entries, size = sequence.chain.entries, self.cache.block_size
        for i in range(max(num_known, -(-routes.fresh // size)), len(entries)):
            self.routes.attach(entries[i], routes.rows(i * size, (i + 1) * size))

    def fork(self, parent: Sequence, sample: OpenSample, token: int) -> Sequence:
        """A second sequence, for `sample`, with the tokens and the KV of `parent`, all of whose tokens are computed,
        and then its own first `token`.

        It shares the full blocks; the one that is left, if any, is copied before the next step. If it has no room to
        run, or the parent lost its blocks since, it waits instead and finds the shared blocks again when it is
        admitted.
        """
        chain, purpose = parent.chain.fork(), Generation([sample])
        tokens = parent.tokens + array("i", (token,))
        child = Sequence(sample.order, tokens, parent.num_prompt_tokens, chain, purpose)
        child.num_cached_tokens = parent.num_cached_tokens
        child.routes = None if parent.routes is None else parent.routes.fork()
        num_fresh = len(parent.table) - parent.num_computed // self.cache.block_size
        has_room = len(self.running) < self.max_num_seqs and num_fresh <= self.cache.tables.num_available
        slots = self.states.fork(parent) if has_room and parent.table else None
        if slots is None:
            self.add(child)
            return child
        child.table, copies = self.cache.tables.fork(parent.table, parent.num_computed)
        self._run(child, parent.num_computed, slots)
        for pending, new in zip(self._block_copies, copies, strict=True):
            pending.update(new)
        return child

    def take_block_copies(self) -> list[dict[int, int]]:
        """What has to be copied before the next step computes anything, once: of each group destination to source."""
        copies, self._block_copies = self._block_copies, self._no_copies()
        return copies

    def _no_copies(self) -> list[dict[int, int]]:
        return [{} for _ in self.cache.tables.windows]

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, waiting or running, and gives its blocks back."""
        if sequence.table:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def recompute_running(self) -> None:
        """Takes all blocks from every running sequence; they wait, and are computed anew when their turn comes."""
        self.stats.recomputed += len(self.running)
        for sequence in self.running.copy():
            self._suspend(sequence)

    def started(self) -> list[Sequence]:
        """The sequences that run, and those that wait after they got decoded tokens."""
        return self.running + [
            sequence for sequence in self.waiting if sequence.num_tokens > sequence.num_prompt_tokens
        ]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is accounted for by the running sequences alone."""
        if any(sequence.table for sequence in self.waiting):
            raise RuntimeError("scheduler: a waiting sequence holds blocks")
        self.cache.check_integrity(sequence.table for sequence in self.running)
        self.states.check_integrity(self.running)
        self.lanes.check(self.running)
        if self.routes is not None:
            self.routes.check_integrity(self.cache.entries)

    def _decode(self, lanes: np.ndarray, plan: _Plan) -> np.ndarray:
        """Lets the sequences of some lanes compute one token each, in this order, if there are blocks for all of them.
        Returns the lanes if not: each then has to be looked at alone.
        """
        lanes = lanes[: plan.budget]
        if self.states.cuts_decodes(lanes):
            return lanes
        lacking = lanes[self.lanes.num_computed[lanes] == self.lanes.num_blocks[lanes] * self.cache.block_size]
        if len(lacking) > self.cache.tables.num_available:
            return lanes
        for sequence in self.lanes.sequences[lacking]:
            self._extend(sequence, 1)
        plan.sizes = dict.fromkeys(lanes.tolist(), 1)
        plan.budget -= len(lanes)
        return lanes[:0]

    def _continue(self, sequence: Sequence, plan: _Plan) -> None:
        size = self._reserve(sequence, min(sequence.num_uncomputed, plan.budget), plan)
        if size > 0:
            plan.add(sequence.lane, self.states.cut(sequence, size))

    def _reserve(self, sequence: Sequence, size: int, plan: _Plan) -> int:
        """Gives a running sequence blocks for up to `size` more tokens; returns for how many it has them."""
        held = len(sequence.table)
        needed = self.cache.tables.blocks_for(sequence.num_computed + size) - held
        if needed > self.cache.tables.num_available:
            plan.short_of_blocks = True
            while self.cache.tables.num_available == 0 and self.running[-1] is not sequence:
                self._preempt(self.running[-1], plan)
            needed = min(needed, self.cache.tables.num_available)
        if needed > 0:
            self._extend(sequence, needed)
        return min(size, len(sequence.table) * self.cache.block_size - sequence.num_computed)

    def _extend(self, sequence: Sequence, num_blocks: int) -> None:
        self.cache.tables.extend(sequence.table, num_blocks)
        self.lanes.add_blocks(sequence)

    def _preempt(self, sequence: Sequence, plan: _Plan) -> None:
        plan.remove(sequence.lane)
        self._suspend(sequence)
        self.stats.preemptions += 1

    def _suspend(self, sequence: Sequence) -> None:
        """Takes all blocks from a running sequence. It waits to be computed anew; its published blocks may be hit."""
        self._stop(sequence)
        self.add(sequence)

    def _run(self, sequence: Sequence, num_computed: int, slots: Slots) -> None:
        insort(self.running, sequence, key=order_of)
        self.lanes.enter(sequence, num_computed, *slots)
        self._running_lanes = None

    def _stop(self, sequence: Sequence) -> None:
        """Takes all that a running sequence holds."""
        self.cache.claims.withdraw(sequence.chain)
        self.cache.tables.release(sequence.table)
        self.states.release(sequence)
        sequence.table = Table()
        remove_from(self.running, sequence)
        self.lanes.leave(sequence)
        self._running_lanes = None

    def _admit_waiting(self, plan: _Plan) -> None:
        self.waiting.take_back(self._is_under_way)
        lookups_in_vain = 0
        while self.waiting.ready and lookups_in_vain < _MOST_LOOKUPS_IN_VAIN:
            if plan.budget == 0 or len(self.running) >= self.max_num_seqs:
                break
            outcome = self._admit(self.waiting.ready[0], plan)
            if outcome is Outcome.WAIT_FOR_BLOCKS:
                break
            lookups_in_vain += outcome is Outcome.WAIT_FOR_PREFIX
        self.stats.deferred_admissions += self.waiting.num_aside

    def _is_under_way(self, key: bytes) -> bool:
        """Whether a block that others wait for, or the checkpoint at its end, is still to come."""
        return key in self.cache.claims or self.states.is_branch(key)

    def _admit(self, sequence: Sequence, plan: _Plan) -> Outcome:
        """Starts a waiting sequence behind the longest prefix it can reuse, once all of its tokens have room."""
        cache = self.cache
        if sequence.chain.epoch != cache.epoch:
            self._renew(sequence)
        # The last token is always computed: its logits are needed. A score request needs the logits of every token.
        limit = sequence.num_tokens - 1 if isinstance(sequence.purpose, Generation) else 0
        found = cache.lookup(sequence.chain, sequence.tokens, limit)
        hits = self._recorded(sequence, found)
        claim = cache.find_claim(sequence.chain, len(hits), limit)
        if claim is not None:
            self.waiting.set_aside(sequence, claim)
            return Outcome.WAIT_FOR_PREFIX
        resumed = cache.deepest(hits, self.states.slots.is_ready) if self.states.slots.num_slots else hits
        if (branch := self.states.branch_under_way(sequence, len(resumed), len(hits))) is not None:
            self.waiting.set_aside(sequence, branch)
            return Outcome.WAIT_FOR_PREFIX
        if not cache.tables.can_hold(resumed, sequence.num_tokens, self.max_num_batched_tokens):
            return Outcome.WAIT_FOR_BLOCKS
        slots = self.states.begin(resumed)
        if slots is None:
            return Outcome.WAIT_FOR_BLOCKS
        if len(resumed) < len(hits):
            self.states.expect_branch(sequence, len(hits))
        self._start(sequence, resumed, slots, plan)
        self.stats.shortened_hits += (len(found) - len(resumed)) * cache.block_size
        return Outcome.ADMITTED

    def _renew(self, sequence: Sequence) -> None:
        """Gives a sequence a chain of the current epoch."""
        sequence.chain = self.cache.identity.restart(sequence.chain)
        if sequence.routes is not None:
            sequence.routes.fresh = sequence.routes.num_rows

    def _recorded(self, sequence: Sequence, hits: list[Entry]) -> list[Entry]:
        """What a sequence can use of its hits: where it needs their routed experts, those before the first one without.
        The others it computes again.
        """
        if self.routes is None or not sequence.needs_routes:
            return hits
        recorded = self.routes.recorded(hits)
        return recorded if len(recorded) == len(hits) else self.cache.deepest(recorded)

    def _start(self, sequence: Sequence, hits: list[Entry], slots: Slots, plan: _Plan) -> None:
        cache = self.cache
        sequence.table = cache.tables.allocate(hits, 0)
        sequence.chain.entries = hits
        if self.routes is not None and sequence.routes is not None and sequence.needs_routes:
            sequence.routes.begin(self.routes.rows(hits))
        cache.claims.add(sequence.chain)
        self.waiting.remove(sequence)
        self._run(sequence, len(hits) * cache.block_size, slots)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            self.stats.prefix_queries += sequence.num_tokens if isinstance(sequence.purpose, Generation) else 0
            self.stats.prefix_hits += sequence.num_computed
        self._continue(sequence, plan)
