"""Build the native kernels with flags that differ from the installed library's."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import MappingProxyType

from trueroll.engine.models.smollm2 import make_folder_once
from trueroll.kernels.cpu.library import Library

ROOT = Path(__file__).parents[3]


def build(
    output: Path,
    flags: Sequence[str],
    more_sources: Sequence[Path] = (),
    own_flags: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Compile and link all sources. The flags are those of pyproject.toml, then `flags`, then `own_flags` of the
    source's name.

    With emulated tiles, the instruction set `amx_bf16` runs on any machine. Object files are stored next to `output`.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"][0]
    flags = [*settings["extra-compile-args"], *flags, "-fPIC", "-DEMULATE_TILES"]

    def compiled(source: Path) -> str:
        target = str(output.with_name(f"{source.stem}.o"))
        _run(["g++", *flags, *own_flags.get(source.stem, ()), "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*sorted((ROOT / "kernels/cpu/native").rglob("*.cpp")), *more_sources]))
    _run(["g++", *flags, *settings["extra-link-args"], *objects, "-o", str(output)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@cache
def emulated_library() -> Library:
    """Return the library with emulated tiles, loaded next to the installed library. The library is built once for all
    processes of a test run. Only the instruction set that the installed library may lack is compiled with optimization.
    """
    folder = Path(os.environ["TRUEROLL_TEST_RUN"]) / "emulated"
    make_folder_once(
        folder, lambda folder: build(folder / "emulated.so", ["-O0", "-shared"], (), {"amx_bf16": ["-O2"]})
    )
    library = Library(folder / "emulated.so")
    assert library.instruction_sets()[0] == "amx_bf16"
    return library
