"""Buckets in the memory of a GPU that trainer and workers share, through CUDA IPC.

Owns: an allocation of slots in the trainer, for one push, and the mapping of this allocation in each worker. The CUDA
driver, not torch, allocates the memory. Torch uses a file to count references to shared memory. If torch allocated the
memory, the death of a worker would leak the memory. With memory that torch allocated, a worker would also write to
torch's file, at a position given in the data that the worker receives. A worker passes a received handle only to the
driver, and checks the size of the opened memory.

Guarantees: the memory is freed when the push ends. After a failed push, a worker may still have the memory mapped. The
driver must then keep the pages until the last mapping is closed, which NVIDIA does not guarantee. Trainer and workers
run on one machine, with the same GPU.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from trueroll.errors import PushError

from ..payload.manifest import IPC_HANDLE_BYTES, MOST_UNDER_WAY, Bucket, CudaIpcSource
from .gpu import gpu_of, made_current

log = logging.getLogger(__name__)
_PAGE = 2 * 2**20
"""Minimum size of an allocation. Smaller allocations may share a page, and a handle exposes the whole page to other
processes.
"""
_LAZY_ENABLE_PEER_ACCESS = 1  # the only flag
_Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class Driver:
    """The CUDA driver's functions for shared memory. The functions act on the current device of the calling thread.

    `library`: libcuda. Addresses are device addresses. Raise PushError if a function fails.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def allocate(self, num_bytes: int) -> int:
        address = _Address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", _Address(address))

    def share(self, address: int) -> bytes:
        """Return the handle with which another process can open an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = _Address()
        value = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
        return address.value

    def size(self, address: int) -> int:
        """Return the number of bytes from an address to the end of the allocation that contains the address."""
        base, size = _Address(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _Address(address))
        return base.value + size.value - address

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", _Address(address))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise PushError(
                f"shared: {name} failed on the GPU with error {code} "
                f"({(text.value or b'unknown').decode()}); if GPU memory is short, reduce the memory that torch or "
                "the worker reserves; otherwise run trainer and worker on one machine and, in containers, with the "
                "same IPC namespace, or push by disk"
            )


def load_driver() -> Driver:
    """Load the CUDA driver. Raise PushError if the driver cannot be loaded."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise PushError(f"shared: cannot load the CUDA driver: {error}; run trainer and worker on a GPU") from None


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor that uses existing memory of a CUDA device. The tensor does not keep the memory alive.
    Raise PushError if torch copies the memory instead of using it.
    """

    class Span:
        __cuda_array_interface__ = dict(shape=(num_bytes,), typestr="|u1", data=(address, False), version=3)

    tensor = torch.as_tensor(Span(), device=device)
    if tensor.data_ptr() != address:
        raise PushError(f"shared: torch has copied the memory instead of using it on {device}; push again")
    return tensor


class CudaIpcSlots:
    """The trainer's side, on the CUDA device `device`. `slots`: uint8 tensors to fill.

    Raise PushError if the memory cannot be allocated or shared.
    """

    has_word_sums = True

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        size = slot_bytes * MOST_UNDER_WAY
        gpu, self._device, self._driver = gpu_of(device), device, load_driver()
        assert gpu is not None
        with made_current(device):
            torch.cuda.empty_cache()  # the driver cannot use memory that torch keeps in its cache
            self._address: int | None = self._driver.allocate(size)
            try:
                handle = self._driver.share(self._address)
                self.slots = list(tensor_at(self._address, size, device).split(slot_bytes))
            except BaseException:
                self.close()
                raise
        self._source = CudaIpcSource(gpu=gpu, handle=handle, slot_bytes=slot_bytes, num_slots=MOST_UNDER_WAY)

    def source(self, position: int) -> CudaIpcSource:
        return self._source

    def open(self) -> None:
        """Do nothing: the workers map the memory on their own."""

    def opened(self) -> None:
        """Do nothing: the handle becomes useless when the memory is freed."""

    def send(self, slot: int, num_bytes: int) -> None:
        """Do nothing: the workers read the slot directly from the shared memory."""

    def wait(self, slot: int) -> None:
        """Do nothing: a slot is free once all workers have replied."""

    def close(self) -> None:
        """Free the memory. After a successful push, no worker has the memory mapped.

        An error of `close` is logged but not raised, so that it does not hide the error that ended the push.
        """
        self.slots = []
        address, self._address = self._address, None
        if address is None:
            return
        try:
            with made_current(self._device):
                self._driver.free(address)
        except (PushError, RuntimeError) as error:
            log.warning("the memory of a push was not freed: %s", error)


class CudaIpcReader:
    """The worker's side, on the device of the worker's weights.

    Raise PushError if the memory cannot be opened, is on another GPU or is smaller than announced.
    """

    def __init__(self, source: CudaIpcSource, device: torch.device) -> None:
        found = gpu_of(device)
        if found != source.gpu:
            raise PushError(f"shared: the trainer is on GPU {source.gpu}, but the worker is on {found}; push again")
        self._slot_bytes = source.slot_bytes
        self._device, self._driver = device, load_driver()
        with made_current(device):
            self._address: int | None = self._driver.open(source.handle)
        try:
            self._slots = self._map(source, self._address)
        except BaseException:
            self.close()
            raise

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing: the bytes are already in the shared memory."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        if bucket.num_bytes > self._slot_bytes:
            raise PushError(
                f"bucket {bucket.index}: has {bucket.num_bytes} bytes, but a slot has only {self._slot_bytes}"
            )
        return self._slots[bucket.index % len(self._slots)]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._slots = ()
        address, self._address = self._address, None
        if address is not None:
            with made_current(self._device):
                self._driver.close(address)

    def _map(self, source: CudaIpcSource, address: int) -> tuple[torch.Tensor, ...]:
        expected, found = source.slot_bytes * source.num_slots, self._driver.size(address)
        if found < expected:
            raise PushError(
                f"shared: the trainer's memory handle has {found} bytes, but its slots take {expected} bytes; push "
                "again"
            )
        return tensor_at(address, expected, self._device).split(source.slot_bytes)
