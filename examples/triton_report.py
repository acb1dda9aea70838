"""What the compiler makes of the Triton kernels, with no GPU: `python examples/triton_report.py [--json]`.

Calls every op with kernels of its own at the sizes of several models and at many numbers of rows, on tensors without
memory, while launches are recorded. Compiles what was recorded for three generations of GPUs, and prints what it takes
there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, groupby
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget

from trueroll.kernels.contract import SAMPLE, AttentionBatch, AttentionWeights, Wanted
from trueroll.kernels.specs import Activation, AttentionSpec, NormSpec
from trueroll.kernels.triton import backend
from trueroll.kernels.triton.launch import Launch, compile_form, recording

CAPABILITIES = (80, 90, 100)
TUNED_FOR = 90
TILE = ("FEATURES", "TOKENS", "DEPTH", "GROUP", "D", "SIZE", "ROWS")
"""The constants that make a kernel's tile."""
ROWS = sorted({2**i + extra for i in range(14) for extra in (0, 1)} - {2**13 + 1})
CONTEXT = 40_000


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder, whether its queries, keys and values have biases or norms of their heads, its norms and
    activation, and the soft caps to compile its attention with.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    biases: bool = False
    qk_norms: bool = False
    norm: NormSpec = NormSpec(1e-6)
    activation: Activation = "silu"
    soft_caps: tuple[float | None, ...] = (None,)

    @property
    def mixer(self) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            qkv_bias=self.biases,
            qk_norm=self.norm if self.qk_norms else None,
        )


MODELS = {
    "Qwen2.5-7B": Model(3584, 18944, 28, 4, 128, 152064, biases=True),
    "Qwen3-0.6B": Model(1024, 3072, 16, 8, 128, 151936, qk_norms=True),
    "Qwen3-1.7B": Model(2048, 6144, 16, 8, 128, 151936, qk_norms=True),
    "Gemma-3-12B": Model(
        3840,
        15360,
        16,
        8,
        256,
        262208,
        qk_norms=True,
        norm=NormSpec(1e-6, zero_centered=True),
        activation="gelu_tanh",
        soft_caps=(None, 50.0),
    ),
    "SmolLM2-135M": Model(576, 1536, 9, 3, 64, 49152),
    "no multiples of 16": Model(1001, 1537, 6, 2, 80, 1001, biases=True),
}
FLOAT16 = "SmolLM2-135M"


def record(names: Iterable[str]) -> list[Launch]:
    """Every launch of the models' ops, each once, kernel by kernel."""
    with recording() as launches:
        for name in names:
            Calls(MODELS[name], torch.float16 if name == FLOAT16 else torch.bfloat16).all()
    return sorted(dict.fromkeys(launches), key=lambda launch: name_of(launch.kernel))


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rsplit('.', 1)[1]}.{kernel.fn.__name__}"


class Calls:
    """Calls of the ops for one model, on tensors without memory."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.empty = partial(torch.empty, dtype=dtype, device="meta")
        self.cache = self.empty(4, 16, model.kv_heads, model.head_dim)

    def all(self) -> None:
        for rows in ROWS:
            self.products(rows)
            self.norms(rows)
            self.keys_and_values(rows)
            self.head(rows)
            self.attention([1] * rows)
            self.attention([rows])
        self.attention([1] * 8, integers(8))

    def weight(self, rows: int, columns: int) -> torch.Tensor:
        return backend.new_weight(rows, columns, self.empty)

    def products(self, rows: int) -> None:
        m = self.model
        x, heads = self.empty(rows, m.hidden), self.empty(rows, m.heads * m.head_dim)
        backend.linear(x, self.weight(m.hidden, m.hidden))
        backend.linear(x, self.weight(m.hidden, m.hidden), self.empty(m.hidden))
        backend.linear_add(heads, self.weight(m.hidden, m.heads * m.head_dim), x)
        backend.linear_add(self.empty(rows, m.intermediate), self.weight(m.hidden, m.intermediate), x)
        gate, up = self.weight(m.intermediate, m.hidden), self.weight(m.intermediate, m.hidden)
        backend.gate_up(x, gate, up, m.activation)

    def norms(self, rows: int) -> None:
        m = self.model
        backend.rmsnorm(self.empty(rows, m.hidden), self.empty(m.hidden), m.norm)
        backend.gate_mul(self.empty(rows, m.intermediate), self.empty(rows, m.intermediate), m.activation)

    def keys_and_values(self, rows: int) -> None:
        m, slots = self.model, integers(rows)
        q_size, kv_size = m.heads * m.head_dim, m.kv_heads * m.head_dim
        weights = AttentionWeights(
            *(self.weight(size, m.hidden) for size in (q_size, kv_size, kv_size)),
            (self.empty(q_size), self.empty(kv_size), self.empty(kv_size)) if m.biases else None,
            (self.empty(m.head_dim), self.empty(m.head_dim)) if m.qk_norms else None,
            o=self.weight(m.hidden, q_size),
        )
        x = self.empty(rows, m.hidden)
        rotation = backend.rotation(slots, floats(m.head_dim // 2), 1.0)
        backend.qkv(x, m.mixer, weights, rotation, self.cache, self.cache, slots)
        backend.rope(self.empty(rows, m.heads, m.head_dim), rotation)
        keys = self.empty(rows, m.kv_heads, m.head_dim)
        backend.write_kv(keys, keys, self.cache, self.cache, slots)

    def attention(self, queries: list[int], lens: torch.Tensor | None = None) -> None:
        """Of sequences with so many queries each, over contexts of CONTEXT tokens."""
        batch = AttentionBatch(
            [0, *accumulate(queries)], [CONTEXT] * len(queries), integers(len(queries), CONTEXT // 16), lens
        )
        q = self.empty(sum(queries), self.model.heads, self.model.head_dim)
        for soft_cap in self.model.soft_caps:
            backend.paged_attention(q, self.cache, self.cache, batch, self.model.mixer.scale, soft_cap=soft_cap)

    def head(self, rows: int) -> None:
        m, ids, logits = self.model, integers(rows), floats(rows, self.model.vocab_size)
        hidden, weight = self.empty(rows, m.hidden), self.weight(m.vocab_size, m.hidden)
        backend.lm_head(hidden, weight)
        wanted = Wanted(ids, torch.full_like(ids, SAMPLE), floats(rows), ids.bool(), ids, ids)
        backend.next_tokens(hidden, weight, wanted)
        backend.log_probs(logits, ids)
        backend.token_statistics(logits, ids, 8)
        backend.sample(logits, ids, ids)
        backend.filter_logits(logits, ids, floats(rows), floats(rows))


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


class Compiling:
    """Stands for the driver of a GPU: names the target and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """What one launch takes on one target. Memory in bytes: `spilled` for a thread, `shared` for a block of threads.

    `instructions`: its matrix instructions, with their tiles. `reductions`: how axis 0 is laid out in tiles that are
    reduced over it. `signature`, `aligned`: types of the arguments, and those known to be multiples of 16, as Triton
    made them out.
    """

    kernel: str
    types: dict[str, str]
    constants: dict[str, object]
    warps: int
    stages: int
    capability: int
    registers: int
    spilled: int
    shared: int
    instructions: list[str]
    reductions: list[str]
    signature: dict[str, str]
    aligned: list[str]


def compile_for(capability: int, launch: Launch) -> Compiled:
    """As a launch on such a GPU would compile it: by Triton's own path from a call to a binary, up to loading it."""
    triton.runtime.driver.set_active(Compiling(capability))
    binary = compile_form(launch)
    used = resources(binary.asm["cubin"])
    return Compiled(
        kernel=name_of(launch.kernel),
        types=dict(launch.types),
        constants=dict(launch.constants),
        warps=launch.warps,
        stages=launch.stages,
        capability=capability,
        registers=used["REG"],
        spilled=used["STACK"] + used["LOCAL"],
        shared=binary.metadata.shared,
        instructions=instructions(binary.asm["ptx"], binary.asm["ttgir"]),
        reductions=reductions(binary.asm["ttgir"]),
        signature={name: kind for name, kind in binary.src.signature.items() if kind != "constexpr"},
        aligned=[launch.kernel.arg_names[path[0]] for path, attributes in binary.src.attrs.items() if attributes],
    )


def resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def instructions(ptx: str, ttgir: str) -> list[str]:
    """Matrix instructions with their tiles, and how many elements along k a thread holds side by side where it does.

    Those of Blackwell name no tile: it is that of the accumulator, and k goes in steps of 16.
    """
    widths = "".join(sorted({f" kWidth={width}" for width in re.findall(r"kWidth = (\d+)", ttgir)}))
    found = {f"{name} {tile}{widths}" for name, tile in re.findall(r"\b(wgmma|mma)\.\S*?\.(m\d+n\d+k\d+)\.", ptx)}
    if "tcgen05.mma." in ptx:
        accumulators = set(re.findall(r"memdesc<\d+x\d+xf32, (#tmem\d*),", ttgir))
        tiles = re.findall(r"(#tmem\d*) = .*blockM = (\d+), blockN = (\d+)", ttgir)
        found |= {f"tcgen05 m{m}n{n}k16" for name, m, n in tiles if name in accumulators}
    return sorted(found)


def reductions(ttgir: str) -> list[str]:
    """Size and layout of axis 0, for each tile with two axes that is reduced over it."""
    operands = re.findall(r'"tt\.reduce".*?axis = 0 .*?\}\) : \(tensor<(\d+)x\d+x\w+, (#\w+)>\)', ttgir, re.DOTALL)
    layouts = dict(re.findall(r"^(#\w+) = #\w+\.(.*)>$", ttgir, re.MULTILINE))
    return sorted({f"{size} of {along_axis_0(layouts[name])}" for size, name in operands})


def along_axis_0(layout: str) -> str:
    """`warpsPerCTA = [4, 1]` becomes `warpsPerCTA = 4`, `warp = [[1, 0], [0, 8], [2, 0]]` becomes `warp = [1, 2]`."""
    first = re.sub(r"\[(\d+)(?:, \d+)*\]", r"\1", layout)
    return re.sub(r"\[[\d, ]+\]", lambda match: str([n for n in json.loads(match[0]) if n]), first)


Job: TypeAlias = tuple[int, Launch]
"""A target's capability, and what to compile for it."""
JOBS: list[Job] = []


def jobs_of(launches: list[Launch]) -> list[Job]:
    """All launches for all targets."""
    return [(capability, launch) for launch in launches for capability in CAPABILITIES]


def jobs_of_all_models() -> list[Job]:
    """All launches for the target that tiles were chosen for, and `some` of them for the others."""
    launches = record(MODELS)
    chosen = some(launches)
    return [job for job in jobs_of(launches) if job[0] == TUNED_FOR or job[1] in chosen]


def some(launches: list[Launch]) -> list[Launch]:
    """As many as show of each kernel every tile, every value of each constant and every type of each argument."""
    seen: set[Any] = set()
    chosen = []
    for launch in launches:
        if not (shown := shown_by(launch)) <= seen:
            seen |= shown
            chosen.append(launch)
    return chosen


def shown_by(launch: Launch) -> set[Any]:
    tile = [constant for constant in launch.constants if constant[0] in TILE]
    shown = (*launch.types, *launch.constants, (*tile, launch.warps, launch.stages))
    return {(launch.kernel, each) for each in shown}


def compile_all(jobs: list[Job]) -> list[Compiled]:
    """In two processes."""
    # Kernels cannot be pickled: the processes inherit the jobs.
    with get_context("fork").Pool(2, initializer=JOBS.extend, initargs=(jobs,)) as pool:
        return pool.map(compile_job, range(len(jobs)), chunksize=1)


def compile_job(index: int) -> Compiled:
    return compile_for(*JOBS[index])


def print_table(compiled: list[Compiled]) -> None:
    """One line for each configuration, with the targets side by side, and of its constants those that vary."""
    print(f"Triton {triton.__version__}\n")
    print("| kernel | configuration | warps, stages |", *(f"sm_{capability} |" for capability in CAPABILITIES))
    print("|---" * (3 + len(CAPABILITIES)) + "|")
    for kernel, group in groupby(compiled, key=lambda c: c.kernel):
        group = list(group)
        names = [name for name in group[0].constants if len({c.constants[name] for c in group}) > 1]
        for start in range(0, len(group), len(CAPABILITIES)):
            targets = group[start : start + len(CAPABILITIES)]
            constants = " ".join(f"{name}={targets[0].constants[name]}" for name in names)
            cells = (f"{cell(target)} |" for target in targets)
            print(f"| `{kernel}` | {constants} | {targets[0].warps}, {targets[0].stages} |", *cells)


def cell(compiled: Compiled) -> str:
    spilled = f", {compiled.spilled} B spilled" if compiled.spilled else ""
    tiles = "".join(f", {instruction.split()[1]}" for instruction in compiled.instructions)
    return f"{compiled.registers} regs{spilled}, {compiled.shared / 1024:.0f} KB{tiles}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compiles the Triton kernels for GPUs and prints what they take there."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"print every launch of every model for sm_{TUNED_FOR}, and some for the others, as JSON; not a table of "
        "one model",
    )
    if parser.parse_args().json:
        print(json.dumps([asdict(compiled) for compiled in compile_all(jobs_of_all_models())]))
    else:
        print_table(compile_all(jobs_of(record(["Qwen2.5-7B"]))))


if __name__ == "__main__":
    main()
