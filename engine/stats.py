"""The engine's counters and gauges, for monitoring and for the exactness matrix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """The block pool of the layers with the same window.

    `window`: the window in tokens, or None for layers without a window. `in_use`: blocks held by sequences. `cached`:
    free blocks with a prefix that is still indexed. `empty`: the other free blocks.
    """

    window: int | None
    in_use: int
    cached: int
    empty: int


@dataclass(frozen=True)
class EngineStats:
    """Lifetime counters, and gauges of the current moment (`num_*`, `pools`).

    `prefix_queries`: prompt tokens of generate requests. `prefix_hits`: prompt tokens that were found in the cache or
    shared with a running computation of the same prompt. `computed_prompt_tokens`: prompt tokens with newly computed
    KV, counted again after a preemption or a recompute. `computed_tokens`: computed prompt tokens and decoded tokens.
    `generated_tokens`: tokens of finished samples. `preemptions`: how often a running sequence gave its blocks to an
    older one. `recomputed`: how often a running sequence lost its blocks to a weight commit or to a sleep.
    `deferred_admissions`: how often a request waited a step for a prefix that another request was computing.
    `evictions`: cached blocks that were reused for other content. `pools`: one entry per window of the model's layers.

    `shortened_hits`: tokens that were found in the cache but computed again, because there was no checkpoint of their
    recurrent state, or because the requested routed experts were not recorded.

    The following are 0 for models without recurrent layers. `checkpoints_skipped`: checkpoints that were not taken,
    because there was no slot. `checkpoints_evicted`: checkpoints that gave up their slot. `checkpoints_restored`: how
    often a sequence resumed from a checkpoint. `checkpoints_ready`: checkpoints that can be restored now.
    `checkpoints_reserved`: checkpoints that steps in flight are writing.

    `expert_tokens`: for models with experts, the number of tokens routed to each expert, int64 [layers with experts,
    experts per layer] as little-endian bytes, not counting the step in flight. Empty for other models.
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
        """The blocks in use in all pools."""
        return sum(pool.in_use for pool in self.pools)
