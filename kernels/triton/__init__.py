"""Kernels for NVIDIA GPUs, written in Triton.

In products, the weights are on the M side of every matrix instruction, and the tokens are on the N side. An instruction
processes 16 columns of K, in ascending order. The size N of an instruction depends on the number of rows, but no bit of
a result depends on N. The size M of an instruction is constant on sm_80 and sm_90. On sm_100, M is 64 or 128, depending
on the tile, and no bit of a result is expected to depend on M. Attention uses one tile shape for any number of rows.
The recurrence of a delta net also uses one tile shape, and processes tokens one by one. The GPU, not the host, lists
the rows of each expert. The products of experts follow the same rules as all other products.

`launch` pins the compiler settings that change bits. `weights` turns tiles of quantized weights into values, with which
the kernels compute as with plain weights. `products`, `experts`, `attention`, `recurrence`, `rows` and `head` hold the
kernels. Each module with kernels has its own table of tiles. `backend` builds the ops from the kernels. Without a GPU,
kernels run in Triton's interpreter, for tests.
"""

from __future__ import annotations

import os

import torch

from ..specs import (
    CORRECTION_ROLE,
    ROUTER_ROLE,
    CachedSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentSpec,
    MlpSpec,
    RecurrentSpec,
)

MOST_HEAD_DIM = 256
MOST_LATENT, MOST_ROPE = 512, 64  # for latent attention: a program holds whole keys and sums of latent rows
MOST_KEY_HEAD_DIM = 256  # for a recurrence: a program holds whole columns of its state
MOST_KERNEL_SIZE = 17  # for a recurrent layer's convolution: one program reads all of the old tail
MOST_GROUP = 64  # heads that share a key-value head; these heads are the rows of one tile
MOST_EXPERTS = 1024  # one program reads all scores of a row
LEAST_CAPABILITY = (8, 0)
LATENT_CAPABILITIES = (9, 10)  # major versions with enough shared memory (200 KiB) for keys of latent attention


def obstacle(device: torch.device, dtype: torch.dtype, spec: DecoderSpec | None) -> str:
    """Return why these kernels cannot serve a decoder on this device with this dtype, or an empty text if they can.

    `spec`: None to check the ops alone.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        found = str(dtype).removeprefix("torch.")
        return f"Triton kernels do not support {found}; set dtype to bfloat16 (--dtype bfloat16)"
    if spec is not None and (unserved := _unserved(spec, dtype)):
        return f"Triton kernels need {unserved}; use the backend 'reference'"
    if device.type == "cpu":
        return "" if is_interpreted() else "Triton kernels need an NVIDIA GPU (got a CPU); set device to cuda"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"Triton kernels need an NVIDIA GPU (got {device}); use the backend 'reference'"
    if is_interpreted():
        return f"interpreted Triton kernels need a CPU (got {device}); unset TRITON_INTERPRET"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"Triton kernels need compute capability {least} or later (got {found}); use the backend 'reference'"
    is_latent = spec is not None and any(isinstance(mixer, LatentSpec) for mixer in spec.attentions)
    if is_latent and capability[0] not in LATENT_CAPABILITIES:
        wanted, found = " or ".join(f"{major}.x" for major in LATENT_CAPABILITIES), ".".join(map(str, capability))
        return f"Triton kernels need compute capability {wanted} for latent attention (got {found}); use 'reference'"
    return ""


def _unserved(spec: DecoderSpec, dtype: torch.dtype) -> str:
    """Return a requirement that this decoder does not meet in this dtype. Return an empty text if the kernels can serve
    the decoder.
    """
    if spec.quantizes_activations:
        return f"a quantization with plain activations (got {spec.quantization})"
    for layer in spec.layers:
        mixers = map(_unserved_mixer, (layer.mixer, layer.recurrent_mixer))
        if unserved := next(filter(None, mixers), "") or _unserved_mlp(layer.mlp):
            return unserved
    for role, own in spec.own_dtypes(dtype).items():
        if role in (ROUTER_ROLE, CORRECTION_ROLE) and own == torch.float32:
            continue
        return f"all weights in {dtype} (got {role} in {own})"
    return ""


def _unserved_mixer(mixer: CachedSpec | RecurrentSpec | None) -> str:
    """`_unserved` for a mixer."""
    if mixer is None:
        return ""
    if isinstance(mixer, LatentSpec):
        if mixer.latent_dim % 8 or mixer.rope_dim % 8 or mixer.latent_dim > MOST_LATENT or mixer.rope_dim > MOST_ROPE:
            expected = f"kv_lora_rank up to {MOST_LATENT} and qk_rope_head_dim up to {MOST_ROPE}, both multiples of 8"
            return f"{expected} (got {mixer.latent_dim} and {mixer.rope_dim})"
        return ""
    if isinstance(mixer, RecurrentSpec):
        _, keys, _ = mixer.state_shape
        if keys > MOST_KEY_HEAD_DIM:
            is_delta_net = isinstance(mixer, DeltaNetSpec)
            what = "keys of a gated delta net" if is_delta_net else "vectors B and C of a state space"
            return f"{what} with up to {MOST_KEY_HEAD_DIM} elements (got {keys})"
        if mixer.kernel_size > MOST_KERNEL_SIZE:
            return f"a convolution of up to {MOST_KERNEL_SIZE} tokens (got {mixer.kernel_size})"
        return ""
    if mixer.head_dim % 2 or mixer.head_dim > MOST_HEAD_DIM:
        return f"an even head size up to {MOST_HEAD_DIM} (got {mixer.head_dim})"
    if (group := mixer.num_heads // mixer.num_kv_heads) > MOST_GROUP:
        return f"at most {MOST_GROUP} heads for each key-value head (got {group})"
    return ""


def _unserved_mlp(mlp: MlpSpec | ExpertsSpec | None) -> str:
    """Like `_unserved`, but for an MLP or experts."""
    if isinstance(mlp, ExpertsSpec) and mlp.num_experts > MOST_EXPERTS:
        return f"at most {MOST_EXPERTS} experts (got {mlp.num_experts})"
    if isinstance(mlp, ExpertsSpec) and not mlp.gated:
        return "experts with gates (got experts without)"
    return ""


def is_interpreted() -> bool:
    """Return whether kernels of this process run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
