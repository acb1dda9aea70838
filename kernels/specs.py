"""What a decoder is made of, as plain numbers: the one description that worker and trainer read.

A family (`families`) makes a `DecoderSpec` of a config.json. `layer` defines what a layer of such a spec computes,
`contract` the ops that it is made of, and each backend says which specs it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class NormSpec:
    """A root mean square norm (Zhang and Sennrich 2019). `zero_centered`: it multiplies by 1 + weight."""

    eps: float
    zero_centered: bool = False


@dataclass(frozen=True)
class RotationSpec:
    """A rotary embedding (Su et al. 2021). `inv_freq`: the float32 frequencies of the pairs of a head, head_dim / 2 of
    them. `scale`: multiplies cosines and sines.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped heads.

    `scale`: multiplies the scores. `rotation`: which of the decoder's rotations turns q and k. `window`: a query sees
    so many tokens, itself included; None: all before it. `soft_cap`: a score s becomes soft_cap * tanh(s / soft_cap).
    `qk_norm`: of q and k before they are rotated, each head by itself or, with `qk_norm_over_heads`, all heads at once.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotation: int = 0
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over_heads: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: down(activation(gate(x)) * up(x)). `gelu_tanh` is the approximation of GELU by a tanh."""

    intermediate_size: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class LayerSpec:
    """A mixer of tokens and an MLP, each added to what went into it.

    `norm` stands before what each of them reads, after what it adds, or at both places.
    """

    mixer: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    norm_before: bool = True
    norm_after: bool = False


# The weights of a layer by their role, and the names that most checkpoints give them.
LAYER_NAMES = {
    "mixer_norm.before": "input_layernorm.weight",
    "mixer.q": "self_attn.q_proj.weight",
    "mixer.k": "self_attn.k_proj.weight",
    "mixer.v": "self_attn.v_proj.weight",
    "mixer.q_bias": "self_attn.q_proj.bias",
    "mixer.k_bias": "self_attn.k_proj.bias",
    "mixer.v_bias": "self_attn.v_proj.bias",
    "mixer.q_norm": "self_attn.q_norm.weight",
    "mixer.k_norm": "self_attn.k_norm.weight",
    "mixer.o": "self_attn.o_proj.weight",
    "mlp_norm.before": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder, and the names of its weights in a checkpoint.

    `dtype`: the checkpoint's own. `embed_scale`: multiplies embeddings, rounded to their dtype. `norm`: after the last
    layer. `names`: of a layer's weights by role, without `model.layers.N.`.
    """

    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    rotations: tuple[RotationSpec, ...]
    norm: NormSpec
    embed_scale: float = 1.0
    tie_word_embeddings: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)

    def __hash__(self) -> int:
        # Of a few fields, as each module of an aligned model looks its backend up by it.
        return hash((self.architecture, self.vocab_size, self.hidden_size, len(self.layers)))
