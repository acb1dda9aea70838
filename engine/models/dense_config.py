"""The shapes and constants of a dense decoder, from the config.json of a Llama, Qwen2 or Qwen3 checkpoint.

Promises that what the decoder does not compute is refused, and that no size is beyond `_MOST`, so that a list of all
layers is made in a blink whoever wrote the file. The base class of transformers' configurations checks the values and
brings old files up to date. Its classes for the architectures are not used: importing one imports torch's compiler too,
which takes 150 MB.
"""

# No `from __future__ import annotations` here: `strict` does not check types whose annotations are strings.

import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trueroll.errors import ModelError

from ..request import brief
from .files import said

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
# For each architecture what transformers takes for settings that a file leaves out, where they differ.
_DEFAULTS: dict[str, dict[str, int]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
# Of sizes: several times those of any dense decoder that was published, and their products stay far below 2**63.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**24,
}
# What `_ConfigFile` understands beside its fields.
_DTYPE_KEYS = {"dtype", "torch_dtype"}
_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"}


@dataclass(frozen=True)
class DenseConfig:
    """Shapes and constants of a dense decoder. `inv_freq`: float32 [head_dim / 2], with the rope variant applied."""

    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    inv_freq: Tensor
    rope_scale: float

    @classmethod
    def from_json(cls, raw: dict[str, Any], folder: Path) -> "DenseConfig":
        """The configuration in `raw`, the content of config.json. `folder` is named in errors.

        Raise ModelError for a file that is broken or describes what the decoder does not compute.
        """
        architecture = _architecture(folder, raw)
        file = _parse(folder, _DEFAULTS[architecture] | raw)
        _check_supported(folder, raw, file)
        inv_freq, rope_scale = _rope(folder, file)
        return cls(
            architecture=architecture,
            dtype=file.dtype or torch.float32,
            vocab_size=file.vocab_size,
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            num_layers=file.num_hidden_layers,
            num_heads=file.num_attention_heads,
            num_kv_heads=file.num_key_value_heads,
            head_dim=file.head_dim,
            max_position_embeddings=file.max_position_embeddings,
            rms_norm_eps=file.rms_norm_eps,
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=file.tie_word_embeddings,
            inv_freq=inv_freq,
            rope_scale=rope_scale,
        )


def _size(name: str, **options: Any) -> Any:
    def check(size: int | None) -> None:
        if size is not None and not 1 <= size <= _MOST[name]:
            raise ValueError(f"expected at least 1 and at most {_MOST[name]}, found {brief(size)}")

    return validated_field(check, **options)


def _check_eps(eps: float) -> None:
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"expected a finite number of at least 0, found {eps}")


@strict
class _ConfigFile(PreTrainedConfig):
    """The settings of config.json that the decoder needs, by transformers' names. The base class fills in `dtype` and
    `rope_parameters`, from the keys of older files too (`torch_dtype`, `rope_theta`, `rope_scaling`).
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
    rms_norm_eps: float = validated_field(_check_eps, default=1e-6)
    rope_parameters: Any = None
    tie_word_embeddings: bool = False
    attention_bias: Any = False
    mlp_bias: Any = False
    use_sliding_window: Any = False

    def __post_init__(self, **others: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**others)


_KEYS = _DTYPE_KEYS | _ROPE_KEYS | set(_ConfigFile.__annotations__)


def _architecture(folder: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in _DEFAULTS:
        supported = ", ".join(_DEFAULTS)
        raise ModelError(f"{folder}: expected an architecture of {supported}, found {brief(name)}; serve another model")
    return name


def _parse(folder: Path, raw: dict[str, Any]) -> Any:
    try:
        # A copy, as it fills in the dicts that it is given.
        return _ConfigFile(**deepcopy({key: value for key, value in raw.items() if key in _KEYS}))
    except Exception as error:
        raise _broken(folder, error) from error


def _broken(folder: Path, error: Exception) -> ModelError:
    cause = said(f"{type(error).__name__}: {error}")
    return ModelError(f"{folder}/config.json: expected a model's settings, found a fault: {cause}; correct the file")


def _check_supported(folder: Path, raw: dict[str, Any], file: Any) -> None:
    faults = {
        "hidden_act": (file.hidden_act, "silu"),
        "attention_bias": (bool(file.attention_bias), False),
        "mlp_bias": (bool(file.mlp_bias), False),
        "use_sliding_window": (bool(file.use_sliding_window), False),
        "partial_rotary_factor": (file.rope_parameters.get("partial_rotary_factor", 1.0), 1.0),
        "per_layer_config": (raw.get("per_layer_config") or None, None),
        "head_dim % 2": (file.head_dim % 2, 0),
        "num_attention_heads % num_key_value_heads": (file.num_attention_heads % file.num_key_value_heads, 0),
    }
    for name, (found, expected) in faults.items():
        if found != expected:
            raise ModelError(
                f"{folder}: expected {name} = {expected!r} in config.json, found {brief(found)}; serve another model"
            )


def _rope(folder: Path, file: Any) -> tuple[Tensor, float]:
    """(inv_freq, scale) of the checkpoint's rope variant."""
    parameters = file.rope_parameters
    kind = parameters.get("rope_type")
    if kind not in SUPPORTED_ROPE or any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError(
            f"{folder}: expected a rope_type of {', '.join(SUPPORTED_ROPE)} for all layers, found "
            f"{brief([*parameters.items()])}; serve another model"
        )
    try:
        inv_freq, scale = _inv_freq(file, kind)
    except Exception as error:
        raise _broken(folder, error) from error
    if not (inv_freq.isfinite() & (inv_freq > 0)).all() or not 0 < scale < float("inf"):
        raise ModelError(
            f"{folder}: expected rope parameters that rotate, found {brief([*parameters.items()])}; correct config.json"
        )
    return inv_freq, scale


def _inv_freq(file: Any, kind: str) -> tuple[Tensor, float]:
    if kind != "default":
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](file, torch.device("cpu"))
        return inv_freq, math.fsum([scale])  # takes numbers alone, and none beyond a float
    exponents = torch.arange(0, file.head_dim, 2, dtype=torch.int64).float() / file.head_dim
    return 1.0 / file.rope_parameters["rope_theta"] ** exponents, 1.0
