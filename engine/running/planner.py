"""The memory plan: divides memory among KV blocks, live states and checkpoints, after the weights, the encoded images
and the named adapters have taken their part.

A worker makes the plan before it allocates the memory. Live states are the recurrent states of running sequences
and of forks. Checkpoints are recurrent states at the ends of cached prefixes, from which sequences can resume. A model
without recurrent layers has no states, and all memory is used for blocks. Layers with the same attention window form a
group with its own blocks (`DecoderSpec.windows`). If some layers have no window, these layers form the first group. The
configuration determines the number of blocks of the first group. From the first group's number of blocks, the planner
derives the number of blocks of every other group.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from trueroll.errors import ConfigError

from ...kernels.contract import LOGITS_ROWS
from ...kernels.specs import CachedSpec, DecoderSpec, LatentSpec, Stage
from ..config import EngineConfig, defaults_of


@dataclass(frozen=True)
class Storage:
    """The element sizes of each kind of memory, in bytes.

    `kv`: bytes per element of the KV cache. `tail`: bytes per element of a convolution's last inputs, which are stored
    with a recurrent state, and of hidden states.
    `state`: bytes per element of a recurrent state. `kv_head`: extra bytes per key or value of a head. `holds_values`,
    `cache_formats`: as `Backend.HOLDS_VALUES` and `Backend.CACHE_FORMATS`. Keys and values that the backend stores in
    one of its formats have the size of that format instead of `kv` and `kv_head`.
    """

    kv: int
    tail: int
    state: int = 4
    kv_head: int = 0
    holds_values: bool = True
    cache_formats: frozenset[str] = frozenset()

    @classmethod
    def of(cls, dtype: torch.dtype, holds_values: bool = True, cache_formats: frozenset[str] = frozenset()) -> Storage:
        """Return the element sizes for a worker that computes in `dtype`."""
        return cls(dtype.itemsize, dtype.itemsize, holds_values=holds_values, cache_formats=cache_formats)

    def cached_bytes(self, mixer: CachedSpec) -> int:
        """Return the size of a token's keys and values in a layer."""
        key, value = mixer.cached_sizes
        if (format := mixer.cache_format) is not None and format.name in self.cache_formats:
            return mixer.num_kv_heads * (format.row_bytes(mixer.key_sizes) + format.row_bytes((value,)))
        sizes = [key] if isinstance(mixer, LatentSpec) and not self.holds_values else [key, value]
        return mixer.num_kv_heads * sum(size * self.kv + self.kv_head for size in sizes)


@dataclass(frozen=True)
class Sizes:
    """The sizes of blocks and states in bytes, summed over the layers of a rank.

    All ranks have the same numbers of blocks and states. If the stages of a model differ, each size is the largest of
    all stages.

    `block`: the size of a block of the first group. A block of the first group holds the keys and values of
    `block_size` tokens in all layers of the group, and the hidden states that an MTP module keeps for the block.
    `windows` has a pair for each group after the first: the group's window in tokens, and the size of the group's
    blocks. `state`: the size of one sequence's state in all recurrent layers; 0 for models without recurrent layers.
    `draft`: the size of the inputs that recurrent layers keep for a drafted token.
    """

    block_size: int
    block: int
    state: int
    windows: tuple[tuple[int, int], ...] = ()
    draft: int = 0

    @classmethod
    def of(cls, spec: DecoderSpec, storage: Storage, block_size: int, most: int = 0) -> Sizes:
        """Return the sizes of blocks and states. `spec`: the decoder, or a rank's part of the decoder.

        `most`: the maximum number of tokens drafted for a sequence in a step.
        """
        stages = [replace(spec, stage=Stage(i, spec.stage.size)) for i in range(spec.stage.size)]
        found = [_sizes_of_stage(stage, storage, block_size, most) for stage in stages]
        state, draft, block, *others = map(max, zip(*found, strict=True))
        further = tuple((window or 0, size) for window, size in zip(spec.windows[1:], others, strict=True))
        return cls(block_size, block, state, further, draft)

    @property
    def interval(self) -> int:
        """The default number of tokens between checkpoints.

        The interval is the smallest power of two, in blocks, at which a checkpoint takes at most as much memory as the
        blocks between two checkpoints.
        """
        blocks = 1
        while blocks * self.block < self.state:
            blocks *= 2
        return blocks * self.block_size

    def cached_tokens(self, pool: int, interval: int) -> int:
        """Return the maximum number of tokens that fit into `pool` bytes with one checkpoint per `interval` tokens."""
        return pool * interval // (interval // self.block_size * self.block + self.state)


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is divided among blocks, states and checkpoints.

    `num_blocks`: the number of blocks in the first group. `window_blocks`: the number of blocks in each group after the
    first. `live_states`: the number of states for running sequences and for forks. `checkpoints`: the maximum number of
    checkpoints held at a time. `state_interval`: the number of tokens between checkpoints; 0 without recurrent layers.
    `num_drafts`: the maximum number of drafted tokens, for all running sequences together. `host_blocks`: the number of
    blocks of each group that the host tier can hold; empty without a host tier. `host_states`: the number of
    checkpoints that the host tier can hold.
    """

    sizes: Sizes
    num_blocks: int
    window_blocks: tuple[int, ...] = ()
    live_states: int = 0
    checkpoints: int = 0
    state_interval: int = 0
    num_drafts: int = 0
    host_blocks: tuple[int, ...] = ()
    host_states: int = 0

    @property
    def num_slots(self) -> int:
        """The number of slots for live states and checkpoints."""
        return self.live_states + self.checkpoints

    @property
    def pools(self) -> list[tuple[int, int]]:
        """For each group, the number of blocks and the size of a block in bytes."""
        further = [(count, size) for count, (_, size) in zip(self.window_blocks, self.sizes.windows, strict=True)]
        return [(self.num_blocks, self.sizes.block), *further]

    @property
    def kv_bytes(self) -> int:
        return sum(count * size for count, size in self.pools)

    @property
    def state_bytes(self) -> int:
        """The memory of states and of the inputs of drafted tokens."""
        return self.num_slots * self.sizes.state + self.num_drafts * self.sizes.draft


def _sizes_of_stage(spec: DecoderSpec, storage: Storage, block_size: int, most: int) -> list[int]:
    """Return the sizes of a state, of the inputs of a drafted token, and of the blocks of each group."""
    tokens, holds_mtp = dict.fromkeys(spec.windows, 0), spec.stage.is_last and spec.serves_mtp
    layers = [spec.layers[i] for i in spec.own_layers]
    recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
    cached = [layer.cached for layer in layers if layer.cached is not None]
    for m in (*cached, *(spec.mtp_attentions if holds_mtp else ())):
        tokens[m.window] += storage.cached_bytes(m)
    state = sum(storage.state * prod(m.state_shape) + storage.tail * prod(m.tail_shape) for m in recurrent)
    block, *others = (block_size * token for token in tokens.values())
    if holds_mtp:
        block += kept_states(most, block_size) * spec.hidden_size * storage.tail
    return [state, storage.tail * sum(m.row_size for m in recurrent), block, *others]


def kept_states(most: int, block_size: int) -> int:
    """Return the number of hidden states that each block keeps for the MTP module.

    `most`: the maximum number of tokens drafted for a sequence in a step. If a step has `most` drafted tokens of a
    sequence, any of the sequence's `most` + 1 tokens in the step may be the last accepted token.
    """
    return min(most + 1, block_size)


def plan_memory(
    config: EngineConfig, sizes: Sizes, max_model_len: int, available: int, route_bytes: int = 0
) -> MemoryPlan:
    """Return the plan for `available` bytes of memory, which include the bytes for encoded images and for adapters.

    `route_bytes`: the size of a token's recorded experts. Raise ConfigError if the configuration leaves no room for a
    single block, or needs more than `available` bytes.
    """
    if config.encoded_bytes >= available:
        raise ConfigError(
            f"image_cache_bytes must be less than the {available} bytes of available memory (got "
            f"{config.image_cache_bytes}); lower image_cache_bytes, or set max_images to 0",
            field="image_cache_bytes",
            value=config.image_cache_bytes,
            limit=available,
        )
    available -= config.encoded_bytes
    if config.adapter_bytes >= available:
        raise ConfigError(
            f"adapter_bytes must be less than the {available} bytes of available memory (got {config.adapter_bytes}); "
            "lower adapter_bytes",
            field="adapter_bytes",
            value=config.adapter_bytes,
            limit=available,
        )
    available -= config.adapter_bytes
    live, interval = _live_states(config, sizes), (config.state_interval or sizes.interval) if sizes.state else 0
    budget = (config.state_budget or 0) if _has_checkpoints(config, interval) else 0
    of_drafts = config.max_num_seqs * config.num_drafts * sizes.draft
    room = _budget(config, available) - (live + budget) * sizes.state - of_drafts
    num_blocks = config.num_blocks or _blocks_in(room, config, sizes, interval, max_model_len)
    if num_blocks <= 0:
        states = f"{live} live states" + (f" and {budget} checkpoints" if budget else "")
        beside = f" in addition to {states} of {sizes.state} bytes each" if live else ""
        beside += f" and {of_drafts} bytes for drafts" if of_drafts else ""
        raise ConfigError(
            f"kv_memory: {_budget(config, available)} bytes are not enough for one KV block of {sizes.block} "
            f"bytes{beside}; raise kv_memory, or lower "
            f"max_num_seqs{' or state_budget' if budget else ''}{' or num_speculative_tokens' if of_drafts else ''}"
        )
    if not any(size is not None for size in (config.num_blocks, config.kv_memory, config.kv_memory_fraction)):
        num_blocks = min(num_blocks, config.max_num_seqs * _blocks(max_model_len, config.block_size))
    plan = _plan(config, sizes, max_model_len, num_blocks, interval)
    if plan.kv_bytes + plan.state_bytes > available:
        blocks = ", ".join(f"{count} blocks of {size} bytes" for count, size in plan.pools)
        raise ConfigError(
            f"num_blocks, kv_memory: {blocks} and {plan.num_slots} states of {sizes.state} bytes "
            f"each{f' and {of_drafts} bytes for drafts' if of_drafts else ''} exceed the {available} bytes of "
            "available memory; lower num_blocks, kv_memory, max_num_seqs or state_budget"
        )
    return _with_host_tier(plan, config.host_cache_bytes, route_bytes) if config.host_cache_bytes else plan


def _with_host_tier(plan: MemoryPlan, budget: int, route_bytes: int) -> MemoryPlan:
    """Return a plan with a host tier of up to `budget` bytes. The host tier is divided among the groups of blocks and
    the checkpoints, in the same way as the memory of the device. The host tier includes the recorded experts of its
    blocks.

    Raise ConfigError if a group, or the checkpoints, would have no slot.
    """
    pools = [(count, size) for count, size in plan.pools]
    pools[0] = plan.num_blocks, plan.sizes.block + plan.sizes.block_size * route_bytes
    total = sum(count * size for count, size in pools) + plan.checkpoints * plan.sizes.state
    *blocks, states = (count * budget // total for count in (*(count for count, _ in pools), plan.checkpoints))
    counts = [count for count, _ in pools] + ([plan.checkpoints] if plan.checkpoints else [])
    if budget < (least := -(-total // min(counts))):
        raise ConfigError(
            f"host_cache_bytes must be at least {least}, so that the host tier holds a block of each group and a "
            f"checkpoint (got {budget}); raise host_cache_bytes, or set it to 0",
            field="host_cache_bytes",
            value=budget,
            limit=least,
        )
    return replace(plan, host_blocks=tuple(blocks), host_states=states)


def scratch_bytes(spec: DecoderSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """Return an estimate of the peak memory of the largest step, in bytes.

    The estimate covers the hidden states, the logits of the decoding sequences, and the intermediate values of the MLP,
    latent attention or recurrence that needs the most memory.
    """
    widths = [2 * layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None]
    widths += [each.num_heads * sum(each.cached_sizes) for each in spec.attentions if isinstance(each, LatentSpec)]
    for mixer in spec.recurrent:
        heads, _, size = mixer.state_shape
        widths.append(2 * (mixer.row_size + heads * size))  # inputs before and after the convolution, gate and output
    widest = max([0, *widths])
    rows = config.max_num_batched_tokens * (3 * spec.hidden_size + widest) * dtype.itemsize
    return rows + 2 * 4 * min(config.max_num_seqs * (1 + config.num_drafts), LOGITS_ROWS) * spec.vocab_size


def _budget(config: EngineConfig, available: int) -> int:
    fraction = config.kv_memory_fraction or defaults_of(config.device).kv_memory_fraction
    return int(available * fraction) if config.kv_memory is None else config.kv_memory


def _live_states(config: EngineConfig, sizes: Sizes) -> int:
    """Return the number of live states: one per running sequence, and an eighth more (at least one) for forks."""
    return config.max_num_seqs + max(1, config.max_num_seqs // 8) if sizes.state else 0


def _plan(config: EngineConfig, sizes: Sizes, max_model_len: int, num_blocks: int, interval: int) -> MemoryPlan:
    windows = tuple(_window_blocks(config, window, max_model_len, num_blocks) for window, _ in sizes.windows)
    checkpoints = _checkpoints(config, num_blocks, interval)
    num_drafts = config.max_num_seqs * config.num_drafts
    return MemoryPlan(sizes, num_blocks, windows, _live_states(config, sizes), checkpoints, interval, num_drafts)


def _window_blocks(config: EngineConfig, window: int, max_model_len: int, num_blocks: int) -> int:
    """Return the number of blocks of a group with a window.

    Running sequences need blocks for one window per sequence, and for the chunks of two steps. Additional blocks hold
    the last window of the prefixes that are cached in the `num_blocks` blocks of the first group, so that these
    prefixes can be resumed. The additional blocks suffice if each cached prefix has `max_model_len` tokens, or at least
    four windows of tokens.
    """
    blocks = partial(_blocks, block_size=config.block_size)
    running = config.max_num_seqs * (blocks(window) + 1) + 2 * blocks(config.max_num_batched_tokens)
    of_prefixes = max(-(-num_blocks // 4), -(-num_blocks * (window + config.block_size) // max_model_len))
    return min(num_blocks, running + of_prefixes)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _blocks_in(room: int, config: EngineConfig, sizes: Sizes, interval: int, max_model_len: int) -> int:
    """Return how many blocks of the first group fit into `room` bytes together with the blocks of the other groups.

    Unless `state_budget` sets the number of checkpoints, `room` also includes the memory of checkpoints.
    """
    if not _has_checkpoints(config, interval) or config.state_budget is not None:
        most, each = room // sizes.block, 0
    else:
        most, each = sizes.cached_tokens(max(room, 0), interval) // sizes.block_size, sizes.state
    if not sizes.windows:
        return most

    def needed(num_blocks: int) -> int:
        plan = _plan(config, sizes, max_model_len, num_blocks, interval)
        return plan.kv_bytes + plan.checkpoints * each

    return bisect_right(range(most + 1), room, key=needed) - 1


def _checkpoints(config: EngineConfig, num_blocks: int, interval: int) -> int:
    if not _has_checkpoints(config, interval):
        return 0
    return config.state_budget if config.state_budget is not None else num_blocks * config.block_size // interval


def _has_checkpoints(config: EngineConfig, interval: int) -> bool:
    return config.enable_prefix_caching and interval > 0
