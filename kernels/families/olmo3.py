"""Olmo 3: norms only after mixer and MLP, one norm over all heads of q, and one norm over all heads of k. Three of
every four layers have a window and use a second rotation.
"""

from __future__ import annotations

from typing import Any

from ..specs import LAYER_NAMES, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import FULL, SLIDING, expect, fill_layer_types, fill_rotations, read_settings

_DEFAULTS = dict(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
_NAMES = LAYER_NAMES | {
    "mixer_norm.after": "post_attention_layernorm.weight",
    "mlp_norm.after": "post_feedforward_layernorm.weight",
}
_THETA = 500_000.0


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _DEFAULTS | raw
    # As in transformers, the theta of an old file applies to full attention only.
    theta = {FULL: raw.pop("rope_theta", _THETA), SLIDING: _THETA}
    return fill_rotations(fill_layer_types(raw, lambda i: (i + 1) % 4 != 0), theta)


def _describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, raw)
    expect(settings, hidden_act="silu")
    norm = NormSpec(settings.rms_norm_eps)

    def layer(rotation: int, window: int | None) -> LayerSpec:
        mixer = settings.attention(rotation=rotation, window=window, qk_norm=norm, qk_norm_over_heads=True)
        return LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm, norm_before=False, norm_after=True)

    full, sliding = layer(0, None), layer(1, settings.sliding_window)
    layers = [full if window is None else sliding for window in settings.windows(settings.sliding_window)]
    return settings.decoder(architecture, layers, [settings.rotation(FULL), settings.rotation(SLIDING)], names=_NAMES)


FAMILIES = {"Olmo3ForCausalLM": _describe}
