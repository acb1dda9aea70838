"""A worker process with the fake engine, and with weights on the configured device. `stats` includes the checksums of
the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from fake_engine import FakeEngine, FakeInfo, FakeWeights  # noqa: E402

from trueroll.engine.config import EngineConfig  # noqa: E402
from trueroll.rollout import WorkerProcess  # noqa: E402
from trueroll.rollout.config import WorkerConfig  # noqa: E402
from trueroll.rollout.worker.process import run_as_child  # noqa: E402
from trueroll.weight_sync.payload.manifest import checksum  # noqa: E402
from trueroll.weight_sync.payload.tensors import raw_bytes  # noqa: E402

SHAPES = {"embed.weight": (40_000, 1000), "layer.weight": (2048, 1001), "norm.weight": (1001,), "last": (1,)}
"""More than one bucket in total, and sizes that are not multiples of a word."""


def trainer_tensors(seed: int, device: str) -> dict[str, torch.Tensor]:
    """Return float32 tensors that depend only on the seed, in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def checksums_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return checksums of the tensors' bits in bfloat16."""
    return {name: checksum(raw_bytes(tensor.to(torch.bfloat16).cpu())) for name, tensor in tensors.items()}


class DeviceWeights(FakeWeights):
    """The target of pushes, on any device."""

    def __init__(self, device: str) -> None:
        super().__init__(SHAPES)
        self.live = {name: tensor.to(device) for name, tensor in self.live.items()}

    def checksums(self) -> dict[str, int]:
        return checksums_of(self.live)


def start_worker(device: str) -> WorkerProcess:
    command = (sys.executable, str(Path(__file__)))
    return WorkerProcess(WorkerConfig(), EngineConfig(model="fake", device=device), startup_timeout=60, command=command)


def load(config: EngineConfig) -> Any:
    engine = FakeEngine(DeviceWeights(config.device))
    engine.info, engine.weight_version = FakeInfo(device=config.device), 0
    return engine


if __name__ == "__main__":
    run_as_child(load)
