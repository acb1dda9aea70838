"""A worker of a fleet that runs: the actor, its process, a client of it, and what it told last.

Owns: the actor, the socket and the client, from the start of the worker to its end.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueroll.errors import TruerollError, WorkerFailedError

from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.membership import Member
from .config import FleetConfig

if TYPE_CHECKING:
    from .ray_cluster import Cluster, WorkerActor

ANSWER_SECONDS = 30.0
"""A worker that does not answer for so long is replaced: it answers while it computes. Clients measure it, and count no
time in which this process was stopped.
"""
STOP_SECONDS = 15.0


class RunningWorker:
    """`socket`: of its process, which may be killed and leave it behind. `pids`: of the actor and of the worker.
    `member`: what clients are told of it; None before it answered. `health`, `stats`: None before it told them.
    """

    def __init__(self, actor: WorkerActor, socket: Path, client: AsyncRolloutClient, pids: tuple[int, int]) -> None:
        self.client = client
        self.pids = pids
        self.member: Member | None = None
        self.health: protocol.Health | None = None
        self.stats: protocol.Stats | None = None
        self._actor = actor
        self._socket = socket

    @property
    def is_serving(self) -> bool:
        """Whether clients may ask it."""
        return self.member is not None and self.member.standing == "serving"

    async def look(self) -> protocol.Health:
        """Ask it how it is."""
        self.health = await self.client.health()
        return self.health

    def check_engine(self) -> None:
        """Raise WorkerFailedError if its engine has failed."""
        if self.health is not None and self.health.state == "failed":
            raise WorkerFailedError("worker: its engine has failed; it is replaced")

    def check_progress(self, hang_seconds: float) -> None:
        """Raise WorkerFailedError if it has work, and has got nothing done for so long."""
        health = self.health
        if health is not None and health.state == "ready" and health.requests.get("running"):
            if (health.seconds_since_progress or 0.0) > hang_seconds:
                raise WorkerFailedError(f"worker: no progress for {hang_seconds} s; it is replaced")

    async def ended(self) -> str:
        """Wait until the worker or its actor has ended; returns how."""
        return await self._actor.ended()

    async def end(self, at_once: bool) -> None:
        """End it. `at_once`: without waiting for it."""
        with suppress(TruerollError):
            await self.client.close()
        if at_once:
            self._actor.kill()
        else:
            await self._actor.stop(STOP_SECONDS)
        self._socket.unlink(missing_ok=True)


class Launcher:
    """Starts workers on `cluster`. `settings`: of each worker and its engine. `folder`: for sockets."""

    def __init__(self, cluster: Cluster, config: FleetConfig, settings: Mapping[str, Any], folder: Path) -> None:
        self._cluster = cluster
        self._config = config
        self._settings = settings
        self._folder = folder

    async def launch(self, name: str) -> RunningWorker:
        """Start a worker, wherever there is room. Raise what keeps it from running."""
        from .ray_cluster import WorkerActor

        config = self._config
        actor = WorkerActor(self._cluster, config.cpus, config.gpus, config.resources)
        socket = self._folder / f"{name}-{secrets.token_hex(4)}.sock"
        try:
            address = await actor.start(self._settings, config.startup_timeout, socket)
            pids = await actor.pids()
        except BaseException:
            actor.kill()
            socket.unlink(missing_ok=True)
            raise
        client = AsyncRolloutClient(address, ANSWER_SECONDS, config.server_public_key, config.client_key)
        return RunningWorker(actor, socket, client, pids)
