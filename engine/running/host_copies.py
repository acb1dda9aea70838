"""Copies of results from a device to the host. A copy blocks only when its content is needed.

For tensors on a CPU, `HostCopies` copies immediately, so the source tensors may change afterwards. On a GPU, copies use
pinned memory and are queued after the kernels of the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopies:
    """Copies `tensors`, all on one device, to the host. Each copy holds the value that its source tensor has when the
    stream executes the copy operation.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensors or not tensors[0].is_cuda:
            self._hosts = [tensor.numpy().copy() for tensor in tensors]
            return
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._hosts = [host.numpy() for host in hosts]
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> list[np.ndarray]:
        """Wait for the copies, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._hosts
