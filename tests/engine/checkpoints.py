"""New versions of a model's weights: as a checkpoint, as tensors, and staged in an engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueroll.engine.engine import Engine
from trueroll.engine.running.weights import WeightStaging

FILE = "model.safetensors"


def another_version(model: Path, folder: Path, seed: int = 1, density: float = 1.0) -> Path:
    """Write a checkpoint that differs from `model` in a share `density` of the elements of each tensor."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = read_tensors(model)
    for tensor in tensors.values():
        factors = 1 + 0.3 * torch.randn(tensor.shape, generator=generator)
        chosen = torch.rand(tensor.shape, generator=generator) < density
        tensor.mul_(torch.where(chosen, factors, torch.ones(())))
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def read_tensors(model: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of a push of this checkpoint."""
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_file(model / FILE).items()}


def stage(engine: Engine, tensors: Mapping[str, Tensor], in_place: bool = False, step: int = 48) -> WeightStaging:
    """Return a staging with the tensors, written in pieces of `step` rows."""
    staging = engine.weights.new_staging(in_place)
    stage_rows(staging, tensors, step)
    return staging


def stage_rows(staging: WeightStaging, tensors: Mapping[str, Tensor], step: int = 48) -> None:
    for name, tensor in tensors.items():
        for start in range(0, len(tensor), step):
            piece = tensor[start : start + step]
            staging.rows(name, start, len(piece)).copy_(piece)


def stage_changes(engine: Engine, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> WeightStaging:
    """Return a staging with only the changed elements."""
    staging = engine.weights.new_staging(in_place=False)
    for name, tensor in after.items():
        indices = (tensor != before[name]).view(-1).nonzero().view(-1)
        if len(indices):
            staging.put(name, indices, tensor.view(-1)[indices])
    return staging


def addresses(engine: Engine) -> dict[str, int]:
    """Return the address of each parameter."""
    tensors: dict[str, Any] = dict(engine.weights.tensors)
    return {
        name: tensor.data_ptr() if isinstance(tensor, Tensor) else tensor.pointer for name, tensor in tensors.items()
    }
