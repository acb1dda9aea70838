"""Run and maintain a fleet of workers with the same model on a Ray cluster.

Owns: a local Ray cluster or the connection to another cluster, and the objects `Scaler`, `Keeper`, `Slots` and
`FleetWeights`. Does not own: requests, which clients send to the workers directly.

Guarantees:

- The fleet runs the requested number of workers if the cluster has room.
- A worker never serves weights that an earlier training run left behind.
- If a worker does not serve, the reason is reported.
- The workers end when this process ends, even if this process is killed.
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
    """A fleet of workers that serve `model` on a Ray cluster. The constructor starts `num_workers` workers and returns
    when all workers serve. A context manager. Pass the fleet to `FleetClient` and `WeightPublisher.connect_fleet`.

    `settings`: the settings of `launch_worker`, which apply to each worker, and the following settings of the fleet.
    `FleetConfig` has the default and the range of each setting. Workers on other machines need `curve_secret_key_file`
    and `clients_file`.

    - `ray_address`: address of a cluster to join, or `auto` for the cluster on this machine. None means the cluster
      that this process is already connected to. If this process is not connected to a cluster, the fleet starts a local
      cluster.
    - `ray_without_authentication`: also join clusters that do not require an authentication token, and log a warning
    - `cpus`, `gpus`, `resources`: the resources that Ray reserves for each worker
    - `file`: file with the current members, for clients in other processes
    - `weights_folder`: a folder that all machines share; by default a folder on this machine. Joining workers read
      their weights from `weights_folder`. If trainers push with the transport `disk`, let the trainers push to
      `weights_folder`. With other transports, a serving worker writes its weights to `weights_folder` when another
      worker joins.
    - `server_public_key`, `client_key`: keys for workers with named clients. The client with the key `client_key` needs
      the role `control`.
    - `startup_timeout`: maximum number of seconds from the start of a worker until it is ready
    - `hang_seconds`: a worker is replaced if its engine has work but makes no progress for this many seconds
    - `drain_timeout`: maximum number of seconds for a leaving worker to finish its requests
    - `metrics_port`: port on 127.0.0.1 for `/healthz` and `/metrics`. The metrics cover all workers, but do not include
      the histograms of durations. Port 0 means any free port; None disables the metrics.

    Raise ConfigError if a setting is unknown or invalid. Raise ConfigError or ModelError if a worker cannot run with
    the settings. Raise WorkerFailedError if a worker is not ready within `startup_timeout`. If weights are pushed while
    the fleet starts and a worker cannot get these weights, raise the worker's error.
    """

    def __init__(self, model: str, num_workers: int, **settings: Any) -> None:
        config, worker, engine = split_settings({"model": model, "num_workers": num_workers, **settings})
        if find_spec("ray") is None:
            raise ConfigError("fleet: the package ray is not installed; run pip install 'trueroll[ray]'")
        from .ray_cluster import Cluster

        file = None if config.file is None else Path(config.file)
        has_users = worker.curve_secret_key_file is not None  # named clients may belong to other users of the machine
        self._slots = Slots(None if file is None else MembersFile(file, 0o644 if has_users else 0o600))
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-fleet-")
        weight_folder = WeightFolder(Path(config.weights_folder or self._folder.name))
        weight_folder.make()
        self._weights = FleetWeights(weight_folder, file, self._slots, (config.server_public_key, config.client_key))
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"file: the folder of {file} does not exist; create it")
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
        """Return the current members, including joining and leaving workers."""
        return self._slots.members()

    @property
    def num_serving(self) -> int:
        """Number of serving workers."""
        return sum(member.standing == "serving" for member in self.members())

    def scale(self, num_workers: int) -> None:
        """Change the number of workers. Return when all workers serve and all surplus workers have left. A surplus
        worker first finishes its requests. If the fleet had stopped trying to give a worker its weights, the call makes
        the fleet try again.

        Raise the error of a worker that cannot start, or that cannot get the weights of the other workers. Raise
        IllegalStateError if workers must be added while all workers are asleep. Raise IllegalStateError also if all
        workers were lost and no copy of the pushed weights is left. Raise TruerollError if the fleet is closed during
        the call. After an error, the fleet still tries to reach `num_workers` workers.
        """
        _check_count(num_workers)
        try:
            self._thread.submit(self._scaler.scale(num_workers)).result()
        except CancelledError:
            raise TruerollError("fleet: the fleet is closed; make a new one") from None

    def pids(self) -> dict[str, tuple[int, int]]:
        """Return a map from the name of each running worker to a pair of process ids. The first process id is the id of
        the Ray actor, and the second process id is the id of the worker. The actor and the worker run on the same
        machine.
        """
        return {slot.name: worker.pids for slot in self._slots if (worker := slot.worker) is not None}

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics server; None if metrics are disabled."""
        return None if self._metrics is None else self._metrics.port

    def note_push(self, note: PushNote) -> None:
        """Record that all workers now serve this push. Publishers that are connected to this fleet call this method."""
        self._weights.note(note)

    def health(self) -> protocol.Health:
        """Return the health of the fleet; see `FleetClient.health`. The result may be up to half a second old. Raise
        WorkerLostError while no worker runs.
        """
        found = [report.health for report in self.reports().values() if report.health is not None]
        if not found:
            raise WorkerLostError("fleet: no worker runs yet; see the log")
        return all_healths(found, [member.told for member in self.members() if member.trouble])

    def reports(self) -> dict[str, WorkerReport]:
        """Return a map from worker names to the workers' last reports. Workers that are being replaced are included."""
        return {slot.name: slot.report for slot in self._slots}

    def close(self) -> None:
        """End the workers, and end the cluster if this fleet started it. Idempotent."""
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
            f"num_workers: must be an integer from 1 to {MOST_WORKERS} (got {brief(num_workers)})",
            field="num_workers",
            value=num_workers,
            limit=MOST_WORKERS,
        )
