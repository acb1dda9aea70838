"""GLM-4: norms before and after both mixer and MLP, biases of q, k and v, and one matrix for gate and up. Neighbouring
elements are rotated together, in the first half of each head.
"""

from __future__ import annotations

from typing import Any

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import expect, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-7,
    attention_bias=True,
    partial_rotary_factor=0.5,
)
_NAMES = LAYER_NAMES | {
    "mixer_norm.after": "post_self_attn_layernorm.weight",
    "mlp_norm.before": "post_attention_layernorm.weight",
    "mlp_norm.after": "post_mlp_layernorm.weight",
}


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: _DEFAULTS | given, raw)
    has_bias = bool(settings.attention_bias)
    expect(settings, hidden_act="silu", attention_bias=has_bias)
    (rotation, rotated), norm = settings.partial_rotation(), NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qkv_bias=has_bias, rotated=rotated, interleaved=True)
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size, joined=True), norm, norm_after=True)
    return settings.decoder(architecture, [layer] * settings.num_hidden_layers, [rotation], names=_NAMES)


FAMILIES = {"Glm4ForCausalLM": _describe}
