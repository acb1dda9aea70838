"""`trueroll plan`: show how a worker would divide the memory of a device; this needs neither a worker nor a device.

Reads only the model's configuration, not the weights. Workers use the same code, `engine.running.planner`, to divide
memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from trueroll.errors import ConfigError

from ...engine.config import EngineConfig
from ...engine.models.decoder import Decoder
from ...engine.running.loading import find_max_model_len, outline
from ...engine.running.planner import MemoryPlan, Sizes, Storage, plan_memory, scratch_bytes

MIB, GIB = 2**20, 2**30
_BLOCKS = [2**i for i in range(12)]
_MOST_GIB, _MOST_RANKS = 2**14, 8


def plan(config: EngineConfig, memory: int, kv_bytes: int | None, console: Console) -> None:
    """Print how a worker would divide the memory of each rank's device. `memory`: the size of this memory in bytes.

    `kv_bytes`: bytes per element of keys and values. If `kv_bytes` is 1, each key and each value of a head needs 4 more
    bytes, for a scale and a zero point in float16. Raise ConfigError if the plan does not fit; the error text proposes
    options with which the plan fits. Raise ModelError if the model is not supported.
    """
    asked = _Asked.of(config, memory, kv_bytes)
    sizes = asked.sizes
    try:
        found = asked.plan()
    except ConfigError:
        raise ConfigError(_what_would_fit(asked)) from None
    console.print(_buckets(found, asked, memory))
    if sizes.state:
        console.print(_intervals(found))


@dataclass(frozen=True)
class _Asked:
    """The input of a plan."""

    config: EngineConfig
    model: Decoder
    max_model_len: int
    memory: int
    kv_bytes: int | None

    @classmethod
    def of(cls, config: EngineConfig, memory: int, kv_bytes: int | None) -> _Asked:
        """Read the input of a plan from the model's configuration. Raise the errors of `outline`."""
        model = outline(config)
        return cls(config, model, find_max_model_len(config, model.spec), memory, kv_bytes)

    @property
    def sizes(self) -> Sizes:
        """Sizes of blocks and states of a rank."""
        kv_head = 4 if self.kv_bytes == 1 else 0
        storage = Storage.of(self.model.dtype, self.model.ops.HOLDS_VALUES, self.model.ops.CACHE_FORMATS)
        if self.kv_bytes is not None:
            storage = replace(storage, kv=self.kv_bytes, kv_head=kv_head, cache_formats=frozenset())
        return Sizes.of(self.model.spec, storage, self.config.block_size, self.config.num_drafts)

    @property
    def weights(self) -> int:
        return self.model.num_bytes

    @property
    def scratch(self) -> int:
        return scratch_bytes(self.model.spec, self.model.dtype, self.config)

    def plan(self) -> MemoryPlan:
        """Return the memory plan. Raise ConfigError if the plan does not fit."""
        available = self.memory - self.weights - self.scratch
        if available <= 0:
            raise ConfigError(f"memory: the weights and the largest step need more than {self.memory} bytes")
        return plan_memory(self.config, self.sizes, self.max_model_len, available)

    @property
    def holds_a_sample(self) -> bool:
        """Return whether the plan fits and has blocks for at least one sample of the maximum length."""
        try:
            return self.plan().num_blocks * self.config.block_size >= self.max_model_len
        except ConfigError:
            return False

    def with_seqs(self, count: int) -> _Asked:
        return replace(self, config=self.config.model_copy(update={"max_num_seqs": count}))

    def with_more_ranks(self) -> Iterator[_Asked]:
        """Yield a copy of the plan for each larger number of ranks among which a layer can be divided."""
        ranks = 2 * self.config.tensor_parallel_size
        while ranks <= min(_MOST_RANKS, self.model.spec.pieces):
            config = self.config.model_copy(update={"tensor_parallel_size": ranks})
            yield _Asked.of(config, self.memory, self.kv_bytes)
            ranks *= 2


def _what_would_fit(asked: _Asked) -> str:
    parts = f"{asked.weights / GIB:.1f} of weights, {asked.scratch / GIB:.1f} of the largest step"
    if asked.config.encoded_bytes:
        parts += f", {asked.config.encoded_bytes / GIB:.1f} of encoded images"
    if asked.config.adapter_bytes:
        parts += f", {asked.config.adapter_bytes / GIB:.1f} of named adapters"
    if asked.sizes.state:
        parts += f" and {asked.sizes.state / GIB:.2f} of states for each of {asked.config.max_num_seqs} samples"
    proposals = " or ".join(_proposals(asked)) or f"a smaller model ({_MOST_GIB} GiB is not enough either)"
    return (
        f"memory: {asked.memory / GIB:g} GiB on each of {asked.config.num_ranks} ranks is too little; the model needs, "
        f"in GiB, {parts}, and room for a sample of {asked.max_model_len} tokens; use {proposals}"
    )


def _proposals(asked: _Asked) -> Iterator[str]:
    """Yield command line options, each of which makes the plan fit: the largest number of samples, the smallest number
    of ranks that divide a layer, and the smallest memory.
    """
    seqs = asked.config.max_num_seqs
    if fewer := seqs - _first(seqs, lambda left_out: asked.with_seqs(seqs - left_out).holds_a_sample):
        yield f"--max-num-seqs {fewer}"
    if (found := next((each for each in asked.with_more_ranks() if each.holds_a_sample), None)) is not None:
        yield f"--tensor-parallel-size {found.config.tensor_parallel_size}"
    gib = _first(_MOST_GIB + 1, lambda gib: replace(asked, memory=gib * GIB).holds_a_sample)
    if gib <= _MOST_GIB:
        yield f"--memory {gib}"


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest number in [0, count) for which `holds` is true; `count` if there is no such number.

    `holds` must be monotonic: once true, it is true for all larger numbers.
    """
    return bisect_left(range(count), True, key=holds)


def _buckets(plan: MemoryPlan, asked: _Asked, memory: int) -> Table:
    table = Table("bucket", "count", "MiB each", "MiB", "holds", title="Memory of a device")
    for column in table.columns[1:4]:
        column.justify = "right"
    sizes = plan.sizes
    tokens = f"{plan.num_blocks * sizes.block_size:,} tokens, {sizes.block_size} a block"
    _add(table, "weights", 1, asked.weights, "")
    _add(table, "KV blocks", plan.num_blocks, sizes.block, tokens)
    for count, (window, size) in zip(plan.window_blocks, sizes.windows, strict=True):
        _add(table, f"KV blocks, window {window:,}", count, size, f"{count * sizes.block_size:,} tokens")
    if sizes.state:
        _add(table, "live states", plan.live_states, sizes.state, "one per running sequence, and spare ones")
        _add(table, "checkpoints", plan.checkpoints, sizes.state, f"one every {plan.state_interval:,} tokens")
    if images := asked.config.encoded_bytes:
        _add(table, "encoded images", 1, images, "at most")
    if adapters := asked.config.adapter_bytes:
        _add(table, "named adapters", 1, adapters, "at most")
    _add(table, "scratch", 1, asked.scratch, "the largest step")
    used = asked.weights + images + adapters + asked.scratch + plan.kv_bytes + plan.state_bytes
    _add(table, "left", 1, memory - used, "")
    return table


def _add(table: Table, name: str, count: int, size: int, holds: str) -> None:
    table.add_row(name, f"{count:,}", f"{size / MIB:,.4f}", f"{count * size / MIB:,.1f}", holds)


def _intervals(plan: MemoryPlan) -> Table:
    """Return a table that shows, for each checkpoint interval, how many tokens fit into the memory of blocks and
    checkpoints.
    """
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
