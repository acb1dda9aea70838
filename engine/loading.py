"""From a configuration to a model in memory: device, backend, architecture, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.ops import Backend, select_backend
from .config import EngineConfig
from .errors import ConfigError
from .models.dense import DenseConfig, DenseModel
from .models.loader import load_checkpoint, read_config, read_eos_token_ids, resolve_model


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, the backend it runs on, and what its folder says beside the weights."""

    folder: Path
    model: DenseModel
    backend_name: str
    backend: Backend
    eos_token_ids: tuple[int, ...]


def load_model(config: EngineConfig) -> LoadedModel:
    """Raise ConfigError for a device that is not there, ModelError for a model that cannot be loaded."""
    device = _device(config.device)
    backend_name, backend = select_backend(config.backend, device)
    folder = resolve_model(config.model)
    raw = read_config(folder)
    model_config = DenseConfig.from_folder(folder, raw)
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model = DenseModel(model_config, dtype, device, backend)
    load_checkpoint(folder, model.checkpoint_tensors(), model.ignored_tensors())
    return LoadedModel(folder, model, backend_name, backend, read_eos_token_ids(folder, raw))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device: expected one that torch can use here, such as cpu, found {name!r}: {error}"
        ) from None
    return device
