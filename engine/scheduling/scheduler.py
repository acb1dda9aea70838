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

from dataclasses import dataclass, field

import numpy as np

from ..cache.chains import Entry
from ..cache.prefix_cache import PrefixCache
from ..cache.routes import RouteRecords
from ..cache.states import StateSlots
from ..outputs.open_requests import OpenSample
from ..outputs.routes import Routes
from .lanes import Lanes
from .recurrent import NO_CHECKPOINTS, Intervals
from .running import Running
from .sequence import Chunks, Sequence
from .starting import Outcome, Starter
from .stats import SchedulerStats
from .waiting import Waiting

# To look up a sequence is to hash its prompt, and then to find block by block what is cached of it.
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
        self.running = Running(cache, max_num_seqs, slots or StateSlots(0, 0), intervals)
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
        alone = self._decode(running[uncomputed == 1], plan)
        for sequence in lanes.sequences[np.concatenate((alone, running[uncomputed > 1]))]:
            if sequence.table:  # not preempted by one before it
                self._continue(sequence, plan)
        if not plan.short_of_blocks:
            self._start_waiting(plan)
        return plan.chunks(lanes)

    def advance(self, chunks: Chunks) -> None:
        """Records that a step computes the KV of `chunks`: the next one goes on from their ends."""
        lanes = self.running.lanes
        lanes.num_computed[chunks.lanes] = chunks.ends
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
        self.running.states.publish(chunks, cache.identity.epoch)
        left = cache.tables.leave_windows(chunks.starts, chunks.ends)
        for sequence, _, end in chunks.take(np.flatnonzero(left)):
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
        if sequence.table:
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

    def _decode(self, lanes: np.ndarray, plan: _Plan) -> np.ndarray:
        """Lets the sequences of some lanes compute one token each, in this order, if there are blocks for all of them.
        Returns the lanes if not: each then has to be looked at alone.
        """
        lanes, columns = lanes[: plan.budget], self.running.lanes
        if self.running.states.cuts_decodes(lanes):
            return lanes
        lacking = lanes[columns.num_computed[lanes] == columns.num_blocks[lanes] * self.cache.block_size]
        if len(lacking) > self.cache.tables.num_available:
            return lanes
        for sequence in columns.sequences[lacking]:
            self.running.extend(sequence, 1)
        plan.sizes = dict.fromkeys(lanes.tolist(), 1)
        plan.budget -= len(lanes)
        return lanes[:0]

    def _continue(self, sequence: Sequence, plan: _Plan) -> None:
        size = self._reserve(sequence, min(sequence.num_uncomputed, plan.budget), plan)
        if size > 0:
            plan.add(sequence.lane, self.running.states.cut(sequence, size))

    def _reserve(self, sequence: Sequence, size: int, plan: _Plan) -> int:
        """Gives a running sequence blocks for up to `size` more tokens; returns for how many it has them."""
        tables, running = self.cache.tables, self.running.sequences
        needed = tables.blocks_for(sequence.num_computed + size) - len(sequence.table)
        if needed > tables.num_available:
            plan.short_of_blocks = True
            while tables.num_available == 0 and running[-1] is not sequence:
                self._preempt(running[-1], plan)
            needed = min(needed, tables.num_available)
        if needed > 0:
            self.running.extend(sequence, needed)
        return min(size, len(sequence.table) * tables.block_size - sequence.num_computed)

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
