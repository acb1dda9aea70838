"""Rules for a whole test run: the run leaves no process behind, and keeps at most as many threads busy as there are
cores.

This module is a pytest plugin, loaded by `conftest`. A process belongs to a run if it inherited the run's folder in the
variable `RUN`. The environment of a process also names the test that started the process.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

RUN = "TRUEROLL_TEST_RUN"
"""The environment variable that names the folder shared by all processes of a run."""
SECONDS = 30.0
"""Seconds in which a process must end once it is no longer needed."""


_OWN = pytest.StashKey[str]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the processes of a run share. The first process makes the folder, and all other processes
    inherit its name.

    Tests convert the embedded model into that folder once per run. Set TRUEROLL_CACHE to reuse the model of another
    folder instead.
    """
    if RUN in os.environ:
        return
    # Tests of a publisher treat mapped folders named "trueroll-..." as leftovers of a push.
    folder = tempfile.mkdtemp(prefix="tests-of-trueroll-")
    config.add_cleanup(partial(shutil.rmtree, folder))
    os.environ[RUN] = folder
    os.environ.setdefault("TRUEROLL_CACHE", f"{folder}/cache")
    config.stash[_OWN] = folder
    # The processes of xdist inherit the variable before they import torch.
    share_cores(os.environ, len(config.getoption("tx", []) or []), len(os.sched_getaffinity(0)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fail the last test of a file if the file leaves processes behind. The failure names these processes."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        end_helpers()
        found = started_by(item.nodeid.split("::")[0])
        if found:
            gc.collect()  # uncollected objects may own a process, which ends when they are collected
        if left := _kill_what_is_left(found):
            pytest.fail("left behind and killed:\n" + "\n".join(left), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, trylast=True)  # before the summary is printed, after the processes of xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail a run if any process is left after all test processes have ended."""
    result = yield
    if (run := session.config.stash.get(_OWN, None)) is not None:
        if left := _kill_what_is_left(processes_of(run)):
            session.config.stash[_LEFT] = left
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the processes that the run left behind."""
    for process in terminalreporter.config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"left behind and killed: {process}", red=True)


def share_cores(environment: MutableMapping[str, str], num_processes: int, num_cores: int) -> None:
    """Limit threads, so that `num_processes` test processes together keep at most as many threads busy as there are
    cores.

    Set the variable that torch, torch's libraries and numpy read, in `environment`, which child processes inherit. A
    test that needs two threads sets the number in torch. A single test process may use all cores. A variable that is
    already set is unchanged.
    """
    if num_processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))


def processes_of(run: str) -> dict[int, str]:
    """Return the processes of a run by id, with descriptions, except this process and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {int(path.name): _environment(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    return {
        pid: _describe(pid, environment)
        for pid, environment in found.items()
        if environment.get(RUN) == run and pid not in own
    }


def started_by(file: str) -> dict[int, str]:
    """Return descriptions, by process id, of running descendants of this process and of orphans of a test file."""
    ids = {child.pid for child in psutil.Process().children(recursive=True)}
    orphans = {
        pid: description
        for pid, description in processes_of(os.environ[RUN]).items()
        if description.startswith(f"{file}::")
    }
    return orphans | {pid: _describe(pid, _environment(Path(f"/proc/{pid}"))) for pid in ids if _runs(pid)}


def end_helpers() -> None:
    """End the helper processes of this process: multiprocessing's resource tracker, and the fork server for pushes by
    gloo.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    if (reader := sys.modules.get("trueroll.weight_sync.transports.gloo_reader")) is not None:
        server = reader._fork_server
        if server._process is not None:
            server._requests.close()
            server._process.wait(SECONDS)


def still_running(ids: Iterable[int]) -> set[int]:
    """Wait up to `SECONDS` until these processes have ended. Return the ids of processes that have not ended. Does not
    reap a process.
    """
    left, deadline = set(ids), time.monotonic() + SECONDS
    for pid in sorted(left):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            has_ended = bool(poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
            os.close(descriptor)
            if not has_ended:
                continue
        left.discard(pid)
    return left


def _kill_what_is_left(found: dict[int, str]) -> list[str]:
    """Wait up to `SECONDS` for processes to end. Kill the remaining processes and return their descriptions."""
    left = still_running(found)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [found[pid] for pid in sorted(left)]


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _environment(path: Path) -> dict[str, str]:
    """Return a process's environment, or an empty dict if the process has ended or this user may not read it."""
    with suppress(OSError):
        variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
        return dict(variable.split("=", 1) for variable in variables if "=" in variable)
    return {}


def _describe(pid: int, environment: dict[str, str]) -> str:
    command = b""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    test = environment.get("PYTEST_CURRENT_TEST", "no test")
    return f"{test}: process {pid}: {command.replace(bytes(1), b' ').decode(errors='replace').strip()[:300]}"
