"""Llama and related families: norms before mixer and MLP, a SiLU gate, and one rotation.

Mistral's layers have a window; Ministral's and Qwen's layers may have one. Qwen2 has biases of q, k and v; Qwen3 has
norms of the heads of q and k. Llama may have biases of q, k, v and o, and of the MLP. Seed-OSS may have biases of q, k
and v, and a bias of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..specs import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from . import Describe
from .settings import expect, fill_layer_types, read_settings


def _family(
    windows: Callable[[Any], list[int | None]],
    is_sliding: Callable[[dict[str, Any], int], bool] | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    any_bias: bool = False,
    **defaults: Any,
) -> Describe:
    """Return the `Describe` function of a family.

    `windows(settings)`: the window of each layer. `is_sliding(raw, i)`: whether layer i has a window, for a file
    without `layer_types`. `any_bias`: whether `attention_bias` and `mlp_bias` are supported. `defaults`: the values
    that transformers uses for settings that a file omits.
    """

    def fill(raw: dict[str, Any]) -> dict[str, Any]:
        raw = defaults | raw
        return fill_layer_types(raw, partial(is_sliding, raw)) if is_sliding else raw

    def describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
        settings = read_settings(fill, raw)
        attention_bias, mlp_bias = (any_bias and bool(b) for b in (settings.attention_bias, settings.mlp_bias))
        expect(settings, hidden_act="silu", attention_bias=attention_bias, mlp_bias=mlp_bias)
        norm = NormSpec(settings.rms_norm_eps)
        biases = dict(qkv_bias=qkv_bias or attention_bias, o_bias=attention_bias)
        mixer = settings.attention(**biases, qk_norm=norm if qk_norm else None)
        layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size, bias=mlp_bias), norm)
        layers = [replace(layer, mixer=replace(mixer, window=window)) for window in windows(settings)]
        return settings.decoder(architecture, layers, [settings.rotation()])

    return describe


def _qwen_is_sliding(raw: dict[str, Any], i: int) -> bool:
    has_window = raw.get("use_sliding_window") and raw["sliding_window"] is not None
    return bool(has_window) and i >= raw["max_window_layers"]


def _qwen_windows(settings: Any) -> list[int | None]:
    return settings.windows(settings.sliding_window if settings.use_sliding_window else None)


_SEED_OSS: dict[str, Any] = dict(
    max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True
)


def _seed_oss(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(lambda given: _SEED_OSS | given, raw)
    expect(settings, hidden_act="silu", attention_bias=settings.attention_bias)
    norm = NormSpec(settings.rms_norm_eps)
    mixer = settings.attention(qkv_bias=bool(settings.attention_bias), o_bias=bool(settings.attention_out_bias))
    layer = LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm)
    return settings.decoder(architecture, [layer] * settings.num_hidden_layers, [settings.rotation()])


_MISTRAL: dict[str, Any] = dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
_QWEN: dict[str, Any] = dict(
    max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, max_window_layers=28
)
FAMILIES = {
    "LlamaForCausalLM": _family(
        lambda settings: [None] * settings.num_hidden_layers, any_bias=True, max_position_embeddings=2048
    ),
    "MistralForCausalLM": _family(lambda settings: [settings.sliding_window] * settings.num_hidden_layers, **_MISTRAL),
    "MinistralForCausalLM": _family(
        lambda settings: settings.windows(settings.sliding_window),
        lambda raw, i: raw["sliding_window"] is not None,
        **_MISTRAL,
    ),
    "Qwen2ForCausalLM": _family(_qwen_windows, _qwen_is_sliding, qkv_bias=True, **_QWEN),
    "Qwen3ForCausalLM": _family(_qwen_windows, _qwen_is_sliding, qk_norm=True, head_dim=128, **_QWEN),
    "SeedOssForCausalLM": _seed_oss,
}
