"""Models made from a configuration alone, with random weights, to measure speed where no checkpoint is at hand.

Promises: the same configuration and dtype on the same kind of device give the same weights, and activations stay
finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from trueroll.errors import ModelError

from ...kernels.contract import Weight
from ...kernels.specs import DecoderSpec
from .files import local_path

CONFIG_FILE = "config.json"
_CONFIGS = Path(__file__).parent / "configs"


def find_config(name: str) -> Path:
    """The folder of a configuration: a config.json, a folder that holds one, or the name of one that is shipped.

    Raise ModelError if there is none.
    """
    shipped = {folder.name: folder for folder in _CONFIGS.iterdir()}
    path = local_path(name)
    folder = shipped.get(name) or (path.parent if path is not None and path.name == CONFIG_FILE else path)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{name}: expected a {CONFIG_FILE}, a folder that holds one, or one of {', '.join(sorted(shipped))}, "
            "found none of them; check the path"
        )
    return folder


def fill_randomly(weights: Mapping[str, Weight], spec: DecoderSpec, device: torch.device) -> None:
    """Overwrites weights of a decoder, by their Hugging Face names: those of norms so that they multiply by 1, the
    others with normally distributed numbers of mean 0.

    Their standard deviation is 1 / sqrt(size of the last axis), so that a product of rows of unit variance has unit
    variance. They are drawn on `device`, one tensor at a time.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in weights.items():
        # All norms are like the last one, but for those of delta nets.
        zero_centered = spec.norm.zero_centered and not name.endswith(spec.names["delta.norm"])
        values = torch.full(weight.shape, float(not zero_centered), dtype=weight.dtype, device=device)
        if not name.endswith("norm.weight"):
            values.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        weight.copy_(values)
