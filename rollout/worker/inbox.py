"""What other threads tell the worker's own: a queue whose reader can be polled beside sockets."""

from __future__ import annotations

import queue
import socket
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items from any thread, for one that waits on `fileno`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, item: T) -> None:
        """One more, for the thread that waits. Callable from any thread."""
        self._items.put(item)
        self.wake()

    def wake(self) -> None:
        """Make the thread that waits look around. Callable from any thread, and from signal handlers."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # unread bytes are there already, and one is enough

    def fileno(self) -> int:
        """Readable once there is something to look at."""
        return self._reader.fileno()

    @property
    def wake_fd(self) -> int:
        """Any byte written here wakes; never blocks."""
        return self._writer.fileno()

    def clear(self) -> None:
        """What was told by wakes is known; called when `fileno` is readable."""
        self._reader.recv(4096)

    def get(self) -> T | None:
        """The next item; None if there is none."""
        try:
            return self._items.get_nowait()
        except queue.Empty:
            return None
