"""The listening socket. Accepts a bounded number of connections at a time, even if file descriptors run out.

Owns: the registration of the listener with the event loop, and a spare file descriptor. Guarantees that pending
connections never starve the event loop, however many arrive. If no file descriptor is free, the acceptor closes an old
connection to make room for a new connection. If no old connection may be closed, the acceptor gives up the spare file
descriptor, accepts the new connection and closes it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from contextlib import suppress

from .connections import Connections

ACCEPTS_PER_TURN = 16
QUIET_SECONDS = 60.0
"""Minimum time, in seconds, between two log lines about missing descriptors."""
RETRY_SECONDS = 0.1
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

log = logging.getLogger(__name__)


class Acceptor:
    """Context manager that accepts connections from `listener` and passes each connection to `connections`."""

    def __init__(self, listener: socket.socket, connections: Connections) -> None:
        self._listener, self._connections = listener, connections
        self._spare: int | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._last_told = -QUIET_SECONDS

    def __enter__(self) -> None:
        self._listener.setblocking(False)
        self._listen()

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        self._drop_spare()

    def _listen(self) -> None:
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for number in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                if number == 0:  # on later iterations, there may be no pending connection
                    self._make_room(error)
                return
            self._connections.open(accepted, address[:2])

    def _make_room(self, error: OSError) -> None:
        """Close an old connection. If no old connection may be closed, close the pending connection. Do nothing if a
        connection was closed, but has not freed its descriptor yet.

        If a connection is still pending when this function returns, the event loop calls `_accept` again.
        """
        if self._connections.is_freeing:
            return
        if time.monotonic() - self._last_told >= QUIET_SECONDS:
            self._last_told = time.monotonic()
            log.warning("cannot accept connections (%s): closing old connections; raise `ulimit -n`", error.strerror)
        if not self._connections.make_room():
            self._refuse_one()

    def _refuse_one(self) -> None:
        """Close the spare file descriptor, accept the pending connection with the freed descriptor, and close the
        connection.
        """
        self._drop_spare()
        try:
            accepted, _ = self._listener.accept()
            accepted.close()
            self._connections.closed["files"] += 1
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another thread has taken the free descriptor
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._retry = loop.call_later(RETRY_SECONDS, self._listen)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
