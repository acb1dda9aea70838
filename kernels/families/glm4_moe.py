"""GLM-4.5 and its relatives: experts with sigmoid scores and a correction bias, and a shared expert for all tokens.
GLM-4.5 and dots.llm1 begin with layers without experts. Solar Open has experts in all layers.

Files may end with layers for multi-token prediction, which are not served.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..specs import SHARED_EXPERTS_NAMES, DecoderSpec, LayerSpec, NormSpec
from .settings import expect, fill_layer_types, grouped_router, read_settings

_GLM: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_attention_heads=96,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    partial_rotary_factor=0.5,
)
_SOLAR: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    moe_intermediate_size=1280,
    n_routed_experts=128,
    norm_topk_prob=True,
    rope_theta=1e6,
)
_DOTS: dict[str, Any] = dict(
    max_position_embeddings=2048,
    num_attention_heads=32,
    num_key_value_heads=32,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    sliding_window=4096,
    max_window_layers=62,
)


def _describe(settings: Any, architecture: str, qk_norm: bool, windows: list[int | None]) -> DecoderSpec:
    biased = bool(settings.attention_bias)
    expect(settings, hidden_act="silu", attention_bias=settings.attention_bias)
    (rotation, rotated), norm = settings.partial_rotation(), NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qkv_bias=biased, qk_norm=norm if qk_norm else None, rotated=rotated)
    mlps = settings.mlps_beside_shared(grouped_router(settings, "sigmoid", wide=True, correction=True))
    mixers = [replace(mixer, window=window) for window in windows]
    layers = [LayerSpec(mixer, mlp, norm) for mixer, mlp in zip(mixers, mlps, strict=True)]
    others = (f"model.layers.{len(layers)}.",)
    return settings.decoder(architecture, layers, [rotation], names=SHARED_EXPERTS_NAMES, others=others)


def _glm4_moe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: _GLM | given, raw)
    return _describe(settings, architecture, settings.use_qk_norm, [None] * settings.num_hidden_layers)


def _solar_open(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    # Some files state an intermediate_size, but all layers have experts, so no layer has an MLP of this size.
    settings = read_settings(lambda given: _SOLAR | given | dict(intermediate_size=1, first_k_dense_replace=0), raw)
    return _describe(settings, architecture, False, [None] * settings.num_hidden_layers)


def _dots1_is_sliding(raw: dict[str, Any], i: int) -> bool:
    return raw["sliding_window"] is not None and i >= raw["max_window_layers"]


def _dots1(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    def fill(given: dict[str, Any]) -> dict[str, Any]:
        given = _DOTS | given
        return fill_layer_types(given, partial(_dots1_is_sliding, given))

    settings = read_settings(fill, raw)
    expect(settings)
    settings.rotation()  # transformers rotates whole heads, and ignores partial_rotary_factor
    return _describe(settings, architecture, True, settings.windows(settings.sliding_window))


FAMILIES = {"Glm4MoeForCausalLM": _glm4_moe, "SolarOpenForCausalLM": _solar_open, "Dots1ForCausalLM": _dots1}
