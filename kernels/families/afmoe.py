"""AFMoE (Trinity): norms before and after mixer and MLP, an output gate with a matrix of its own, experts with sigmoid
scores and a correction bias, and a shared expert for all tokens. The first layers have no experts.

Three of every four layers have a window, and only these layers rotate q and k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..specs import SHARED_EXPERTS_NAMES, DecoderSpec, LayerSpec, NormSpec
from .settings import (
    expect,
    fill_layer_types,
    grouped_router,
    read_settings,
    without_rotation,
)

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=16384,
    num_attention_heads=16,
    head_dim=128,
    rms_norm_eps=1e-5,
    intermediate_size=6144,
    moe_intermediate_size=1408,
    num_experts=64,
    num_experts_per_tok=6,
    sliding_window=1024,
    full_attention_interval=4,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
_IN_FILES = {
    "first_k_dense_replace": "num_dense_layers",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "full_attention_interval": "global_attn_every_n_layers",
}
_NAMES = SHARED_EXPERTS_NAMES | {
    "mixer_norm.after": "post_attention_layernorm.weight",
    "mlp_norm.before": "pre_mlp_layernorm.weight",
    "mlp_norm.after": "post_mlp_layernorm.weight",
    "router": "mlp.router.gate.weight",
    "router_correction": "mlp.expert_bias",
}
_ROTATED, _UNROTATED = 0, 1


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    interval = raw["full_attention_interval"]
    return fill_layer_types(raw, lambda i: (i + 1) % interval != 0)


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw, names=_IN_FILES)
    expect(settings, hidden_act="silu")
    rotation, norm = settings.rotation(), NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qk_norm=norm, output_gate=True, gate_apart=True)
    mlps = settings.mlps_beside_shared(grouped_router(settings, "sigmoid", correction=True))
    windows = settings.windows(settings.sliding_window)
    mixers = [replace(mixer, window=window, rotation=_UNROTATED if window is None else _ROTATED) for window in windows]
    layers = [LayerSpec(mixer, mlp, norm, norm_after=True) for mixer, mlp in zip(mixers, mlps, strict=True)]
    scale = settings.hidden_size**0.5 if settings.mup_enabled else 1.0
    others: dict[str, Any] = dict(names=_NAMES, embed_scale=scale)
    return settings.decoder(architecture, layers, [rotation, without_rotation(rotation)], **others)


FAMILIES = {"AfmoeForCausalLM": _describe}
