"""Which worker of a fleet gets a group, of those that may be asked now.

Owns: the placement, and how fast the groups were that were finished last. Does not own which workers may be asked, and
is told by `WorkerPool`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from .links import Link
from .placement import Placed, Placement

_PACES = 64
_FEWEST_PACES = 4


class Dispatch:
    """`version`: the newest weights of the workers that may be asked; None before any could be."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._placement = Placement()
        self._open: dict[str, Link] = {}
        self._changed = asyncio.Event()
        self._paces: deque[float] = deque(maxlen=_PACES)

    @property
    def looks(self) -> dict[str, int]:
        """How often each worker that may be asked was looked at, by its key."""
        return {key: link.num_looks for key, link in self._open.items()}

    @property
    def slowest_pace(self) -> float | None:
        """Seconds for a unit of cost, of the slowest of the groups that were finished last; None of too few."""
        return max(self._paces) if len(self._paces) >= _FEWEST_PACES else None

    def open(self, links: Iterable[Link], version: int) -> None:
        """From now on these workers may be asked, and no others. After a push, what the caches hold is of no use."""
        chosen = {link.key: link for link in links}
        if self.version != version:
            self.version = version
            self._placement.forget()
        for key in self._open.keys() - chosen.keys():
            self._placement.remove(key)
        for key in chosen.keys() - self._open.keys():
            self._placement.add(key)
        has_changed = chosen.keys() != self._open.keys()
        self._open = chosen
        if has_changed:
            self.wake()

    def place(self, prompt: Sequence[int], cost: float, avoid: Collection[str]) -> tuple[Link, Placed] | None:
        """Choose a worker for a group whose prompt has these `beginnings`, none of the keys in `avoid`; None if none
        can be asked now.
        """
        placed = self._placement.place(prompt, time.monotonic(), cost, avoid)
        return None if placed is None else (self._open[placed.worker], placed)

    def finish(self, placed: Placed, seconds: float) -> None:
        """A worker has finished a group that it had for so long."""
        self._placement.finish(placed, time.monotonic())
        self._paces.append(seconds / placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """A worker has a group no longer that it did not finish."""
        self._placement.withdraw(placed)

    async def change(self) -> None:
        """Wait until others may be asked than now, or `wake`."""
        await self._changed.wait()

    def wake(self) -> None:
        """Let those that wait for a worker try again."""
        self._changed.set()
        self._changed = asyncio.Event()
