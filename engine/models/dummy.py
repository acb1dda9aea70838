"""Dummy models: random weights for a model configuration, to measure speed without a checkpoint.

Guarantees: the weights depend only on the configuration, the dtype and the kind of device. Activations stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.contract import Weight
from ...kernels.specs import DecoderSpec
from ...kernels.stacks import Stack


def fill_randomly(weights: Mapping[str, Weight], spec: DecoderSpec, device: torch.device) -> None:
    """Overwrite the weights of a decoder with random numbers. `weights`: the weights by their Hugging Face names.

    Norm weights are set so that norms multiply by 1. The other weights are normally distributed with mean 0 and
    standard deviation 1 / sqrt(fan-in), so that inputs of unit variance give products of unit variance. Random numbers
    are generated on `device`, for one tensor at a time, or for one expert at a time in a stack.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in weights.items():
        # All norms have the same form as the last norm, except the norms of delta nets.
        zero_centered = spec.norm.zero_centered and not name.endswith(spec.names["delta.norm"])
        is_norm = name.endswith("norm.weight") or ".pre_fc_norm_" in name or name == spec.last_norm
        for part in _parts(weight):
            values = torch.full(part.shape, float(not zero_centered), dtype=part.dtype, device=device)
            part.copy_(values if is_norm else values.normal_(std=_fan_in(part) ** -0.5, generator=generator))


def _parts(weight: Any) -> list[Any]:
    """Return a list: the matrices of all experts if the weight is a stack, otherwise the weight itself."""
    return [weight.narrow(0, i, 1) for i in range(weight.shape[0])] if isinstance(weight, Stack) else [weight]


def _fan_in(weight: Any) -> int:
    return (weight.own_shape if isinstance(weight, Stack) else weight.shape)[-1]
