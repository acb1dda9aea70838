"""gpt-oss: attention with sinks and biases, a window in every other layer, and experts with a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, NormSpec
from .settings import expect, fill_layer_types, read_settings

_CLAMPED: dict[str, Any] = dict(swiglu_alpha=1.702, swiglu_limit=7.0)  # the constants of `clamped_silu`
_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    sliding_window=128,
    num_local_experts=128,
    num_experts_per_tok=4,
    attention_bias=True,
    **_CLAMPED,
)
_ROPE: dict[str, Any] = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)
_NAMES = {role: name for role, name in LAYER_NAMES.items() if not role.startswith("expert.")}
_NAMES |= {"router": "mlp.router.weight", "router_bias": "mlp.router.bias"}


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    if raw.get("rope_parameters") is None:
        raw["rope_parameters"] = dict(_ROPE)
    raw["moe_intermediate_size"] = raw["intermediate_size"]
    return fill_layer_types(raw, lambda i: i % 2 == 0)


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw, quantized=["mxfp4"])
    bias = bool(settings.attention_bias)
    expect(settings, hidden_act="silu", attention_bias=settings.attention_bias, **_CLAMPED)
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qkv_bias=bias, o_bias=bias, sinks=True)
    experts = settings.experts(activation="clamped_silu", bias=True, transposed=True)
    windows = settings.windows(settings.sliding_window)
    layers = [LayerSpec(replace(mixer, window=window), experts, norm) for window in windows]
    return settings.decoder(architecture, layers, [settings.rotation()], names=_NAMES)


FAMILIES = {"GptOssForCausalLM": _describe}
