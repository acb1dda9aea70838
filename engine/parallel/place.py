"""The place of a rank in an engine with several ranks: its device, and how it reaches the other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from trueroll.errors import ConfigError

from ...kernels.cpu.library import library_obstacle
from ..config import EngineConfig
from .exchange import Segment, SharedExchange
from .groups import Connections


class RankPlace:
    """The place of rank `index`: its device, and its connections to the other ranks. `segment`: the memory that all
    ranks share.

    `links`: how the rank reaches the other ranks. `everyone`: the exchange among all ranks through host memory.
    """

    def __init__(self, config: EngineConfig, index: int, segment: Segment) -> None:
        devices, kind, topology = config.rank_devices, config.rank_exchange, segment.topology
        self.segment, self._device = segment, torch.device(devices[index])
        self.links, self._connections = segment.links(index), None
        self.everyone = cast(SharedExchange, self.links.everyone)
        if kind != "shared":
            self._connections = Connections(self.links, kind, segment.check)
            self.links = self._connections.links
        on_gpu = self._device.type == "cuda"
        self.links = self.links._replace(
            num_sharers=devices.count(devices[index]), can_capture=on_gpu and kind != "shared" and topology.stages == 1
        )

    def join(self, folder: str) -> None:
        """Connect this rank with the other ranks. The ranks find each other through `folder`. All ranks must make this
        call. Raise ConfigError if torch cannot exchange tensors in the configured way on this machine.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.everyone.meet()  # a rank that could not start is noticed here
        if self._connections is not None:
            self._connections.join(Path(folder), self._device)

    def totals(self, memory: Mapping[str, int]) -> dict[str, int]:
        """Return how many bytes all ranks together hold, by name, for every name in `memory` except `weights`. All
        ranks must make this call. `memory`: as `Executor.memory` returns it.
        """
        sizes = {name: size for name, size in memory.items() if name != "weights"}
        sums = torch.stack([*self.everyone.gather(torch.tensor([*sizes.values()]))]).sum(0)
        return dict(zip(sizes, sums.tolist(), strict=True))

    def abort(self) -> None:
        """Abort this rank's exchanges on a GPU. No further call is allowed."""
        if self._connections is not None:
            self._connections.abort()


def config_of_rank(config: EngineConfig, index: int) -> EngineConfig:
    """Return the configuration of a rank, with its device and its share of the threads. Raise ConfigError if the
    devices or the native library are missing.
    """
    name = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
    if obstacle := library_obstacle():
        raise ConfigError(f"{name}: ranks need the native library to exchange tensors, but {obstacle}")
    devices, found = config.rank_devices, torch.cuda.device_count()
    numbers = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    if missing := [number for number in numbers if number >= found]:
        raise ConfigError(
            f"{name}: {config.num_ranks} ranks need the GPUs {numbers}, but torch finds only {found} GPUs ({missing} "
            "are missing); use fewer ranks, or set devices so that ranks share a GPU",
            field=name,
            value=getattr(config, name),
        )
    cores = config.num_threads or len(os.sched_getaffinity(0))
    threads = max(1, cores // config.num_ranks)
    return config.model_copy(update=dict(device=devices[index], num_threads=threads))
