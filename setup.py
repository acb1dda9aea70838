"""List the packages and build the native kernels. All other settings are in pyproject.toml.

pyproject.toml maps some folders to packages. Every folder with an `__init__.py` inside these folders is a package of
trueroll. Every file of kernels/cpu/native belongs to the native library.

`TRUEROLL_NATIVE=0` installs trueroll without the library. Otherwise a failed compilation fails the installation. An
installation without the library would silently use the much slower reference kernels. pybind11 is used only for
`ParallelCompile`, which compiles several files at a time. Object files are kept in build, and a later installation
compiles only changed files.

The library does not use Python's C API, and is loaded with ctypes. The names of the library and of the wheel therefore
contain no Python version, and one wheel serves every version.
"""

import hashlib
import os
import subprocess
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
    """Yield the names of all packages. `rollout/trueroll` is not a subpackage of `trueroll.rollout`."""
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
                library.unlink()  # built by an earlier installation from this folder
        for extension in self.extensions:
            extension.sources = _native_files("*.cpp")
            extension.depends = _native_files("*.h")
        self.build_temp = f"build/objects-{_compiler_key()}"  # an editable installation has a temporary folder here

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


def _compiler_key() -> str:
    """Return a name for the compiler and its flags. Object files of different compilers never mix."""
    flags = [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
    try:
        compiler = (flags[1] or flags[0] or "g++").split()
        flags.append(subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout)
    except OSError:  # the compilation reports the missing compiler
        pass
    return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]


def _is_stale(obj: str, source: str) -> bool:
    """Return whether an object file is older than its source, any header, or the flags of the compiler."""
    inputs = [source, *_native_files("*.h"), "setup.py", "pyproject.toml"]
    return os.stat(obj).st_mtime <= max(os.stat(path).st_mtime for path in inputs)


with ParallelCompile(needs_recompile=_is_stale):
    setup(cmdclass={"build_ext": BuildNative, "bdist_wheel": TagWheel}, packages=[*packages()])
