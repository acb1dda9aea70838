"""Olmo 2, Olmo 3 and OLMoE: one norm over all heads of q, and one norm over all heads of k.

Olmo 2 and Olmo 3 have norms only after mixer and MLP. Three of every four layers of Olmo 3 have a window and use a
second rotation. OLMoE has norms before mixer and MLP, and experts in all layers.
"""

from __future__ import annotations

from typing import Any

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import FULL, SLIDING, expect, fill_layer_types, fill_rotations, read_settings, softmax_router

_DEFAULTS: dict[str, Any] = dict(max_position_embeddings=2048, rms_norm_eps=1e-5)
_OLMO3: dict[str, Any] = _DEFAULTS | dict(sliding_window=4096)
_OLMOE: dict[str, Any] = _DEFAULTS | dict(max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8)
_NAMES = LAYER_NAMES | {
    "mixer_norm.after": "post_attention_layernorm.weight",
    "mlp_norm.after": "post_feedforward_layernorm.weight",
}
_THETA = 500_000.0


def _layer(settings: Any, **attention: Any) -> LayerSpec:
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qk_norm=norm, qk_norm_over_heads=True, **attention)
    return LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm, norm_before=False, norm_after=True)


def _olmo2(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: _DEFAULTS | given, raw)
    expect(settings, hidden_act="silu")
    layers = [_layer(settings)] * settings.num_hidden_layers
    return settings.decoder(architecture, layers, [settings.rotation()], names=_NAMES)


def _fill_olmo3(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _OLMO3 | raw
    # As in transformers, the theta of an old file applies to full attention only.
    theta = {FULL: raw.pop("rope_theta", _THETA), SLIDING: _THETA}
    return fill_rotations(fill_layer_types(raw, lambda i: (i + 1) % 4 != 0), theta)


def _olmo3(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill_olmo3, raw)
    expect(settings, hidden_act="silu")
    full, sliding = _layer(settings), _layer(settings, rotation=1, window=settings.sliding_window)
    layers = [full if window is None else sliding for window in settings.windows(settings.sliding_window)]
    return settings.decoder(architecture, layers, [settings.rotation(FULL), settings.rotation(SLIDING)], names=_NAMES)


def _olmoe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    def fill(given: dict[str, Any]) -> dict[str, Any]:
        given = _OLMOE | given
        return given | {"moe_intermediate_size": given.get("intermediate_size")}

    settings = read_settings(fill, raw)
    expect(settings, hidden_act="silu", clip_qkv=None, sliding_window=None)
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qk_norm=norm, qk_norm_over_heads=True)
    layer = LayerSpec(mixer, settings.experts(router=softmax_router(settings)), norm)
    return settings.decoder(architecture, [layer] * settings.num_hidden_layers, [settings.rotation()])


FAMILIES = {"Olmo2ForCausalLM": _olmo2, "Olmo3ForCausalLM": _olmo3, "OlmoeForCausalLM": _olmoe}
