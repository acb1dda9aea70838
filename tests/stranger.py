"""A process that becomes another user (uid 65534), attempts every access listed on stdin, and prints the accesses that
succeeded.

Input, JSON: `files`, `folders`, `sockets`: paths. `processes`: pids. `ports`: ports of 127.0.0.1, each with true if the
port speaks gRPC. Output, JSON: `managed`: the successful attempts, as `[attempt, target]`. `answers`: the status of
each port. `pid`: a process of the other user, which the stranger also attempts to access.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # needed by `connect`, when this user can no longer read Python's files
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
METHODS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
"""One method of each service on Ray's ports. A port without the service answers UNIMPLEMENTED (12) to every client."""
UNIMPLEMENTED = "12"


def attempts(targets: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], object]]]:
    for path in targets["files"]:
        yield "read", path, lambda path=path: Path(path).read_bytes()
        yield "write", path, lambda path=path: os.close(os.open(path, os.O_WRONLY))
        yield "move", path, lambda path=path: move(path)
        yield "chmod", path, lambda path=path: os.chmod(path, 0o777)
    for path in targets["folders"]:
        yield "list", path, lambda path=path: os.listdir(path)
        yield "add", path, lambda path=path: os.mkdir(f"{path}/stranger")
        yield "move", path, lambda path=path: move(path)
    for path in targets["sockets"]:
        yield "connect", path, lambda path=path: connect(path)
        yield "move", path, lambda path=path: move(path)
    for number in targets["processes"]:
        yield "signal", str(number), lambda number=number: os.kill(number, 0)
        for name in ("mem", "environ", "maps", "cwd/.", "root/."):
            path = f"/proc/{number}/{name}"
            yield "process", path, lambda path=path: os.close(os.open(path, os.O_RDONLY))
        yield "process", f"/proc/{number}/fd", lambda number=number: os.listdir(f"/proc/{number}/fd")


def move(path: str) -> None:
    os.rename(path, f"{path}.moved")
    os.rename(f"{path}.moved", path)


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(path)


def ask(port: int, grpc: bool) -> str:
    try:
        return ask_grpc(port) if grpc else ask_http(port)
    except OSError as error:  # for example, if the port belongs to another address
        return repr(error)


def ask_http(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    return str(connection.getresponse().status)


def ask_grpc(port: int) -> str:
    """Return gRPC's status number for a call without a token to the port's service."""
    found = {call(port, method) for method in METHODS}
    return ",".join(sorted(found - {UNIMPLEMENTED}))


def call(port: int, method: str) -> str:
    """Send an empty request over HTTP/2, with literal headers that are neither compressed nor indexed."""
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", f"/{method}"), (":authority", "ray")]
    pairs += [("content-type", "application/grpc"), ("te", "trailers")]
    headers = b"".join(b"\0" + text(name) + text(value) for name, value in pairs)
    settings, head, body = frame(4, 0, 0, b""), frame(1, 4, 1, headers), frame(0, 1, 1, bytes(5))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + head + body)
        told = b""
        while b"grpc-status" not in told or len(told.partition(b"grpc-status")[2]) < 3:
            if not (part := connection.recv(65536)):
                return "closed"
            told += part
    after = told.partition(b"grpc-status")[2]
    return after[1 : 1 + after[0]].decode()


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def main() -> None:
    targets = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    managed: list[tuple[str, str]] = []
    own = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not Path(f"/proc/{own.pid}/cmdline").read_bytes().startswith(b"sleep"):
            time.sleep(0.01)  # before exec, the child runs this program, and /proc denies access to it
        targets["processes"].append(own.pid)
        for attempt, target, action in attempts(targets):
            with suppress(OSError):
                action()
                managed.append((attempt, target))
        answers = {port: ask(int(port), grpc) for port, grpc in targets["ports"].items()}
    finally:
        own.kill()
    print(json.dumps(dict(pid=own.pid, managed=managed, answers=answers)))


if __name__ == "__main__":
    main()
