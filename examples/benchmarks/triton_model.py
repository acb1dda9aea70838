"""A model of the time that launches of the Triton kernels take on an H100. The results are estimates, not measurements.

A kernel takes as long as its slowest resource. The bandwidths of memory and L2 are resources that all SMs share. The
other resources belong to one SM: matrix units, shared memory, other instructions, and the time in which a program waits
for its own loads and barriers. Other programs on the same SM can use the time in which a program waits. The SM with the
most work determines the kernel's time. The model does not include bank conflicts, the relative timing of programs, or a
clock that is lowered further by the power limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

from trueroll.kernels.triton.launch import Launch
from trueroll.kernels.triton.machine import H100

REGISTERS, WARPS, PROGRAMS = 65536, 64, 32  # limits of an SM
HELD = 25e6
OPERATIONS, EXPONENTIALS, SHUFFLES, BARRIERS = 11, 16, 8, 250
REASONS = {
    "held": f"a tensor of up to {HELD / 1e6:.0f} MB (half of L2) stays in L2 for the next kernel",
    "operations": f"{OPERATIONS} instructions for each attention score: scale, mask, compare, round, sum",
    "exponentials": f"{EXPONENTIALS} per clock, in a separate unit",
    "shuffles": f"{SHUFFLES} per warp and tile of keys: two steps each for a maximum and a sum, for the two rows "
    "that a thread has a part of; each shuffle occupies shared memory for one clock",
    "barriers": f"{BARRIERS} clocks per tile of keys in which an attention program waits for loads and for the first "
    "result of each product",
}


@dataclass(frozen=True)
class Work:
    """The work of one launch. `memory`: distinct bytes moved from and to memory. `l2`: bytes, counted as often as
    programs load or store them. `matrix`, `shared`, `instructions`: clocks of the SM with the most work. `alone`:
    seconds of the programs of one SM, run one after the other without contention.
    """

    programs: int
    memory: float
    l2: float
    matrix: float = 0.0
    shared: float = 0.0
    instructions: float = 0.0
    alone: float = 0.0


@dataclass(frozen=True)
class Modelled:
    """`waves`: number of programs divided by the number of programs that the GPU runs at a time. `bound`: the slowest
    resource.
    """

    work: Work
    waves: float
    seconds: float
    bound: str


def resident(registers: int, shared: int, warps: int) -> int:
    """Return how many programs an SM runs at a time.

    `registers`: per thread. `shared`: bytes of shared memory per program.
    """
    of_registers = REGISTERS // (-(-max(registers, 1) // 8) * 8 * 32 * warps)
    return min(of_registers, H100.shared_memory // (shared + 1024), WARPS // warps, PROGRAMS)


def model(work: Work, programs_of_sm: int) -> Modelled:
    """Return the time of a launch if an SM runs `programs_of_sm` of its programs at a time."""
    clocks = {"matrix units": work.matrix, "shared memory": work.shared, "instructions": work.instructions}
    seconds = {
        "memory": work.memory / H100.memory,
        "L2": work.l2 / H100.l2,
        **{name: number / H100.clock for name, number in clocks.items()},
        "waiting": work.alone / min(programs_of_sm, max(1, most_on_an_sm(work.programs))),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    waves = work.programs / (H100.sms * programs_of_sm)
    return Modelled(work, waves, H100.launch + seconds[bound], bound)


def most_on_an_sm(programs: int) -> int:
    return -(-programs // H100.sms)


def work_of(launch: Launch) -> Work:
    """Return the work of a launch. Attention over the cache is not supported, because its work depends on the lengths
    of sequences.
    """
    constants = dict(launch.constants)
    if "FEATURES" in constants:
        return product_work(launch)
    moved = sum(value for name, value in arguments(launch).items() if name.endswith("_ptr") and "cache" not in name)
    return Work(math.prod(launch.grid), from_memory(moved), moved)


def arguments(launch: Launch) -> dict[str, float]:
    return dict(zip(signature(launch.kernel.fn).parameters, launch.values, strict=False))


def from_memory(size: float) -> float:
    """Return how many bytes of a tensor come from memory instead of L2, if the previous kernel wrote the tensor."""
    return size if size > HELD else 0.0


def product_work(launch: Launch) -> Work:
    """Return the work of a product: `_linear_kernel`, `_gate_up_kernel` or `_parts_kernel`."""
    constants, values = dict(launch.constants), arguments(launch)
    columns = int(values["columns"]) * constants["UNIT"]
    pieces = launch.grid[2] if len(launch.grid) == 3 else 1
    weights = 2 * columns * weight_rows(values, constants)
    out = values.get("parts_ptr", values.get("out_ptr", 0))
    # Weights come from memory at each step. Inputs and outputs come from memory only if they are large.
    memory = weights + from_memory(values["x_ptr"]) + from_memory(out)
    features, tokens = constants["FEATURES"], [constants["TOKENS"], constants.get("MORE", 0)]
    tile = tile_work(features, tokens, columns / pieces, constants["DEPTH"], launch.stages)
    return several(math.prod(launch.grid), tile, memory, out)


def weight_rows(values: dict[str, float], constants: dict[str, int]) -> float:
    if "a_rows" in values:
        return (values["a_rows"] + values["b_rows"] + values["c_rows"]) * constants["WIDTH_UNIT"]
    return values["features"] * constants["WIDTH_UNIT"] * (2 if "gate_ptr" in values else 1)


def tile_work(features: int, tokens: Sequence[int], length: float, depth: int, stages: int) -> Work:
    """Return the work of one program, which computes a tile of `features` x sum(`tokens`) elements and sums over
    `length` columns. Each entry of `tokens` has its own accumulator. A matrix instruction reads 64 x 16 elements of
    weights and 16 columns of tokens from shared memory.
    """
    width, steps = sum(tokens), length / 16
    loaded = 2 * (features + width) * length
    read = steps * features / 64 * sum(2048 + 32 * n for n in tokens if n)
    return Work(
        programs=1,
        memory=0,
        l2=loaded,
        matrix=steps * 16 * features * width / H100.multiply_adds,
        shared=(read + loaded) / H100.shared_bytes,
        alone=length / depth * H100.latency / (stages - 1),
    )


def several(programs: int, each: Work, memory: float, out: float) -> Work:
    """Return the work of `programs` equal programs. `out`: bytes that all programs together store."""
    most = most_on_an_sm(programs)
    clocks = most * each.matrix, most * each.shared, most * each.instructions
    return Work(programs, memory, programs * each.l2 + out, *clocks, most * each.alone)


def attention_work(launch: Launch, queries: Sequence[int], contexts: Sequence[int]) -> Work:
    """Return the work of `_decode_kernel` or `_prefill_kernel`.

    `queries`: for each sequence, the number of tokens at its end that are queries. `contexts`: tokens per sequence.
    """
    constants = dict(launch.constants)
    rows, keys, size, group = (int(constants[name]) for name in ("ROWS", "KEYS", "SIZE", "GROUP"))
    kv_heads = launch.grid[1]
    programs = [
        n
        for count, context in zip(queries, contexts, strict=True)
        for n in tiles_of_keys(count, context, group, rows, keys)
    ]
    tile = attention_tile(rows, keys, size, launch.warps)
    stored = 2 * size * kv_heads * 2 * sum(contexts)
    asked = 2 * 2 * size * kv_heads * group * sum(queries)
    total = sum(programs) * kv_heads
    most = max(total / H100.sms, max(programs) if queries[0] > 1 else 1)
    clocks = most * tile.matrix, most * tile.shared, most * tile.instructions
    return Work(math.prod(launch.grid), stored, total * tile.l2 + asked, *clocks, most * tile.alone)


def tiles_of_keys(queries: int, context: int, group: int, rows: int, keys: int) -> list[int]:
    """Return the number of tiles of keys that each tile of a sequence's rows reads."""
    ends = range(min(rows, queries * group), queries * group + rows, rows)
    seen = (context - queries + -(-min(end, queries * group) // group) for end in ends)
    return [-(-n // keys) for n in seen]


def attention_tile(rows: int, keys: int, size: int, warps: int) -> Work:
    """Return the work of one program on one tile of keys.

    Scores and weights stay in registers. Matrix instructions of 64 rows read queries, keys and values from shared
    memory. For wide heads, two groups of four warps share the work of a tile.
    """
    matrix = 2 * keys * rows * size / H100.multiply_adds
    loaded, groups = 2 * 2 * keys * size, warps // 4
    read = 2 * rows // 64 * (groups * (64 + keys) * size + keys * size) / H100.shared_bytes
    shuffles = SHUFFLES * warps
    addresses = 4 * loaded / 16 / 128
    instructions = (groups * OPERATIONS * keys * rows + size * rows) / 128 + addresses
    exponentials = groups * keys * rows / EXPONENTIALS
    one_by_one = max(matrix, read) + instructions + exponentials + shuffles + BARRIERS
    return Work(
        programs=1,
        memory=0,
        l2=loaded,
        matrix=matrix,
        shared=read + loaded / H100.shared_bytes + shuffles,
        instructions=max(instructions, exponentials),
        alone=one_by_one / H100.clock,
    )


def useful_flops(queries: int, context: int, heads: int, size: int) -> float:
    """Return the floating-point operations of causal attention of the last `queries` tokens of a context."""
    pairs = queries * (context - queries) + queries * (queries + 1) / 2
    return 4 * pairs * heads * size
