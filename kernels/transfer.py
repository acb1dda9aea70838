"""CUDA streams, and non-blocking copies from the host to a device.

On a CPU, `to_device` copies nothing. On a GPU, copies use pinned memory and are queued after the kernels of the current
stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream on which this thread's work on `device` is queued; None where work runs immediately."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_for_stream(device: torch.device) -> None:
    """Wait until `device` has completed all work that this thread queued."""
    if (stream := current_stream(device)) is not None:
        stream.synchronize()


@contextmanager
def stream_beside(device: torch.device) -> Iterator[None]:
    """Context manager that queues this thread's work on a CUDA device in a separate stream.

    The work starts after all work queued on the default stream so far, and may overlap with work that other threads
    queue later.
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
    """Return the stream for copies to the GPU with this index. Each call returns the same stream, because torch reuses
    freed memory only on the stream for which the memory was allocated.
    """
    return torch.cuda.Stream(index)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` from the host to `device`."""
    if device.type == "cpu":
        return values
    if device.type == "meta":  # a dry run that only finds the kernels that steps need
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def all_to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return `to_device` of each tensor."""
    return [*tensors] if device.type == "cpu" else [to_device(tensor, device) for tensor in tensors]
