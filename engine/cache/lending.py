"""Memory that other processes on the same machine can map without a copy.

The lender is the process that fills an arena and seals it. A borrower is a process that maps the arena. After an arena
is sealed, writes are private: a process that writes gets its own copy of the pages, and other processes see no change.
This module owns the mappings and, until the arena is dropped, the lender's file descriptor.

Guarantees: the memory has no name in the file system. The system frees the memory when no process maps it any more,
even if the processes were killed. A borrower maps exactly the memory that was lent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .memory import HUGE_PAGE, HostArena, advise
from .shared import MemoryFile, no_memory

_POPULATE_READ = 22  # advice of madvise
_ADD_SEALS, _GET_SEALS = 1033, 1034  # commands of fcntl
_SEALS = 2 | 4 | 16  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE
_NODES = Path("/sys/devices/system/node")


class LentMemory(NamedTuple):
    """The description of lent memory, which is an unnamed file. Process `pid` has the file open as file descriptor
    `fd`. The description also includes the file's inode and size.
    """

    pid: int
    fd: int
    inode: int
    num_bytes: int


class LendableArena(HostArena):
    """Memory that this process fills and then lends. Raise MemoryError if there is not enough memory.

    `is_huge`: whether the memory consists of huge pages, except for a remainder at the end.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, huge_pages=True)
        with no_memory(num_bytes):
            self._file = MemoryFile()
            os.ftruncate(self._file.descriptor, num_bytes)
            self.map_file(self._file.descriptor, mmap.MAP_SHARED)
            self.is_huge = self._file.allocate(self._memory.data_ptr(), num_bytes)

    def lend(self) -> LentMemory:
        """Seal the memory, and return a description for borrowers. Borrowers do not see writes after this call."""
        file = self._file.descriptor
        self.map_file(file, mmap.MAP_PRIVATE)
        fcntl.fcntl(file, _ADD_SEALS, _SEALS)
        status = os.fstat(file)
        return LentMemory(os.getpid(), file, status.st_ino, status.st_size)

    def withdraw(self) -> None:
        """Prevent further processes from mapping the memory. Existing mappings stay valid."""
        self._file.close()

    def drop(self, keep: bool) -> None:
        super().drop(keep)
        if not keep:
            self.withdraw()

    def set_aside(self) -> bool:
        """Return False (not supported), because each push lends new memory."""
        return False


class BorrowedArena(HostArena):
    """Memory borrowed from another process. Raise OSError if the memory is gone or does not match the description."""

    def __init__(self, lent: LentMemory) -> None:
        super().__init__(lent.num_bytes, huge_pages=True)
        file = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check(file, lent)
            self.map_file(file, mmap.MAP_PRIVATE)
        finally:
            os.close(file)
        advise(self._memory.data_ptr(), self._memory.nbytes, _POPULATE_READ)

    def set_aside(self) -> bool:
        """Return False (not supported), because each push borrows new memory."""
        return False


def _check(file: int, lent: LentMemory) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(
            f"memory lent by another process must be a regular file owned by user {os.geteuid()} (got a file of user "
            f"{status.st_uid} with mode {status.st_mode:o})"
        )
    if (status.st_ino, status.st_size) != (lent.inode, lent.num_bytes):
        raise FileNotFoundError("the lent memory is gone: its file descriptor now refers to another file")
    if fcntl.fcntl(file, _GET_SEALS) & _SEALS != _SEALS:
        raise PermissionError("the lent memory is not sealed, so other processes can change it")


@cache
def place_to_lend() -> str | None:
    """Return an identifier shared by processes that can lend memory to each other; None if this process cannot lend.

    Two processes get equal identifiers if they run on the same machine and NUMA nodes, in the same container, as the
    same user and with the same Linux capabilities. The identifier includes the capabilities because the system hides a
    process's open files from processes with fewer capabilities. The identifier includes the NUMA nodes because reading
    the memory of another node is slower. A process that would get only small pages cannot lend, because sharing weights
    in small pages costs more than a copy in huge pages.
    """
    if sys.platform != "linux":
        return None
    try:
        with closing(_Probe()) as probe:
            if not probe.is_huge or not _may_be_looked_at():
                return None
        namespaces = (os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "user"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *namespaces, str(os.geteuid()), _capabilities(), *_nodes()])
    except (OSError, MemoryError):
        return None


class _Probe(LendableArena):
    def __init__(self) -> None:
        super().__init__(HUGE_PAGE)
        BorrowedArena(self.lend()).drop(keep=False)

    def close(self) -> None:
        self.drop(keep=False)


def _may_be_looked_at() -> bool:
    """Return whether other processes of this user may access this process's open files.

    Other processes may not access the files if this process runs with capabilities or as another user (setuid). If a
    process runs with capabilities or setuid, its files in /proc belong to root.
    """
    return os.stat("/proc/self/fd").st_uid == os.geteuid()


def _capabilities() -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("CapPrm:"))


def _nodes() -> list[str]:
    """Return the NUMA nodes on which this process may run."""
    cpus = os.sched_getaffinity(0)
    lists = {path.parent.name: path.read_text() for path in _NODES.glob("node*/cpulist")}
    return sorted(name for name, text in lists.items() if cpus & _cpus(text))


def _cpus(text: str) -> set[int]:
    """Parse a list of CPUs such as `0-3,8`."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1)}
