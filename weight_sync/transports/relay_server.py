"""The part of a relayed push that the trainer and its workers have in common: buckets in memory, and a server that
streams them to other members while they arrive.

The wire format: a client connects and sends `HELLO`: the push's token, a kind and two numbers. With the kind `STREAM`,
the numbers are a bucket and an offset in bytes. The server then sends all bytes from this offset on, bucket after
bucket, in frames: `FRAME` (the bucket's number and the frame's length, at most `MOST_FRAME_BYTES`), and the bytes.
Buckets are numbered from 0; empty buckets are not counted. With the kind `JOIN`, which only the trainer's server
accepts, the numbers are a worker's position and the port of its server.

Owns: the listener, one thread for each connection, the memory of the buckets while a thread sends from it. Guarantees:
a connection without a valid hello is closed after `HELLO_SECONDS`, and no more than `most` connections are served at a
time. Every wait has a time limit. After `close`, no thread waits, and all threads end. The traffic is neither encrypted
nor authenticated, apart from the token.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from trueroll.errors import TruerollError

from .sockets import TURN_SECONDS

HELLO = struct.Struct("!16sBQQ")
JOIN, STREAM = 1, 2
FRAME = struct.Struct("!QI")
MOST_FRAME_BYTES = 2**20
"""Limit on a frame. Larger frames were no faster. A relay forwards the bytes of a frame as they arrive."""
HELLO_SECONDS = 2.0


class StoreClosed(Exception):
    """The push was closed or has failed, or the bucket is no longer in memory."""


@dataclass
class _Held:
    data: memoryview
    num_filled: int

    @property
    def is_whole(self) -> bool:
        return self.num_filled == len(self.data)


class Store:
    """The buckets of a push that are in this process's memory. One thread fills the buckets, and any number of threads
    read them. A method that waits raises StoreClosed if the push is closed or fails, or if the bucket was removed.
    """

    def __init__(self) -> None:
        self.error: TruerollError | None = None
        self.is_closed = False
        self._lock = threading.Lock()
        self._grown, self._completed = threading.Condition(self._lock), threading.Condition(self._lock)
        self._held: dict[int, _Held] = {}
        self._next = 0

    def put(self, data: memoryview, is_filled: bool) -> int:
        """Add the next bucket, with its bytes or only with the memory for its bytes. Return the bucket's number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._held[number] = _Held(data, len(data) if is_filled else 0)
            self._grown.notify_all()
            return number

    def remove(self, number: int) -> None:
        """Remove a bucket that all workers have acknowledged."""
        with self._lock:
            self._held.pop(number, None)

    def fill(self, number: int, num_bytes: int) -> None:
        """Note that the next `num_bytes` bytes of a bucket have arrived."""
        with self._lock:
            held = self._get(number)
            held.num_filled += num_bytes
            self._grown.notify_all()
            if held.is_whole:
                self._completed.notify_all()

    def memory(self, number: int) -> memoryview:
        """Wait until the bucket was added. Return the bucket's memory."""
        with self._lock:
            return self._wait(self._grown, number, lambda held: True).data

    def filled(self, number: int, offset: int) -> tuple[memoryview, bool]:
        """Wait for bytes of a bucket beyond `offset`. Return the bytes that have arrived, and whether they include the
        last byte of the bucket.
        """
        with self._lock:
            held = self._wait(self._grown, number, lambda held: held.num_filled > offset)
            return held.data[offset : held.num_filled], held.is_whole

    def wait_until_whole(self, number: int, seconds: float) -> None:
        """Wait until the bucket has arrived. Raise TimeoutError if the bucket does not arrive within `seconds`."""
        with self._lock:
            self._wait(self._completed, number, lambda held: held.is_whole, seconds)

    def fail(self, error: TruerollError) -> None:
        """End all waits, because no more bytes will arrive. `error`: the reason."""
        self.error = error
        self._end()

    def close(self) -> None:
        """Release the memory, and end all waits."""
        self.is_closed = True
        self._end()
        with self._lock:
            self._held.clear()

    def _end(self) -> None:
        with self._lock:
            self._grown.notify_all()
            self._completed.notify_all()

    def _wait(
        self,
        changed: threading.Condition,
        number: int,
        is_ready: Callable[[_Held], bool],
        seconds: float = math.inf,
    ) -> _Held:
        deadline = time.monotonic() + seconds
        while True:
            if number < self._next and is_ready(held := self._get(number)):
                return held
            if self.is_closed or self.error is not None:
                raise StoreClosed
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            changed.wait(None if left == math.inf else left)

    def _get(self, number: int) -> _Held:
        if number not in self._held:
            raise StoreClosed
        return self._held[number]


class Server:
    """Streams the buckets of `store` to every client that proves `token`.

    `most`: limit on simultaneous connections. `timeout`: seconds that a client may take to receive a frame. `join`:
    called with each connection that joins, and with the position and the port of the joining worker. If `join` returns
    True, it has taken over the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        store: Store,
        most: int,
        timeout: float,
        join: Callable[[socket.socket, int, int], bool] = lambda connection, position, port: False,
    ) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._listener, self._token, self._store = listener, token, store
        self._timeout, self._join = timeout, join
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._is_closed = False

    def start(self) -> None:
        """Begin to accept connections. Raise RuntimeError if the system cannot start a thread."""
        threading.Thread(target=self._accept, name="relay-accept", daemon=True).start()

    def close(self) -> None:
        """End all connections and threads. The threads may end a little later. Idempotent."""
        with self._lock:
            self._is_closed = True
            for each in (self._listener, *self._served):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the socket
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is free
                time.sleep(TURN_SECONDS)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._run, args=[connection], name="relay", daemon=True).start()
        except RuntimeError:  # the system's limit on threads
            self._places.release()
            connection.close()

    def _run(self, connection: socket.socket) -> None:
        is_taken = False
        with self._lock:
            self._served.add(connection)
            is_closed = self._is_closed
        try:
            with suppress(OSError, StoreClosed):
                is_taken = not is_closed and self._serve(connection)
        finally:
            with self._lock:
                self._served.discard(connection)
            if not is_taken:
                connection.close()
            self._places.release()

    def _serve(self, connection: socket.socket) -> bool:
        """Serve a connection. Return whether `join` has taken over the connection."""
        hello = _receive_hello(connection)
        if self._is_closed or hello is None or not hmac.compare_digest(hello[0], self._token):
            return False
        _, kind, first, second = hello
        connection.settimeout(self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kind == JOIN:
            return self._join(connection, first, second)
        if kind == STREAM:
            self._stream(connection, first, second)
        return False

    def _stream(self, connection: socket.socket, number: int, offset: int) -> None:
        while not self._is_closed:
            data, reaches_end = self._store.filled(number, offset)
            frame = data[:MOST_FRAME_BYTES]
            connection.sendall(FRAME.pack(number, len(frame)), socket.MSG_MORE)
            connection.sendall(frame)
            offset += len(frame)
            if reaches_end and len(frame) == len(data):
                number, offset = number + 1, 0


def _receive_hello(connection: socket.socket) -> tuple[bytes, int, int, int] | None:
    """Return the fields of a hello. Return None if the hello does not arrive within `HELLO_SECONDS`."""
    deadline, data = time.monotonic() + HELLO_SECONDS, b""
    while len(data) < HELLO.size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(HELLO.size - len(data))
        if not part or time.monotonic() > deadline:
            return None
        data += part
    return HELLO.unpack(data)
