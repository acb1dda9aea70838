"""Which worker of a fleet a group of samples goes to.

| owned here                                                          | owned elsewhere                              |
|---------------------------------------------------------------------|----------------------------------------------|
| which worker got which beginnings of prompts (`HolderIndex`)        | what a worker's cache holds (`engine.cache`) |
| how much is under way on each, and how fast each finishes (`Loads`) | when a group is sent, aborted or asked again |
| which workers there are (`Loads`)                                   | which are alive, and what they serve         |

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
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from ...engine.request import ContentSpan, content_within
from .holders import HolderIndex, Holders
from .loads import Loads, Worker

SLACK = 0.25
"""By how much the load of a worker may exceed its share when it gets a group."""
PIECE = 64
"""Tokens of the first pieces that prompts are compared by."""
_PIECES_OF_A_SIZE = 16
_LONGEST_PROMPT = 2**31
_CHOICES = 4
_RANKS = 8


def _piece_ends() -> tuple[int, ...]:
    ends, size = [0], PIECE
    while ends[-1] < _LONGEST_PROMPT:
        ends += [ends[-1] + size * i for i in range(1, _PIECES_OF_A_SIZE + 1)]
        size *= 2
    return tuple(ends)


_ENDS = _piece_ends()


def beginnings(
    prompt_token_ids: np.ndarray, cache_salt: str | None = None, spans: Sequence[ContentSpan] = ()
) -> list[int]:
    """A 64-bit number for each beginning of a prompt that ends with a whole piece, the shortest first; at least one.

    Pieces have `PIECE` tokens, and twice as many after each 16 of a size, so that there are few of a prompt of any
    length. A prompt without a whole piece is one itself. `prompt_token_ids`: int32 [prompt_len]. Prompts with different
    salts have no beginning in common, and only pieces with the same content of `spans` are the same.
    """
    content, count = prompt_token_ids.tobytes(), bisect_right(_ENDS, len(prompt_token_ids)) - 1
    last = 0 if cache_salt is None else xxhash.xxh3_64_intdigest(cache_salt.encode(), 1)
    if count == 0:
        return [xxhash.xxh3_64_intdigest(content + content_within(spans, 0, len(prompt_token_ids)), last)]
    found = []
    for start, end in pairwise(_ENDS[: count + 1]):
        piece = content[4 * start : 4 * end] + content_within(spans, start, end)
        last = xxhash.xxh3_64_intdigest(piece, last)
        found.append(last)
    return found


@dataclass(eq=False, slots=True)
class Placed:
    """A group that is under way on a worker, until `finish` or `withdraw`."""

    _worker: Worker
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
        self.free_load = free_load
        self._loads = Loads()
        self._index = HolderIndex(capacity)

    @property
    def num_remembered(self) -> int:
        """Beginnings of which it is known which workers got them."""
        return len(self._index.beginnings)

    def load(self, worker: str) -> float:
        """The cost of what is under way on a worker."""
        return self._loads.workers[worker].load

    def speed(self, worker: str) -> float:
        """How fast a worker finishes what it gets, relative to the fleet: 1 as long as nothing is measured."""
        return self._loads.workers[worker].speed

    def add(self, worker: str) -> None:
        """A worker joins, with an empty cache. One that was lost may come back under its name."""
        self._loads.add(worker)

    def remove(self, worker: str) -> None:
        """A worker is gone, and its cache with it. What was under way there has to be placed anew."""
        self._index.remove(self._loads.remove(worker))

    def forget(self) -> None:
        """No worker holds any beginning any more, as after a push of weights."""
        self._index.clear()

    def place(self, prompt: Sequence[int], now: float, cost: float = 1.0, avoid: Collection[str] = ()) -> Placed | None:
        """Chooses a worker for a group whose prompt has these `beginnings`, another one than those to avoid; None if
        there is none. `cost`: how much work it is, in a unit that is the same for all.
        """
        rows = self._loads.gather()
        prompt = prompt[: self._index.capacity // 2]
        limit = (1 + SLACK) * (rows.load + cost) / rows.speed
        holders = self._index.find(prompt)
        worker, known = self._holding(holders, prompt, limit, avoid)
        worker = worker or self._ranked(_next(prompt, holders), limit, avoid)
        if worker is None:
            return None
        self._index.add(prompt, holders, known, worker, len(rows.workers))
        self._loads.begin(worker, cost, now)
        return Placed(worker, cost)

    def finish(self, placed: Placed, now: float) -> None:
        """A group was finished by its worker, which tells how fast that is."""
        self._loads.measure(placed._worker, placed.cost, now)
        self._loads.end(placed._worker, placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """A group is under way no longer, and was not finished: it was aborted, refused or lost."""
        self._loads.end(placed._worker, placed.cost)

    def _holding(
        self, holders: list[Holders], prompt: Sequence[int], limit: float, avoid: Collection[str]
    ) -> tuple[Worker | None, int]:
        """A worker with the longest beginning that one that is not full has, and how many beginnings of the prompt it
        has; None and 0 if there is none, or where half the fleet has as much.
        """
        start, looked_at = _next(prompt, holders), 0
        for known in range(len(holders), 0, -1):
            count = len(holders[known - 1])
            if 2 * count > len(self._loads.rows.workers):
                break
            if count > looked_at:  # otherwise they are the same
                looked_at = count
                if worker := self._least_loaded(holders[known - 1], start, limit, avoid):
                    return worker, known
        return None, 0

    def _least_loaded(self, holders: Holders, start: int, limit: float, avoid: Collection[str]) -> Worker | None:
        """Of a few of the workers, from one on, the one with the least load that is not full."""
        found, count = None, len(holders)
        for i in range(start, start + min(_CHOICES, count)):
            worker = holders[i % count]
            if self._may_get_more(worker, limit, avoid) and (found is None or worker.pressure < found.pressure):
                found = worker
        return found

    def _ranked(self, key: int, limit: float, avoid: Collection[str]) -> Worker | None:
        """Of the two workers that rank highest for a key, of those that are not full, the one with less load; the least
        loaded of all if it would take long to find them.
        """
        rows = self._loads.rows
        if not rows.workers:
            return None
        found, scores = None, rows.rank(key)
        for _ in range(_RANKS):
            place = int(scores.argmax())
            scores[place] = 0
            worker = rows.workers[place]
            if self._may_get_more(worker, limit, avoid):
                if found is not None:
                    return worker if worker.pressure < found.pressure else found
                found = worker
        return found or rows.idlest(avoid)

    def _may_get_more(self, worker: Worker, limit: float, avoid: Collection[str]) -> bool:
        is_full = worker.pressure >= limit and worker.load >= self.free_load
        return not is_full and worker.name not in avoid


def _next(prompt: Sequence[int], holders: list[Holders]) -> int:
    """The first beginning that is not known, or the last one."""
    return prompt[min(len(holders), len(prompt) - 1)]
