"""The records of a soak, the decision whether the soak has failed, and the plot of the records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

WARM_SECONDS = 600.0
"""Duration of the warm-up, in which memory may grow: this many seconds, but at most a third of the soak."""
MOST_MEMORY, MOST_LATENCY = 1.01, 1.2
"""The limits at the end of the soak: on memory, as a multiple of the memory after the warm-up; and on latency, as a
multiple of the latency at the beginning.
"""
PARTS = 6
LEAST_REQUESTS = 20
"""The fewest requests from which a 99th percentile is computed."""


@dataclass(frozen=True)
class Held:
    """The resources of a process at one moment: bytes of memory, open files, threads. `seconds`: time since the
    beginning of the soak.
    """

    seconds: float
    memory: int
    descriptors: int
    threads: int


@dataclass
class Records:
    """The records of a soak of `seconds` seconds.

    `held`: for each process, its resources over time. `latencies`: for each kind of request, pairs: the time at which a
    request was sent, and the seconds until its terminal reply. `sent`, `ended`: how many requests of each kind were
    sent, and how many of them got exactly one terminal reply. `done`: the counts of other events, such as pushes.
    `faults`: descriptions of requests that were lost, answered twice or answered with other bits.
    """

    seconds: float
    held: dict[str, list[Held]] = field(default_factory=dict)
    latencies: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def warm(self) -> float:
        """The time, in seconds since the beginning, from which memory must no longer grow."""
        return min(WARM_SECONDS, self.seconds / 3)

    def save(self, file: Path) -> None:
        """Write all records as JSON."""
        file.write_text(json.dumps(vars(self), default=asdict))


def percentile(latencies: Sequence[float], share: float) -> float:
    """Return the latency that a share of requests does not exceed."""
    return sorted(latencies)[min(len(latencies) - 1, int(share * len(latencies)))]


def judge(records: Records) -> list[str]:
    """Return the reasons why a soak has failed; an empty list if it has not failed."""
    found = [*records.faults[:10]]
    if (more := len(records.faults) - len(found)) > 0:
        found.append(f"{more} more faults")
    for kind, sent in records.sent.items():
        if records.ended[kind] != sent:
            found.append(f"{kind}: {sent} requests, but {records.ended[kind]} ends")
    for process, held in records.held.items():
        found += _grown(process, held, records)
    for kind, latencies in records.latencies.items():
        found += _slower(kind, latencies, records.seconds)
    return found


def _grown(process: str, held: Sequence[Held], records: Records) -> list[str]:
    part = (records.seconds - records.warm) / PARTS
    first = [each for each in held if records.warm <= each.seconds < records.warm + part]
    last = [each for each in held if each.seconds >= records.seconds - part]
    if not first or not last:
        return [f"{process}: there are too few records"]
    found = list[str]()
    before, after = (median(each.memory for each in part) for part in (first, last))
    if after > MOST_MEMORY * before:
        found.append(f"{process}: memory grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB")
    for name in ("descriptors", "threads"):
        before = median(getattr(each, name) for each in first)
        least = min(getattr(each, name) for each in last)
        if least > before:  # even the smallest number at the end exceeds the typical number at the beginning
            found.append(f"{process}: {name} grew from {before:g} to {least}")
    return found


def _slower(kind: str, latencies: Sequence[tuple[float, float]], seconds: float) -> list[str]:
    part = seconds / PARTS
    first = [latency for moment, latency in latencies if moment < part]
    last = [latency for moment, latency in latencies if moment >= seconds - part]
    if min(len(first), len(last)) < LEAST_REQUESTS:
        return [f"{kind}: {len(first)} and {len(last)} requests at the beginning and at the end are too few"]
    before, after = percentile(first, 0.99), percentile(last, 0.99)
    if after <= MOST_LATENCY * before:
        return []
    return [f"{kind}: the 99th percentile of latency grew from {before * 1e3:.0f} to {after * 1e3:.0f} ms"]


def draw(records: Records, file: Path) -> None:
    """Write a PNG with memory, open files, threads and latencies over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    memory, descriptors, threads, latency = figure.subplots(2, 2).flat
    for process, held in records.held.items():
        minutes = [each.seconds / 60 for each in held]
        memory.plot(minutes, [each.memory / held[0].memory for each in held], label=process)
        descriptors.plot(minutes, [each.descriptors for each in held], label=process)
        threads.plot(minutes, [each.threads for each in held], label=process)
    width = records.seconds / 30
    for color, (kind, latencies) in enumerate(records.latencies.items()):
        windows = [[late for at, late in latencies if i * width <= at < (i + 1) * width] for i in range(30)]
        shown = [(i, each) for i, each in enumerate(windows) if each]
        minutes = [(i + 0.5) * width / 60 for i, _ in shown]
        for share, style in ((0.5, ":"), (0.99, "-")):
            values = [percentile(each, share) for _, each in shown]
            label = f"{kind}, {share:.0%}"
            latency.semilogy(minutes, values, style, color=f"C{color % 10}", label=label if share > 0.5 else None)
    titles = ("memory, of that at the beginning", "open files", "threads", "latency in seconds: median, and 99%")
    for axes, title in zip((memory, descriptors, threads, latency), titles, strict=True):
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("minutes")
        axes.legend(fontsize="x-small")
    memory.axvline(records.warm / 60, linestyle="--", color="black", linewidth=0.8)
    figure.savefig(file)
