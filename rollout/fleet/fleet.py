"""A fleet: so many workers of one model, kept running on a Ray cluster.

Owns: the workers, by an actor each; the task that keeps each of them running; who is a member; the folder that weights
for a worker which joins are handed over in. Does not own requests: clients ask the workers themselves.

Promises: a worker that ends, hangs or fails is replaced, elsewhere where there is room, at once the first time and with
pauses that grow if that fails; it serves only once it has the weights that the others serve; one that is to leave
finishes what it has; when this process ends, however, the workers end. A cluster that is lost is joined or started
again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueroll.errors import ConfigError, ModelError, TruerollError, WorkerFailedError, WorkerLostError

from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.loop_thread import LoopThread
from ..client.membership import Member, Standing, noted_version, version_file, write_members
from ..monitoring.metrics import MetricsServer
from .config import split_settings
from .hand_over import WeightFolder, hand_over, have_the_same
from .metrics import FleetMetrics, Told
from .totals import all_healths

if TYPE_CHECKING:
    from .ray_cluster import Cluster, Place

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 30.0
"""A worker that does not answer for so long is replaced: it answers while it computes. Clients measure it, and count no
time in which this process was stopped.
"""
SETTLE_SECONDS = 0.5
"""Until clients know who leaves."""
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A worker that lived for so long is replaced at once."""
STOP_SECONDS = 15.0
_HOPELESS = (ConfigError, ModelError)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Post:
    """A place in the fleet, and who has it now. `socket`: of its worker, which may be killed and leave it behind.
    `first_error`: what kept its first worker from running.
    """

    name: str
    task: asyncio.Task[None] | None = None
    place: Place | None = None
    socket: Path | None = None
    client: AsyncRolloutClient | None = None
    member: Member | None = None
    health: protocol.Health | None = None
    stats: protocol.Stats | None = None
    is_leaving: bool = False
    first_error: TruerollError | None = None
    starts: int = 0
    pids: tuple[int, int] | None = None

    @property
    def is_serving(self) -> bool:
        return self.member is not None and self.member.standing == "serving"


class Fleet:
    """Starts `num_workers` workers that serve `model` on a Ray cluster, and returns when all serve. A context manager,
    and what `FleetClient` and `WeightPublisher.connect_fleet` are given.

    `settings`: those of `launch_worker`, for each worker, which on other machines needs `curve_secret_key_file` and
    `clients_file`; and of the fleet (`FleetConfig` has defaults and ranges):

    `ray_address`: of a cluster to join, `auto` for the one of this machine; None: a local one is started, or used if
    this process has one. `cpus`, `gpus`, `resources`: what Ray reserves for each worker. `file`: is kept up to date
    with who is there, for clients in other processes. `weights_folder`: a folder that all machines share, and that
    pushes by `disk` write to, if that is how they come: a worker that joins gets its weights from there, otherwise from
    another worker by it; by default one on this machine. `server_public_key`, `client_key`: for workers with named
    clients; the client's role must be control. `hang_seconds`: a worker whose engine has work and gets nothing done for
    so long is replaced. `drain_timeout`: seconds that a worker which leaves has for what it has. `metrics_port`: where
    127.0.0.1 serves `/metrics` of all workers, but their durations, and `/healthz`; 0: any free one; None: nowhere.

    Raise ConfigError for an unknown setting or a wrong value; ConfigError or ModelError if a worker cannot run so;
    WorkerFailedError if one is not ready within `startup_timeout` seconds of being placed.
    """

    def __init__(self, model: str, num_workers: int, **settings: Any) -> None:
        self._config, worker, engine = split_settings({"model": model, "num_workers": num_workers, **settings})
        if find_spec("ray") is None:
            raise ConfigError("fleet: expected the package ray, found none; pip install 'trueroll[ray]'")
        from .ray_cluster import Cluster

        self._settings = {"worker": worker.model_dump(), "engine": engine.model_dump()}
        self._keys = self._config.server_public_key, self._config.client_key
        self._file = None if self._config.file is None else Path(self._config.file)
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-fleet-")
        self._weights = WeightFolder(Path(self._config.weights_folder or self._folder.name))
        self._posts: dict[str, _Post] = {}
        self._members: tuple[Member, ...] = ()
        self._version = 0
        """What a worker must serve at least that joins while no other one serves."""
        self._num_notes = self._noted_in_file = 0
        self._is_closed = False
        self._has_cluster = asyncio.Event()
        self._has_cluster.set()
        self._remove_version_file()
        self._publish()
        self._cluster: Cluster = Cluster(self._config.ray_address)
        self._thread = LoopThread("fleet")
        self._metrics: MetricsServer | None = None
        self._thread.submit(self._watch_cluster())
        try:
            if self._config.metrics_port is not None:
                self._metrics = MetricsServer(self._config.metrics_port, self, FleetMetrics(self.told))
            self.scale(num_workers)
        except BaseException:
            self.close()
            raise

    def members(self) -> Sequence[Member]:
        """Who is there now, also those that join or leave."""
        return self._members

    @property
    def num_serving(self) -> int:
        """How many workers serve now."""
        return sum(member.standing == "serving" for member in self._members)

    def scale(self, num_workers: int) -> None:
        """Have so many workers from now on. Returns when all serve, and those that are too many have left, after what
        they had.
        """
        _check_count(num_workers)
        self._thread.submit(self._scale(num_workers)).result()

    def pids(self) -> dict[str, tuple[int, int]]:
        """The processes of each worker that runs, by its name: of its actor, and its own, each on its machine."""
        return {name: post.pids for name, post in self._posts.items() if post.pids is not None}

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are."""
        return None if self._metrics is None else self._metrics.port

    def note_version(self, version: int) -> None:
        """All serve a push of that version now; see `KeepsVersion`. Publishers that are connected call it."""
        self._version, self._num_notes = version, self._num_notes + 1

    def health(self) -> protocol.Health:
        """How the fleet was half a second ago; see `FleetClient.health`. Raise WorkerLostError while no worker runs."""
        found = [post.health for post in [*self._posts.values()] if post.health is not None]
        if not found:
            raise WorkerLostError("fleet: expected a worker that runs, found none yet; see the log")
        return all_healths(found)

    def told(self) -> dict[str, Told]:
        """What each worker said of itself last, by its name, also of those that are being replaced."""
        return {
            post.name: Told(post.member and post.member.standing, post.health, post.stats, max(0, post.starts - 1))
            for post in [*self._posts.values()]
        }

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Harmless if that has happened."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._metrics is not None:
            self._metrics.close()
        self._thread.end(self._end, cancel=True)
        self._cluster.close()
        self._folder.cleanup()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._remove_version_file()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        await asyncio.gather(*(self._release(post) for post in self._posts.values()))

    async def _scale(self, num_workers: int) -> None:
        posts = [post for post in self._posts.values() if not post.is_leaving]
        free = (name for i in range(num_workers + len(self._posts)) if (name := f"worker-{i}") not in self._posts)
        for _ in range(num_workers - len(posts)):
            post = _Post(next(free))
            self._posts[post.name] = post
            post.task = asyncio.create_task(self._keep(post))
        leaving = posts[num_workers:]
        for post in leaving:
            post.is_leaving = True
        await asyncio.gather(*map(self._dismiss, leaving))
        while not all(post.is_serving for post in self._posts.values() if not post.is_leaving):
            for post in self._posts.values():
                if post.first_error is not None:
                    raise post.first_error
            await asyncio.sleep(0.05)

    async def _dismiss(self, post: _Post) -> None:
        """Let a worker finish what it has, and end it."""
        self._stand(post, "leaving")
        await asyncio.sleep(SETTLE_SECONDS)
        deadline = time.monotonic() + self._config.drain_timeout
        while post.client is not None and time.monotonic() < deadline:
            with suppress(TruerollError, TimeoutError):
                if (await self._look(post)).requests["open"] == 0:
                    break
            await asyncio.sleep(LOOK_SECONDS)
        assert post.task is not None
        post.task.cancel()
        await asyncio.gather(post.task, return_exceptions=True)
        del self._posts[post.name]
        self._publish()

    async def _keep(self, post: _Post) -> None:
        """Have a worker at this post, and another one whenever it is lost."""
        pause = FIRST_PAUSE
        while True:
            await self._has_cluster.wait()
            began = time.monotonic()
            try:
                await self._serve(post)
            except TruerollError as error:
                log.warning("fleet: %s: %s", post.name, error)
                if post.starts == 1 and isinstance(error, _HOPELESS) and post.member is None:
                    post.first_error = error
            except Exception as error:
                log.exception("fleet: %s: %r", post.name, error)
            finally:
                await asyncio.shield(self._release(post, at_once=not post.is_leaving))
            if post.is_leaving:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY_SECONDS else min(2 * pause, MOST_PAUSE)
            await asyncio.sleep(pause)

    async def _serve(self, post: _Post) -> None:
        """From the start of a worker to its end, which raises."""
        from .ray_cluster import Place

        post.starts += 1
        post.place = Place(self._cluster, self._config.cpus, self._config.gpus, self._config.resources)
        post.socket = Path(self._folder.name) / f"{post.name}-{secrets.token_hex(4)}.sock"
        address = await post.place.start(self._settings, self._config.startup_timeout, post.socket)
        post.pids = await post.place.pids()
        post.client = AsyncRolloutClient(address, ANSWER_SECONDS, *self._keys)
        health = await self._look(post)
        post.member = Member(post.name, address, health.instance, "joining")
        log.info("fleet: %s runs at %s", post.name, address)
        ended = asyncio.ensure_future(post.place.ended())
        served = asyncio.ensure_future(self._watch_worker(post))
        try:
            await asyncio.wait((ended, served), return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                served.result()
            raise WorkerLostError(f"worker: {ended.result() if ended.done() else 'it left'}; it is replaced")
        finally:
            for task in (ended, served):
                task.cancel()
            await asyncio.gather(ended, served, return_exceptions=True)

    async def _watch_worker(self, post: _Post) -> None:
        """Let it join, and look at it until it is lost, which raises."""
        while True:
            if not post.is_serving and not post.is_leaving:
                await self._join(post)
            await asyncio.sleep(LOOK_SECONDS)
            health = await self._look(post)
            post.stats = await post.client.stats() if post.client else None
            if health.state == "failed":
                raise WorkerFailedError("worker: its engine has failed; it is replaced")
            if health.state == "ready" and health.requests.get("running"):
                if (health.seconds_since_progress or 0.0) > self._config.hang_seconds:
                    raise WorkerFailedError(f"worker: no progress for {self._config.hang_seconds} s; it is replaced")
            if post.is_serving and self._is_behind(post):
                self._stand(post, "joining")

    async def _look(self, post: _Post) -> protocol.Health:
        assert post.client is not None
        self._read_note()
        num_notes = self._num_notes
        post.health = await post.client.health()
        if post.is_serving and num_notes == self._num_notes:
            self._version = max(self._version, post.health.weight_version or 0)
        return post.health

    def _read_note(self) -> None:
        """What a trainer in another process has pushed."""
        noted = 0 if self._file is None else noted_version(self._file)
        if noted != self._noted_in_file:
            self._noted_in_file = noted
            self.note_version(noted)

    def _is_behind(self, post: _Post) -> bool:
        """Whether the others serve newer weights, and no push is under way that may just have reached them."""
        others = [other.health for other in self._posts.values() if other.is_serving and other.health is not None]
        if post.health is None or any(health.push or health.state == "updating" for health in others):
            return False
        newest = max((health.weight_version or 0 for health in others), default=0)
        return (post.health.weight_version or 0) < newest

    async def _join(self, post: _Post) -> None:
        """Bring a worker to the weights of the others, and let it serve. While nobody has them it waits for a push.

        A push that ends afterwards finds it among those that serve; one that has ended before is seen here.
        """
        assert post.client is not None
        while True:
            self._stand(post, "joining")
            peer = self._newest_peer(post)
            peer_client = peer and peer.client
            self._read_note()
            if await hand_over(post.client, peer_client, self._version, self._weights, self, self._keys):
                self._stand(post, "serving")
                if peer_client is None or await have_the_same(post.client, peer_client):
                    return
            await asyncio.sleep(LOOK_SECONDS)
            await self._look(post)

    def _remove_version_file(self) -> None:
        if self._file is not None:
            version_file(self._file).unlink(missing_ok=True)

    def _newest_peer(self, post: _Post) -> _Post | None:
        peers = [other for other in self._posts.values() if other is not post and other.is_serving and other.health]
        return max(peers, key=lambda peer: (peer.health and peer.health.weight_version) or 0, default=None)

    async def _release(self, post: _Post, at_once: bool = False) -> None:
        """End what is at a post."""
        client, place, socket = post.client, post.place, post.socket
        post.client, post.place, post.member, post.health, post.stats, post.pids = None, None, None, None, None, None
        self._publish()
        if client is not None:
            with suppress(TruerollError):
                await client.close()
        if place is None:
            return
        if at_once:
            place.kill()
        else:
            await place.stop(STOP_SECONDS)
        if socket is not None:
            socket.unlink(missing_ok=True)

    def _stand(self, post: _Post, standing: Standing) -> None:
        if post.member is not None:
            post.member = Member(post.member.name, post.member.address, post.member.incarnation, standing)
            self._publish()

    def _publish(self) -> None:
        """Tell who is there."""
        members = tuple(post.member for post in self._posts.values() if post.member is not None)
        if self._file is not None and (members != self._members or not self._file.exists()):
            write_members(self._file, members)
        self._members = members

    async def _watch_cluster(self) -> None:
        """When the cluster is lost, and with it all workers, join it or start it again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await asyncio.to_thread(self._cluster.is_alive):
                continue
            log.warning("fleet: the cluster was lost; all workers are replaced")
            self._has_cluster.clear()
            lost = {post: post.task for post in self._posts.values() if post.task is not None}
            for task in lost.values():
                task.cancel()
            await asyncio.gather(*lost.values(), return_exceptions=True)
            await self._reconnect()
            self._has_cluster.set()
            for post in lost:
                if not post.is_leaving:
                    post.task = asyncio.create_task(self._keep(post))

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._cluster.reconnect()
            except TruerollError as error:
                log.warning("%s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)


def _check_count(num_workers: int) -> None:
    if type(num_workers) is not int or num_workers < 1:
        raise ConfigError(f"num_workers: expected an integer from 1 on, found {num_workers!r}; correct it")
