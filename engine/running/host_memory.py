"""The memory of the host tier, and the copies between blocks and slots (see `host_tier`).

A group consists of the layers with the same attention window, or of all recurrent layers. A slot holds the content of
a block in all layers of a group, one layer after the other, so that one transfer per slot moves all layers. On CUDA,
the memory is pinned, and all copies are queued on the current stream. Only the queued copies read and write slots, so
no copy synchronizes the device.

Copies are made in rounds of many copies: in each round, all sources are read before the destinations are written. If a
copy reads or writes an address that an earlier copy of the round wrote, the copy begins the next round. Temporary
memory on the device is at most twice the size of a round. A round has at most MOST_BYTES_ON_CPU or MOST_BYTES_ON_GPU
bytes, or is a single larger block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ...kernels.transfer import to_device
from ..cache.memory import new_arena

MOST_BYTES_ON_CPU, MOST_BYTES_ON_GPU = 2**23, 2**26
"""The maximum size of the blocks that one round copies. On a CPU, a few MiB stay in the caches. On a GPU, larger rounds
need fewer kernels.
"""
_HOST = torch.device("cpu")
_UNITS = torch.int64, torch.int32, torch.int16, torch.uint8


class HostMemory:
    """The slots of a rank's host tier, and the blocks that are copied to and from the slots. `tensors[i]`: the
    contiguous tensors of group i; a block is an index of the first dimension of each tensor. `sizes[i]`: the number of
    slots of group i. `num_held`: the bytes of host memory that the slots hold now.

    Raise MemoryError if the memory cannot be reserved, and ConfigError if the memory cannot be pinned.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> None:
        self._devices = {each.device for group in tensors for each in group}
        widths = [sum(each[0].nbytes for each in group) for group in tensors]
        unit = next(unit for unit in _UNITS if all(_bytes_of(t) % unit.itemsize == 0 for g in tensors for t in g))
        ends = np.cumsum([0, *(size * width for size, width in zip(sizes, widths, strict=True))]).tolist()
        self._arena = new_arena(ends[-1], _HOST, huge_pages=False)
        self._memory = self._arena.empty(torch.uint8, ends[-1])
        self._unpin = self._pin()
        slots = [
            self._memory[start:end].view(unit).view(size, width // unit.itemsize)
            for start, end, size, width in zip(ends, ends[1:], sizes, widths, strict=False)
        ]
        flat = [[each.view(len(each), -1).view(unit) for each in group] for group in tensors]
        self._groups = [_Group(*each) for each in zip(flat, slots, strict=True)]

    @property
    def num_held(self) -> int:
        return self._arena.num_held

    def copy(self, block_copies: Sequence[np.ndarray]) -> None:
        """Make copies. `block_copies`: as in `Step`. Does not synchronize."""
        for group, copies in zip(self._groups, block_copies, strict=True):
            if len(copies):
                group.copy(copies)

    def sleep(self) -> None:
        """Release the memory to the system. The content is lost."""
        if self._unpin is not None:
            self._unpin()
        if self._memory.nbytes:
            self._arena.drop(keep=False)

    def wake_up(self) -> None:
        """Reallocate the memory, unless it is already allocated."""
        if not self._arena.num_held:
            self._arena.restore()
            self._unpin = self._pin()

    def _pin(self) -> weakref.finalize | None:
        """Pin the memory if the blocks are on a CUDA device. Return a function that unpins the memory. The returned
        function is also called before this object is freed.
        """
        if not self._memory.nbytes or not any(device.type == "cuda" for device in self._devices):
            return None
        cuda: Any = torch.cuda.cudart()
        if (status := int(cuda.cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0))) != 0:
            raise ConfigError(
                f"host_cache_bytes: CUDA cannot pin {self._memory.nbytes} bytes of host memory (error {status}); lower "
                "host_cache_bytes, or raise the limit on locked memory"
            )
        unpin = weakref.finalize(self, cuda.cudaHostUnregister, self._memory.data_ptr())
        unpin.atexit = False
        return unpin


class _Group:
    """The memory of a group: for each tensor, the blocks as [blocks, width of the tensor]; and the slots as [slots,
    width of a block].
    """

    def __init__(self, tensors: Sequence[Tensor], slots: Tensor) -> None:
        self._tensors, self._slots = tensors, slots
        self._ends = np.cumsum([0, *(each.shape[1] for each in tensors)]).tolist()
        on_cpu = all(each.device.type == "cpu" for each in tensors)
        most = MOST_BYTES_ON_CPU if on_cpu else MOST_BYTES_ON_GPU
        self._most = max(1, most // max(1, slots.shape[1] * slots.itemsize))

    def copy(self, copies: np.ndarray) -> None:
        """Make copies, int64 [C, 2], in order."""
        for part in rounds(copies, self._most):
            if self._tensors:
                self._copy_at_once(*part.T)

    def _copy_at_once(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        stored, restored = destinations < 0, sources < 0
        between = ~stored & ~restored
        leaving = self._gathered(sources[stored]) if stored.any() else None
        arriving = self._fetched(sources[restored]) if restored.any() else None
        if leaving is not None:
            for row, place in zip(leaving, destinations[stored].tolist(), strict=True):
                self._slots[~place].copy_(row, non_blocking=True)
        if between.any():
            origins, targets = self._indices(sources[between]), self._indices(destinations[between])
            for each in self._tensors:
                each[targets] = each[origins]
        if arriving is not None:
            targets = self._indices(destinations[restored])
            for each, start, end in zip(self._tensors, self._ends, self._ends[1:], strict=False):
                each[targets] = arriving[:, start:end]

    def _gathered(self, blocks: np.ndarray) -> Tensor:
        """Return the content of blocks, [blocks, width of a block], on the device."""
        indices = self._indices(blocks)
        return torch.cat([each[indices] for each in self._tensors], 1)

    def _fetched(self, places: np.ndarray) -> Tensor:
        """Return the content of slots, [slots, width of a block], on the device."""
        rows = self._slots.new_empty(len(places), self._slots.shape[1], device=self._tensors[0].device)
        for row, place in zip(rows, places.tolist(), strict=True):
            row.copy_(self._slots[~place], non_blocking=True)
        return rows

    def _indices(self, blocks: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(blocks), self._tensors[0].device)


def rounds(copies: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Divide copies, int64 [C, 2], into rounds of up to `most` copies. A round is correct if all its sources are read
    before its destinations are written.
    """
    start, written = 0, set[int]()
    for i, (source, destination) in enumerate(copies.tolist()):
        if i - start == most or source in written or destination in written:
            yield copies[start:i]
            start, written = i, set()
        written.add(destination)
    if start < len(copies):
        yield copies[start:]


def _bytes_of(tensor: Tensor) -> int:
    """Return the size of a block in a tensor."""
    return tensor[0].nbytes
