"""How the memory beside the weights is shared: blocks of keys and values, live states, checkpoints of states.

A worker plans with this before it takes memory. A model without recurrent layers has no states: then all is blocks.
Layers of one window are a group with blocks of their own (`DecoderSpec.windows`). The first group, that of the layers
without a window if there are such, is the one whose blocks are configured; what the others have follows from it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from trueroll.errors import ConfigError

from ...kernels.contract import LOGITS_ROWS
from ...kernels.specs import DecoderSpec
from ..config import EngineConfig, defaults_of


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
    """Bytes of layers together: `block`, of the keys and values of `block_size` tokens in those of the first group;
    `windows`, the same for each further one, with its window in tokens. `state`, of what recurrent layers remember of a
    sequence, 0 if there are none.
    """

    block_size: int
    block: int
    state: int
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, spec: DecoderSpec, storage: Storage, block_size: int) -> Sizes:
        """Those of a decoder, on one of the ranks. Raise ConfigError for ranks that cannot have as many heads each."""
        _check_ranks(spec, storage.ranks)
        tokens = dict.fromkeys(spec.windows, 0)
        for m in spec.attentions:
            tokens[m.window] += m.num_kv_heads * (m.head_dim * storage.kv + storage.kv_head)
        state = sum(storage.state * prod(m.state_shape) + storage.tail * prod(m.tail_shape) for m in spec.delta_nets)
        block, *others = (2 * block_size * token // storage.ranks for token in tokens.values())
        further = tuple((window or 0, size) for window, size in zip(spec.windows[1:], others, strict=True))
        return cls(block_size, block, state // storage.ranks, further)

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
    """The buckets. `num_blocks`: blocks of the first group; `window_blocks`: of each further one. `live_states`: one
    for each running sequence, and some more for states that samples go on from. `checkpoints`: the most that are held
    at a time; `state_interval`: tokens between them, 0 without recurrent layers.
    """

    sizes: Sizes
    num_blocks: int
    window_blocks: tuple[int, ...] = ()
    live_states: int = 0
    checkpoints: int = 0
    state_interval: int = 0

    @property
    def num_slots(self) -> int:
        """Slots for states, live ones and checkpoints."""
        return self.live_states + self.checkpoints

    @property
    def pools(self) -> list[tuple[int, int]]:
        """Of each group how many blocks it has, and the bytes of one."""
        further = [(count, size) for count, (_, size) in zip(self.window_blocks, self.sizes.windows, strict=True)]
        return [(self.num_blocks, self.sizes.block), *further]

    @property
    def kv_bytes(self) -> int:
        return sum(count * size for count, size in self.pools)

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.sizes.state


def _check_ranks(spec: DecoderSpec, ranks: int) -> None:
    heads = {m.num_kv_heads for m in spec.attentions} | {m.num_key_heads for m in spec.delta_nets}
    if any(count % ranks for count in heads):
        raise ConfigError(
            f"ranks: expected a number that divides the {' and the '.join(map(str, sorted(heads)))} heads of keys in a "
            f"layer, found {ranks}; share the model among fewer"
        )


def plan_memory(config: EngineConfig, sizes: Sizes, max_model_len: int, available: int) -> MemoryPlan:
    """The plan for `available` bytes. Raise ConfigError where the configuration leaves no block, or needs more."""
    live, interval = _live_states(config, sizes), (config.state_interval or sizes.interval) if sizes.state else 0
    budget = (config.state_budget or 0) if _has_checkpoints(config, interval) else 0
    room = _budget(config, available) - (live + budget) * sizes.state
    num_blocks = config.num_blocks or _blocks_in(room, config, sizes, interval, max_model_len)
    if num_blocks <= 0:
        states = f"{live} live states" + (f" and {budget} checkpoints" if budget else "")
        beside = f" beside {states} of {sizes.state} bytes" if live else ""
        raise ConfigError(
            f"kv_memory: expected at least one block = {sizes.block} bytes{beside}, found "
            f"{_budget(config, available)} bytes; raise it, or lower max_num_seqs{' or state_budget' if budget else ''}"
        )
    if not any(size is not None for size in (config.num_blocks, config.kv_memory, config.kv_memory_fraction)):
        num_blocks = min(num_blocks, config.max_num_seqs * _blocks(max_model_len, config.block_size))
    plan = _plan(config, sizes, max_model_len, num_blocks, interval)
    if plan.kv_bytes + plan.state_bytes > available:
        blocks = ", ".join(f"{count} blocks of {size} bytes" for count, size in plan.pools)
        raise ConfigError(
            f"num_blocks, kv_memory: expected at most the {available} bytes that are available, found "
            f"{blocks} and {plan.num_slots} states of {sizes.state} bytes; lower them, max_num_seqs or state_budget"
        )
    return plan


def scratch_bytes(spec: DecoderSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """About what the largest step holds at its widest: hidden states, what an MLP makes of them, and the logits of as
    many sequences as decode.
    """
    widest = max(2 * layer.mlp.intermediate_size for layer in spec.layers)
    rows = config.max_num_batched_tokens * (3 * spec.hidden_size + widest) * dtype.itemsize
    return rows + 2 * 4 * min(config.max_num_seqs, LOGITS_ROWS) * spec.vocab_size


def _budget(config: EngineConfig, available: int) -> int:
    fraction = config.kv_memory_fraction or defaults_of(config.device).kv_memory_fraction
    return int(available * fraction) if config.kv_memory is None else config.kv_memory


def _live_states(config: EngineConfig, sizes: Sizes) -> int:
    """One for each sequence that runs, and one more for each group that parts, of which a few do so at a time."""
    return config.max_num_seqs + max(1, config.max_num_seqs // 8) if sizes.state else 0


def _plan(config: EngineConfig, sizes: Sizes, max_model_len: int, num_blocks: int, interval: int) -> MemoryPlan:
    windows = tuple(_window_blocks(config, window, max_model_len, num_blocks) for window, _ in sizes.windows)
    checkpoints = _checkpoints(config, num_blocks, interval)
    return MemoryPlan(sizes, num_blocks, windows, _live_states(config, sizes), checkpoints, interval)


def _window_blocks(config: EngineConfig, window: int, max_model_len: int, num_blocks: int) -> int:
    """What running sequences need, the chunks of two steps included, and what lets the prefixes be resumed that the
    first group's `num_blocks` hold: a window of each, where these are as long as can be, or four windows long.
    """
    blocks = partial(_blocks, block_size=config.block_size)
    running = config.max_num_seqs * (blocks(window) + 1) + 2 * blocks(config.max_num_batched_tokens)
    of_prefixes = max(-(-num_blocks // 4), -(-num_blocks * (window + config.block_size) // max_model_len))
    return min(num_blocks, running + of_prefixes)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _blocks_in(room: int, config: EngineConfig, sizes: Sizes, interval: int, max_model_len: int) -> int:
    """Blocks of the first group, with those of the others, and with their checkpoints unless there is a budget of
    those.
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
