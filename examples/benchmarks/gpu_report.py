"""Report how close an NVIDIA GPU runs to its limits: `python examples/benchmarks/gpu_report.py [SECTION ...] [--json
FILE]`.

The report has these sections, and prints each section as soon as it is measured:

- `products`: matrix products against cuBLAS;
- `tiles`: the same products with every tile size that trueroll's tables contain;
- `attention`: against torch's scaled_dot_product_attention (SDPA);
- `steps`: a decode step of Qwen2.5-7B against the same step on cuBLAS and SDPA;
- `workloads`: requests per second of a workload with published figures of VeXact on one H100;
- `serving`: tokens per second for 64 to 512 sequences.

Weights are random. If a section fails, its error is printed, the next section is still measured, and the exit code is
1. A speed below its goal does not make the section fail. `--rehearse` runs all sections on a CPU, with tiny sizes and
the reference kernels. The figures of a rehearsal mean nothing.

Kernels are timed with CUDA events around replays of CUDA graphs. A graph contains several calls, and the report shows
the median time of several replays. Calls rotate through several copies of the weights, and of the decodes' keys and
values, so that no call finds its inputs in the GPU's cache. "Of memory" is the achieved share of the bandwidth of a
memory copy. "Of limit" is the least possible time divided by the measured time. The least possible time is the time to
move the bytes at the bandwidth of a copy, or the time to do the arithmetic at the speed of a large cuBLAS product,
whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from trueroll.engine.config import EngineConfig
from trueroll.engine.models.decoder import ModelInput
from trueroll.engine.models.names import find_config
from trueroll.engine.running.loading import load_dummy
from trueroll.kernels.contract import GREEDY, AttentionBatch, AttentionWeights, Backend, Pages, Rotation, Wanted
from trueroll.kernels.layer import run_layers
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import Activation, AttentionSpec, Pieces
from trueroll.kernels.triton import products
from trueroll.kernels.triton.products import Way, factor_of, way_of, ways_of
from trueroll.rollout.tools.bench import EngineSystem, Workload

Row = dict[str, Any]

CONFIG = EngineConfig(
    model="qwen2.5-7b",
    device="cuda",
    backend="triton",
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 4, 128, 16
# Weights [N, K] of Qwen2.5-7B.
PRODUCTS = dict(qkv=(4608, 3584), o=(3584, 3584), gate_up=(37888, 3584), down=(3584, 18944), head=(152064, 3584))
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 512, 1024, 2048, 4096, 8192)
TILE_ROWS = (16, 64, 128, 256, 512, 1024, 2048, 8192)
MOST_HEAD_ROWS = 512  # the maximum number of rows of logits that an engine holds at once
# (sequences, queries per sequence, tokens per sequence)
DECODES = ((1, 1, 1024), (1, 1, 8192), (1, 1, 32768), (16, 1, 1024), (16, 1, 8192), (64, 1, 1024), (64, 1, 4096))
PREFILLS = ((1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192), (1, 16384, 16384), (8, 2048, 2048))
STEPS, STEP_CONTEXT = (1, 8, 16, 32, 64, 128, 129, 256, 512), 1152
# VeXact's figures on one H100: new tokens, requests/s with VeXact's prefix cache, and the speedup by that cache. VeXact
# did not publish the number of unshared prompt tokens; 64 is the number in `trueroll bench --workload shared`.
PUBLISHED = ((128, 10.11, 0.25), (8, 19.34, 0.38))
REQUESTS, SHARED_TOKENS, OWN_TOKENS = 64, 1024, 64
# For each model: the numbers of sequences, in groups of 8 per prompt, and the tokens per prompt and per sample.
SERVED, SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = ("qwen3-0.6b", "qwen2.5-7b"), (64, 256, 512), 128, 256
KV_MEMORY = 32 * 2**30  # enough memory for all sequences
RUNS = 3
REPLAYS = 9
COLD_BYTES = 256 * 2**20  # several times the L2 cache of an H100 or H200
REPLAY_SECONDS, MOST_CALLS = 3e-3, 500
load = cache(load_dummy)


@dataclass(frozen=True)
class Machine:
    """The best rates seen: bytes/s of a copy (bytes read plus bytes written) and FLOP/s of cuBLAS."""

    name: str
    bandwidth: float
    arithmetic: float

    def limit(self, flops: int, num_bytes: int) -> float:
        """Return the least seconds that the given work can take at the best rates."""
        return max(flops / self.arithmetic, num_bytes / self.bandwidth)

    def rates(self, seconds: float, flops: int, num_bytes: int) -> Row:
        limit = self.limit(flops, num_bytes)
        return {"TB/s": num_bytes / seconds / 1e12, "TFLOP/s": flops / seconds / 1e12, "of limit": limit / seconds}


def product_cost(rows: int, n: int, k: int) -> tuple[int, int]:
    """Return (floating-point operations, bytes read and written) of x [rows, K] times a weight [N, K], 16 bits each."""
    return 2 * rows * n * k, 2 * (n * k + rows * (n + k))


def attention_cost(sequences: int, queries: int, context: int) -> tuple[int, int]:
    pairs = queries * (context - queries) + queries * (queries + 1) // 2
    elements = 2 * context * KV_HEADS + 2 * queries * HEADS
    return sequences * 4 * pairs * HEADS * HEAD_DIM, sequences * 2 * elements * HEAD_DIM


def step_cost(model: Any, sequences: int) -> tuple[int, int]:
    """Return the cost of a decode step. The step reads every weight once, except an embedding that is not tied to the
    head.
    """
    parameters = (model.num_bytes - (model.embed is not model.head) * model.embed.nbytes) // 2
    (flops, num_bytes), layers = attention_cost(sequences, 1, STEP_CONTEXT), len(model.layers)
    return 2 * sequences * parameters + layers * flops, 2 * parameters + layers * num_bytes


def seconds_of(calls: Sequence[Callable[[], object]]) -> float:
    """Capture `calls` in one graph. Return the median seconds per call over several replays."""
    for call in dict.fromkeys(calls):  # the first call compiles the kernels
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median([replay_seconds(graph) for _ in range(REPLAYS + 1)][1:]) / len(calls)


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def compare(ops: Sequence[Callable[..., Any]], inputs: Sequence[tuple[Any, ...]], limit: float) -> list[float]:
    """Return the seconds per call of each op. Calls cycle through the inputs. `limit`: least possible seconds of a
    call, which determines the number of calls in a replay.
    """
    turns = max(1, min(MOST_CALLS, math.ceil(REPLAY_SECONDS / limit)) // len(inputs))
    return [seconds_of([partial(op, *each) for each in inputs] * turns) for op in ops]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=CONFIG.device)


def measure_machine() -> Machine:
    source, x = random(2**30), random(8192, 8192)
    target = torch.empty_like(source)
    copying, product = seconds_of([lambda: target.copy_(source)] * 5), seconds_of([lambda: F.linear(x, x)] * 5)
    return Machine(torch.cuda.get_device_name(), 2 * source.nbytes / copying, 2 * 8192**3 / product)


def measure_products(ops: Backend, machine: Machine) -> Iterator[Row]:
    """Yield table rows of products. trueroll's `gate_up` includes the activation, and its `head` gives float32 logits.

    The cuBLAS products include no activation and give 16-bit results.
    """
    special = special_products(ops)
    for name, shape in PRODUCTS.items():
        weights = [random(*shape) for _ in range(-(-COLD_BYTES // (2 * math.prod(shape))))]
        for rows in (rows for rows in NUM_ROWS if name != "head" or rows <= MOST_HEAD_ROWS):
            x, cost = random(rows, shape[1]), product_cost(rows, *shape)
            times = compare((special.get(name, ops.linear), F.linear), [(x, w) for w in weights], machine.limit(*cost))
            yield product_row(f"{name} {shape[0]}x{shape[1]}", rows, cost, *times, machine)


def special_products(ops: Backend) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the ops of `PRODUCTS` that are not plain products, by name."""
    return {"gate_up": lambda x, weight: ops.gate_up(x, *weight.chunk(2), "silu"), "head": ops.lm_head}


def measure_tiles(ops: Backend, machine: Machine) -> Iterator[Row]:
    """Yield the fastest tile of each product next to the tile that the tables choose. `pieces`: True if each piece of K
    is computed by its own program.
    """
    special = special_products(ops)
    for name, (n, k) in PRODUCTS.items():
        weights = [random(n, k) for _ in range(-(-COLD_BYTES // (2 * n * k)))]
        parts = weights[0].chunk(2 if name == "gate_up" else 1)
        factor = factor_of(*parts)
        for rows in (rows for rows in TILE_ROWS if name != "head" or rows <= MOST_HEAD_ROWS):
            x, limit = random(rows, k), machine.limit(*product_cost(rows, n, k))
            inputs, op = [(x, weight) for weight in weights], special.get(name, ops.linear)
            ways = ways_of(rows, factor.columns, factor.rows, factor.most_pieces)
            times = {way: time_in(way, op, inputs, limit) for way in ways}
            yield tile_row(f"{name} {n}x{k}", rows, times, way_of(rows, factor))


def time_in(way: Way, op: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], limit: float) -> float:
    with patch.object(products, "way_of", lambda tokens, factor: way):
        return compare((op,), inputs, limit)[0]


def tile_row(name: str, rows: int, times: dict[Way, float], chosen: Way) -> Row:
    (tile, is_apart), fastest = min(times.items(), key=lambda each: each[1])
    shown = {"product": name, "rows": rows, "fastest": str(tuple(tile)), "pieces": is_apart, "us": fastest * 1e6}
    return shown | {"chosen": str(tuple(chosen[0])), "chosen us": times[chosen] * 1e6, "times": times[chosen] / fastest}


def product_row(name: str, rows: int, cost: tuple[int, int], ours: float, cublas: float, machine: Machine) -> Row:
    of_memory, of_cublas = cost[1] / ours / machine.bandwidth, cublas / ours
    times = {"product": name, "rows": rows, "us": ours * 1e6, "cuBLAS us": cublas * 1e6}
    shares = {"of memory": of_memory, "of cuBLAS": of_cublas, "goal": _product_goal(rows, of_memory, of_cublas)}
    return times | machine.rates(ours, *cost) | shares


def _product_goal(rows: int, of_memory: float, of_cublas: float) -> bool | None:
    if rows <= 64:
        return of_memory >= 0.9
    if rows >= 512:
        return of_cublas >= 0.85
    return None


def measure_attention(ops: Backend, machine: Machine) -> Iterator[Row]:
    for sequences, queries, context in DECODES + PREFILLS:
        cost, batch = attention_cost(sequences, queries, context), batch_of(sequences, queries, context, CONFIG.device)
        shape = (batch.block_tables.numel(), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        count = -(-COLD_BYTES // (4 * math.prod(shape))) if queries == 1 else 1
        rows = sequences * queries
        inputs = [(random(rows, HEADS, HEAD_DIM), random(*shape), random(*shape), batch, 0.1) for _ in range(count)]
        times = compare((ops.paged_attention, dense_attention), inputs, machine.limit(*cost))
        yield attention_row(sequences, queries, context, *times, machine)


def attention_row(sequences: int, queries: int, context: int, ours: float, sdpa: float, machine: Machine) -> Row:
    row = {"sequences": sequences, "queries": queries, "tokens": context, "us": ours * 1e6, "SDPA us": sdpa * 1e6}
    return row | machine.rates(ours, *attention_cost(sequences, queries, context)) | {"of SDPA": sdpa / ours}


def batch_of(sequences: int, queries: int, context: int, device: Any) -> AttentionBatch:
    """Return a batch of sequences. Each sequence has `context` tokens, and its last `queries` tokens are queries.
    Blocks are in order.
    """
    starts = [queries * i for i in range(sequences + 1)]
    tables = torch.arange(sequences * context // BLOCK_SIZE, device=device).view(sequences, -1)
    lens = torch.full((sequences,), context, device=device) if queries == 1 else None
    return AttentionBatch(starts, [context] * sequences, tables, lens)


def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: None = None,
    soft_cap: None = None,
    sinks: None = None,
) -> Tensor:
    """Compute SDPA for a batch from `batch_of`. The blocks of the batch are in order, so keys and values are dense and
    need no gather.
    """
    sequences = len(batch.context_lens)
    q = q.unflatten(0, (sequences, -1)).transpose(1, 2)
    k, v = (cache.view(sequences, -1, *cache.shape[2:]).transpose(1, 2) for cache in (k_cache, v_cache))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def torch_ops(ops: Backend) -> Any:
    """Return `ops` with torch's products (cuBLAS on a GPU; one product computes q, k and v) and SDPA over dense keys
    and values.

    Norms, rope and the activation still come from `ops`. torch writes the KV cache, which takes two more small launches
    per layer than a dedicated kernel. The result supports only greedy tokens, and only models without head norms,
    experts, or a bias after attention.
    """
    joined: Callable[..., Tensor] = cache(lambda *weights: torch.cat(weights))

    def qkv(x: Tensor, spec: AttentionSpec, weights: AttentionWeights, rotation: Rotation, *stored: Tensor) -> Tensor:
        (k_cache, v_cache, slots), kv_heads = stored, spec.num_kv_heads
        bias = joined(*weights.biases) if weights.biases else None
        heads = F.linear(x, joined(weights.q, weights.k, weights.v), bias).unflatten(1, (-1, spec.head_dim))
        turned = ops.rope(heads[:, :-kv_heads].contiguous(), rotation)
        k_cache.flatten(0, 1).index_copy_(0, slots, turned[:, -kv_heads:])
        v_cache.flatten(0, 1).index_copy_(0, slots, heads[:, -kv_heads:])
        return turned[:, :-kv_heads]

    def gate_up(x: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return ops.gate_mul(F.linear(x, gate), F.linear(x, up), activation)

    def project_back(x: Tensor, weight: Tensor, residual: Tensor, bias: None, pieces: Pieces) -> Tensor:
        return torch.addmm(residual, x, weight.T)

    def next_tokens(hidden: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden[wanted.rows], weight).float()
        best, token_ids = logits.max(-1)
        return token_ids, best - logits.logsumexp(-1), best.isfinite()

    ours = {name: getattr(ops, name) for name in ("rotation", "embedding", "rmsnorm")}
    changed = dict(qkv=qkv, gate_up=gate_up, next_tokens=next_tokens, paged_attention=dense_attention)
    both = SimpleNamespace(**ours, **changed, project_back=project_back)
    both.layers = partial(run_layers, both)
    return both


class Step:
    """A greedy decode step for sequences with random keys and values, from token ids to the next token ids."""

    def __init__(self, model: Any, sequences: int, context: int) -> None:
        self.model, batch = model, batch_of(sequences, 1, context, model.device)
        mixer = model.spec.layers[0].mixer
        shape = (batch.block_tables.numel(), BLOCK_SIZE, mixer.num_kv_heads, mixer.head_dim)
        kv = partial(torch.randn, shape, dtype=model.dtype, device=model.device)
        caches = [(kv(), kv()) for _ in model.layers]
        rows = torch.arange(sequences, device=model.device)
        token_ids, positions = rows * 977 % model.spec.vocab_size, torch.full_like(rows, context - 1)
        pages = [Pages((rows + 1) * context - 1, batch)] * len(caches)
        self.input = ModelInput(token_ids, positions, caches, pages)
        unused = torch.zeros_like(rows)
        self.wanted = Wanted(rows, unused + GREEDY, torch.ones_like(rows).float(), unused.bool(), unused, unused)

    def run(self, ops: Any) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the log-probs of the next tokens."""
        self.model.ops = ops
        hidden = self.model.forward(self.input).hidden
        return hidden, ops.next_tokens(hidden, self.model.head, self.wanted)[1]


def measure_steps(ops: Backend, machine: Machine) -> Iterator[Row]:
    model, both = load(CONFIG).model, (ops, torch_ops(ops))
    try:
        for sequences in STEPS:
            step = Step(model, sequences, STEP_CONTEXT)
            ours, theirs = (step.run(each)[0].float() for each in both)
            times = [seconds_of([partial(step.run, each)] * 3) for each in both]
            difference = float((ours - theirs).norm() / theirs.norm())
            yield step_row(sequences, *times, difference, machine.rates(times[0], *step_cost(model, sequences)))
    finally:
        model.ops = ops


def step_row(sequences: int, ours: float, theirs: float, difference: float, rates: Row) -> Row:
    """Return a row of the table. `difference`: relative difference of the hidden states."""
    times = {"sequences": sequences, "tokens": STEP_CONTEXT, "ms": ours * 1e3, "cuBLAS + SDPA ms": theirs * 1e3}
    return times | rates | {"differs by": difference, "times as long": ours / theirs, "goal": ours <= 1.1 * theirs}


def measure_workloads(ops: Backend, machine: Machine) -> Iterator[Row]:
    """Yield requests/s with and without prefix cache. The cache is empty when a run begins."""
    configs = (CONFIG, CONFIG.model_copy(update={"enable_prefix_caching": False}))
    systems = [EngineSystem(each, load(CONFIG)) for each in configs]
    for max_tokens, *published in PUBLISHED:
        workload = Workload("VeXact", REQUESTS, SHARED_TOKENS, OWN_TOKENS, 1, max_tokens, temperature=0.0)
        speeds = (REQUESTS / median_seconds(system, workload) for system in systems)
        yield workload_row(max_tokens, *speeds, *published)


def median_seconds(system: EngineSystem, workload: Workload) -> float:
    """Return the median seconds of several runs, after a warm-up run."""
    return statistics.median([system(workload).seconds for _ in range(RUNS + 1)][1:])


def workload_row(max_tokens: int, cached: float, uncached: float, published: float, published_gain: float) -> Row:
    gain = cached / uncached - 1
    speeds = {"new tokens": max_tokens, "requests/s": cached, "VeXact's": published, "times": cached / published}
    gains = {"cache off": uncached, "of cache: gain": gain, "of VeXact's: gain": published_gain}
    return speeds | gains | {"goal": cached >= 2 * published and gain > published_gain}


def measure_serving(ops: Backend, machine: Machine) -> Iterator[Row]:
    """Yield rows for samples at temperature 1, and for greedy samples with mostly shared prompts. Times include
    prefill.
    """
    most = max(*SEQUENCES, REQUESTS)
    for name in SERVED:
        config = CONFIG.model_copy(update={"model": name, "max_num_seqs": most, "kv_memory": KV_MEMORY})
        system = EngineSystem(config, load_dummy(config))
        groups = [Workload("groups of 8", n // 8, 0, PROMPT_TOKENS, 8, NEW_TOKENS, 1.0) for n in SEQUENCES]
        for workload in (*groups, Workload("shared", REQUESTS, SHARED_TOKENS, OWN_TOKENS, 1, NEW_TOKENS, 0.0)):
            yield serving_row(name, workload, median_seconds(system, workload))
        del system  # frees the memory of this model for the next model


def serving_row(model: str, workload: Workload, seconds: float) -> Row:
    shown = {"model": model, "workload": workload.name, "sequences": workload.num_samples}
    tokens = {"prompt": workload.shared + workload.own, "new tokens": workload.max_tokens}
    speed = workload.num_samples * workload.max_tokens / seconds
    return shown | tokens | {"tokens/s": speed, "ms a token": seconds / workload.max_tokens * 1e3}


SECTIONS: dict[str, tuple[str, Callable[[Backend, Machine], Iterator[Row]]]] = {
    "products": ("Products; goals: 90% of memory up to 64 rows, 85% of cuBLAS from 512", measure_products),
    "tiles": ("Tiles: features, tokens, more tokens, depth, warps, stages", measure_tiles),
    "attention": ("Attention", measure_attention),
    "steps": ("Decode step of Qwen2.5-7B; goal: at most 1.1 times as long", measure_steps),
    "workloads": (
        f"VeXact's workload, {REQUESTS} prompts with {SHARED_TOKENS} shared and {OWN_TOKENS} own tokens; "
        "goal: twice its requests/s and a larger gain by the cache",
        measure_workloads,
    ),
    "serving": ("Serving, of a whole run: tokens/s of all sequences, ms for a token of each", measure_serving),
}


def make_table(title: str, rows: Sequence[Row]) -> Table:
    columns = [Column(name, justify="right") for name in (rows[0] if rows else ())]
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(show(name, value) for name, value in row.items()))
    return table


def show(name: str, value: Any) -> str:
    if name == "goal":
        return {True: "met", False: "[red]missed[/]", None: ""}[value]
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("of ") else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return str(value)


def run_section(title: str, rows: Iterator[Row], console: Console) -> tuple[list[Row], bool]:
    """Measure and print the rows of a section. Return the rows, and True if the section did not fail."""
    measured: list[Row] = []
    failure = ""
    try:
        measured.extend(rows)  # rows measured before a failure are kept
    except Exception:
        console.print_exception()
        failure = "FAILED: "
    console.print(make_table(failure + title, measured))
    return measured, not failure


# The sizes of a rehearsal, which replace the sizes above. `rehearse` has the configuration.
SMALL: dict[str, Any] = dict(
    PRODUCTS={"o": (64, 48), "gate_up": (64, 48), "head": (512, 48)},
    NUM_ROWS=(1, 256, 512),
    TILE_ROWS=(1,),
    COLD_BYTES=2**14,
    DECODES=((2, 1, 32),),
    PREFILLS=((1, 32, 32),),
    STEPS=(1, 2),
    STEP_CONTEXT=32,
    PUBLISHED=((3, 1.0, 0.25),),
    REQUESTS=3,
    SHARED_TOKENS=32,
    OWN_TOKENS=5,
    SEQUENCES=(8,),
    PROMPT_TOKENS=16,
    NEW_TOKENS=4,
    KV_MEMORY=2**20,
    RUNS=1,
)
SMALL_MODEL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    bos_token_id=1,
    eos_token_id=2,
)


def rehearse(folder: Path) -> None:
    """Switch all later measurements to tiny sizes, the CPU, and the host's clock."""
    config = json.loads((find_config(CONFIG.model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL_MODEL))
    settings = dict(model=str(folder), device="cpu", backend="reference", max_num_batched_tokens=512)
    ours = dict(CONFIG=CONFIG.model_copy(update=settings), SERVED=(str(folder),))
    clock = dict(seconds_of=seconds_on_the_host, measure_machine=lambda: Machine("rehearsal", 1e9, 1e9))
    globals().update(SMALL | ours | clock)


def seconds_on_the_host(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls[:3]:
        call()
    return (time.perf_counter() - start) / len(calls[:3])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures products, attention, decode steps and requests/s on a GPU.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"unknown sections: {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    if not arguments.rehearse and not torch.cuda.is_available():
        sys.exit(f"no usable GPU found (torch {torch.__version__}); run this on a machine with a CUDA GPU")
    return arguments


@torch.inference_mode()
def report(sections: Sequence[str], file: Path | None) -> None:
    """Measure and print `sections`, and write the results to a file. Exit with an error if a section failed."""
    ops = select_backend(CONFIG.backend, torch.device(CONFIG.device), torch.bfloat16).ops
    console, machine = Console(width=120), measure_machine()
    console.print(f"{machine.name}, torch {torch.__version__}, {ops.instruction_set()}")
    console.print(f"copy {machine.bandwidth / 1e12:.2f} TB/s, cuBLAS {machine.arithmetic / 1e12:.0f} TFLOP/s")
    found: dict[str, Any] = {"machine": asdict(machine), "sections": {}, "failed": []}
    for name in sections:
        title, section = SECTIONS[name]
        found["sections"][name], is_whole = run_section(title, section(ops, machine), console)
        if not is_whole:
            found["failed"].append(name)
        if file is not None:
            file.write_text(json.dumps(found, indent=2))
    if found["failed"]:
        sys.exit(f"{len(found['failed'])} of {len(sections)} sections failed: {'; '.join(found['failed'])}")


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.rehearse:
            rehearse(Path(folder))
        report(arguments.sections or list(SECTIONS), arguments.json)


if __name__ == "__main__":
    main()
