"""Tensors on the GPU, and ops that take tensors from the CPU and compute on the GPU. A rehearsal runs the same tests on
a CPU, in Triton's interpreter, with small sizes. The rehearsal only shows that the tests run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trueroll.engine.models.names import find_config
from trueroll.kernels.contract import Backend

IS_REHEARSAL = os.environ.get("TRUEROLL_REHEARSAL") == "1"
DEVICE = torch.device("cpu" if IS_REHEARSAL else "cuda")
SMALL: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=512,
    bos_token_id=1,
    eos_token_id=2,
)
T = TypeVar("T")
_WRITES = ("qkv", "write_kv", "convolve", "delta_rule", "layers", "merge_into")


def sized(real: T, rehearsed: T) -> T:
    """Return `real` on a GPU and `rehearsed` in a rehearsal."""
    return rehearsed if IS_REHEARSAL else real


def cut_config(name: str, folder: Path, **changes: Any) -> Path:
    """Write a shipped configuration into `folder`, changed and cut to two layers. In a rehearsal, the model has one
    small layer.
    """
    config = json.loads((find_config(name) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sized({"num_hidden_layers": 2}, SMALL) | changes))
    return folder


class Moved:
    """The ops of a backend, for tensors on the CPU, so that every test of `tests/kernels` can use them."""

    def __init__(self, ops: Backend) -> None:
        self._ops = ops
        self.instruction_set, self.new_weight, self.new_layers = ops.instruction_set, ops.new_weight, ops.new_layers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def compute(*args: Any, **options: Any) -> Any:
            there, options_there = move(args, DEVICE), {key: move(value, DEVICE) for key, value in options.items()}
            result = move(getattr(self._ops, name)(*there, **options_there), torch.device("cpu"))
            if name in _WRITES:
                copy_back([*args, *options.values()], [*there, *options_there.values()])
            return result

        return compute


def move(value: Any, device: torch.device) -> Any:
    """Move a tensor, or the tensors in tuples, lists and dataclasses, to this device."""
    if isinstance(value, Tensor):
        return _move_in_place(value, device)
    if isinstance(value, tuple | list):
        parts = [move(part, device) for part in value]
        return getattr(value, "_make", type(value))(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: move(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _move_in_place(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor with its surrounding memory, so that its offset and its gaps stay the same."""
    if x.is_contiguous() and x.storage_offset() == 0:
        return x.to(device)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def copy_back(ours: Any, theirs: Any) -> None:
    """Copy the values of `theirs` into the tensors of `ours`, including tensors in tuples and lists."""
    if isinstance(ours, Tensor):
        ours.copy_(theirs)
    elif isinstance(ours, tuple | list):
        for pair in zip(ours, theirs, strict=True):
            copy_back(*pair)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return normally distributed numbers on the GPU, with standard deviation `scale`."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether tensors on the GPU have equal bits."""
    assert left.dtype == right.dtype and left.shape == right.shape
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
