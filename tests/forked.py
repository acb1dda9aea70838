"""Processes with the interface of `subprocess.Popen`, forked from a process that has imported torch and trueroll.

For tests that start many processes but do not test the start. Forking a process takes a tenth of the CPU time of
starting a new process. Pipes, signals and exit codes work as usual. The environment is that of the first process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trueroll.engine.parallel import leader
from trueroll.rollout.client import local_worker

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "trueroll.engine.engine",
        "trueroll.engine.parallel.follower",
        "trueroll.kernels.cpu.backend",
        "trueroll.kernels.families.gemma3",
        "trueroll.rollout.worker.worker",
    ]
)
_LOCK = threading.Lock()
"""Guards exit codes. Starting a process polls the exit codes of all processes, and each exit code can be read only
once.
"""


class Forked:
    """A process that calls `target`, with a part of the interface of `subprocess.Popen`."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = _CONTEXT.Process(target=target, args=arguments)
        with _LOCK, pytest.MonkeyPatch.context() as patch:
            # multiprocessing runs the main module in each child: pytest's, or the example that a test runs.
            patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def terminate(self) -> None:
        with _LOCK:
            self._process.terminate()

    def kill(self) -> None:
        with _LOCK:
            self._process.kill()


class ForkedPopen(Forked):
    """The part of `subprocess.Popen` that `WorkerProcess` and tests use. Both pipes exist; stderr is inherited."""

    def __init__(self, command: Sequence[str], *, text: bool = False, **_: Any) -> None:
        (child_stdin, stdin), (stdout, child_stdout) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        super().__init__(_run_python, child_stdin, child_stdout, command[1:])
        self.stdin = os.fdopen(os.dup(stdin.fileno()), "w" if text else "wb", -1 if text else 0)
        self.stdout = os.fdopen(os.dup(stdout.fileno()), "r" if text else "rb", -1 if text else 0)
        for pipe in (child_stdin, stdin, stdout, child_stdout):
            pipe.close()


class ForkedRank(Forked):
    """The part of `subprocess.Popen` that the leader of ranks uses. The command ends with a module, two descriptors and
    the number of the rank.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int, int], **_: Any) -> None:
        module, index = command[-4], command[-1]
        files = [Connection(os.dup(fd)) for fd in pass_fds]
        super().__init__(_run_rank, module, files, index)
        for file in files:
            file.close()
        ranks.append(self)


ranks: list[ForkedRank] = []
"""The forked ranks of this process, in the order of their starts."""


def _run_python(stdin: Connection, stdout: Connection, arguments: Sequence[str]) -> None:
    """Run what `python ARGUMENTS` runs. The arguments end with `-m MODULE` or a file."""
    _begin()
    for pipe, number in ((stdin, 0), (stdout, 1)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    run = runpy.run_module if "-m" in arguments else runpy.run_path
    run(arguments[-1], run_name="__main__")


def _run_rank(module: str, files: Sequence[Connection], index: str) -> None:
    """Run what `python -m MODULE FILE FILE INDEX` runs."""
    _begin()
    sys.argv = [module, *(str(os.dup(file.fileno())) for file in files), index]
    for file in files:
        file.close()
    runpy.run_module(module, run_name="__main__")


def _begin() -> None:
    assert not hasattr(sys.modules["__main__"], "__file__"), "multiprocessing has run the parent's main module here"
    os.setsid()


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """Make `launch_worker` fork its processes."""
    with _forking(local_worker, ForkedPopen):
        yield


@contextmanager
def ranks_are_forked() -> Iterator[None]:
    """Make engines of this process fork their other ranks, and list them in `ranks`."""
    with _forking(leader, ForkedRank):
        yield
    ranks.clear()


@contextmanager
def _forking(module: ModuleType, popen: type[Forked]) -> Iterator[None]:
    """Replace `subprocess` of a module. Ends the fork server afterwards, because other tests count processes."""
    forking = SimpleNamespace(**vars(subprocess) | dict(Popen=popen))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subprocess", forking)
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
