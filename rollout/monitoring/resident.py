"""The resident memory of this process, cached so that callers can query it often.

Owns a file descriptor of `/proc/self/statm`. The file is opened only once, so that queries work even when the process
has no free file descriptor left.
"""

from __future__ import annotations

import os
import resource
import threading
from time import monotonic

PERIOD_SECONDS = 1.0
"""Maximum age of a returned value."""


class ResidentMemory:
    """The resident memory of the process that creates the object. Thread-safe.

    Raise OSError if `/proc/self/statm` cannot be read.
    """

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
        """Return the resident memory in bytes.

        The value is at most PERIOD_SECONDS old. After `close` or a failed read, return the last value.
        """
        with self._lock:
            now = monotonic()
            if self._file is not None and now - self._read_at >= PERIOD_SECONDS:
                self._read_at = now
                try:
                    self._num_bytes = _read(self._file)
                except OSError:
                    pass  # keep the last value, because a health check must get an answer
            return self._num_bytes

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)


def _read(file: int) -> int:
    """Return the resident memory in bytes. The value is computed from the number of resident pages, which is the second
    number in `statm`.
    """
    return int(os.pread(file, 256, 0).split()[1]) * resource.getpagesize()
