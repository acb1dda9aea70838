"""Models made from a configuration alone, with random weights, to measure speed where no checkpoint is at hand.

Promises: the same configuration and dtype on the same kind of device give the same weights, and activations stay
finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trueroll.errors import ModelError

from ...kernels.contract import Weight
from ...kernels.specs import DecoderSpec
from ...kernels.stacks import Stack
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

    Their standard deviation is 1 / sqrt(size of the last axis), or of that which a product adds along, so that a
    product of rows of unit variance has unit variance. They are drawn on `device`, one tensor at a time, of a stack one
    expert.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in weights.items():
        # All norms are like the last one, but for those of delta nets.
        zero_centered = spec.norm.zero_centered and not name.endswith(spec.names["delta.norm"])
        is_norm = name.endswith("norm.weight")
        for part in _parts(weight):
            values = torch.full(part.shape, float(not zero_centered), dtype=part.dtype, device=device)
            part.copy_(values if is_norm else values.normal_(std=_fan_in(part) ** -0.5, generator=generator))


def _parts(weight: Any) -> list[Any]:
    """A weight, or what a stack has of each expert."""
    return [weight.narrow(0, i, 1) for i in range(weight.shape[0])] if isinstance(weight, Stack) else [weight]


def _fan_in(weight: Any) -> int:
    return (weight.own_shape if isinstance(weight, Stack) else weight.shape)[-1]
