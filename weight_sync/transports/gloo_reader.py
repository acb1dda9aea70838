"""The worker's side of a push through gloo: a separate process receives buckets into memory that it shares with the
worker.

Owns: the fork server of the receiving processes (see `fork_server`). For each push, also owns the channel to the
receiving process and the memory for two buckets. The first push through gloo starts the fork server, and later pushes
reuse the server. Guarantees: a crash of the receiving process fails only the push. Every wait ends at its deadline, or
within `TURN_SECONDS` after the push is closed. `close` does not wait, and leaves no thread, descriptor or process of
the push behind. The fork server ends when this process ends. With a CPU build of torch, the fork server takes about 220
MB of memory, of which 160 MB are not shared. The start of the fork server makes the first push one or two seconds
longer.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from trueroll.errors import PushError

from ..payload.manifest import MOST_UNDER_WAY, Bucket, CollectiveSource
from .fork_server import MAX_MESSAGE_BYTES
from .gloo import STORE_SECONDS

# -P keeps the current folder off the import path. In a clone of the repository, the folder `kernels` would hide a
# package of that name.
_COMMAND = (sys.executable, "-P", "-m", "trueroll.weight_sync.transports.fork_server")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Only a single-threaded process can fork safely. Without these environment variables, libraries would start threads in
the fork server.
"""
_MARGIN_SECONDS = 1.0
"""Extra time that gloo may take beyond its timeout to report its failure."""
TURN_SECONDS = 0.02
_REQUEST_SECONDS = 10.0
_SIGNALS = {int(number): number.name for number in signal.Signals}
_HINTS = {
    "SIGABRT": "does the trainer broadcast as many bytes as it announces? ",
    "SIGKILL": "was there too little memory? ",
}


class GlooReader:
    """Reads buckets through a separate process that joins the group.

    `timeout`: seconds for each bucket. Raise PushError if the join fails or takes more than `join_timeout` seconds, or
    once `is_closed` returns True.
    """

    def __init__(
        self,
        source: CollectiveSource,
        push_id: str,
        timeout: float,
        join_timeout: float,
        is_closed: Callable[[], bool],
    ) -> None:
        self._timeout = timeout
        self._is_closed = is_closed
        self._under_way: int | None = None
        self._sides: list[_Memory] = []
        self._channel: socket.socket | None = None
        try:
            self._sides = [_Memory() for _ in range(MOST_UNDER_WAY)]
            self._join(source, push_id, join_timeout)
        except OSError as error:
            self.close()
            raise PushError(
                f"collective: cannot start the receiving process: {error.strerror or error}; free memory or "
                "processes, and push again"
            ) from None
        except BaseException:
            self.close()
            raise

    def prepare(self, bucket: Bucket) -> None:
        if not bucket.num_bytes:
            return
        side = bucket.index % len(self._sides)
        try:
            self._sides[side].grow(bucket.num_bytes)
        except OSError as error:
            raise PushError(
                f"collective: cannot allocate {bucket.num_bytes} bytes for a bucket: {error.strerror}; free memory, "
                "and push again"
            ) from None
        assert self._channel is not None
        with suppress(OSError):  # if the process is gone, `read` reports why
            self._channel.send(json.dumps({"side": side, "num_bytes": bucket.num_bytes}).encode())
        self._under_way = bucket.index

    def read(self, bucket: Bucket) -> torch.Tensor:
        if bucket.num_bytes:
            if self._under_way != bucket.index:
                self.prepare(bucket)
            silence = f"no data for {self._timeout:g} s"
            deadline = time.monotonic() + self._timeout + _MARGIN_SECONDS
            self._wait("receive", "the transfer of a bucket failed", deadline, silence)
        return self._sides[bucket.index % len(self._sides)].view

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self._channel = None
        while self._sides:
            self._sides.pop().close()

    def _join(self, source: CollectiveSource, push_id: str, join_timeout: float) -> None:
        deadline = time.monotonic() + join_timeout + _MARGIN_SECONDS
        push = source.model_dump(include={"host", "port", "rank", "world_size"}) | dict(
            push_id=push_id, timeout=self._timeout, join_timeout=join_timeout
        )
        self._channel = _fork_server.begin(push, [side.descriptor for side in self._sides])
        self._channel.setblocking(False)
        starting = "cannot start the receiving process"
        self._wait("start", starting, deadline, "the start exceeds the timeout; it will be ready for the next push")
        store_deadline = min(deadline, time.monotonic() + STORE_SECONDS + _MARGIN_SECONDS)
        place = f"{source.host}:{source.port}"
        self._wait("connect", f"cannot reach the store at {place}", store_deadline, "no answer")
        group = f"cannot join the group of push {push_id} with {source.world_size} members at {place}"
        self._wait("join", group, deadline, f"no answer for {join_timeout:g} s")

    def _wait(self, step: str, trouble: str, deadline: float, silence: str) -> None:
        """Wait until the receiving process has reported that `step` is done. Raise PushError if the step fails.
        `trouble`: what failed, for the text of the error.

        `silence`: the reason that the error gives if the process does not answer before the deadline.
        """
        while not self._is_closed():
            word = self._hear(deadline)
            if word is not None and word.get("did") == step:
                return
            if word is not None or time.monotonic() >= deadline:
                raise PushError(f"collective: {trouble}: {_describe(word, silence)}push again")
        raise PushError("collective: the push was closed; push again")

    def _hear(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message. Return {} if the process has ended, and None if no message came within
        `TURN_SECONDS`.
        """
        assert self._channel is not None
        self._channel.settimeout(max(0.0, min(TURN_SECONDS, deadline - time.monotonic())))
        try:
            message = self._channel.recv(MAX_MESSAGE_BYTES)
        except (
            TimeoutError,
            BlockingIOError,
            ConnectionResetError,
        ):  # a reset is reported before the last messages
            return None
        return json.loads(message) if message else {}


class _Memory:
    """Memory shared with a receiving process. `view`: a uint8 tensor of the memory, as mapped in this process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("trueroll-bucket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # reading beyond its end would be fatal
        self.view = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        if len(self.view) < size:
            os.ftruncate(self.descriptor, size)
            self.view = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def close(self) -> None:
        self.view = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)


class _ForkServer:
    """The process from which receiving processes are forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def begin(self, push: dict[str, Any], sides: list[int]) -> socket.socket:
        """Return the channel to a new process that receives this push. Raise OSError if the process cannot be
        started.
        """
        channel, end = _channel()
        try:
            with end, self._lock:
                self._ask(json.dumps(push).encode(), [end.fileno(), *sides])
        except BaseException:
            channel.close()
            raise
        return channel

    def _ask(self, message: bytes, descriptors: list[int]) -> None:
        if self._process is not None and self._process.poll() is None and self._requests is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server has just ended
                socket.send_fds(self._requests, [message], descriptors)
                return
        self._start()
        assert self._requests is not None
        socket.send_fds(self._requests, [message], descriptors)

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, end = _channel()
        self._requests.settimeout(_REQUEST_SECONDS)
        with end:
            self._process = subprocess.Popen(
                (*_COMMAND, str(end.fileno()), str(MOST_UNDER_WAY)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # the worker's stdout is for its address alone
                env=os.environ | _ONE_THREAD,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )


_fork_server = _ForkServer()


def _channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _describe(word: dict[str, Any] | None, silence: str) -> str:
    """Return a part of an error text: why the expected message did not come, and a hint for some causes."""
    if word is None:
        return f"{silence}; "
    if "failed" in word:
        return f"{word['failed']}; "
    if "ended" not in word:
        return "the receiving process is gone; "
    code = word["ended"]
    if code >= 0:
        return f"the receiving process ended with exit code {code}; "
    how = _SIGNALS.get(-code, f"signal {-code}")
    return f"the receiving process ended with {how}; {_HINTS.get(how, '')}"
