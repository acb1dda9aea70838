"""How much is under way on each worker of a fleet, and how fast each finishes.

Owns: the workers that groups are placed on, their loads, their measured speeds, and the sums of all. Does not own which
worker a group goes to (`Placement`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

_MEMORY = 1 - 1 / 64
"""What a measurement of speed counts for after the next one, so that about the last 64 groups count."""
_PRIOR = 8.0
"""How many groups at the pace of the fleet are counted beside those that a worker finished."""
_SLOWEST, _FASTEST = 0.05, 20.0
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # odd: the high bits of a product with it depend on all bits of a key


@dataclass(eq=False, slots=True)
class Worker:
    """`position`: among all; -1 if it is gone, or new. `load`: the cost of what is under way, which is `count` groups.
    `done`: the cost of what it finished in `busy` seconds with something under way, the latest counting most; `since`:
    up to when that is counted. `speed`: relative to the fleet's; `pressure`: load by speed. `alone`: it and no other.
    """

    name: str
    key: int
    position: int = -1
    load: float = 0.0
    count: int = 0
    done: float = 0.0
    busy: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    pressure: float = 0.0
    alone: tuple[Worker, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.alone = (self,)


class Rows:
    """The workers that there are, in arrays. `load`, `speed`: the sums of theirs. `pressure`: float64 [workers]."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = list(workers)
        for position, worker in enumerate(self.workers):
            worker.position = position
        self.load = sum(worker.load for worker in self.workers)
        self.speed = sum(worker.speed for worker in self.workers) or 1.0
        self.pressure = np.array([worker.pressure for worker in self.workers])
        self._keys = np.array([worker.key for worker in self.workers], np.uint64)
        self._scores = np.empty_like(self._keys)

    def rank(self, key: int) -> np.ndarray:
        """A hash of the key and each worker: uint64 [workers]. It is the same memory each time."""
        np.bitwise_xor(self._keys, np.uint64(key), out=self._scores)
        return np.multiply(self._scores, _FACTOR, out=self._scores)

    def idlest(self, avoid: Collection[str]) -> Worker | None:
        """The worker with the least load that need not be avoided."""
        places = self.pressure.argsort(kind="stable") if avoid else [self.pressure.argmin()]
        return next((worker for place in places if (worker := self.workers[place]).name not in avoid), None)


class Loads:
    """`workers`: by name. `rows`: as of the last call of `gather`."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.rows = Rows([])
        self._is_stale = False
        self._done, self._busy = 0.0, 0.0  # of all workers

    def add(self, name: str) -> None:
        """A worker joins. One that was lost may come back under its name."""
        if name in self.workers:
            raise ValueError(f"worker: expected a name that is not in the fleet, found {name!r} there")
        self.workers[name] = Worker(name, xxhash.xxh3_64_intdigest(name.encode()))
        self._is_stale = True

    def remove(self, name: str) -> Worker:
        """A worker is gone, and what was under way there."""
        gone = self.workers.pop(name)
        gone.position = -1
        self._done -= gone.done
        self._busy -= gone.busy
        self._is_stale = True
        return gone

    def gather(self) -> Rows:
        """The rows of all workers, made anew if workers have joined or gone."""
        if self._is_stale:
            self.rows, self._is_stale = Rows(self.workers.values()), False
        return self.rows

    def begin(self, worker: Worker, cost: float, now: float) -> None:
        """A group is under way on a worker from now on."""
        if worker.count == 0:
            worker.since = now
        self._change(worker, 1, cost)

    def end(self, worker: Worker, cost: float) -> None:
        """A group is under way no longer."""
        self._change(worker, -1, -cost)

    def measure(self, worker: Worker, cost: float, now: float) -> None:
        """A worker has finished a group, which tells how fast it is."""
        if worker.position < 0:
            return
        done, busy = worker.done, worker.busy
        worker.done = _MEMORY * done + cost
        worker.busy = _MEMORY * busy + now - worker.since
        worker.since = now
        self._done += worker.done - done
        self._busy += worker.busy - busy
        expected = worker.busy * self._done / self._busy if self._busy > 0 else worker.done
        speed = (worker.done + _PRIOR * cost) / (expected + _PRIOR * cost)
        before, worker.speed = worker.speed, min(max(speed, _SLOWEST), _FASTEST)
        self.rows.speed += worker.speed - before

    def _change(self, worker: Worker, count: int, cost: float) -> None:
        worker.count += count
        before, worker.load = worker.load, worker.load + cost if worker.count else 0.0
        worker.pressure = worker.load / worker.speed
        if worker.position >= 0:
            self.rows.load += worker.load - before
            self.rows.pressure[worker.position] = worker.pressure
