"""Which GPU something is on, and how a push reaches the workers from there.

Owns the choice between buckets in host memory and buckets in the memory of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed

from trueroll.errors import ConfigError

from ...kernels.transfer import wait_for_stream


def gpu_of(device: torch.device | str) -> str | None:
    """The UUID of the GPU, None for a device that is no CUDA device."""
    device = torch.device(device)
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(trainer: str | None, workers: Mapping[str, str | None]) -> bool:
    """Whether trainer and workers (address to GPU) are all on one GPU, so that it can hold buckets for all of them."""
    return trainer is not None and set(workers.values()) == {trainer}


def broadcasts_between_gpus(trainer: str | None, workers: Mapping[str, str | None]) -> bool:
    """Whether NCCL can bring buckets from the trainer's GPU to the workers': whether all have one.

    Raise ConfigError if two of them have the same one, or if the trainer's torch has no NCCL.
    """
    if trainer is None or None in workers.values():
        return False
    users = {trainer: "the trainer"}
    for address, gpu in workers.items():
        assert gpu is not None
        if gpu in users:
            raise ConfigError(
                f"collective: expected a GPU of its own for each of trainer and workers, found {users[gpu]} and worker "
                f"{address} on GPU {gpu}; push by shared or disk, or start the worker on another GPU"
            )
        users[gpu] = f"worker {address}"
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            "collective: expected a torch with NCCL for tensors on a GPU, found one without; install one, or push by "
            "shared or disk"
        )
    return True


@contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    """A CUDA device is the one that this thread uses, for the driver too, and has done what the thread asked of it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        wait_for_stream(device)
        yield
