"""Which worker of a fleet a group of samples goes to.

| owned here                                                | owned elsewhere                                      |
|-----------------------------------------------------------|------------------------------------------------------|
| which worker got which beginnings of prompts              | what a worker's cache holds (`engine.cache`)         |
| how much is under way on each, and how fast each finishes | when a group is sent, aborted or asked again         |
| which workers there are                                   | which are alive, and what they serve                 |

A group stays together. It goes where the longest known beginning of its prompt went, so that prompts with a common
beginning, and the later turns of a conversation, meet the KV that is there. One whose beginning nobody got yet goes to
one of the two workers that rank highest for it, by rendezvous hashing (Thaler, Ravishankar 1998), the one with less
load: clients that know nothing of each other choose of the same two, and a worker that joins or leaves changes the
order of no others. So does one whose known beginning half the fleet got, which speaks for nobody in particular.

No worker gets more while it has more than `1 + SLACK` times its share of all that is under way (Mirrokni, Thorup,
Zadimoghaddam 2018), unless all others are to be avoided; shares are as the workers' speeds, which are measured. Where
the workers with the longest known beginning are full, those with a shorter one are asked, and then the ranks of all: a
popular beginning spreads over as many workers as its load asks for. Of several workers with one beginning a few are
looked at, and the least loaded gets the group (the power of two choices: Mitzenmacher 2001).

Promises: nothing here changes a bit of any sample; the same calls give the same placements, in any process; a worker
that is removed gets nothing; one is chosen unless all are to be avoided. Placing costs no more the more groups are
under way, and the index holds at most `capacity` beginnings. A change of the fleet costs more the more workers there
are, and to remove one the more beginnings are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import xxhash

SLACK = 0.25
"""By how much the load of a worker may exceed its share when it gets a group."""
PIECE = 64
"""Tokens of the first pieces that prompts are compared by."""
_PIECES_OF_A_SIZE = 16
_LONGEST_PROMPT = 2**31
_CHOICES = 4
_RANKS = 8
_MEMORY = 1 - 1 / 64
"""What a measurement of speed counts for after the next one, so that about the last 64 groups count."""
_PRIOR = 8.0
"""How many groups at the pace of the fleet are counted beside those that a worker finished."""
_SLOWEST, _FASTEST = 0.05, 20.0
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # odd: the high bits of a product with it depend on all bits of a key


def _piece_ends() -> tuple[int, ...]:
    ends, size = [0], PIECE
    while ends[-1] < _LONGEST_PROMPT:
        ends += [ends[-1] + size * i for i in range(1, _PIECES_OF_A_SIZE + 1)]
        size *= 2
    return tuple(ends)


_ENDS = _piece_ends()
_PIECES = [slice(4 * start, 4 * end) for start, end in pairwise(_ENDS)]
"""Of the bytes of a prompt."""


def beginnings(prompt_token_ids: np.ndarray, cache_salt: str | None = None) -> list[int]:
    """A 64-bit number for each beginning of a prompt that ends with a whole piece, the shortest first; at least one.

    Pieces have `PIECE` tokens, and twice as many after each 16 of a size, so that there are few of a prompt of any
    length. A prompt without a whole piece is one itself. `prompt_token_ids`: int32 [prompt_len]. Prompts with different
    salts have no beginning in common.
    """
    content, count = prompt_token_ids.tobytes(), bisect_right(_ENDS, len(prompt_token_ids)) - 1
    last = 0 if cache_salt is None else xxhash.xxh3_64_intdigest(cache_salt.encode(), 1)
    if count == 0:
        return [xxhash.xxh3_64_intdigest(content, last)]
    found = []
    for piece in _PIECES[:count]:
        last = xxhash.xxh3_64_intdigest(content[piece], last)
        found.append(last)
    return found


@dataclass(eq=False, slots=True)
class _Worker:
    """`position`: among all; -1 if it is gone, or new. `load`: the cost of what is under way, which is `count` groups.
    `done`: the cost of what it finished in `busy` seconds with something under way, the latest counting most; `since`:
    up to when that is counted. `speed`: relative to the fleet's; `pressure`: load by speed. `alone`: nobody but it.
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
    alone: _Holders = field(init=False)

    def __post_init__(self) -> None:
        self.alone = (self,)


_Holders: TypeAlias = tuple[_Worker, ...]


@dataclass(eq=False, slots=True)
class Placed:
    """A group that is under way on a worker, until `finish` or `withdraw`."""

    _worker: _Worker
    cost: float

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self._worker.name


class Placement:
    """Places groups on the workers of a fleet, of which there are none at first.

    `capacity`: how many beginnings are remembered at most, two or more, and half as many of those used last in any
    case; about as many pieces as the caches of all workers hold. `free_load`: a worker with less than that under way is
    never full, however little the others have; about what it computes at once. Times are seconds of any clock that
    never goes back.
    """

    def __init__(self, capacity: int = 2**17, free_load: float = 1.0) -> None:
        self.capacity = capacity
        self.free_load = free_load
        self._workers: dict[str, _Worker] = {}
        # Beginning to those who got it: of those placed last, and as many before them. Beginnings share the tuples: a
        # container of each one's own would have Python's garbage collector go through the process again and again.
        self._index: dict[int, _Holders] = {}
        self._older: dict[int, _Holders] = {}
        self._done, self._busy = 0.0, 0.0  # of all workers
        self._gather()

    @property
    def num_remembered(self) -> int:
        """Beginnings of which it is known who got them."""
        return len(self._index.keys() | self._older.keys())

    def load(self, worker: str) -> float:
        """The cost of what is under way on a worker."""
        return self._workers[worker].load

    def speed(self, worker: str) -> float:
        """How fast a worker finishes what it gets, relative to the fleet: 1 as long as nothing is measured."""
        return self._workers[worker].speed

    def add(self, worker: str) -> None:
        """A worker joins, with an empty cache. One that was lost may come back under its name."""
        if worker in self._workers:
            raise ValueError(f"worker: expected a name that is not in the fleet, found {worker!r} there")
        self._workers[worker] = _Worker(worker, xxhash.xxh3_64_intdigest(worker.encode()))
        self._is_stale = True

    def remove(self, worker: str) -> None:
        """A worker is gone, and its cache with it. What was under way there has to be placed anew."""
        gone = self._workers.pop(worker)
        gone.position = -1
        for index in (self._index, self._older):
            for beginning, holders in [(beginning, got) for beginning, got in index.items() if gone in got]:
                index[beginning] = tuple(holder for holder in holders if holder is not gone)
                if not index[beginning]:
                    del index[beginning]
        self._done -= gone.done
        self._busy -= gone.busy
        self._is_stale = True

    def forget(self) -> None:
        """Nobody holds any beginning any more, as after a push of weights."""
        self._index.clear()
        self._older.clear()

    def place(self, prompt: Sequence[int], now: float, cost: float = 1.0, avoid: Collection[str] = ()) -> Placed | None:
        """Chooses a worker for a group whose prompt has these `beginnings`, another one than those to avoid; None if
        there is none. `cost`: how much work it is, in a unit that is the same for all.
        """
        if self._is_stale:
            self._gather()
        prompt = prompt[: self.capacity // 2]
        limit = (1 + SLACK) * (self._load + cost) / self._speed
        holders = self._holders(prompt)
        worker, known = self._holding(holders, prompt, limit, avoid)
        worker = worker or self._ranked(_next(prompt, holders), limit, avoid)
        if worker is None:
            return None
        self._remember(prompt, holders, known, worker)
        if worker.count == 0:
            worker.since = now
        self._change(worker, 1, cost)
        return Placed(worker, cost)

    def finish(self, placed: Placed, now: float) -> None:
        """A group was finished by its worker, which tells how fast that is."""
        worker = placed._worker
        if worker.position >= 0:
            self._measure(worker, placed.cost, now)
        self._change(worker, -1, -placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """A group is under way no longer, and was not finished: it was aborted, refused or lost."""
        self._change(placed._worker, -1, -placed.cost)

    def _measure(self, worker: _Worker, cost: float, now: float) -> None:
        done, busy = worker.done, worker.busy
        worker.done = _MEMORY * done + cost
        worker.busy = _MEMORY * busy + now - worker.since
        worker.since = now
        self._done += worker.done - done
        self._busy += worker.busy - busy
        expected = worker.busy * self._done / self._busy if self._busy > 0 else worker.done
        speed = (worker.done + _PRIOR * cost) / (expected + _PRIOR * cost)
        before, worker.speed = worker.speed, min(max(speed, _SLOWEST), _FASTEST)
        self._speed += worker.speed - before

    def _change(self, worker: _Worker, count: int, cost: float) -> None:
        """Counts groups that begin or end to be under way on a worker."""
        worker.count += count
        before, worker.load = worker.load, worker.load + cost if worker.count else 0.0
        worker.pressure = worker.load / worker.speed
        if worker.position >= 0:
            self._load += worker.load - before
            self._pressure[worker.position] = worker.pressure

    def _gather(self) -> None:
        """Makes the rows of all workers: `_keys`, `_pressure`, and the sums of load and speed."""
        self._rows = list(self._workers.values())
        for position, worker in enumerate(self._rows):
            worker.position = position
        self._keys = np.array([worker.key for worker in self._rows], np.uint64)
        self._scores = np.empty_like(self._keys)
        self._pressure = np.array([worker.pressure for worker in self._rows])
        self._load = sum(worker.load for worker in self._rows)
        self._speed = sum(worker.speed for worker in self._rows) or 1.0
        self._is_stale = False

    def _holders(self, prompt: Sequence[int]) -> list[_Holders]:
        """Who got the beginnings of a prompt, as far as they are known. Who got one got all those before it."""
        found = []
        for beginning in prompt:
            holders = self._index.get(beginning) or self._older.get(beginning)
            if holders is None:
                break
            found.append(holders)
        return found

    def _holding(
        self, holders: list[_Holders], prompt: Sequence[int], limit: float, avoid: Collection[str]
    ) -> tuple[_Worker | None, int]:
        """A worker with the longest beginning that one that is not full has, and how many beginnings of the prompt it
        has; None and 0 if there is none, or where half the fleet has as much.
        """
        start, looked_at = _next(prompt, holders), 0
        for known in range(len(holders), 0, -1):
            count = len(holders[known - 1])
            if 2 * count > len(self._rows):
                break
            if count > looked_at:  # otherwise they are the same
                looked_at = count
                if worker := self._least_loaded(holders[known - 1], start, limit, avoid):
                    return worker, known
        return None, 0

    def _least_loaded(self, holders: _Holders, start: int, limit: float, avoid: Collection[str]) -> _Worker | None:
        """Of a few of the workers, from one on, the one with the least load that is not full."""
        found, count = None, len(holders)
        for i in range(start, start + min(_CHOICES, count)):
            worker = holders[i % count]
            if self._may_get_more(worker, limit, avoid) and (found is None or worker.pressure < found.pressure):
                found = worker
        return found

    def _ranked(self, key: int, limit: float, avoid: Collection[str]) -> _Worker | None:
        """Of the two workers that rank highest for a key, of those that are not full, the one with less load; the least
        loaded of all if it would take long to find them.
        """
        if not self._rows:
            return None
        found, scores = None, self._rank(key)
        for _ in range(_RANKS):
            place = int(scores.argmax())
            scores[place] = 0
            worker = self._rows[place]
            if self._may_get_more(worker, limit, avoid):
                if found is not None:
                    return worker if worker.pressure < found.pressure else found
                found = worker
        return found or self._idlest(avoid)

    def _rank(self, key: int) -> np.ndarray:
        """A hash of the key and each worker: uint64 [workers]. It is the same memory each time."""
        np.bitwise_xor(self._keys, np.uint64(key), out=self._scores)
        return np.multiply(self._scores, _FACTOR, out=self._scores)

    def _idlest(self, avoid: Collection[str]) -> _Worker | None:
        """The worker with the least load that need not be avoided."""
        places = self._pressure.argsort(kind="stable") if avoid else [self._pressure.argmin()]
        return next((worker for place in places if (worker := self._rows[place]).name not in avoid), None)

    def _may_get_more(self, worker: _Worker, limit: float, avoid: Collection[str]) -> bool:
        is_full = worker.pressure >= limit and worker.load >= self.free_load
        return not is_full and worker.name not in avoid

    def _remember(self, prompt: Sequence[int], holders: list[_Holders], known: int, worker: _Worker) -> None:
        """Notes that a worker, which had `known` beginnings of a prompt, gets them all. Those of a prompt are always
        noted together, so that none is forgotten before those that go on from it.
        """
        room = self.capacity // 2 - len(self._index)
        if len(prompt) > room and sum(beginning not in self._index for beginning in prompt) > room:
            self._index, self._older = {}, self._index
        self._index.update(zip(prompt, holders, strict=False))
        self._index.update(dict.fromkeys(prompt[len(holders) :], worker.alone))
        before, more = (), worker.alone
        for i in reversed(range(known, len(holders))):
            if holders[i] is not before:
                if len(holders[i]) == len(self._rows) or worker in holders[i]:
                    break
                before, more = holders[i], (*holders[i], worker)
            self._index[prompt[i]] = more


def _next(prompt: Sequence[int], holders: list[_Holders]) -> int:
    """The first beginning that is not known, or the last one."""
    return prompt[min(len(holders), len(prompt) - 1)]
