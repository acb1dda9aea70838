"""Histograms of durations. One thread writes a histogram; any thread may read it without a lock. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the buckets, in seconds."""


@dataclass(frozen=True)
class Durations:
    """A snapshot of a histogram.

    - `counts[i]`: number of durations in (BOUNDS[i - 1], BOUNDS[i]]; the last count is for durations above all bounds
    - `total`: sum of all durations, in seconds
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    total: float = 0.0


class Histogram:
    """Counts durations. One thread calls `observe`. Any thread may read `durations`, because each update replaces the
    object atomically.
    """

    def __init__(self) -> None:
        self.durations = Durations()

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        counts, i = self.durations.counts, bisect_left(BOUNDS, seconds)
        self.durations = Durations((*counts[:i], counts[i] + 1, *counts[i + 1 :]), self.durations.total + seconds)


@dataclass(frozen=True)
class Timings:
    """The histograms of one worker.

    - `step`: a step of the engine
    - `stage`: a push from its start until it is verified
    - `commit_pause`: the pause of the engine during a commit
    - `push`: a push from its start until it is committed
    - `sleep`, `wake_up`: a call to `sleep` or `wake_up`. For a `sleep` with `drain`, the duration includes the wait for
      running requests.
    """

    step: Histogram = field(default_factory=Histogram)
    stage: Histogram = field(default_factory=Histogram)
    commit_pause: Histogram = field(default_factory=Histogram)
    push: Histogram = field(default_factory=Histogram)
    sleep: Histogram = field(default_factory=Histogram)
    wake_up: Histogram = field(default_factory=Histogram)
