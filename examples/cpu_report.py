"""Where the time goes on a CPU: `python examples/cpu_report.py [MODEL [DTYPE]]`.

Measures what the machine can do at best (matrix products, reading memory), then runs each workload of `trueroll bench`
on the in-process engine and shows for every op its time, its arithmetic and the memory it must read at least once a
step, as shares of these. What is left of a step is Python: scheduling, bookkeeping, the step's tensors.

To time each op, the report runs the layers op by op; an engine runs all of them in one native call, so that its steps
take a few percent less.
"""

import dataclasses
import gc
import sys
import time
import types
from collections import Counter, defaultdict
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.kernels.contract import AttentionBatch
from trueroll.kernels.layer import run_layers
from trueroll.rollout.tools.bench import WORKLOADS, Workload

OPS = ("embedding", "rotation", "qkv", "paged_attention", "linear", "linear_add", "gate_up", "rmsnorm", "next_tokens")


class Meter:
    """Adds up seconds, floating-point operations and bytes of each op of `loaded`, a model with wrapped ops."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.seconds: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.own_seconds = 0.0
        ops = types.SimpleNamespace(**vars(loaded.backend.ops))
        for name in OPS:
            setattr(ops, name, self.timed(name, getattr(ops, name)))
        ops.layers = partial(run_layers, ops)
        loaded.model.ops = ops
        self.loaded = dataclasses.replace(loaded, backend=dataclasses.replace(loaded.backend, ops=ops))

    def timed(self, name: str, op):
        def run(*arguments):
            start = time.perf_counter()
            result = op(*arguments)
            end = time.perf_counter()
            flops, num_bytes = COSTS.get(name, no_cost)(*arguments)
            self.seconds[name] += end - start
            self.flops[name] += flops
            self.bytes[name] += num_bytes
            self.own_seconds += time.perf_counter() - end
            return result

        return run

    def clear(self) -> None:
        for counter in (self.seconds, self.flops, self.bytes):
            counter.clear()
        self.own_seconds = 0.0


def no_cost(*arguments) -> tuple[int, int]:
    return 0, 0


def product_cost(rows: int, *weights) -> tuple[int, int]:
    elements = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    return 2 * rows * elements, sum(weight.nbytes for weight in weights)


def attention_cost(q, k_cache, v_cache, batch: AttentionBatch, scale, window, soft_cap) -> tuple[int, int]:
    starts, size, pairs, blocks = batch.query_starts, k_cache.shape[1], 0, set()
    for i, (table, length) in enumerate(zip(batch.block_tables.tolist(), batch.context_lens, strict=True)):
        first_query, most = length - (starts[i + 1] - starts[i]), window or length
        pairs += sum(min(position + 1, most) for position in range(first_query, length))
        blocks.update(table[max(0, first_query + 1 - most) // size : -(-length // size)])
    return 4 * pairs * q.shape[1] * q.shape[2], 2 * len(blocks) * k_cache[0].nbytes


COSTS = {
    "qkv": lambda x, spec, weights, *rest: product_cost(len(x), weights.q, weights.k, weights.v),
    "linear": lambda x, weight, *rest: product_cost(len(x), weight),
    "linear_add": lambda x, weight, residual: product_cost(len(x), weight),
    "gate_up": lambda x, gate, up, activation: product_cost(len(x), gate, up),
    "next_tokens": lambda hidden, weight, wanted: product_cost(len(wanted.rows), weight),
    "paged_attention": attention_cost,
}


def measure_best(loaded: LoadedModel) -> tuple[float, float]:
    """The highest GFLOP/s of a product and GB/s of reading memory seen in a few tries."""
    ops, dtype = loaded.backend.ops, loaded.model.dtype
    x = torch.randn(960, 1536).to(dtype)
    weight = ops.new_weight(1536, 1536, partial(torch.empty, dtype=dtype))
    weight.copy_(torch.randn(1536, 1536))
    product = min(seconds_of(lambda: ops.linear(x, weight)) for _ in range(30))
    large = ops.new_weight(2**17, 1536, partial(torch.empty, dtype=dtype))
    large.copy_(torch.zeros(2**17, 1536))
    reading = min(seconds_of(lambda: ops.linear(x[:1], large)) for _ in range(10))
    return 2 * 960 * 1536 * 1536 / product / 1e9, large.nbytes / reading / 1e9


def seconds_of(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def run_workload(engine: Engine, workload: Workload, meter: Meter) -> dict[str, list]:
    """For the steps that compute prompt tokens (`prompts`) and those that only decode (`decode`): their number, their
    seconds, and each op's seconds, floating-point operations and bytes."""
    params = SamplingParams(
        n=workload.n, max_tokens=workload.max_tokens, temperature=workload.temperature, seed=0, ignore_eos=True
    )
    engine.invalidate_prefix_cache()
    for i, prompt in enumerate(workload.prompts(engine.info.vocab_size)):
        engine.add(GenerateRequest(str(i), prompt, params))
    phases: dict[str, list] = defaultdict(lambda: [0, 0.0, Counter(), Counter(), Counter()])
    while engine.has_unfinished:
        meter.clear()
        before = engine.stats().computed_prompt_tokens
        seconds = seconds_of(engine.step)
        phase = phases["prompts" if engine.stats().computed_prompt_tokens > before else "decode"]
        phase[0] += 1
        phase[1] += seconds - meter.own_seconds
        for total, part in zip(phase[2:], (meter.seconds, meter.flops, meter.bytes), strict=True):
            total.update(part)
    return phases


def make_table(title: str, phase, best: tuple[float, float]) -> Table:
    steps, seconds, op_seconds, flops, num_bytes = phase
    table = Table(title=f"{title}: {steps} steps, {seconds / steps * 1e3:.2f} ms each", title_justify="left")
    for header in ("op", "ms/step", "share", "GFLOP/s", "of best", "GB/s", "of best"):
        table.add_column(header, justify="left" if header == "op" else "right")
    rows = [(name, op_seconds[name], flops[name], num_bytes[name]) for name in OPS if op_seconds[name]]
    rows.append(("Python", seconds - sum(op_seconds.values()), 0, 0))
    rows.append(("all", seconds, sum(flops.values()), sum(num_bytes.values())))
    for name, t, f, b in rows:
        arithmetic, reading = f / t / 1e9, b / t / 1e9
        table.add_row(
            name,
            f"{t / steps * 1e3:.2f}",
            f"{t / seconds:.0%}",
            *((f"{arithmetic:.0f}", f"{arithmetic / best[0]:.0%}") if f else ("", "")),
            *((f"{reading:.1f}", f"{reading / best[1]:.0%}") if b else ("", "")),
        )
    return table


def main(model: str = "smollm2", dtype: str = "auto") -> None:
    config = EngineConfig(model=model, dtype=dtype)
    loaded = load_model(config)
    console = Console(width=100)
    best = measure_best(loaded)
    console.print(f"{model}, {loaded.dtype_name}, {loaded.backend.name} ({loaded.backend.ops.instruction_set()})")
    console.print(f"seen at best: {best[0]:.0f} GFLOP/s in products, {best[1]:.1f} GB/s from memory")
    meter = Meter(loaded)
    engine = Engine(config, meter.loaded)
    gc.freeze()  # as a worker does
    for workload in (w for group in WORKLOADS.values() for w in group):
        run_workload(engine, workload, meter)  # memory is touched for the first time
        for name, phase in run_workload(engine, workload, meter).items():
            console.print(make_table(f"{workload.name}, {name}", phase, best))


if __name__ == "__main__":
    main(*sys.argv[1:])
