"""`trueroll plan`: how a worker would share the memory of a device, before there is one.

Reads a configuration alone: no weights. The worker plans with the same code, `engine.running.planner`.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from trueroll.errors import ConfigError

from ...engine.config import EngineConfig
from ...engine.running.loading import find_max_model_len, outline
from ...engine.running.planner import MemoryPlan, Sizes, Storage, plan_memory, scratch_bytes

MIB = 2**20
_BLOCKS = [2**i for i in range(12)]


def plan(config: EngineConfig, memory: int, kv_bytes: int | None, ranks: int, console: Console) -> None:
    """Prints the buckets of `memory` bytes on each of `ranks` devices. `kv_bytes`: of an element of keys and values; 1
    takes 4 more for each head and token, a float16 scale and zero. Raise ConfigError for what does not fit, ModelError
    for a model that is not served.
    """
    model = outline(config)
    dtype = model.dtype
    storage = Storage(
        kv=kv_bytes or dtype.itemsize, tail=dtype.itemsize, kv_head=4 if kv_bytes == 1 else 0, ranks=ranks
    )
    sizes = Sizes.of(model.spec, storage, config.block_size)
    weights, scratch = model.num_bytes // ranks, scratch_bytes(model.spec, dtype, config) // ranks
    available = memory - weights - scratch
    if available <= 0:
        raise ConfigError(
            f"memory: expected more than the {weights} bytes of weights and {scratch} of the largest step on each of "
            f"{ranks} ranks, found {memory}; raise it, or use more ranks or a smaller model"
        )
    found = plan_memory(config, sizes, find_max_model_len(config, model.spec), available)
    console.print(_buckets(found, weights, scratch, memory))
    if sizes.state:
        console.print(_intervals(found))


def _buckets(plan: MemoryPlan, weights: int, scratch: int, memory: int) -> Table:
    table = Table("bucket", "count", "MiB each", "MiB", "holds", title="Memory of a device")
    for column in table.columns[1:4]:
        column.justify = "right"
    sizes = plan.sizes
    tokens = f"{plan.num_blocks * sizes.block_size:,} tokens, {sizes.block_size} a block"
    _add(table, "weights", 1, weights, "")
    _add(table, "KV blocks", plan.num_blocks, sizes.block, tokens)
    for count, (window, size) in zip(plan.window_blocks, sizes.windows, strict=True):
        _add(table, f"KV blocks, window {window:,}", count, size, f"{count * sizes.block_size:,} tokens")
    if sizes.state:
        _add(table, "live states", plan.live_states, sizes.state, "one a running sequence, and spare ones")
        _add(table, "checkpoints", plan.checkpoints, sizes.state, f"one every {plan.state_interval:,} tokens")
    _add(table, "scratch", 1, scratch, "the largest step")
    _add(table, "left", 1, memory - weights - scratch - plan.kv_bytes - plan.state_bytes, "")
    return table


def _add(table: Table, name: str, count: int, size: int, holds: str) -> None:
    table.add_row(name, f"{count:,}", f"{size / MIB:,.4f}", f"{count * size / MIB:,.1f}", holds)


def _intervals(plan: MemoryPlan) -> Table:
    """What other intervals would give in the memory of blocks and checkpoints."""
    sizes = plan.sizes
    pool = plan.num_blocks * sizes.block + plan.checkpoints * sizes.state
    table = Table(
        "state_interval", "tokens that fit", "recomputed by a hit, on average", title="Checkpoints (*: as planned)"
    )
    for column in table.columns:
        column.justify = "right"
    for interval in sorted({blocks * sizes.block_size for blocks in _BLOCKS} | {plan.state_interval}):
        chosen = " *" if interval == plan.state_interval else ""
        table.add_row(f"{interval:,}{chosen}", f"{sizes.cached_tokens(pool, interval):,}", f"{interval // 2:,}")
    return table
