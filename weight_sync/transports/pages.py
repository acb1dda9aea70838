"""Mappings of shared files, in huge pages where the system has them.

A huge page is allocated, cleared and mapped as a whole, which takes a tenth of the time that small pages take. Does not
own the file: a file may be closed while its mapping is used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import torch

HUGE_PAGE = 2 * 2**20
_FIXED = 16  # MAP_FIXED
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 22, 23, 25  # advice of madvise


def create_mapping(file: int, num_bytes: int) -> torch.Tensor:
    """Allocate and map `num_bytes` of an empty file. Return the memory: uint8 [num_bytes], zero.

    Raise OSError if there is not enough memory.
    """
    os.ftruncate(file, num_bytes)
    memory, whole = _map(file, num_bytes), num_bytes // HUGE_PAGE * HUGE_PAGE
    for start in range(0, whole, HUGE_PAGE):
        os.posix_fallocate(file, start, mmap.PAGESIZE)  # MADV_COLLAPSE needs at least one page
    if whole:
        _advise(memory[:whole], _COLLAPSE)
    os.posix_fallocate(file, 0, num_bytes)  # otherwise a write to a full file system would kill the process
    _advise(memory, _POPULATE_WRITE)
    return memory


def open_mapping(file: int, num_bytes: int) -> torch.Tensor:
    """Map a file of `num_bytes`. Return the memory: uint8 [num_bytes]. Raise OSError on failure."""
    memory = _map(file, num_bytes)
    _advise(memory, _POPULATE_READ)
    return memory


def _map(file: int, num_bytes: int) -> torch.Tensor:
    try:
        reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=_PRIVATE)
    except OverflowError as error:
        raise OSError(str(error)) from None
    # Huge pages can only be mapped at a multiple of their size.
    start = -torch.frombuffer(reserved, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    memory = torch.frombuffer(reserved, dtype=torch.uint8, count=num_bytes, offset=start)
    access, address = mmap.PROT_READ | mmap.PROT_WRITE, memory.data_ptr()
    if _system().mmap(address, num_bytes, access, mmap.MAP_SHARED | _FIXED, file, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memory


def _advise(memory: torch.Tensor, advice: int) -> None:
    """Call madvise, which may fail: the pages are then small, or are mapped when they are first used."""
    _system().madvise(memory.data_ptr(), memory.nbytes, advice)


@cache
def _system() -> Any:
    system, number = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, number, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    system.madvise.argtypes = [ctypes.c_void_p, number, ctypes.c_int]
    return system
