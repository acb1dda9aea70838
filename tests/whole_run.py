"""What holds for a run of the tests as a whole: it leaves no process behind, and keeps few threads busy.

A plugin of pytest, which `conftest` loads. A process belongs to a run if it inherited the run's folder in `RUN`; its
environment names the test that started it, too.
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
"""The environment variable with the folder that all processes of a run share."""
SECONDS = 30.0
"""How long a process may take to end once nothing needs it any more."""


_OWN = pytest.StashKey[str]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Makes a folder for what the processes of a run share, in the first of them; the others inherit its name.

    Tests convert the embedded model anew, into that folder; set TRUEROLL_CACHE to reuse one instead.
    """
    if RUN in os.environ:
        return
    # A publisher's tests take what is mapped from a folder "trueroll-..." for what a push left.
    folder = tempfile.mkdtemp(prefix="tests-of-trueroll-")
    config.add_cleanup(partial(shutil.rmtree, folder))
    os.environ[RUN] = folder
    os.environ.setdefault("TRUEROLL_CACHE", f"{folder}/cache")
    config.stash[_OWN] = folder
    # The processes of xdist inherit it, and then import torch.
    share_cores(os.environ, len(config.getoption("tx", []) or []), len(os.sched_getaffinity(0)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fails the last test of a file that leaves processes behind, and names them."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        end_helpers()
        found = started_by(item.nodeid.split("::")[0])
        if found:
            gc.collect()  # what waits to be collected may hold a process, and end it
        if left := _kill_what_is_left(found):
            pytest.fail("left behind and killed:\n" + "\n".join(left), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, trylast=True)  # before the summary is printed, after the processes of xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run of which any process is left when all that ran tests have ended."""
    result = yield
    if (run := session.config.stash.get(_OWN, None)) is not None:
        if left := _kill_what_is_left(processes_of(run)):
            session.config.stash[_LEFT] = left
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what the run left behind."""
    for process in terminalreporter.config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"left behind and killed: {process}", red=True)


def share_cores(environment: MutableMapping[str, str], num_processes: int, num_cores: int) -> None:
    """Let `num_processes` test processes keep at most as many threads busy as there are cores.

    What torch, its libraries and numpy read is set for all processes that inherit `environment`; a test that needs two
    threads asks torch for them. One process alone may use all cores, and a setting of the caller stays.
    """
    if num_processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))


def processes_of(run: str) -> dict[int, str]:
    """Ids of the processes that belong to a run, but for this one and those it descends from, with a description."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {int(path.name): _environment(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    return {
        pid: _describe(pid, environment)
        for pid, environment in found.items()
        if environment.get(RUN) == run and pid not in own
    }


def started_by(file: str) -> dict[int, str]:
    """Those of this process's descendants, and of the orphans of a test file, that run."""
    ids = {child.pid for child in psutil.Process().children(recursive=True)}
    orphans = {
        pid: description
        for pid, description in processes_of(os.environ[RUN]).items()
        if description.startswith(f"{file}::")
    }
    return orphans | {pid: _describe(pid, _environment(Path(f"/proc/{pid}"))) for pid in ids if _runs(pid)}


def end_helpers() -> None:
    """End what this process keeps for later use: multiprocessing's tracker, and the server that gloo's readers are
    forked from.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    if (reader := sys.modules.get("trueroll.weight_sync.transports.gloo_reader")) is not None:
        server = reader._fork_server
        if server._process is not None:
            server._requests.close()
            server._process.wait(SECONDS)


def still_running(ids: Iterable[int]) -> set[int]:
    """Which of these processes have not ended when `SECONDS` are over. Returns once all have; reaps none."""
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
    """Descriptions of the processes that have not ended by themselves when `SECONDS` are over."""
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
    """Empty for a process that has ended, and for one that this user may not look into."""
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
