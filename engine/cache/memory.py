"""Arenas: memory that can be released and reallocated without new tensor objects.

An arena is one block of memory from which tensors are allocated one after the other. The arena owns the memory; the
code that allocates a tensor owns the tensor's content. Guarantees: each tensor is aligned to 64 bytes. When `drop`
returns, the memory has been returned to the system. Tensors can be used again after `drop` and `restore`; host tensors
keep their addresses.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
HUGE_PAGE = 2 * 2**20
_FIXED = 16  # MAP_FIXED
_MOVE_FLAGS = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP
_FREE = 8  # MADV_FREE
_CANNOT_MOVE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)

log = logging.getLogger(__name__)


def bytes_needed(build: Callable[[Callable[..., Tensor]], object], dtype: torch.dtype) -> int:
    """Return the number of bytes that an arena needs for all tensors that `build(empty)` allocates.

    `build` allocates its tensors by calling `empty(*shape)`. `dtype`: the default dtype of `empty`.
    """
    total = 0

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        nonlocal total
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        total += _aligned(tensor.nbytes)
        return tensor

    build(empty)
    return total


def new_arena(num_bytes: int, device: torch.device, huge_pages: bool) -> Arena:
    """Return an arena on a device. Raise MemoryError or RuntimeError if there is not enough memory.

    `huge_pages`: whether to use huge pages on the host. Set `huge_pages` only if the whole arena will be used: with
    small pages, unused parts of an arena occupy no memory.
    """
    if device.type == "cpu" and sys.platform == "linux":
        return HostArena(num_bytes, huge_pages)
    return DeviceArena(num_bytes, device)


class Arena(ABC):
    """Memory from which tensors are allocated.

    The memory is zero at first, and also after `restore` if its content was not kept. `num_held`: the bytes that the
    arena holds on its device now, including alignment. Host pages are counted even before they are touched.
    `copy_note`: the reason why `take` copied host pages, although moving the pages would be faster; empty if no pages
    were copied.
    """

    copy_note = ""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.num_held = memory.nbytes
        self._layout: list[tuple[int, int]] = []

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Allocate the next tensor from the arena."""
        start = _aligned(sum(self._layout[-1])) if self._layout else 0
        num_bytes = math.prod(shape) * dtype.itemsize
        if start + num_bytes > self._memory.nbytes:
            raise MemoryError(
                f"an arena of {self._memory.nbytes} bytes is too small for its tensors, which need {start + num_bytes} "
                "bytes"
            )
        self._layout.append((start, num_bytes))
        return self._memory[start : start + num_bytes].view(dtype).view(shape)

    def tensor(self, index: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return tensor number `index` in the order of allocation, counted from 0. The result shares the arena's
        memory.

        Raise ValueError if the tensor in the arena does not have the requested size.
        """
        start, num_bytes = self._layout[index]
        if math.prod(shape) * dtype.itemsize != num_bytes:
            raise ValueError(f"arena: tensor {index} has {num_bytes} bytes, not the size of {list(shape)} {dtype}")
        return self._memory[start : start + num_bytes].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """The size of the memory in bytes, even while the memory is released."""
        return self._memory.nbytes

    def take(self, other: Arena) -> None:
        """Move the content of another arena into this arena. After this call, the other arena's content is undefined.
        If this call moved pages instead of copying them, the other arena now has the former pages of this arena.

        Raise ValueError unless both arenas have tensors of the same sizes in the same order.
        """
        if other._layout != self._layout or other._memory.shape != self._memory.shape:
            raise ValueError("arena: cannot take the content of an arena with tensors of different sizes")
        if not self._move(other):
            self._memory.copy_(other._memory)

    @abstractmethod
    def drop(self, keep: bool) -> None:
        """Release the device's memory.

        `keep`: whether to keep the content on the host until `restore`. Content that an earlier `drop` did not keep
        remains lost.
        """

    @abstractmethod
    def restore(self) -> None:
        """Reallocate the memory. Restore the content if `drop` kept it."""

    def set_aside(self) -> bool:
        """Give up the content, but keep the memory for new content. The system may reclaim the memory before new
        content is written. If this arena does not support `set_aside`, change nothing and return False.
        """
        return False

    def _move(self, other: Arena) -> bool:
        """Move the content of another arena without copying. Return False if moving is not possible."""
        return False


class HostArena(Arena):
    """Pages of host memory. `drop(keep=True)` leaves the content in place.

    If `map_file` was called for this arena, or for an arena from which `take` moved the content, the pages belong to a
    file. Forked processes do not inherit the pages. If a forked process inherited the pages, it would keep dropped
    memory allocated, and the system would copy each page that this process writes.
    """

    def __init__(self, num_bytes: int, huge_pages: bool) -> None:
        try:
            self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot allocate {num_bytes} bytes of memory: {error}") from None
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        # A huge page is aligned to its size, and moves as a whole only between aligned addresses.
        start = -whole.data_ptr() % HUGE_PAGE
        super().__init__(whole[start : start + num_bytes])
        self._huge_pages = huge_pages
        self._has_file = False
        self._advise()
        _keep_from_children(self._memory)

    def map_file(self, file: int, flags: int) -> None:
        """Replace the arena's content with the content of a file. `flags`: MAP_SHARED or MAP_PRIVATE of mmap."""
        _map(self._memory, flags, file)
        self._has_file = True

    def drop(self, keep: bool) -> None:
        if not keep:
            _map(self._memory, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            self._advise()
            self._has_file = False
            self.num_held = 0

    def restore(self) -> None:
        self.num_held = self._memory.nbytes

    def set_aside(self) -> bool:
        # Pages of a file may be shared with other processes.
        return not self._has_file and advise(self._memory.data_ptr(), self._memory.nbytes, _FREE)

    def _move(self, other: Arena) -> bool:
        if not isinstance(other, HostArena):
            return False
        if _exchange_pages(other._memory.data_ptr(), self._memory.data_ptr(), self._memory.nbytes):
            self._has_file, other._has_file = other._has_file, self._has_file
            return True
        self._note_copy(os.strerror(ctypes.get_errno()))
        return False

    def _note_copy(self, reason: str) -> None:
        if not self.copy_note:
            self.copy_note = f"memory pages are copied, because this system cannot move pages (mremap: {reason})"
            log.warning(
                "%s; weight commits will be slower; to move pages instead, use Linux 5.13 or later", self.copy_note
            )

    def _advise(self) -> None:
        if self._huge_pages:
            advise(self._memory.data_ptr(), self._memory.nbytes, mmap.MADV_HUGEPAGE)


class DeviceArena(Arena):
    """An arena on any device, as one torch allocation.

    After `restore`, the memory and its tensors may have other addresses.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        self._kept: Tensor | None = None

    def drop(self, keep: bool) -> None:
        if not keep:
            self._kept = None
        elif self.num_held:
            self._kept = self._memory.to("cpu", copy=True)
        self._memory.untyped_storage().resize_(0)
        self.num_held = 0
        if self._memory.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        if self.num_held:
            return
        self._memory.untyped_storage().resize_(self._memory.nbytes)
        self.num_held = self._memory.nbytes
        if self._kept is None:
            self._memory.zero_()
        else:
            self._memory.copy_(self._kept)
            self._kept = None


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """Call madvise on memory. Return False if madvise fails."""
    return _system().madvise(address, num_bytes, advice) == 0


def _map(memory: Tensor, flags: int, file: int) -> None:
    """Replace the pages of an arena's `memory` with new pages.

    Raise OSError on failure. After a failure, the arena's addresses may be unmapped.
    """
    access, address = mmap.PROT_READ | mmap.PROT_WRITE, memory.data_ptr()
    if _system().mmap(address, max(1, memory.nbytes), access, flags | _FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap: cannot map the pages of an arena")
    _keep_from_children(memory)


def _keep_from_children(memory: Tensor) -> None:
    """Exclude the pages of `memory` from all processes that are forked from now on. Raise OSError on failure."""
    if not advise(memory.data_ptr(), memory.nbytes, mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), "madvise: cannot exclude the pages of an arena from forked processes")


def _move_pages(source: int, destination: int, num_bytes: int) -> bool:
    """Move pages from source to destination. The source stays mapped, but loses its content.

    If this system cannot move pages, change nothing and return False. Raise OSError on any other failure. After such a
    failure, the destination may be unmapped.
    """
    if _system().mremap(source, num_bytes, num_bytes, _MOVE_FLAGS, destination) == destination:
        return True
    if ctypes.get_errno() in _CANNOT_MOVE:
        return False
    raise OSError(ctypes.get_errno(), "mremap: cannot move the pages of an arena")


def _exchange_pages(one: int, other: int, num_bytes: int) -> bool:
    """Move the pages at `one` to `other`, and the pages at `other` to `one`. See `_move_pages` for the result and for
    errors. If the second move is not possible, the pages at `other` are lost.
    """
    between = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(between, dtype=torch.uint8).data_ptr()
    address += -address % HUGE_PAGE
    if not _move_pages(other, address, num_bytes) or not _move_pages(one, other, num_bytes):
        return False
    _move_pages(address, one, num_bytes)
    return True


@cache
def _system() -> Any:
    """Return the C library, with the signatures of the system calls that Python does not offer."""
    system, number = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t
    system.mmap.restype, system.mremap.restype = ctypes.c_void_p, ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, number, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    system.mremap.argtypes = [ctypes.c_void_p, number, number, ctypes.c_int, ctypes.c_void_p]
    system.madvise.argtypes = [ctypes.c_void_p, number, ctypes.c_int]
    return system


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
