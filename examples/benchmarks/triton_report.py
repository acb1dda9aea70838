"""Report which resources the compiled Triton kernels use: `python examples/benchmarks/triton_report.py [--json | ...]`.

The report needs no GPU. The report calls every op that has Triton kernels, on tensors without memory, and records the
launches. The calls have the sizes of several models and many numbers of rows. Then the report compiles the recorded
launches for three generations of GPUs and prints the resources that the launches use. With `--model`, the report
instead prints times for the layers of one model, which `triton_model` estimates for an H100.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget

from trueroll.kernels.contract import (
    MASK_BITS,
    SAMPLE,
    AttentionBatch,
    AttentionWeights,
    DeltaNetWeights,
    ExpertsWeights,
    Mamba2Weights,
    Rotation,
    StateBatch,
    Wanted,
)
from trueroll.kernels.quantization import FORMATS, Format
from trueroll.kernels.specs import (
    PIECE_UNIT,
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LayerNormSpec,
    Mamba2Spec,
    NormSpec,
    Pieces,
    RouterSpec,
    pieces_of,
)
from trueroll.kernels.triton import LATENT_CAPABILITIES, MOST_HEAD_DIM, backend, machine
from trueroll.kernels.triton.launch import Launch, compile_form, recording
from trueroll.kernels.triton.peers import fold_peers

sys.path.insert(0, str(Path(__file__).parent))
import triton_model  # noqa: E402
from triton_model import Modelled, Work  # noqa: E402

CAPABILITIES = (80, 90, 100)
TUNED_FOR = 90
TILE = ("FEATURES", "TOKENS", "MORE", "DEPTH", "GROUP", "D", "SIZE", "ROWS")
"""The constants that define a kernel's tile."""
ROWS = sorted({2**i + extra for i in range(14) for extra in (0, 1)} - {2**13 + 1} | {96, 192, 320})
CONTEXT = 40_000


@dataclass(frozen=True)
class Model:
    """The sizes and the options of a decoder.

    Options of attention: biases and head norms of queries, keys and values, soft caps, sinks, and a bias after
    attention. Other options: the norms, the activation, the number of layers for models in which it matters, and the
    largest number of pieces.
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
    sinks: bool = False
    layers: int = 28
    most_pieces: int = 4

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

    @property
    def pieces(self) -> tuple[Pieces, Pieces]:
        """The pieces in which the products with `o` and with `down` are summed."""
        count = math.gcd(self.heads, self.kv_heads, self.most_pieces)
        whole = self.heads * self.head_dim
        return pieces_of(count, whole, self.head_dim), pieces_of(count, self.intermediate, PIECE_UNIT)


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
        most_pieces=8,  # the number of pieces in larger models
    ),
    "SmolLM2-135M": Model(576, 1536, 9, 3, 64, 49152),
    "gpt-oss-20b without experts": Model(
        2880, 2880, 64, 8, 64, 201088, biases=True, activation="clamped_silu", sinks=True
    ),
    "no multiples of 16": Model(1001, 1537, 6, 2, 80, 1001, biases=True),
}
DELTA_NETS = {
    "Qwen3.5-27B": DeltaNetSpec(16, 48, 128, 128, 4, NormSpec(1e-6)),
    "Qwen3.5-0.8B": DeltaNetSpec(16, 16, 128, 128, 4, NormSpec(1e-6)),
}
SPACES = {"Nemotron-3-Nano-30B-A3B": Mamba2Spec(64, 64, 8, 128, 4, NormSpec(1e-5), (1e-3, math.inf))}
# Heads, and the sizes of a latent row, of a rotated key, and of a head's query and value before the products by head.
LATENTS = {"DeepSeek-V3": (128, 512, 64, 128), "GLM-4.7-Flash": (20, 512, 64, 192)}
# Each entry has the hidden size of its model.
EXPERTS = {
    "Qwen3-30B-A3B": (ExpertsSpec(128, 8, 768), 2048),
    "gpt-oss-20b": (ExpertsSpec(32, 4, 2880, activation="clamped_silu", bias=True), 2880),
    "Qwen3-Next-80B-A3B": (ExpertsSpec(512, 10, 512, router=RouterSpec("softmax"), shared_size=512), 2048),
    "experts of no multiples of 16": (ExpertsSpec(6, 2, 33, activation="gelu_tanh"), 1001),
}
# Vision towers: hidden size, heads, and inner size of an MLP.
TOWERS = {"the tower of Qwen3-VL-8B": (1152, 16, 4304)}
# Formats of weights, with the matrices of a dense model and of a mixture of experts.
CODED = {name: FORMATS[name] for name in FORMATS if name in backend.FORMATS}
FEW_CODED = "fp8", "nvfp4"
FLOAT16 = "SmolLM2-135M"
MODELLED = "Qwen2.5-7B"
WHOLE = (MODELLED, *DELTA_NETS, "gpt-oss-20b")
PRODUCTS = ("q, k, v", "o", "gate, up", "down")
# Numbers of rows around each number at which the tables change the tile, and numbers that are typical of rollouts.
DECODES = (1, 16, 32, 64, 65, 96, 97, 128, 129, 144, 145, 192, 193, 256, 257, 320, 321, 384, 385, 512, 513, 1024, 1025)
PROMPTS = (2048, 8192, 16384)
DECODE_CONTEXT = 1152


def record(names: Iterable[str]) -> list[Launch]:
    """Return the distinct launches of the named models, delta nets, experts, towers or formats, grouped by kernel."""
    with recording() as launches:
        for name in names:
            if name in DELTA_NETS:
                recur(DELTA_NETS[name])
            elif name in EXPERTS:
                mix(*EXPERTS[name])
            elif name in TOWERS:
                see(*TOWERS[name])
            elif name in SPACES:
                scan(SPACES[name])
            elif name in LATENTS:
                absorb(*LATENTS[name])
            elif name in CODED:
                Calls(MODELS[MODELLED], torch.bfloat16, CODED[name]).matrices()
                mix(*EXPERTS["gpt-oss-20b"], CODED[name])
            else:
                Calls(MODELS[name], torch.float16 if name == FLOAT16 else torch.bfloat16).all()
                fold_ranks(MODELS[name].hidden)
    return sorted(dict.fromkeys(launches), key=lambda launch: name_of(launch.kernel))


def fold_ranks(hidden: int) -> None:
    """Call the op that adds the sums of several ranks."""
    for ranks in (2, 4, 8):
        fold_peers([floats(17, hidden)] * ranks)


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rsplit('.', 1)[1]}.{kernel.fn.__name__}"


class Calls:
    """Calls the ops of a model on tensors without memory. `format`: the format of the matrices; None for plain ones."""

    def __init__(self, model: Model, dtype: torch.dtype, format: Format | None = None) -> None:
        self.model, self.dtype, self.format = model, dtype, format
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

    def matrices(self) -> None:
        for rows in ROWS:
            self.products(rows)
            self.qkv(rows)

    def weight(self, rows: int, columns: int) -> Any:
        return backend.new_weight(rows, columns, self.empty, self.format)

    def products(self, rows: int) -> None:
        m = self.model
        x, heads = self.empty(rows, m.hidden), self.empty(rows, m.heads * m.head_dim)
        backend.linear(x, self.weight(m.hidden, m.hidden))
        backend.linear(x, self.weight(m.hidden, m.hidden), self.empty(m.hidden))
        of_o, of_down = m.pieces
        bias = self.empty(m.hidden) if m.sinks else None
        backend.project_back(heads, self.weight(m.hidden, m.heads * m.head_dim), x, bias, of_o)
        backend.project_back(self.empty(rows, m.intermediate), self.weight(m.hidden, m.intermediate), x, None, of_down)
        gate, up = self.weight(m.intermediate, m.hidden), self.weight(m.intermediate, m.hidden)
        backend.gate_up(x, gate, up, m.activation)

    def norms(self, rows: int) -> None:
        m = self.model
        backend.rmsnorm(self.empty(rows, m.hidden), self.empty(m.hidden), m.norm)
        backend.gate_mul(self.empty(rows, m.intermediate), self.empty(rows, m.intermediate), m.activation)

    def layer(self, queries: list[int], context: int) -> dict[str, list[Launch]]:
        """Return the launches of one layer's ops and of the head. Each sequence has `queries` rows."""
        m, rows = self.model, sum(queries)
        x, heads = self.empty(rows, m.hidden), self.empty(rows, m.heads * m.head_dim)
        inner, hidden = self.empty(rows, m.intermediate), self.empty(len(queries), m.hidden)
        lens = integers(rows) if rows == len(queries) else None
        ops: dict[str, Callable[[], object]] = {
            "norms": lambda: [backend.rmsnorm(x, self.empty(m.hidden), m.norm) for _ in range(2)],
            "q, k, v": lambda: self.qkv(rows),
            "attention": lambda: self.attention(queries, lens, context),
            "o": lambda: backend.project_back(heads, self.weight(m.hidden, heads.shape[1]), x, None, m.pieces[0]),
            "gate, up": lambda: backend.gate_up(
                x, *(self.weight(m.intermediate, m.hidden) for _ in range(2)), m.activation
            ),
            "down": lambda: backend.project_back(inner, self.weight(m.hidden, m.intermediate), x, None, m.pieces[1]),
            "head": lambda: self.next_tokens(hidden),
        }
        return {name: launches_of(op) for name, op in ops.items()}

    def keys_and_values(self, rows: int) -> None:
        m = self.model
        rotation = self.qkv(rows)
        backend.rope(self.empty(rows, m.heads, m.head_dim), rotation)
        keys = self.empty(rows, m.kv_heads, m.head_dim)
        backend.write_kv(keys, keys, self.cache, self.cache, integers(rows))

    def qkv(self, rows: int) -> Rotation:
        m, slots = self.model, integers(rows)
        q_size, kv_size = m.heads * m.head_dim, m.kv_heads * m.head_dim
        weights = AttentionWeights(
            *(self.weight(size, m.hidden) for size in (q_size, kv_size, kv_size)),
            (self.empty(q_size), self.empty(kv_size), self.empty(kv_size)) if m.biases else None,
            (self.empty(m.head_dim), self.empty(m.head_dim)) if m.qk_norms else None,
            o=self.weight(m.hidden, q_size),
        )
        x = self.empty(rows, m.hidden)
        rotation = Rotation(*backend.rotation(slots, floats(m.head_dim // 2), 1.0))
        backend.qkv(x, m.mixer, weights, rotation, self.cache, self.cache, slots)
        return rotation

    def attention(self, queries: list[int], lens: torch.Tensor | None = None, context: int = CONTEXT) -> None:
        """Call attention for sequences with `queries` rows and a context of `context` tokens each."""
        batch = AttentionBatch(
            [0, *accumulate(queries)], [context] * len(queries), integers(len(queries), context // 16), lens
        )
        q = self.empty(sum(queries), self.model.heads, self.model.head_dim)
        sinks = self.empty(self.model.heads) if self.model.sinks else None
        for soft_cap in self.model.soft_caps:
            scoring = dict(soft_cap=soft_cap, sinks=sinks)
            backend.paged_attention(q, self.cache, self.cache, batch, self.model.mixer.scale, **scoring)

    def head(self, rows: int) -> None:
        m, ids, logits = self.model, integers(rows), floats(rows, self.model.vocab_size)
        hidden = self.empty(rows, m.hidden)
        for head in [HeadSpec(0.5, soft_cap) for soft_cap in m.soft_caps]:
            backend.lm_head(hidden, self.weight(m.vocab_size, m.hidden), head)
        self.next_tokens(hidden)
        backend.log_probs(logits, ids)
        backend.token_statistics(logits, ids, 8)
        backend.sample(logits, ids, ids)
        masks = torch.empty(rows, -(-m.vocab_size // MASK_BITS), dtype=torch.int32, device="meta")
        backend.mask_logits(logits, ids, masks)
        backend.filter_logits(logits, ids, floats(rows), floats(rows))

    def next_tokens(self, hidden: torch.Tensor) -> None:
        ids = integers(len(hidden))
        wanted = Wanted(ids, torch.full_like(ids, SAMPLE), floats(len(ids)), ids.bool(), ids, ids)
        backend.next_tokens(hidden, self.weight(self.model.vocab_size, self.model.hidden), wanted)


def recur(spec: DeltaNetSpec) -> None:
    """Call the ops of a delta net, once for sequences with one row each and once for sequences with more rows."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    heads, nothing, slots = empty(spec.num_value_heads), empty(0), integers(2)
    weights = DeltaNetWeights((), empty(spec.channels, 1, spec.kernel_size), heads, heads, nothing, nothing)
    for starts in ([0, 1, 2], [0, 1, 100]):
        x, gates = empty(starts[-1], spec.channels), empty(starts[-1], spec.num_value_heads)
        batch = StateBatch(starts, slots, slots)
        qkv = backend.convolve(x, weights.convolution, empty(4, *spec.tail_shape), batch)
        backend.delta_rule(qkv, gates, gates, spec, weights, floats(4, *spec.state_shape), batch)


def scan(spec: Mamba2Spec) -> None:
    """Call the ops of a state space, for the same sequences as `recur`."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    heads, channels, nothing, slots = empty(spec.num_heads), empty(spec.channels), empty(0), integers(2)
    convolution = empty(spec.channels, 1, spec.kernel_size), channels
    weights = Mamba2Weights(nothing, *convolution, heads, heads, heads, nothing, nothing)
    for starts in ([0, 1, 2], [0, 1, 100]):
        x, steps, batch = (
            empty(starts[-1], spec.channels),
            empty(starts[-1], spec.num_heads),
            StateBatch(starts, slots, slots),
        )
        xbc = backend.convolve(x, weights.convolution, empty(4, *spec.tail_shape), batch, channels)
        backend.state_space(xbc, steps, spec, weights, floats(4, *spec.state_shape), batch)


def absorb(heads: int, latent: int, rotated: int, size: int) -> None:
    """Call latent attention, and the ops that only latent attention needs, for many numbers of rows."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    cache = empty(4, 16, 1, latent + rotated)
    for rows in ROWS:
        k = empty(rows, 1, latent + rotated)
        backend.write_kv(k, k[..., :latent], cache, cache[..., :latent], integers(rows))
        backend.head_linear(empty(rows, heads, size), empty(heads * latent, size))
        backend.head_linear(empty(rows, heads, latent), empty(heads * size, latent))
    for starts, lens in (([0, 1, 2], integers(2)), ([0, 1, 100], None)):
        batch = AttentionBatch(starts, [CONTEXT] * 2, integers(2, CONTEXT // 16), lens)
        q = empty(starts[-1], heads, latent + rotated)
        backend.paged_attention(q, cache, cache[..., :latent], batch, latent**-0.5)


def mix(spec: ExpertsSpec, hidden: int, format: Format | None = None) -> None:
    """Call the ops of experts for many numbers of rows, both with experts that the router chooses and with given
    experts. `format`: the format of the matrices; None if they are plain.
    """
    count, inner = spec.num_experts, spec.intermediate_size
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    biases = (empty(count, 2 * inner), empty(count, hidden)) if spec.bias else (None, None)
    gate_up: Any = backend.new_weight(count * 2 * inner, hidden, empty, format)
    down: Any = backend.new_weight(count * hidden, inner, empty, format)
    weights = ExpertsWeights(empty(count, hidden), None, gate_up, biases[0], down, biases[1])
    for rows in ROWS:
        x, logits = empty(rows, hidden), empty(rows, count)
        chosen, gates = backend.route(logits, spec)
        backend.route(logits, spec, chosen)
        backend.wide_linear(x, floats(count, hidden))
        backend.experts(x, spec, weights, chosen, gates, x if spec.shared_size else None, math.gcd(count, 4))


def see(hidden: int, heads: int, inner: int) -> None:
    """Call the ops that only vision towers have, for an image of 448 x 448 pixels."""
    rows, size = 784, -(-hidden // heads // 16) * 16
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    backend.layer_norm(empty(rows, hidden), empty(hidden), empty(hidden), LayerNormSpec(1e-6))
    for activation in ("gelu", "gelu_tanh"):
        backend.gate_mul(empty(rows, inner), empty(rows, inner), activation)
    cache = empty(rows // 16, 16, heads, size)
    batch = AttentionBatch([0, rows], [rows], integers(1, rows // 16), ends=integers(rows))
    backend.paged_attention(empty(rows, heads, size), cache, cache, batch, size**-0.5)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    with recording() as launches:
        call()
    return launches


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


class Compiling:
    """A fake GPU driver, which names the target and launches nothing."""

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
    """The resources of one launch on one target. Memory in bytes: `spilled` per thread, `shared` per block of threads.

    `instructions`: matrix instructions with their tiles. `reductions`: shape and layout of each tile that is reduced
    over its last axis. `signature`: types of the arguments. `aligned`: arguments that Triton specialized as multiples
    of 16.
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
    """Compile a launch for a GPU by the same code path in Triton as a call on that GPU. The compiled kernel is not
    loaded.
    """
    triton.runtime.driver.set_active(Compiling(capability))
    binary = compile_form(launch)
    used = resources(binary.asm["cubin"])
    return Compiled(
        kernel=name_of(launch.kernel),
        types=dict(launch.types),
        constants={name: value.name if isinstance(value, Format) else value for name, value in launch.constants},
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
    """Return the matrix instructions with their tiles, and the number of consecutive elements along k in one thread.
    Blackwell's instructions name no tile; their tile is the tile of the accumulator, with 16 elements along k.
    """
    widths = "".join(sorted({f" kWidth={width}" for width in re.findall(r"kWidth = (\d+)", ttgir)}))
    found = {f"{name} {tile}{widths}" for name, tile in re.findall(r"\b(wgmma|mma)\.\S*?\.(m\d+n\d+k\d+)\.", ptx)}
    if "tcgen05.mma." in ptx:
        accumulators = set(re.findall(r"memdesc<\d+x\d+xf32, (#tmem\d*),", ttgir))
        tiles = re.findall(r"(#tmem\d*) = .*blockM = (\d+), blockN = (\d+)", ttgir)
        found |= {f"tcgen05 m{m}n{n}k16" for name, m, n in tiles if name in accumulators}
    return sorted(found)


def reductions(ttgir: str) -> list[str]:
    """Return shape and layout of each two-dimensional tile that is reduced over the second axis."""
    operands = re.findall(r'"tt\.reduce".*?axis = 1 .*?\}\) : \(tensor<(\d+x\d+)x\w+, (#\w+)>\)', ttgir, re.DOTALL)
    layouts = dict(re.findall(r"^(#\w+) = (#\w+\..*)$", ttgir, re.MULTILINE))
    return sorted({f"{shape} of {layouts[name]}" for shape, name in operands})


Job: TypeAlias = tuple[int, Launch]
"""A target's compute capability, and the launch to compile for that target."""
JOBS: list[Job] = []


def jobs_of(launches: Sequence[Launch]) -> list[Job]:
    """Return a job for each launch and each target. Some targets lack the shared memory for latent attention."""
    jobs = [(capability, launch) for launch in launches for capability in CAPABILITIES]
    return [job for job in jobs if job[0] // 10 in LATENT_CAPABILITIES or not is_latent(job[1])]


def is_latent(launch: Launch) -> bool:
    """Return whether the launch computes latent attention. Only latent attention has values that are longer than the
    maximum head size.
    """
    is_attention = name_of(launch.kernel).startswith("attention.")
    return is_attention and dict(launch.constants)["SIZE"] > MOST_HEAD_DIM


def chosen_jobs(launches: Sequence[Launch], modelled: Sequence[Launch]) -> list[Job]:
    """Return jobs for the launches that `some` chooses, on every target, and for all launches in `modelled`, on the
    target that tiles are tuned for.
    """
    latents = [launch for launch in launches if is_latent(launch)]
    others = [launch for launch in launches if not is_latent(launch)]  # chosen separately, for more targets
    chosen, whole = {*some(latents), *some(others)}, set(modelled)
    return [job for job in jobs_of(launches) if job[1] in chosen or job[0] == TUNED_FOR and job[1] in whole]


def few_jobs(launches: Iterable[Launch]) -> list[Job]:
    """Return one launch of each kernel with plain weights and one launch for each of two formats, for the target that
    tiles are tuned for.
    """
    formats = [(dict(launch.constants).get("FORMAT"), launch) for launch in launches]
    few = {format.name if format else launch.kernel: launch for format, launch in formats}
    return [(TUNED_FOR, few[key]) for key in few if key not in CODED or key in FEW_CODED]


def some(launches: Sequence[Launch]) -> list[Launch]:
    """Return a few launches of each kernel that together cover every tile, every value of a constant, and every
    argument type. The choice is greedy: each next launch covers the most cases that earlier launches do not cover.
    """
    missing = set().union(*map(shown_by, launches))
    chosen = []
    while missing:
        chosen.append(max(launches, key=lambda launch: len(shown_by(launch) & missing)))
        missing -= shown_by(chosen[-1])
    return chosen


def shown_by(launch: Launch) -> set[Any]:
    tile = [constant for constant in launch.constants if constant[0] in TILE]
    shown = (*launch.types, *launch.constants, (*tile, launch.warps, launch.stages))
    return {(launch.kernel, each) for each in shown}


def compile_all(jobs: list[Job]) -> list[Compiled]:
    """Compile the jobs in two processes."""
    # Kernels cannot be pickled, so the processes inherit the jobs.
    with get_context("fork").Pool(2, initializer=JOBS.extend, initargs=(jobs,)) as pool:
        return pool.map(compile_job, range(len(jobs)), chunksize=1)


def compile_job(index: int) -> Compiled:
    return compile_for(*JOBS[index])


def print_table(compiled: list[Compiled]) -> None:
    """Print one line per configuration, with the targets side by side. Constants that never vary are left out."""
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


@dataclass(frozen=True)
class Step:
    """A batch: queries per sequence, tokens of context, and the launches of one layer for the batch."""

    queries: list[int]
    context: int
    launches: dict[str, list[Launch]]

    @property
    def name(self) -> str:
        rows = sum(self.queries)
        return f"{rows:,}" if rows == len(self.queries) else f"prompt of {rows:,}"


def steps_of(model: Model) -> list[Step]:
    """Return decode steps of many sizes, and prefill steps."""
    calls = Calls(model, torch.bfloat16)
    batches = [([1] * rows, DECODE_CONTEXT) for rows in DECODES] + [([rows], rows) for rows in PROMPTS]
    return [Step(queries, context, calls.layer(queries, context)) for queries, context in batches]


def model_steps(steps: Sequence[Step]) -> list[dict[str, list[Modelled]]]:
    """Return the modelled launches of each step, op by op."""
    launches = list(dict.fromkeys(launch for step in steps for op in step.launches.values() for launch in op))
    taken = dict(zip(launches, compile_all([(TUNED_FOR, launch) for launch in launches]), strict=True))
    return [
        {op: [model_launch(each, taken[each], step) for each in found] for op, found in step.launches.items()}
        for step in steps
    ]


def model_launch(launch: Launch, taken: Compiled, step: Step) -> Modelled:
    resident = triton_model.resident(taken.registers, taken.shared, taken.warps)
    return triton_model.model(work_of(launch, step), resident)


def work_of(launch: Launch, step: Step) -> Work:
    if "KEYS" in dict(launch.constants):
        return triton_model.attention_work(launch, step.queries, [step.context] * len(step.queries))
    return triton_model.work_of(launch)


def print_model(model: Model) -> None:
    """Print one line for each product and attention of each step, and one line for each step."""
    for name, value in asdict(machine.H100).items():
        print(f"- {name} {value:g}: {machine.REASONS[name]}")
    print(*(f"- {name}: {reason}" for name, reason in triton_model.REASONS.items()), "", sep="\n")
    steps = steps_of(model)
    modelled = model_steps(steps)
    print("| rows | op | programs | waves | MB from memory | MB from L2 | us | bound by |")
    print("|---" * 8 + "|")
    for step, ops in zip(steps, modelled, strict=True):
        print(*(f"| {step.name} | {op} | {op_cells(found)} |" for op, found in ops.items()), sep="\n")
    print("\n| rows | products us | of their limit | attention us | of arithmetic | layer us | step ms | of memory |")
    print("|---" * 8 + "|")
    for step, ops in zip(steps, modelled, strict=True):
        print(f"| {step.name} | {step_cells(model, step, ops)} |")


def op_cells(launches: Sequence[Modelled]) -> str:
    """Return the table cells of an op. The cells describe the op's longest launch, and the time is the sum over all
    launches.
    """
    longest = max(launches, key=lambda launch: launch.seconds)
    work, seconds = longest.work, sum(launch.seconds for launch in launches)
    moved = f"{work.memory / 1e6:.1f} | {work.l2 / 1e6:.1f}"
    return f"{work.programs} | {longest.waves:.2f} | {moved} | {seconds * 1e6:.1f} | {longest.bound}"


def step_cells(model: Model, step: Step, ops: dict[str, list[Modelled]]) -> str:
    """Return the table cells of a step.

    A share is the least possible time divided by the estimated time. The least time of a product is the time to read
    the weights or the time to multiply, whichever is longer. The least time of attention is the time to multiply. The
    least time of a step is the time to read weights, keys and values.
    """
    seconds = {name: sum(launch.seconds for launch in found) for name, found in ops.items()}
    products = sum(seconds[name] for name in PRODUCTS)
    limit = sum(product_limit(n, k, sum(step.queries)) for n, k in product_shapes(model))
    flops = sum(triton_model.useful_flops(n, step.context, model.heads, model.head_dim) for n in step.queries)
    layer = sum(seconds.values()) - seconds["head"]
    whole = model.layers * layer + seconds["head"]
    times = f"{products * 1e6:.0f} | {limit / products:.0%} | {seconds['attention'] * 1e6:.0f}"
    of_arithmetic = flops / seconds["attention"] / machine.H100.arithmetic
    of_memory = step_bytes(model, step) / machine.H100.memory / whole
    return f"{times} | {of_arithmetic:.0%} | {layer * 1e6:.0f} | {whole * 1e3:.2f} | {of_memory:.0%}"


def step_bytes(model: Model, step: Step) -> int:
    """Return the least number of bytes that a step reads: the weights, and the keys and values of the sequences."""
    stored = 2 * 2 * model.kv_heads * model.head_dim * step.context * len(step.queries)
    layer = stored + sum(2 * n * k for n, k in product_shapes(model))
    return model.layers * layer + 2 * model.vocab_size * model.hidden


def product_shapes(model: Model) -> list[tuple[int, int]]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    down = (model.hidden, model.intermediate)
    return [(q + 2 * kv, model.hidden), (model.hidden, q), (2 * model.intermediate, model.hidden), down]


def product_limit(n: int, k: int, rows: int) -> float:
    """Return the least possible seconds of a product of `rows` rows with a weight [n, k]."""
    return max(2 * n * k / machine.H100.memory, 2 * n * k * rows / machine.H100.arithmetic)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compiles the Triton kernels for GPUs and prints the resources they use."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print as JSON instead of a table: launches that together have each tile and value of every model, "
        f"and for sm_{TUNED_FOR} all launches of one model, of delta nets and of some experts",
    )
    parser.add_argument(
        "--few", action="store_true", help="print one form of each kernel and format for one GPU as JSON"
    )
    parser.add_argument("--all", action="store_true", help="print every launch of every model for every GPU as JSON")
    parser.add_argument(
        "--model", action="store_true", help="print the times that a model of an H100 gives for the layers of one model"
    )
    options = parser.parse_args()
    if options.model:
        print_model(MODELS[MODELLED])
    elif options.json or options.all or options.few:
        launches = record([*LATENTS, *MODELS, *DELTA_NETS, *SPACES, *EXPERTS, *TOWERS, *CODED])
        if options.few:
            jobs = few_jobs(launches)
        else:
            jobs = jobs_of(launches) if options.all else chosen_jobs(launches, record(WHOLE))
        print(json.dumps([asdict(compiled) for compiled in compile_all(jobs)]))
    else:
        print_table(compile_all(jobs_of(record(WHOLE))))


if __name__ == "__main__":
    main()
