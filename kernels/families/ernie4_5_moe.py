"""ERNIE 4.5 with experts. The experts have softmax scores in float32 and a correction bias, and there is a shared
expert for all tokens. Some layers have an MLP instead of experts. Neighbouring elements of a head are rotated together.
"""

from __future__ import annotations

from typing import Any

import torch

from trueroll.errors import ModelError, brief

from ..specs import (
    CORRECTION_ROLE,
    ROUTER_ROLE,
    SHARED_EXPERTS_NAMES,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RouterSpec,
    WeightSpec,
)
from .settings import MOST_LAYERS, expect, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=131072,
    num_attention_heads=20,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_theta=5e5,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
_IN_FILES = {
    "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_k",
    "n_shared_experts": "moe_num_shared_experts",
    "decoder_sparse_step": "moe_layer_interval",
    "first_k_dense_replace": "moe_layer_start_index",
}
_NAMES = SHARED_EXPERTS_NAMES | {CORRECTION_ROLE: "mlp.gate.moe_statics.e_score_correction_bias"}
_RESPELLED = {".mlp.moe_statics.": ".mlp.gate.moe_statics."}
_BESIDE_TEXT = ("model.mtp_", "mtp.")


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    if raw.get("use_bias"):
        raise ModelError(f"use_bias in config.json must be False (got {brief(raw['use_bias'])}); serve another model")
    if type(last := raw.get("moe_layer_end_index", -1)) is not int:
        raise ModelError(f"moe_layer_end_index in config.json must be an integer (got {brief(last)}); correct the file")

    def fill(given: dict[str, Any]) -> dict[str, Any]:
        given = _DEFAULTS | given
        # `num_hidden_layers` has not been validated yet.
        count = min(given["num_hidden_layers"], MOST_LAYERS)
        return given | {"mlp_only_layers": [] if last == -1 else [*range(max(last + 1, 0), count)]}

    settings = read_settings(fill, raw, names=_IN_FILES)
    expect(settings, hidden_act="silu")
    norm = NormSpec(settings.rms_norm_eps)
    router = RouterSpec("softmax", wide=True, correction=True, normed=True, floor=settings.moe_norm_min)
    mixer = settings.attention(interleaved=True)
    layers = [LayerSpec(mixer, mlp, norm) for mlp in settings.mlps_beside_shared(router)]
    held = {
        ROUTER_ROLE: WeightSpec(torch.float32),
        CORRECTION_ROLE: WeightSpec(torch.float32, shape=(1, settings.num_experts)),
    }
    names: dict[str, Any] = dict(names=_NAMES, respelled=_RESPELLED, others=_BESIDE_TEXT)
    return settings.decoder(architecture, layers, [settings.rotation()], held=held, **names)


FAMILIES = {"Ernie4_5_MoeForCausalLM": _describe}
