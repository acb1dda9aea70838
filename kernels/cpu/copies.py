"""Functions that copy bytes, and in the same pass over the memory hash the bytes and search for infinities and NaN."""

from __future__ import annotations

import ctypes
from functools import cache

from .library import library_obstacle, load_library

LEAST_BYTES = 241
"""XXH3 hashes fewer bytes in other ways, which the library does not have."""
_WORDS = 2**64


@cache
def can_copy() -> bool:
    """Return whether the native library is available. Raise ConfigError as `load_library` does."""
    return not library_obstacle()


def copy_bytes(source: int, num_bytes: int, target: int, infinity: int) -> tuple[int, bool]:
    """Copy `num_bytes` bytes, at least `LEAST_BYTES`, from the address `source` to the address `target`.

    `infinity`: the bits of infinity in the format of the numbers. If `infinity` is below 2**16, the bytes are numbers
    of 16 bits, otherwise numbers of 32 bits. If `infinity` is 0, no numbers are checked.
    Return the 64-bit XXH3 hash of the bytes, and whether all numbers are finite.
    """
    finite = ctypes.c_bool()
    found = load_library().take_bytes(source, num_bytes, infinity, target, ctypes.addressof(finite))
    return found % _WORDS, finite.value


def pack_rows(is_bfloat16: bool, source: int, rows: int, columns: int, target: int, infinity: int) -> tuple[int, bool]:
    """Pack a matrix of bfloat16 or float32. `infinity` and the results are as in `copy_bytes`."""
    finite = ctypes.c_bool()
    found = load_library().take_rows(is_bfloat16, source, rows, columns, infinity, target, ctypes.addressof(finite))
    return found % _WORDS, finite.value
