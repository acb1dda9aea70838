"""Native kernels for the CPU: C++ code in `native/`, which is built when the package is installed and called through a
C interface.

`library` owns the loaded shared library; `backend` owns the ops and the layout of matrices and layers; `copies` has the
functions that copy bytes for pushes. The whole process uses one instruction set: the best that the machine has, or the
one that the environment variable TRUEROLL_CPU_ISA names.
"""

from __future__ import annotations

from itertools import chain

import torch

from ..specs import CORRECTION_ROLE, ROUTER_ROLE, DecoderSpec, LatentSpec, MlpSpec

MOST_HEAD_DIM = 512


def obstacle(device: torch.device, dtype: torch.dtype, spec: DecoderSpec | None) -> str:
    """Return the reason why these kernels cannot serve a decoder on this device, with this dtype; an empty string if
    they can.

    `spec`: None to check the ops alone. Raise ConfigError if TRUEROLL_CPU_ISA names an instruction set that this
    machine lacks.
    """
    from .library import library_obstacle

    if device.type != "cpu":
        return f"native CPU kernels do not run on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        found = str(dtype).removeprefix("torch.")
        wanted = "set dtype to bfloat16 (--dtype bfloat16) or float32"
        return f"native CPU kernels do not support {found}; {wanted}"
    if spec is not None and (unserved := _unserved(spec, dtype)):
        return f"native CPU kernels need {unserved}"
    return library_obstacle()


def _unserved(spec: DecoderSpec, dtype: torch.dtype) -> str:
    """Return a requirement of the kernels that this decoder, with this dtype, does not meet; an empty string if it
    meets all requirements.
    """
    mlps = [layer.mlp for layer in spec.layers]
    for mixer in spec.attentions:
        key_dim, value_dim = mixer.cached_sizes
        if isinstance(mixer, LatentSpec) and (key_dim % 16 or mixer.value_dim % 16):
            expected = "latent attention with kv_lora_rank, qk_rope_head_dim and v_head_dim that are multiples of 16"
            return f"{expected} (got {mixer.latent_dim}, {mixer.rope_dim} and {mixer.value_dim})"
        if value_dim % 16 or value_dim > MOST_HEAD_DIM:
            return f"a head size that is a multiple of 16 up to {MOST_HEAD_DIM} (got {value_dim})"
    for size in [mlp.intermediate_size for mlp in mlps if isinstance(mlp, MlpSpec) and mlp.joined]:
        if size % 16:
            return f"an intermediate size that is a multiple of 16 (got {size}); use the backend 'reference'"
    sizes = ((experts.intermediate_size, experts.latent_size or spec.hidden_size) for experts in spec.experts)
    for size in chain(*sizes):
        if size % 16:
            expected = "experts of intermediate and hidden sizes that are multiples of 16"
            return f"{expected} (got {size}); use the backend 'reference'"
    for role, own in spec.own_dtypes(dtype).items():
        if role in (ROUTER_ROLE, CORRECTION_ROLE) and own == torch.float32:
            continue
        return f"all weights in {dtype} (got {role} in {own}); use the backend 'reference'"
    return ""
