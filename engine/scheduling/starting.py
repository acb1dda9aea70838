"""Whether a waiting sequence can start to run, and behind which prefix.

Owns the decision for one sequence: what it finds in the cache, and what it waits for instead. Does not own which
sequence is looked at, nor how many (`scheduler`).
"""

from __future__ import annotations

from enum import Enum, auto

from ..cache.chains import Entry
from ..cache.prefix_cache import PrefixCache
from ..cache.routes import RouteRecords
from .recurrent import Slots
from .running import Running
from .sequence import Generation, Sequence
from .stats import SchedulerStats
from .waiting import Waiting


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
        # The last token is always computed: its logits are needed. A score request needs the logits of every token.
        limit = sequence.num_tokens - 1 if isinstance(sequence.purpose, Generation) else 0
        found = cache.lookup(sequence.chain, sequence.tokens, limit)
        hits = self._recorded(sequence, found)
        resumed = cache.deepest(hits, self._states.slots.is_ready) if self._states.slots.num_slots else hits
        awaited = cache.find_claim(sequence.chain, len(hits), limit) or self._states.branches.find(
            sequence, len(resumed), len(hits)
        )
        if awaited is not None:
            self._waiting.set_aside(sequence, awaited)
            return Outcome.WAIT_FOR_PREFIX
        if not cache.tables.can_hold(resumed, sequence.num_tokens, self._chunk):
            return Outcome.WAIT_FOR_BLOCKS
        slots = self._states.begin(resumed)
        if slots is None:
            return Outcome.WAIT_FOR_BLOCKS
        if len(resumed) < len(hits) and self._states.slots.budget:
            self._states.branches.expect(sequence, len(hits))
        self._begin(sequence, resumed, slots)
        self._stats.shortened_hits += (len(found) - len(resumed)) * cache.block_size
        return Outcome.STARTED

    def is_under_way(self, key: bytes) -> bool:
        """Whether a block that others wait for, or the checkpoint at its end, is still to come."""
        return key in self._cache.claims or key in self._states.branches

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
