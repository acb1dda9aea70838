"""Kernels for NVIDIA GPUs, written in Triton.

Tokens lie on the N side of every matrix instruction; weights, keys and values on its M side. The tile of the M side and
the step along K are fixed, the tile of the N side follows the number of rows, and no bit depends on it.

`launch` pins every setting of the compiler that could change a bit; `products`, `attention`, `rows` and `head` hold the
kernels, each with its table of tiles; `backend` joins them to the ops. Without a GPU the kernels run in Triton's
interpreter, for tests.
"""

from __future__ import annotations

import os

import torch

MOST_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why these kernels cannot serve a model with this dtype and head size on this device, or an empty string."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Triton kernels expect bfloat16 or float16, found {str(dtype).removeprefix('torch.')}; set dtype"
    if head_dim % 2 or head_dim > MOST_HEAD_DIM:
        return f"Triton kernels expect an even head size up to {MOST_HEAD_DIM}, found {head_dim}"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else "Triton kernels expect an NVIDIA GPU, found a CPU; set device to cuda"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"Triton kernels expect an NVIDIA GPU, found {device}; use the backend reference"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"Triton kernels expect compute capability 8.0 or later, found {'.'.join(map(str, capability))}"
    return ""
