"""DeepSeek V2 and V3 and their relatives (Moonlight, Kimi K2, GLM-4.7-Flash, Mistral 4, the text decoder of Kimi K2.5):
latent attention, experts, and a shared expert for all tokens.

Files may end with layers for multi-token prediction, which are not served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import SHARED_EXPERTS_NAMES, DecoderSpec, LayerSpec, NormSpec, RouterSpec
from . import Describe
from .ministral3 import ROPE, q_growth
from .settings import expect, grouped_router, read_settings
from .towers import RENAMED_OLDER, wrapped_text

_V2: dict[str, Any] = dict(
    max_position_embeddings=2048,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    q_lora_rank=1536,
    n_routed_experts=64,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    topk_method="greedy",
)
_UNUSED_IN_V2 = dict(rope_interleave=True, norm_topk_prob=False)
"""The values that transformers uses for V2, whatever a file states."""
_V3: dict[str, Any] = dict(
    max_position_embeddings=4096,
    num_attention_heads=128,
    q_lora_rank=1536,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    first_k_dense_replace=3,
)
_GLM: dict[str, Any] = dict(
    max_position_embeddings=202752,
    num_attention_heads=20,
    rms_norm_eps=1e-5,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    moe_intermediate_size=1536,
    num_experts_per_tok=4,
    routed_scaling_factor=1.8,
    norm_topk_prob=True,
)
_MISTRAL: dict[str, Any] = dict(
    max_position_embeddings=1048576,
    num_attention_heads=32,
    kv_lora_rank=256,
    q_lora_rank=1024,
    qk_nope_head_dim=64,
    n_routed_experts=128,
    moe_intermediate_size=2048,
    num_experts_per_tok=4,
    norm_topk_prob=True,
)
_NULLS = ("q_lora_rank", "norm_topk_prob", "rope_interleave")
_MISTRAL_ROPE: dict[str, Any] = ROPE | dict(rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192)


def _family(
    router: Callable[[Any], RouterSpec], grows: bool = False, fixed: dict[str, Any] | None = None, **defaults: Any
) -> Describe:
    """Return the `Describe` function of a family. `grows`: whether queries are multiplied by a factor that grows
    with their position (`RotationSpec.q_growth`). `fixed`: the
    values of settings that the family does not read from a file. `defaults`: the values that transformers uses for
    settings that a file omits.
    """

    def fill(raw: dict[str, Any]) -> dict[str, Any]:
        # Files of V2 may have null for settings that they do not use. For the settings in `_NULLS`, null does not mean
        # the default.
        given = {key: value for key, value in raw.items() if value is not None or key in _NULLS}
        raw = defaults | given | (fixed or {})
        raw["head_dim"] = raw.get("qk_rope_head_dim", 64)  # the part of a head that is rotated
        return raw

    def describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
        settings = read_settings(fill, raw)
        heads = settings.num_attention_heads
        expect(settings, hidden_act="silu", attention_bias=settings.attention_bias, num_key_value_heads=heads)
        norm, mixer = NormSpec(settings.rms_norm_eps), settings.latent_attention(interleaved=settings.rope_interleave)
        layers = [LayerSpec(mixer, mlp, norm) for mlp in settings.mlps_beside_shared(router(settings))]
        growth = q_growth(settings.rope_parameters) if grows else None
        rotations = [replace(settings.rotation(), q_growth=growth)]
        others = (f"model.layers.{len(layers)}.",)
        return settings.decoder(architecture, layers, rotations, names=SHARED_EXPERTS_NAMES, others=others)

    return describe


def _sigmoid_router(settings: Any) -> RouterSpec:
    return grouped_router(settings, "sigmoid", wide=True, correction=True)


def _softmax_router(settings: Any) -> RouterSpec:
    """Return the router of V2, which ranks a group by its best expert."""
    router = grouped_router(settings, "softmax", wide=True, group_best=1)
    if settings.topk_method == "greedy":
        return replace(router, groups=1, kept_groups=1)
    if settings.topk_method == "group_limited_greedy":
        return router
    raise ModelError(
        f"topk_method in config.json must be greedy or group_limited_greedy (got {brief(settings.topk_method)}); "
        "serve another model"
    )


def _glm4_moe_lite(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    """Describe GLM-4.7-Flash, in which `mlp_layer_types` says which layers have experts."""
    types = raw.get("mlp_layer_types")
    count = raw.get("num_hidden_layers")
    if types is None:
        dense = [0]
    elif isinstance(types, list) and len(types) == count and {*map(str, types)} <= {"dense", "sparse"}:
        dense = [i for i, kind in enumerate(types) if kind == "dense"]
    else:
        raise ModelError(
            f"mlp_layer_types in config.json must have {brief(count)} entries, each dense or sparse (got "
            f"{brief(types)}); correct the file"
        )
    return _describe_glm(raw | dict(mlp_only_layers=dense, first_k_dense_replace=0), architecture)


def _mistral4(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    """Describe Mistral 4. `qk_rope_head_dim` already gives the rotated part of a head, so `partial_rotary_factor` is
    dropped.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or _MISTRAL_ROPE
    if not isinstance(rope, dict):
        raise ModelError(f"rope_parameters in config.json must be a map (got {brief(rope)}); correct the file")
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    raw = {key: value for key, value in raw.items() if key != "rope_scaling"}
    return _describe_mistral(raw | dict(rope_parameters=rope), architecture)


_describe_glm = _family(_sigmoid_router, **_GLM)
_describe_mistral = _family(lambda settings: grouped_router(settings, "softmax"), grows=True, **_MISTRAL)
_TEXT = {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
_BESIDE = ("model.vision_tower.", "model.mm_projector.")
# transformers 5.23 saves the layers under the name `blocks`.
_RENAMED = {
    "language_model.model.blocks.": "model.layers.",
    **RENAMED_OLDER,
    "mm_projector.": "model.mm_projector.",
}

FAMILIES = {
    "DeepseekV2ForCausalLM": _family(_softmax_router, fixed=_UNUSED_IN_V2, **_V2),
    "DeepseekV3ForCausalLM": _family(_sigmoid_router, **_V3),
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "Mistral4ForCausalLM": _mistral4,
    "Kimi_K25ForConditionalGeneration": wrapped_text(_TEXT, _BESIDE, _RENAMED, is_tied=True),
}
SPELLINGS = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
