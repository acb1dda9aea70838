"""Memory of one process that others on the machine map as well, instead of each having a copy.

Who lends fills an arena, and seals it: from then on nobody can change what others see, and whoever writes there gets
pages of its own. Owns the mappings and, until it is dropped, the lender's descriptor. Promises: the memory has no name,
and goes back to the system with the last process that maps it, however these end; what is mapped is what was lent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
import weakref
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .memory import HUGE_PAGE, HostArena, advise

_COLLAPSE, _POPULATE_READ = 25, 22  # of madvise
_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl
_SEALS = 2 | 4 | 16  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE
_NODES = Path("/sys/devices/system/node")


class LentMemory(NamedTuple):
    """What process `pid` lends: a file of `num_bytes` without a name, its descriptor `fd`, with the number `inode`."""

    pid: int
    fd: int
    inode: int
    num_bytes: int


class LendableArena(HostArena):
    """Memory to fill, and then to `lend`. Raise MemoryError if there is not so much.

    `is_huge`: whether it is of huge pages, but for an end that is shorter than one.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, huge_pages=True)
        self._file = os.memfd_create("trueroll-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            os.ftruncate(self._file, num_bytes)
            self.map_file(self._file, mmap.MAP_SHARED)
            self.is_huge = self._take_pages()
        except OSError as error:
            raise MemoryError(f"expected {num_bytes} bytes of memory to lend: {error}") from None

    def lend(self) -> LentMemory:
        """Seal it. Nothing that is written here afterwards is seen by others."""
        self.map_file(self._file, mmap.MAP_PRIVATE)
        fcntl.fcntl(self._file, _ADD_SEALS, _SEALS)
        status = os.fstat(self._file)
        return LentMemory(os.getpid(), self._file, status.st_ino, status.st_size)

    def withdraw(self) -> None:
        """Nobody can map it from now on; who has mapped it keeps it."""
        self._close()

    def drop(self, keep: bool) -> None:
        super().drop(keep)
        if not keep:
            self.withdraw()

    def _take_pages(self) -> bool:
        """All of them now: whoever writes into a file for which there is no memory is killed."""
        size = self._memory.nbytes
        whole = size // HUGE_PAGE * HUGE_PAGE
        for start in range(0, whole, HUGE_PAGE):
            os.posix_fallocate(self._file, start, mmap.PAGESIZE)  # pages are put together only where there is one
        is_huge = advise(self._memory.data_ptr(), whole, _COLLAPSE)
        os.posix_fallocate(self._file, 0, size)
        return is_huge


class BorrowedArena(HostArena):
    """What somebody lends. Raise OSError if it is not there, or not as it should be."""

    def __init__(self, lent: LentMemory) -> None:
        super().__init__(lent.num_bytes, huge_pages=True)
        file = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check(file, lent)
            self.map_file(file, mmap.MAP_PRIVATE)
        finally:
            os.close(file)
        advise(self._memory.data_ptr(), self._memory.nbytes, _POPULATE_READ)


def _check(file: int, lent: LentMemory) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"expected a file of user {os.geteuid()}, found mode {status.st_mode:o} of others")
    if (status.st_ino, status.st_size) != (lent.inode, lent.num_bytes):
        raise FileNotFoundError("expected the memory that was lent, found another file")
    if fcntl.fcntl(file, _GET_SEALS) & _SEALS != _SEALS:
        raise PermissionError("expected memory that nobody can change, found it without seals")


@cache
def place_to_lend() -> str | None:
    """Where this process can lend memory to others: equal for those of one machine, user and container, with the same
    capabilities, without which the system lets none see what another has open, and of the same NUMA nodes, as others
    would read more slowly. None where it cannot, or where it would have small pages only: these cost more than a copy
    in huge ones.
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
    """Not where its program has capabilities or another user's rights: what it has open belongs to root then."""
    return os.stat("/proc/self/fd").st_uid == os.geteuid()


def _capabilities() -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("CapPrm:"))


def _nodes() -> list[str]:
    """The NUMA nodes that this process may run on."""
    cpus = os.sched_getaffinity(0)
    lists = {path.parent.name: path.read_text() for path in _NODES.glob("node*/cpulist")}
    return sorted(name for name, text in lists.items() if cpus & _cpus(text))


def _cpus(text: str) -> set[int]:
    """Of a list such as `0-3,8`."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1)}
