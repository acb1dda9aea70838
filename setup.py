"""How the native kernels are built; pyproject.toml has the rest.

`TRUEROLL_NATIVE=0` leaves them out on purpose. Otherwise an installation in which they do not compile fails, since
without them the much slower reference kernels would serve and nobody would have asked for that. pybind11 is used only
for `ParallelCompile`, which compiles several files at a time.
"""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WAY_OUT = (
    "the native CPU kernels of trueroll do not compile ({cause}); install g++ (a C++17 compiler), or set "
    "TRUEROLL_NATIVE=0 to install trueroll without them, on the much slower reference kernels"
)


class BuildNative(build_ext):
    """Compiles the native kernels, unless the environment asks for an installation without them."""

    def finalize_options(self):
        super().finalize_options()
        wanted = os.environ.get("TRUEROLL_NATIVE", "1")
        if wanted not in ("0", "1"):
            raise BaseError(f"TRUEROLL_NATIVE is 0 (without native kernels) or 1 (with them), got {wanted!r}")
        if wanted == "0":
            self.extensions = []
            for library in Path(__file__).parent.glob("kernels/cpu/_native*.so"):
                library.unlink()  # of an earlier installation from this folder

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as error:
            raise BaseError(WAY_OUT.format(cause=error)) from error


with ParallelCompile():
    setup(cmdclass={"build_ext": BuildNative})
