"""A trial handles untrusted files in a child process with limited time and memory, before this process handles them.

Guarantees: a trial ends within its limits, whatever the work does. After a trial, its memory is freed and its process
is gone.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from trueroll.errors import ModelError, UnavailableError, said

_MAX_TEXT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """The limits of a child process.

    `cpu_seconds`: processor time. `seconds`: wall-clock time. `more_bytes`: the address space that the child may use
    beyond the current address space of this process.
    """

    cpu_seconds: int = 30
    seconds: int = 120
    more_bytes: int = 2**31

    def __str__(self) -> str:
        return f"{self.cpu_seconds} s of processor time and {self.more_bytes >> 20} MiB of memory"


class TrialError(Exception):
    """The work failed. The message describes why the trial failed."""


def attempt(work: Callable[[], object], limits: Limits | None = None) -> None:
    """Run `work` in a forked child process, and discard the results.

    Raise TrialError if the work raises an exception or exceeds the limits. Raise UnavailableError if the system cannot
    start a process.
    """
    limits = limits or Limits()
    with room_for_a_process():
        reader, writer = os.pipe()
    with open(reader, "rb", 0):
        with open(writer, "wb", 0):
            child = forked(partial(_try, work, limits, writer))
        try:
            told = _read(reader, time.monotonic() + limits.seconds)
        finally:
            end(child)
    if told != b"+":
        raise TrialError(told[1:].decode(errors="replace") or f"it needs more than {limits}, or crashes")


@contextmanager
def room_for_a_process() -> Iterator[None]:
    """Convert an OSError to an UnavailableError that says that no process can be started."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot start another process: {error}; try again, or raise the limits on processes, open files and "
            "memory (ulimit -a)"
        ) from None


def forked(work: Callable[[], object]) -> int:
    """Fork a child process that runs `work`, and return its process id.

    The child exits without running the exit handlers of this process. The child ignores SIGINT and SIGTERM: this
    process handles a signal to the process group, and ends the child.

    Raise UnavailableError if the system cannot start a process.
    """
    with room_for_a_process():
        child = os.fork()
    if child == 0:
        try:
            signal.set_wakeup_fd(-1)  # a descriptor that `work` may close
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            work()
        finally:
            os._exit(0)
    return child


def end(child: int) -> None:
    """Kill a process that `forked` started, and wait until the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _try(work: Callable[[], object], limits: Limits, writer: int) -> None:
    """Run the work in the child process, and report the outcome."""
    told = b"-"
    try:
        close_all_but(writer)
        limit_memory(limits.more_bytes)
        limit_cpu(limits.cpu_seconds)
        work()
        told = b"+"
    except MemoryError:
        pass
    except BaseException as error:  # a panic of a library is not an Exception
        cause = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        told += said(cause).encode()[:_MAX_TEXT_BYTES]
    os.write(writer, told)


def _read(reader: int, deadline: float) -> bytes:
    """Return the report of the child. The report is empty if the child was killed or took too long."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    is_there = poll.poll(max(0, deadline - time.monotonic()) * 1000)
    return os.read(reader, _MAX_TEXT_BYTES + 1) if is_there else b""


def close_all_but(*descriptors: int) -> None:
    """Close all inherited descriptors except `descriptors` and the standard streams.

    An inherited copy of a socket would keep a connection open after the parent closes the connection.
    """
    bounds = [2, *sorted(descriptors), max(map(int, os.listdir("/proc/self/fd"))) + 1]
    for before, following in pairwise(bounds):
        os.closerange(before + 1, following)


def limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to `more_bytes` beyond its current size, and disable core dumps."""
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + more_bytes)
    _limit(resource.RLIMIT_CORE, 0)


def limit_cpu(seconds: int) -> None:
    """Make the system kill this process after it has used `seconds` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))
