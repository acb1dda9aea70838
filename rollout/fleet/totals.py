"""Combine the reports of several workers into one report, with the sums of all counts and the state of the least ready
worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from .. import protocol

_LEAST_READY_LAST: tuple[protocol.State, ...] = (
    "ready", "updating", "draining", "paused", "waking", "asleep", "dirty", "loading", "failed"
)  # fmt: skip
assert {*_LEAST_READY_LAST} == {*get_args(protocol.State)}


class FleetHealth(protocol.Health):
    """The health of a fleet. `troubles`: name and error of each joining worker that could not get the weights."""

    troubles: tuple[str, ...] = ()


def all_healths(healths: Sequence[protocol.Health], troubles: Sequence[str] = ()) -> FleetHealth:
    """Combine the health of one or more workers. Counts are summed over all workers. The result has the state of the
    least ready worker, the oldest weight version, the adapters that all workers serve, the smallest value of each
    limit, and the field `engine` of the first worker.
    """
    worst = max(healths, key=lambda health: _LEAST_READY_LAST.index(health.state))
    versions = [health.weight_version for health in healths if health.weight_version is not None]
    waits = [health.seconds_since_progress for health in healths if health.seconds_since_progress is not None]
    told: dict[str, Any] = dict(worst) | dict(
        instance=f"{len(healths)} workers",
        seconds_since_progress=max(waits, default=None),
        weight_version=min(versions, default=None),
        adapters=_common(health.adapters for health in healths),
        requests=_added(health.requests for health in healths),
        memory=_added(health.memory for health in healths),
        limits={name: min(health.limits[name] for health in healths) for name in worst.limits},
        engine=next((health.engine for health in healths if health.engine), None),
        sleeping=tuple(tag for tag in protocol.ALL_TAGS if any(tag in health.sleeping for health in healths)),
        push=next((health.push for health in healths if health.push), None),
        troubles=tuple(troubles),
    )
    return FleetHealth.model_construct(None, **told)


def all_stats(stats: Sequence[protocol.Stats]) -> protocol.Stats:
    """Sum the counters of one or more workers. A worker that is still loading its model has only service counters."""
    engines = [each.engine for each in stats if each.engine]
    engine = _merged(engines) if engines else {}
    return stats[0].model_copy(update=dict(engine=engine, service=_added(each.service for each in stats)))


def all_statuses(statuses: Sequence[protocol.Status]) -> protocol.Status:
    """Combine the statuses of several workers: the state of the least ready worker and the oldest weight version."""
    worst = max(statuses, key=lambda status: _LEAST_READY_LAST.index(status.state))
    return worst.model_copy(update={"weight_version": min(status.weight_version for status in statuses)})


def _common(adapters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the adapters that all workers serve, each with the oldest version."""
    each = list(adapters)
    names = [name for name in each[0] if all(name in found for found in each)]
    return {name: min(found[name] for found in each) for name in names}


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _merged(values: Sequence[Any]) -> Any:
    """Merge the values of several workers. Numbers are added, including numbers in nested maps and lists. `bytes`
    values are int64 arrays, which are added element by element. For values of other types, the result is the first
    worker's value.
    """
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merged([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(_merged_named(each) for each in zip(*values, strict=False))
    if isinstance(first, bytes):
        same = [np.frombuffer(value, "<i8") for value in values if len(value) == len(first)]
        return np.sum(same, axis=0).astype("<i8").tobytes() if first else first
    return sum(values) if isinstance(first, int | float) and not isinstance(first, bool) else first


def _merged_named(values: Sequence[Any]) -> Any:
    """Merge corresponding elements of several workers' lists, such as cache pools. The `window` of a pool identifies
    the pool, so windows are not added.
    """
    merged = _merged(values)
    if isinstance(merged, dict) and "window" in merged:
        merged["window"] = values[0]["window"]
    return merged
