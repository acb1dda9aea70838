"""How many connections a socket has, within limits.

Owns: a monitor of the ROUTER socket. Promises: no more than `max_connections` at a time, and of these no more than
`MAX_SILENT` that have sent nothing yet, of which the oldest gives way to a new one; so whoever opens connections
without being let in neither uses up the descriptors of the process nor keeps others from coming in. A TCP connection
that has sent more than `MAX_AHEAD_BYTES` which no message has brought yet is ended, within about `LOOK_SECONDS`: its
messages come faster than they are taken, or are endless.

What can be known of a connection, and when. Of a message ZMQ tells its descriptor, and with keys the number of its
connection, counted up as the authenticator lets them in; of a connection that comes or ends the monitor tells the
descriptor alone. A connection's coming is told before its first message can be received, and its end before its
descriptor is another one's. But messages of a connection that has ended may wait for long, they come in any order among
those of other connections, and its descriptor is taken again meanwhile. So of two connections by one descriptor the one
with the greater number came later, and only the last can be there. Hence:

- `heard` never says of a connection that is there that it is not.
- It may say of one that has ended that it is there: of one that was heard before, until its end is followed; of one
  that was not, while the connection that has its descriptor now is there and silent. `on_gone` then follows, with that
  end, or once its successor is heard or ends.
- Connections without keys have no numbers: all that are heard by a descriptor count as there until its last one ends.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

MAX_SILENT = 64
"""Each may have sent a part of a message of the greatest length."""
MAX_AHEAD_BYTES = 2**26
LOOK_SECONDS = 0.5
_MESSAGE_BYTES = 42
"""What CURVE and ZMTP add to a message (RFC 26 and 23 of ZMQ): `MESSAGE`, nonce, authenticator, flags, frame header."""
_RECEIVED_AT = 128
"""Where Linux's `struct tcp_info` has `tcpi_bytes_received`, 8 bytes."""


log = logging.getLogger(__name__)


class Gate:
    """To be made before the socket is bound, so that no connection escapes it. `on_gone` is called with the identity of
    each connection that was `heard` and has ended, again where it is heard once more.
    """

    def __init__(self, router: zmq.Socket[bytes], max_connections: int, on_gone: Callable[[bytes], None]) -> None:
        self._router = router
        self._max_connections = max_connections
        self._on_gone = on_gone
        self._heard: dict[int, set[bytes]] = {}
        self._newest: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # of all connections, in the order in which they came
        self._looked = time.monotonic()
        self._monitor: Any = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    @property
    def monitor(self) -> Any:
        """The socket to poll: `follow` is due when it can be read."""
        return self._monitor

    def follow(self) -> None:
        """Take note of who came and who went, and send away who is too many."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._enter(event["value"])
                else:
                    self._leave(event["value"])
        num_silent = len(self._taken) - len(self._heard)
        too_many = max(num_silent - MAX_SILENT, len(self._taken) - self._max_connections, 0)
        if too_many:
            for fd in list(islice((fd for fd in self._taken if fd not in self._heard), too_many)):
                self._end(fd)

    @property
    def seconds_to_look(self) -> float:
        """Until `look` is due."""
        return max(0.0, self._looked + LOOK_SECONDS - time.monotonic()) if self._taken else float("inf")

    def look(self) -> None:
        """End the connections that are too far ahead."""
        self._looked = time.monotonic()
        for fd, taken in list(self._taken.items()):
            with suppress(OSError), _socket_at(fd) as connection:
                if connection.family == socket.AF_UNIX:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
                if received - taken > MAX_AHEAD_BYTES:
                    log.warning("a client was cut off: it had sent %d bytes more than were taken", received - taken)
                    self._end(fd)

    def heard(self, fd: int, identity: bytes, number: int | None, num_bytes: int) -> bool:
        """The connection with this identity and number has sent a message of so many bytes. Returns whether it is still
        there, as far as can be known.
        """
        if identity not in self._heard.get(fd, ()) or not identity.startswith(b"\0"):
            self.follow()  # it may have come, or gone, or gone and come again under an identity of its own
            if fd not in self._taken or not self._is_last(fd, number):
                return False
            self._heard.setdefault(fd, set()).add(identity)
        self._taken[fd] += num_bytes + _MESSAGE_BYTES
        return True

    def _is_last(self, fd: int, number: int | None) -> bool:
        newest = self._newest.get(fd, -1)
        if number is None or (number == newest and fd in self._heard):
            return True
        if number > newest:
            self._lose(fd)  # whoever was heard by it so far had ended before
            self._newest[fd], self._taken[fd] = number, 0
        return number > newest

    def close(self) -> None:
        """End the monitor, before the socket is closed."""
        self.follow()
        self._router.disable_monitor()
        self._monitor.close(linger=0)

    def _enter(self, fd: int) -> None:
        self._leave(fd)
        self._taken[fd] = 0

    def _leave(self, fd: int) -> None:
        self._taken.pop(fd, None)
        self._lose(fd)

    def _lose(self, fd: int) -> None:
        for identity in self._heard.pop(fd, ()):
            self._on_gone(identity)

    def _end(self, fd: int) -> None:
        """It leaves once the monitor tells so."""
        # The number may be another file's by now: anything but a connection of this socket is left alone.
        with suppress(OSError), _socket_at(fd) as connection:
            if _is_at(connection.getsockname(), self._router.get_string(zmq.LAST_ENDPOINT)):
                connection.shutdown(socket.SHUT_RDWR)


def _socket_at(fd: int) -> socket.socket:
    """The socket behind a descriptor, under a new one. Raise OSError if it is closed, or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_at(name: Any, endpoint: str) -> bool:
    return endpoint == f"ipc://{name}" if isinstance(name, str) else endpoint.endswith(f":{name[1]}")
