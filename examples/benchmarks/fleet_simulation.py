"""Simulate the placement of requests on a fleet: `python examples/benchmarks/fleet_simulation.py --out FOLDER`.

`--help` lists the options.

A client requests groups of samples from many workers. `trueroll.rollout.fleet.placement` chooses a worker for each
group. Each simulated worker has the engine's scheduler and prefix cache, called in the engine's order, but no model.
The clock is simulated: a table gives the duration of a step for the number of tokens that the step computes. Some
workers are slower. Workers fail at random moments, lose all state, and come back empty after a while. The client
requests the lost groups again from other workers.

A prompt has three parts: tokens that all prompts share, one of many prefixes, and tokens of its own. The popularity of
the prefixes follows Zipf's law. Only the placement `oracle` knows the lengths of samples in advance. The client keeps a
fixed number of groups in flight. When a group ends, the client requests the next group. The only information that the
client gets from a worker is the finished groups.

The table compares `trueroll.rollout.fleet.placement` with other placements, on the same groups and the same failures:

- `random`, `round robin`, and `least loaded`, which picks the worker with the fewest groups in flight;
- `oracle`, which knows all requests, the length of each sample, and the speed of each worker. The oracle sorts the
  groups by prefix and gives each worker one contiguous piece of the sorted groups, sized by the worker's speed. A
  worker that has begun all groups of its piece takes groups from other workers.

`bound` is a limit that no placement can beat. For the hit rate, the bound assumes one unlimited cache and no failure.
With an unlimited cache, the fleet computes each shared full block once, and all other prompts find the block in the
cache. For the time, the bound assumes the best possible hit rate, steps that are as full as possible, and workers that
are busy until the end.

The hit rate is the share of prompt tokens that workers found in their caches. The hit rate counts every prompt that a
worker began to compute, including repeats after failures. The cost of a placement is the time spent in `beginnings`,
`place` and `finish`. As in `timeit`, Python's garbage collector is off, because a collection would visit the objects of
the whole simulated fleet.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from trueroll.engine.cache.prefix_cache import PrefixCache
from trueroll.engine.outputs.open_requests import DrawRecord
from trueroll.engine.scheduling.scheduler import Scheduler
from trueroll.engine.scheduling.sequence import Generation, Sequence, takers_of
from trueroll.rollout.fleet.placement import Placed, Placement, beginnings

STEP_SECONDS = {1: 0.010, 32: 0.011, 256: 0.019, 1024: 0.048, 2048: 0.088}
"""Seconds of a step by the number of tokens that the step computes; interpolated linearly."""
SLOWNESS = (1.0, 1.0, 1.0, 1.6)
"""Factors on the time of a step, assigned to the workers in turn."""
BLOCK_SIZE = 16
BLOCKS = 2048
MAX_SEQS = 32
MAX_TOKENS = 1024
SAMPLES = 4
SHORTEST, LONGEST = 16, 64
"""Smallest and largest number of tokens in a sample."""
COMMON = 64
"""Number of tokens that all prompts begin with."""
PREFIX = 128, 896
"""Tokens of the shortest and the longest prefix."""
OWN = 16, 48
"""Smallest and largest number of tokens that only one prompt has, at its end."""
EXPONENT = 1.0
GROUPS_PER_PREFIX = 10
RUNNING = MAX_SEQS // SAMPLES
"""Maximum number of groups that a worker computes at a time."""
UNDER_WAY = 2 * RUNNING
"""Groups that the client keeps in flight on each worker."""
FAILING = 0.05
"""Failures per worker during a run."""
DOWN = 0.1
"""Duration of a failure, as a share of the run."""
_DRAW = DrawRecord()


class Workload:
    """The groups, numbered in the order in which they are requested.

    `prefixes`: int64 [groups], the prefix of each group. `lengths`: int64 [groups, SAMPLES], the number of tokens of
    each sample.
    """

    def __init__(self, groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count = max(1, groups // GROUPS_PER_PREFIX)
        popularity = np.arange(1, count + 1) ** -EXPONENT
        self.prefixes = rng.choice(count, groups, p=popularity / popularity.sum())
        self.lengths = rng.integers(SHORTEST, LONGEST, (groups, SAMPLES), endpoint=True)
        common = rng.integers(2**31, size=COMMON, dtype=np.int32)
        sizes = rng.integers(*PREFIX, count, endpoint=True)
        self._beginnings = [np.concatenate((common, rng.integers(2**31, size=n, dtype=np.int32))) for n in sizes]
        self._ends = [rng.integers(2**31, size=n, dtype=np.int32) for n in rng.integers(*OWN, groups, endpoint=True)]

    def __len__(self) -> int:
        return len(self.prefixes)

    def prompt(self, group: int) -> np.ndarray:
        """Return the prompt of a group: int32 [prompt_len]."""
        return np.concatenate((self._beginnings[self.prefixes[group]], self._ends[group]))

    def shared(self, group: int) -> int:
        """Return the number of prompt tokens in the full blocks before the prompt's own tokens. Other prompts can share
        these blocks.
        """
        return len(self._beginnings[self.prefixes[group]]) // BLOCK_SIZE * BLOCK_SIZE

    def prompt_len(self, group: int) -> int:
        """Return the number of tokens of a prompt."""
        return len(self._beginnings[self.prefixes[group]]) + len(self._ends[group])

    def distinct(self) -> int:
        """Return the number of tokens in the blocks that `shared` counts, over all prompts. Blocks that several prompts
        share are counted once.
        """
        _, first = np.unique(self.prefixes, return_index=True)
        return COMMON + sum(self.shared(group) - COMMON for group in first)

    def least_seconds(self, slowness: Iterable[float]) -> float:
        """Return a lower bound on the run time of any fleet, in seconds.

        Each line through two neighboring points of the table is a lower bound on the time of a step. A step computes
        one token for at most MAX_SEQS samples.
        """
        decoded = int((self.lengths - 1).sum())
        own = sum(self.prompt_len(group) - self.shared(group) for group in range(len(self)))
        computed = decoded + own + self.distinct()
        lines = [_line(low, high) for low, high in pairwise(STEP_SECONDS)]
        alone = max(base * decoded / MAX_SEQS + slope * computed for base, slope in lines)
        return alone / sum(1 / each for each in slowness)


def _line(low: int, high: int) -> tuple[float, float]:
    """Return the fixed cost of a step and the cost per token, from the line through two points of the table."""
    slope = (STEP_SECONDS[high] - STEP_SECONDS[low]) / (high - low)
    return STEP_SECONDS[low] - slope * low, slope


def step_seconds(num_tokens: int) -> float:
    """Return the seconds of a step, interpolated from the table."""
    counts = list(STEP_SECONDS)
    high = max(1, bisect_left(counts, num_tokens))
    base, slope = _line(counts[high - 1], counts[high])
    return base + slope * num_tokens


@dataclass(eq=False, slots=True)
class Sample:
    """A sample as the scheduler sees it. `left`: number of tokens still to be sampled."""

    group: int
    order: tuple[int, int]
    left: int
    draw: DrawRecord = _DRAW

    def renew_kv(self) -> None:
        """Do nothing: the weights never change."""


@dataclass
class Counts:
    """Token counts over the prompts that workers began to compute.

    `asked`: all prompt tokens. `hits`: tokens found in a cache. `shared`: the tokens that `Workload.shared` counts.
    """

    asked: int = 0
    hits: int = 0
    shared: int = 0


class Worker:
    """Scheduler and prefix cache of one worker, from the worker's start to its failure or to the end of the run."""

    def __init__(self, workload: Workload, slowness: float) -> None:
        self.slowness = slowness
        self.groups: dict[int, Sequence] = {}
        self.is_busy = False
        self._workload = workload
        self._scheduler = Scheduler(PrefixCache({None: BLOCKS}, BLOCK_SIZE), MAX_SEQS, MAX_TOKENS)
        self._left: dict[int, int] = {}
        self._arrivals = 0

    def add(self, group: int, prompt: np.ndarray) -> None:
        """Queue a group."""
        samples = [
            Sample(group, (self._arrivals, i), length)
            for i, length in enumerate(self._workload.lengths[group].tolist())
        ]
        self._arrivals += 1
        chain, tokens = self._scheduler.cache.identity.new_chain(None), array("i", prompt.tobytes())
        sequence = Sequence(samples[0].order, tokens, len(tokens), chain, Generation(samples))
        self.groups[group], self._left[group] = sequence, len(samples)
        self._scheduler.waiting.add(sequence)

    def begin_step(self) -> float:
        """Plan a step and return its duration in seconds."""
        scheduler = self._scheduler
        self._chunks = scheduler.schedule()
        scheduler.running.take_block_copies()
        self._takers = takers_of(self._chunks, scheduler.running.lanes)
        scheduler.advance(self._chunks)
        return self.slowness * step_seconds(int((self._chunks.ends - self._chunks.starts).sum()))

    def end_step(self) -> list[int]:
        """End the step and return the groups that it completed."""
        scheduler, chunks, takers = self._scheduler, self._chunks, self._takers
        scheduler.publish(chunks)
        decodes = takers.decodes
        drawn = [sample.order[1] for sample in takers.samples[: len(decodes)]]
        scheduler.running.lanes.accept(
            decodes, np.array(drawn, np.int64), takers.counts[: len(decodes)], np.zeros(len(decodes), np.bool_)
        )
        ended = []
        for sequence, sample in zip(decodes.sequences, takers.samples, strict=False):
            if self._is_over(sample):
                scheduler.finish(sequence)
                ended.append(sample.group)
        for place, group in takers.prompts:
            ended += self._part(chunks.sequences[place], takers.samples[group.start : group.stop])
        return [group for group in ended if self._is_whole(group)]

    def _part(self, sequence: Sequence, samples: list[Sample]) -> list[int]:
        going_on = [sample for sample in samples if not self._is_over(sample)]
        for sample in going_on[1:]:
            self._scheduler.fork(sequence, sample, sample.order[1])
        if going_on:
            self._scheduler.running.lanes.begin(sequence, going_on[0], going_on[0].order[1])
        else:
            self._scheduler.finish(sequence)
        return [sample.group for sample in samples if sample not in going_on]

    def _is_over(self, sample: Sample) -> bool:
        sample.left -= 1
        return sample.left == 0

    def _is_whole(self, group: int) -> bool:
        self._left[group] -= 1
        return self._left[group] == 0

    def count(self, group: int, counts: Counts) -> None:
        """Remove a finished or lost group, and add the group's prompt to `counts`."""
        hits = self.groups.pop(group).num_cached_tokens
        if hits is not None:
            counts.asked += self._workload.prompt_len(group)
            counts.hits += hits
            counts.shared += self._workload.shared(group)


class Policy(ABC):
    """Assigns groups to workers. Groups and workers are identified by number.

    `load`: int64 [workers], groups in flight. `is_up`: bool [workers]. `seconds`: total time spent on choosing workers.
    """

    def __init__(self, workload: Workload, slowness: Iterable[float]) -> None:
        self.workload = workload
        self.slowness = np.array([*slowness])
        self.load = np.zeros(len(self.slowness), np.int64)
        self.is_up = np.ones(len(self.slowness), np.bool_)
        self.seconds = 0.0
        self.choices = 0
        self._waiting = deque(range(len(workload)))
        self._under_way = 0

    def send(self, now: float) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the groups to request now, each with its worker and its prompt."""
        while self._waiting and self._under_way < UNDER_WAY * len(self.load):
            group = self._waiting.popleft()
            prompt = self.workload.prompt(group)
            start = time.perf_counter()
            worker = self.choose(group, prompt, now)
            self.seconds += time.perf_counter() - start
            self.choices += 1
            self.load[worker] += 1
            self._under_way += 1
            yield group, worker, prompt

    @abstractmethod
    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        """Return a worker that is up."""

    def finish(self, group: int, worker: int, now: float) -> None:
        """Record that a worker finished a group."""
        self.load[worker] -= 1
        self._under_way -= 1

    def lose(self, worker: int, groups: list[int]) -> None:
        """Record that a worker failed. The worker's groups in flight must be requested again."""
        self._waiting.extendleft(reversed(groups))
        self._under_way -= len(groups)
        self.load[worker] = 0
        self.is_up[worker] = False

    def join(self, worker: int) -> None:
        """Record that a failed worker is back."""
        self.is_up[worker] = True


class Random(Policy):
    """Picks a random worker that is up."""

    def __init__(self, workload: Workload, slowness: Iterable[float]) -> None:
        super().__init__(workload, slowness)
        self._random = random.Random(0)

    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        while not self.is_up[worker := self._random.randrange(len(self.load))]:
            pass
        return worker


class RoundRobin(Policy):
    """Picks the workers in turn."""

    _last = -1

    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        self._last = (self._last + 1) % len(self.load)
        while not self.is_up[self._last]:
            self._last = (self._last + 1) % len(self.load)
        return self._last


class LeastLoaded(Policy):
    """Picks a worker with the fewest groups in flight."""

    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        return int(np.where(self.is_up, self.load, UNDER_WAY * len(self.load)).argmin())


class Placing(Policy):
    """Picks workers with the placement of the fleet client."""

    def __init__(self, workload: Workload, slowness: Iterable[float]) -> None:
        super().__init__(workload, slowness)
        self.placement = Placement(capacity=len(self.load) * BLOCKS * BLOCK_SIZE // 64, free_load=RUNNING)
        self._placed: dict[int, Placed] = {}
        for worker in range(len(self.load)):
            self.placement.add(str(worker))

    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        placed = self.placement.place(beginnings(prompt), now)
        assert placed is not None
        self._placed[group] = placed
        return int(placed.worker)

    def finish(self, group: int, worker: int, now: float) -> None:
        super().finish(group, worker, now)
        start = time.perf_counter()
        self.placement.finish(self._placed.pop(group), now)
        self.seconds += time.perf_counter() - start

    def lose(self, worker: int, groups: list[int]) -> None:
        super().lose(worker, groups)
        self.placement.remove(str(worker))

    def join(self, worker: int) -> None:
        super().join(worker)
        self.placement.add(str(worker))


class Oracle(Policy):
    """Picks workers with knowledge of everything except the failures. Each worker has a list of groups, ordered by
    prefix. A worker with an empty list takes the last group of the longest list.
    """

    def __init__(self, workload: Workload, slowness: Iterable[float]) -> None:
        super().__init__(workload, slowness)
        per_token = step_seconds(MAX_SEQS) / MAX_SEQS
        per_prompt_token = (step_seconds(MAX_TOKENS) - step_seconds(MAX_SEQS)) / (MAX_TOKENS - MAX_SEQS)
        order = workload.prefixes.argsort(kind="stable").tolist()
        seconds, before = [], None
        for group in order:
            found = workload.shared(group) if workload.prefixes[group] == before else 0
            before = workload.prefixes[group]
            computed = per_prompt_token * (workload.prompt_len(group) - found)
            seconds.append(computed + per_token * workload.lengths[group].sum())
        ends, shares = np.cumsum(seconds), np.cumsum(1 / self.slowness)
        cuts = np.searchsorted(ends, ends[-1] * shares / shares[-1])
        self._lists = [deque(order[start:end]) for start, end in pairwise([0, *cuts[:-1].tolist(), len(order)])]
        self._remaining = np.array([len(each) for each in self._lists])
        self._with_room = set(range(len(self.load)))

    def send(self, now: float) -> Iterator[tuple[int, int, np.ndarray]]:
        for worker in sorted(self._with_room):
            while self.is_up[worker] and self.load[worker] < UNDER_WAY and self._remaining.any():
                group = self._take(worker)
                self.load[worker] += 1
                yield group, worker, self.workload.prompt(group)
        self._with_room.clear()

    def choose(self, group: int, prompt: np.ndarray, now: float) -> int:
        raise NotImplementedError

    def _take(self, worker: int) -> int:
        """Return the next group of the worker's list, or the last group of the longest list if the worker's list is
        empty.
        """
        if self._remaining[worker]:
            self._remaining[worker] -= 1
            return self._lists[worker].popleft()
        longest = int((self._remaining * self.slowness).argmax())
        self._remaining[longest] -= 1
        return self._lists[longest].pop()

    def finish(self, group: int, worker: int, now: float) -> None:
        super().finish(group, worker, now)
        self._with_room.add(worker)

    def lose(self, worker: int, groups: list[int]) -> None:
        super().lose(worker, [])
        self._lists[worker].extendleft(reversed(groups))
        self._remaining[worker] += len(groups)
        self._with_room.update(range(len(self.load)))

    def join(self, worker: int) -> None:
        super().join(worker)
        self._with_room.add(worker)


class Simulation:
    """A fleet on a simulated clock. `failures`: the time and the worker of each failure."""

    def __init__(self, policy: Policy, failures: Iterable[tuple[float, int]], down: float) -> None:
        self.counts = Counts()
        self.failed = 0
        self.asked_again = 0
        self.now = 0.0
        self._policy = policy
        self._down = down
        self._workers: list[Worker | None] = [Worker(policy.workload, each) for each in policy.slowness.tolist()]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        for moment, worker in failures:
            self._push(moment, self._fail, worker)

    def run(self) -> None:
        """Run until the last group is finished."""
        self._left = len(self._policy.workload)
        self._send()
        while self._left:
            self.now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
            self._send()

    def _push(self, moment: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (moment, self._pushed, happen, arguments))

    def _send(self) -> None:
        for group, number, prompt in self._policy.send(self.now):
            worker = self._workers[number]
            assert worker is not None
            worker.add(group, prompt)
            self._go_on(number, worker)

    def _go_on(self, number: int, worker: Worker) -> None:
        """Schedule the next step of an idle worker, after all groups sent at the current time have arrived."""
        if worker.groups and not worker.is_busy:
            worker.is_busy = True
            self._push(self.now, self._begin, number, worker)

    def _begin(self, number: int, worker: Worker) -> None:
        if self._workers[number] is worker:
            self._push(self.now + worker.begin_step(), self._end, number, worker)

    def _end(self, number: int, worker: Worker) -> None:
        if self._workers[number] is not worker:
            return  # the worker failed during the step
        for group in worker.end_step():
            worker.count(group, self.counts)
            self._policy.finish(group, number, self.now)
            self._left -= 1
        worker.is_busy = False
        self._go_on(number, worker)

    def _fail(self, number: int) -> None:
        worker = self._workers[number]
        if worker is None:
            return
        lost = list(worker.groups)
        for group in lost:
            worker.count(group, self.counts)
        self._workers[number] = None
        self._policy.lose(number, lost)
        self.failed += 1
        self.asked_again += len(lost)
        self._push(self.now + self._down, self._join, number)

    def _join(self, number: int) -> None:
        self._workers[number] = Worker(self._policy.workload, self._policy.slowness[number].item())
        self._policy.join(number)


@dataclass(frozen=True)
class Result:
    """The result of a run with one policy. `best_hit_rate`: the bound for the prompts requested in this run."""

    name: str
    hit_rate: float
    best_hit_rate: float
    seconds: float
    failed: int
    asked_again: int
    cost: float


POLICIES = {
    "this placement": Placing,
    "oracle": Oracle,
    "least loaded": LeastLoaded,
    "round robin": RoundRobin,
    "random": Random,
}


def simulate(name: str, workload: Workload, workers: int, seed: int) -> Result:
    """Run one policy. The result depends only on the arguments, except for `cost`."""
    slowness = [SLOWNESS[i % len(SLOWNESS)] for i in range(workers)]
    run = workload.least_seconds(slowness)
    chance = random.Random(seed)
    failures = [(chance.uniform(0, run), chance.randrange(workers)) for _ in range(round(FAILING * workers))]
    policy = POLICIES[name](workload, slowness)
    simulation = Simulation(policy, failures, DOWN * run)
    simulation.run()
    counts = simulation.counts
    return Result(
        name,
        counts.hits / counts.asked,
        (counts.shared - workload.distinct()) / counts.asked,
        simulation.now,
        simulation.failed,
        simulation.asked_again,
        policy.seconds / max(1, policy.choices),
    )


def report(results: list[Result], bound: float) -> Table:
    """Return a table with a row for each run."""
    oracle = next(result for result in results if result.name == "oracle")
    table = Table("", "hit rate", "of the best", "makespan s", "to oracle's", "to bound", "asked again", "us a choice")
    for each in results:
        table.add_row(
            each.name,
            f"{each.hit_rate:.4f}",
            f"{each.hit_rate / each.best_hit_rate:.1%}",
            f"{each.seconds:.3f}",
            f"{each.seconds / oracle.seconds:.3f}",
            f"{each.seconds / bound:.3f}",
            f"{each.asked_again:,}",
            f"{each.cost * 1e6:.1f}" if each.cost else "",
        )
    table.add_row("bound", f"{oracle.best_hit_rate:.4f}", "100.0%", f"{bound:.3f}", "", "1.000", "", "")
    return table


def draw(results: list[Result], bound: float, path: Path) -> None:
    """Plot hit rates and makespans as bars, and the bounds as lines."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    rates, times = figure.subplots(1, 2)
    names = [result.name for result in results]
    rates.bar(names, [result.hit_rate for result in results])
    rates.axhline(max(result.best_hit_rate for result in results), linestyle="--", color="black")
    rates.set_ylabel("prompt tokens found in a cache")
    times.bar(names, [result.seconds for result in results])
    times.axhline(bound, linestyle="--", color="black")
    times.set_ylabel("makespan in simulated seconds")
    for axes in (rates, times):
        axes.tick_params("x", rotation=30)
    figure.savefig(path)


def main(
    out: Annotated[Path, typer.Option(help="Folder for plot.png.")],
    workers: Annotated[int, typer.Option(min=2, help="Number of workers.")] = 100,
    groups: Annotated[int, typer.Option(min=1, help="Number of groups, with 4 samples each.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and failures.")] = 1,
) -> None:
    """Simulate a fleet and report prefix hit rates and makespans of several placements."""
    gc.disable()
    console = Console(width=120)
    workload = Workload(groups, seed)
    bound = workload.least_seconds(SLOWNESS[i % len(SLOWNESS)] for i in range(workers))
    results = []
    for name in POLICIES:
        start = time.process_time()
        results.append(simulate(name, workload, workers, seed))
        console.print(f"{name}: {time.process_time() - start:.0f} s of CPU time")
    console.print(f"{workers:,} workers, {groups:,} groups of {SAMPLES}, {results[0].failed} failures")
    console.print(report(results, bound))
    out.mkdir(parents=True, exist_ok=True)
    draw(results, bound, out / "plot.png")


if __name__ == "__main__":
    typer.run(main)
