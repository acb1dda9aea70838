"""Identify the GPU of a device, and choose how a push reaches workers on GPUs.

Owns the choice between buckets in host memory and buckets in GPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed

from trueroll.errors import ConfigError

from ...kernels.transfer import wait_for_stream


def gpu_of(device: torch.device | str) -> str | None:
    """Return the UUID of a CUDA device; None for any other device."""
    device = torch.device(device)
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(trainer: str | None, workers: Mapping[str, str | None]) -> bool:
    """Return whether trainer and workers all use the same GPU, in which case the GPU's memory can hold the buckets.
    `workers`: maps addresses to GPUs.
    """
    return trainer is not None and set(workers.values()) == {trainer}


def broadcasts_between_gpus(trainer: str | None, workers: Mapping[str, str | None]) -> bool:
    """Return whether trainer and workers all have a GPU, in which case NCCL can broadcast buckets between the GPUs.

    Raise ConfigError if two processes use the same GPU, or if the trainer's torch has no NCCL.
    """
    if trainer is None or None in workers.values():
        return False
    users = {trainer: "the trainer"}
    for address, gpu in workers.items():
        assert gpu is not None
        if gpu in users:
            raise ConfigError(
                f"collective: {users[gpu]} and worker {address} are both on GPU {gpu}, but each needs a GPU of its "
                "own; push by 'shared' or 'disk', or start the worker on another GPU"
            )
        users[gpu] = f"worker {address}"
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            "collective: this torch has no NCCL, but tensors on a GPU need it; install a torch with NCCL, or push by "
            "shared or disk"
        )
    return True


@contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    """Context manager in which a CUDA device is the current device of this thread, both in torch and in the CUDA
    driver. Before the block runs, the device's stream is synchronized.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        wait_for_stream(device)
        yield
