"""The list of packages, and the build of the native kernels. Everything else is in pyproject.toml.

A folder with an `__init__.py`, inside a folder that pyproject.toml maps to a package, is a package of trueroll. Every
file of kernels/cpu/native belongs to the native library.

`TRUEROLL_NATIVE=0` leaves the library out on purpose. Otherwise a failed compilation fails the installation. Without
the library the much slower reference kernels would serve, although the user did not ask for them. pybind11 is used only
for `ParallelCompile`, which compiles several files at a time.

The library does not use the interface of Python: ctypes loads it. So its name and the tag of its wheel name no
interpreter, and one wheel serves every Python version.
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile
from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WAY_OUT = (
    "the native CPU kernels of trueroll do not compile ({cause}); install g++ (a C++17 compiler), or set "
    "TRUEROLL_NATIVE=0 to install trueroll without them, on the much slower reference kernels"
)


def packages() -> Iterator[str]:
    """Yield the names of all packages. `rollout/trueroll` is not a part of the package in `rollout`."""
    folders = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        yield package
        yield from (f"{package}.{name}" for name in find_packages(folder, exclude=["trueroll"]))


class BuildNative(build_ext):
    """Compiles the native kernels, unless the environment requests an installation without them."""

    def finalize_options(self):
        super().finalize_options()
        wanted = os.environ.get("TRUEROLL_NATIVE", "1")
        if wanted not in ("0", "1"):
            raise BaseError(f"TRUEROLL_NATIVE must be 0 (no native kernels) or 1 (native kernels), got {wanted!r}")
        if wanted == "0":
            self.extensions = []
            for library in Path(__file__).parent.glob("kernels/cpu/_native*.so"):
                library.unlink()  # from an earlier installation from this folder
        for extension in self.extensions:
            extension.sources = _native_files("*.cpp")
            extension.depends = _native_files("*.h")

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as error:
            raise BaseError(WAY_OUT.format(cause=error)) from error


class TagWheel(bdist_wheel):
    """Tags the wheel for a platform, and for any Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def _native_files(pattern: str) -> list[str]:
    return sorted(map(str, Path("kernels/cpu/native").rglob(pattern)))


with ParallelCompile():
    setup(cmdclass={"build_ext": BuildNative, "bdist_wheel": TagWheel}, packages=[*packages()])
