"""Qwen3-MoE: Qwen3 with experts instead of an MLP in some or all layers."""

from __future__ import annotations

from typing import Any

from ..specs import DecoderSpec, LayerSpec, NormSpec
from .settings import expect, read_settings, softmax_router

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8
)


def describe_qwen3_moe(raw: dict[str, Any], architecture: str, **experts: Any) -> DecoderSpec:
    """Return the decoder that config.json describes. `experts`: further fields of the experts' spec."""
    settings = read_settings(lambda given: _DEFAULTS | given, raw)
    expect(settings, hidden_act="silu", use_sliding_window=False)
    norm = NormSpec(settings.rms_norm_eps)
    mixer, mlps = settings.attention(qk_norm=norm), settings.mlps(router=softmax_router(settings), **experts)
    layers = [LayerSpec(mixer, mlp, norm) for mlp in mlps]
    return settings.decoder(architecture, layers, [settings.rotation()])


FAMILIES = {"Qwen3MoeForCausalLM": describe_qwen3_moe}
