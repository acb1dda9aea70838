"""Gemma 2: Gemma 3 with one rotation, a window in every other layer, no norms of heads, and soft caps on the scores and
on the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..specs import DecoderSpec, HeadSpec, LayerSpec, MlpSpec, NormSpec
from .gemma3 import NAMES
from .settings import expect, fill_layer_types, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=8192,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    sliding_window=4096,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    return fill_layer_types(raw, lambda i: i % 2 == 0)


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    scores, logits = settings.attn_logit_softcapping, settings.final_logit_softcapping
    caps = dict(attn_logit_softcapping=scores, final_logit_softcapping=logits)
    expect(settings, hidden_activation="gelu_pytorch_tanh", **caps)
    norm, scale = NormSpec(settings.rms_norm_eps, zero_centered=True), settings.query_pre_attn_scalar**-0.5
    mixer = settings.attention(scale=scale, soft_cap=None if scores is None else float(scores))
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size, "gelu_tanh"), norm, norm_after=True)
    windows = settings.windows(settings.sliding_window)
    layers = [replace(layer, mixer=replace(mixer, window=window)) for window in windows]
    head = HeadSpec(soft_cap=None if logits is None else float(logits))
    others: dict[str, Any] = dict(
        embed_scale=settings.hidden_size**0.5, rounds_embed_scale=True, head=head, names=NAMES
    )
    return settings.decoder(architecture, layers, [settings.rotation()], **others)


FAMILIES = {"Gemma2ForCausalLM": _describe}
