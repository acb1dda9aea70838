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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trueroll.rollout.client import local_worker

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "trueroll.engine.engine",
        "trueroll.kernels.cpu.backend",
        "trueroll.kernels.families.gemma3",
        "trueroll.rollout.worker.worker",
    ]
)
_LOCK = threading.Lock()
"""Guards exit codes. Starting a process polls the exit codes of all processes, and each exit code can be read only
once.
"""


class ForkedPopen:
    """The part of `subprocess.Popen` that `WorkerProcess` and tests use. Both pipes exist; stderr is inherited."""

    def __init__(self, command: Sequence[str], *, text: bool = False, **_: Any) -> None:
        (child_stdin, stdin), (stdout, child_stdout) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run_python, args=(child_stdin, child_stdout, command[1:]))
        with _LOCK, pytest.MonkeyPatch.context() as patch:
            # multiprocessing runs the main module in each child: pytest's, or the example that a test runs.
            patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = os.fdopen(os.dup(stdin.fileno()), "w" if text else "wb", -1 if text else 0)
        self.stdout = os.fdopen(os.dup(stdout.fileno()), "r" if text else "rb", -1 if text else 0)
        for pipe in (child_stdin, stdin, stdout, child_stdout):
            pipe.close()

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


def _run_python(stdin: Connection, stdout: Connection, arguments: Sequence[str]) -> None:
    """Run what `python ARGUMENTS` runs. The arguments end with `-m MODULE` or a file."""
    assert not hasattr(sys.modules["__main__"], "__file__"), "multiprocessing has run the parent's main module here"
    os.setsid()
    for pipe, number in ((stdin, 0), (stdout, 1)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    run = runpy.run_module if "-m" in arguments else runpy.run_path
    run(arguments[-1], run_name="__main__")


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """Make `launch_worker` fork its processes. Ends the fork server afterwards, because other tests count processes."""
    forking = SimpleNamespace(Popen=ForkedPopen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_worker, "subprocess", forking)
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
