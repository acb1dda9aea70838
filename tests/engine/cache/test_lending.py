"""Memory that one process lends to others: all processes see the same content, none can change the content, and no
memory leaks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machines import lends_huge_pages

from trueroll.engine.cache import lending
from trueroll.engine.cache.lending import BorrowedArena, LendableArena, LentMemory
from trueroll.engine.cache.memory import HUGE_PAGE, HostArena

SIZE = 2 * HUGE_PAGE + 5000
LENDER = """
import torch
from trueroll.engine.cache.lending import LendableArena
arena = LendableArena({size})
arena.empty(torch.uint8, {size}).fill_(7)
print(*arena.lend(), flush=True)
input()
"""

pytestmark = lends_huge_pages


def lent_by(arena: LendableArena, value: int) -> LentMemory:
    arena.empty(torch.uint8, SIZE).fill_(value)
    return arena.lend()


def live(value: int) -> tuple[HostArena, torch.Tensor]:
    arena = HostArena(SIZE, huge_pages=True)
    return arena, arena.empty(torch.uint8, SIZE).fill_(value)


def borrowed(lent: LentMemory) -> tuple[BorrowedArena, torch.Tensor]:
    arena = BorrowedArena(lent)
    return arena, arena.empty(torch.uint8, SIZE)


def mapped() -> int:
    """Return the bytes of lent memory that this process maps."""
    ends = re.findall(r"^(\w+)-(\w+) .*memfd:trueroll-weights", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def test_lent_memory_becomes_the_content_of_others_and_outlives_the_lender() -> None:
    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    lender = LendableArena(SIZE)
    others = [borrowed(lent_by(lender, 7))] + [live(i) for i in (1, 2)]
    assert lender.is_huge and mapped() - before > 2 * SIZE
    others[1][0].take(others[0][0])
    others[2][0].take(lender)
    lender.drop(keep=False)
    del lender
    assert all((tensor == 7).all() for _, tensor in others[1:])
    for arena, tensor in others[1:]:
        arena.drop(keep=False)
        arena.restore()
        assert not tensor.any()
    del others[0], arena, tensor
    assert mapped() == before and len(os.listdir("/proc/self/fd")) == descriptors


def test_a_writer_gets_pages_of_its_own() -> None:
    lender = LendableArena(SIZE)
    lent = lent_by(lender, 7)
    (first, mine), (second, theirs) = live(1), live(2)
    first.take(borrowed(lent)[0])
    second.take(lender)
    mine[5], theirs[-1] = 9, 8
    assert (mine != 7).sum() == (theirs != 7).sum() == 1 and mine[-1] == theirs[5] == 7
    with pytest.raises(PermissionError):  # the system raises this because the memory is sealed
        HostArena(SIZE, huge_pages=True).map_file(lent.fd, flags=1)


def test_a_killed_lender_leaves_only_the_borrowed_memory() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER.format(size=SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        lent = LentMemory(*map(int, process.stdout.readline().split()))
        arena, tensor = borrowed(lent)
        assert lent.pid == process.pid and (tensor == 7).all()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(FileNotFoundError):
            BorrowedArena(lent)
    assert (tensor == 7).all() and arena.num_held == SIZE


def test_memory_that_was_not_lent_is_refused(tmp_path: Path) -> None:
    lender = LendableArena(SIZE)
    with pytest.raises(PermissionError, match="not sealed"):
        status = os.fstat(lender._file.descriptor)
        BorrowedArena(LentMemory(os.getpid(), lender._file.descriptor, status.st_ino, SIZE))
    lent = lent_by(lender, 1)
    for wrong in (lent._replace(inode=lent.inode + 1), lent._replace(num_bytes=SIZE - 1)):
        with pytest.raises(FileNotFoundError, match="another file"):
            BorrowedArena(wrong)
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(SIZE)
        status = os.fstat(file.fileno())
        with pytest.raises(OSError):
            BorrowedArena(LentMemory(os.getpid(), file.fileno(), status.st_ino, SIZE))
    reading, writing = os.pipe()
    with pytest.raises(PermissionError, match="mode"):
        BorrowedArena(LentMemory(os.getpid(), reading, 1, SIZE))
    os.close(reading)
    os.close(writing)


def test_a_process_with_hidden_files_lends_nothing() -> None:
    """The files of a process with capabilities are hidden from other processes of the same user, unless that user is
    root.
    """
    code = "import ctypes, os; from trueroll.engine.cache import lending; os.getuid() or os.setuid(65534);"
    code += "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(lending.place_to_lend())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout == "None\n"


def test_too_much_memory_to_lend_is_refused() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match=str(2**60)):
        LendableArena(2**60)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5\n", {0, 1, 2, 5}), ("3\n", {3}), ("\n", set())])
def test_a_list_of_cpus_is_parsed(text: str, cpus: set[int]) -> None:
    assert lending._cpus(text) == cpus
