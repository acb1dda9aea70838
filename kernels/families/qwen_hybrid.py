"""Qwen3-Next and Qwen3.5.

Three of every four layers have a gated delta net. Every fourth layer has attention with an output gate, and rotates
only a part of each head. Norms multiply by 1 + w, except the norm of a delta net's output.

Qwen3-Next has experts in some or all layers, and Qwen3.5-MoE has experts in all layers. Each layer with experts has a
shared expert for all tokens. A Qwen3.5 checkpoint may have a vision tower.

The spec includes the model's module for multi-token prediction (MTP), if this module has one layer. The MTP module's
layer has attention, and the same MLP or experts as the decoder's last layer.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import MTP_PREFIX, DecoderSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from .settings import FULL, LINEAR, expect, fill_layer_types, read_settings, softmax_router
from .towers import RENAMED_TEXT, qwen3_5_tower, wrapped

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=32768,
    num_attention_heads=16,
    head_dim=256,
    partial_rotary_factor=0.25,
    full_attention_interval=4,
)
_SHARED: dict[str, Any] = dict(moe_intermediate_size=512, shared_expert_intermediate_size=512)
_QWEN3_NEXT: dict[str, Any] = _DEFAULTS | _SHARED | dict(num_key_value_heads=2, num_experts=512, num_experts_per_tok=10)
_QWEN3_NEXT |= dict(intermediate_size=5632, norm_topk_prob=True)
_QWEN3_5: dict[str, Any] = _DEFAULTS | dict(num_key_value_heads=4)
_QWEN3_5_MOE: dict[str, Any] = _DEFAULTS | _SHARED | dict(num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
_BESIDE_TEXT = (MTP_PREFIX,)
_NUM_MTP_LAYERS = "mtp_num_hidden_layers"


def _describe(
    settings: Any, architecture: str, mlps: list[MlpSpec | ExpertsSpec], joined: bool, num_mtp_layers: Any, **names: Any
) -> DecoderSpec:
    expect(settings, hidden_act="silu")
    (rotation, rotated), norm = settings.partial_rotation(), NormSpec(settings.rms_norm_eps, zero_centered=True)
    attention = settings.attention(qk_norm=norm, output_gate=True, rotated=rotated)
    delta_net, types = _delta_net(settings, joined), settings.types(LINEAR)
    if FULL not in types:
        raise ModelError(f"config.json must have at least one {FULL} layer (got {brief(types)}); serve another model")
    mixers = [delta_net if kind == LINEAR else attention for kind in types]
    layers = [LayerSpec(mixer, mlp, norm) for mixer, mlp in zip(mixers, mlps, strict=True)]
    mtp = LayerSpec(attention, mlps[-1], norm) if num_mtp_layers == 1 else None
    return settings.decoder(architecture, layers, [rotation], mtp=mtp, **names)


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
    settings = read_settings(_fill, _QWEN3_NEXT | raw)
    mlps = settings.mlps(router=softmax_router(settings), shared_size=settings.shared_expert_intermediate_size)
    num_mtp_layers = raw.get(_NUM_MTP_LAYERS, 1)  # config.json does not state the number
    return _describe(settings, architecture, mlps, joined=True, num_mtp_layers=num_mtp_layers, others=(MTP_PREFIX,))


def _qwen3_5(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, _QWEN3_5 | raw)
    mlps: list[Any] = [MlpSpec(settings.intermediate_size)] * settings.num_hidden_layers
    names: dict[str, Any] = dict(renamed=RENAMED_TEXT, others=_BESIDE_TEXT, num_mtp_layers=raw.get(_NUM_MTP_LAYERS))
    return _describe(settings, architecture, mlps, joined=False, **names)


def _qwen3_5_moe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    # The files have no intermediate_size, since all layers have experts. There is no norm_topk_prob: the
    # weights of a token's experts are always normalized.
    settings = read_settings(_fill, _QWEN3_5_MOE | raw | {"intermediate_size": 1})
    experts = settings.experts(shared_size=settings.shared_expert_intermediate_size)
    mlps = [experts] * settings.num_hidden_layers
    names: dict[str, Any] = dict(renamed=RENAMED_TEXT, others=_BESIDE_TEXT, num_mtp_layers=raw.get(_NUM_MTP_LAYERS))
    return _describe(settings, architecture, mlps, joined=False, **names)


FAMILIES = {
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5ForConditionalGeneration": wrapped(_qwen3_5, qwen3_5_tower, RENAMED_TEXT),
    "Qwen3_5MoeForConditionalGeneration": wrapped(_qwen3_5_moe, qwen3_5_tower, RENAMED_TEXT),
}
