"""Ministral 3: Mistral with YaRN by default. Queries are multiplied by a factor that grows with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import expect, original_length, read_settings

_DEFAULTS: dict[str, Any] = dict(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
ROPE: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale_all_dim=1.0,
    mscale=1.0,
    llama_4_scaling_beta=0.1,
)
_MOST_BETA = 2.0**10


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw["rope_parameters"] = dict(ROPE)
    return raw


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    expect(settings, hidden_act="silu")
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(window=settings.sliding_window)
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm)
    rotation = replace(settings.rotation(), q_growth=q_growth(settings.rope_parameters))
    return settings.decoder(architecture, [layer] * settings.num_hidden_layers, [rotation])


def q_growth(parameters: dict[str, Any]) -> tuple[float, int]:
    """Return `RotationSpec.q_growth` for `rope_parameters`. Raise ModelError if a parameter is missing or out of
    range.
    """
    beta = parameters.get("llama_4_scaling_beta")
    if not isinstance(beta, int | float) or not 0.0 <= beta <= _MOST_BETA:
        raise ModelError(
            f"llama_4_scaling_beta in config.json must be a number from 0 to {_MOST_BETA} (got {brief(beta)}); correct "
            "the file"
        )
    return float(beta), original_length(parameters)


FAMILIES = {"Ministral3ForCausalLM": _describe}
