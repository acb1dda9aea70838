"""The checked settings of a config.json, which the families read.

This module guarantees that no size exceeds its limit in `_MOST`, so even a hostile file cannot make the list of layers
slow to build. The base class of transformers' configurations checks the values and converts old files. The subclasses
for single architectures are not used: importing a subclass also imports torch's compiler, which takes 150 MB.
"""

# No `from __future__ import annotations` here: it turns annotations into strings, and `strict` checks the type of a
# field only if the annotation is not a string.

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict, validated_field
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trueroll.errors import ModelError, brief, said
from trueroll.versions import untested

from ..specs import (
    CORRECTION_ROLE,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RotationSpec,
    RouterSpec,
    Score,
    WeightSpec,
)
from ..stored import read_stored

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
MOST_LAYERS = 2**10
"""The maximum number of layers."""
MOST_EXPERTS = 2**16
"""The maximum number of experts. The id of an expert must fit in a uint16."""
# Limits on sizes: several times the sizes of any published decoder, but products of sizes stay far below 2**63.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**24,
    "sliding_window": 2**31,
    "sliding_window_pattern": 2**10,
    "no_rope_layer_interval": 2**10,
    "full_attention_interval": 2**10,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "linear_key_head_dim": 2**12,
    "linear_value_head_dim": 2**12,
    "linear_conv_kernel_dim": 2**10,
    "shared_intermediate_size": 2**22,
    "moe_latent_size": 2**20,
    "moe_shared_expert_intermediate_size": 2**22,
    "mamba_n_heads": 2**12,
    "mamba_d_head": 2**12,
    "mamba_n_groups": 2**12,
    "mamba_d_state": 2**12,
    "mamba_d_conv": 2**10,
    "mamba_expand": 2**10,
    "mamba_d_ssm": 2**22,
    "decoder_sparse_step": 2**10,
    "num_experts_per_tok": 2**10,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "n_shared_experts": 2**10,
    "n_group": 2**10,
    "topk_group": 2**10,
    "first_k_dense_replace": 2**10,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 2**12,
    "qk_rope_head_dim": 2**12,
    "v_head_dim": 2**12,
}
# Limit on a number that scales scores, so that the number and its inverse are both in the range of float32.
_MOST_SCALAR = 2.0**30
# Keys that `Settings` accepts in addition to its fields.
_DTYPE_KEYS = {"dtype", "torch_dtype"}
_ROPE_KEYS = {
    *("rope_theta", "rope_local_base_freq", "rope_scaling"),
    *("partial_rotary_factor", "original_max_position_embeddings"),
}
_ROPE_ARGUMENTS = {"config", "device", "seq_len", "layer_type"}


def _size(name: str, least: int = 1, **options: Any) -> Any:
    def check(size: int | None) -> None:
        if size is not None and not least <= size <= _MOST[name]:
            raise ValueError(f"the value must be at least {least} and at most {_MOST[name]} (got {brief(size)})")

    return validated_field(check, **options)


def _check_eps(eps: float) -> None:
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"the value must be a finite number of at least 0 (got {eps})")


def _check_scalar(scalar: float | None) -> None:
    if scalar is not None and not 1.0 / _MOST_SCALAR <= scalar <= _MOST_SCALAR:
        raise ValueError(
            f"the value must be at least {1.0 / _MOST_SCALAR} and at most {_MOST_SCALAR} (got {brief(scalar)})"
        )


def _scalars(count: int) -> Any:
    def check(scalars: list[Any] | None) -> None:
        if scalars is not None and (len(scalars) != count or not all(type(x) in (int, float) for x in scalars)):
            raise ValueError(f"the value must be a list of {count} numbers (got {brief(scalars)})")
        for scalar in scalars or ():
            _check_scalar(scalar)

    return validated_field(check, default=None)


def _check_time_step_limit(limit: Any) -> None:
    is_pair = isinstance(limit, list | tuple) and all(type(bound) in (int, float) for bound in limit)
    if not is_pair or len(limit) != 2 or not 0.0 <= float(limit[0]) <= float(limit[1]):
        raise ValueError(f"the value must be a pair of numbers of at least 0 in ascending order (got {brief(limit)})")


@strict
class Settings(PreTrainedConfig):
    """The settings of config.json that decoders need, with transformers' names.

    The base class from transformers fills in `dtype` and `rope_parameters`, also from the keys of older files
    (`torch_dtype`, `rope_theta`, `rope_scaling`).
    """

    vocab_size: int = _size("vocab_size")
    hidden_size: int = _size("hidden_size")
    intermediate_size: int = _size("intermediate_size")
    num_hidden_layers: int = _size("num_hidden_layers")
    num_attention_heads: int = _size("num_attention_heads")
    max_position_embeddings: int = _size("max_position_embeddings")
    num_key_value_heads: int | None = _size("num_key_value_heads", default=None)
    head_dim: int | None = _size("head_dim", default=None)
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    rms_norm_eps: float = validated_field(_check_eps, default=1e-6)
    rope_parameters: Any = None
    tie_word_embeddings: bool = False
    attention_bias: Any = False
    attention_out_bias: Any = False
    qkv_bias: Any = False
    clip_qkv: Any = None
    mlp_bias: Any = False
    attention_dropout: Any = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = _size("sliding_window", default=None)
    sliding_window_pattern: int | None = _size("sliding_window_pattern", default=None)
    use_sliding_window: bool = False
    max_window_layers: int = 28
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = _size("no_rope_layer_interval", default=4)
    use_bidirectional_attention: Any = False
    embedding_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    attention_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    residual_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    logits_scaling: float | int = validated_field(_check_scalar, default=1.0)
    query_pre_attn_scalar: float | int = validated_field(_check_scalar, default=256)
    attn_logit_softcapping: float | int | None = validated_field(_check_scalar, default=None)
    final_logit_softcapping: float | int | None = validated_field(_check_scalar, default=None)
    full_attention_interval: int = _size("full_attention_interval", default=4)
    linear_num_key_heads: int = _size("linear_num_key_heads", default=16)
    linear_num_value_heads: int = _size("linear_num_value_heads", default=32)
    linear_key_head_dim: int = _size("linear_key_head_dim", default=128)
    linear_value_head_dim: int = _size("linear_value_head_dim", default=128)
    linear_conv_kernel_dim: int = _size("linear_conv_kernel_dim", default=4)
    mamba_n_heads: int = _size("mamba_n_heads", default=128)
    mamba_d_head: int = _size("mamba_d_head", default=64)
    mamba_n_groups: int = _size("mamba_n_groups", default=1)
    mamba_d_state: int = _size("mamba_d_state", default=256)
    mamba_d_conv: int = _size("mamba_d_conv", default=4)
    mamba_expand: int = _size("mamba_expand", default=2)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_d_ssm: int | None = _size("mamba_d_ssm", default=None)
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    lm_head_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    key_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    attention_in_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    attention_out_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    ssm_in_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    ssm_out_multiplier: float | int = validated_field(_check_scalar, default=1.0)
    mlp_multipliers: list[Any] | None = _scalars(2)
    ssm_multipliers: list[Any] | None = _scalars(5)
    time_step_limit: Any = validated_field(_check_time_step_limit, default=(0.0, float("inf")))
    shared_intermediate_size: int = _size("shared_intermediate_size", default=1024)
    moe_latent_size: int | None = _size("moe_latent_size", default=None)
    moe_shared_expert_intermediate_size: int = _size("moe_shared_expert_intermediate_size", default=7688)
    num_experts: int = 0
    # Other names for num_experts.
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int = _size("num_experts_per_tok", default=8)
    moe_intermediate_size: int = _size("moe_intermediate_size", default=768)
    shared_expert_intermediate_size: int = _size("shared_expert_intermediate_size", default=512)
    norm_topk_prob: bool = False
    n_shared_experts: int = _size("n_shared_experts", least=0, default=1)
    n_group: int = _size("n_group", default=1)
    topk_group: int = _size("topk_group", default=1)
    routed_scaling_factor: float | int = validated_field(_check_scalar, default=1.0)
    first_k_dense_replace: int = _size("first_k_dense_replace", least=0, default=0)
    router_jitter_noise: float | int = 0.0
    moe_norm_min: float = validated_field(_check_eps, default=1e-12)
    mup_enabled: bool = False
    use_qk_norm: bool = False
    decoder_sparse_step: int = _size("decoder_sparse_step", default=1)
    mlp_only_layers: list[int] | None = None
    q_lora_rank: int | None = _size("q_lora_rank", default=None)
    kv_lora_rank: int = _size("kv_lora_rank", default=512)
    qk_nope_head_dim: int = _size("qk_nope_head_dim", default=128)
    qk_rope_head_dim: int = _size("qk_rope_head_dim", default=64)
    v_head_dim: int = _size("v_head_dim", default=128)
    rope_interleave: bool = True
    topk_method: Any = None
    swiglu_alpha: float | int | None = None
    swiglu_limit: float | int | None = None
    ignore_keys_at_rope_validation = {
        *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings")
    }

    def __post_init__(self, **others: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        names = self.num_local_experts, self.n_routed_experts
        self.num_experts = next((count for count in names if count is not None), self.num_experts)
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**others)

    def types(self: Any, other: str) -> list[str]:
        """Return FULL or `other` for each layer, from `layer_types`. Raise ModelError for a layer of a type other than
        FULL and `other`.
        """
        types = self.layer_types or []
        if len(types) != self.num_hidden_layers or not {*types} <= {FULL, other}:
            raise ModelError(
                f"layer_types in config.json must have {self.num_hidden_layers} entries, each {FULL} or {other} (got "
                f"{brief(types)}); serve another model"
            )
        return types

    def windows(self: Any, window: int | None) -> list[int | None]:
        """Return `window` or None for each layer, from `types`. Raise ModelError in the same cases as `types`, and if a
        layer needs a window but `window` is None.
        """
        types = self.types(SLIDING)
        if SLIDING in types and window is None:
            raise ModelError("sliding_window is missing in config.json; correct the file")
        return [window if kind == SLIDING else None for kind in types]

    def attention(self: Any, **others: Any) -> AttentionSpec:
        """Return an attention spec that takes the number and the size of heads from these settings. `others`: further
        fields of the spec.
        """
        others.setdefault("scale", self.head_dim**-0.5)
        return AttentionSpec(self.num_attention_heads, self.num_key_value_heads, self.head_dim, **others)

    def latent_attention(self: Any, **others: Any) -> LatentSpec:
        """Return a latent attention that takes its sizes from these settings. `others`: further fields of the spec.

        Raise ModelError if `rope_parameters` do not give a valid scale of the scores.
        """
        query_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return LatentSpec(
            self.num_attention_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
            query_dim**-0.5 * self._stretched_scale() ** 2,
            NormSpec(1e-6),  # the default of transformers' class of norms, whatever rms_norm_eps is
            q_rank=self.q_lora_rank,
            bias=bool(self.attention_bias),
            **others,
        )

    def _stretched_scale(self: Any) -> float:
        """Return the factor by which a rotation with `mscale_all_dim` multiplies the queries and keys of a latent
        attention.
        """
        parameters = self.rope_parameters
        if parameters.get("rope_type", "default") == "default" or not (each := parameters.get("mscale_all_dim")):
            return 1.0
        try:
            factor = parameters["factor"]
            found = 1.0 if factor <= 1 else 0.1 * each * math.log(factor) + 1.0
            _check_scalar(found)
        except Exception as error:
            raise _broken(error) from error
        return found

    def mlps(self: Any, **others: Any) -> list[MlpSpec | ExpertsSpec]:
        """Return one spec per layer: the spec of the layer's experts, or of its MLP if the layer has no experts.
        `others`: as in `experts`.
        """
        dense, step = {*(self.mlp_only_layers or []), *range(self.first_k_dense_replace)}, self.decoder_sparse_step
        numbers = range(self.num_hidden_layers)
        is_sparse = [self.num_experts != 0 and i not in dense and (i + 1) % step == 0 for i in numbers]
        mlp = MlpSpec(self.intermediate_size)
        experts = self.experts(**others) if any(is_sparse) else mlp
        return [experts if sparse else mlp for sparse in is_sparse]

    def mlps_beside_shared(self: Any, router: RouterSpec) -> list[MlpSpec | ExpertsSpec]:
        """Return `mlps` with this router and with a shared expert. All tokens use `n_shared_experts` shared experts;
        these are computed as one shared expert with their total size.
        """
        shared_size = self.n_shared_experts * self.moe_intermediate_size
        return self.mlps(router=router, shared_size=shared_size, shared_gated=False)

    def experts(self: Any, **others: Any) -> ExpertsSpec:
        """Return the spec of the experts that these settings describe. `others`: further fields of the spec.

        Raise ModelError if num_experts is below num_experts_per_tok or above 65,536.
        """
        if not self.num_experts_per_tok <= self.num_experts <= MOST_EXPERTS:
            raise ModelError(
                f"num_experts in config.json must be from num_experts_per_tok = {self.num_experts_per_tok} to "
                f"{MOST_EXPERTS} (got {brief(self.num_experts)}); serve another model"
            )
        return ExpertsSpec(self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size, **others)

    def decoder(
        self: Any, architecture: str, layers: Sequence[LayerSpec], rotations: Sequence[RotationSpec], **others: Any
    ) -> DecoderSpec:
        """Return the spec of a decoder with these layers. The last norm has the spec of the layers' norms. `others`:
        further fields of the spec. The correction bias of routers is held in float32.
        """
        if any(isinstance(layer.mlp, ExpertsSpec) and layer.mlp.router.correction for layer in layers):
            others["held"] = {CORRECTION_ROLE: WeightSpec(torch.float32), **others.get("held", {})}
        return DecoderSpec(
            architecture=architecture,
            dtype=self.dtype or torch.float32,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            layers=tuple(layers),
            rotations=tuple(rotations),
            norm=layers[0].norm,
            tie_word_embeddings=self.tie_word_embeddings,
            **others,
        )

    def rotation(self: Any, layer_type: str | None = None) -> RotationSpec:
        """Return the rotation of all layers, or of the layers of one type if each type has its own rotation.

        Raise ModelError for a rotation that is not supported or not valid, or that covers only a part of each
        head.
        """
        parameters = self.rope_parameters if layer_type is None else self.rope_parameters[layer_type]
        if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
            found = brief(part)
            raise ModelError(f"partial_rotary_factor in config.json must be 1.0 (got {found}); serve another model")
        return self._rotation(parameters, layer_type)

    def partial_rotation(self: Any, also: str = "") -> tuple[RotationSpec, int | None]:
        """Return the rotation of all layers, and the value of `AttentionSpec.rotated`. The rotation may cover only a
        part of each head. `also`: a type of rotation that the family supports in addition to SUPPORTED_ROPE.

        Raise ModelError for a rotation that is not supported or not valid, or that does not fit a head.
        """
        rotation = self._rotation(self.rope_parameters, also=also)
        rotated = 2 * len(rotation.inv_freq)
        if not 0 < rotated <= self.head_dim:
            raise self._unfit_part(self.rope_parameters.get("partial_rotary_factor", 1.0))
        return rotation, None if rotated == self.head_dim else rotated

    def _rotation(self: Any, parameters: dict[str, Any], layer_type: str | None = None, also: str = "") -> RotationSpec:
        kind = parameters.get("rope_type")
        if kind not in (*SUPPORTED_ROPE, also) or any(isinstance(value, dict) for value in parameters.values()):
            raise ModelError(
                f"rope_type in config.json must be one of {', '.join(SUPPORTED_ROPE)} for each type of layer (got "
                f"{brief([*parameters.items()])}); serve another model"
            )
        part = parameters.get("partial_rotary_factor", 1.0)
        if isinstance(part, int | float) and not part <= 1.0:  # checked before the frequencies take memory
            raise self._unfit_part(part)
        try:
            inv_freq, scale = self._inv_freq(kind, parameters, layer_type)
        except ModelError:
            raise
        except Exception as error:
            raise _broken(error) from error
        if not (inv_freq.isfinite() & (inv_freq > 0)).all() or not 0 < scale < float("inf"):
            raise ModelError(
                f"rope parameters in config.json do not give a valid rotation (got {brief([*parameters.items()])}); "
                "correct the file"
            )
        return RotationSpec(tuple(inv_freq.tolist()), scale, _axes(parameters, len(inv_freq)))

    def _unfit_part(self: Any, part: Any) -> ModelError:
        return ModelError(
            f"partial_rotary_factor in config.json must rotate from 2 to {self.head_dim} elements of a head (got "
            f"{brief(part)}); correct the file"
        )

    def _inv_freq(
        self: Any, kind: str, parameters: dict[str, Any], layer_type: str | None
    ) -> tuple[torch.Tensor, float]:
        if kind != "default":
            of_type = {} if layer_type is None else {"layer_type": layer_type}
            inv_freq, scale = _rope_function(kind)(self, torch.device("cpu"), **of_type)
            return inv_freq, math.fsum([scale])  # raises unless `scale` is a number that fits in a float
        size = int(self.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def original_length(parameters: Mapping[str, Any]) -> int:
    """Return `original_max_position_embeddings` of a rotation. Raise ModelError if the setting is missing or out of
    range.
    """
    length, most = parameters.get("original_max_position_embeddings"), _MOST["max_position_embeddings"]
    if type(length) is not int or not 1 <= length <= most:
        raise ModelError(
            f"original_max_position_embeddings in config.json must be an integer from 1 to {most} (got "
            f"{brief(length)}); correct the file"
        )
    return length


def _axes(parameters: Mapping[str, Any], num_pairs: int) -> tuple[int, ...]:
    """Return the axis of each pair (`RotationSpec.axes`), if positions have several axes. By default, the pairs of an
    axis are consecutive. If `mrope_interleaved` is set, the axes take turns; once an axis has all its pairs, its turns
    go to the first axis.
    """
    if (sections := parameters.get("mrope_section")) is None:
        return ()
    is_list = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
    if not is_list or len(sections) != 3 or sum(sections) != num_pairs:
        raise ModelError(
            f"mrope_section in config.json must have three numbers with the sum {num_pairs} (got {brief(sections)}); "
            "correct the file"
        )
    if parameters.get("mrope_interleaved"):
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_pairs))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def _rope_function(kind: str) -> Callable[..., Any]:
    """Return transformers' function for a kind of rotation. Raise ModelError if the function is missing or takes other
    arguments than expected.
    """
    function = ROPE_INIT_FUNCTIONS.get(kind, lambda: None)
    arguments = {*inspect.signature(function).parameters}
    if arguments != _ROPE_ARGUMENTS:
        what = f"the rotation {kind} takes {', '.join(sorted(arguments)) or 'nothing, since it is missing'}"
        raise ModelError(untested("transformers", f"{what}, but trueroll expects {', '.join(sorted(_ROPE_ARGUMENTS))}"))
    return function


_KEYS = _DTYPE_KEYS | _ROPE_KEYS | set(Settings.__annotations__)


def read_settings(
    fill: Callable[[dict[str, Any]], dict[str, Any]],
    raw: dict[str, Any],
    quantized: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> Any:
    """Return the `Settings` in `raw`, the content of config.json.

    `fill`: a function that adds the settings that a file may omit. `quantized`: the quantization methods that
    checkpoints of the family may have in addition to the methods of all families (`stored`). `names`: maps the names of
    settings to alternative names that the file may use. Raise ModelError for a broken file, for a checkpoint with any
    other quantization, and for per-layer settings, which no family supports.
    """
    read_stored(raw.get("quantization_config"), quantized)
    raw = _with_own_names(raw, names or {})
    for name in ("rope_parameters", "rope_scaling"):
        if raw.get(name) and not isinstance(raw[name], dict):
            raise ModelError(f"{name} in config.json must be a map (got {brief(raw[name])}); correct the file")
    if raw.get("per_layer_config"):
        found = brief(raw["per_layer_config"])
        raise ModelError(f"per_layer_config in config.json is not supported (got {found}); serve another model")
    try:
        # Copy `raw`, since `fill` changes the map.
        filled = fill(deepcopy({key: value for key, value in raw.items() if key in _KEYS}))
        return Settings(**filled)
    except Exception as error:
        raise _broken(error, names) from error


def fill_layer_types(raw: dict[str, Any], is_other: Callable[[int], bool], other: str = SLIDING) -> dict[str, Any]:
    """Return `raw` with `layer_types`. In a file without `layer_types`, layer i gets `other` if `is_other(i)` is true,
    and FULL otherwise.
    """
    count = raw.get("num_hidden_layers")
    # `num_hidden_layers` has not been validated yet.
    if raw.get("layer_types") is None and isinstance(count, int) and count <= _MOST["num_hidden_layers"]:
        raw["layer_types"] = [other if is_other(i) else FULL for i in range(count)]
    return raw


def fill_rotations(raw: dict[str, Any], theta: Mapping[str, float]) -> dict[str, Any]:
    """Return `raw` with `rope_parameters` for each type of layer, as in newer files.

    `theta`: the default `rope_theta` of each type. `rope_scaling` applies to full attention.
    """
    given, scaling = raw.pop("rope_parameters", None) or {}, raw.pop("rope_scaling", None) or {}
    ropes = {kind: given.get(kind) or {"rope_type": "default"} for kind in (FULL, SLIDING)}
    ropes[FULL] |= scaling
    raw["rope_parameters"] = {
        kind: {"rope_type": rope.get("type", "default"), "rope_theta": theta[kind]} | rope
        for kind, rope in ropes.items()
    }
    return raw


def _broken(error: Exception, names: Mapping[str, str] | None = None) -> ModelError:
    cause = said(f"{type(error).__name__}: {error}")
    for name, own in (names or {}).items():
        cause = cause.replace(f"'{name}'", f"'{own}'")
    return ModelError(f"config.json has an invalid setting: {cause}; correct the file")


def _with_own_names(raw: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `raw` with additional entries: each setting that the file has under an alternative name also gets an entry
    under its name in `Settings`. `names`: as in `read_settings`. Raise ModelError if the file has a setting under both
    names, with different values.
    """
    found = {name: own for name, own in names.items() if own in raw and own != name}
    for name, own in found.items():
        if name in raw and raw[name] != raw[own]:
            both = f"{brief(raw[name])} and {brief(raw[own])}"
            raise ModelError(f"{name} and {own} in config.json must be equal (got {both}); correct the file")
    return raw | {name: raw[own] for name, own in found.items()}


def without_rotation(rotation: RotationSpec) -> RotationSpec:
    """Return a rotation with as many pairs as `rotation`, all with frequency 0, so that q and k stay unchanged."""
    return RotationSpec((0.0,) * len(rotation.inv_freq))


def softmax_router(settings: Any) -> RouterSpec:
    """Return a router with a softmax over the chosen experts if `norm_topk_prob` is set, or else over all experts."""
    return RouterSpec("softmax_of_chosen" if settings.norm_topk_prob else "softmax")


def grouped_router(settings: Any, score: Score, **others: Any) -> RouterSpec:
    """Return a router with the groups, the normalization and the scale of DeepSeek V3, which many families share.
    `others`: further fields of the spec.

    Raise ModelError if the groups are not of equal size, if a group has a single expert, or if the kept groups have
    fewer experts than a token needs.
    """
    groups, kept, count = settings.n_group, settings.topk_group, settings.num_experts
    group, top_k = count // groups, settings.num_experts_per_tok
    is_unfit = count % groups or group < 2 or kept * group < top_k
    if kept > groups or (groups > 1 and is_unfit):
        raise ModelError(
            f"n_group in config.json must divide {count} experts into equal groups of at least two, and topk_group of "
            f"these groups must have at least {top_k} experts (got n_group = {groups} and topk_group = {kept}); serve "
            "another model"
        )
    eps = 1e-20 if settings.norm_topk_prob else 0.0
    normed = dict(normed=settings.norm_topk_prob, eps=eps, scale=float(settings.routed_scaling_factor))
    return RouterSpec(score, groups=groups, kept_groups=kept, **normed, **others)


def expect(settings: Any, **others: Any) -> None:
    """Raise ModelError unless all `settings` are supported.

    `others`: the required values of additional settings. If `others` names a setting that is always checked, the value
    in `others` replaces the default requirement.
    """
    faults = {
        "attention_bias": (bool(settings.attention_bias), False),
        "mlp_bias": (bool(settings.mlp_bias), False),
        "use_bidirectional_attention": (bool(settings.use_bidirectional_attention), False),
        "attn_logit_softcapping": (settings.attn_logit_softcapping, None),
        "final_logit_softcapping": (settings.final_logit_softcapping, None),
        "head_dim % 2": (settings.head_dim % 2, 0),
        "num_attention_heads % num_key_value_heads": (settings.num_attention_heads % settings.num_key_value_heads, 0),
        "linear_num_value_heads % linear_num_key_heads": (
            settings.linear_num_value_heads % settings.linear_num_key_heads,
            0,
        ),
        **{name: (getattr(settings, name), wanted) for name, wanted in others.items()},
    }
    for name, (found, wanted) in faults.items():
        if found != wanted:
            raise ModelError(f"{name} in config.json must be {wanted!r} (got {brief(found)}); serve another model")
