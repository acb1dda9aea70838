"""Connect to a Ray cluster, or start a cluster, and run the process of each worker in a separate actor.

Owns: the connection to the cluster, and the cluster itself if this process started it. Only the settings, the address,
the process ids, the error and the exit code of a worker are sent through Ray. A worker ends when its actor ends, even
if the actor is killed, because the worker reads from a pipe that the actor holds open. A cluster that does not require
an authentication token is joined only if the settings permit it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from trueroll.errors import ConfigError, TruerollError, WorkerLostError
from trueroll.versions import untested

from ..client.local_worker import WorkerProcess
from ..config import WorkerConfig
from ..protocol.error_codes import error_from_code, told
from .ray_access import LocalAccess, asks_for_token, is_loopback, reachable_ip, read_token_again

_RAYLET = "RAY_RAYLET_PID"


@contextmanager
def _outliving_its_raylet() -> Iterator[None]:
    """Context manager. If Ray is imported inside the context, Ray does not end this process when a raylet ends.

    On import, Ray reads the id of a process from the environment variable `RAY_RAYLET_PID`. When the process with this
    id ends, Ray ends the process that imported Ray. In Ray's own worker processes, `RAY_RAYLET_PID` is the id of the
    raylet. If `RAY_RAYLET_PID` is unset and the parent is process 1, Ray treats the importing process as an orphan, and
    ends the process together with the process's raylet. A service
    manager is often process 1, so Ray would treat a fleet that a service manager started as an orphan. Therefore
    `RAY_RAYLET_PID` is set to the id of this process.
    """
    if _RAYLET in os.environ:
        yield
        return
    os.environ[_RAYLET] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_RAYLET]


with _outliving_its_raylet():
    import ray
    from ray.exceptions import RayError

OBJECT_STORE_BYTES = 80 * 2**20
"""Size of the object store: the minimum that Ray accepts, because trueroll does not use the store."""
LOCAL_CPUS = 1024
"""Number of CPUs that a local cluster claims to have, so that Ray does not limit the number of workers."""
STARTS = 4
"""Maximum number of attempts to start a local cluster. Ray limits each attempt to 30 s, which is too short on a busy
machine.
"""
END_SECONDS = 10.0
"""Time to wait for killed processes to end. A process that waits for a device may take longer."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


_local: LocalAccess | None = None
"""Access to the local cluster that this process has started; None if there is none."""


class Cluster:
    """A connection to a Ray cluster. If this process is already connected to a cluster, that cluster is used.

    `address`: address of a cluster to join, or `auto` for the cluster on this machine; None starts a local cluster.
    `without_authentication`: what to do with a cluster that does not require an authentication token. True joins the
    cluster and logs a warning; False raises ConfigError.
    """

    def __init__(self, address: str | None, without_authentication: bool = False) -> None:
        self._address = address
        self._without_authentication = without_authentication
        self._is_closed = False
        self._is_reconnecting = False
        self._lock = threading.Lock()
        # The kernel ends Ray's processes when the thread that started them ends. So Ray is started on a long-lived
        # thread. A call on the main thread starts Ray directly, because Ray can install its SIGTERM handler only on
        # the main thread.
        self._starter = ThreadPoolExecutor(1, "ray")
        self._is_own = not ray.is_initialized()
        if self._is_own:
            self._connect()
        elif (there := ray.get_runtime_context().gcs_address) != (_local and _local.address):
            self._check_authentication(there)

    def _connect(self) -> None:
        if self._address is not None:
            self._join(self._address)
        else:
            self._start_local()

    def _join(self, address: str) -> None:
        self._check_authentication(address)
        try:
            self._call_init(address=address)
        except Exception as error:  # Ray has no specific exception for a cluster that cannot be joined
            _shut_down()
            raise ConfigError(
                f"fleet: cannot join a Ray cluster at {address}: {error}; start a cluster, or leave ray_address out"
            ) from None

    def _check_authentication(self, address: str) -> None:
        if asks_for_token(address):
            return
        risk = f"the Ray cluster at {address} asks for no token: anyone with access to its ports can run code in it"
        if not self._without_authentication:
            raise ConfigError(
                f"fleet: {risk}; start the cluster with RAY_AUTH_MODE=token, or set ray_without_authentication=True"
            )
        log.warning("fleet: %s", risk)

    def _start_local(self) -> None:
        global _local
        fields: dict[str, Any] = dict(address="local", num_cpus=LOCAL_CPUS, include_dashboard=False)
        # By default Ray gives its processes, and so the workers, a low priority.
        fields |= dict(object_store_memory=OBJECT_STORE_BYTES, _system_config=dict(worker_niceness=0))
        before = _children_of_ray()
        access = LocalAccess()
        for attempt in range(STARTS):
            try:
                with access.environment():
                    self._call_init(**fields, _temp_dir=str(access.temp_dir))
                break
            except ConfigError:
                raise
            except Exception as error:  # Ray has no specific exception for a node that does not start in 30 seconds
                _shut_down()
                _end(_children_of_ray() - before)  # Ray leaves these processes behind if its node did not start
                if "Unknown keyword argument" in str(error):  # raised by `ray.init`, which checks its keywords itself
                    raise ConfigError(untested("ray", f"ray.init refuses an argument ({error})")) from None
                if attempt == STARTS - 1:
                    access.keep_folder()
                    raise ConfigError(
                        f"fleet: Ray did not start on this machine: {error}; its logs are in {access.temp_dir}"
                    ) from None
                log.warning("fleet: Ray did not start (%s); starting it again", error)
        _local = access
        access.address = ray.get_runtime_context().gcs_address
        self._check_loopback()

    def _check_loopback(self) -> None:
        ip = ray.util.get_node_ip_address()
        if not is_loopback(ip):
            _shut_down()
            raise ConfigError(
                f"fleet: the local Ray cluster listens on {ip}, not on loopback; install the release of Ray that "
                "'trueroll[ray]' requires"
            )

    @property
    def local(self) -> LocalAccess | None:
        """Access to the local cluster that this process has started; None if the process uses another cluster."""
        return _local

    def _call_init(self, **fields: Any) -> None:
        fields |= dict(configure_logging=False, log_to_driver=True)
        if threading.current_thread() is threading.main_thread():
            ray.init(**fields)
        else:
            with _keeping_sigterm():
                self._starter.submit(ray.init, **fields).result()

    @property
    def is_there(self) -> bool:
        """Return whether Ray may be called. Without a connection to a cluster, any call to Ray would start a cluster.
        The result changes only on the event loop that runs `reconnect`, or when other code in this process shuts Ray
        down.
        """
        return not self._is_reconnecting and ray.is_initialized()

    def is_alive(self) -> bool:
        """Return whether the raylet of this process's node is alive. After `close`, return True. May block."""
        with self._lock:
            return self._is_closed or (ray.is_initialized() and self._has_raylet())

    def _has_raylet(self) -> bool:
        if self._is_own and self._address is None:
            return any(_is_raylet(child) and _runs(child) for child in psutil.Process().children())
        try:
            own = ray.get_runtime_context().get_node_id()
            return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())
        except (RayError, RuntimeError):
            return False

    async def reconnect(self) -> None:
        """Join the cluster again after the node was lost, or start another local cluster. Raise ConfigError if Ray
        cannot connect.
        """
        self._is_reconnecting = True
        await asyncio.to_thread(self._reconnect)
        self._is_reconnecting = False

    def _reconnect(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            _shut_down()
            self._is_own = True
            self._connect()

    def close(self) -> None:
        """Leave the cluster, or end a local cluster. If other code in this process opened the connection, keep the
        connection open.
        """
        with self._lock:
            self._is_closed = True
            if self._is_own:
                _shut_down()
            self._starter.shutdown()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Context manager that restores the handler of SIGTERM on exit. Calls to Ray inside the context may install a
    handler with which SIGTERM ends the process at once. Python can change signal handlers only in the main thread, so
    the C function `sigaction` restores the handler.
    """
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # a C struct sigaction, of unknown size
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def _shut_down() -> None:
    """Leave the cluster. End a local cluster, and remove its folder."""
    global _local
    started = [process for child in _children_of_ray() for process in (child, *_children(child))] if _local else []
    with _keeping_sigterm():
        ray.shutdown()
    _end(started)  # otherwise, some processes would still write into the folder
    read_token_again()
    if _local is not None:
        _local.remove_folder()
        _local = None


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children()
    return []


def _is_raylet(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # a child may end, and be reaped, at any moment
        return process.name() == "raylet"
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _children_of_ray() -> set[psutil.Process]:
    """Return the child processes that Ray has started."""
    folder, found = str(Path(ray.__file__).parent), set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(folder in argument for argument in child.cmdline()):
                found.add(child)
    return found


def _end(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + END_SECONDS
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    psutil.wait_procs(processes, timeout=0)


class WorkerActor:
    """A Ray actor that runs one worker process. Ray chooses the machine."""

    def __init__(self, cluster: Cluster, cpus: float, gpus: float, resources: Mapping[str, float]) -> None:
        options = dict(num_cpus=cpus, num_gpus=gpus, resources=dict(resources), max_concurrency=3, max_restarts=0)
        self._cluster = cluster
        self._check_cluster()
        self._actor: Any = ray.remote(_Runner).options(**options, scheduling_strategy="SPREAD").remote()

    async def start(self, settings: Mapping[str, Any], startup_timeout: float, socket: Path) -> str:
        """Wait until the cluster has room, start the worker, and return the worker's address. Without keys, the address
        is an ipc address at `socket`. If the worker cannot run, raise the worker's error. If the actor dies, raise
        WorkerLostError.
        """
        here = _BOOT_ID.read_text(), str(socket)
        outcome = await self._ask("start", dict(settings), startup_timeout, *here)
        if "address" not in outcome:
            raise error_from_code(**outcome)
        return outcome["address"]

    async def ended(self) -> str:
        """Wait until the worker or the actor has ended. Return a text that says how the worker or the actor ended."""
        try:
            return f"ended with exit code {await self._ask('wait')}"
        except WorkerLostError as error:
            return str(error)

    async def pids(self) -> tuple[int, int]:
        """Return the process ids of the actor and the worker."""
        return await self._ask("pids")

    async def stop(self, seconds: float) -> None:
        """End the worker within `seconds`, then end the actor."""
        with suppress(TruerollError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ask("stop")
        self.kill()

    def kill(self) -> None:
        """End the actor at once. When the actor ends, its worker ends as well."""
        if self._cluster.is_there:
            with suppress(RayError, RuntimeError, ValueError):
                ray.kill(self._actor, no_restart=True)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        self._check_cluster()
        try:
            reference = getattr(self._actor, method).remote(*arguments)
            return await asyncio.wrap_future(reference.future())
        except RayError as error:
            raise WorkerLostError(f"the worker's actor was lost: {str(error).splitlines()[0]:.200}") from None

    def _check_cluster(self) -> None:
        if not self._cluster.is_there:
            raise WorkerLostError("the worker's actor was lost, because its Ray cluster was lost")


class _Runner:
    """The class of the Ray actor. Ray runs calls to the actor's methods on separate threads."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None

    def start(self, settings: dict[str, Any], startup_timeout: float, boot_id: str, socket: str) -> dict[str, Any]:
        from ...engine.config import EngineConfig

        try:
            worker = _with_address(settings["worker"], socket if _BOOT_ID.read_text() == boot_id else None)
            self._process = WorkerProcess(WorkerConfig(**worker), EngineConfig(**settings["engine"]), startup_timeout)
        except TruerollError as error:
            return told(error)
        return {"address": self._process.address}

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def pids(self) -> tuple[int, int]:
        assert self._process is not None
        return os.getpid(), self._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.close()


def _with_address(worker: dict[str, Any], socket: str | None) -> dict[str, Any]:
    """Return a worker's settings, with an address that clients can reach. If the settings have keys, the address has
    the IP of this machine. Without keys, the address is an ipc address at `socket`. `socket`: path of the socket file;
    None if the fleet's process runs on another machine. Raise ConfigError if there are neither keys nor a socket.
    """
    if worker.get("curve_secret_key_file") is not None:
        return worker | {"address": f"tcp://{reachable_ip(ray.util.get_node_ip_address())}:*"}
    if socket is not None:
        return worker | {"address": f"ipc://{socket}"}
    raise ConfigError(
        f"fleet: the worker at {ray.util.get_node_ip_address()} is on another machine and needs keys; give "
        "curve_secret_key_file and clients_file"
    )
