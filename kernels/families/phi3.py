"""Phi-3 and Phi-4: Llama with one matrix for q, k and v, and one for gate and up. A part of each head may be rotated.

LongRoPE (Ding et al. 2024) has two sets of factors. transformers uses the long factors for all positions of a sequence
that is longer than `original_max_position_embeddings`, so the keys of earlier tokens would depend on later tokens. A
model with two different sets of factors is therefore served with the short factors, and only up to
`original_max_position_embeddings` tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import DecoderSpec, LayerSpec, MlpSpec, NormSpec, RotationSpec
from .settings import expect, original_length, read_settings

_DEFAULTS: dict[str, Any] = dict(max_position_embeddings=4096, rms_norm_eps=1e-5)
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su", "yarn")  # the names of LongRoPE in files of this family


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    rope = raw.pop("rope_scaling", None) or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _LONGROPE:
        rope |= {"rope_type": "longrope", _ORIGINAL: raw.get(_ORIGINAL, 4096)}  # as in transformers
    raw["rope_parameters"] = rope
    return raw


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    rope = settings.rope_parameters
    if (kind := rope["rope_type"]) not in ("default", "longrope"):
        raise ModelError(
            f"rope_type in config.json must be default or longrope (got {brief(kind)}); serve another model"
        )
    most = settings.max_position_embeddings if kind == "default" else original_length(rope)
    expect(settings, hidden_act="silu")
    (rotation, rotated), norm = settings.partial_rotation(also="longrope"), NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(joined=True, rotated=rotated, window=settings.sliding_window)
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size, joined=True), norm)
    spec = settings.decoder(architecture, [layer] * settings.num_hidden_layers, [rotation])
    if kind == "default" or _factors(rope, "short_factor", rotation) == _factors(rope, "long_factor", rotation):
        return spec
    return replace(spec, max_position_embeddings=min(spec.max_position_embeddings, most))


def _factors(rope: dict[str, Any], name: str, rotation: RotationSpec) -> Any:
    """Return a set of LongRoPE factors. Raise ModelError unless the set has one factor for each rotated pair."""
    factors, count = rope.get(name), len(rotation.inv_freq)
    if not isinstance(factors, list) or len(factors) != count:
        raise ModelError(f"{name} in config.json must have {count} numbers (got {brief(factors)}); correct the file")
    return factors


FAMILIES = {"Phi3ForCausalLM": _describe}
