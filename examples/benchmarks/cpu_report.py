"""Report how much time each part of the work takes on a CPU: `python examples/benchmarks/cpu_report.py
[--dummy-weights] [MODEL [DTYPE]]`.

The report first measures the machine's best rates for matrix products, memory reads, and in-place updates of memory. If
the model has recurrent layers (gated delta nets or state spaces), experts or latent attention, the report also measures
each of these parts alone. Then each workload of `trueroll bench` runs on an engine in this process. For every op, a
table shows the time, the rate of arithmetic, and the rate of the bytes that the op must read at least once per step.
The table also shows both rates as shares of the machine's best rates. The bytes of a recurrence include the states that
it writes. The remaining time of a step is Python: scheduling, bookkeeping, and preparing the step's tensors.

With `--dummy-weights`, MODEL is a configuration, as in `trueroll bench`. To time each op, the report runs the layers op
by op. A normal engine runs all layers in one native call, which makes its steps a few percent faster.
"""

import dataclasses
import gc
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.engine.running.loading import LoadedModel, load_dummy, load_model
from trueroll.kernels.contract import AttentionBatch, StateBatch, new_caches
from trueroll.kernels.layer import run_layers
from trueroll.kernels.specs import DeltaNetSpec, ExpertsSpec, LatentSpec, Mamba2Spec, RecurrentSpec
from trueroll.rollout.tools.bench import WORKLOADS, Workload

RECURRENCES = ("delta_rule", "state_space")
OPS = ("embedding", "rotation", "qkv", "paged_attention", "convolve", *RECURRENCES, "gate_mul", "linear")
OPS = (*OPS, "project_back", "gate_up", "route", "experts", "rmsnorm", "next_tokens", "head_linear")


class Meter:
    """Wraps the ops of the model `loaded`, and sums the seconds, floating-point operations and bytes of each op."""

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
        def run(*arguments, **named):
            start = time.perf_counter()
            result = op(*arguments, **named)
            end = time.perf_counter()
            flops, num_bytes = COSTS.get(name, no_cost)(*arguments, **named)
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


def no_cost(*arguments, **named) -> tuple[int, int]:
    return 0, 0


def product_cost(rows: int, *weights) -> tuple[int, int]:
    elements = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    return 2 * rows * elements, sum(weight.nbytes for weight in weights)


def attention_cost(
    q, k_cache, v_cache, batch: AttentionBatch, scale, window=None, soft_cap=None, sinks=None
) -> tuple[int, int]:
    starts, size, pairs, blocks = batch.query_starts, k_cache.shape[1], 0, set()
    for i, (table, length) in enumerate(zip(batch.block_tables.tolist(), batch.context_lens, strict=True)):
        first_query, most = length - (starts[i + 1] - starts[i]), window or length
        pairs += sum(min(position + 1, most) for position in range(first_query, length))
        blocks.update(table[max(0, first_query + 1 - most) // size : -(-length // size)])
    sizes = q.shape[2] + v_cache.shape[3]
    return 2 * pairs * q.shape[1] * sizes, len(blocks) * (k_cache[0].nbytes + v_cache[0].nbytes)


def experts_cost(x, spec: ExpertsSpec, weights, experts, gates, shared=None, groups=1) -> tuple[int, int]:
    """Return the cost of the chosen experts for all rows of `x`. The weights of each chosen expert are read once."""
    matrices = weights.gate_up, weights.down
    elements = sum(weight.shape[0] * weight.shape[1] for weight in matrices) // spec.num_experts
    num_bytes = sum(weight.nbytes for weight in matrices) // spec.num_experts
    return 2 * experts.numel() * elements, len(experts.unique()) * num_bytes


def recurrence_cost(multiply_adds: int, x, states, batch: StateBatch) -> tuple[int, int]:
    """Return the cost of a recurrence: one decay and some multiply-adds per token and element of the state."""
    slots = len(batch.writes) + int((batch.reads >= 0).sum())
    return (1 + 2 * multiply_adds) * len(x) * states[0].numel(), slots * states[0].nbytes


def delta_rule_cost(qkv, b, a, spec: DeltaNetSpec, weights, states, batch: StateBatch) -> tuple[int, int]:
    return recurrence_cost(3, qkv, states, batch)


def state_space_cost(xbc, steps, spec: Mamba2Spec, weights, states, batch: StateBatch) -> tuple[int, int]:
    return recurrence_cost(2, xbc, states, batch)


COSTS = {
    "qkv": lambda x, spec, weights, *rest: product_cost(len(x), weights.q, weights.k, weights.v),
    "linear": lambda x, weight, *rest: product_cost(len(x), weight),
    "head_linear": lambda x, weight: product_cost(len(x), weight),
    "project_back": lambda x, weight, *rest: product_cost(len(x), weight),
    "gate_up": lambda x, gate, up, activation: product_cost(len(x), gate, up),
    "next_tokens": lambda hidden, weight, wanted, *rest: product_cost(len(wanted.rows), weight),
    "paged_attention": attention_cost,
    "delta_rule": delta_rule_cost,
    "state_space": state_space_cost,
    "experts": experts_cost,
}


@dataclasses.dataclass
class Rates:
    """Measures the rate of some work several times. `amount`: number of operations or bytes of one run. `tries`: the
    measured rates, in units of 1e9 per second.
    """

    run: Callable[[], object]
    amount: float
    tries: list[float] = dataclasses.field(default_factory=list)

    def try_once(self) -> None:
        """Run the work once to warm the caches, then run it once more and time it."""
        self.run()
        self.tries.append(self.amount / seconds_of(self.run) / 1e9)


def measure(rates: dict[str, Rates]) -> dict[str, Rates]:
    """Measure each rate 15 times, alternating between the rates, so that all rates see the same load on the machine."""
    for _ in range(15):
        for each in rates.values():
            each.try_once()
    return rates


def limits(loaded: LoadedModel) -> dict[str, Rates]:
    """Return the machine's best rates.

    `products`: matrix products with weights that stay in the CPU's cache. `reading`: weights read once. `updating`:
    float32 values updated in place.
    """
    ops, dtype = loaded.backend.ops, loaded.model.dtype
    x = torch.randn(960, 1536).to(dtype)
    weight = ops.new_weight(1536, 1536, partial(torch.empty, dtype=dtype))
    weight.copy_(torch.randn(1536, 1536))
    large = ops.new_weight(2**17, 1536, partial(torch.empty, dtype=dtype))
    large.copy_(torch.zeros(2**17, 1536))
    values = torch.zeros(2**26)
    return {
        "products": Rates(lambda: ops.linear(x, weight), 2 * 960 * 1536 * 1536),
        "reading": Rates(lambda: ops.linear(x[:1], large), large.nbytes),
        "updating": Rates(lambda: values.mul_(1.0), 2 * values.nbytes),
    }


def recurrences(loaded: LoadedModel) -> dict[str, Rates]:
    """Return the rates of a model's recurrences, in a step with 64 decoding rows and for a 512-token prompt."""
    if not loaded.model.spec.recurrent:
        return {}
    decodes, (_, num_bytes) = recurrence(loaded, [1] * 64)
    prompt, (flops, _) = recurrence(loaded, [512])
    return {"recurrence, 64 rows": Rates(decodes, num_bytes), "recurrence, prompt": Rates(prompt, flops)}


def recurrence(loaded: LoadedModel, lens: list[int]) -> tuple[Callable[[], object], list[int]]:
    """Return a function that runs one step of all recurrences, and the step's cost [floating-point operations, bytes].
    Sequence i has `lens[i]` rows, and each layer has its own states.
    """
    dtype, count = loaded.model.dtype, len(lens)
    calls, slots = [], torch.arange(count)
    batch = StateBatch([0, *torch.tensor(lens).cumsum(0).tolist()], slots, slots)
    for layer in loaded.model.layers:
        spec = layer.spec.mixer
        if not isinstance(spec, RecurrentSpec):
            continue
        is_delta = isinstance(spec, DeltaNetSpec)
        sizes = spec.channels, *([spec.num_value_heads] * 2 if is_delta else [spec.num_heads])
        inputs = [torch.randn(sum(lens), size).to(dtype) for size in sizes]
        arguments = *inputs, spec, layer.mixer, torch.zeros(count, *spec.state_shape), batch
        calls.append(("delta_rule" if is_delta else "state_space", arguments))
    costs = [COSTS[name](*arguments) for name, arguments in calls]
    ops = loaded.backend.ops
    return lambda: [getattr(ops, name)(*arguments) for name, arguments in calls], [
        sum(each) for each in zip(*costs, strict=True)
    ]


def mixtures(loaded: LoadedModel) -> dict[str, Rates]:
    """Return the rate of the experts of all layers in a step with 64 decoding rows. The model's router chooses the
    experts.
    """
    ops, model, calls = loaded.backend.ops, loaded.model, []
    x = torch.randn(64, model.spec.hidden_size).to(model.dtype)
    for layer in model.layers:
        if isinstance(spec := layer.spec.mlp, ExpertsSpec):
            logits = ops.linear(x, layer.mlp.router, layer.mlp.router_bias)
            calls.append((x, spec, layer.mlp, *ops.route(logits, spec)))
    num_bytes = sum(experts_cost(*call)[1] for call in calls)
    return {"experts, 64 rows": Rates(lambda: [ops.experts(*call) for call in calls], num_bytes)} if calls else {}


def latents(loaded: LoadedModel) -> dict[str, Rates]:
    """Return the rates of one layer's latent attention: in a decode step with 8k tokens of context, and in a prompt of
    2k tokens.
    """
    mixer = next((each for each in loaded.model.spec.attentions if isinstance(each, LatentSpec)), None)
    if mixer is None:
        return {}
    found = {}
    for name, queries, context in (("latent, decode at 8k", 1, 8192), ("latent, prompt of 2k", 2048, 2048)):
        empty = partial(torch.zeros, dtype=loaded.model.dtype)
        caches = new_caches(loaded.backend.ops, mixer, context // 16, 16, empty)
        q = torch.randn(queries, mixer.num_heads, mixer.head_dim).to(loaded.model.dtype)
        call = q, *caches, AttentionBatch([0, queries], [context], torch.arange(context // 16)[None]), mixer.scale
        found[name] = Rates(partial(loaded.backend.ops.paged_attention, *call), attention_cost(*call)[0])
    return found


def seconds_of(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def run_workload(engine: Engine, workload: Workload, meter: Meter) -> dict[str, list]:
    """Run a workload. Return one list for steps that compute prompt tokens (`prompts`) and one for all other steps
    (`decode`).

    Each list is [number of steps, seconds, and per op: seconds, floating-point operations, bytes].
    """
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


def make_rates_table(rates: dict[str, Rates]) -> Table:
    """Return a table of the rates. For recurrences, experts and latent attention, the table also shows the share of the
    rate that limits the op.
    """
    limited_by = {"recurrence, 64 rows": "updating", "recurrence, prompt": "products", "experts, 64 rows": "reading"}
    limited_by |= {"latent, decode at 8k": "products", "latent, prompt of 2k": "products"}
    table = Table(title="15 measurements each, alternating", title_justify="left")
    for header in ("", "unit", "best", "median", "of best", "of median"):
        table.add_column(header, justify="left" if header in ("", "unit") else "right")
    for name, each in rates.items():
        limit = limited_by.get(name, name)
        found, most = ((max(of.tries), median(of.tries)) for of in (each, rates[limit]))
        shares = [f"{a / b:.0%}" if limit != name else "" for a, b in zip(found, most, strict=True)]
        unit = "GFLOP/s" if limit == "products" else "GB/s"
        table.add_row(name, unit, *(f"{rate:.1f}" for rate in found), *shares)
    return table


def make_table(title: str, phase, best: dict[str, float]) -> Table:
    steps, seconds, op_seconds, flops, num_bytes = phase
    table = Table(title=f"{title}: {steps} steps, {seconds / steps * 1e3:.2f} ms each", title_justify="left")
    for header in ("op", "ms/step", "share", "GFLOP/s", "of best", "GB/s", "of best"):
        table.add_column(header, justify="left" if header == "op" else "right")
    rows = [(name, op_seconds[name], flops[name], num_bytes[name]) for name in OPS if op_seconds[name]]
    rows.append(("Python", seconds - sum(op_seconds.values()), 0, 0))
    rows.append(("all", seconds, sum(flops.values()), sum(num_bytes.values())))
    for name, t, f, b in rows:
        arithmetic, moving = f / t / 1e9, b / t / 1e9
        memory = best["updating" if name in RECURRENCES else "reading"]
        table.add_row(
            name,
            f"{t / steps * 1e3:.2f}",
            f"{t / seconds:.0%}",
            *((f"{arithmetic:.0f}", f"{arithmetic / best['products']:.0%}") if f else ("", "")),
            *((f"{moving:.1f}", f"{moving / memory:.0%}") if b else ("", "")),
        )
    return table


DUMMY = "--dummy-weights"


def main(model: str = "smollm2", dtype: str = "auto", dummy: bool = False) -> None:
    config = EngineConfig(model=model, dtype=dtype)
    loaded = load_dummy(config) if dummy else load_model(config)
    console = Console(width=100)
    rates = measure(limits(loaded) | recurrences(loaded) | mixtures(loaded) | latents(loaded))
    best = {name: max(each.tries) for name, each in rates.items()}
    console.print(f"{model}, {loaded.dtype_name}, {loaded.backend.name} ({loaded.backend.ops.instruction_set()})")
    console.print(f"best rates: {best['products']:.0f} GFLOP/s in products, {best['reading']:.1f} GB/s from memory")
    console.print(make_rates_table(rates))
    meter = Meter(loaded)
    engine = Engine(config, meter.loaded)
    gc.freeze()  # a worker also freezes its objects
    for workload in (w for group in WORKLOADS.values() for w in group):
        run_workload(engine, workload, meter)  # a warm-up run, which touches memory for the first time
        for name, phase in run_workload(engine, workload, meter).items():
            console.print(make_table(f"{workload.name}, {name}", phase, best))


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != DUMMY), dummy=DUMMY in sys.argv)
