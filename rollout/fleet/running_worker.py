"""A running worker of a fleet: the worker's actor and process, a client of the worker, and the worker's last report.

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
"""A worker that does not answer for this long is replaced. A healthy worker answers even while it computes. The client
measures the time, and excludes periods in which this process was stopped.
"""
STOP_SECONDS = 15.0


class RunningWorker:
    """A running worker.

    `socket`: socket file of the worker; a killed worker leaves the file behind. `pids`: process ids of the actor and of
    the worker. `member`: the worker's entry in the list of members; None before the first answer. `health`, `stats`:
    the worker's last reports; None before the first report.
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
        """Return whether clients may send requests to the worker."""
        return self.member is not None and self.member.standing == "serving"

    async def look(self) -> protocol.Health:
        """Check the worker's health. Return the health report."""
        self.health = await self.client.health()
        return self.health

    def check_engine(self) -> None:
        """Raise WorkerFailedError if the worker's engine has failed."""
        if self.health is not None and self.health.state == "failed":
            raise WorkerFailedError("worker: its engine has failed; it will be replaced")

    def check_progress(self, hang_seconds: float) -> None:
        """Raise WorkerFailedError if the worker has running requests and has made no progress for `hang_seconds`."""
        health = self.health
        if health is not None and health.state == "ready" and health.requests.get("running"):
            if (health.seconds_since_progress or 0.0) > hang_seconds:
                raise WorkerFailedError(f"worker: no progress for {hang_seconds:g} s; it will be replaced")

    async def ended(self) -> str:
        """Wait until the worker or its actor has ended. Return a text that says how the worker or the actor ended."""
        return await self._actor.ended()

    async def end(self, at_once: bool) -> None:
        """End the worker. `at_once`: kill the worker instead of letting the worker drain and exit."""
        with suppress(TruerollError):
            await self.client.close()
        if at_once:
            self._actor.kill()
        else:
            await self._actor.stop(STOP_SECONDS)
        self._socket.unlink(missing_ok=True)


class Launcher:
    """Starts workers on `cluster`. `settings`: settings of each worker and engine. `folder`: folder for the workers'
    sockets.
    """

    def __init__(self, cluster: Cluster, config: FleetConfig, settings: Mapping[str, Any], folder: Path) -> None:
        self._cluster = cluster
        self._config = config
        self._settings = settings
        self._folder = folder

    async def launch(self, name: str) -> RunningWorker:
        """Start a worker on any machine that has room for it. Raise the worker's error if the worker cannot run."""
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
