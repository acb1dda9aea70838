"""The test suite leaves no process behind, and has no more busy threads than there are cores."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import whole_run

TESTS = Path(__file__).parent
FILE = "tests/test_whole_run.py"
BACKGROUND = "sleep 1000 >/dev/null 2>&1 & until grep -qxz sleep /proc/$!/cmdline; do :; done"
"""A shell command that starts a process for which nothing waits. The process is orphaned when its shell has ended. The
shell ends after the process has become `sleep`: until then its environment may read as empty.
"""
ORPHAN = f"subprocess.run({BACKGROUND!r}, shell=True)"


def test_only_a_missing_machine_skips_a_test() -> None:
    """Only tests/machines.py and tests/gpu may skip a test or expect it to fail. All other tests must create their
    premises.
    """
    escapes = {"skip", "skipif", "importorskip", "xfail"}
    found = {
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in TESTS.rglob("*.py")
        if path.name != "machines.py" and "gpu" not in path.relative_to(TESTS).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in escapes and ast.unparse(node).startswith("pytest.")
    }
    assert found == set()


@pytest.mark.parametrize(
    ("num_processes", "num_cores", "threads"), [(2, 2, "1"), (3, 2, "1"), (2, 8, "4"), (6, 64, "10"), (1, 8, None)]
)
def test_test_processes_share_the_cores(num_processes: int, num_cores: int, threads: str | None) -> None:
    environment: dict[str, str] = {}
    whole_run.share_cores(environment, num_processes, num_cores)
    assert environment.get("OMP_NUM_THREADS") == threads
    whole_run.share_cores(chosen := {"OMP_NUM_THREADS": "7"}, num_processes, num_cores)
    assert chosen == {"OMP_NUM_THREADS": "7"}


def test_this_process_uses_its_share_of_cores_and_waits_passively() -> None:
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert torch.get_num_threads() * num_processes <= max(num_processes, len(os.sched_getaffinity(0)))
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    if num_processes > 1:
        assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


def test_children_and_orphans_of_a_file_are_found_until_they_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        shell = subprocess.run(f"{BACKGROUND}; echo $!", shell=True, capture_output=True, text=True)
        orphan = int(shell.stdout)
        found = whole_run.started_by(FILE)
        assert "input()" in found[child.pid] and "sleep 1000" in found[orphan]
        assert all(FILE in description for description in found.values())
        assert {child.pid, orphan} <= whole_run.processes_of(os.environ[whole_run.RUN]).keys()
        os.kill(orphan, signal.SIGKILL)
        assert child.stdin is not None
        child.stdin.close()
        assert whole_run.still_running([child.pid, orphan]) == set()
        assert child.wait() == 1  # the parent can still read the exit code
    assert whole_run.started_by(FILE).keys().isdisjoint({child.pid, orphan})


def test_a_file_or_a_run_that_leaves_a_process_behind_fails_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(f"import subprocess\ndef test_it():\n    {ORPHAN}\n")
    (tmp_path / "conftest.py").write_text(
        f"import subprocess, whole_run\nwhole_run.SECONDS = 0.0\ndef pytest_sessionfinish():\n    {ORPHAN}\n"
    )
    own = (whole_run.RUN, "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["PYTHONPATH"] = str(TESTS)
    command = [sys.executable, "-P", "-m", "pytest", "-p", "whole_run", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert "test_file.py::test_it (teardown): process" in done.stdout or "::test_it (call): process" in done.stdout
    assert "left behind and killed: no test: process" in done.stdout
    assert done.stdout.count("sleep 1000") >= 2
