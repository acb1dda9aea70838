"""A process group of NCCL whose failures are errors, and harm neither the process nor its other groups.

By default such a group of torch's has a thread that ends the process when an operation fails or takes too long, for the
sake of training that would hang. A group that waits in a blocking way has none: the environment asks for that, and is
read while a group is made. Every wait for the group ends within its timeout but one: once all members have met, NCCL
connects them and sets no limit to that; so it is to be done on a thread that may be left behind. Some calls of CUDA,
such as to free memory or to load a kernel, may wait for whatever the GPU is doing: behind a broadcast whose peer died
they have no deadline until somebody aborts the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from trueroll.errors import PushError

from .gloo import c10d
from .gpu import gpu_of

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


def check_available(device: torch.device) -> Any:
    """The kind of group that NCCL's are. Raise PushError if `device` is no GPU, or torch has no NCCL."""
    if gpu_of(device) is None:
        raise PushError(f"collective: expected a GPU for NCCL, found the device {device}; choose the backend gloo")
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if kind is None:
        raise PushError(
            "collective: expected a torch with NCCL, found one without; install one, or push by shared or disk"
        )
    return kind


def new_group(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """Join the group of the `size` members that meet at the store, with the GPU `device`.

    Raise PushError as `check_available` does, RuntimeError if not all members come within the timeout, or NCCL fails.
    """
    kind = check_available(device)
    store.set(f"member-{rank}", b"is here")
    store.wait([f"member-{member}" for member in range(size)], timeout)
    options = kind.Options()
    options._timeout = timeout
    # Torch takes such streams from another pool than those for receiving and for captures. On one stream with a
    # broadcast, these would wait for it without a deadline.
    options.is_high_priority_stream = True
    with _blocking_waits():
        group = kind(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def abort(group: Any) -> None:
    """End what a group of NCCL has under way, and free its memory. Leave any other group alone."""
    if isinstance(group, getattr(c10d, "ProcessGroupNCCL", ())):
        group.abort()


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """For groups that are made meanwhile. The environment is the process's: a group that another thread makes at that
    moment waits in the same way.
    """
    with _environment:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before
