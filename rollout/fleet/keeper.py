"""Keeps a worker running in a slot of a fleet, and brings it to the weights of the others.

Owns: nothing that lasts; the slot has what is known of its worker. Promises: a worker that ends, hangs or fails is
replaced, soon the first time and after pauses that grow if the next one does not last; it serves only once it has the
weights that the others serve.
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
"""A worker that lived for so long is replaced after `FIRST_PAUSE`; after one that did not, pauses double."""
_HOPELESS = (ConfigError, ModelError)

log = logging.getLogger(__name__)


class Keeper:
    """Keeps workers of `launcher` in the slots of `slots`, with `weights`."""

    def __init__(self, slots: Slots, launcher: Launcher, weights: FleetWeights, config: FleetConfig) -> None:
        self._slots = slots
        self._launcher = launcher
        self._weights = weights
        self._startup_timeout = config.startup_timeout
        self._hang_seconds = config.hang_seconds

    async def keep(self, slot: Slot) -> None:
        """Have a worker in this slot, and another one whenever it is lost, until the slot is to leave."""
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
        """Ask a worker how it is, and note which weights it serves."""
        self._weights.read_note()
        if self._slots.is_stale:
            self._slots.publish()
        health = await worker.look()
        if worker.is_serving:
            await self._weights.note_served(worker.client, health.weight_version)
        return health

    async def _serve(self, slot: Slot) -> None:
        """From the start of a worker to its end, which raises."""
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
            raise WorkerLostError(f"worker: {ended.result() if ended.done() else 'it left'}; it is replaced")
        finally:
            for task in (ended, served):
                task.cancel()
            await asyncio.gather(ended, served, return_exceptions=True)

    def _note(self, slot: Slot, error: Exception, seconds: float) -> None:
        """Log why a worker ended after so long. If it was the first, and the next would not run either, `scale` raises
        it.
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
            slot.first_error = ConfigError(f"fleet: Ray does not take these settings: {said(error)}; correct them")

    async def _watch(self, slot: Slot, worker: RunningWorker) -> None:
        """Let a worker join, and look at it until it is lost, which raises."""
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
        """Bring a worker to the weights of the others, and let it serve. While none has them it waits for a push.

        A push that ends afterwards finds it among those that serve; one that has ended before is seen here. One that
        is to leave meanwhile does not join any more.
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
