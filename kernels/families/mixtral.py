"""Mixtral: Mistral with experts in all layers. The weights of a token's experts are a softmax over the chosen
experts.
"""

from __future__ import annotations

from typing import Any

from ..specs import DecoderSpec, LayerSpec, NormSpec, RouterSpec
from .settings import expect, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
RESPELLED = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    return raw | {"moe_intermediate_size": raw.get("intermediate_size")}


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    expect(settings, hidden_act="silu")
    mixer, experts = settings.attention(window=settings.sliding_window), settings.experts(router=RouterSpec())
    layer = LayerSpec(mixer, experts, NormSpec(settings.rms_norm_eps))
    layers = [layer] * settings.num_hidden_layers
    return settings.decoder(architecture, layers, [settings.rotation()], respelled=RESPELLED)


FAMILIES = {"MixtralForCausalLM": _describe}
