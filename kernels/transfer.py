"""Copies between host and device that nobody waits for until their content is needed, and streams.

On a CPU `to_device` copies nothing, and `HostCopy` copies at once: its tensor may change afterwards. On a GPU copies
are queued behind the kernels of the current stream, from and into pinned memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """What this thread's work on `device` is queued on; None where work is done at once."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_for_stream(device: torch.device) -> None:
    """Waits until `device` has done all that this thread asked of it."""
    if (stream := current_stream(device)) is not None:
        stream.synchronize()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, which are on the host, on `device`."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """What `tensor` holds at this point of the stream, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.to("cpu", copy=True)
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> Tensor:
        """The content, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
