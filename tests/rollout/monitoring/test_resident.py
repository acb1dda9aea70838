"""Resident memory: its value, how often it is read, and robustness against missing descriptors and read errors."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from trueroll.rollout.monitoring import resident
from trueroll.rollout.monitoring.resident import PERIOD_SECONDS, ResidentMemory


class Clock:
    """A clock that changes only when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(resident, "monotonic", clock)
    return clock


@pytest.fixture
def memory(clock: Clock) -> Iterator[ResidentMemory]:
    memory = ResidentMemory()
    yield memory
    memory.close()


def test_the_value_is_the_resident_memory_in_bytes(memory: ResidentMemory, clock: Clock) -> None:
    size = 64 << 20
    clock.now += PERIOD_SECONDS
    before = memory.num_bytes()
    with mmap.mmap(-1, size) as fresh:  # memory that this process has not used before
        fresh.write(bytes(size))
        clock.now += PERIOD_SECONDS
        assert memory.num_bytes() - before > size // 2
        assert memory.num_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=size // 2)


def test_the_value_is_read_once_in_a_period_by_all_threads(
    memory: ResidentMemory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0

    def read(file: int, size: int, offset: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return b"9 %d 9" % num_reads

    page = os.sysconf("SC_PAGE_SIZE")
    first = memory.num_bytes()
    monkeypatch.setattr(os, "pread", read)
    clock.now += PERIOD_SECONDS * 0.99
    assert memory.num_bytes() == first and num_reads == 0
    clock.now += PERIOD_SECONDS * 0.01
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(memory.num_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [page] * 4 and num_reads == 1
    clock.now += PERIOD_SECONDS
    assert memory.num_bytes() == 2 * page


def test_the_last_value_is_kept_while_reading_fails(
    memory: ResidentMemory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, failures = memory.num_bytes(), []

    def fail(*_: object) -> bytes:
        failures.append(None)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        clock.now += PERIOD_SECONDS
        assert memory.num_bytes() == last > 0 and failures
    monkeypatch.setattr(os, "pread", lambda *_: b"0 0 0")
    clock.now += PERIOD_SECONDS
    assert memory.num_bytes() == 0, "it is read again after a failure"


def test_close_closes_only_its_own_descriptor(memory: ResidentMemory, clock: Clock) -> None:
    file, last = memory._file, memory.num_bytes()
    assert file is not None and os.readlink(f"/proc/self/fd/{file}").endswith("/statm")
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    reader, writer = os.pipe()
    try:
        clock.now += PERIOD_SECONDS
        assert memory.num_bytes() == last
        memory.close()
        os.fstat(reader)
        os.fstat(writer)
    finally:
        os.close(reader)
        os.close(writer)


def test_the_value_can_be_read_without_free_descriptors() -> None:
    code = """
import resource
from trueroll.rollout.monitoring import resident
held = bytearray(b"x") * (64 << 20)
memory = resident.ResidentMemory()
before = memory.num_bytes()
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
try:
    open("/proc/self/statm")
except OSError:
    resident.PERIOD_SECONDS = 0.0
    del held
    print(before > memory.num_bytes() + (32 << 20))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
