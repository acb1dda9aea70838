"""Copies of weights, which an engine keeps beside its live weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .coded import CodedWeight
from .quantization import format_of
from .rounded import RoundedWeight
from .shards import Shard, Shards
from .stacks import Stack


def copy_of(weight: Any, device: torch.device) -> Any:
    """Return a copy of a weight, in memory of its own.

    The copy of a quantized weight holds the weight's codes, or its rounded values if the weight has no codes, so the
    copy takes as much memory as the weight. Writing the copy back with `copy_` gives the same bits. Quantizing the
    rounded values a second time might give other bits. The copy of a plain weight is a tensor on `device`.
    """
    if format_of(weight) is None:
        return weight.to_dense().to(device, copy=True)
    if isinstance(weight, Shards):
        return Shards([copy_of(shard, device) for shard in weight.shards])
    if isinstance(weight, Shard):
        return Shard(copy_of(weight.own, device), weight.slice)
    if isinstance(weight, Stack):
        return Stack(copy_of(weight.matrix, device), weight.own_shape, weight.layout)
    if isinstance(weight, RoundedWeight | CodedWeight):
        return weight.copied(device)
    return weight.copied()


def on_device(weight: Any, device: torch.device) -> Any:
    """Return `weight` if it is on `device`; otherwise return a copy of `weight` on `device`, made by `copy_of`."""
    return weight if device_of(weight) == device else copy_of(weight, device)


def device_of(weight: Any) -> torch.device:
    """Return the device of a copy that `copy_of` made. The codes of native kernels are always in host memory."""
    if isinstance(weight, Tensor):
        return weight.device
    if isinstance(weight, Shards):
        return device_of(weight.shards[0])
    if isinstance(weight, Shard):
        return device_of(weight.own)
    if isinstance(weight, Stack):
        return device_of(weight.matrix)
    if isinstance(weight, CodedWeight):
        return weight.data.device
    return device_of(weight.plain) if isinstance(weight, RoundedWeight) else torch.device("cpu")
