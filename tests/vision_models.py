"""Tiny random models with vision towers, and images for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import Tensor

from tiny import TINY, save_tiny_model

PLACEHOLDER, VIDEO_PLACEHOLDER, VISION_START, VISION_END = 500, 501, 502, 503
_TOKENS: dict[str, Any] = dict(
    image_token_id=PLACEHOLDER,
    video_token_id=VIDEO_PLACEHOLDER,
    vision_start_token_id=VISION_START,
    vision_end_token_id=VISION_END,
)
_VISION: dict[str, Any] = dict(
    depth=4,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    patch_size=4,
    out_hidden_size=64,
    num_position_embeddings=64,
)
_SIGLIP: dict[str, Any] = dict(
    model_type="siglip_vision_model",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=4,
    vision_use_head=False,
)
_DELTA_NETS: dict[str, Any] = dict(
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4
)
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48)


def _rope(*sections: int, **others: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=list(sections), **others))


_QWEN3_5_ROPE = _rope(4, 2, 2, partial_rotary_factor=0.5, mrope_interleaved=True)


def _text(**settings: Any) -> dict[str, Any]:
    return TINY | dict(head_dim=16, num_hidden_layers=4) | settings


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def _qwen3_vl() -> Any:
    vision = _VISION | dict(deepstack_visual_indexes=[0, 1, 2])
    text = _text(**_rope(4, 2, 2, mrope_interleaved=True))
    return T.Qwen3VLForConditionalGeneration(T.Qwen3VLConfig(**_TOKENS, text_config=text, vision_config=vision))


def _qwen3_vl_moe(**text_settings: Any) -> Any:
    vision = _VISION | dict(deepstack_visual_indexes=[0, 1, 2])
    text = _text(**_EXPERTS, **_rope(4, 2, 2, mrope_interleaved=True)) | text_settings
    return T.Qwen3VLMoeForConditionalGeneration(T.Qwen3VLMoeConfig(**_TOKENS, text_config=text, vision_config=vision))


def _qwen3_5() -> Any:
    text = _text(**_DELTA_NETS, **_QWEN3_5_ROPE) | dict(head_dim=32)
    return T.Qwen3_5ForConditionalGeneration(T.Qwen3_5Config(**_TOKENS, text_config=text, vision_config=_VISION))


def _qwen3_5_moe() -> Any:
    text = _text(**_DELTA_NETS, **_EXPERTS, **_QWEN3_5_ROPE, shared_expert_intermediate_size=32) | dict(head_dim=32)
    return T.Qwen3_5MoeForConditionalGeneration(T.Qwen3_5MoeConfig(**_TOKENS, text_config=text, vision_config=_VISION))


def _qwen2_5_vl() -> Any:
    vision = _without(_VISION, "num_position_embeddings") | dict(window_size=16, fullatt_block_indexes=[1, 3])
    text = _without(_text(**_rope(2, 3, 3)), "head_dim")
    return T.Qwen2_5_VLForConditionalGeneration(
        T.Qwen2_5_VLConfig(image_token_id=PLACEHOLDER, text_config=text, vision_config=vision)
    )


def _gemma3() -> Any:
    # With tied embeddings, large embeddings would make the model repeat each token.
    text = _text(sliding_window=32, query_pre_attn_scalar=16, tie_word_embeddings=False) | dict(num_hidden_layers=6)
    config = T.Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=16,
        image_token_index=PLACEHOLDER,
        tie_word_embeddings=False,
    )
    return T.Gemma3ForConditionalGeneration(config)


MODELS: dict[str, Callable[..., Any]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
}
GRIDS = {name: [(4, 6), (10, 4), (2, 2)] for name in MODELS} | {"gemma3": [(8, 8)]}
"""Images of different sizes, in rows and columns of patches."""


def make_vision_model(family: str, folder: Path, dtype: str = "float32", **settings: Any) -> Path:
    """Save a random model of `family`, which has a vision tower, into `folder`, and return `folder`. `settings`:
    arguments of the function in `MODELS`.
    """
    return save_tiny_model(MODELS[family](**settings), folder, dtype)


def random_patches(num_patches: int, num_values: int, seed: int = 0) -> Tensor:
    """Return the values of patches, float32 [num_patches, num_values]."""
    return torch.randn(num_patches, num_values, generator=torch.Generator().manual_seed(seed))
