"""The number of tokens to draft: chosen to maximize the expected number of tokens per second.

A step of R rows takes t(R) seconds and is expected to yield E tokens. Suppose that a drafted token is accepted with
probability p. The step yields more tokens per second with the token's row than without it if (E + p) / t(R + 1) > E /
t(R). `StepCosts` measures t in earlier steps, and the drafter estimates p. Under load, each further row makes a step so
much slower that nothing is drafted. The bits of samples do not depend on t, E or p.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_MOST_KEPT = 15
"""The median is taken over this many durations, because some steps take much longer when the machine is busy."""
_STEPS_UNTIL_FORGOTTEN, _STEPS_UNTIL_STALE = 512, 32
_OPTIMISM = 0.25
"""The estimate for a step with more rows than any measured step assumes that each further row costs this share of an
average measured row. The estimate is low, so that the larger step is tried and then measured.
"""
_STEPS_IN_VAIN, _STEPS_PER_TRIAL = 16, 16
_KEPT_GAIN, _LEAST_GAIN = 0.95, 0.25
"""The factor by which earlier gains are multiplied after each step, and the gain, in tokens, above which drafting is
worthwhile.
"""
_LEAST_CHANCE, _LEAST_SPEED_UP = 0.02, 1.03


def bucket_of(rows: int) -> int:
    """Return the size class of a step: the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `rows`."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


class StepCosts:
    """For each size class of steps, keeps the median of the last few durations in seconds. Old measurements are
    forgotten.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._steps, self._ended = 0, 0.0

    def is_known(self, rows: int) -> bool:
        """Return whether one of the last `_STEPS_UNTIL_STALE` steps had about `rows` rows."""
        return self._measured_at.get(bucket_of(rows), -_STEPS_UNTIL_STALE) > self._steps - _STEPS_UNTIL_STALE

    def record(self, rows: int, started: float, ended: float) -> None:
        """Record a step with `rows` rows. `started`: when the planning of the step began. `ended`: when the step's
        results arrived.

        If the previous step ended later than `started`, the duration counts from the end of the previous step.
        """
        seconds, self._ended = max(ended - max(started, self._ended), 1e-6), ended
        self._steps += 1
        bucket = bucket_of(rows)
        last = self._last.setdefault(bucket, deque(maxlen=_MOST_KEPT))
        last.append(seconds)
        self._seconds[bucket] = median(last)
        self._measured_at[bucket] = self._steps
        for old in [old for old, at in self._measured_at.items() if at < self._steps - _STEPS_UNTIL_FORGOTTEN]:
            del self._last[old], self._seconds[old], self._measured_at[old]

    def seconds(self, rows: int) -> float:
        """Return the estimated duration, in seconds, of a step with `rows` rows. More rows never give a shorter
        estimate. At least one step must have been recorded before this call.
        """
        bucket = bucket_of(rows)
        known = sorted(self._seconds)
        place = bisect_left(known, bucket)
        if place == 0:
            return self._seconds[known[0]]
        below = known[place - 1]
        least = max(self._seconds[size] for size in known[:place])
        if place == len(known):
            return least * (1 + _OPTIMISM * (bucket / below - 1))
        above = known[place]
        most = max(self._seconds[above], least)
        return least + (most - least) * (bucket - below) / (above - below)

    def price(self, rows: int, drafted: int, tokens: int) -> float:
        """Return the cost of a drafted row: the number of tokens that steps without drafts would yield in the extra
        time that the row takes. The step has `drafted` drafted rows and `rows` other rows.

        `tokens`: the number of tokens that the step yields without drafts.
        """
        plain = self.seconds(rows)
        return (self.seconds(rows + drafted) - plain) / plain * tokens / drafted if drafted else 0.0


class Pause:
    """The pauses in drafting for one sequence.

    The gain is the sum of the gains that `record` gets for the steps. The gains of earlier steps count less with each
    step. Drafting pauses after `_STEPS_IN_VAIN` consecutive steps
    in which the gain is at most `_LEAST_GAIN` tokens. During the pause, the sequence drafts only in every
    `_STEPS_PER_TRIAL`th step. The pause ends with the first of these trial steps after which the gain is above
    `_LEAST_GAIN` tokens. All sequences make their trials in the same steps, so that the steps between trials can be
    planned ahead.
    """

    def __init__(self) -> None:
        self._gain, self._in_vain = 0.0, 0

    def allows_drafts(self, step: int) -> bool:
        """Return whether to draft in the step with the number `step`."""
        return self._in_vain < _STEPS_IN_VAIN or step % _STEPS_PER_TRIAL == 0

    def record(self, gain: float) -> None:
        """Record the gain of drafts in a step: accepted tokens, minus the tokens that could be drawn in the time that
        the drafts took.
        """
        self._gain = _KEPT_GAIN * self._gain + gain
        self._in_vain = 0 if self._gain > _LEAST_GAIN else self._in_vain + 1
        if self._in_vain >= _STEPS_IN_VAIN:
            self._gain = max(self._gain, 0.0)  # so that the first trial that gains tokens ends the pause


def choose(chances: Mapping[int, Sequence[float]], costs: StepCosts, rows: int, tokens: int) -> dict[int, int]:
    """For each lane (running sequence), return how many drafted tokens to compute in a step that has `rows` rows
    without drafts.

    `chances`: as `Drafter.expect` returns them. `tokens`: the number of tokens that the step yields without drafts.
    Rows of drafted tokens are added in descending order of their probability of acceptance, up to the number of rows
    that yields the most tokens per second. Nothing is drafted unless the step with drafts yields at least
    `_LEAST_SPEED_UP` times as many tokens per second as a step without drafts.
    """
    heap = [(-expected[0], lane, 0) for lane, expected in chances.items()]
    heapq.heapify(heap)
    expected, taken, chosen = float(tokens), list[int](), 0
    best = _LEAST_SPEED_UP * tokens / costs.seconds(rows)
    while heap and -heap[0][0] > _LEAST_CHANCE:
        chance, lane, place = heapq.heappop(heap)
        taken.append(lane)
        expected -= chance
        if place + 1 < len(chances[lane]):
            heapq.heappush(heap, (chance * chances[lane][place + 1], lane, place + 1))
        if (rate := expected / costs.seconds(rows + len(taken))) > best:
            best, chosen = rate, len(taken)
    counts = dict.fromkeys(chances, 0)
    for lane in taken[:chosen]:
        counts[lane] += 1
    return counts
