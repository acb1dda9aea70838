"""Build the native kernels with flags that differ from the installed library's."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from trueroll.engine.models.smollm2 import make_folder_once
from trueroll.kernels.cpu.library import Library

ROOT = Path(__file__).parents[3]


def build(output: Path, flags: Sequence[str], more_sources: Sequence[Path] = (), plain: Collection[str] = ()) -> None:
    """Compile and link all sources. The flags are those of pyproject.toml, then `flags`. `plain`: names of sources to
    compile without `flags` and without optimization, once for all builds of a test run.

    With emulated tiles, the instruction set `amx_bf16` runs on any machine. Object files are stored next to `output`,
    but the object files of `plain` in a folder of the test run.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"][0]
    always = [*settings["extra-compile-args"], "-fPIC", "-DEMULATE_TILES"]
    shared = Path(os.environ["TRUEROLL_TEST_RUN"]) / "plain"
    shared.mkdir(exist_ok=True)

    def compiled(source: Path) -> str:
        is_plain = source.stem in plain
        target, own = (shared if is_plain else output.parent) / f"{source.stem}.o", ["-O0"] if is_plain else flags
        if not (is_plain and target.exists()):
            made = target.with_suffix(f".{os.getpid()}")  # another process may make the same file
            _run(["g++", *always, *own, "-c", str(source), "-o", str(made)])
            made.replace(target)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*sorted((ROOT / "kernels/cpu/native").rglob("*.cpp")), *more_sources]))
    _run(["g++", *always, *flags, *settings["extra-link-args"], *objects, "-o", str(output)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@cache
def emulated_library() -> Library:
    """Return the library with emulated tiles, loaded next to the installed library. The library is built once for all
    processes of a test run. Only the instruction set that the installed library may lack is compiled with optimization.
    """
    folder = Path(os.environ["TRUEROLL_TEST_RUN"]) / "emulated"
    plain = {source.stem for source in (ROOT / "kernels/cpu/native").rglob("*.cpp")} - {"amx_bf16"}
    make_folder_once(
        folder, lambda folder: build(folder / "emulated.so", ["-O2", "-march=native", "-shared"], plain=plain)
    )
    library = Library(folder / "emulated.so")
    assert library.instruction_sets()[0] == "amx_bf16"
    return library
