"""Granite: Llama with multipliers of the embeddings, of the scores, of the outputs that are added to the hidden states,
and of the logits.
"""

from __future__ import annotations

from typing import Any

from ..specs import DecoderSpec, HeadSpec, LayerSpec, MlpSpec, NormSpec
from .settings import expect, read_settings


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: dict(max_position_embeddings=2048) | given, raw)
    attention_bias, mlp_bias = bool(settings.attention_bias), bool(settings.mlp_bias)
    expect(settings, hidden_act="silu", attention_bias=attention_bias, mlp_bias=mlp_bias)
    norm, mlp = NormSpec(settings.rms_norm_eps), MlpSpec(settings.intermediate_size, bias=mlp_bias)
    scale = float(settings.attention_multiplier)
    mixer = settings.attention(scale=scale, qkv_bias=attention_bias, o_bias=attention_bias)
    layer = LayerSpec(mixer, mlp, norm, residual_scale=float(settings.residual_multiplier))
    return settings.decoder(
        architecture,
        [layer] * settings.num_hidden_layers,
        [settings.rotation()],
        embed_scale=float(settings.embedding_multiplier),
        head=HeadSpec(1.0 / settings.logits_scaling),
    )


FAMILIES = {"GraniteForCausalLM": _describe}
