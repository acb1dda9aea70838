"""TCP sockets of a push: a listener at one address, and connections with deadlines."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trueroll.errors import ConfigError

_BACKLOG = 512
TURN_SECONDS = 0.02
"""Interval at which a waiting `Link` checks whether its push was closed."""


def listen(host: str) -> socket.socket:
    """Return a socket that listens only at `host`, on a port that the system chooses. Raise ConfigError if `host` is
    not an address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"host: {host!r} is not an address of this machine ({error.strerror}); correct it") from None
    return listener


class LinkClosed(Exception):
    """The push of a link was closed."""


class Link:
    """A connection to `host`:`port`, for one thread.

    Every wait ends with TimeoutError at its deadline (in monotonic seconds), or with LinkClosed within `TURN_SECONDS`
    after `is_closed` returns True. Raise OSError if the connection fails or ends.
    """

    def __init__(self, host: str, port: int, deadline: float, is_closed: Callable[[], bool]) -> None:
        self._is_closed = is_closed
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.socket = socket.socket(family)
        try:
            self._connect(address, deadline)
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes, deadline: float) -> None:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def receive(self, num_bytes: int, deadline: float) -> bytes:
        """Return exactly `num_bytes` bytes."""
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            view = view[self.receive_into(view, deadline) :]
        return bytes(data)

    def receive_into(self, view: memoryview, deadline: float) -> int:
        """Wait for bytes, write the bytes to the beginning of `view`, and return the number of bytes."""
        while True:
            try:
                num_bytes = self.socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if not num_bytes:
                raise ConnectionResetError("the connection was closed")
            return num_bytes

    def end(self, last: bytes) -> None:
        """Send the last bytes if the connection still exists, and close the connection. Any thread may call `end`."""
        with suppress(OSError):
            self.socket.send(last)
        self.close()

    def close(self) -> None:
        self.socket.close()

    def _connect(self, address: Any, deadline: float) -> None:
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            self.socket.connect(address)
        self._wait(select.POLLOUT, deadline)
        if number := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.socket, event)
        while not poll.poll(TURN_SECONDS * 1000):
            if self._is_closed():
                raise LinkClosed
            if time.monotonic() >= deadline:
                raise TimeoutError("no answer")
