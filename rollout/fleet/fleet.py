"""A fleet: so many workers of one model, kept running on a Ray cluster.

Owns: the cluster, or the connection to it, and the parts of the fleet, which `Scaler`, `Keeper`, `Slots` and
`FleetWeights` describe. Does not own requests: clients ask the workers themselves.

Promises: there are as many workers as `scale` asked for, wherever there is room; a worker never serves the weights of
an earlier run; what keeps one from serving is told; when this process ends, however, the workers end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import CancelledError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trueroll.errors import ConfigError, TruerollError, WorkerLostError, brief

from .. import protocol
from ..client.client import LoopThread
from ..client.membership import Member, MembersFile, PushNote
from ..monitoring.metrics import MetricsServer
from .config import MOST_WORKERS, split_settings
from .fleet_weights import FleetWeights
from .hand_over import WeightFolder
from .keeper import Keeper
from .metrics import FleetMetrics, WorkerReport
from .running_worker import Launcher
from .scaler import Scaler
from .slots import Slots
from .totals import all_healths


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
        config, worker, engine = split_settings({"model": model, "num_workers": num_workers, **settings})
        if find_spec("ray") is None:
            raise ConfigError("fleet: expected the package ray, found none; pip install 'trueroll[ray]'")
        from .ray_cluster import Cluster

        file = None if config.file is None else Path(config.file)
        has_users = worker.curve_secret_key_file is not None  # named clients may be other users of the machine
        self._slots = Slots(None if file is None else MembersFile(file, 0o644 if has_users else 0o600))
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-fleet-")
        weight_folder = WeightFolder(Path(config.weights_folder or self._folder.name))
        weight_folder.make()
        self._weights = FleetWeights(weight_folder, file, self._slots, (config.server_public_key, config.client_key))
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"file: expected one in a folder that is there, found {file}; make the folder")
        self._is_closed = False
        self._cluster = Cluster(config.ray_address, config.ray_without_authentication)
        of_each = {"worker": worker.model_dump(), "engine": engine.model_dump()}
        launcher = Launcher(self._cluster, config, of_each, Path(self._folder.name))
        keeper = Keeper(self._slots, launcher, self._weights, config)
        self._scaler = Scaler(self._slots, keeper, self._weights, self._cluster, config.drain_timeout)
        self._thread = LoopThread("fleet")
        self._metrics: MetricsServer | None = None
        self._thread.submit(self._scaler.watch_cluster())
        try:
            self._weights.remove_note()
            self._slots.publish()
            if self._slots.is_stale:
                raise ConfigError(f"file: cannot write {file}; correct the path or its permissions")
            if config.metrics_port is not None:
                self._metrics = MetricsServer(config.metrics_port, self, FleetMetrics(self.reports))
            self.scale(num_workers)
        except BaseException:
            self.close()
            raise

    def members(self) -> Sequence[Member]:
        """Who is there now, also those that join or leave."""
        return self._slots.members()

    @property
    def num_serving(self) -> int:
        """How many workers serve now."""
        return sum(member.standing == "serving" for member in self.members())

    def scale(self, num_workers: int) -> None:
        """Have so many workers from now on. Returns when all serve, and those that are too many have left, after what
        they had. Attempts to hand weights over that were given up are made again.

        Raise what keeps a worker from its first start, or from the weights of the others; IllegalStateError for more of
        them while all sleep, or if all were lost and nothing has the weights that were pushed; and TruerollError if the
        fleet is closed meanwhile. What was asked for is done all the same, once it can be.
        """
        _check_count(num_workers)
        try:
            self._thread.submit(self._scaler.scale(num_workers)).result()
        except CancelledError:
            raise TruerollError("fleet: closed; make a new one") from None

    def pids(self) -> dict[str, tuple[int, int]]:
        """The processes of each worker that runs, by its name: of its actor, and its own, each on its machine."""
        return {slot.name: worker.pids for slot in self._slots if (worker := slot.worker) is not None}

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are."""
        return None if self._metrics is None else self._metrics.port

    def note_push(self, note: PushNote) -> None:
        """All serve that push now; see `KeepsPush`. Publishers that are connected call it."""
        self._weights.note(note)

    def health(self) -> protocol.Health:
        """How the fleet was half a second ago; see `FleetClient.health`. Raise WorkerLostError while no worker runs."""
        found = [report.health for report in self.reports().values() if report.health is not None]
        if not found:
            raise WorkerLostError("fleet: expected a worker that runs, found none yet; see the log")
        return all_healths(found, [member.told for member in self.members() if member.trouble])

    def reports(self) -> dict[str, WorkerReport]:
        """What each worker said of itself last, by its name, also of those that are being replaced."""
        return {slot.name: slot.report for slot in self._slots}

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Harmless if that has happened."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._metrics is not None:
            self._metrics.close()
        self._thread.end(self._scaler.end, cancel=True)
        self._cluster.close()
        self._folder.cleanup()
        self._slots.withdraw()
        self._weights.remove_note()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_count(num_workers: int) -> None:
    if type(num_workers) is not int or not 1 <= num_workers <= MOST_WORKERS:
        raise ConfigError(
            f"num_workers: expected an integer from 1 to {MOST_WORKERS}, found {brief(num_workers)}; correct it",
            field="num_workers",
            value=num_workers,
            limit=MOST_WORKERS,
        )
