"""A fleet: so many workers of one model, kept running on a Ray cluster.

Owns: the workers, by an actor each; the task that keeps each of them running; who is a member; the folder that weights
for a worker which joins are handed over in. Does not own requests: clients ask the workers themselves.

Promises: a worker that ends, hangs or fails is replaced, wherever there is room, soon the first time and after pauses
that grow if the next one does not last; it serves only once it has the weights that the others serve, and never those
of an earlier run; what keeps it from them is told; one that is to leave finishes what it has; when this process ends,
however, the workers end. A cluster that is lost is joined or started again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueroll.errors import (
    ConfigError,
    IllegalStateError,
    ModelError,
    TruerollError,
    WorkerFailedError,
    WorkerLostError,
    brief,
    said,
)

from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.loop_thread import LoopThread
from ..client.membership import Member, MembersFile, PushNote, Standing, noted_push, version_file
from ..monitoring.metrics import MetricsServer
from .config import MOST_WORKERS, split_settings
from .hand_over import WeightFolder, hand_over, have_the_same
from .joining import Joining
from .metrics import FleetMetrics, WorkerReport
from .totals import all_healths

if TYPE_CHECKING:
    from .ray_cluster import Cluster, WorkerActor

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 30.0
"""A worker that does not answer for so long is replaced: it answers while it computes. Clients measure it, and count no
time in which this process was stopped.
"""
SETTLE_SECONDS = 0.5
"""Until clients know who leaves."""
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A worker that lived for so long is replaced after `FIRST_PAUSE`; after one that did not, pauses double."""
STOP_SECONDS = 15.0
_HOPELESS = (ConfigError, ModelError)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Slot:
    """A place in the fleet, and who has it now. `socket`: of its worker, which may be killed and leave it behind.
    `first_error`: what kept its first worker from running, until another one runs. `waits_since`: the number of the
    latest call of `scale` after which nothing was found to have the weights that its worker needs.
    """

    name: str
    task: asyncio.Task[None] | None = None
    actor: WorkerActor | None = None
    socket: Path | None = None
    client: AsyncRolloutClient | None = None
    member: Member | None = None
    health: protocol.Health | None = None
    stats: protocol.Stats | None = None
    is_leaving: bool = False
    first_error: TruerollError | None = None
    starts: int = 0
    pids: tuple[int, int] | None = None
    waits_since: int | None = None
    joining: Joining = field(init=False)

    def __post_init__(self) -> None:
        self.joining = Joining(self.name)

    @property
    def is_serving(self) -> bool:
        return self.member is not None and self.member.standing == "serving"


class Fleet:
    """Starts `num_workers` workers that serve `model` on a Ray cluster, and returns when all serve. A context manager,
    and what `FleetClient` and `WeightPublisher.connect_fleet` are given.

    `settings`: those of `launch_worker`, for each worker, which on other machines needs `curve_secret_key_file` and
    `clients_file`; and of the fleet (`FleetConfig` has defaults and ranges):

    `ray_address`: of a cluster to join, `auto` for the one of this machine; None: a local one is started, or used if
    this process has one. `ray_without_authentication`: use also a cluster that asks for no token, with a warning.
    `cpus`, `gpus`, `resources`: what Ray reserves for each worker. `file`: is kept up to date with who is there, for
    clients in other processes. `weights_folder`: a folder that all machines share, and that pushes by `disk` write to,
    if that is how they come: a worker that joins gets its weights from there, otherwise from another worker by it; by
    default one on this machine. `server_public_key`, `client_key`: for workers with named
    clients; the client's role must be control. `hang_seconds`: a worker whose engine has work and gets nothing done for
    so long is replaced. `drain_timeout`: seconds that a worker which leaves has for what it has. `metrics_port`: where
    127.0.0.1 serves `/metrics` of all workers, but their durations, and `/healthz`; 0: any free one; None: nowhere.

    Raise ConfigError for an unknown setting or a wrong value; ConfigError or ModelError if a worker cannot run so;
    WorkerFailedError if one is not ready within `startup_timeout` seconds of being placed; and what keeps one from the
    weights that were pushed to others meanwhile.
    """

    def __init__(self, model: str, num_workers: int, **settings: Any) -> None:
        self._config, worker, engine = split_settings({"model": model, "num_workers": num_workers, **settings})
        if find_spec("ray") is None:
            raise ConfigError("fleet: expected the package ray, found none; pip install 'trueroll[ray]'")
        from .ray_cluster import Cluster

        self._settings = {"worker": worker.model_dump(), "engine": engine.model_dump()}
        self._keys = self._config.server_public_key, self._config.client_key
        self._file = None if self._config.file is None else Path(self._config.file)
        has_users = worker.curve_secret_key_file is not None  # named clients may be other users of the machine
        self._members_file = self._file and MembersFile(self._file, 0o644 if has_users else 0o600)
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-fleet-")
        self._weights = WeightFolder(Path(self._config.weights_folder or self._folder.name))
        self._weights.make()
        self._slots: dict[str, _Slot] = {}
        self._members: tuple[Member, ...] = ()
        self._noted: PushNote | None = None
        """What a worker must serve that joins while no other one serves; None: its checkpoint."""
        self._noted_in_file: PushNote | None = None
        self._num_notes = self._num_scales = 0
        self._is_closed = False
        self._has_cluster = asyncio.Event()
        self._has_cluster.set()
        if self._file is not None and not self._file.parent.is_dir():
            raise ConfigError(f"file: expected one in a folder that is there, found {self._file}; make the folder")
        self._cluster: Cluster = Cluster(self._config.ray_address, self._config.ray_without_authentication)
        self._thread = LoopThread("fleet")
        self._metrics: MetricsServer | None = None
        self._thread.submit(self._watch_cluster())
        try:
            self._remove_version_file()
            self._publish()
            if self._members_file is not None and self._members_file.is_stale:
                raise ConfigError(f"file: cannot write {self._file}; correct the path or its permissions")
            if self._config.metrics_port is not None:
                self._metrics = MetricsServer(self._config.metrics_port, self, FleetMetrics(self.reports))
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
        they had. Attempts to hand weights over that were given up are made again.

        Raise what keeps a worker from its first start, or from the weights of the others; IllegalStateError for more of
        them while all sleep, or if all were lost and nothing has the weights that were pushed; and TruerollError if the
        fleet is closed meanwhile. What was asked for is done all the same, once it can be.
        """
        _check_count(num_workers)
        try:
            self._thread.submit(self._scale(num_workers)).result()
        except CancelledError:
            raise TruerollError("fleet: closed; make a new one") from None

    def pids(self) -> dict[str, tuple[int, int]]:
        """The processes of each worker that runs, by its name: of its actor, and its own, each on its machine."""
        return {name: slot.pids for name, slot in self._slots.items() if slot.pids is not None}

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are."""
        return None if self._metrics is None else self._metrics.port

    def note_push(self, note: PushNote) -> None:
        """All serve that push now; see `KeepsPush`. Publishers that are connected call it."""
        self._noted, self._num_notes = note, self._num_notes + 1

    def health(self) -> protocol.Health:
        """How the fleet was half a second ago; see `FleetClient.health`. Raise WorkerLostError while no worker runs."""
        found = [slot.health for slot in [*self._slots.values()] if slot.health is not None]
        if not found:
            raise WorkerLostError("fleet: expected a worker that runs, found none yet; see the log")
        return all_healths(found, [member.told for member in self._members if member.trouble])

    def reports(self) -> dict[str, WorkerReport]:
        """What each worker said of itself last, by its name, also of those that are being replaced."""
        return {
            name: WorkerReport(
                slot.member and slot.member.standing,
                slot.health,
                slot.stats,
                max(0, slot.starts - 1),
                slot.joining.num_failures,
            )
            for name, slot in [*self._slots.items()]
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
        await asyncio.gather(*(self._release(slot) for slot in self._slots.values()))

    async def _scale(self, num_workers: int) -> None:
        slots = [slot for slot in self._slots.values() if not slot.is_leaving]
        if num_workers > len(slots):
            await self._check_awake()
        free = (name for i in range(num_workers + len(self._slots)) if (name := f"worker-{i}") not in self._slots)
        for _ in range(num_workers - len(slots)):
            slot = _Slot(next(free))
            self._slots[slot.name] = slot
            slot.task = asyncio.create_task(self._keep(slot))
        leaving = slots[num_workers:]
        for slot in leaving:
            slot.is_leaving = True
        self._num_scales += 1
        for slot in self._slots.values():
            if not slot.is_leaving:
                slot.joining.retry()
        await asyncio.gather(*map(self._dismiss, leaving))
        while not all(slot.is_serving for slot in self._slots.values() if not slot.is_leaving):
            self._check_joining()
            await asyncio.sleep(0.05)

    def _check_joining(self) -> None:
        """Raise what keeps workers from serving, if waiting does not help."""
        slots = self._slots.values()
        for slot in slots:
            if error := slot.first_error or slot.joining.error:
                raise error
        if self._noted is None or any(slot.is_serving for slot in slots):
            return
        if any(slot.waits_since == self._num_scales for slot in slots):
            raise IllegalStateError(
                f"scale: all workers were lost, and nothing has the weights of version {self._noted.version} that they "
                "served; push them again, with publisher.restore(model) or push_folder, or push newer ones: then the "
                "workers that wait will serve"
            )

    async def _check_awake(self) -> None:
        serving = [slot for slot in self._slots.values() if slot.is_serving]
        await asyncio.gather(*map(self._look, serving), return_exceptions=True)  # health may be half a second old
        if self._is_asleep:
            raise IllegalStateError(
                "scale: expected a worker that is awake, from which a new one gets its weights, found all asleep; wake "
                "them up first"
            )

    async def _dismiss(self, slot: _Slot) -> None:
        """Let a worker finish what it has, and end it."""
        self._stand(slot, "leaving")
        await asyncio.sleep(SETTLE_SECONDS)
        deadline = time.monotonic() + self._config.drain_timeout
        while slot.client is not None and time.monotonic() < deadline:
            with suppress(TruerollError, TimeoutError):
                if (await self._look(slot)).requests["open"] == 0:
                    break
            await asyncio.sleep(LOOK_SECONDS)
        assert slot.task is not None
        slot.task.cancel()
        await asyncio.gather(slot.task, return_exceptions=True)
        del self._slots[slot.name]
        self._publish()

    async def _keep(self, slot: _Slot) -> None:
        """Have a worker in this slot, and another one whenever it is lost."""
        pause = FIRST_PAUSE
        while True:
            await self._has_cluster.wait()
            while slot.starts and self._is_asleep:
                await asyncio.sleep(LOOK_SECONDS)
            began = time.monotonic()
            try:
                await self._serve(slot)
            except TruerollError as error:
                log.warning("fleet: %s: %s", slot.name, error)
                is_late = time.monotonic() - began >= self._config.startup_timeout
                is_hopeless = isinstance(error, _HOPELESS) or (is_late and isinstance(error, WorkerFailedError))
                if slot.starts == 1 and is_hopeless and slot.member is None:
                    slot.first_error = error
            except Exception as error:
                log.exception("fleet: %s: %r", slot.name, error)
                if slot.starts == 1 and slot.member is None and isinstance(error, ValueError | TypeError):
                    slot.first_error = ConfigError(
                        f"fleet: Ray does not take these settings: {said(error)}; correct them"
                    )
            finally:
                await asyncio.shield(self._release(slot, at_once=not slot.is_leaving))
            if slot.is_leaving:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY_SECONDS else min(2 * pause, MOST_PAUSE)
            await asyncio.sleep(pause)

    @property
    def _is_asleep(self) -> bool:
        """Whether all that serve are: the memory of those that were lost is then left to the trainer as well."""
        states = [slot.health.state for slot in self._slots.values() if slot.is_serving and slot.health is not None]
        return bool(states) and all(state == "asleep" for state in states)

    async def _serve(self, slot: _Slot) -> None:
        """From the start of a worker to its end, which raises."""
        from .ray_cluster import WorkerActor

        slot.starts += 1
        slot.actor = WorkerActor(self._cluster, self._config.cpus, self._config.gpus, self._config.resources)
        slot.socket = Path(self._folder.name) / f"{slot.name}-{secrets.token_hex(4)}.sock"
        address = await slot.actor.start(self._settings, self._config.startup_timeout, slot.socket)
        slot.pids = await slot.actor.pids()
        slot.client = AsyncRolloutClient(address, ANSWER_SECONDS, *self._keys)
        health = await self._look(slot)
        slot.member, slot.first_error = Member(slot.name, address, health.instance, "joining"), None
        log.info("fleet: %s runs at %s", slot.name, address)
        ended = asyncio.ensure_future(slot.actor.ended())
        served = asyncio.ensure_future(self._watch_worker(slot))
        try:
            await asyncio.wait((ended, served), return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                served.result()
            raise WorkerLostError(f"worker: {ended.result() if ended.done() else 'it left'}; it is replaced")
        finally:
            for task in (ended, served):
                task.cancel()
            await asyncio.gather(ended, served, return_exceptions=True)

    async def _watch_worker(self, slot: _Slot) -> None:
        """Let it join, and look at it until it is lost, which raises."""
        while True:
            if not slot.is_serving and not slot.is_leaving:
                await self._join(slot)
            await asyncio.sleep(LOOK_SECONDS)
            health = await self._look(slot)
            slot.stats = await slot.client.stats() if slot.client else None
            if health.state == "failed":
                raise WorkerFailedError("worker: its engine has failed; it is replaced")
            if health.state == "ready" and health.requests.get("running"):
                if (health.seconds_since_progress or 0.0) > self._config.hang_seconds:
                    raise WorkerFailedError(f"worker: no progress for {self._config.hang_seconds} s; it is replaced")
            if slot.is_serving and self._is_behind(slot):
                self._stand(slot, "joining")

    async def _look(self, slot: _Slot) -> protocol.Health:
        assert slot.client is not None
        self._read_note()
        if self._members_file is not None and self._members_file.is_stale:
            self._publish()
        slot.health = await slot.client.health()
        if slot.is_serving and self._is_newer(slot.health.weight_version):
            await self._note_served(slot.client)
        return slot.health

    async def _note_served(self, client: AsyncRolloutClient) -> None:
        """Note the push that a worker serves, if no publisher did."""
        num_notes = self._num_notes
        with suppress(IllegalStateError):  # it has no weights that could be told now
            weights = await client.ask(protocol.GetWeights(id=protocol.new_id()))
            assert isinstance(weights, protocol.Weights)
            is_newer = num_notes == self._num_notes and self._is_newer(weights.weight_version)
            if is_newer and weights.push_id is not None:
                self._noted = PushNote(weights.weight_version, weights.push_id)

    def _is_newer(self, version: int | None) -> bool:
        return (version or 0) > (0 if self._noted is None else self._noted.version)

    def _read_note(self) -> None:
        """What a trainer in another process has pushed."""
        noted = None if self._file is None else noted_push(self._file)
        if noted is not None and noted != self._noted_in_file:
            self._noted_in_file = noted
            self.note_push(noted)

    def _is_behind(self, slot: _Slot) -> bool:
        """Whether the others serve newer weights, and no push is under way that may just have reached them."""
        others = [other.health for other in self._slots.values() if other.is_serving and other.health is not None]
        if slot.health is None or any(health.push or health.state == "updating" for health in others):
            return False
        newest = max((health.weight_version or 0 for health in others), default=0)
        return (slot.health.weight_version or 0) < newest

    async def _join(self, slot: _Slot) -> None:
        """Bring a worker to the weights of the others, and let it serve. While nobody has them it waits for a push.

        A push that ends afterwards finds it among those that serve; one that has ended before is seen here. One that
        is to leave meanwhile does not join any more.
        """
        assert slot.client is not None
        while not slot.is_leaving:
            self._stand(slot, "joining")
            peer = self._newest_peer(slot)
            peer_client = peer and peer.client
            self._read_note()
            num_scales = self._num_scales
            outcome = await slot.joining.attempt(
                (self._noted, peer and peer.member),
                peer and peer.health and peer.health.state,
                partial(hand_over, slot.client, peer_client, self._noted, self._weights, self, self._keys),
            )
            if outcome == "done" and not slot.is_leaving:
                self._stand(slot, "serving")
                if peer_client is None or await self._have_the_same(slot.client, peer_client):
                    return
            await asyncio.sleep(LOOK_SECONDS)
            health = await self._look(slot)
            if health.state == "failed":
                raise WorkerFailedError("worker: its engine has failed; it is replaced")
            is_waiting = outcome == "waiting" and peer is None and not self._is_pushed_to(health)
            slot.waits_since = num_scales if is_waiting else None

    def _is_pushed_to(self, health: protocol.Health) -> bool:
        """Whether a worker that waits for weights gets them now, or just got them."""
        return health.push is not None or health.state == "updating" or not self._is_older(health.weight_version)

    def _is_older(self, version: int | None) -> bool:
        return self._noted is not None and (version or 0) < max(1, self._noted.version)

    async def _have_the_same(self, client: AsyncRolloutClient, peer: AsyncRolloutClient) -> bool:
        try:
            return await have_the_same(client, peer)
        except TruerollError as error:
            log.warning(
                "fleet: the weights of two workers could not be compared; they are handed over again: %s", error
            )
            return False

    def _remove_version_file(self) -> None:
        if self._file is not None:
            version_file(self._file).unlink(missing_ok=True)

    def _newest_peer(self, slot: _Slot) -> _Slot | None:
        peers = [other for other in self._slots.values() if other is not slot and other.is_serving and other.health]
        return max(peers, key=_readiness_to_give, default=None)

    async def _release(self, slot: _Slot, at_once: bool = False) -> None:
        """End what is in a slot."""
        client, actor, socket = slot.client, slot.actor, slot.socket
        slot.client, slot.actor, slot.member, slot.health, slot.stats, slot.pids = None, None, None, None, None, None
        slot.waits_since = None
        self._publish()
        if client is not None:
            with suppress(TruerollError):
                await client.close()
        if actor is None:
            return
        if at_once:
            actor.kill()
        else:
            await actor.stop(STOP_SECONDS)
        if socket is not None:
            socket.unlink(missing_ok=True)

    def _stand(self, slot: _Slot, standing: Standing) -> None:
        if slot.member is not None:
            slot.member = replace(slot.member, standing=standing, trouble=slot.joining.trouble)
            self._publish()

    def _publish(self) -> None:
        """Tell who is there."""
        self._members = tuple(slot.member for slot in self._slots.values() if slot.member is not None)
        if self._members_file is not None:
            self._members_file.tell(self._members)

    async def _watch_cluster(self) -> None:
        """When the cluster is lost, and with it all workers, join it or start it again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await asyncio.to_thread(self._cluster.is_alive):
                continue
            log.warning("fleet: the cluster was lost; all workers are replaced")
            self._has_cluster.clear()
            lost = {slot: slot.task for slot in self._slots.values() if slot.task is not None}
            for task in lost.values():
                task.cancel()
            await asyncio.gather(*lost.values(), return_exceptions=True)
            await self._reconnect()
            self._has_cluster.set()
            for slot in lost:
                if not slot.is_leaving:
                    slot.task = asyncio.create_task(self._keep(slot))

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._cluster.reconnect()
            except TruerollError as error:
                log.warning("%s", error)
            except Exception as error:
                log.exception("fleet: the cluster was not started again, next attempt in %s s: %r", pause, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)


def _readiness_to_give(peer: _Slot) -> tuple[int, bool]:
    """Newer weights first, and of those with the same a worker that can write them now."""
    assert peer.health is not None
    return peer.health.weight_version or 0, peer.health.state in ("ready", "paused")


def _check_count(num_workers: int) -> None:
    if type(num_workers) is not int or not 1 <= num_workers <= MOST_WORKERS:
        raise ConfigError(
            f"num_workers: expected an integer from 1 to {MOST_WORKERS}, found {brief(num_workers)}; correct it"
        )
