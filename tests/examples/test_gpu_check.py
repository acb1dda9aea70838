"""The GPU check completes in a rehearsal, and does not report broken or skipped promises as kept."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "benchmarks" / "gpu_check.py"
TEN_MINUTES = 600
QUICK = ("test_commits.py", "test_decode.py", "test_large_tensors.py", "test_push.py", "test_trainer.py")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def run_check(out: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Run the check and return its exit code and the printed lines."""
    command = [sys.executable, "-P", str(SCRIPT), "--out", str(out), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment, cwd=out)
    return done.returncode, done.stdout.splitlines()


def test_a_rehearsal_runs_to_its_end(tmp_path: Path) -> None:
    code, lines = run_check(tmp_path, "--rehearse", "speed")
    assert code == 0 and lines[-1] == "2 promises, none broken", lines
    assert lines[-2].startswith("kept     products, attention and decode steps are measured: ")
    assert json.loads((tmp_path / "speed.json").read_text()).keys() == {"machine", "sections", "failed"}


@pytest.mark.exhaustive
def test_the_tests_in_tests_gpu_can_be_rehearsed(check: ModuleType, tmp_path: Path) -> None:
    """Rehearse the tests that take only seconds, in one process. Only tests that need a GPU are skipped."""
    check.lay_out(tmp_path / "site", None)
    verdict = check.Check(tmp_path, is_rehearsal=True).judge(check.Promise("all of them", 250, QUICK), "part")
    assert verdict.word == "kept" and verdict.detail.startswith("4 tests"), verdict
    assert any("needs a GPU" in line for line in verdict.lines), "premise: some were skipped"


def functions_of(file: Path) -> set[str]:
    """Return the names of the tests that a file defines."""
    body = ast.parse(file.read_text()).body
    return {each.name for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


def test_every_test_in_tests_gpu_belongs_to_a_promise(check: ModuleType) -> None:
    defined = {path.name: functions_of(path) for path in (ROOT / check.TESTS).glob("test_*.py")}
    all_tests = {f"{name}::{test}" for name, tests in defined.items() for test in tests}
    promises = [check.MACHINE, *(promise for part in check.PARTS.values() for promise in part)]
    named = {test for promise in promises for test in promise.tests}
    shown = {f"{name}::{test}" for name in named & defined.keys() for test in defined[name]}
    shown |= named - defined.keys()
    assert shown == all_tests and len(shown) > 30


def test_a_part_takes_less_than_ten_minutes(check: ModuleType) -> None:
    for name, promises in check.PARTS.items():
        assert check.MACHINE.seconds + sum(promise.seconds for promise in promises) < TEN_MINUTES, name


TESTS = {
    "test_kept.py": """
def test_it(record_property):
    record_property("found", "4.3 TB/s")
""",
    "test_broken.py": """
def test_it():
    assert 1 == 2, "a row differs"
""",
    "test_one_gpu.py": """
import pytest
def test_it():
    pytest.skip("needs two GPUs that torch can use")
""",
    "test_skipped.py": """
import pytest
def test_it():
    pytest.skip("needs patience")
""",
    "test_faulty.py": """
import os
def test_it():
    os.abort()
""",
    "test_endless.py": """
import time
def test_it():
    time.sleep(3600)
""",
    "test_no_module.py": "import nothing_of_this_name",
}


@pytest.fixture
def verdicts(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The verdicts on promises. Each promise has one of the test files above."""
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(check, "TESTS", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading plugins takes most of the time
    judge = check.Check(tmp_path, is_rehearsal=False).judge
    promises = {name: check.Promise(name, 2 if "endless" in name else 60, (name,)) for name in (*TESTS, "test_no.py")}
    return {name: judge(promise, "part") for name, promise in promises.items()}


@pytest.mark.exhaustive
def test_only_passed_tests_count_as_kept(verdicts: dict[str, Any]) -> None:
    words = {name.removesuffix(".py"): (verdict.word, verdict.is_fine) for name, verdict in verdicts.items()}
    assert words == {
        "test_kept": ("kept", True),
        "test_broken": ("BROKEN", False),
        "test_one_gpu": ("skipped", True),
        "test_skipped": ("SKIPPED", False),
        "test_faulty": ("BROKEN", False),
        "test_endless": ("BROKEN", False),
        "test_no_module": ("BROKEN", False),
        "test_no": ("BROKEN", False),
    }
    assert "4.3 TB/s" in str(verdicts["test_kept.py"])
    assert "test_broken::test_it: AssertionError: a row differs" in str(verdicts["test_broken.py"])
    assert "needs patience" in str(verdicts["test_skipped.py"])
    assert "not done within 2 s" in str(verdicts["test_endless.py"])


def test_a_broken_promise_is_an_error(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test_kept.py", "test_broken.py"):
        (tmp_path / name).write_text(TESTS[name])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    kept, broken = (check.Promise(name, 60, (f"test_{name}.py",)) for name in ("kept", "broken"))
    for name, value in dict(TESTS=str(tmp_path), MACHINE=kept, PARTS={"one": (broken, kept), "two": (kept,)}).items():
        monkeypatch.setattr(check, name, value)
    for arguments, code, last in (([], 1, "4 promises, 1 broken"), (["two"], 0, "2 promises, none broken")):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as ended:
            check.main()
        assert ended.value.code == code and capsys.readouterr().out.splitlines()[-1] == last
        assert (tmp_path / "out" / "machine.log").read_text().count("1 passed") == 1, "logs are those of the last run"


def test_without_a_gpu_the_check_stops_after_the_machine(tmp_path: Path) -> None:
    code, lines = run_check(tmp_path, "push", CUDA_VISIBLE_DEVICES="")
    assert code == 1 and lines[-1] == "1 promises, 1 broken"
    assert "needs a GPU that torch can use, found none" in "\n".join(lines)


def test_a_missing_package_is_named(check: ModuleType, tmp_path: Path) -> None:
    check.lay_out(tmp_path, None)
    assert check.unmet(tmp_path) == []
    (tmp_path / "wanting-1.0.dist-info").mkdir()
    requires = ("no-such-package>=2", "torch>=99", 'other; extra == "more"')
    metadata = ["Metadata-Version: 2.1", "Name: wanting", "Version: 1.0", *(f"Requires-Dist: {x}" for x in requires)]
    (tmp_path / "wanting-1.0.dist-info" / "METADATA").write_text("\n".join(metadata))
    missing, old = check.unmet(tmp_path)
    assert missing == "no-such-package>=2 (found none)" and old.startswith("torch>=99 (found 2.")


def test_an_unusable_wheels_or_out_folder_is_named(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other-1.0-cp27-none-win32.whl").touch()
    out, inside_a_file = str(tmp_path / "out"), str(tmp_path / "file" / "out")
    for arguments, found in (
        (["--out", out, "--wheels", str(tmp_path / "none")], f"{tmp_path / 'none'} has no wheels"),
        (["--out", out, "--wheels", str(tmp_path)], "pip cannot install these wheels"),
        (["--out", inside_a_file], "the folder cannot be written .*Not a directory.*; name another one"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        with pytest.raises(SystemExit, match=found):
            check.main()


ENDED = """
import sys
import gpu_check
gpu_check.TESTS = sys.argv[1]
gpu_check.MACHINE = gpu_check.Promise("endless", 250, ("test_told.py",))
sys.argv[1:] = ["--out", sys.argv[1]]
gpu_check.main()
"""
TOLD = """
import os, pathlib, time
def test_it():
    pathlib.Path(__file__).with_name("pid").write_text(f"{os.getpid()}.")
    time.sleep(3600)
"""


def test_terminating_the_check_ends_its_processes(tmp_path: Path) -> None:
    """The test sends SIGTERM, as the command `timeout` does."""
    (tmp_path / "test_told.py").write_text(TOLD)
    path = os.pathsep.join((str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.Popen([sys.executable, "-P", "-c", ENDED, str(tmp_path)], env=os.environ | {"PYTHONPATH": path})
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text().endswith("."):
        assert ended.poll() is None
        time.sleep(0.05)
    ended.terminate()
    assert ended.wait() == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text().removesuffix(".")), 0)


def test_the_checkout_is_the_package(check: ModuleType, tmp_path: Path) -> None:
    check.lay_out(tmp_path, None)
    code = "import trueroll, trueroll.kernels.triton.launch as m; print(trueroll.__version__, m.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, file = done.stdout.split()
    assert version[0].isdigit() and file == str(tmp_path / "trueroll/kernels/triton/launch.py")
