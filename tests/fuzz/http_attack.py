"""Clients that attack a front end over HTTP, and the answers that each client is owed. A client uses one connection
after the other.

A complete request with a valid head is owed one answer, whatever its body is. A request with an invalid head may be
answered or cut off. No answer may say that the server broke.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from fuzz.violation import Sent, Violation

OWED = ("plain", "body", "repeated")
"""The kinds of requests that must be answered."""
STATUSES = {200, 307, 400, 403, 404, 405, 408, 409, 410, 411, 413, 414, 417, 421, 426, 429, 431, 501, 503, 504, 505}
BROKEN = re.compile(rb'"code":"(internal|worker_failed|worker_lost|sample_failed)"|Internal Server Error|Traceback')
"""Texts that no request may cause."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d) ")
_AT_ONCE = struct.pack("ii", 1, 0)
PART = 2**16


class HttpAttacker:
    """`tend`: called while waiting for an answer, because the worker may be paused; raises if waiting is useless.

    `statuses`: number of answers so far, by status.
    """

    def __init__(self, address: tuple[str, int], patience: float, tend: Callable[[], None]) -> None:
        self._address, self._patience, self._tend = address, patience, tend
        self._socket: socket.socket | None = None
        self._sent: Sent | None = None
        self.statuses: Counter[str] = Counter()

    def send(self, sent: Sent) -> None:
        """Finish the previous request and send another one. `sent.frames`: the bytes of the request, in one or more
        parts.
        """
        self.finish()
        self._sent = sent
        self._socket = socket.create_connection(self._address, timeout=self._patience)
        with suppress(ConnectionError):  # the server may cut off a client that sends too much
            for part in sent.frames:
                self._socket.sendall(part)

    def finish(self) -> None:
        """Read the answer to the last request, or disconnect without reading it, depending on the request's kind."""
        if self._socket is None or self._sent is None:
            return
        with self._socket:
            if self._sent.kind in OWED:
                self._check_answer(self._read_all(self._socket))
            elif self._sent.kind == "left":
                self._leave(self._socket)
            else:
                self._check(self._read_what_is_there(self._socket))
        self._socket = self._sent = None

    def close(self) -> None:
        """Close the connection without waiting for an answer."""
        if self._socket is not None:
            self._socket.close()
            self._socket = self._sent = None

    def _read_all(self, connection: socket.socket) -> bytes:
        """Read until the server closes the connection."""
        received, deadline = bytearray(), time.monotonic() + self._patience
        connection.settimeout(0.05)
        while True:
            try:
                part = connection.recv(PART)
            except TimeoutError:
                self._tend()
                if time.monotonic() > deadline:
                    raise Violation(
                        f"after {self._patience} s no whole answer to {self._shown()}: {bytes(received)[:300]!r}"
                    ) from None
                continue
            except ConnectionError:
                break
            if not part:
                break
            received += part
        return bytes(received)

    def _read_what_is_there(self, connection: socket.socket) -> bytes:
        received = bytearray()
        connection.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            while part := connection.recv(PART):
                received += part
        return bytes(received)

    def _leave(self, connection: socket.socket) -> None:
        """Disconnect before or in the middle of the answer. Every second time, reset the connection."""
        assert self._sent is not None
        if self._sent.sender % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._check(self._read_what_is_there(connection))

    def _check_answer(self, data: bytes) -> None:
        """Check that there is exactly one answer, and that the answer is correct."""
        self._check(data)
        if _STATUS.match(data) is None:
            raise Violation(f"no answer to {self._shown()}: {data[:300]!r}")
        head, _, body = data.partition(b"\r\n\r\n")
        if int(head[9:12]) >= 400:
            try:
                error = json.loads(body)["error"]
            except (ValueError, KeyError, TypeError):
                raise Violation(f"an error without its body for {self._shown()}: {data[:600]!r}") from None
            if error.keys() != {"message", "type", "param", "code"} or len(error["message"]) > 3000:
                raise Violation(f"an error of another form for {self._shown()}: {data[:600]!r}")

    def _check(self, data: bytes) -> None:
        """Check that the received data contains none of the texts that no request may cause."""
        if (broken := BROKEN.search(data)) is not None:
            at = broken.start()
            raise Violation(f"{self._shown()} was answered with {data[max(0, at - 400) : at + 300]!r}")
        if (found := _STATUS.match(data)) is None:
            if data:
                raise Violation(f"{self._shown()} was answered with something other than HTTP: {data[:300]!r}")
            self.statuses["none"] += 1
            return
        status = int(found[1])
        if status not in STATUSES:
            raise Violation(f"{self._shown()} was answered with {data[:300]!r}")
        self.statuses[str(status)] += 1

    def _shown(self) -> str:
        assert self._sent is not None
        return f"a request ({self._sent.kind}) {b''.join(self._sent.frames)[:600]!r}"
