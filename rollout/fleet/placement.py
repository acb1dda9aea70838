"""Choose a worker of a fleet for each group of samples.

| owned here                                                | owned elsewhere                                  |
|-----------------------------------------------------------|--------------------------------------------------|
| the holders of each prefix of a prompt (`HolderIndex`)    | the contents of workers' caches (`engine.cache`) |
| the load and the speed of each worker (`Loads`)           | when groups are sent, aborted and repeated       |
| the list of workers (`Loads`)                             | which workers are alive, and their weights       |

A holder of a prefix is a worker that got a prompt with this prefix. All samples of a group are placed on one worker: a
holder of the longest known prefix of the prompt. So prompts with a common prefix, and later turns of a conversation,
find their prefix in the worker's cache.

If no prefix of the prompt is known, workers are ranked for the prompt by rendezvous hashing (Thaler, Ravishankar 1998).
The less loaded of the two highest-ranked workers gets the group. So for the same prompt, independent clients choose
between the same two workers. When a worker joins or leaves, the ranks of the other workers relative to each other do
not change. If more than half of the workers hold a prefix, the prefix is treated as unknown, because such a prefix
favors no particular worker.

A worker is full while its load is at least `1 + SLACK` times its share of the total load (Mirrokni, Thorup,
Zadimoghaddam 2018). Shares are proportional to the measured speeds of the workers. The caller may exclude workers (the
argument `avoid`). A full worker gets a group only if all workers that are not full are in `avoid`. If all holders of
the longest known prefix are full, holders of shorter prefixes are tried. If all holders are full, workers are tried in
the order of their ranks. So the prompts that share a popular prefix are spread over as many workers as the load of
these prompts requires. If a prefix has several holders, only a few holders are compared. The least loaded of the
compared holders gets the group (the power of two choices: Mitzenmacher 2001).

Guarantees:

- Placement does not change the bits of any sample.
- The same sequence of calls gives the same placements in any process.
- A removed worker gets no groups.
- A worker is always chosen, unless all workers must be avoided.
- The cost of placing a group does not depend on the number of groups in flight.
- The index remembers at most `capacity` prompt prefixes.
- The cost of adding or removing a worker grows with the number of workers. The cost of removing a worker also grows
  with the number of known prefixes.
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
"""Fraction by which the load of a worker may exceed its share when the worker gets a group."""
PIECE = 64
"""Number of tokens in each of the first 16 pieces of a prompt. Prompts are compared piece by piece."""
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
    """Return a 64-bit hash of each prefix of a prompt, the shortest prefix first. A prompt is split into pieces, and
    only prefixes that consist of whole pieces are hashed.

    The first 16 pieces of a prompt have `PIECE` tokens each. After every 16 pieces, the piece size doubles, so that
    even long prompts have few pieces. For a prompt shorter than one piece, the whole prompt is the only prefix.
    `prompt_token_ids`: int32 [prompt_len]. Prompts with different cache salts have no common prefix. `spans`: the spans
    of the prompt that represent other content than text, such as images. Two pieces are equal only if their tokens are
    equal and the content of the spans within them is also equal.
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
    """A group that was placed on a worker. The group is in flight until `finish` or `withdraw` is called."""

    _worker: Worker
    cost: float

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self._worker.name


class Placement:
    """Places groups on the workers of a fleet. A new object has no workers.

    - `capacity`: maximum number of known prefixes; must be 2 or more. The `capacity // 2` most recently used prefixes
      are always kept. A good `capacity` is the number of pieces that fit into the caches of all workers.
    - `free_load`: a worker with less load than `free_load` is never full, even if the other workers are idle. A good
      `free_load` is the load that a worker can compute in parallel.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self, capacity: int = 2**17, free_load: float = 1.0) -> None:
        self.free_load = free_load
        self._loads = Loads()
        self._index = HolderIndex(capacity)

    @property
    def num_remembered(self) -> int:
        """Number of known prefixes."""
        return len(self._index.beginnings)

    def load(self, worker: str) -> float:
        """Return the load of a worker: the total cost of its groups in flight."""
        return self._loads.workers[worker].load

    def speed(self, worker: str) -> float:
        """Return the speed of a worker relative to the fleet; 1 before the first measurement."""
        return self._loads.workers[worker].speed

    def add(self, worker: str) -> None:
        """Add a worker with an empty cache. A lost worker may be added again with the same name."""
        self._loads.add(worker)

    def remove(self, worker: str) -> None:
        """Remove a worker, and forget the prefixes in its cache. The caller must place the worker's groups again."""
        self._index.remove(self._loads.remove(worker))

    def forget(self) -> None:
        """Forget all prefixes. Call this method after a push of weights."""
        self._index.clear()

    def place(self, prompt: Sequence[int], now: float, cost: float = 1.0, avoid: Collection[str] = ()) -> Placed | None:
        """Choose a worker for a group, and add the group to the worker's load. Return None if all workers are in
        `avoid`.

        `prompt`: hashes of the prompt's prefixes, as `beginnings` returns them. `cost`: amount of work, in any unit
        that is the same for all groups.
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
        """Subtract a finished group from its worker's load, and update the worker's speed."""
        self._loads.measure(placed._worker, placed.cost, now)
        self._loads.end(placed._worker, placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """Subtract an aborted, refused or lost group from its worker's load."""
        self._loads.end(placed._worker, placed.cost)

    def _holding(
        self, holders: list[Holders], prompt: Sequence[int], limit: float, avoid: Collection[str]
    ) -> tuple[Worker | None, int]:
        """Among the workers that are not full, find a holder of the longest prefix of the prompt. Return the holder and
        the number of the prompt's prefixes that the holder has. Return (None, 0) if no holder is found. Skip a prefix
        if more than half of the workers hold the prefix.
        """
        start, looked_at = _next(prompt, holders), 0
        for known in range(len(holders), 0, -1):
            count = len(holders[known - 1])
            if 2 * count > len(self._loads.rows.workers):
                break
            if count > looked_at:  # otherwise, the holders are unchanged
                looked_at = count
                if worker := self._least_loaded(holders[known - 1], start, limit, avoid):
                    return worker, known
        return None, 0

    def _least_loaded(self, holders: Holders, start: int, limit: float, avoid: Collection[str]) -> Worker | None:
        """Compare a few holders, beginning with the holder at position `start`, and return the worker with the least
        pressure. Return None if all compared holders are full or must be avoided.
        """
        found, count = None, len(holders)
        for i in range(start, start + min(_CHOICES, count)):
            worker = holders[i % count]
            if self._may_get_more(worker, limit, avoid) and (found is None or worker.pressure < found.pressure):
                found = worker
        return found

    def _ranked(self, key: int, limit: float, avoid: Collection[str]) -> Worker | None:
        """Among the workers that are not full, find the two workers that rank highest for a key. Return the less loaded
        of the two workers. If the highest-ranked workers are all full or must be avoided, return the least loaded
        worker outside of `avoid`.
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
    """Return the first unknown prefix of a prompt, or the longest prefix if all prefixes are known."""
    return prompt[min(len(holders), len(prompt) - 1)]
