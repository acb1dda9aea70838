"""The description of a decoder in plain numbers, which worker and trainer both read.

A family (see `families`) converts a config.json to a `DecoderSpec`. `layer` defines the computation of a layer, and
`contract` defines the ops of a layer. Each backend reports the specs that it supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch

from .cache_formats import AUTO, CacheFormat
from .quantization import Format
from .spellings import own_name

Activation = Literal["silu", "gelu", "gelu_tanh", "sigmoid", "clamped_silu", "relu"]
Score = Literal["softmax", "softmax_of_chosen", "sigmoid"]


HEAD_ROLE = "head"
"""The role of the head in `DecoderSpec.held`, which gives a rank's part of the head (`WeightSpec.part`). A head that is
tied to the embeddings has a part too.
"""
PIECE_UNIT = 128
"""The columns of an MLP's `down` are cut into pieces at multiples of this number."""


@dataclass(frozen=True)
class Pieces:
    """The pieces into which the columns of a weight are cut. `count` is a power of two.

    Piece i holds the columns [i * length, (i + 1) * length). The last pieces may be shorter or empty. `length` is not
    read if there is only one piece.
    """

    count: int = 1
    length: int = 0

    def bounds(self, columns: int) -> list[tuple[int, int]]:
        """For a weight with this many columns, return the bounds of each piece: its first column, and the column after
        its last one.
        """
        if self.count == 1:
            return [(0, columns)]
        ends = [min(i * self.length, columns) for i in range(self.count + 1)]
        return list(zip(ends[:-1], ends[1:], strict=True))


WHOLE = Pieces()


def pieces_of(count: int, columns: int, unit: int) -> Pieces:
    """Cut this many columns into `count` pieces of equal length, rounded up to a multiple of `unit`."""
    return Pieces(count, -(-columns // (count * unit)) * unit)


@dataclass(frozen=True)
class NormSpec:
    """A root mean square norm (Zhang and Sennrich 2019). `zero_centered`: multiply by 1 + weight."""

    eps: float
    zero_centered: bool = False


@dataclass(frozen=True)
class LayerNormSpec:
    """A layer norm with weight and bias (Ba et al. 2016)."""

    eps: float


@dataclass(frozen=True)
class RotationSpec:
    """A rotary embedding (Su et al. 2021).

    `inv_freq`: the float32 frequencies of the rotated pairs of elements in a head. `scale`: multiplies cosines and
    sines. Positions may have several axes, such as time, row and column (Wang et al. 2024, Qwen2-VL). `axes`: for each
    pair, the axis of the positions by which the pair is rotated; () if all pairs use the first axis.
    `q_growth`: a pair (beta, length): after the rotation, a query at
    position p is multiplied by 1 + beta * ln(1 + floor(p / length)), as in Llama 4; None for no factor.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    axes: tuple[int, ...] = ()
    q_growth: tuple[float, int] | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped heads, causal unless `AttentionBatch.ends` is set.

    `scale`: multiplies the scores. `rotation`: index of the decoder's rotation for q and k. `window`: the number of
    tokens that a query sees, up to and including its own token; None for all. `soft_cap`: a score s becomes soft_cap *
    tanh(s / soft_cap). `qk_norm`: the norm of q and k before rotation. The norm covers each head separately. If
    `qk_norm_over_heads` is set, the norm covers all heads at once. `output_gate`: a head's output is multiplied by the
    sigmoid of a gate. For each head, the output of q's projection holds the query and then the gate; with `gate_apart`,
    a matrix of its own computes the gates. `rotated`: the number of leading elements of a head that are rotated; None
    for all elements. `interleaved`: elements 2i and 2i + 1 form a pair; otherwise, element i of the first half of the
    rotated elements and element i of the second half form a pair. `sinks`: the softmax of each head includes an extra
    score, which is a learned weight. The score has no value vector (Xiao et al. 2023). `o_bias`: the output projection
    has a bias. `joined`: one matrix computes q, k and v. `out_scale`: multiplies the result of the output projection.
    `kv_sharers`: the number of ranks that hold the same key-value heads. `cache_format`: the format of cached keys and
    values; None for the dtype of the model.
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
    gate_apart: bool = False
    rotated: int | None = None
    interleaved: bool = False
    sinks: bool = False
    o_bias: bool = False
    joined: bool = False
    out_scale: float = 1.0
    kv_sharers: int = 1
    cache_format: CacheFormat | None = None

    @property
    def value_dim(self) -> int:
        """The size of a head's output, which is an input of `o`."""
        return self.head_dim

    @property
    def cached_sizes(self) -> tuple[int, int]:
        """The sizes of the key and of the value that the cache holds for a token and a key-value head."""
        return self.head_dim, self.head_dim

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """The sizes of the vectors of a cached key, which are quantized one by one."""
        return (self.head_dim,)


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2), causal, with a KV cache of one key-value head.

    A token's hidden states are projected to a latent row of `latent_dim` elements, which is normalized, and to a key of
    `rope_dim` elements, which is rotated. All heads share the latent row and the key. The cache holds the latent row
    and the rotated key side by side as one key; the latent row is also the value. A head's query consists of `nope_dim`
    elements and `rope_dim` rotated elements. The head's matrix `k_up` converts the `nope_dim` elements to a query for
    the latent row. The head's matrix `v_up` converts the weighted sum of the latent rows to `value_dim` elements.

    `scale`: multiplies the scores. `rotation`: index of the decoder's rotation. `interleaved`: rotated pairs are
    neighbouring elements; otherwise, elements i and i + rope_dim / 2 form a pair. `q_rank`: the size of the row from
    which queries are computed; None if queries are computed from hidden states. `norm`: the norms of the latent row and
    of the row of size `q_rank`. `bias`: the output projection has a bias, and so have all projections of hidden states
    except `q`. `cache_format`: as in `AttentionSpec`.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    norm: NormSpec
    q_rank: int | None = None
    rotation: int = 0
    interleaved: bool = True
    bias: bool = False
    cache_format: CacheFormat | None = None

    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    out_scale: ClassVar[float] = 1.0

    @property
    def query_dim(self) -> int:
        """The size of a head's query before `k_up`."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """The size of a cached key, and of a query that is multiplied by cached keys."""
        return self.latent_dim + self.rope_dim

    @property
    def cached_sizes(self) -> tuple[int, int]:
        """The sizes of the key and of the value that the cache holds for a token. The value is a part of the key."""
        return self.head_dim, self.latent_dim

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """The sizes of the vectors of a cached key, which are quantized one by one."""
        return self.latent_dim, self.rope_dim


CachedSpec: TypeAlias = AttentionSpec | LatentSpec
"""A mixer with a KV cache."""


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net (Yang et al. 2024) after a short causal convolution: a token mixer with a recurrent state
    instead of a KV cache.

    Each value head has a state [key_head_dim, value_head_dim]. Each key head serves the same number of consecutive
    value heads. `kernel_size`: the number of tokens that the convolution of q, k and v sees, including the current one.
    `norm`: the norm of each head's output, before the output gate. `joined`: one matrix computes q, k, v and the output
    gate, and a second matrix computes the gates of the recurrence. The rows of both matrices are ordered by key head.
    Without `joined`, there are four matrices: one for q, k and v together, and one for each of the three gates.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    norm: NormSpec
    joined: bool = False

    out_scale: ClassVar[float] = 1.0

    @property
    def key_size(self) -> int:
        """The total size of the keys of all heads, which is also the total size of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """The total size of the values of all heads, which is also the size of the output gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: q, k and v side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a sequence's recurrent state. The state is stored in float32."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    @property
    def tail_shape(self) -> tuple[int, int]:
        """The shape of a sequence's tail. The tail holds the last inputs of the convolution, in the model's dtype."""
        return self.kernel_size - 1, self.channels

    @property
    def row_size(self) -> int:
        """The number of values that convolution and recurrence read for one token: q, k, v and two gates per head."""
        return self.channels + 2 * self.num_value_heads


@dataclass(frozen=True)
class Mamba2Spec:
    """A selective state space (Mamba 2, Dao and Gu 2024, arXiv 2405.21060) after a short causal convolution: a token
    mixer with a recurrent state instead of a KV cache.

    Each head has a state [state_size, head_dim]. The same number of consecutive heads forms a group. A group shares the
    vectors B and C, and `norm` covers the channels of a group; `norm` is None for a state space without a norm. The
    output gate comes before the norm, or after it if `norm_before_gate` is set. `kernel_size`: the number of tokens
    that the convolution of x, B and C sees, including the current one. `convolution_bias`: the convolution has a bias.
    `time_step_limit`: the least and the largest time step. `input_scales`: the factors by which the projections for the
    output gate, x, B, C and the time steps are multiplied; None without factors. `out_scale`: multiplies the result of
    the output projection.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm: NormSpec | None
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    convolution_bias: bool = True
    norm_before_gate: bool = False
    input_scales: tuple[float, float, float, float, float] | None = None
    out_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """The total size of all heads, which is also the size of the output gate."""
        return self.num_heads * self.head_dim

    @property
    def input_sizes(self) -> tuple[int, int, int, int, int]:
        """The sizes of the output gate, x, B, C and the time steps, in the order in which one matrix computes them."""
        return self.inner_size, self.inner_size, self.vector_size, self.vector_size, self.num_heads

    @property
    def vector_size(self) -> int:
        """The total size of the vectors B of all groups, which is also the total size of the vectors C."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: x, B and C side by side."""
        return self.inner_size + 2 * self.vector_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a sequence's recurrent state. The state is stored in float32."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def tail_shape(self) -> tuple[int, int]:
        """The shape of a sequence's tail. The tail holds the last inputs of the convolution, in the model's dtype."""
        return self.kernel_size - 1, self.channels

    @property
    def row_size(self) -> int:
        """The number of values that convolution and recurrence read for one token: x, B, C and a time step per head."""
        return self.channels + self.num_heads


RecurrentSpec = DeltaNetSpec | Mamba2Spec
"""A mixer with a recurrent state."""


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: down(activation(gate(x)) * up(x)). `gelu` is the GELU with the error function; `gelu_tanh`
    approximates it by a tanh.

    `gated`: if False, there is no gate, and the MLP is down(activation(up(x)) * up(x)). With `relu`, activation(up(x))
    * up(x) is the squared ReLU (So et al. 2021). `bias`: gate, up and down have biases. `joined`: one matrix computes
    gate and up. `gate_scale`: multiplies gate(x) before the activation. `out_scale`: multiplies the result of `down`.
    `unit`: the columns of `down` are cut into pieces at multiples of `unit`.
    """

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    joined: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    unit: int = PIECE_UNIT


@dataclass(frozen=True)
class RouterSpec:
    """How a router chooses the experts of a token, and computes their gates. `Backend.route` defines each step.

    `score`: the function from logits to scores. `softmax_of_chosen` covers only the logits of the chosen experts, and
    `softmax` the logits of all experts. `wide`: the logits are float32, and are not rounded to the model's dtype.
    `correction`: a float32 bias is added to the scores to choose experts, but not to compute gates (Wang et al. 2024,
    auxiliary-loss-free balancing). `groups`: the number of groups of neighbouring experts. Experts are chosen only from
    the `kept_groups` best groups, ranked by the sum of their `group_best` highest scores (or logits, unless
    `ranks_scores`); `group_best` is 1 or 2 (DeepSeek-AI 2024, DeepSeek-V2 and V3).

    `normed`: the scores of the chosen experts are divided by max(sum + `eps`, `floor`). `scale`: multiplies the gates.
    """

    score: Score = "softmax_of_chosen"
    wide: bool = False
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    normed: bool = False
    eps: float = 0.0
    floor: float = 0.0
    scale: float = 1.0

    @property
    def ranks_scores(self) -> bool:
        """Return whether experts are ranked by scores, not by logits."""
        return self.score == "sigmoid" or self.correction or self.groups > 1


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of gated MLPs (Shazeer et al. 2017). Each token goes to `top_k` of `num_experts` experts. The experts'
    outputs are multiplied by gates and added.

    `router`: how experts are chosen. `gated`: as in `MlpSpec`, for all experts. `latent_size`: the experts read and
    compute rows of this size; one product converts hidden states to these rows, and another product converts the sum of
    the outputs back. If `latent_size` is 0, the experts read and compute hidden states, as the shared expert always
    does. `shared_size`: the intermediate size of the shared expert; 0 if there is none. Every token goes to the shared
    expert. `shared_gated`: the shared expert's output is multiplied by the sigmoid of a learned score. `shared_joined`:
    one matrix computes gate and up of the shared expert. `bias`: the router and the experts have biases. `transposed`:
    checkpoints hold the experts' matrices as [columns, rows], and rows of gate and rows of up alternate.
    `or_transposed`: checkpoints may hold the matrices as [columns, rows], with rows that do not alternate.

    `held`: the experts that this rank holds, as a pair of the first id and the number; None for all experts.
    `shared_elsewhere`: there is a shared expert, but this rank holds none of its inner features. `unit`: as in
    `MlpSpec`, for the shared expert.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Activation = "silu"
    router: RouterSpec = RouterSpec()
    gated: bool = True
    latent_size: int = 0
    shared_size: int = 0
    shared_gated: bool = True
    shared_joined: bool = False
    bias: bool = False
    transposed: bool = False
    or_transposed: bool = False
    held: tuple[int, int] | None = None
    shared_elsewhere: bool = False
    unit: int = PIECE_UNIT

    @property
    def has_shared(self) -> bool:
        """Return whether there is a shared expert."""
        return self.shared_size > 0 or self.shared_elsewhere

    @property
    def own(self) -> tuple[int, int]:
        """The id of the first expert that this rank holds, and the number of its experts."""
        return (0, self.num_experts) if self.held is None else self.held


@dataclass(frozen=True)
class HeadSpec:
    """How the float32 products of hidden states and the head's weight become logits. Every op of the head applies the
    scale and the cap in float32.

    `scale`: multiplies a product. `soft_cap`: a scaled product s becomes soft_cap * tanh(s / soft_cap).
    """

    scale: float = 1.0
    soft_cap: float | None = None


PLAIN_HEAD = HeadSpec()


@dataclass(frozen=True)
class LayerSpec:
    """A layer: a token mixer (attention, latent attention, a delta net or a state space) followed by an MLP or experts.
    The mixer and the MLP each add their output to their input. The mixer or the MLP may be missing (None).

    `recurrent_mixer`: a second mixer beside `mixer`. If there is a second mixer, `mixer` has a KV cache. Both mixers
    read the same hidden states, and the sum of their outputs counts as the output of the mixer.

    If `norm_before` is set, `norm` applies before the mixer and before the MLP. If `norm_after` is set, `norm` applies
    after the mixer and after the MLP. `residual_scale`: multiplies the outputs of the mixer and of the MLP before they
    are added. `residual_scale` and the scales of mixer and MLP are rounded to float32, and each product with a scale is
    rounded to the dtype of the hidden states.
    """

    mixer: CachedSpec | RecurrentSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    norm: NormSpec
    norm_before: bool = True
    norm_after: bool = False
    residual_scale: float = 1.0
    recurrent_mixer: RecurrentSpec | None = None

    @property
    def cached(self) -> CachedSpec | None:
        """The mixer with a KV cache."""
        return self.mixer if isinstance(self.mixer, CachedSpec) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer with a recurrent state."""
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else self.recurrent_mixer


# The weights of a layer by role, with the names that most checkpoints give them. A checkpoint may have separate
# matrices for each numbered `expert` instead of the stacked matrices of all `experts`.
LAYER_NAMES = {
    "mixer_norm.before": "input_layernorm.weight",
    "mixer.q": "self_attn.q_proj.weight",
    "mixer.k": "self_attn.k_proj.weight",
    "mixer.v": "self_attn.v_proj.weight",
    "mixer.qkv": "self_attn.qkv_proj.weight",
    "mixer.q_bias": "self_attn.q_proj.bias",
    "mixer.k_bias": "self_attn.k_proj.bias",
    "mixer.v_bias": "self_attn.v_proj.bias",
    "mixer.q_norm": "self_attn.q_norm.weight",
    "mixer.k_norm": "self_attn.k_norm.weight",
    "mixer.gate": "self_attn.gate_proj.weight",
    "mixer.o": "self_attn.o_proj.weight",
    "mixer.o_bias": "self_attn.o_proj.bias",
    "mixer.sinks": "self_attn.sinks",
    "latent.q_a": "self_attn.q_a_proj.weight",
    "latent.q_a_bias": "self_attn.q_a_proj.bias",
    "latent.q_norm": "self_attn.q_a_layernorm.weight",
    "latent.q_b": "self_attn.q_b_proj.weight",
    "latent.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "latent.kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "latent.kv_norm": "self_attn.kv_a_layernorm.weight",
    "latent.kv_b": "self_attn.kv_b_proj.weight",
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
    "mamba.inputs": "mamba.in_proj.weight",
    "mamba.convolution": "mamba.conv1d.weight",
    "mamba.convolution_bias": "mamba.conv1d.bias",
    "mamba.decay": "mamba.A_log",
    "mamba.bias": "mamba.dt_bias",
    "mamba.skip": "mamba.D",
    "mamba.norm": "mamba.norm.weight",
    "mamba.o": "mamba.out_proj.weight",
    "mlp_norm.before": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.gate_up": "mlp.gate_up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.bias",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "latent.before": "mlp.fc1_latent_proj.weight",
    "latent.after": "mlp.fc2_latent_proj.weight",
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
    "shared.gate_up": "mlp.shared_expert.gate_up_proj.weight",
    "shared.score": "mlp.shared_expert_gate.weight",
}
# As LAYER_NAMES, for families that call the shared expert `shared_experts`.
SHARED_EXPERTS_NAMES = {role: name.replace("shared_expert.", "shared_experts.") for role, name in LAYER_NAMES.items()}


@dataclass(frozen=True)
class TowerSpec:
    """A vision tower: a transformer that turns an image into embeddings. The spec includes the names of the tower's
    weights.

    An image is a grid of square patches. Neighbouring `merge` x `merge` patches form a block. Each block becomes one
    embedding of size `out_size`, which replaces the embedding of one token. The patches of a block are neighbouring
    rows of the tower's input, and the blocks follow each other row by row.

    `channels`, `frames`, `patch_size`: a patch has channels * frames * patch_size**2 values. With several frames, each
    frame of a still image has the same values, and a video is given in groups of `frames` frames. `patch_bias`: whether
    the product that embeds the patches has a bias. `table_side`: the side of a square grid of learned positions, which
    are interpolated to the size of the image; 0 for a tower without learned positions. `rotation`: the rotation of q
    and k by the row and column of the patch, or None.

    `norm`: the norms of the layers. `gated`: the MLP is gated, as an `MlpSpec`; otherwise, it is
    down(activation(up(x))). All products of a layer have biases. `joined`: one matrix computes q, k and v. `window`:
    the side of the windows, in blocks, within which patches see each other; None without windows. `whole_layers`: the
    layers without windows. `last_norm`: a norm follows the last layer.

    `pooled`: the rows of a block are averaged and normalized, and one product without bias follows. Without `pooled`,
    the rows are normalized and joined, and an MLP with GELU follows (the merger). `merger_norm`: the norm that the
    merger applies, with and without `pooled`. `deepstack`: the layers after which a further merger computes a row for
    each block (Meng et al. 2024). The rows of the first deepstack merger are added to the hidden states after the
    decoder's first layer, the rows of the second merger after the second layer, and so on. Deepstack mergers join the
    rows of a block before they normalize the result.

    `placeholder`: the rows of an image replace the embeddings of tokens with this id. `video_placeholder`: the id of
    the tokens that stand for frames of a video; None if the model takes no videos. `sees_span`: in the decoder's
    attention, each token of an image sees all tokens of the image. `grid`: the only size of images that the tower
    takes, in rows and columns of patches; None for any size. `names`: weight names by role. The names of layers and of
    deepstack mergers contain `{}` in place of the number.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    num_layers: int
    out_size: int
    norm: NormSpec | LayerNormSpec
    merger_norm: NormSpec | LayerNormSpec
    activation: Activation
    names: Mapping[str, str]
    placeholder: int
    patch_size: int
    merge: int
    channels: int = 3
    frames: int = 1
    patch_bias: bool = True
    table_side: int = 0
    rotation: RotationSpec | None = None
    gated: bool = False
    joined: bool = True
    window: int | None = None
    whole_layers: frozenset[int] = frozenset()
    last_norm: LayerNormSpec | None = None
    pooled: bool = False
    deepstack: tuple[int, ...] = ()
    sees_span: bool = False
    grid: tuple[int, int] | None = None
    video_placeholder: int | None = None

    @property
    def patch_values(self) -> int:
        """The number of values of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_heads

    @property
    def row_size(self) -> int:
        """The length of a row of the tower's output: the embedding, and one part for each layer in `deepstack`."""
        return self.out_size * (1 + len(self.deepstack))

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of the tower's weights: their first two components."""
        return tuple({".".join(name.split(".")[:2]) + "." for name in self.names.values()})

    def num_tokens(self, rows: int, columns: int) -> int:
        """Return the number of tokens of an image with this many rows and columns of patches."""
        return rows * columns // self.merge**2


EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"
"""The names that most checkpoints give to the embeddings and to the norm after the last layer."""
MTP_PREFIX = "mtp."
"""The prefix of the names of the MTP module's weights in a checkpoint."""


def is_of_mtp(name: str) -> bool:
    """Return whether `name` is the name of a weight of the MTP module."""
    return name.startswith(MTP_PREFIX)


@dataclass(frozen=True)
class Slice:
    """A part of a checkpoint's tensor: some `ranges` along axis `dim`, which has length `total`.

    A range is a pair (start, length). Ranges are in ascending order and do not overlap. The part holds the ranges one
    after the other.
    """

    dim: int
    total: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """The length of the part along its axis."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True)
class WeightSpec:
    """How a weight is held.

    `dtype`: the dtype of the weight; None for the model's dtype. `part`: the part of the checkpoint's tensor that the
    weight holds; None for the whole tensor. `shape`: the shape of the checkpoint's tensor, if it differs from the shape
    of the weight; for vectors only. `format`: the format in which the weight's values are quantized; None if they are
    not quantized.
    """

    dtype: torch.dtype | None = None
    part: Slice | None = None
    shape: tuple[int, ...] | None = None
    format: Format | None = None


PLAIN = WeightSpec()
ROUTER_ROLE, CORRECTION_ROLE = "router", "router_correction"
"""The roles of a router's weights that may be float32 in a decoder of another dtype: `Backend.wide_linear` reads the
first, and `Backend.route` the second.
"""


class Stage(NamedTuple):
    """One of `size` stages, each of which computes some neighbouring layers (pipeline parallelism)."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether the stage computes the first layer, and so the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage computes the last layer, and so the last norm, the head and the MTP module."""
        return self.index == self.size - 1

    def layers(self, count: int) -> range:
        """Return the indices of the stage's layers in a decoder with `count` layers."""
        return range(count * self.index // self.size, count * (self.index + 1) // self.size)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder. The spec includes the names of the decoder's weights in a checkpoint.

    `dtype`: the dtype of the checkpoint. `embed_scale`: the embeddings are multiplied by this factor, in float32.
    `rounds_embed_scale`: the factor is first rounded to the dtype of the embeddings. `norm`: the norm after the last
    layer. `head`: how logits are computed from the products of hidden states and the head's weight. `embedding`,
    `last_norm`: the names of the embeddings and of the last norm's weight. `names`: a layer's weight names by role,
    without `model.layers.N.`. `renamed`, `respelled`: how names in a checkpoint become the decoder's names (see
    `spellings.Names`). `others`: prefixes of names; a tensor with such a prefix does not belong to the decoder.
    `pieces`: the number of pieces in which each product that projects back to the hidden size is summed, and the number
    of groups in which the outputs of a row's experts are added (see `kernels.pieces`). `ranks`: the number of ranks;
    this spec describes one of them (see `kernels.ranks`). `held`: maps the role of a weight to the `WeightSpec` that
    says how a layer holds the weight. Weights with roles not listed in `held` are whole and in the model's dtype.
    `stage`: the stage that this spec describes; `layers` has the layers of all stages. `mtp`: the layer of the model's
    multi-token prediction (MTP) module, which guesses the token after the next one; None without such a module.
    `serves_mtp`: whether the MTP module belongs to the decoder; otherwise, its tensors in a checkpoint are ignored.
    `tower`: the vision tower beside the decoder, or None. `serves_tower`: whether the tower belongs to the decoder;
    otherwise, its tensors in a checkpoint are ignored. `beside`: the prefixes of the names (after `renamed`) of the
    tensors of an unsupported tower. The tensors of an unsupported tower are ignored, and an aligned model refuses
    images. `quantization`: the setting that determined the formats in `held` (see `kernels.precision`).
    `kv_cache_dtype`: the setting that determined the `cache_format` of the layers (see `kernels.cache_formats`).
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
    rounds_embed_scale: bool = False
    head: HeadSpec = PLAIN_HEAD
    tie_word_embeddings: bool = False
    embedding: str = EMBEDDING
    last_norm: str = LAST_NORM
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    renamed: Mapping[str, str] = field(default_factory=dict)
    respelled: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    pieces: int = 1
    ranks: int = 1
    stage: Stage = Stage()
    held: Mapping[str, WeightSpec] = field(default_factory=dict)
    mtp: LayerSpec | None = None
    serves_mtp: bool = False
    tower: TowerSpec | None = None
    serves_tower: bool = False
    beside: tuple[str, ...] = ()
    quantization: str = "none"
    kv_cache_dtype: str = AUTO

    @property
    def own_layers(self) -> range:
        """The indices of the layers of this stage."""
        return self.stage.layers(len(self.layers))

    @property
    def holds_embeddings(self) -> bool:
        """Return whether the stage needs the embeddings."""
        return self.stage.is_first or (self.stage.is_last and (self.tie_word_embeddings or self.serves_mtp))

    @property
    def attentions(self) -> list[CachedSpec]:
        """The mixers with a KV cache, in the order of the layers."""
        return [mixer for layer in self.layers if (mixer := layer.cached) is not None]

    @property
    def mtp_attentions(self) -> list[AttentionSpec]:
        """The mixers of the layers of the MTP module, if the module belongs to the decoder."""
        layers = [] if self.served_mtp is None else [self.served_mtp]
        return [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]

    @property
    def recurrent(self) -> list[RecurrentSpec]:
        """The mixers with a recurrent state, in the order of the layers."""
        return [mixer for layer in self.layers if (mixer := layer.recurrent) is not None]

    @cached_property
    def experts(self) -> list[ExpertsSpec]:
        """The `ExpertsSpec` of each layer with experts, in the order of the layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec)]

    @property
    def own_experts(self) -> slice:
        """This stage's layers with experts, as a slice of the list of all layers with experts."""
        is_mixture, own = [isinstance(layer.mlp, ExpertsSpec) for layer in self.layers], self.own_layers
        return slice(sum(is_mixture[: own.start]), sum(is_mixture[: own.stop]))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers with a KV cache, full attention (None) first.

        Layers with the same window form a group, and each group has its own blocks.
        """
        return tuple(sorted({mixer.window for mixer in self.attentions}, key=lambda window: window or 0))

    def serving(self, mtp: bool, tower: bool) -> DecoderSpec:
        """Return a copy of the spec with or without MTP module and vision tower. `mtp`, `tower`: whether the module and
        the tower belong to the decoder, if the model has them.
        """
        return replace(self, serves_mtp=mtp and self.mtp is not None, serves_tower=tower and self.tower is not None)

    @property
    def served_mtp(self) -> LayerSpec | None:
        """The layer of the MTP module, if the module belongs to the decoder."""
        return self.mtp if self.serves_mtp else None

    @property
    def served_tower(self) -> TowerSpec | None:
        """The vision tower, if it belongs to the decoder."""
        return self.tower if self.serves_tower else None

    @property
    def left_out(self) -> tuple[str, ...]:
        """The prefixes of the names of tensors that do not belong to the decoder, such as the tensors of a vision tower
        that is not served.
        """
        others = tuple(other for other in self.others if not (self.serves_mtp and is_of_mtp(other))) + self.beside
        return others if self.tower is None or self.serves_tower else others + self.tower.prefixes

    @property
    def head_range(self) -> tuple[int, int]:
        """This rank's part of the LM head: the first token id, and the number of token ids."""
        part = self.held.get(HEAD_ROLE, PLAIN).part
        return (0, self.vocab_size) if part is None else part.ranges[0]

    def own_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return a dict from role to dtype, for the weights that are not held in the model's dtype `dtype`."""
        own = {role: held.dtype for role, held in self.held.items() if held.dtype is not None}
        return {role: found for role, found in own.items() if found != dtype}

    @property
    def own_formats(self) -> dict[str, Format]:
        """Return a dict from role to format, for the weights that are quantized."""
        return {role: held.format for role, held in self.held.items() if held.format is not None}

    @property
    def quantizes_activations(self) -> bool:
        """Whether products quantize their activations (`kernels.dynamic`)."""
        return any(format.activations is not None for format in self.own_formats.values())

    def own_name(self, name: str) -> str | None:
        """Return the decoder's name for a checkpoint's tensor; None if the tensor does not belong to the decoder."""
        return own_name(name, self)

    def __hash__(self) -> int:
        # Hash only a few fields, for speed: each module of an aligned model looks up its backend by spec.
        return hash((self.architecture, self.vocab_size, self.hidden_size, len(self.layers)))
