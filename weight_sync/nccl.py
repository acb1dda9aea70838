"""A process group of NCCL whose failures are errors, and harm neither the process nor its other groups.

By default such a group of torch's has a thread that ends the process when an operation fails or takes too long, for the
sake of training that would hang. A group that waits in a blocking way has none: the environment asks for that, and is
read while a group is made. Every wait here ends within its timeout but one: once all members have met, NCCL connects
them and sets no limit to that; so it is to be done on a thread that may be left behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from ..rollout.errors import PushError

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()
c10d: Any = torch.distributed


def new_group(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """Join the group of the `size` members that meet at the store, with the GPU `device`.

    Raise PushError if torch has no NCCL, RuntimeError if not all members come within the timeout, or NCCL fails.
    """
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if kind is None:
        raise PushError("collective: expected a torch with NCCL, found one without; install one, or push by shared")
    store.set(f"member-{rank}", b"is here")
    store.wait([f"member-{member}" for member in range(size)], timeout)
    options = kind.Options()
    options._timeout = timeout
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
