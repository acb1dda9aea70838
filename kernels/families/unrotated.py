"""SmolLM3 and EXAONE 4: some layers do not rotate q and k (Kazemnejad et al. 2023).

SmolLM3 is like Llama. EXAONE 4 has norms only after mixer and MLP, and norms of the heads of q and k. Three of every
four layers of EXAONE 4's larger models have a window, and only these layers rotate. In models without windows, all
layers rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from trueroll.errors import ModelError, brief

from ..specs import LAYER_NAMES, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from .settings import SLIDING, expect, fill_layer_types, read_settings, without_rotation

_SMOLLM3: dict[str, Any] = dict(
    max_position_embeddings=32768, num_key_value_heads=4, rope_theta=2_000_000.0, tie_word_embeddings=True
)
_EXAONE4: dict[str, Any] = dict(
    max_position_embeddings=2048, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096
)
_NAMES = LAYER_NAMES | {
    "mixer_norm.after": "post_attention_layernorm.weight",
    "mlp_norm.after": "post_feedforward_layernorm.weight",
}
_ROTATED, _UNROTATED = 0, 1


def _decoder(
    settings: Any, architecture: str, layer: LayerSpec, kinds: list[tuple[bool, int | None]], **names: Any
) -> DecoderSpec:
    """Return a decoder with one layer for each pair in `kinds`. A pair says whether the layer rotates, and gives the
    layer's window.
    """
    mixer = cast(AttentionSpec, layer.mixer)
    layers = [
        replace(layer, mixer=replace(mixer, rotation=_ROTATED if rotates else _UNROTATED, window=window))
        for rotates, window in kinds
    ]
    rotation = settings.rotation()
    return settings.decoder(architecture, layers, [rotation, without_rotation(rotation)], **names)


def _smollm3(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: _SMOLLM3 | given, raw)
    expect(settings, hidden_act="silu")
    count, interval, rotates = settings.num_hidden_layers, settings.no_rope_layer_interval, settings.no_rope_layers
    if rotates is None:
        rotates = [int((i + 1) % interval != 0) for i in range(count)]
    if len(rotates) != count:
        raise ModelError(
            f"no_rope_layers in config.json must have {count} numbers, one for each layer (got {brief(rotates)}); "
            "correct the file"
        )
    window = settings.sliding_window if settings.use_sliding_window else None
    windows = [None if one else window for one in rotates]
    if window is not None and settings.layer_types is not None:
        windows = settings.windows(window)
    norm = NormSpec(settings.rms_norm_eps)
    layer = LayerSpec(settings.attention(), MlpSpec(settings.intermediate_size), norm)
    return _decoder(settings, architecture, layer, [*zip(map(bool, rotates), windows, strict=True)])


def _fill_exaone4(raw: dict[str, Any]) -> dict[str, Any]:
    raw = _EXAONE4 | raw
    pattern = raw.pop("sliding_window_pattern", 4)  # may be a string such as LLLG, in files with layer_types
    has_window = raw["sliding_window"] is not None
    return fill_layer_types(raw, lambda i: has_window and (i + 1) % pattern != 0)


def _exaone4(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill_exaone4, raw)
    expect(settings, hidden_act="silu")
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qk_norm=norm)
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm, norm_before=False, norm_after=True)
    all_rotate = settings.sliding_window is None
    windows, types = settings.windows(settings.sliding_window), settings.types(SLIDING)
    kinds = [(all_rotate or kind == SLIDING, window) for kind, window in zip(types, windows, strict=True)]
    return _decoder(settings, architecture, layer, kinds, names=_NAMES)


FAMILIES = {"SmolLM3ForCausalLM": _smollm3, "Exaone4ForCausalLM": _exaone4}
