"""Host memory that several processes of one engine map, without a copy.

One process owns the memory, and passes the file descriptor of the memory to the other processes. The memory is an
unnamed file. Guarantee: the system frees the memory when no process maps it any more, even if the processes were
killed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from .memory import HUGE_PAGE, Arena, HostArena, advise

_COLLAPSE, _POPULATE_READ = 25, 22  # advice of madvise


class MemoryFile:
    """Memory as an unnamed file. `descriptor`: the file descriptor, which is closed when this object is
    garbage-collected. Raise OSError if the system cannot open another file.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("trueroll-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def allocate(self, address: int, num_bytes: int) -> bool:
        """Allocate all pages of the file, which is mapped at `address`. Return whether the pages are huge pages, except
        for a remainder at the end. Raise OSError if there is not enough memory.
        """
        whole = num_bytes // HUGE_PAGE * HUGE_PAGE
        for start in range(0, whole, HUGE_PAGE):
            os.posix_fallocate(self.descriptor, start, mmap.PAGESIZE)  # MADV_COLLAPSE needs at least one page
        is_huge = advise(address, whole, _COLLAPSE)
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        return is_huge


class FileArena(HostArena):
    """Memory that this process owns and that other processes may map. Raise MemoryError if there is not enough memory.

    All memory is allocated when the arena is created. Huge pages are used if the system has them, because small pages
    take longer to map: each process must map them one by one.

    `take(other)` exchanges the files of both arenas, so other processes must then map the new file. `drop` frees the
    memory for all processes.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, huge_pages=True)
        with no_memory(num_bytes):
            self._file = MemoryFile()
        self._allocate()

    @property
    def file(self) -> int:
        """The file descriptor of the memory."""
        return self._file.descriptor

    def drop(self, keep: bool) -> None:
        if not keep:
            os.ftruncate(self.file, 0)
        super().drop(keep)

    def restore(self) -> None:
        if not self.num_held:
            self._allocate()
            super().restore()

    def _move(self, other: Arena) -> bool:
        if not isinstance(other, FileArena):
            return False
        self.map_file(other.file, mmap.MAP_SHARED)
        self._file, other._file = other._file, self._file
        return True

    def _allocate(self) -> None:
        size = max(1, self._memory.nbytes)
        with no_memory(size):
            os.ftruncate(self.file, size)
            self.map_file(self.file, mmap.MAP_SHARED)
            self._file.allocate(self._memory.data_ptr(), size)


class MappedArena(HostArena):
    """Memory that another process owns and frees."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, huge_pages=True)

    def map(self, file: int) -> None:
        """Map the memory that has this file descriptor, instead of the memory that was mapped before. Raise OSError if
        the memory cannot be mapped or has another size.
        """
        if (found := os.fstat(file).st_size) != max(1, self._memory.nbytes):
            raise OSError(f"the shared memory must have {self._memory.nbytes} bytes (got {found})")
        self.map_file(file, mmap.MAP_SHARED)
        advise(self._memory.data_ptr(), self._memory.nbytes, _POPULATE_READ)


@contextmanager
def no_memory(num_bytes: int) -> Iterator[None]:
    """Convert an OSError to a MemoryError."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes of shared memory: {error}") from None
