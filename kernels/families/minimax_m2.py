"""MiniMax-M2: experts with sigmoid scores and a correction bias in all layers, norms of q and k that cover all heads at
once, and a rotation of a part of each head.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, NormSpec, RouterSpec
from .mixtral import RESPELLED
from .settings import expect, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=196608,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=1536,
    num_local_experts=256,
    rope_theta=5e6,
)
_NAMES = LAYER_NAMES | {"router_correction": "mlp.e_score_correction_bias"}


def _fill(raw: dict[str, Any], rotary_dim: int | None) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    if rotary_dim is not None:
        raw.setdefault("partial_rotary_factor", rotary_dim / raw["head_dim"])
    raw.pop("shared_intermediate_size", None)  # 0 in files, since there is no shared expert
    return raw | {"moe_intermediate_size": raw["intermediate_size"]}


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    if type(rotary_dim := raw.get("rotary_dim")) not in (int, type(None)):
        raise ModelError(f"rotary_dim in config.json must be an integer (got {brief(rotary_dim)}); correct the file")
    settings = read_settings(lambda given: _fill(given, rotary_dim), raw)
    expect(settings, hidden_act="silu", router_jitter_noise=0.0)
    (rotation, rotated), norm = settings.partial_rotation(), NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qk_norm=norm, qk_norm_over_heads=True, rotated=rotated)
    experts = settings.experts(router=RouterSpec("sigmoid", correction=True, normed=True))
    layers = [LayerSpec(mixer, experts, norm)] * settings.num_hidden_layers
    return settings.decoder(architecture, layers, [rotation], names=_NAMES, respelled=RESPELLED)


FAMILIES = {"MiniMaxM2ForCausalLM": _describe}
