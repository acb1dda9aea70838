"""Compare the speed of products with quantized and with plain matrices, and of attention over 8-bit and plain KV
caches, on a CPU: `python examples/benchmarks/quantized_report.py [FORMAT...]`, `... quantized_report.py kv_cache`.

The matrices of each format, and the plain bfloat16 matrices, have 250 million elements in total, so that every product
reads its matrix from memory. For 1 and for 64 rows, and for one and two threads, a table shows the speed of each format
as a multiple of the speed of plain matrices, and the rate at which the stored bytes are read. The figures are medians
over rounds. A round times all formats one after the other, so that all formats see the same load on the machine. The
row `reading` sums the bytes of the plain matrices as 64-bit integers, which needs hardly any arithmetic: its rate is
the memory bandwidth. TRUEROLL_CPU_ISA chooses an instruction set.

With `kv_cache`, the tables show the same for decode steps over 8,192 tokens of context, for the key-value heads of some
models and for 1 and 8 sequences. The caches of bfloat16 have 512 MiB in total. Here, `reading` uses one thread.

For one thread, `limit` is the highest possible value of `times as fast`. The limit assumes that a product takes the
longer of two times: the time to read the format's bytes at the rate of `reading`, and the time to compute if all data
is in the core's cache. The latter is measured with a small matrix or a short context, and includes the conversion of
codes to numbers. Formats with quantized activations have no `limit`: a product with a small matrix would spend too much
of its time on the activations.

With --cpu-time, the report shows CPU times instead of elapsed times, for one thread only. Other processes then affect
the times only through the caches and the memory that they share with the report.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trueroll.kernels.cache_formats import CACHE_FORMATS
from trueroll.kernels.contract import AttentionBatch, new_caches
from trueroll.kernels.cpu import backend as ops
from trueroll.kernels.quantization import FORMATS
from trueroll.kernels.specs import AttentionSpec

SIZE, COUNT, ROUNDS = 4096, 15, 9
CONTEXT, BLOCK, CACHE_BYTES = 8192, 16, 2**29
CACHED_ROWS, CACHED_CONTEXT = 64, 256  # small enough for a core's cache: rows of a matrix, tokens of a context
REPEATS = 20
# Heads, key-value heads and head size.
MODELS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen3.5-27B": (24, 4, 256),
    "Llama-3.1-70B": (64, 8, 128),
}


def matrices(name: str | None, count: int = COUNT, rows: int = SIZE) -> list:
    """Return matrices of the format `name`; plain matrices if `name` is None."""
    empty = partial(torch.empty, dtype=torch.bfloat16)
    made = [ops.new_weight(rows, SIZE, empty, FORMATS[name] if name else None) for _ in range(count)]
    made[0].copy_(torch.randn(rows, SIZE) / SIZE**0.5)
    for weight in made[1:]:
        weight.copy_(made[0])
    return made


def seconds(name: str, weights: list, x: Tensor, clock) -> float:
    start = clock()
    for weight in weights:
        weight.data.view(torch.int64).sum() if name == "reading" else ops.linear(x, weight)
    return clock() - start


def main(formats: list[str], clock, all_threads: tuple[int, ...]) -> None:
    weights = {"bfloat16": matrices(None)}
    weights |= {"reading": weights["bfloat16"], **{name: matrices(name) for name in formats}}
    kinds = {"bfloat16": None, **{name: name for name in formats if FORMATS[name].activations is None}}
    small = {name: matrices(kind, 1, CACHED_ROWS) * REPEATS for name, kind in kinds.items()}
    sizes = {name: each[0].nbytes * COUNT for name, each in weights.items()}
    for threads in all_threads:
        torch.set_num_threads(threads)
        for rows in (1, 64):
            x, times = torch.randn(rows, SIZE).bfloat16(), {name: [] for name in weights}
            computing = {name: [] for name in small}
            for _ in range(ROUNDS):
                for name, each in weights.items():
                    times[name].append(seconds(name, each, x, clock))
                    if threads == 1 and name in small:
                        own = seconds(name, small[name], x, clock)
                        computing[name].append(own * COUNT * SIZE / (CACHED_ROWS * REPEATS))
            show(f"{ops.instruction_set()}, {threads} threads, {rows} rows", "matrix", times, sizes, computing)


def show(title: str, what: str, times: dict, sizes: dict, computing: dict) -> None:
    """Print a table. `computing`: for each name but `reading`, the seconds that the same work takes with data in a
    core's cache; empty if not measured.
    """
    table = Table(title=title)
    for column in (what, "times as fast", "GB/s", "limit"):
        table.add_column(column, justify="left" if column == what else "right")
    plain, rate = median(times["bfloat16"]), sizes["reading"] / median(times["reading"])
    for name, own in times.items():
        ratio = median(one / mine for one, mine in zip(times["bfloat16"], own, strict=True))
        cached = computing.get(name)
        limit = f"{plain / max(sizes[name] / rate, median(cached)):.2f}" if cached else ""
        table.add_row(name, f"{ratio:.2f}", f"{sizes[name] / median(own) / 1e9:.1f}", limit)
    Console().print(table)


def filled_caches(spec: AttentionSpec, sequences: int, layers: int, context: int = CONTEXT) -> list:
    """Return caches of several layers, each with the keys and values of some sequences."""
    made, slots = [], torch.arange(context)
    keys = torch.randn(context, spec.num_kv_heads, spec.head_dim).bfloat16()
    for _ in range(layers):
        empty = partial(torch.empty, dtype=torch.bfloat16)
        made.append(new_caches(ops, spec, sequences * context // BLOCK, BLOCK, empty))
        for i in range(sequences):
            ops.write_kv(keys, keys, *made[-1], slots + i * context)
    return made


def batch_of(sequences: int, context: int) -> AttentionBatch:
    """Return a decode step of some sequences."""
    tables = torch.arange(sequences * context // BLOCK).view(sequences, -1)
    return AttentionBatch(range(sequences + 1), [context] * sequences, tables)


def decode(name: str, caches: list, q: Tensor, batch: AttentionBatch, threads: int, clock) -> float:
    # With more threads, torch's threads would keep spinning after the sums and slow down the next measurement.
    torch.set_num_threads(1 if name == "reading" else threads)
    start = clock()
    for layer in caches:
        if name == "reading":
            for cache in layer:
                cache.view(torch.int64).sum()
        else:
            ops.paged_attention(q, *layer, batch, q.shape[2] ** -0.5)
    return clock() - start


def compare_caches(clock, all_threads: tuple[int, ...]) -> None:
    for model, (heads, kv_heads, size) in MODELS.items():
        for sequences in (1, 8):
            specs = {"bfloat16": AttentionSpec(heads, kv_heads, size, size**-0.5)}
            specs |= {name: replace(specs["bfloat16"], cache_format=each) for name, each in CACHE_FORMATS.items()}
            layers = max(1, CACHE_BYTES // (4 * sequences * CONTEXT * kv_heads * size))
            caches = {name: filled_caches(spec, sequences, layers) for name, spec in specs.items()}
            small = {name: filled_caches(spec, 1, 1, CACHED_CONTEXT) * REPEATS for name, spec in specs.items()}
            caches["reading"] = caches["bfloat16"]
            sizes = {name: sum(c.nbytes for layer in each for c in layer) for name, each in caches.items()}
            q = torch.randn(sequences, heads, size).bfloat16()
            whole, short = batch_of(sequences, CONTEXT), batch_of(1, CACHED_CONTEXT)
            work = layers * sequences * CONTEXT / (REPEATS * CACHED_CONTEXT)
            for threads in all_threads:
                times, computing = {name: [] for name in caches}, {name: [] for name in specs}
                for _ in range(ROUNDS):
                    for name, each in caches.items():
                        times[name].append(decode(name, each, q, whole, threads, clock))
                        if threads == 1 and name in small:
                            computing[name].append(work * decode(name, small[name], q[:1], short, threads, clock))
                title = (
                    f"{ops.instruction_set()}, {threads} threads, {model}, {sequences} sequences of {CONTEXT} tokens"
                )
                show(title, "cache", times, sizes, computing)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--cpu-time"]
    is_cpu_time = "--cpu-time" in sys.argv
    clock = time.thread_time if is_cpu_time else time.perf_counter
    threads = (1,) if is_cpu_time else (1, 2)
    if arguments == ["kv_cache"]:
        compare_caches(clock, threads)
    else:
        main(arguments or [*FORMATS], clock, threads)
