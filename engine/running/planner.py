"""How the memory beside the weights is shared: blocks of keys and values, live states, checkpoints of states.

A worker plans with this before it takes memory. A model without recurrent layers has no states: then all is blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from trueroll.errors import ConfigError

from ...kernels.specs import AttentionSpec, DecoderSpec, DeltaNetSpec
from ..config import EngineConfig, defaults_of

_HEAD_ROWS = 256  # logits of more rows are never in memory at once


@dataclass(frozen=True)
class Storage:
    """Bytes of an element of a cache (`kv`), of a state, and of a convolution's tail; `kv_head`: those of a head's key,
    or value, beside its elements. `ranks`: among how many devices heads are shared.
    """

    kv: int
    tail: int
    state: int = 4
    kv_head: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> Storage:
        """That of a worker."""
        return cls(dtype.itemsize, dtype.itemsize)


@dataclass(frozen=True)
class Sizes:
    """Bytes of all layers together: `block`, of the keys and values of `block_size` tokens; `state`, of what recurrent
    layers remember of a sequence, 0 if there are none.
    """

    block_size: int
    block: int
    state: int

    @classmethod
    def of(cls, spec: DecoderSpec, storage: Storage, block_size: int) -> Sizes:
        """Those of a decoder, on one of the ranks."""
        mixers = [layer.mixer for layer in spec.layers]
        token = sum(
            m.num_kv_heads * (m.head_dim * storage.kv + storage.kv_head) for m in mixers if isinstance(m, AttentionSpec)
        )
        state = sum(
            storage.state * prod(m.state_shape) + storage.tail * prod(m.tail_shape)
            for m in mixers
            if isinstance(m, DeltaNetSpec)
        )
        return cls(block_size, 2 * block_size * token // storage.ranks, state // storage.ranks)

    @property
    def interval(self) -> int:
        """Tokens between checkpoints, so that these take at most as much memory as the blocks between them: the fewest
        that are a power of two of blocks.
        """
        blocks = 1
        while blocks * self.block < self.state:
            blocks *= 2
        return blocks * self.block_size

    def cached_tokens(self, pool: int, interval: int) -> int:
        """The most tokens whose blocks, and a checkpoint for each `interval` of them, take at most `pool` bytes."""
        return pool * interval // (interval // self.block_size * self.block + self.state)


@dataclass(frozen=True)
class MemoryPlan:
    """The buckets. `live_states`: one for each running sequence, and some more for states that samples go on from.
    `checkpoints`: the most that are held at a time; `state_interval`: tokens between them, 0 without recurrent layers.
    """

    sizes: Sizes
    num_blocks: int
    live_states: int = 0
    checkpoints: int = 0
    state_interval: int = 0

    @property
    def num_slots(self) -> int:
        """Slots for states, live ones and checkpoints."""
        return self.live_states + self.checkpoints

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.sizes.block

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.sizes.state


def plan_memory(config: EngineConfig, sizes: Sizes, max_model_len: int, available: int) -> MemoryPlan:
    """The plan for `available` bytes. Raise ConfigError where the configuration leaves no block, or needs more."""
    live, interval = _live_states(config, sizes), (config.state_interval or sizes.interval) if sizes.state else 0
    room = _budget(config, available) - (live + (config.state_budget or 0)) * sizes.state
    num_blocks = config.num_blocks or _blocks_in(room, config, sizes, interval)
    if num_blocks <= 0:
        beside = f" beside {live} live states of {sizes.state} bytes" if live else ""
        raise ConfigError(
            f"kv_memory: expected at least one block = {sizes.block} bytes{beside}, found "
            f"{_budget(config, available)} bytes; raise it, or lower max_num_seqs"
        )
    if not any(size is not None for size in (config.num_blocks, config.kv_memory, config.kv_memory_fraction)):
        num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    plan = MemoryPlan(sizes, num_blocks, live, _checkpoints(config, num_blocks, interval), interval)
    if plan.kv_bytes + plan.state_bytes > available:
        raise ConfigError(
            f"num_blocks, kv_memory: expected at most the {available} bytes that are available, found {num_blocks} "
            f"blocks of {sizes.block} bytes and {plan.num_slots} states of {sizes.state} bytes; lower them, "
            "max_num_seqs or state_budget"
        )
    return plan


def scratch_bytes(spec: DecoderSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """About what the largest step holds at its widest: hidden states, what an MLP makes of them, and the logits of as
    many sequences as decode.
    """
    widest = max(2 * layer.mlp.intermediate_size for layer in spec.layers)
    rows = config.max_num_batched_tokens * (3 * spec.hidden_size + widest) * dtype.itemsize
    return rows + 2 * 4 * min(config.max_num_seqs, _HEAD_ROWS) * spec.vocab_size


def _budget(config: EngineConfig, available: int) -> int:
    fraction = config.kv_memory_fraction or defaults_of(config.device).kv_memory_fraction
    return int(available * fraction) if config.kv_memory is None else config.kv_memory


def _live_states(config: EngineConfig, sizes: Sizes) -> int:
    """One for each sequence that runs, and one more for each group that parts, of which a few do so at a time."""
    return config.max_num_seqs + max(1, config.max_num_seqs // 8) if sizes.state else 0


def _blocks_in(room: int, config: EngineConfig, sizes: Sizes, interval: int) -> int:
    """Blocks, with their checkpoints unless there is a budget of those."""
    if not _has_checkpoints(config, interval) or config.state_budget is not None:
        return room // sizes.block
    return sizes.cached_tokens(max(room, 0), interval) // sizes.block_size


def _checkpoints(config: EngineConfig, num_blocks: int, interval: int) -> int:
    if not _has_checkpoints(config, interval):
        return 0
    return config.state_budget if config.state_budget is not None else num_blocks * config.block_size // interval


def _has_checkpoints(config: EngineConfig, interval: int) -> bool:
    return config.enable_prefix_caching and interval > 0
