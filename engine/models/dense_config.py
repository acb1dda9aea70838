"""The shapes and constants of a dense decoder, from the config.json of a Llama, Qwen2 or Qwen3 checkpoint.

Promises that what the decoder does not compute is refused. transformers reads and checks the file, but its own classes
for the architectures are not used: they import its modelling code, which takes 150 MB.
"""

# Without `from __future__ import annotations`: of annotations that are strings `strict` checks no types.

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


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
    def from_folder(cls, folder: Path, raw: dict[str, Any]) -> "DenseConfig":
        """Reads `raw`, what config.json of `folder` holds. Raise ModelError for what the decoder does not compute."""
        architecture = _architecture(folder, raw)
        file = _parse(folder, raw)
        _check_supported(folder, file)
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


def _check_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"expected at least 1, found {size}")


_size = partial(validated_field, _check_size)


@strict
class _ConfigFile(PreTrainedConfig):
    """What config.json says of the decoder, in the names of transformers, which fills in `dtype`, `rope_parameters`."""

    vocab_size: int = _size()
    hidden_size: int = _size()
    intermediate_size: int = _size()
    num_hidden_layers: int = _size()
    num_attention_heads: int = _size()
    max_position_embeddings: int = _size()
    num_key_value_heads: int | None = _size(default=None)
    head_dim: int | None = _size(default=None)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: Any = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False

    def __post_init__(self, **others: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**others)


def _architecture(folder: Path, raw: dict[str, Any]) -> str:
    name = (raw.get("architectures") or ["none"])[0]
    if name not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{folder}: expected an architecture of {supported}, found {name}; serve another model")
    return name


def _parse(folder: Path, raw: dict[str, Any]) -> Any:
    try:
        return _ConfigFile(**raw)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ModelError(
            f"{folder}/config.json: expected what transformers can read, found a fault: {cause}; correct the file"
        ) from error


def _check_supported(folder: Path, file: Any) -> None:
    faults = {
        "hidden_act": (file.hidden_act, "silu"),
        "attention_bias": (file.attention_bias, False),
        "mlp_bias": (file.mlp_bias, False),
        "use_sliding_window": (file.use_sliding_window, False),
        "head_dim % 2": (file.head_dim % 2, 0),
        "num_attention_heads % num_key_value_heads": (file.num_attention_heads % file.num_key_value_heads, 0),
    }
    for name, (found, expected) in faults.items():
        if found != expected:
            raise ModelError(
                f"{folder}: expected {name} = {expected!r} in config.json, found {found!r}; serve another model"
            )


def _rope(folder: Path, file: Any) -> tuple[Tensor, float]:
    """(inv_freq, scale) of the checkpoint's rope variant."""
    parameters = file.rope_parameters
    kind = parameters["rope_type"]
    if kind not in SUPPORTED_ROPE:
        raise ModelError(
            f"{folder}: expected a rope_type of {', '.join(SUPPORTED_ROPE)}, found {kind}; serve another model"
        )
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](file, torch.device("cpu"))
    exponents = torch.arange(0, file.head_dim, 2, dtype=torch.int64).float() / file.head_dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0
