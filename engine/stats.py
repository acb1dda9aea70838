"""What the engine counts, as it is told to monitoring and to the exactness matrix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """Blocks that the layers of one window share, or those without one. `in_use`: sequences hold them; `cached`: free
    ones whose prefix is still indexed; `empty`: the other free ones.
    """

    window: int | None
    in_use: int
    cached: int
    empty: int


@dataclass(frozen=True)
class EngineStats:
    """Lifetime counters, and gauges of this moment (`num_*`, `pools`).

    `prefix_queries`: prompt tokens of generate requests; `prefix_hits`: those of them found in the cache or shared with
    a running computation of the same prompt. `computed_prompt_tokens`: prompt tokens whose KV was computed, again after
    a preemption or a recompute too. `computed_tokens`: those and the decoded ones. `generated_tokens`: tokens of
    finished samples. `preemptions`: how often a running sequence gave its blocks to an older one; `recomputed`: how
    often one lost them to a commit of weights or to a sleep. `deferred_admissions`: how often a request waited a step
    for a prefix that another one was computing. `evictions`: cached blocks that were reused for something else.
    `pools`: for each window of the model's layers.

    Of recurrent states, 0 for models without: `shortened_hits`, tokens that were found in the cache and computed all
    the same, for want of a checkpoint of their state; `checkpoints_skipped`, those that found no place;
    `checkpoints_evicted`, those that gave their place away; `checkpoints_restored`, how often a sequence went on from
    one; `checkpoints_ready` and `checkpoints_reserved`, those that can be restored now, and that steps under way take.
    `shortened_hits` also counts those that were computed again for want of the routed experts that were asked for.

    `expert_tokens`: of a model with experts how many tokens each one was given, int64 [layers with experts, experts per
    layer] as little-endian bytes, those of the step under way left out; empty for models without.
    """

    steps: int
    num_running: int
    num_waiting: int
    prefix_queries: int
    prefix_hits: int
    computed_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    recomputed: int
    deferred_admissions: int
    evictions: int
    shortened_hits: int
    checkpoints_skipped: int
    checkpoints_evicted: int
    checkpoints_restored: int
    checkpoints_ready: int
    checkpoints_reserved: int
    expert_tokens: bytes
    pools: tuple[PoolStats, ...]
    samples_finished: dict[str, int]

    @property
    def blocks_in_use(self) -> int:
        """Of all pools."""
        return sum(pool.in_use for pool in self.pools)
