"""Forwards ipc connections from a client to a worker. A test can cut or freeze a connection at a chosen message."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from types import TracebackType
from typing import Literal

Fault = Literal["lose call", "lose answer", "freeze"]


class Forwarder:
    """Forwards connections from its `address` to the worker at `target`, until a chosen message of a client.

    `arm` chooses the `count`-th message of type `call`, and what happens once at that message. `lose call` drops the
    message and cuts all connections. `lose answer` forwards the message, drops `answers` replies of the worker, and
    cuts all connections. `freeze` holds the message, and forwards nothing in either direction until `thaw`. `lost`:
    dropped or held data. `struck`: set after the chosen message was handled.
    """

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("ipc://")
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-test-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/line.sock")
        self._listener.listen()
        self.address = f"ipc://{self._folder.name}/line.sock"
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        self._fault: Fault | None = None
        self._call, self._left, self._tail = b"", 0, b""
        self._answers = 0
        self._is_dropping_answers = False
        self.lost = b""
        self.struck = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, fault: Fault, call: str, count: int, answers: int) -> None:
        self._fault, self._call, self._left, self._answers = fault, call.encode(), count, answers

    def thaw(self) -> None:
        self._passing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                self._passing.wait()
                worker = socket.socket(socket.AF_UNIX)
                worker.connect(self._target)
            except OSError:
                return
            self._sockets |= {client, worker}
            threading.Thread(target=self._forward, args=(client, worker, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(worker, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_call: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                with self._lock:
                    passes = self._inspect_call(data) if is_call else self._inspect_answer(data)
                if passes:
                    self._passing.wait()
                    sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _inspect_call(self, data: bytes) -> bool:
        """Return whether to forward the data."""
        if self._fault is None:
            return True
        seen = self._tail + data
        self._left -= seen.count(self._call)
        self._tail = seen[-len(self._call) + 1 :]
        if self._left > 0:
            return True
        fault, self._fault, self._tail = self._fault, None, b""
        if fault == "lose answer":
            self._is_dropping_answers = True
            return True
        self.lost = seen
        if fault == "freeze":
            self._passing.clear()
            self.struck.set()
            return True
        self._cut()
        return False

    def _inspect_answer(self, data: bytes) -> bool:
        if not self._is_dropping_answers:
            return True
        self.lost += data
        if self.lost.count(b"push_status") >= self._answers:
            self._is_dropping_answers = False
            self._cut()
        return False

    def _cut(self) -> None:
        """End every connection. New connections are accepted."""
        sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.struck.set()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._folder.cleanup()
        with self._lock:
            self._cut()
