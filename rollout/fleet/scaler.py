"""Change the number of workers of a fleet, and replace all workers when the Ray cluster is lost.

Owns: one task per slot, which keeps a worker running in the slot. The task starts when `scale` adds the slot, and ends
when `scale` dismisses the slot. Guarantees: a worker that leaves the fleet can finish its requests first. If the
cluster is lost, the fleet joins or starts the cluster again, and then restarts all workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trueroll.errors import IllegalStateError, TruerollError

from .fleet_weights import FleetWeights
from .keeper import FIRST_PAUSE, LOOK_SECONDS, MOST_PAUSE, Keeper
from .slots import Slot, Slots

if TYPE_CHECKING:
    from .ray_cluster import Cluster

SETTLE_SECONDS = 0.5
"""Time in which clients can notice that a worker is leaving. After this time, the fleet checks whether the worker has
finished its requests.
"""

log = logging.getLogger(__name__)


class Scaler:
    """Add and dismiss slots. `drain_timeout`: maximum number of seconds for a leaving worker to finish its requests."""

    def __init__(
        self, slots: Slots, keeper: Keeper, weights: FleetWeights, cluster: Cluster, drain_timeout: float
    ) -> None:
        self._slots = slots
        self._keeper = keeper
        self._weights = weights
        self._cluster = cluster
        self._drain_timeout = drain_timeout
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._has_cluster = asyncio.Event()
        self._has_cluster.set()

    async def scale(self, num_workers: int) -> None:
        """See `Fleet.scale`."""
        slots = self._slots.staying
        if num_workers > len(slots):
            await self._check_awake()
        for _ in range(num_workers - len(slots)):
            self._start(self._slots.add())
        leaving = slots[num_workers:]
        for slot in leaving:
            slot.is_leaving = True
        self._slots.num_scales += 1
        for slot in self._slots.staying:
            slot.joining.retry()
        await asyncio.gather(*map(self._dismiss, leaving))
        while not all(slot.is_serving for slot in self._slots.staying):
            self._check_joining()
            await asyncio.sleep(0.05)

    async def watch_cluster(self) -> None:
        """Check the cluster repeatedly, until this coroutine is cancelled. If the cluster is lost, connect again and
        replace all workers.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await asyncio.to_thread(self._cluster.is_alive):
                continue
            log.warning("fleet: the cluster was lost; replacing all workers")
            self._has_cluster.clear()
            lost = dict(self._tasks)
            for task in lost.values():
                task.cancel()
            await asyncio.gather(*lost.values(), return_exceptions=True)
            await reconnect(self._cluster)
            self._has_cluster.set()
            for slot in lost:
                if not slot.is_leaving:
                    self._start(slot)

    async def end(self) -> None:
        """End all workers."""
        await asyncio.gather(*map(self._keeper.release, self._slots))

    def _start(self, slot: Slot) -> None:
        self._tasks[slot] = asyncio.create_task(self._keep(slot))

    async def _keep(self, slot: Slot) -> None:
        await self._has_cluster.wait()
        await self._keeper.keep(slot)

    def _check_joining(self) -> None:
        """If a worker cannot serve because of an error that waiting does not fix, raise the error."""
        for slot in self._slots:
            if error := slot.first_error or slot.joining.error:
                raise error
        if (noted := self._weights.noted) is None or self._slots.serving:
            return
        if any(slot.waits_since == self._slots.num_scales for slot in self._slots):
            raise IllegalStateError(
                f"scale: all workers were lost, and no copy of their weights of version {noted.version} is left; push "
                "these weights again with publisher.restore(model) or push_folder, or push newer weights"
            )

    async def _check_awake(self) -> None:
        looks = map(self._keeper.look, self._slots.serving)  # the last reports may be half a second old
        await asyncio.gather(*looks, return_exceptions=True)
        if self._slots.are_asleep:
            raise IllegalStateError(
                "scale: all workers are asleep, so a new worker could not get their weights; wake them up first"
            )

    async def _dismiss(self, slot: Slot) -> None:
        """Let a worker finish its requests, end the worker, and remove its slot."""
        self._slots.stand(slot, "leaving")
        await asyncio.sleep(SETTLE_SECONDS)
        deadline = time.monotonic() + self._drain_timeout
        while (worker := slot.worker) is not None and time.monotonic() < deadline:
            with suppress(TruerollError, TimeoutError):
                if (await self._keeper.look(worker)).requests["open"] == 0:
                    break
            await asyncio.sleep(LOOK_SECONDS)
        task = self._tasks.pop(slot)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._slots.remove(slot)


async def reconnect(cluster: Cluster) -> None:
    """Reconnect to a lost cluster, or start a new local cluster. Retry with growing pauses until the connection
    succeeds.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return await cluster.reconnect()
        except TruerollError as error:
            log.warning("%s", error)
        except Exception as error:
            log.exception("fleet: could not start the cluster again, next attempt in %g s: %r", pause, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE)
