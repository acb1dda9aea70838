"""Whether a push may still write: what whoever closes it and the thread that receives it agree by."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..transports.gpu import wait_for_stream


class Closed(Exception):
    """The push was closed while it had something to do."""


class Writing:
    """Open at first. Nothing is written once `close` has returned, nor over live weights before `allow_overwriting`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._may_overwrite = threading.Event()
        self.is_closed = False

    def allow_overwriting(self) -> None:
        """Let `wait_to_overwrite` return."""
        self._may_overwrite.set()

    def close(self) -> None:
        """Wait until what is being written is there; from now on nothing is written."""
        self.is_closed = True
        self._may_overwrite.set()
        with self._lock:
            pass

    def check(self) -> None:
        """Raise Closed once this is closed."""
        if self.is_closed:
            raise Closed

    def wait_to_overwrite(self) -> None:
        """Wait for `allow_overwriting`. Raise Closed if `close` comes first."""
        self._may_overwrite.wait()
        self.check()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whoever closes this waits until what is done inside is over, on the device too. Raise Closed if it is."""
        with self._lock:
            self.check()
            yield
            wait_for_stream(self.device)
