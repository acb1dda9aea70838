"""The vision towers of families, as config.json describes them.

Like `settings` for decoders, this module guarantees that no size exceeds its limit, so a hostile file cannot make a
tower slow to build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from trueroll.errors import ModelError, brief

from ..specs import DecoderSpec, LayerNormSpec, NormSpec, RotationSpec, TowerSpec
from . import Describe, families

ReadTower = Callable[[dict[str, Any], DecoderSpec], TowerSpec]
"""read_tower(raw, decoder): return the tower that config.json describes beside a decoder."""

# Limits on sizes: several times the sizes of any published tower.
_MOST = {
    "depth": 2**10,
    "num_hidden_layers": 2**10,
    "hidden_size": 2**16,
    "intermediate_size": 2**18,
    "num_heads": 2**10,
    "num_attention_heads": 2**10,
    "in_channels": 2**4,
    "num_channels": 2**4,
    "patch_size": 2**8,
    "image_size": 2**14,
    "spatial_merge_size": 2**4,
    "temporal_patch_size": 2**3,
    "window_size": 2**14,
    "out_hidden_size": 2**20,
    "num_position_embeddings": 2**20,
    "mm_tokens_per_image": 2**16,
}
_MOST_TOKEN_ID = 2**24
_QWEN: dict[str, Any] = dict(
    in_channels=3, spatial_merge_size=2, temporal_patch_size=2, num_heads=16, patch_size=16, out_hidden_size=3584
)
_QWEN3: dict[str, Any] = _QWEN | dict(depth=27, hidden_size=1152, intermediate_size=4304, num_position_embeddings=2304)
_QWEN2_5: dict[str, Any] = _QWEN | dict(
    depth=32, hidden_size=3584, intermediate_size=3420, patch_size=14, window_size=112
)
_SIGLIP: dict[str, Any] = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_channels=3,
    image_size=224,
    patch_size=16,
)
_EPS = 1e-6
RENAMED_TEXT = {"model.language_model.": "model."}
"""The prefix of the decoder's names in a checkpoint with a tower, and the prefix of the same names without a tower."""
RENAMED_OLDER = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    **RENAMED_TEXT,
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""Maps prefixes of names in files to the model's prefixes. Covers older files and files that transformers saves now."""
_QWEN_LAYER = {
    "mixer_norm": "model.visual.blocks.{}.norm1",
    "qkv": "model.visual.blocks.{}.attn.qkv",
    "o": "model.visual.blocks.{}.attn.proj",
    "mlp_norm": "model.visual.blocks.{}.norm2",
    "patch": "model.visual.patch_embed.proj",
}
_QWEN3_NAMES = _QWEN_LAYER | {
    "up": "model.visual.blocks.{}.mlp.linear_fc1",
    "down": "model.visual.blocks.{}.mlp.linear_fc2",
    "table": "model.visual.pos_embed.weight",
    "merger.norm": "model.visual.merger.norm",
    "merger.up": "model.visual.merger.linear_fc1",
    "merger.down": "model.visual.merger.linear_fc2",
    "deepstack.norm": "model.visual.deepstack_merger_list.{}.norm",
    "deepstack.up": "model.visual.deepstack_merger_list.{}.linear_fc1",
    "deepstack.down": "model.visual.deepstack_merger_list.{}.linear_fc2",
}
_QWEN2_5_NAMES = _QWEN_LAYER | {
    "gate": "model.visual.blocks.{}.mlp.gate_proj",
    "up": "model.visual.blocks.{}.mlp.up_proj",
    "down": "model.visual.blocks.{}.mlp.down_proj",
    "merger.norm": "model.visual.merger.ln_q",
    "merger.up": "model.visual.merger.mlp.0",
    "merger.down": "model.visual.merger.mlp.2",
}
_SIGLIP_LAYER = "model.vision_tower.encoder.layers.{}"
_SIGLIP_NAMES = {
    "patch": "model.vision_tower.embeddings.patch_embedding",
    "table": "model.vision_tower.embeddings.position_embedding.weight",
    "mixer_norm": f"{_SIGLIP_LAYER}.layer_norm1",
    "q": f"{_SIGLIP_LAYER}.self_attn.q_proj",
    "k": f"{_SIGLIP_LAYER}.self_attn.k_proj",
    "v": f"{_SIGLIP_LAYER}.self_attn.v_proj",
    "o": f"{_SIGLIP_LAYER}.self_attn.out_proj",
    "mlp_norm": f"{_SIGLIP_LAYER}.layer_norm2",
    "up": f"{_SIGLIP_LAYER}.mlp.fc1",
    "down": f"{_SIGLIP_LAYER}.mlp.fc2",
    "last_norm": "model.vision_tower.post_layernorm",
    "merger.norm": "model.multi_modal_projector.mm_soft_emb_norm",
    "merger.matrix": "model.multi_modal_projector.mm_input_projection_weight",
}


def wrapped(
    describe_text: Describe, read_tower: ReadTower, renamed: Mapping[str, str], is_tied: bool = False
) -> Describe:
    """Return the `Describe` function of a model with a vision tower. The settings of the model's decoder are in
    `text_config`.

    `renamed`: as in `DecoderSpec`. `is_tied`: the default of the outer `tie_word_embeddings`, which overrides the same
    setting in `text_config`.
    """

    def describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
        spec = describe_text(_text_of(raw, is_tied), architecture)
        return replace(spec, tower=read_tower(raw, spec), renamed=renamed)

    return describe


def wrapped_text(
    text_families: Mapping[str, str], beside: tuple[str, ...], renamed: Mapping[str, str], is_tied: bool = False
) -> Describe:
    """Return the `Describe` function of a model with a vision tower that is not served: only the text decoder is
    served. The settings of the model's decoder are in `text_config`.

    `text_families`: maps each `model_type` that `text_config` may have to the architecture of the text model; the first
    `model_type` is the default. `beside`, `renamed`: as in `DecoderSpec`. `is_tied`: as for `wrapped`.
    """

    def describe(raw: dict[str, Any], architecture: str) -> DecoderSpec:
        text = _text_of(raw, is_tied)
        kind = text.get("model_type", next(iter(text_families)))
        if not isinstance(kind, str) or kind not in text_families:
            raise _refusal(f"model_type in text_config in config.json must be one of {', '.join(text_families)}", kind)
        spec = families()[text_families[kind]](text, architecture)
        return replace(spec, beside=beside, renamed=renamed)

    return describe


def _text_of(raw: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    """Return the settings of the decoder of a model with a vision tower."""
    outer = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", is_tied)}
    return outer | _map(raw, "text_config") | tied


def qwen3_5_tower(raw: dict[str, Any], decoder: DecoderSpec) -> TowerSpec:
    """Return the tower of Qwen3.5, which is the tower of Qwen3-VL with other placeholders."""
    return qwen3_tower({"image_token_id": 248056, "video_token_id": 248057} | raw, decoder)


def qwen3_tower(raw: dict[str, Any], decoder: DecoderSpec) -> TowerSpec:
    """Return the tower of Qwen3-VL."""
    vision, found = _vision_of(raw, _QWEN3)
    _expect(vision, hidden_act="gelu_pytorch_tanh")
    side = math.isqrt(found.num_position_embeddings)
    if side * side != found.num_position_embeddings:
        raise _refusal("num_position_embeddings in config.json must be a square number", found.num_position_embeddings)
    deepstack = _layer_list(vision, "deepstack_visual_indexes", (), found.depth)
    if len(deepstack) > len(decoder.layers):
        raise _refusal(
            f"deepstack_visual_indexes in config.json must be at most {len(decoder.layers)} numbers", deepstack
        )
    norm = LayerNormSpec(_EPS)
    return TowerSpec(
        **_qwen_sizes(raw, vision, found, decoder),
        norm=norm,
        merger_norm=norm,
        activation="gelu_tanh",
        names=_QWEN3_NAMES,
        table_side=side,
        deepstack=deepstack,
        video_placeholder=_token_id(raw, "video_token_id", 151656) if found.temporal_patch_size > 1 else None,
    )


def qwen2_5_tower(raw: dict[str, Any], decoder: DecoderSpec) -> TowerSpec:
    """Return the tower of Qwen2.5-VL."""
    vision, found = _vision_of(raw, _QWEN2_5)
    _expect(vision, hidden_act="silu")
    window = found.window_size // (found.patch_size * found.spatial_merge_size)
    if window == 0:
        raise _refusal("window_size in config.json must be at least patch_size * spatial_merge_size", found.window_size)
    norm = NormSpec(_EPS)
    return TowerSpec(
        **_qwen_sizes(raw, vision, found, decoder),
        norm=norm,
        merger_norm=norm,
        activation="silu",
        names=_QWEN2_5_NAMES,
        patch_bias=False,
        gated=True,
        window=window,
        whole_layers=frozenset(_layer_list(vision, "fullatt_block_indexes", (7, 15, 23, 31), found.depth)),
    )


def siglip_tower(raw: dict[str, Any], decoder: DecoderSpec) -> TowerSpec:
    """Return the tower of Gemma 3: SigLIP (Zhai et al. 2023). The rows of each block are averaged and projected."""
    vision, found = _vision_of(raw, _SIGLIP)
    _expect(vision, hidden_act="gelu_pytorch_tanh")
    tokens = _size(raw, "mm_tokens_per_image", 256)
    side, per_side = found.image_size // found.patch_size, math.isqrt(tokens)
    if per_side**2 != tokens or side < per_side or side % per_side:
        raise _refusal(f"mm_tokens_per_image in config.json must be the square of a number that divides {side}", tokens)
    eps = vision.get("layer_norm_eps", _EPS)
    if not isinstance(eps, float) or not 0.0 < eps < 1.0:
        raise _refusal("layer_norm_eps in config.json must be a number above 0 and below 1", eps)
    return TowerSpec(
        hidden_size=found.hidden_size,
        num_heads=_divisor(found, "num_attention_heads"),
        intermediate_size=found.intermediate_size,
        num_layers=found.num_hidden_layers,
        out_size=decoder.hidden_size,
        norm=LayerNormSpec(eps),
        merger_norm=NormSpec(eps, zero_centered=True),
        activation="gelu_tanh",
        names=_SIGLIP_NAMES,
        placeholder=_token_id(raw, "image_token_index", 262144),
        patch_size=found.patch_size,
        merge=side // per_side,
        channels=found.num_channels,
        table_side=side,
        joined=False,
        last_norm=LayerNormSpec(eps),
        pooled=True,
        grid=(side, side),
        sees_span=True,
    )


def _qwen_sizes(
    raw: dict[str, Any], vision: dict[str, Any], found: SimpleNamespace, decoder: DecoderSpec
) -> dict[str, Any]:
    heads = _divisor(found, "num_heads")
    size = found.hidden_size // heads
    if size % 4:
        raise _refusal("num_heads in config.json must be such that the size of a head is a multiple of 4", heads)
    if found.out_hidden_size != decoder.hidden_size:
        raise _refusal(f"out_hidden_size in config.json must be {decoder.hidden_size}", found.out_hidden_size)
    rope = vision.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise _refusal("rope_parameters in config.json must be a map", rope)
    theta = rope.get("rope_theta", 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1.0 <= theta <= 2.0**60:
        raise _refusal("rope_theta in config.json must be a number of at least 1", theta)
    exponents = torch.arange(0, size // 2, 2, dtype=torch.int64).float() / (size // 2)
    inv_freq = (1.0 / float(theta) ** exponents).tolist()
    return dict(
        hidden_size=found.hidden_size,
        num_heads=heads,
        intermediate_size=found.intermediate_size,
        num_layers=found.depth,
        out_size=found.out_hidden_size,
        placeholder=_token_id(raw, "image_token_id", 151655),
        patch_size=found.patch_size,
        merge=found.spatial_merge_size,
        channels=found.in_channels,
        frames=found.temporal_patch_size,
        rotation=RotationSpec((*inv_freq, *inv_freq), axes=(0,) * len(inv_freq) + (1,) * len(inv_freq)),
    )


def _vision_of(raw: dict[str, Any], defaults: Mapping[str, int]) -> tuple[dict[str, Any], SimpleNamespace]:
    """Return `vision_config`, and the sizes named in `defaults`. If the file omits a size, the result has the default
    value.
    """
    vision = _map(raw, "vision_config")
    return vision, SimpleNamespace(**{name: _size(vision, name, default) for name, default in defaults.items()})


def _map(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name)
    if not isinstance(found, dict):
        raise ModelError(f"{name} in config.json must be a map (got {brief(found)}); correct the file")
    return found


def _size(raw: dict[str, Any], name: str, default: int) -> int:
    size = raw.get(name, default)
    if type(size) is not int or not 1 <= size <= _MOST[name]:
        raise _refusal(f"{name} in config.json must be an integer from 1 to {_MOST[name]}", size)
    return size


def _token_id(raw: dict[str, Any], name: str, default: int) -> int:
    token_id = raw.get(name, default)
    if type(token_id) is not int or not 0 <= token_id < _MOST_TOKEN_ID:
        raise _refusal(f"{name} in config.json must be a token id", token_id)
    return token_id


def _divisor(found: SimpleNamespace, name: str) -> int:
    heads = getattr(found, name)
    if found.hidden_size % heads:
        raise _refusal(f"{name} in config.json must be a divisor of {found.hidden_size}", heads)
    return heads


def _layer_list(vision: dict[str, Any], name: str, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    layers = vision.get(name, default)
    is_list = isinstance(layers, list | tuple) and all(type(i) is int and 0 <= i < depth for i in layers)
    if not is_list or sorted({*layers}) != [*layers]:
        raise _refusal(f"{name} in config.json must be a list of ascending layer indices below {depth}", layers)
    return tuple(layers)


def _expect(vision: dict[str, Any], **settings: str) -> None:
    for name, wanted in settings.items():
        if (found := vision.get(name, wanted)) != wanted:
            raise _refusal(f"{name} in config.json must be {wanted!r}", found)


def _refusal(wanted: str, found: object) -> ModelError:
    return ModelError(f"{wanted} (got {brief(found)}); serve another model")
