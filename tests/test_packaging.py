"""The wheel holds every module: all of them are imported from it, far away from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_layers import FOLDERS, ROOT, read_sources

IMPORT_ALL = """
import importlib, sys
unpacked, dependencies, *modules = sys.argv[1:]
sys.path += [unpacked, dependencies]
for module in modules:
    found = importlib.import_module(module).__file__
    assert found.startswith(unpacked), f"{module} came from {found}"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = _copy_sources(tmp_path_factory.mktemp("source"))
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("trueroll-*.whl"))


def _copy_sources(target: Path) -> Path:
    """setuptools leaves a folder `build` where it builds, and packs what an earlier build left there."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def test_every_module_is_imported_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = ["trueroll." + name.removesuffix(".__init__") for name in read_sources()]
    # -I and -S keep out the working folder and the .pth file that maps trueroll to the repository.
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(tmp_path), sysconfig.get_path("purelib"), *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_wheel_is_typed_and_licensed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"trueroll/{folder}/py.typed" for folder in FOLDERS} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
