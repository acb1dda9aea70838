"""The pictures that commands write as PNG, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trueroll.errors import ConfigError

if TYPE_CHECKING:  # these modules import torch
    from ..auditing import Audit
    from ..client.client import RolloutClient
    from ..foreign.audit import EngineAudit

TITLE_WIDTH = 80
"""Maximum length of a line of a title, in characters."""


def check_can_plot() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plot: the package matplotlib is not installed; run pip install 'trueroll[plot]'") from None


def describe_worker(client: RolloutClient) -> str:
    """Return the model, dtype, backend and instruction set of a worker, for a title."""
    engine = client.health().engine or {}
    return "{model}, {dtype}, backend {backend} ({isa})".format(**engine)


def plot_differences(audits: Sequence[Audit], title: str, file: Path) -> None:
    """Write a PNG with one dot for each token. The dot shows the token's position in the sample, and the trainer's
    log-prob minus the worker's log-prob, in nats.

    Infinite differences are left out.
    """
    figure, axes = _figure(8, 4)
    for audit in audits:
        name, color = ("aligned trainer", "C0") if audit.is_aligned else ("without alignment", "C1")
        label = f"{name}: {audit.num_different} of {audit.num_tokens} differ, by {audit.largest:.2g} at most"
        places = [place for sample in audit.differences for place in range(len(sample))]
        values = [value for sample in audit.differences for value in sample]
        axes.scatter(places, values, s=10, color=color, label=label, zorder=2 + audit.is_aligned)
    _set_title(axes, title)
    axes.set_xlabel("token of the sample")
    axes.set_ylabel("trainer's log-prob - worker's (nats)")
    figure.legend(loc="outside lower center")
    _save(figure, file)


def plot_conditions(audit: EngineAudit, title: str, file: Path) -> None:
    """Write a PNG with one dot for each token of an audit of any engine, in one column per condition. The dot shows the
    token's position in the sample, and the trainer's log-prob minus the engine's log-prob, in nats.

    Infinite differences are left out.
    """
    figure, axes = _figure(10, 4)
    for trainer, color, order in (("plain", "C1", 2), ("aligned", "C0", 3)):
        distances = [getattr(each, trainer) for each in audit.conditions]
        places, values = list[float](), list[float]()
        for column, distance in enumerate(distances):
            for sample in distance.values:
                places += [column + 0.8 * i / len(sample) for i in range(len(sample))]
                values += sample.tolist()
        name = {"plain": "transformers", "aligned": "aligned trainer"}[trainer]
        label = f"{name}: {sum(each.num_different for each in distances)} of {len(values)} differ"
        axes.scatter(places, values, s=6, color=color, label=label, zorder=order)
    _set_title(axes, title)
    axes.set_xticks([i + 0.4 for i in range(len(audit.conditions))], [each.name for each in audit.conditions])
    axes.set_ylabel("trainer's log-prob - engine's (nats)")
    figure.legend(loc="outside lower center")
    _save(figure, file)


def plot_speeds(speeds: Mapping[tuple[str, str], Sequence[float]], title: str, file: Path) -> None:
    """Write a PNG with a group of bars for each workload. Each bar shows the tokens/s of one system.

    `speeds`: maps (system, workload) to the speeds of all runs. A bar shows the median speed. The line on the bar
    extends from the lowest to the highest speed.
    """
    systems, workloads = (list(dict.fromkeys(names)) for names in zip(*speeds, strict=True))
    figure, axes = _figure(max(7, 2 + 2 * len(workloads)), 4)
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        places = [x + (i - (len(systems) - 1) / 2) * width for x in range(len(workloads))]
        runs = [sorted(speeds[system, workload]) for workload in workloads]
        medians = [median(each) for each in runs]
        lines = [[m - each[0], each[-1] - m] for m, each in zip(medians, runs, strict=True)]
        axes.bar(places, medians, width, label=system, yerr=list(zip(*lines, strict=True)), capsize=3)
    _set_title(axes, title)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("generated tokens per second")
    axes.legend()
    _save(figure, file)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _set_title(axes: Any, title: str) -> None:
    """Set the title of a plot. The title may contain a $, as part of a model's name. Matplotlib must not read this $ as
    the beginning of a formula.
    """
    axes.set_title(textwrap.fill(title, TITLE_WIDTH), fontsize="medium", parse_math=False)


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"plot: cannot write {file}: {error.strerror or error}; give another file") from None
