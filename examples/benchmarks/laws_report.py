"""Report how costs grow with sizes: `python examples/benchmarks/laws_report.py`. `--help` lists the options.

Each law is measured at several sizes. The rounds alternate among the sizes, and the report uses medians. The *growth*
is the exponent e with which the cost grows as size^e: the slope of a straight line through the logarithms of sizes and
costs. The line is fitted twice, to all sizes and to the larger half of the sizes, where constant costs matter least.
The larger slope counts. A law holds if its growth is at most 1.1, so that the cost is at most linear. For a prompt that
is not in the cache, the size is the number of pairs that attention computes: each token with itself and with every
earlier token.

Costs are CPU time of the process that does the work, or bytes of memory, so other processes on the machine have little
effect. Only the laws about the start of a worker and about the memory of blocks depend on the machine's free memory.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import laws_engine as engine  # noqa: E402
import laws_served as served  # noqa: E402

from trueroll.rollout.garbage import bound_pauses  # noqa: E402
from trueroll.rollout.worker.process import raise_descriptor_limit  # noqa: E402

MOST_GROWTH = 1.1
"""The largest growth that counts as linear: 1, plus a tolerance of 10%."""
Measure = Callable[[int], dict[str, float]]


def pairs(size: int) -> float:
    """Return the number of pairs that attention computes for a sequence: each token with itself and with every earlier
    token.
    """
    return size * (size + 1) / 2


@dataclass(frozen=True)
class Experiment:
    """An experiment that measures the costs of one or more laws. `unit`: the unit of a size, such as tokens. `open`:
    takes the sizes and returns a context manager, which yields the function that measures one size. `quick`: the sizes
    for `--quick`. `work`: for laws with another unit than the size, that unit and the number of units for a size.
    """

    unit: str
    open: Callable[[Sequence[int]], AbstractContextManager[Measure]]
    sizes: Sequence[int]
    quick: Sequence[int]
    work: dict[str, tuple[str, Callable[[int], float]]] = field(default_factory=dict)


def plain(measure: Measure) -> Callable[[Sequence[int]], AbstractContextManager[Measure]]:
    """Return a value for the field `open` of an experiment that needs no preparation."""
    return lambda sizes: nullcontext(measure)


def of_params(name: str, params: Callable[[int], dict[str, Any]]) -> Callable[..., AbstractContextManager[Measure]]:
    return plain(engine.of_params(name, params))


def ids(size: int) -> tuple[int, ...]:
    return tuple(range(1, size + 1))


def words(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((i, i + 1, i + 2) for i in ids(size))


KB = 1024
EXPERIMENTS = {
    "context": Experiment(
        "token",
        plain(engine.context),
        [KB << i for i in range(8)],
        [256, 512, KB],
        {"context: miss": ("pair", pairs)},
    ),
    "long": Experiment("token", plain(engine.long_among_short), [KB << i for i in range(8)], [256, 512, KB]),
    "waiting": Experiment("request", plain(engine.waiting), [1, 10, 100, 1000, 10_000, 100_000], [4, 16, 64]),
    "same": Experiment("request", plain(engine.same_prefix), [10, 100, 1000, 10_000], [4, 16, 64]),
    "blocks": Experiment("block", plain(engine.blocks), [10**4, 10**5, 10**6, 10**7], [10**3, 10**4]),
    "group": Experiment("sample", plain(engine.group), [1, 4, 16, 64, 256, 1024], [1, 4, 16]),
    "stops": Experiment("string", of_params("params: stop strings", engine.stop_strings), [1, 4, 16, 64], [1, 4]),
    "stop_tokens": Experiment(
        "token id", of_params("params: stop tokens", engine.stop_tokens), [1, 16, 256, 1024, 4000], [1, 16]
    ),
    "biases": Experiment(
        "token id",
        of_params("params: logit biases", lambda n: dict(logit_bias=dict.fromkeys(ids(n), 1.0))),
        [1, 16, 256, 1024, 4096],
        [1, 16],
    ),
    "allowed": Experiment(
        "token id",
        of_params("params: allowed tokens", lambda n: dict(allowed_token_ids=ids(n))),
        [1, 16, 256, 2048, 8000],
        [1, 16],
    ),
    "bad_words": Experiment(
        "word",
        of_params("params: bad words", lambda n: dict(bad_words_token_ids=words(n))),
        [1, 16, 64, 256, 1024],
        [1, 16],
    ),
    "tops": Experiment(
        "token", of_params("params: top log-probs", lambda n: dict(top_logprobs=n)), [1, 16, 64, 256, 1024], [1, 16]
    ),
    "targets": Experiment(
        "token",
        of_params("params: target tokens", lambda n: dict(target_token_ids=ids(n))),
        [1, 16, 64, 256, 1024],
        [1, 16],
    ),
    "masks": Experiment(
        "token",
        of_params("params: sampling mask", lambda n: dict(top_k=n, return_sampling_mask=True)),
        [1, 16, 64, 256, 1024, 4096],
        [1, 16],
    ),
    "spans": Experiment("span", plain(engine.spans), [1, 4, 16, 64, 256, 1024], [1, 16]),
    "adapters": Experiment("adapter", plain(engine.adapters), [1, 4, 16, 64], [1, 2]),
    "clients": Experiment("client", lambda sizes: served.clients(), [1, 10, 100, 1000], [1, 8]),
    "connections": Experiment("client", lambda sizes: served.connections(), [1, 10, 100, 1000], [1, 8]),
    "sessions": Experiment(
        "session",
        lambda sizes: served.sessions(),
        [16, 64, 256, 1024],
        [8, 16],
        {"sessions: answers of one": ("message read", lambda n: pairs(n // 4))},
    ),
    "fleet": Experiment("worker", lambda sizes: served.fleet(max(sizes)), [1, 2, 4, 8, 16], [1, 2]),
    "placement": Experiment("worker", plain(served.simulated), [10, 30, 100, 300, 1000], [2, 4]),
    "start": Experiment("MB", plain(served.start), [16, 64, 256, 1024], [1, 2]),
}


@dataclass(frozen=True)
class Law:
    """The median cost of a law for each size, in seconds or bytes. `works`: the number of units for each size."""

    name: str
    unit: str
    sizes: Sequence[int]
    works: Sequence[float]
    costs: Sequence[float]

    @property
    def growth(self) -> float:
        """The exponent with which the cost grows."""
        larger = len(self.works) // 2
        return max(_slope(self.works, self.costs), _slope(self.works[larger:], self.costs[larger:]))

    @property
    def holds(self) -> bool:
        return self.growth <= MOST_GROWTH

    @property
    def is_memory(self) -> bool:
        return self.name.endswith("memory")

    def shown(self, i: int) -> str:
        """Return the cost of a unit at the size with index i."""
        cost = self.costs[i] / self.works[i]
        if self.is_memory:
            return f"{cost:,.0f} B" if cost < 10_000 else f"{cost / 2**20:,.2f} MB"
        scale, name = next(each for each in _SCALES if cost >= each[0] or each is _SCALES[-1])
        return f"{cost / scale:.3g} {name}"


_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def _slope(works: Sequence[float], costs: Sequence[float]) -> float:
    if len(works) < 2:
        return -math.inf
    return float(np.polyfit(np.log(works), np.log(costs), 1)[0])


def measure(experiment: Experiment, sizes: Sequence[int], rounds: int) -> Iterator[Law]:
    """Measure an experiment, and yield its laws."""
    found: dict[str, list[list[float]]] = {}
    with experiment.open(sizes) as run:
        for turn in range(rounds):
            order = [*range(len(sizes))]
            for i in order if turn % 2 else reversed(order):
                for name, cost in run(sizes[i]).items():
                    found.setdefault(name, [[] for _ in sizes])[i].append(cost)
    for name, costs in found.items():
        unit, work = experiment.work.get(name, (experiment.unit, float))
        yield Law(name, unit, sizes, [work(size) for size in sizes], [median(each) for each in costs])


def make_table(laws: Sequence[Law]) -> Table:
    """Return a table with a row for each law."""
    table = Table("law", "sizes", "cost of a unit, at each size", "per", "growth", "verdict")
    for law in laws:
        costs = ", ".join(law.shown(i) for i in range(len(law.sizes)))
        verdict = "at most linear" if law.holds else "MORE THAN LINEAR"
        table.add_row(law.name, _short(law.sizes), costs, law.unit, f"{law.growth:.2f}", verdict)
    return table


def _short(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size // KB}k" if size >= KB and size % KB == 0 else f"{size:,}" for size in sizes)


def draw(laws: Sequence[Law], file: Path) -> None:
    """Write a PNG with a plot for each experiment: cost against work, with both axes logarithmic. A line with the slope
    of linear growth ends at the largest cost of each law.
    """
    from matplotlib.figure import Figure

    topics = list(dict.fromkeys(law.name.split(":")[0] for law in laws))
    columns = min(3, len(topics))
    rows = -(-len(topics) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    for topic, axes in zip(topics, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        own = [law for law in laws if law.name.startswith(f"{topic}:")]
        for color, law in enumerate(own):
            name = law.name.partition(": ")[2]
            axes.loglog(law.works, law.costs, marker="o", color=f"C{color}", label=f"{name}: {law.growth:.2f}")
            ends = [law.works[0], law.works[-1]]
            axes.loglog(ends, [law.costs[-1] * end / ends[-1] for end in ends], ":", color=f"C{color}", linewidth=0.8)
        axes.set_title(topic, fontsize="medium")
        axes.set_xlabel(" or ".join(dict.fromkeys(f"{law.unit}s" for law in own)))
        axes.set_ylabel("seconds, or bytes" if any(law.is_memory for law in own) else "seconds")
        axes.legend(fontsize="x-small")
    for axes in figure.axes[len(topics) :]:
        axes.set_visible(False)
    figure.savefig(file, dpi=70)


@contextmanager
def timed(console: Console, name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    console.print(f"{name}: {time.monotonic() - start:.0f} s", highlight=False)


def _thaw() -> None:
    """Let the interpreter free all objects at exit. Libraries print a warning about objects that are not freed."""
    gc.callbacks.clear()
    gc.unfreeze()


def main(
    chosen: Annotated[list[str] | None, typer.Argument(help=f"Experiments: {', '.join(EXPERIMENTS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each size.")] = 3,
    most: Annotated[int, typer.Option(min=1, help="Leave out larger sizes.")] = 2**62,
    quick: Annotated[bool, typer.Option("--quick", help="One measurement of a few small sizes.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plots to this PNG.")] = None,
) -> None:
    """Measure how costs grow with sizes. Exit with 1 if a cost grows more than linearly."""
    console = Console(width=max(120, int(os.environ.get("COLUMNS", 160))))
    names = [name for name in EXPERIMENTS if not chosen or any(fnmatch(name, pattern) for pattern in chosen)]
    if unknown := [each for each in chosen or () if not any(fnmatch(name, each) for name in EXPERIMENTS)]:
        raise typer.BadParameter(f"no experiment is named {unknown[0]!r}; choose from {', '.join(EXPERIMENTS)}")
    bound_pauses()  # a worker also bounds the pauses of garbage collection
    atexit.register(_thaw)
    raise_descriptor_limit()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    laws = list[Law]()
    for name in names:
        experiment = EXPERIMENTS[name]
        sizes = [size for size in (experiment.quick if quick else experiment.sizes) if size <= most]
        with timed(console, name):
            laws += measure(experiment, sizes, 1 if quick else rounds)
    console.print(make_table(laws))
    if plot is not None:
        draw(laws, plot)
    if not quick and not all(law.holds for law in laws):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
