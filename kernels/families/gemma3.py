"""Gemma 3: norms before and after both mixer and MLP, per-head norms of q and k, a tanh-GELU gate, and scaled
embeddings. The norms before and after mixer and MLP multiply by 1 + w.

Five of every six layers have a window and use a second rotation. The larger models have a vision tower; the tokens of
an image see all tokens of the image.
"""

from __future__ import annotations

from typing import Any

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import FULL, SLIDING, expect, fill_layer_types, fill_rotations, read_settings
from .towers import RENAMED_OLDER, siglip_tower, wrapped

_DEFAULTS = dict(
    max_position_embeddings=131072,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    sliding_window=4096,
    sliding_window_pattern=6,
)
NAMES = LAYER_NAMES | {
    "mixer_norm.after": "post_attention_layernorm.weight",
    "mlp_norm.before": "pre_feedforward_layernorm.weight",
    "mlp_norm.after": "post_feedforward_layernorm.weight",
}


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    theta = {FULL: raw.pop("rope_theta", 1_000_000.0), SLIDING: raw.pop("rope_local_base_freq", 10_000.0)}
    pattern = raw["sliding_window_pattern"]
    return fill_rotations(fill_layer_types(raw, lambda i: (i + 1) % pattern != 0), theta)


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    expect(settings, hidden_activation="gelu_pytorch_tanh")
    norm = NormSpec(settings.rms_norm_eps, zero_centered=True)

    def layer(rotation: int, window: int | None) -> LayerSpec:
        scale = settings.query_pre_attn_scalar**-0.5
        mixer = settings.attention(scale=scale, rotation=rotation, window=window, qk_norm=norm)
        mlp = MlpSpec(settings.intermediate_size, "gelu_tanh")
        return LayerSpec(mixer, mlp, norm, norm_before=True, norm_after=True)

    full, sliding = layer(0, None), layer(1, settings.sliding_window)
    layers = [full if window is None else sliding for window in settings.windows(settings.sliding_window)]
    rotations = [settings.rotation(FULL), settings.rotation(SLIDING)]
    scale: dict[str, Any] = dict(embed_scale=settings.hidden_size**0.5, rounds_embed_scale=True)
    return settings.decoder(architecture, layers, rotations, **scale, names=NAMES)


# The settings that files of the larger models leave to the defaults.
_WITH_TOWER = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4)


def _describe_text(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    return _describe(_WITH_TOWER | raw, architecture)


FAMILIES = {
    "Gemma3ForCausalLM": _describe,
    "Gemma3ForConditionalGeneration": wrapped(_describe_text, siglip_tower, RENAMED_OLDER, is_tied=True),
}
