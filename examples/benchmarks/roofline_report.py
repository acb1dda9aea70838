"""Report how close each part of the work comes to the machine's limit, on each instruction set: `python
examples/benchmarks/roofline_report.py [MODEL [DTYPE]] [--dummy-weights] [--isa NAME] [--plot FILE.png]`.

The limit of an op is the time that the op would take at the machine's best rates: the time for its arithmetic at the
best rate of matrix products, or the time to move its bytes at the best rate of memory, whichever is longer. The rates,
arithmetic and bytes are those of `cpu_report.py`, which measures one instruction set in more detail. If an op in a
workload reaches a higher rate than the matrix products that `cpu_report.py` measures, the op's rate is taken as the
machine's best rate of matrix products. The limit of Python is 0.

The table has two lines for each kind of step. `engine` is the step of an engine, which runs all layers in one native
call. `op by op` is the same step with a call from Python for each op, so that each op can be timed. The limit of both
is the sum of the limits of the ops. Each of the following lines is about one op. `share`: the part of the time of `op
by op` that the op takes. `of limit`: the limit, divided by the time. `gap`: the part of the time that would be saved if
the op reached its limit. The largest gaps are the parts to improve. The picture has a bar for each kind of step, with a
piece for each op; the dark part of a piece is the op's limit. The number beside a bar is `of limit` of the engine.

Each instruction set is measured RUNS times, each time in a new process. The instruction sets take turns. All figures
are medians. Run the report on an otherwise idle machine.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import cpu_report as cpu  # noqa: E402

from trueroll.engine.config import EngineConfig  # noqa: E402
from trueroll.engine.engine import Engine  # noqa: E402
from trueroll.engine.running.loading import load_dummy, load_model  # noqa: E402
from trueroll.kernels.cpu.library import ISA_VARIABLE, load_library  # noqa: E402
from trueroll.rollout.tools.bench import WORKLOADS  # noqa: E402

RUNS = 3
ONE_RUN, ENGINE = "--one-run", "engine"


class Part(NamedTuple):
    """The time that one part of a step takes, and the limit of this time, in seconds."""

    seconds: float
    limit: float


Steps = dict[str, dict[str, Part]]
"""For each kind of step, such as `group, decode`, its parts by name. Most parts are ops. The part `Python` is the time
outside of ops. The part `engine` is the whole step of an engine that runs all layers in one native call.
"""


def parts_of(phase, best: dict[str, float], recurrences) -> dict[str, Part]:
    """Return the parts of one step. `phase`: the measurements of a kind of step, as returned by `run_workload` in
    cpu_report.py. `best`: the best rates, in units of 1e9 per second.
    """
    count, seconds, op_seconds, flops, num_bytes = phase
    found = {}
    for name, own in op_seconds.items():
        memory = best["updating" if name in recurrences else "reading"]
        limit = max(flops[name] / best["products"], num_bytes[name] / memory) / 1e9
        found[name] = Part(own / count, limit / count)
    return found | {"Python": Part((seconds - sum(op_seconds.values())) / count, 0.0)}


class Unmetered:
    """A `cpu_report.Meter` that measures nothing, for an engine that runs all layers in one call."""

    def __init__(self) -> None:
        self.seconds, self.flops, self.bytes = Counter[str](), Counter[str](), Counter[str]()
        self.own_seconds = 0.0

    def clear(self) -> None:
        pass


def one_run(model: str, dtype: str, dummy: bool) -> Steps:
    """Measure the workloads of `trueroll bench` in this process."""
    config = EngineConfig(model=model, dtype=dtype, backend="cpu")
    loaded = load_dummy(config) if dummy else load_model(config)
    best = {name: max(each.tries) for name, each in cpu.measure(cpu.limits(loaded)).items()}
    plain = phases_of(Engine(config, loaded), Unmetered())
    meter = cpu.Meter(loaded)
    phases = phases_of(Engine(config, meter.loaded), meter)
    best["products"] = max(best["products"], *map(best_products, phases.values()))
    found = {name: parts_of(phase, best, cpu.RECURRENCES) for name, phase in phases.items()}
    for name, parts in found.items():
        count, seconds, *_ = plain[name]
        parts[ENGINE] = Part(seconds / count, sum(part.limit for part in parts.values()))
    return found


def phases_of(engine: Engine, meter: cpu.Meter | Unmetered) -> dict[str, list]:
    """Run all workloads on an engine. Return what `run_workload` returns for each kind of step."""
    gc.freeze()  # a worker also freezes its objects
    phases = {}
    for workload in (w for group in WORKLOADS.values() for w in group):
        cpu.run_workload(engine, workload, meter)  # warm-up
        for name, phase in cpu.run_workload(engine, workload, meter).items():
            phases[f"{workload.name}, {name}"] = phase
    return phases


def best_products(phase) -> float:
    """Return the highest rate of arithmetic that any op reached, in units of 1e9 per second."""
    _, _, op_seconds, flops, _ = phase
    return max(flops[name] / seconds / 1e9 for name, seconds in op_seconds.items())


def run_on(isa: str, arguments: list[str]) -> Steps:
    command = [sys.executable, "-P", __file__, ONE_RUN, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {ISA_VARIABLE: isa})
    return {name: {op: Part(*part) for op, part in parts.items()} for name, parts in json.loads(done.stdout).items()}


def medians(runs: list[Steps]) -> Steps:
    """Return the medians of several runs."""
    return {
        name: {op: Part(*(median(run[name][op][i] for run in runs) for i in range(2))) for op in parts}
        for name, parts in runs[0].items()
    }


def make_table(isa: str, steps: Steps) -> Table:
    table = Table(title=f"{isa}, medians of {RUNS} runs", title_justify="left")
    for header in ("step", "op", "ms", "share", "of limit", "gap"):
        table.add_column(header, justify="left" if header in ("step", "op") else "right")
    for name, (engine, ops) in ((name, split(parts)) for name, parts in steps.items()):
        whole = Part(*(sum(part[i] for part in ops.values()) for i in range(2)))
        by_gap = sorted(ops.items(), key=lambda item: item[1].limit - item[1].seconds)
        large = [(op, part) for op, part in by_gap if part.seconds >= 0.01 * whole.seconds]
        for op, (seconds, limit) in [(ENGINE, engine), ("op by op", whole), *large]:
            of = seconds if op == ENGINE else whole.seconds
            shares = seconds / of, limit / seconds, (seconds - limit) / of
            title = name if op == ENGINE else ""
            table.add_row(title, op, f"{seconds * 1e3:.2f}", *(f"{share:.0%}" for share in shares))
        table.add_section()
    return table


def split(parts: dict[str, Part]) -> tuple[Part, dict[str, Part]]:
    """Split the parts of a step: return the part `engine`, and all other parts."""
    return parts[ENGINE], {op: part for op, part in parts.items() if op != ENGINE}


def draw(all_steps: dict[str, Steps], file: str) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    bars = [(isa, name, parts) for isa, steps in all_steps.items() for name, parts in steps.items()]
    figure = Figure(figsize=(10, 1.5 + 0.32 * len(bars)), layout="constrained")
    axes, colors = figure.subplots(), defaultdict[str, str](lambda: f"C{len(colors) % 10}")
    for place, (_, _, parts) in enumerate(bars):
        engine, ops = split(parts)
        whole, start = sum(part.seconds for part in ops.values()), 0.0
        axes.text(1.01, place, f"{engine.limit / engine.seconds:.0%}", va="center")
        for op, (seconds, limit) in ops.items():
            is_first = op not in colors
            color = colors[op]
            axes.barh(place, seconds / whole, left=start, color=color, alpha=0.35, label=op if is_first else None)
            axes.barh(place, min(limit, seconds) / whole, left=start, color=color)
            start += seconds / whole
    axes.set_yticks(range(len(bars)), [f"{isa}: {name}" for isa, name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("share of the step's time (dark: the limit); right: limit / time of an engine")
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(file, format="png")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("dtype", nargs="?", default="auto")
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--isa", action="append", help="an instruction set to measure (repeatable); default: all")
    parser.add_argument(ONE_RUN, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one_run:
        json.dump(one_run(given.model, given.dtype, given.dummy_weights), sys.stdout)
        return
    own = [given.model, given.dtype, *["--dummy-weights"] * given.dummy_weights]
    isas, runs = given.isa or load_library().instruction_sets(), defaultdict[str, list[Steps]](list)
    for _ in range(RUNS):
        for isa in isas:
            runs[isa].append(run_on(isa, own))
    found = {isa: medians(each) for isa, each in runs.items()}
    console = Console(width=100)
    console.print(f"{given.model}, {os.cpu_count()} cores")
    for isa, steps in found.items():
        console.print(make_table(isa, steps))
    if given.plot is not None:
        draw(found, given.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
