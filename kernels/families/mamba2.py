"""Families with state spaces (Mamba 2).

Bamba: most layers have a state space, and the other layers have attention that rotates a half of each head. Every layer
has an MLP.

Granite 4: like Bamba, with the multipliers of Granite. Attention rotates whole heads, or does not rotate. Some models
have experts in addition to an MLP for all tokens.

Nemotron-H (Nemotron Nano 2, Nemotron 3): each layer has one norm and one part. The part is a state space, attention
without rotation, an MLP with squared ReLU, or experts with a shared expert for all tokens. Each expert is an MLP with
squared ReLU. In some models, a matrix product converts hidden states to smaller rows, which the experts read.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import ModelError, brief

from ..specs import (
    LAYER_NAMES,
    SHARED_EXPERTS_NAMES,
    DecoderSpec,
    HeadSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    NormSpec,
    RotationSpec,
)
from .settings import FULL, LINEAR, MOST_LAYERS, expect, fill_layer_types, grouped_router, read_settings

_BAMBA: dict[str, Any] = dict(
    max_position_embeddings=262144,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    mamba_d_head="auto",
)
NAMES = {role: name.replace("mlp.", "feed_forward.") for role, name in LAYER_NAMES.items()} | {
    "mlp_norm.before": "pre_ff_layernorm.weight"
}


def state_space(settings: Any, **others: Any) -> Mamba2Spec:
    """Return a state space with the sizes in these settings. `others`: further fields of the spec."""
    others.setdefault("norm", NormSpec(settings.rms_norm_eps))
    return Mamba2Spec(
        num_heads=settings.mamba_n_heads,
        head_dim=settings.mamba_d_head,
        num_groups=settings.mamba_n_groups,
        state_size=settings.mamba_d_state,
        kernel_size=settings.mamba_d_conv,
        time_step_limit=(float(settings.time_step_limit[0]), float(settings.time_step_limit[1])),
        convolution_bias=settings.mamba_conv_bias,
        **others,
    )


def expect_state_space(settings: Any, heads: str = "mamba_n_heads", groups: str = "mamba_n_groups") -> None:
    """Raise ModelError if the state space is not supported, or if its number of heads is not a multiple of its number
    of groups. `heads`, `groups`: the names that the file uses for the number of heads and for the number of groups.
    """
    if settings.mamba_proj_bias:
        raise ModelError("mamba_proj_bias in config.json must be False (got True); serve another model")
    if settings.mamba_n_heads % settings.mamba_n_groups:
        raise ModelError(
            f"{heads} in config.json must be a multiple of {groups} = {settings.mamba_n_groups} (got "
            f"{settings.mamba_n_heads}); correct the file"
        )


def expect_inner_size(settings: Any, size: int, name: str) -> None:
    """Raise ModelError unless the heads of a state space have the total size `size`. `name`: the name of this size in
    errors.
    """
    if (found := settings.mamba_n_heads * settings.mamba_d_head) != size:
        raise ModelError(
            f"mamba_n_heads * mamba_d_head in config.json must be {name} = {size} (got {found}); correct the file"
        )


def _expect_expanded(settings: Any) -> None:
    """Raise ModelError unless the state space is supported, and its heads have the total size `mamba_expand` times the
    size of the hidden states.
    """
    expect_state_space(settings)
    expect_inner_size(settings, settings.mamba_expand * settings.hidden_size, "mamba_expand * hidden_size")


def fill_state_space(raw: dict[str, Any], size: int | None = None) -> dict[str, Any]:
    """Return `raw` with numbers in place of sizes and limits that files may omit or write in another form. `size`: the
    total size of all heads; None if `mamba_expand` determines it.
    """
    limit = raw.get("time_step_limit") or (0.0, float("inf"))
    raw["time_step_limit"] = [*map(_number, limit)] if isinstance(limit, list | tuple) else limit
    if raw["mamba_d_head"] == "auto":
        size = raw.get("mamba_expand", 2) * raw["hidden_size"] if size is None else size
        raw["mamba_d_head"] = size // raw.get("mamba_n_heads", 128)
    return raw


def _number(bound: Any) -> Any:
    """Return the number that `bound` stands for. transformers writes infinity as a map."""
    return float("inf") if bound == {"__float__": "Infinity"} else bound


def _bamba(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    given = raw.get("attn_layer_indices")
    attentions = given if isinstance(given, list) else []

    def fill(raw: dict[str, Any]) -> dict[str, Any]:
        return fill_layer_types(fill_state_space(raw), lambda i: i not in attentions, LINEAR)

    # In transformers, `attn_layer_indices` alone says which layers have attention, and a half of each head is rotated.
    fixed = {"layer_types": None, "partial_rotary_factor": 0.5}
    settings = read_settings(fill, _BAMBA | raw | fixed)
    expect(settings, hidden_act="silu")
    _expect_expanded(settings)
    types = settings.types(LINEAR)
    if FULL not in types:
        raise ModelError(
            f"attn_layer_indices in config.json must name at least one layer (got {brief(given)}); serve another model"
        )
    (rotation, rotated), norm = settings.partial_rotation(), NormSpec(settings.rms_norm_eps)
    attention = settings.attention(rotated=rotated)
    mixers = [state_space(settings) if kind == LINEAR else attention for kind in types]
    layers = [LayerSpec(mixer, MlpSpec(settings.intermediate_size), norm) for mixer in mixers]
    names: dict[str, Any] = dict(names=NAMES, last_norm="model.final_layernorm.weight")
    return settings.decoder(architecture, layers, [rotation], **names)


_MOE, _MLP = "moe", "mlp"
_BLOCKS = {"M": LINEAR, "*": FULL, "E": _MOE, "-": _MLP, "mamba": LINEAR, "attention": FULL}
"""Maps names of layer types in files of Nemotron-H and Granite 4 to the types that this module uses."""
_NEMOTRON_NAMES = {
    "rms_norm_eps": ("layer_norm_epsilon",),
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_n_groups": ("mamba_n_groups", "n_groups"),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_d_conv": ("mamba_d_conv", "conv_kernel"),
    "mamba_conv_bias": ("mamba_conv_bias", "use_conv_bias"),
}
"""The settings of Nemotron-H for a state space, with their names in files. The first name that a file has counts."""
_NEMOTRON: dict[str, Any] = dict(
    max_position_embeddings=4096,
    intermediate_size=21504,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_n_groups=8,
    mamba_d_state=128,
    hidden_act="silu",
)
_NEMOTRON_LAYER_NAMES = {
    role: name.replace("self_attn.", "mixer.").replace("mamba.", "mixer.").replace("mlp.", "mixer.")
    for role, name in SHARED_EXPERTS_NAMES.items()
} | {
    "mixer_norm.before": "norm.weight",
    "mlp_norm.before": "norm.weight",
    "experts.gate_up": "mixer.experts.up_proj",
}


_GRANITE: dict[str, Any] = dict(
    max_position_embeddings=2048,
    intermediate_size=11008,
    shared_intermediate_size=1024,
    num_attention_heads=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    mamba_d_head="auto",
)
_GRANITE_NAMES = LAYER_NAMES | {
    "mlp.gate_up": "shared_mlp.input_linear.weight",
    "mlp.down": "shared_mlp.output_linear.weight",
    "shared.gate_up": "shared_mlp.input_linear.weight",
    "shared.down": "shared_mlp.output_linear.weight",
    "router": "block_sparse_moe.router.weight",
    "experts.gate_up": "block_sparse_moe.experts.gate_up_proj",
    "experts.down": "block_sparse_moe.experts.down_proj",
}
_GRANITE_FILES = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}


def _granite_moe_hybrid(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    given = next((raw[name] for name in ("layer_types", "layers_block_type") if raw.get(name)), None)

    def fill(raw: dict[str, Any]) -> dict[str, Any]:
        raw["layer_types"] = [_BLOCKS.get(kind, kind) for kind in given] if isinstance(given, list) else given
        raw["moe_intermediate_size"] = raw["intermediate_size"]
        if raw["num_local_experts"] == 0:
            raw["num_experts_per_tok"] = 1  # files of models without experts state 0
        return fill_layer_types(fill_state_space(raw), lambda i: True, LINEAR)

    settings = read_settings(fill, _GRANITE | raw)
    biased, types = bool(settings.attention_bias), settings.types(LINEAR)
    expect(settings, hidden_act="silu", attention_bias=settings.attention_bias)
    _expect_expanded(settings)
    if FULL not in types:
        raise ModelError(f"config.json must have at least one {FULL} layer (got {brief(types)}); serve another model")
    rotation = _unrotated(settings)
    if (kind := raw.get("position_embedding_type")) == "rope":
        rotation = settings.rotation()
    elif kind not in (None, "nope"):
        raise ModelError(
            f"position_embedding_type in config.json must be 'rope', 'nope' or null (got {brief(kind)}); serve another "
            "model"
        )
    scale = float(settings.attention_multiplier)
    attention = settings.attention(scale=scale, qkv_bias=biased, o_bias=biased)
    norm, mlp = NormSpec(settings.rms_norm_eps), MlpSpec(settings.shared_intermediate_size, joined=True)
    if settings.num_experts:
        shared: dict[str, Any] = dict(shared_gated=False, shared_joined=True)
        mlp = settings.experts(shared_size=settings.shared_intermediate_size, **shared)
    mixers = [state_space(settings) if kind == LINEAR else attention for kind in types]
    residual_scale = float(settings.residual_multiplier)
    return settings.decoder(
        architecture,
        [LayerSpec(mixer, mlp, norm, residual_scale=residual_scale) for mixer in mixers],
        [rotation],
        names=_GRANITE_NAMES,
        respelled=_GRANITE_FILES,
        embed_scale=float(settings.embedding_multiplier),
        head=HeadSpec(1.0 / settings.logits_scaling),
    )


def _unrotated(settings: Any) -> RotationSpec:
    return RotationSpec((0.0,) * (settings.head_dim // 2))


def _nemotron_h(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    types = _block_types(raw)
    least = next((raw[name] for name in ("mamba_dt_min", "time_step_min") if name in raw), 0.001)
    fixed = {"time_step_limit": (least, float("inf")), "num_hidden_layers": len(types), "layer_types": None}
    names = {name: next((each for each in own if each in raw), own[-1]) for name, own in _NEMOTRON_NAMES.items()}
    others = {key: value for key, value in raw.items() if names.get(key, key) == key}
    settings = read_settings(lambda given: _NEMOTRON | given, others | fixed, names=names)
    expect(settings, hidden_act="silu", tie_word_embeddings=False, sliding_window=None)
    for name, wanted in {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_bias": False}.items():
        if (found := raw.get(name, wanted)) != wanted:
            raise ModelError(f"{name} in config.json must be {wanted!r} (got {brief(found)}); serve another model")
    expect_state_space(settings, names["mamba_n_heads"], names["mamba_n_groups"])
    norm, mlps = NormSpec(settings.rms_norm_eps), {_MLP: MlpSpec(settings.intermediate_size, "relu", gated=False)}
    if _MOE in types:
        mlps[_MOE] = settings.experts(
            activation="relu",
            gated=False,
            router=grouped_router(settings, "sigmoid", wide=True, correction=True),
            latent_size=settings.moe_latent_size or 0,
            shared_size=settings.moe_shared_expert_intermediate_size,
            shared_gated=False,
        )
    mixers = {LINEAR: state_space(settings), FULL: settings.attention()}
    layers = [LayerSpec(mixers.get(kind), mlps.get(kind), norm) for kind in types]
    weights: dict[str, Any] = dict(names=_NEMOTRON_LAYER_NAMES, renamed={"backbone.": "model."}, others=("mtp.",))
    weights |= dict(embedding="model.embeddings.weight", last_norm="model.norm_f.weight")
    return settings.decoder(architecture, layers, [_unrotated(settings)], **weights)


def _block_types(raw: dict[str, Any]) -> list[str]:
    """Return the type of each layer. Raise ModelError unless all types are supported."""
    given = next(
        (raw[name] for name in ("layers_block_type", "layer_types", "hybrid_override_pattern") if raw.get(name)), None
    )
    most = MOST_LAYERS
    if not isinstance(given, list | str) or not 1 <= len(given) <= most or not all(type(x) is str for x in given):
        raise ModelError(
            f"layers_block_type in config.json must be a list of 1 to {most} layer types (got {brief(given)}); correct "
            "the file"
        )
    types = [_BLOCKS.get(kind, kind) for kind in given]
    if not {*types} <= {LINEAR, FULL, _MLP, _MOE} or FULL not in types:
        raise ModelError(
            f"layers_block_type in config.json must list layers of the types {LINEAR}, {FULL}, {_MLP} and {_MOE}, with "
            f"at least one {FULL} layer (got {brief(given)}); serve another model"
        )
    return types


FAMILIES = {
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_moe_hybrid,
    "NemotronHForCausalLM": _nemotron_h,
}
