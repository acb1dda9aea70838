"""What a decoder is made of, as plain numbers: the one description that worker and trainer read.

A family (`families`) makes a `DecoderSpec` of a config.json. `layer` defines what a layer of such a spec computes,
`contract` the ops that it is made of, and each backend says which specs it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh", "sigmoid", "clamped_silu"]


@dataclass(frozen=True)
class NormSpec:
    """A root mean square norm (Zhang and Sennrich 2019). `zero_centered`: it multiplies by 1 + weight."""

    eps: float
    zero_centered: bool = False


@dataclass(frozen=True)
class RotationSpec:
    """A rotary embedding (Su et al. 2021). `inv_freq`: the float32 frequencies of the pairs of a head that turn.
    `scale`: multiplies cosines and sines. `axes`: where positions have several axes, such as time, row and column
    (Wang et al. 2024, Qwen2-VL), the one that turns each pair; (): the first one turns all.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped heads.

    `scale`: multiplies the scores. `rotation`: which of the decoder's rotations turns q and k. `window`: a query sees
    so many tokens, itself included; None: all before it. `soft_cap`: a score s becomes soft_cap * tanh(s / soft_cap).
    `qk_norm`: of q and k before they are rotated, each head by itself or, with `qk_norm_over_heads`, all heads at once.
    `output_gate`: what a head attends to is multiplied by the sigmoid of a gate, which the product with q's weights
    gives behind each head's query. `rotated`: how many elements of a head are rotated, the first ones; None: all.
    `sinks`: each head has one score more, a weight, that takes its part of the softmax and has no value (Xiao et al.
    2023). `o_bias`: the product that leads back to hidden states has a bias.
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
    output_gate: bool = False
    rotated: int | None = None
    sinks: bool = False
    o_bias: bool = False


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net (Yang et al. 2024) behind a short causal convolution: a mixer whose memory is a state.

    Each value head has a state [key_head_dim, value_head_dim]; value heads in a row share a key head, each key head as
    many. `kernel_size`: tokens that the convolution of q, k and v sees, this one included. `norm`: of each head's
    output, before a gate multiplies it. `joined`: q, k, v and that gate are the product of one matrix, and the gates of
    the recurrence that of another, whose rows go key head by key head; else each of the four has a matrix.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    norm: NormSpec
    joined: bool = False

    @property
    def key_size(self) -> int:
        """Of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Of the values of all heads, and of their gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of what a sequence's recurrence has come to, in float32."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    @property
    def tail_shape(self) -> tuple[int, int]:
        """Of the last inputs of a sequence's convolution, in the model's dtype."""
        return self.kernel_size - 1, self.channels


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: down(activation(gate(x)) * up(x)). `gelu_tanh` is the approximation of GELU by a tanh."""

    intermediate_size: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of gated MLPs (Shazeer et al. 2017): each token goes to `top_k` of `num_experts`, whose outputs are
    added, each times its gate.

    `normed`: the gates are the softmax over the router's scores of the chosen experts, not over those of all.
    `shared_size`: the intermediate size of a further expert, which all tokens go through, times the sigmoid of a score
    of its own; 0: none. `bias`: the router and the experts have biases. `transposed`: checkpoints hold the experts'
    matrices as [columns, rows], and rows of gate and up in turn.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Activation = "silu"
    normed: bool = True
    shared_size: int = 0
    bias: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """A mixer of tokens and an MLP, or experts, each added to what went into it.

    `norm` stands before what each of them reads, after what it adds, or at both places.
    """

    mixer: AttentionSpec | DeltaNetSpec
    mlp: MlpSpec | ExpertsSpec
    norm: NormSpec
    norm_before: bool = True
    norm_after: bool = False


# The weights of a layer by their role, and the names that most checkpoints give them. In place of the matrices of all
# `experts` a checkpoint may have those of each `expert`, by its number.
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
    "mixer.o_bias": "self_attn.o_proj.bias",
    "mixer.sinks": "self_attn.sinks",
    "delta.qkv": "linear_attn.in_proj_qkv.weight",
    "delta.z": "linear_attn.in_proj_z.weight",
    "delta.b": "linear_attn.in_proj_b.weight",
    "delta.a": "linear_attn.in_proj_a.weight",
    "delta.qkvz": "linear_attn.in_proj_qkvz.weight",
    "delta.ba": "linear_attn.in_proj_ba.weight",
    "delta.convolution": "linear_attn.conv1d.weight",
    "delta.decay": "linear_attn.A_log",
    "delta.bias": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm.weight",
    "delta.o": "linear_attn.out_proj.weight",
    "mlp_norm.before": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.bias",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "experts.down": "mlp.experts.down_proj",
    "experts.down_bias": "mlp.experts.down_proj_bias",
    "expert.gate": "mlp.experts.{}.gate_proj.weight",
    "expert.up": "mlp.experts.{}.up_proj.weight",
    "expert.down": "mlp.experts.{}.down_proj.weight",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.score": "mlp.shared_expert_gate.weight",
}


@dataclass(frozen=True)
class Slice:
    """A part of a checkpoint's tensor: of `total` places along axis `dim` those from `start` on, as many as the weight
    has there.
    """

    dim: int
    start: int
    total: int


@dataclass(frozen=True)
class WeightSpec:
    """How a weight is held. `dtype`: its own, whatever the model's is; None: the model's. `part`: what it takes of the
    checkpoint's tensor; None: all of it.
    """

    dtype: torch.dtype | None = None
    part: Slice | None = None


PLAIN = WeightSpec()


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder, and the names of its weights in a checkpoint.

    `dtype`: the checkpoint's own. `embed_scale`: multiplies embeddings, rounded to their dtype. `norm`: after the last
    layer. `names`: of a layer's weights by role, without `model.layers.N.`. `renamed`: how names in a checkpoint may
    begin, and which beginning that stands for. `others`: how the names of a checkpoint's other parts begin, which are
    not of the decoder. `pieces`: into how many pieces K is cut in each product that leads back to hidden states
    (`Backend.project_back`), a power of two; worker and trainer compute with the same. `held`: how weights of a layer
    are held, by role; those that it does not name are whole, in the model's dtype.
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
    renamed: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    pieces: int = 1
    held: Mapping[str, WeightSpec] = field(default_factory=dict)

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The mixers of the layers that have a KV cache."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]

    @property
    def delta_nets(self) -> list[DeltaNetSpec]:
        """The mixers of the layers that keep a state."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNetSpec)]

    @cached_property
    def experts(self) -> list[ExpertsSpec]:
        """Of the layers that have experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers that have a KV cache, the full ones first: layers of one window are a group, with blocks of
        their own.
        """
        return tuple(sorted({mixer.window for mixer in self.attentions}, key=lambda window: window or 0))

    def own_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """By role, of the weights that are not held in `dtype`, the model's."""
        own = {role: held.dtype for role, held in self.held.items() if held.dtype is not None}
        return {role: found for role, found in own.items() if found != dtype}

    def own_name(self, name: str) -> str | None:
        """What the tensor that a checkpoint calls `name` is called here; None if it is of another part."""
        if name.startswith(self.others):
            return None
        beginning = next((other for other in self.renamed if name.startswith(other)), "")
        return self.renamed.get(beginning, "") + name.removeprefix(beginning)

    def __hash__(self) -> int:
        # Of a few fields, as each module of an aligned model looks its backend up by it.
        return hash((self.architecture, self.vocab_size, self.hidden_size, len(self.layers)))
