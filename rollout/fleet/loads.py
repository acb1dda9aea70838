"""The load and the measured speed of each worker of a fleet.

Owns: the list of workers, the load and speed of each worker, and the sums of the loads and speeds of all workers. Does
not own: the choice of a worker for a group (`Placement`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

_MEMORY = 1 - 1 / 64
"""At each new measurement, the older measurements are multiplied by this factor. So about the last 64 groups determine
the speed.
"""
_PRIOR = 8.0
"""Number of virtual groups that are added to the measurements of each worker. The virtual groups have the fleet's
average speed, so the speed of a worker with few measurements is close to the average.
"""
_SLOWEST, _FASTEST = 0.05, 20.0
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # odd, so that the high bits of a product depend on all bits of a key


@dataclass(eq=False, slots=True)
class Worker:
    """A worker on which groups are placed.

    - `position`: index in `Rows.workers`; -1 if the worker is new or was removed
    - `load`: total cost of the `count` groups in flight
    - `done`, `busy`: cost of the finished groups, and seconds with groups in flight; in both sums, older values count
      less
    - `since`: the time up to which `busy` is counted
    - `speed`: speed relative to the average speed of the fleet
    - `pressure`: load divided by speed
    - `alone`: a tuple that contains only this worker
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
    """All current workers as arrays. `load`, `speed`: the sums of the loads and speeds of all workers. `pressure`:
    float64 [num_workers].
    """

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
        """For each worker, return a hash of `key` and the worker's own key. The result is a uint64 array [num_workers],
        which the next call to this method overwrites.
        """
        np.bitwise_xor(self._keys, np.uint64(key), out=self._scores)
        return np.multiply(self._scores, _FACTOR, out=self._scores)

    def idlest(self, avoid: Collection[str]) -> Worker | None:
        """Among the workers that are not in `avoid`, return the worker with the least pressure. Return None if all
        workers are in `avoid`.
        """
        places = self.pressure.argsort(kind="stable") if avoid else [self.pressure.argmin()]
        return next((worker for place in places if (worker := self.workers[place]).name not in avoid), None)


class Loads:
    """The loads of all workers. `workers`: the workers by name. `rows`: the `Rows` that the last call to `gather`
    returned.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.rows = Rows([])
        self._is_stale = False
        self._done, self._busy = 0.0, 0.0  # sums over all workers

    def add(self, name: str) -> None:
        """Add a worker. A lost worker may be added again with the same name."""
        if name in self.workers:
            raise ValueError(f"worker {name!r} is already in the fleet")
        self.workers[name] = Worker(name, xxhash.xxh3_64_intdigest(name.encode()))
        self._is_stale = True

    def remove(self, name: str) -> Worker:
        """Remove a worker and its load. Return the worker."""
        gone = self.workers.pop(name)
        gone.position = -1
        self._done -= gone.done
        self._busy -= gone.busy
        self._is_stale = True
        return gone

    def gather(self) -> Rows:
        """Return the `Rows` of all workers. Rebuild the `Rows` if workers were added or removed since the last call."""
        if self._is_stale:
            self.rows, self._is_stale = Rows(self.workers.values()), False
        return self.rows

    def begin(self, worker: Worker, cost: float, now: float) -> None:
        """Add a group to the load of a worker. `now`: seconds."""
        if worker.count == 0:
            worker.since = now
        self._change(worker, 1, cost)

    def end(self, worker: Worker, cost: float) -> None:
        """Subtract a group from the load of a worker."""
        self._change(worker, -1, -cost)

    def measure(self, worker: Worker, cost: float, now: float) -> None:
        """Update the speed of a worker that has finished a group. `now`: seconds."""
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
