"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


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
