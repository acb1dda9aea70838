"""The Python that make installs with: one that trueroll serves, or an error of one line before anything else runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
SOURCES = ("pyproject.toml", "setup.py", ".ci/model.txt", ".ci/constraints.txt")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository without an environment, in which the script of the installation prints the version it runs on."""
    for name in (*SOURCES, "bin/", ".venv/"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
    (tmp_path / ".ci/install.py").write_text("import sys; print('installs with', sys.argv[0])")
    return tmp_path


def make_python(root: Path, name: str, version: str) -> str:
    """Write a Python that reports `version`, and otherwise behaves like the Python of the tests. Return its path."""
    minor = version.split(".")[1]
    program = root / "bin" / name
    fake = f"import sys; sys.version_info = (3, {minor}, 0); "
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\n'
        f'[ "$1" = -c ] && exec {sys.executable} -c "{fake}$2"\necho "{name} $@"\n'
    )
    program.chmod(0o755)
    return str(program)


def make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{root / 'bin'}:/usr/bin:/bin"}
    command = ("make", "--no-print-directory", "-f", str(MAKEFILE), *arguments, ".venv/.dev")
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("version", ["3.11.9", "3.12.0", "3.13.5", "3.14.8"])
def test_a_python_that_trueroll_serves_installs(root: Path, version: str) -> None:
    program = make_python(root, "python", version)
    done = make(root, f"PYTHON={program}")
    assert done.returncode == 0 and "python .ci/install.py .venv dev" in done.stdout


@pytest.mark.parametrize("version", ["3.10.12", "3.15.0"])
def test_another_python_is_refused_in_one_line(root: Path, version: str) -> None:
    program = make_python(root, "python", version)
    done = make(root, f"PYTHON={program}")
    said, of_make = done.stderr.splitlines()
    assert done.returncode != 0 and "install.py" not in done.stdout and re.match(r"make(\[\d+\])?: \*\*\*", of_make)
    assert said.startswith(f"trueroll needs Python 3.11 to 3.14 with venv and pip; {program} is Python {version};")


def test_the_first_python_that_trueroll_serves_is_found(root: Path) -> None:
    make_python(root, "python3", "3.10.12")
    make_python(root, "python3.14", "3.14.8")
    assert "python3.14 .ci/install.py .venv dev" in make(root).stdout


def test_a_missing_python_is_named(root: Path) -> None:
    done = make(root, "PYTHON=/nowhere/python")
    assert done.returncode != 0 and "; /nowhere/python is " in done.stderr and "not found" in done.stderr
