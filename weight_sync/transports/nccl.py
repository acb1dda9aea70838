"""NCCL process groups in which a failure raises an error, but does not end the process or affect its other groups.

By default, an NCCL group has a watchdog thread that ends the process if an operation fails or takes too long, so that
training does not hang. A group that uses blocking waits has no watchdog thread. An environment variable selects
blocking waits; torch reads the variable when a group is created.

Every wait for the group ends within the timeout, with one exception: once all members have met, NCCL connects the
members without a time limit. Callers must therefore join a group on a separate thread, which they can abandon. Some
CUDA calls, such as freeing memory or loading a kernel, may wait for all work on the GPU. If a peer dies during a
broadcast, CUDA calls that wait for all work on the GPU return only once the group is aborted.
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
    """Return the class of NCCL's groups. Raise PushError if `device` is not a GPU, or if torch has no NCCL."""
    if gpu_of(device) is None:
        raise PushError(f"collective: NCCL needs a GPU, but the device is {device}; choose the backend gloo")
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if kind is None:
        raise PushError("collective: this torch has no NCCL; install a torch with NCCL, or push by shared or disk")
    return kind


def new_group(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """Use the GPU `device` to join the group of the `size` members that meet at the store.

    Raise PushError in the same cases as `check_available`. Raise RuntimeError if not all members join within the
    timeout, or if NCCL fails.
    """
    kind = check_available(device)
    store.set(f"member-{rank}", b"is here")
    store.wait([f"member-{member}" for member in range(size)], timeout)
    options = kind.Options()
    options._timeout = timeout
    # Torch takes high-priority streams from a different pool than the streams for receiving and for captures. On a
    # broadcast's stream, receiving and captures would have to wait for the broadcast without a deadline.
    options.is_high_priority_stream = True
    with _blocking_waits():
        group = kind(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def abort(group: Any) -> None:
    """Abort the operations of an NCCL group and free its memory. Do nothing if the group is not an NCCL group."""
    if isinstance(group, getattr(c10d, "ProcessGroupNCCL", ())):
        group.abort()


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Context manager in which all new groups use blocking waits.

    All threads of the process share the environment, so a group that another thread creates at the same time also uses
    blocking waits.
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
