"""Compare the speed of products with quantized and with plain matrices, and of attention over 8-bit and plain KV
caches, on a CPU: `python examples/benchmarks/quantized_report.py [FORMAT...]`, `... quantized_report.py kv_cache`.

The matrices of each format, and the plain bfloat16 matrices, have 250 million elements in total, so that every product
reads its matrix from memory. For 1 and for 64 rows, and for one and two threads, a table shows how many times as fast
as plain matrices each format is (the median over rounds; a round times all formats one after the other, so that all see
the same load on the machine), and how fast the stored bytes are read. The row `reading` sums the bytes of the plain
matrices as 64-bit integers, which needs hardly any arithmetic: its rate is the rate of memory. TRUEROLL_CPU_ISA chooses
an instruction set.

With `kv_cache`, the tables show the same for decode steps over 8,192 tokens of context, for the key-value heads of some
models and for 1 and 8 sequences. The caches of bfloat16 have 512 MiB in total. Here, `reading` uses one thread.

With --cpu-time, the times are those that the processor worked, for one thread. Other processes then count only as far
as they use the same caches and memory.
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
# Heads, key-value heads and head size.
MODELS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen3.5-27B": (24, 4, 256),
    "Llama-3.1-70B": (64, 8, 128),
}


def matrices(name: str | None) -> list:
    """Return `COUNT` matrices of a format; None: plain matrices."""
    empty = partial(torch.empty, dtype=torch.bfloat16)
    made = [ops.new_weight(SIZE, SIZE, empty, FORMATS[name] if name else None) for _ in range(COUNT)]
    made[0].copy_(torch.randn(SIZE, SIZE) / SIZE**0.5)
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
    for threads in all_threads:
        torch.set_num_threads(threads)
        for rows in (1, 64):
            x, times = torch.randn(rows, SIZE).bfloat16(), {name: [] for name in weights}
            for _ in range(ROUNDS):
                for name, each in weights.items():
                    times[name].append(seconds(name, each, x, clock))
            sizes = {name: each[0].nbytes * COUNT for name, each in weights.items()}
            show(f"{ops.instruction_set()}, {threads} threads, {rows} rows", "matrix", times, sizes)


def show(title: str, what: str, times: dict, sizes: dict) -> None:
    table = Table(title=title)
    for column in (what, "times as fast", "GB/s"):
        table.add_column(column, justify="left" if column == what else "right")
    for name, own in times.items():
        ratio = median(plain / mine for plain, mine in zip(times["bfloat16"], own, strict=True))
        table.add_row(name, f"{ratio:.2f}", f"{sizes[name] / median(own) / 1e9:.1f}")
    Console().print(table)


def filled_caches(spec: AttentionSpec, sequences: int) -> list:
    """Return caches of several layers, each with the keys and values of some sequences."""
    layers = max(1, CACHE_BYTES // (4 * sequences * CONTEXT * spec.num_kv_heads * spec.head_dim))
    made, slots = [], torch.arange(CONTEXT)
    keys = torch.randn(CONTEXT, spec.num_kv_heads, spec.head_dim).bfloat16()
    for _ in range(layers):
        empty = partial(torch.empty, dtype=torch.bfloat16)
        made.append(new_caches(ops, spec, sequences * CONTEXT // BLOCK, BLOCK, empty))
        for i in range(sequences):
            ops.write_kv(keys, keys, *made[-1], slots + i * CONTEXT)
    return made


def decode(name: str, caches: list, q: Tensor, batch: AttentionBatch, threads: int, clock) -> float:
    # The threads of torch would go on spinning after the sums.
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
            spec = AttentionSpec(heads, kv_heads, size, size**-0.5)
            caches = {"bfloat16": filled_caches(spec, sequences)}
            caches["reading"] = caches["bfloat16"]
            caches |= {n: filled_caches(replace(spec, cache_format=f), sequences) for n, f in CACHE_FORMATS.items()}
            tables = torch.arange(sequences * CONTEXT // BLOCK).view(sequences, -1)
            batch = AttentionBatch(range(sequences + 1), [CONTEXT] * sequences, tables)
            q = torch.randn(sequences, heads, size).bfloat16()
            for threads in all_threads:
                times = {name: [] for name in caches}
                for _ in range(ROUNDS):
                    for name, each in caches.items():
                        times[name].append(decode(name, each, q, batch, threads, clock))
                sizes = {name: sum(c.nbytes for layer in each for c in layer) for name, each in caches.items()}
                title = (
                    f"{ops.instruction_set()}, {threads} threads, {model}, {sequences} sequences of {CONTEXT} tokens"
                )
                show(title, "cache", times, sizes)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--cpu-time"]
    is_cpu_time = "--cpu-time" in sys.argv
    clock = time.thread_time if is_cpu_time else time.perf_counter
    threads = (1,) if is_cpu_time else (1, 2)
    if arguments == ["kv_cache"]:
        compare_caches(clock, threads)
    else:
        main(arguments or [*FORMATS], clock, threads)
