"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts instead of an MLP in some or all layers. In Qwen2-MoE, each
layer with experts has a shared expert for all tokens.
"""

from __future__ import annotations

from typing import Any

from ..specs import DecoderSpec, LayerSpec, NormSpec
from .settings import expect, read_settings, softmax_router

_DEFAULTS: dict[str, Any] = dict(max_position_embeddings=32768)
_QWEN3: dict[str, Any] = _DEFAULTS | dict(num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
_QWEN2: dict[str, Any] = _DEFAULTS | dict(
    num_key_value_heads=16,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    qkv_bias=True,
)


def describe_qwen3_moe(raw: dict[str, Any], architecture: str, **experts: Any) -> DecoderSpec:
    """Return the decoder that config.json describes. `experts`: further fields of the experts' spec."""
    settings = read_settings(lambda given: _QWEN3 | given, raw)
    return _decoder(settings, architecture, experts, qk_norm=NormSpec(settings.rms_norm_eps))


def _qwen2_moe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    # transformers saves a sliding_window of 0 if use_sliding_window is false.
    settings = read_settings(lambda given: _QWEN2 | given | {"sliding_window": None}, raw)
    shared = {"shared_size": settings.shared_expert_intermediate_size}
    return _decoder(settings, architecture, shared, qkv_bias=bool(settings.qkv_bias))


def _decoder(settings: Any, architecture: str, experts: dict[str, Any], **attention: Any) -> DecoderSpec:
    expect(settings, hidden_act="silu", use_sliding_window=False)
    mixer, norm = settings.attention(**attention), NormSpec(settings.rms_norm_eps)
    layers = [LayerSpec(mixer, mlp, norm) for mlp in settings.mlps(router=softmax_router(settings), **experts)]
    return settings.decoder(architecture, layers, [settings.rotation()])


FAMILIES = {"Qwen2MoeForCausalLM": _qwen2_moe, "Qwen3MoeForCausalLM": describe_qwen3_moe}
