"""How much memory this process has in RAM, for whoever asks often and at any time.

Owns: a descriptor of `/proc/self/statm`, opened once, so that a process which has no descriptor left can still tell.
"""

from __future__ import annotations

import os
import resource
import threading
from time import monotonic

PERIOD_SECONDS = 1.0
"""How old a value may be."""


class ResidentMemory:
    """The resident memory of the process that makes it. Any thread may ask. Raises OSError if it cannot be read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            self._num_bytes = _read(self._file)
        except BaseException:
            self.close()
            raise
        self._read_at = monotonic()

    def num_bytes(self) -> int:
        """Bytes in RAM, at most PERIOD_SECONDS old; the last that could be read if reading fails or after `close`."""
        with self._lock:
            now = monotonic()
            if self._file is not None and now - self._read_at >= PERIOD_SECONDS:
                self._read_at = now
                try:
                    self._num_bytes = _read(self._file)
                except OSError:
                    pass  # who asks how the worker does must get an answer
            return self._num_bytes

    def close(self) -> None:
        """Close the descriptor. Harmless if it is closed."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)


def _read(file: int) -> int:
    """The second of the numbers in `statm`, which counts pages, as bytes."""
    return int(os.pread(file, 256, 0).split()[1]) * resource.getpagesize()
