"""Qwen3-Next and Qwen3.5, text: of four layers three have a gated delta net, the fourth attention with an output gate,
of whose heads a part is rotated. Norms are of 1 + w, but for that of a delta net's output.

Of a Qwen3.5 checkpoint that has more the text is described. Layers of experts are refused.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import DecoderSpec, DeltaNetSpec, LayerSpec, MlpSpec, NormSpec
from .settings import FULL, LINEAR, expect, fill_layer_types, read_settings

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=32768,
    num_attention_heads=16,
    head_dim=256,
    partial_rotary_factor=0.25,
    full_attention_interval=4,
)
_QWEN3_NEXT: dict[str, Any] = _DEFAULTS | dict(num_key_value_heads=2)
_QWEN3_5: dict[str, Any] = _DEFAULTS | dict(num_key_value_heads=4)
# A checkpoint of text, image and video; and what transformers makes of one that it loaded as a decoder.
_OF_TEXT = {"model.language_model.": "model."}
_BESIDE_TEXT = ("model.visual.", "mtp.")


def _describe(settings: Any, architecture: str, joined: bool, **names: Any) -> DecoderSpec:
    part = settings.rope_parameters.get("partial_rotary_factor", 1.0)
    expect(settings, hidden_act="silu", partial_rotary_factor=part)
    rotation, norm = settings.rotation(), NormSpec(settings.rms_norm_eps, zero_centered=True)
    rotated = 2 * len(rotation.inv_freq)
    if not 0 < rotated <= settings.head_dim:
        raise ModelError(
            f"expected a partial_rotary_factor that turns at least 2 of {settings.head_dim} elements and no more than "
            f"all, found {brief(part)}; correct config.json"
        )
    whole = rotated == settings.head_dim
    attention = settings.attention(qk_norm=norm, output_gate=True, rotated=None if whole else rotated)
    delta_net, mlp = _delta_net(settings, joined), MlpSpec(settings.intermediate_size)
    types = settings.types(LINEAR)
    if FULL not in types:
        raise ModelError(
            f"expected at least one {FULL} layer in config.json, found {brief(types)}; serve another model"
        )
    layers = [LayerSpec(delta_net if kind == LINEAR else attention, mlp, norm) for kind in types]
    return settings.decoder(architecture, layers, [rotation], **names)


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    interval = raw["full_attention_interval"]
    return fill_layer_types(raw, lambda i: (i + 1) % interval != 0, LINEAR)


def _delta_net(settings: Any, joined: bool) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_key_heads=settings.linear_num_key_heads,
        num_value_heads=settings.linear_num_value_heads,
        key_head_dim=settings.linear_key_head_dim,
        value_head_dim=settings.linear_value_head_dim,
        kernel_size=settings.linear_conv_kernel_dim,
        norm=NormSpec(settings.rms_norm_eps),
        joined=joined,
    )


def _qwen3_next(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, _QWEN3_NEXT | {"num_experts": 512} | raw)
    if with_experts := _layers_with_experts(settings):
        raise ModelError(
            f"expected all of {settings.num_hidden_layers} layers in mlp_only_layers of config.json, or num_experts = "
            f"0, found experts in layers {brief(with_experts)}; serve a model without experts"
        )
    return _describe(settings, architecture, joined=True, others=("mtp.",))


def _layers_with_experts(settings: Any) -> list[int]:
    dense, step = settings.mlp_only_layers or [], settings.decoder_sparse_step
    count = settings.num_hidden_layers if settings.num_experts > 0 else 0
    return [i for i in range(count) if i not in dense and (i + 1) % step == 0]


def _qwen3_5(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, _QWEN3_5 | raw)
    return _describe(settings, architecture, joined=False, renamed=_OF_TEXT, others=_BESIDE_TEXT)


def _qwen3_5_with_more(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"expected text_config in config.json to be a map, found {brief(text)}; correct the file")
    outer = {key: raw[key] for key in ("dtype", "torch_dtype") if key in raw}
    return _qwen3_5(outer | text | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}, architecture)


FAMILIES = {
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_with_more,
}
