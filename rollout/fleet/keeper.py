"""Keep a worker running in each slot of a fleet, and give each worker the weights that the other workers serve.

This module owns no state: each slot holds the state of its worker. Guarantees: a worker that ends, hangs or fails is
replaced. A worker that ran for longer than `STEADY_SECONDS` is replaced after a short pause. If workers in a slot keep
ending within `STEADY_SECONDS`, the pauses grow. A worker begins to serve only after it has the weights that the other
workers serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from trueroll.errors import ConfigError, ModelError, TruerollError, WorkerFailedError, WorkerLostError, said

from .. import protocol
from ..client.membership import Member
from .config import FleetConfig
from .fleet_weights import FleetWeights
from .running_worker import Launcher, RunningWorker
from .slots import Slot, Slots

LOOK_SECONDS = 0.5
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A worker that ran for longer than `STEADY_SECONDS` is replaced after `FIRST_PAUSE`. Each time a worker ran for a
shorter time, the pause before its replacement doubles.
"""
_HOPELESS = (ConfigError, ModelError)

log = logging.getLogger(__name__)


class Keeper:
    """Keep a worker running in each of `slots`. `launcher`: starts workers. `weights`: the weights of the fleet."""

    def __init__(self, slots: Slots, launcher: Launcher, weights: FleetWeights, config: FleetConfig) -> None:
        self._slots = slots
        self._launcher = launcher
        self._weights = weights
        self._startup_timeout = config.startup_timeout
        self._hang_seconds = config.hang_seconds

    async def keep(self, slot: Slot) -> None:
        """Keep a worker running in this slot until the slot is removed from the fleet. Replace the worker whenever the
        worker is lost.
        """
        pause = FIRST_PAUSE
        while True:
            while slot.num_starts and self._slots.are_asleep:
                await asyncio.sleep(LOOK_SECONDS)
            began = time.monotonic()
            try:
                await self._serve(slot)
            except Exception as error:
                self._note(slot, error, time.monotonic() - began)
            finally:
                await asyncio.shield(self.release(slot, at_once=not slot.is_leaving))
            if slot.is_leaving:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY_SECONDS else min(2 * pause, MOST_PAUSE)
            await asyncio.sleep(pause)

    async def release(self, slot: Slot, at_once: bool = False) -> None:
        """End the worker in a slot."""
        worker, slot.worker, slot.waits_since = slot.worker, None, None
        self._slots.publish()
        if worker is not None:
            await worker.end(at_once)

    async def look(self, worker: RunningWorker) -> protocol.Health:
        """Check the health of a worker, and record the weights that the worker serves."""
        self._weights.read_note()
        if self._slots.is_stale:
            self._slots.publish()
        health = await worker.look()
        if worker.is_serving:
            await self._weights.note_served(worker.client, health.weight_version)
        return health

    async def _serve(self, slot: Slot) -> None:
        """Start a worker and let the worker serve. Raise TruerollError when the worker ends."""
        slot.num_starts += 1
        worker = slot.worker = await self._launcher.launch(slot.name)
        health = await self.look(worker)
        worker.member = Member(slot.name, worker.client.address, health.instance, "joining")
        slot.first_error = None
        log.info("fleet: %s runs at %s", slot.name, worker.client.address)
        ended = asyncio.ensure_future(worker.ended())
        served = asyncio.ensure_future(self._watch(slot, worker))
        try:
            await asyncio.wait((ended, served), return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                served.result()
            raise WorkerLostError(f"worker: {ended.result() if ended.done() else 'has left'}; it will be replaced")
        finally:
            for task in (ended, served):
                task.cancel()
            await asyncio.gather(ended, served, return_exceptions=True)

    def _note(self, slot: Slot, error: Exception, seconds: float) -> None:
        """Log why a worker ended. `seconds`: how long the worker ran. If the first worker of a slot failed, and a
        replacement would also fail, store the error, so that `scale` raises the error.
        """
        is_first = slot.num_starts == 1 and slot.member is None
        if isinstance(error, TruerollError):
            log.warning("fleet: %s: %s", slot.name, error)
            is_late = seconds >= self._startup_timeout and isinstance(error, WorkerFailedError)
            if is_first and (is_late or isinstance(error, _HOPELESS)):
                slot.first_error = error
            return
        log.exception("fleet: %s: %r", slot.name, error)
        if is_first and isinstance(error, ValueError | TypeError):
            slot.first_error = ConfigError(f"fleet: Ray refuses these settings: {said(error)}; correct them")

    async def _watch(self, slot: Slot, worker: RunningWorker) -> None:
        """Let a worker join, then check its health repeatedly. Raise TruerollError when the worker is lost."""
        while True:
            if not worker.is_serving and not slot.is_leaving:
                await self._join(slot, worker)
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(worker)
            worker.stats = await worker.client.stats()
            worker.check_engine()
            worker.check_progress(self._hang_seconds)
            if worker.is_serving and self._slots.are_ahead_of(worker):
                self._slots.stand(slot, "joining")

    async def _join(self, slot: Slot, worker: RunningWorker) -> None:
        """Give a worker the weights of the other workers, then let the worker serve. If no copy of the weights is left,
        wait for a push.

        The worker is first marked as serving, and then its weights are compared with the weights of the peer. A push
        that ends after the worker was marked as serving includes the worker. The comparison of weights detects a push
        that ended before the worker was marked as serving. If the slot is removed from the fleet before the worker
        serves, the worker does not join.
        """
        while not slot.is_leaving:
            self._slots.stand(slot, "joining")
            peer = self._slots.newest(but=worker)
            self._weights.read_note()
            noted, num_scales = self._weights.noted, self._slots.num_scales
            outcome = await slot.joining.attempt(
                (noted, peer and peer.member),
                peer and peer.health and peer.health.state,
                partial(self._weights.hand_over, worker.client, peer and peer.client, noted),
            )
            if outcome == "done" and not slot.is_leaving:
                self._slots.stand(slot, "serving")
                if peer is None or await self._weights.are_the_same(worker.client, peer.client):
                    return
            await asyncio.sleep(LOOK_SECONDS)
            health = await self.look(worker)
            worker.check_engine()
            is_waiting = outcome == "waiting" and peer is None and not self._weights.are_pushed_to(health)
            slot.waits_since = num_scales if is_waiting else None
