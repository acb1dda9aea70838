"""Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: Qwen2, Qwen3 and Qwen3-MoE with a vision tower.

The tokens of an image have positions with three axes. Qwen2.5-VL gives each axis a range of a head's pairs; Qwen3-VL
assigns one pair after the other to the axes in turn, and adds rows of its tower to the hidden states after the
decoder's first layers.
"""

from __future__ import annotations

from typing import Any

from ..specs import DecoderSpec
from . import Describe
from .llama import FAMILIES as LLAMA
from .qwen3_moe import describe_qwen3_moe
from .towers import RENAMED_TEXT, qwen2_5_tower, qwen3_tower, wrapped

_QWEN2, _QWEN3 = LLAMA["Qwen2ForCausalLM"], LLAMA["Qwen3ForCausalLM"]

_MOE: dict[str, Any] = dict(
    num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, rope_theta=500_000.0
)


def _qwen2_5_text(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    rope = raw.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") == "mrope":
        raw = raw | {"rope_scaling": rope | {"type": "default", "rope_type": "default"}}
    return _QWEN2(raw, architecture)


def _qwen2_5(describe: Describe) -> Describe:
    """Return a function that also accepts older files, which have the settings of the text model at the top level."""
    return lambda raw, architecture: describe({"text_config": raw} | raw, architecture)


def _qwen3_moe_text(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    """Describe the decoder of Qwen3-VL-MoE. The weights of a token's experts are always normalized, whatever
    `norm_topk_prob` the file has. Published files have the experts' matrices transposed.
    """
    return describe_qwen3_moe(_MOE | raw | {"norm_topk_prob": True}, architecture, or_transposed=True)


FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5(
        wrapped(_qwen2_5_text, qwen2_5_tower, RENAMED_TEXT | {"visual.": "model.visual."})
    ),
    "Qwen3VLForConditionalGeneration": wrapped(_QWEN3, qwen3_tower, RENAMED_TEXT),
    "Qwen3VLMoeForConditionalGeneration": wrapped(_qwen3_moe_text, qwen3_tower, RENAMED_TEXT),
}
