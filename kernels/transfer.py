"""Copies between host and device that nobody waits for until their content is needed, and streams.

On a CPU `to_device` copies nothing, and `HostCopies` copies at once: its tensors may change afterwards. On a GPU copies
are queued behind the kernels of the current stream, from and into pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """What this thread's work on `device` is queued on; None where work is done at once."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_for_stream(device: torch.device) -> None:
    """Waits until `device` has done all that this thread asked of it."""
    if (stream := current_stream(device)) is not None:
        stream.synchronize()


@contextmanager
def stream_beside(device: torch.device) -> Iterator[None]:
    """What this thread does on a CUDA device comes after what the default stream has been given so far, and overlaps
    with what others do there later.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = _receiving_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            yield


@cache
def _receiving_stream(index: int) -> torch.cuda.Stream:
    """Always the same one, for torch gives memory that was freed on a stream to that stream alone again."""
    return torch.cuda.Stream(index)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, which are on the host, on `device`."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def all_to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """What `to_device` gives for each."""
    return [to_device(tensor, device) for tensor in tensors]


class HostCopies:
    """What `tensors`, which lie on one device, hold at this point of the stream, on its way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type != "cuda":
            self._hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(self._hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The contents, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._hosts
