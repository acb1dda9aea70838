"""Fakes for tests without a GPU: the driver's functions for shared memory, and torch's NCCL process group."""

from __future__ import annotations

import ctypes
import os
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def gpu(number: int) -> str:
    """Return the UUID of a fake GPU."""
    return f"{number:08x}-0000-0000-0000-000000000000"


class CudaLibrary:
    """A fake libcuda with host memory, which is called through the interface of ctypes. `failing`: functions that
    return an error. `allocated`: memory by address. `opened`: number of mappings by address. `freed_while_open`:
    addresses of memory that was freed while mapped. As with the real driver, freed memory stays readable while it is
    mapped.
    """

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.allocated: dict[int, Any] = {}
        self.opened: dict[int, int] = {}
        self.freed_while_open: list[int] = []
        self._handles: dict[bytes, int] = {}
        self._mapped: dict[int, Any] = {}

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        if "cuMemAlloc_v2" in self.failing:
            return 2
        memory = (ctypes.c_uint8 * (size.value + 64))()
        address._obj.value = -(-ctypes.addressof(memory) // 64) * 64
        self.allocated[address._obj.value] = (memory, size.value)
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        if "cuMemFree_v2" in self.failing:
            return 700
        memory = self.allocated.pop(address.value)
        if self.opened.get(address.value):
            self.freed_while_open.append(address.value)
            self._mapped[address.value] = memory
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        if "cuIpcGetMemHandle" in self.failing:
            return 801
        number = secrets.token_bytes(63) + b"\0"  # a handle may contain zeros
        self._handles[number] = address.value
        ctypes.memmove(ctypes.addressof(handle._obj), number, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        assert flags.value == 1
        found = self._handles.get(bytes(handle))
        if found not in self.allocated:
            return 400
        address._obj.value = found
        self.opened[found] = self.opened.get(found, 0) + 1
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        base._obj.value, size._obj.value = address.value, self.allocated[address.value][1]
        return 0

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        self.opened[address.value] -= 1
        if not self.opened[address.value]:
            self._mapped.pop(address.value, None)
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = {2: b"out of memory", 400: b"invalid resource handle"}.get(code)
        return 0


def host_tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class NcclGroup:
    """A fake ProcessGroupNCCL that uses a gloo group. `made`: all groups created so far."""

    made: list[NcclGroup] = []

    class Options:
        _timeout = timedelta()
        is_high_priority_stream = False

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ[BLOCKING_WAIT] == "1"  # a real NCCL group reads the environment variable at this point
        self.rank, self.timeout, self.is_aborted = rank, options._timeout, False
        self.has_stream_of_its_own = options.is_high_priority_stream
        self.device: torch.device | None = None
        self.works: list[NcclWork] = []
        self._members = store, rank, size, options._timeout
        NcclGroup.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device
        self._gloo = c10d.ProcessGroupGloo(*self._members)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> NcclWork:
        assert not self.is_aborted and tensor.is_contiguous()
        self.works.append(NcclWork(self._gloo.broadcast(tensor, root, timeout)))
        return self.works[-1]

    def abort(self) -> None:
        self.is_aborted = True


class NcclWork:
    """A running operation. As with NCCL, `wait` without a timeout returns at once."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.waited_for: timedelta | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.waited_for = timeout
        return bool(timeout) and self._work.wait(timeout)
