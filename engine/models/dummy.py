"""Dummy models with random weights, built from a configuration alone, to measure speed without a checkpoint.

Promises: the same configuration and dtype on the same kind of device give the same weights. Activations stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.contract import Weight
from ...kernels.specs import DecoderSpec
from ...kernels.stacks import Stack


def fill_randomly(weights: Mapping[str, Weight], spec: DecoderSpec, device: torch.device) -> None:
    """Overwrite the weights of a decoder with random numbers. `weights`: by their Hugging Face names.

    Norms get the weights with which they multiply by 1. The other weights are normally distributed with mean 0 and
    standard deviation 1 / sqrt(fan-in), so that a product with rows of unit variance has unit variance. They are drawn
    on `device`, one tensor at a time, or one expert of a stack at a time.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in weights.items():
        # All norms have the form of the last norm, except the norms of delta nets.
        zero_centered = spec.norm.zero_centered and not name.endswith(spec.names["delta.norm"])
        is_norm = name.endswith("norm.weight")
        for part in _parts(weight):
            values = torch.full(part.shape, float(not zero_centered), dtype=part.dtype, device=device)
            part.copy_(values if is_norm else values.normal_(std=_fan_in(part) ** -0.5, generator=generator))


def _parts(weight: Any) -> list[Any]:
    """Return a list with the weight, or with the matrices of a stack's experts."""
    return [weight.narrow(0, i, 1) for i in range(weight.shape[0])] if isinstance(weight, Stack) else [weight]


def _fan_in(weight: Any) -> int:
    return (weight.own_shape if isinstance(weight, Stack) else weight.shape)[-1]
