"""Requirements of tests that some machines do not meet, and helpers for files and permissions of other users. An unmet
requirement is the only reason to skip a test.

A run ends with a list of the tests that it skipped because they need another machine. A test that can create its
premise must not skip. `tests/test_whole_run.py` allows `skip` only in this file and in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trueroll.engine.cache.lending import place_to_lend
from trueroll.kernels.cpu.library import load_library

INSTRUCTION_SETS = Path(__file__).parents[1] / "kernels" / "cpu" / "native" / "isa"
NOBODY = 65534
_CAPABILITY_VERSION = 0x20080522

lends_huge_pages = pytest.mark.skipif(
    place_to_lend() is None, reason="another machine: needs huge pages that can be lent (Linux 6.1 or later)"
)


def missing_instruction_sets() -> list[str]:
    """Return the instruction sets that this machine cannot run, or all of them if the library is missing.

    `amx_bf16` is tested with emulated tiles on every machine.
    """
    every = {source.stem for source in INSTRUCTION_SETS.glob("*.cpp")}
    try:
        return sorted(every - {*load_library().instruction_sets()})
    except OSError:
        return sorted(every)


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Make user `NOBODY` the owner of a file or of a link itself. Without root, the change is visible only in this
    process.
    """
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        return
    given = os.lstat(path)
    for name in ("stat", "lstat", "fstat"):
        patch.setattr(os, name, _with_owner(getattr(os, name), (given.st_dev, given.st_ino)))


def _with_owner(look: object, given: tuple[int, int]) -> object:
    def status(*args: object, **options: object) -> os.stat_result:
        found = look(*args, **options)  # type: ignore[operator]
        if (found.st_dev, found.st_ino) != given:
            return found
        return os.stat_result((*found[:4], NOBODY, NOBODY, *found[6:]))

    return status


@contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Subject this thread to its user's file permissions, even if the user is root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0, os.strerror(ctypes.get_errno())
    sets = list(struct.unpack("6I", before.raw))
    sets[0] = sets[3] = 0  # both halves of the effective set; the permitted set is unchanged
    assert libc.capset(header, struct.pack("6I", *sets)) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())
