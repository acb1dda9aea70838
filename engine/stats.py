"""The engine's counters and gauges, for monitoring and for tests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PoolStats:
    """The block pool that all layers with the same attention window share.

    `window`: the window in tokens, or None for layers without a window. `in_use`: blocks held by sequences. `cached`:
    free blocks that hold a prefix listed in the cache's index. `empty`: free blocks that hold no prefix of the cache's
    index. `on_host`: slots of the host tier that hold the content of a block of this pool.
    """

    window: int | None
    in_use: int
    cached: int
    empty: int
    on_host: int


@dataclass(frozen=True)
class DraftStats:
    """The statistics of one drafter.

    `drafter`: the drafter's name. `drafts`: the number of drafts, at most one per sequence and step. `drafted`: for
    each position in a draft, the number of drafted tokens. `accepted`: for each position in a draft, the number of
    drafted tokens that became tokens of a sample.
    """

    drafter: str
    drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafted(self) -> int:
        """The number of drafted tokens."""
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        """The number of drafted tokens that were accepted."""
        return sum(self.accepted)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start of the engine, and current gauges.

    The gauges are `num_*`, `pools`, `checkpoints_ready`, `checkpoints_reserved` and `checkpoints_on_host`.

    `prefix_queries`: prompt tokens of generate requests. `prefix_hits`: prompt tokens that were found in the cache or
    shared with a running computation of the same prompt. `computed_prompt_tokens`: prompt tokens with newly computed
    KV, counted again after a preemption or a recompute. `computed_tokens`: computed prompt tokens and decoded tokens.
    `generated_tokens`: tokens of finished samples. `preemptions`: how often an older sequence took the blocks of a
    running sequence. `recomputed`: how often a weight commit or a sleep took the blocks of a running sequence.
    `deferred_admissions`: how many requests waited for another request to compute a prefix, added up over all steps.
    `evictions`: cached blocks that were reused for other content. `pools`: one entry per window of the model's layers.

    `host_stored`: blocks and checkpoints that were copied to the host tier. `host_restored`: blocks and checkpoints
    that were copied back to the device. `host_evictions`: blocks and checkpoints that the host tier dropped for lack of
    room. `host_hits`: tokens that were restored from the host tier: prompt tokens, and after a preemption also the
    sample's own tokens. Without a host tier, `host_stored`, `host_restored`, `host_evictions` and `host_hits` are 0.

    `shortened_hits`: tokens that were found in the cache but computed again. Tokens are computed again if the
    checkpoint of the recurrent state or the requested routed experts are missing.

    `images_encoded`, `image_evictions`: images that were encoded, and encoded images that were evicted; 0 for models
    without a vision tower.

    `record_errors`: samples and scores that ended with an error, because the records of unfinished requests exceeded
    `max_record_bytes`.

    The `checkpoints_*` fields are 0 for models without recurrent layers. `checkpoints_skipped`: checkpoints that were
    not taken, because no slot was available. `checkpoints_evicted`: checkpoints dropped to free a slot.
    `checkpoints_restored`: how often a sequence resumed from a checkpoint. `checkpoints_ready`: checkpoints that can be
    restored now. `checkpoints_reserved`: checkpoints that the steps in flight will complete. `checkpoints_on_host`:
    checkpoints in the host tier.

    `rank_wait_us`: how long rank 0 has waited for the other ranks, in microseconds. Comparisons of statistics ignore
    `rank_wait_us`.

    `drafts`: one entry per drafter; empty if nothing is drafted.

    `expert_tokens`: the number of tokens routed to each expert, not counting the step in flight. `expert_tokens` holds
    the little-endian bytes of an int64 array [layers with experts, experts per layer], and is empty for models without
    experts.
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
    host_stored: int
    host_restored: int
    host_evictions: int
    host_hits: int
    shortened_hits: int
    images_encoded: int
    image_evictions: int
    record_errors: int
    checkpoints_skipped: int
    checkpoints_evicted: int
    checkpoints_restored: int
    checkpoints_ready: int
    checkpoints_reserved: int
    checkpoints_on_host: int
    expert_tokens: bytes
    pools: tuple[PoolStats, ...]
    drafts: tuple[DraftStats, ...]
    samples_finished: dict[str, int]
    rank_wait_us: int = field(compare=False)

    @property
    def blocks_in_use(self) -> int:
        """The number of blocks in use, summed over all pools."""
        return sum(pool.in_use for pool in self.pools)
