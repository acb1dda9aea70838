"""Metrics of a whole fleet in one scrape: the metrics of each worker, with the label `worker`, and the metrics of the
fleet.

docs/operations.md describes the metrics of a worker, and docs/fleet.md describes the metrics of a fleet. A test checks
that both files in `docs` match the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from .. import protocol
from ..client.membership import Standing
from ..monitoring.metrics import WorkerMetrics


@dataclass(frozen=True)
class WorkerReport:
    """The state of a worker, as the metrics report it. `standing`: None while the worker starts. `health`, `stats`:
    None before the first report. `restarts`: number of replacements. `failed_hand_overs`: number of failed attempts to
    give the worker the fleet's weights.
    """

    standing: Standing | None
    health: protocol.Health | None
    stats: protocol.Stats | None
    restarts: int
    failed_hand_overs: int = 0


class FleetMetrics:
    """A collector of metrics. `reports`: function that returns a map from worker names to current reports."""

    def __init__(self, reports: Callable[[], Mapping[str, WorkerReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        reports = self._reports()
        standings = Counter(worker.standing or "starting" for worker in reports.values())
        workers = GaugeMetricFamily("trueroll_fleet_workers", "Workers of the fleet.", labels=["standing"])
        for standing in ("starting", *get_args(Standing)):
            workers.add_metric([standing], standings[standing])
        yield workers
        restarts = CounterMetricFamily("trueroll_fleet_restarts", "Workers that were replaced.", labels=["worker"])
        for name, worker in reports.items():
            restarts.add_metric([name], worker.restarts)
        yield restarts
        failures = CounterMetricFamily(
            "trueroll_fleet_failed_hand_overs",
            "Failed attempts to give a worker the weights of the fleet.",
            labels=["worker"],
        )
        for name, worker in reports.items():
            failures.add_metric([name], worker.failed_hand_overs)
        yield failures
        yield from _labelled(reports)


def _labelled(reports: Mapping[str, WorkerReport]) -> Iterator[Metric]:
    """Yield the metrics of all workers, each series with the label `worker`."""
    families: dict[str, Metric] = {}
    for name, worker in reports.items():
        if worker.health is None or worker.stats is None:
            continue
        for metric in WorkerMetrics(worker.health, worker.stats).collect():
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [_with_label(sample, name) for sample in metric.samples]
    yield from families.values()


def _with_label(sample: Sample, worker: str) -> Sample:
    return sample._replace(labels={"worker": worker, **sample.labels})
