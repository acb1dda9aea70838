"""Tensors on the GPU, and ops that take theirs from the CPU and compute on the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueroll.kernels.contract import Backend

DEVICE = torch.device("cuda")
_WRITES_TO_CACHES = ("qkv", "write_kv", "layers")


class Moved:
    """The ops of a backend, for tensors on the CPU, in a form that every test of `tests/kernels` can use."""

    def __init__(self, ops: Backend) -> None:
        self._ops = ops
        self.instruction_set, self.new_weight, self.new_layers = ops.instruction_set, ops.new_weight, ops.new_layers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def compute(*args: Any, **options: Any) -> Any:
            there = move(args, DEVICE)
            result = move(getattr(self._ops, name)(*there, **options), torch.device("cpu"))
            for ours, theirs in zip(args, there, strict=True):
                if name in _WRITES_TO_CACHES:
                    copy_back(ours, theirs)
            return result

        return compute


def move(value: Any, device: torch.device) -> Any:
    """A tensor, or the tensors in tuples, lists and dataclasses, on this device."""
    if isinstance(value, Tensor):
        return _move_in_place(value, device)
    if isinstance(value, tuple | list):
        return type(value)(move(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: move(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _move_in_place(x: Tensor, device: torch.device) -> Tensor:
    """With the memory around it, so that it lies there as it did here: shifted, or with gaps."""
    if x.is_contiguous() and x.storage_offset() == 0:
        return x.to(device)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def copy_back(ours: Any, theirs: Any) -> None:
    """Stores in our tensors, also those in tuples and lists, what theirs hold."""
    if isinstance(ours, Tensor):
        ours.copy_(theirs)
    elif isinstance(ours, tuple | list):
        for pair in zip(ours, theirs, strict=True):
            copy_back(*pair)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers on the GPU, with this standard deviation."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    """Equality of bits, for tensors on the GPU."""
    assert left.dtype == right.dtype and left.shape == right.shape
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
