"""Native kernels for the CPU: C++ in `native/`, built when the package is installed, called through its C interface.

`library` owns the loaded shared library, `weight` the layout of matrices and layers, `backend` the ops. The instruction
set is the best that the machine has, or the one that the environment variable TRUEROLL_CPU_ISA names, and is one for
the whole process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..specs import AttentionSpec, ExpertsSpec, LayerSpec

MOST_HEAD_DIM = 512


def obstacle(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerSpec], hidden_size: int | None = None
) -> str:
    """Why these kernels cannot serve such layers of a hidden size on a device in a dtype, or an empty string.

    Raise ConfigError if TRUEROLL_CPU_ISA names what this machine does not have.
    """
    from .library import library_obstacle

    if device.type != "cpu":
        return f"it computes on a CPU, not on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        found = str(dtype).removeprefix("torch.")
        wanted = "set dtype to bfloat16 (--dtype bfloat16) or float32"
        return f"native CPU kernels expect float32 or bfloat16, found {found}; {wanted}"
    for head_dim in [layer.mixer.head_dim for layer in layers if isinstance(layer.mixer, AttentionSpec)]:
        if head_dim % 16 or head_dim > MOST_HEAD_DIM:
            expected = f"a head size that is a multiple of 16 up to {MOST_HEAD_DIM}"
            return f"native CPU kernels expect {expected}, found {head_dim}"
    for inner in [layer.mlp.intermediate_size for layer in layers if isinstance(layer.mlp, ExpertsSpec)]:
        for size in (inner, hidden_size or 0):
            if size % 16:
                expected = "experts of intermediate and hidden sizes that are multiples of 16"
                return f"native CPU kernels expect {expected}, found {size}; use the backend reference"
    return library_obstacle()
