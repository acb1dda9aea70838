"""Access of another user of the machine to a worker, a push, a fleet with its local Ray, and a front end. The test
compares this access with docs/security.md. The test needs root to start a process as another user, and fails without
root.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import stranger
from http_fronts import Front, front_end
from transformers import AutoModelForCausalLM

from trueroll.rollout import Fleet, WeightPublisher, launch_worker
from trueroll.rollout.fleet.ray_cluster import Cluster
from trueroll.weight_sync.transports.shared import SharedSlots

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=64)
LISTENS = 1 << 16
"""The flag of a listening socket in /proc/net/unix."""
IDLE = ("`ray::IDLE`", "`127.0.0.1`")
"""Name and listening address of a process that Ray may end at any time."""
ANSWERS = {"token": {"16", "401"}, "key": {"401"}, "everybody": {"200"}}
"""Answers to a client without credentials, by the word in the docs. In gRPC, 16 means unauthenticated; in HTTP, 401."""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter and list, as many home folders are."""
    with tempfile.TemporaryDirectory(prefix="trueroll-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@dataclass
class Seen:
    """The files, processes and sockets at one moment. `sockets`: (process, where) in the words of the docs."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    processes: set[int] = field(default_factory=set)
    ports: dict[int, str] = field(default_factory=dict)
    sockets: set[tuple[str, str]] = field(default_factory=set)


def documented() -> dict[tuple[str, str], str]:
    """Return the table of docs/security.md: the required credentials, by process and listening socket."""
    section = SECURITY.read_text().split("## Listening sockets\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return {(process.strip(), where.strip()): re.split(r"\W", needed.strip())[0] for process, where, needed in rows}


class Watcher:
    """Finds everything that the processes of this test hold open, except ports that were open before the test."""

    def __init__(self, folders: list[Path], metrics_port: int, front: Front, earlier: set[int]) -> None:
        self._folders, self._earlier = folders, earlier
        self._given = set(_standard_files())
        self._own_ports = {metrics_port: "fleet, `metrics_port`", urlsplit(front.url).port: "`trueroll http`"}

    def look(self) -> Seen:
        seen = Seen()
        for folder in self._folders:
            self._walk(folder, seen)
        paths = dict(self._unix_listeners())
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            seen.processes.add(process.pid)
            self._read_descriptors(process, paths, seen)
            self._read_mappings(process, seen)
            self._read_ports(process, seen)
        return seen

    def _walk(self, folder: Path, seen: Seen) -> None:
        for parent, _, names in os.walk(folder):
            seen.folders.add(parent)
            for path in (Path(parent, name) for name in names):
                (seen.paths if path.is_socket() else seen.files).add(str(path))

    def _unix_listeners(self) -> Iterator[tuple[str, str]]:
        """Yield number and path of each listening Unix socket, except the canary."""
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            path = fields[7] if len(fields) > 7 else ""
            if int(fields[3], 16) & LISTENS and not path.endswith("/canary"):
                yield fields[6], path

    def _read_descriptors(self, process: psutil.Process, paths: dict[str, str], seen: Seen) -> None:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the file was closed in the meantime
                self._read_descriptor(process, link, os.readlink(link), paths, seen)

    def _read_mappings(self, process: psutil.Process, seen: Seen) -> None:
        """Add the files that a process writes through shared mappings. Their descriptors may be closed."""
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            _, access, _, _, _, *path = line.split(maxsplit=5)
            if {*"ws"} <= {*access} and path and path[0].startswith("/dev/shm/") and os.path.exists(path[0]):
                seen.files.add(path[0])

    def _read_descriptor(
        self, process: psutil.Process, link: Path, target: str, paths: dict[str, str], seen: Seen
    ) -> None:
        if target.startswith("socket:[") and (path := paths.get(target[8:-1])) is not None:
            assert path.startswith("/"), f"an abstract socket of {process.name()}: {path!r}"
            seen.paths.add(path)
            seen.sockets.add((kind_of(process), where_of(path)))
        elif target.startswith("/") and self._is_written(link, target):
            seen.files.add(target)

    def _is_written(self, link: Path, target: str) -> bool:
        """Return whether the file is a named file that the process may write, or shared memory."""
        flags = int((link.parent.parent / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0], 8)
        there = Path(target)
        is_file = there.exists() and stat.S_ISREG(there.stat().st_mode) and target not in self._given
        return is_file and (flags & os.O_ACCMODE != os.O_RDONLY or target.startswith("/dev/shm/"))

    def _read_ports(self, process: psutil.Process, seen: Seen) -> None:
        for connection in listening(process):
            if process.pid == os.getpid() and connection.laddr.port in self._earlier:
                continue
            ip = ipaddress.ip_address(connection.laddr.ip)
            ip = getattr(ip, "ipv4_mapped", None) or ip
            kind = self._own_ports.get(connection.laddr.port) or kind_of(process)
            kind = f"{kind}, `metrics_port`" if kind == "worker" else kind
            seen.ports[connection.laddr.port] = kind
            seen.sockets.add((kind, f"`{ip}`"))


def _standard_files() -> Iterator[str]:
    """Yield the files behind the standard streams of the parent processes. trueroll does not set their modes."""
    for process in psutil.Process().parents():
        for number in (0, 1, 2):
            with suppress(OSError):
                yield os.readlink(f"/proc/{process.pid}/fd/{number}")


def listening(process: psutil.Process) -> list[Any]:
    """Return the network sockets of a process that other processes may reach."""
    statuses = psutil.CONN_LISTEN, psutil.CONN_NONE
    return [connection for connection in process.net_connections("inet") if connection.status in statuses]


def kind_of(process: psutil.Process) -> str:
    """Return the docs' name for a process."""
    command = process.cmdline()
    if process.pid == os.getpid():
        return "fleet, as a process of Ray"
    if "trueroll.rollout.worker.process" in command:
        return "worker"
    title = command[0].split(".")[0] if command[0].startswith("ray::") else process.name()
    return f"`{title.split()[0]}`"


def where_of(path: str) -> str:
    name = Path(path).name
    return "its ipc address" if name.endswith(".sock") else f"`{name}`"


def try_as_stranger(seen: Seen, canaries: Seen) -> tuple[set[tuple[str, str]], dict[int, str]]:
    """Return the successful accesses of another user, and the answer of each port. Accesses to the canaries must
    succeed and are left out of the result.
    """
    rays = ("`ray::_Runner`", "`ray::IDLE`", "`raylet`", "`gcs_server`", "fleet, as a process of Ray")
    targets = dict(
        files=sorted(seen.files | canaries.files),
        folders=sorted(seen.folders | canaries.folders),
        sockets=sorted(seen.paths | canaries.paths),
        processes=sorted(seen.processes),
        ports={port: kind in rays for port, kind in seen.ports.items()},
    )
    command = [sys.executable, "-P", stranger.__file__]
    done = subprocess.run(command, input=json.dumps(targets), capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, f"no process of another user: {done.stderr}"
    told = json.loads(done.stdout)
    managed = {(attempt, target) for attempt, target in told["managed"]}
    own = {("signal", str(told["pid"])), *(("process", f"/proc/{told['pid']}/{name}") for name in ("mem", "fd"))}
    can = {(attempt, path) for attempt in ("read", "write", "move") for path in canaries.files}
    can |= {(attempt, path) for attempt in ("list", "add") for path in canaries.folders}
    can |= {("connect", path) for path in canaries.paths}
    assert own | can <= managed, "premise: the stranger reports accesses that succeed"
    excused = (f"/proc/{told['pid']}/", *canaries.folders)
    beyond = {(attempt, target) for attempt, target in managed - own if not target.startswith(excused)}
    return beyond, {int(port): answer for port, answer in told["answers"].items()}


@pytest.fixture
def canaries() -> Iterator[Seen]:
    """A file, a folder and a socket that every user may access."""
    with tempfile.TemporaryDirectory(prefix="trueroll-test-") as folder, socket.socket(socket.AF_UNIX) as unix:
        path = Path(folder)
        (path / "file").write_text("open")
        unix.bind(str(path / "canary"))
        unix.listen()
        for each in (path, path / "file", path / "canary"):
            each.chmod(0o777)
        yield Seen({str(path / "file")}, {folder}, {str(path / "canary")})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.timeout(600)
def test_another_user_reaches_only_what_the_docs_list(
    tiny_llama: Path, open_folder: Path, canaries: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks in the middle of a push, while the push's shared memory has a name. The umask is the default of most
    users.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    weights, pushes, file = open_folder / "weights", open_folder / "pushes", open_folder / "fleet.json"
    address = f"ipc://{open_folder}/worker.sock"
    earlier = {connection.laddr.port for connection in listening(psutil.Process())}
    before = os.umask(0o022)
    try:
        with ExitStack() as stack:
            worker = stack.enter_context(
                launch_worker(str(tiny_llama), address=address, metrics_port=free_port(), **SETTINGS)
            )
            fleet = Fleet(str(tiny_llama), 1, file=file, weights_folder=weights, metrics_port=0, **SETTINGS)
            stack.enter_context(fleet)
            front = stack.enter_context(front_end(str(file), key="k" * 32))
            with WeightPublisher("disk", folder=pushes) as publisher:
                publisher.connect_fleet(fleet)
                publisher.push(model, version=1)
            local = Cluster(None).local
            assert local is not None and fleet.metrics_port is not None
            sockets = Path(fleet.members()[0].address.removeprefix("ipc://")).parent
            watcher = Watcher([weights, pushes, local.folder, sockets], fleet.metrics_port, front, earlier)
            found: list[tuple[Seen, set[tuple[str, str]], dict[int, str]]] = []
            opened = SharedSlots.opened

            def look(slots: SharedSlots) -> None:
                seen = watcher.look()
                seen.files |= {str(file), f"{file}.version"}
                found.append((seen, *try_as_stranger(seen, canaries)))
                opened(slots)

            monkeypatch.setattr(SharedSlots, "opened", look)
            publisher = stack.enter_context(WeightPublisher("shared"))
            publisher.connect([worker.address])
            publisher.push(model, version=2)
    finally:
        os.umask(before)
    [(seen, managed, answers)] = found
    assert any(path.startswith("/dev/shm/trueroll-") for path in seen.files)
    assert {"model.safetensors", "token", "raylet.out", "fleet.json"} <= {Path(path).name for path in seen.files}
    assert {"worker.sock", "plasma_store"} <= {Path(path).name for path in seen.paths}
    assert managed == set()
    table = documented()
    assert seen.sockets | {IDLE} == table.keys()
    for port, kind in seen.ports.items():
        assert answers[port] in ANSWERS[table[kind, "`127.0.0.1`"]], (kind, port)
