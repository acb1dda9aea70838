"""How many connections a socket has, within limits.

Owns: a monitor of the ROUTER socket. Promises: no more than `max_connections` at a time, and of these no more than
`MAX_SILENT` that have sent nothing yet, of which the oldest gives way to a new one; so whoever opens connections
without being let in neither uses up the descriptors of the process nor keeps others from coming in.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

MAX_SILENT = 64
"""Each may have sent a part of a message of the greatest length."""


class Gate:
    """To be made before the socket is bound, so that no connection escapes it."""

    def __init__(self, router: zmq.Socket[bytes], max_connections: int) -> None:
        self._router = router
        self._max_connections = max_connections
        self._silent: dict[int, None] = {}
        self._known: set[int] = set()
        self._monitor: Any = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    @property
    def monitor(self) -> Any:
        """The socket to poll: `follow` is due when it can be read."""
        return self._monitor

    @property
    def has_silent(self) -> bool:
        """Whether any connection has not been `heard` yet. Saves the look for the descriptor of each message."""
        return bool(self._silent)

    def follow(self) -> None:
        """Take note of who came and who went, and send away who is too many."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._enter(event["value"])
                else:
                    self._leave(event["value"])

    def heard(self, fd: int) -> None:
        """Its connection has sent a message."""
        if fd in self._silent:
            del self._silent[fd]
            self._known.add(fd)

    def close(self) -> None:
        """End the monitor, before the socket is closed."""
        self.follow()
        self._router.disable_monitor()
        self._monitor.close(linger=0)

    def _enter(self, fd: int) -> None:
        self._leave(fd)
        self._silent[fd] = None
        if len(self._silent) > MAX_SILENT or len(self._silent) + len(self._known) > self._max_connections:
            self._end(next(iter(self._silent)))

    def _leave(self, fd: int) -> None:
        self._silent.pop(fd, None)
        self._known.discard(fd)

    def _end(self, fd: int) -> None:
        self._leave(fd)
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
