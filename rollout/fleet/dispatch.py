"""Choose one of the eligible workers for a group.

Owns: the placement of groups on workers, and the speed of recently finished groups. Does not own: which workers are
eligible (`WorkerPool`).
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
    """Chooses a worker among the eligible workers. `version`: the newest weight version of the eligible workers; None
    if there are no workers.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._placement = Placement()
        self._open: dict[str, Link] = {}
        self._changed = asyncio.Event()
        self._paces: deque[float] = deque(maxlen=_PACES)

    @property
    def looks(self) -> dict[str, int]:
        """A map from the key of each eligible worker to the number of health checks of this worker."""
        return {key: link.num_looks for key, link in self._open.items()}

    @property
    def slowest_pace(self) -> float | None:
        """Time of the slowest recent group, in seconds per unit of cost; None if too few groups have finished."""
        return max(self._paces) if len(self._paces) >= _FEWEST_PACES else None

    def open(self, links: Iterable[Link], version: int) -> None:
        """Set the eligible workers. If `version` has changed, forget which prefixes the workers have cached, because a
        push invalidates the caches.
        """
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
        """Choose a worker for a group. Return None if all eligible workers are in `avoid`. `prompt`: hashes of the
        prompt's prefixes, as `beginnings` returns them. `avoid`: keys of workers.
        """
        placed = self._placement.place(prompt, time.monotonic(), cost, avoid)
        return None if placed is None else (self._open[placed.worker], placed)

    def finish(self, placed: Placed, seconds: float) -> None:
        """Record that a worker has finished a group, `seconds` after the group was sent."""
        self._placement.finish(placed, time.monotonic())
        self._paces.append(seconds / placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """Record that a worker no longer computes a group, although the group is unfinished."""
        self._placement.withdraw(placed)

    async def change(self) -> None:
        """Wait until the set of eligible workers changes, or until `wake` is called."""
        await self._changed.wait()

    def wake(self) -> None:
        """Wake all requests that wait for a worker, so that these requests look for a worker again."""
        self._changed.set()
        self._changed = asyncio.Event()
