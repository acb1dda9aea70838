"""Random inputs of the ops, equality of bits, and sequences in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueroll.kernels.contract import MASK_BITS, AttentionBatch, Backend, ExpertsWeights, Layer, Rotation, Weight
from trueroll.kernels.layer import make_layer, turn
from trueroll.kernels.pieces import with_pieces
from trueroll.kernels.specs import (
    CORRECTION_ROLE,
    LAYER_NAMES,
    PLAIN,
    Activation,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RotationSpec,
    RouterSpec,
    WeightSpec,
)
from trueroll.kernels.stacks import StackLayout

from .backends import Served


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether the bits are equal. Zeros of different sign differ; NaN equals NaN."""
    assert left.dtype == right.dtype and left.shape == right.shape
    left_bytes, right_bytes = (
        x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy() for x in (left, right)
    )
    return np.array_equal(left_bytes, right_bytes)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(ops: Backend, matrix: Tensor) -> Weight:
    """Return a matrix [rows, columns] in the backend's layout."""
    weight = ops.new_weight(*matrix.shape, empty=partial(torch.empty, dtype=matrix.dtype))
    weight.copy_(matrix)
    return weight


def some_masks(rows: int, vocab_size: int) -> Tensor:
    """Return masks of `mask_logits`. Every third word has all bits, and every third word has none."""
    words = -(-vocab_size // MASK_BITS)
    masks = torch.randint(-(2**31), 2**31, (rows, words), generator=torch.Generator().manual_seed(8)).int()
    kind = (torch.arange(rows)[:, None] + torch.arange(words)) % 3
    return masks.masked_fill(kind == 1, -1).masked_fill(kind == 2, 0)


def filtered(ops: Backend, logits: Tensor, *filters: Tensor) -> Tensor:
    """Return `filter_logits` of a copy of the logits."""
    return ops.filter_logits(logits.clone(memory_format=torch.contiguous_format), *filters)


def strided(x: Tensor) -> Tensor:
    """Return a non-contiguous tensor with the same values."""
    strided = torch.stack((x, torch.zeros_like(x)), dim=-1)[..., 0]
    assert not strided.is_contiguous() or strided.numel() == 1
    return strided


NORM, ZERO_CENTERED = NormSpec(1e-5), NormSpec(1e-5, zero_centered=True)


def layer_spec(
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    activation: Activation = "silu",
    norm: NormSpec = NORM,
    before: bool = True,
    after: bool = False,
    experts: ExpertsSpec | None = None,
    mlp_bias: bool = False,
    residual_scale: float = 1.0,
    **attention: Any,
) -> LayerSpec:
    """Return a layer with experts, or with an MLP of few columns. `attention`: more fields of the spec of the layer's
    mixer.
    """
    mixer = AttentionSpec(heads, kv_heads, size, scale=0.1, **attention)
    return LayerSpec(mixer, experts or MlpSpec(77, activation, bias=mlp_bias), norm, before, after, residual_scale)


_GEMMA: dict[str, Any] = dict(activation="gelu_tanh", norm=ZERO_CENTERED, after=True, qk_norm=ZERO_CENTERED)
_OLMO: dict[str, Any] = dict(before=False, after=True, qk_norm=NORM, qk_norm_over_heads=True)
# Small versions of neighbouring layers of the families. Layers with a window have their own rotation.
FAMILY_LAYERS: dict[str, list[LayerSpec]] = {
    "mistral": [layer_spec(4, 2, 16, window=9)] * 2,
    "gemma3": [layer_spec(4, 2, 32, window=9, rotation=1, **_GEMMA)] * 2 + [layer_spec(4, 2, 32, **_GEMMA)],
    "olmo3": [layer_spec(3, 3, 80, window=9, rotation=1, **_OLMO), layer_spec(3, 3, 80, **_OLMO)],
    "qwen3_5": [layer_spec(4, 2, 32, norm=ZERO_CENTERED, qk_norm=ZERO_CENTERED, output_gate=True, rotated=8)] * 2,
    "glm4": [layer_spec(4, 2, 32, after=True, qkv_bias=True, rotated=16, interleaved=True)] * 2,
    "llama with biases": [layer_spec(4, 2, 32, qkv_bias=True, o_bias=True, mlp_bias=True)] * 2,
    "granite": [layer_spec(4, 2, 32, after=after, residual_scale=0.22) for after in (False, True)],
    "gemma2": [layer_spec(4, 2, 16, soft_cap=2.0, **_GEMMA), layer_spec(4, 2, 16, soft_cap=2.0, window=9, **_GEMMA)],
}
EXPERTS = ExpertsSpec(num_experts=9, top_k=3, intermediate_size=48)
SOFTMAX = RouterSpec("softmax")
_GPT_OSS: dict[str, Any] = dict(
    experts=ExpertsSpec(5, 2, 16, activation="clamped_silu", bias=True), qkv_bias=True, o_bias=True, sinks=True
)
_QWEN3_NEXT: dict[str, Any] = dict(norm=ZERO_CENTERED, qk_norm=ZERO_CENTERED, output_gate=True, rotated=8)
_GROUPED = RouterSpec("sigmoid", True, True, groups=3, kept_groups=2, normed=True, eps=1e-20, scale=2.5)
_UNGATED: dict[str, Any] = dict(shared_size=40, shared_gated=False)
# Layers with experts, and some layers with an MLP.
EXPERT_LAYERS: dict[str, list[LayerSpec]] = {
    "qwen3_moe": [layer_spec(4, 2, 32, qk_norm=NORM, experts=EXPERTS), layer_spec(4, 2, 32, qk_norm=NORM)] * 2,
    "gpt_oss": [layer_spec(4, 2, 16, window=9, **_GPT_OSS), layer_spec(4, 2, 16, **_GPT_OSS)],
    "qwen3_5_moe": [
        layer_spec(4, 2, 32, experts=replace(EXPERTS, num_experts=8, router=SOFTMAX, shared_size=40), **_QWEN3_NEXT)
    ]
    * 2,
    "glm4_moe": [
        layer_spec(4, 2, 32, qkv_bias=True, rotated=16),
        layer_spec(4, 2, 32, qkv_bias=True, rotated=16, experts=replace(EXPERTS, router=_GROUPED, **_UNGATED)),
    ],
    "norms after": [layer_spec(4, 2, 16, before=False, after=True, o_bias=True, experts=EXPERTS)],
}


def hidden_size(layers: Sequence[LayerSpec]) -> int:
    """Return a hidden size that the layers accept, divisible by the smallest possible power of two."""
    return 144 if any(isinstance(layer.mlp, ExpertsSpec) for layer in layers) else 130


def decoder_spec(*layers: LayerSpec, hidden: int = 130) -> DecoderSpec:
    """Return a decoder of these layers with two rotations, in as many pieces as suit the layers."""
    attentions = (layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec))
    attention = next(attentions, AttentionSpec(1, 1, 16, scale=1.0))
    size = attention.rotated or attention.head_dim
    rotations = [tuple((theta ** (-torch.arange(0, size, 2) / size)).tolist()) for theta in (1e4, 3e2)]
    spec = DecoderSpec(
        architecture="",
        dtype=torch.float32,
        vocab_size=17,
        hidden_size=hidden,
        max_position_embeddings=1024,
        layers=layers,
        rotations=tuple(RotationSpec(inv_freq, 1.2) for inv_freq in rotations),
        norm=layers[0].norm,
        held={CORRECTION_ROLE: WeightSpec(torch.float32)},
        names={role: role for role in (*LAYER_NAMES, "mixer_norm.after", "mlp_norm.after")},
    )
    return with_pieces(spec)


def make_layers(served: Served, *specs: LayerSpec, hidden: int | None = None, seed: int = 0) -> list[Layer]:
    """Make layers with random weights. The first norm of each layer is small, so that a query attends to more than one
    key.
    """
    seeds = count(seed)

    def get(name: str, *shape: int, layout: StackLayout | None = None, held: WeightSpec = PLAIN) -> Weight:
        values = randn(*shape, dtype=held.dtype or served.dtype, seed=next(seeds))
        if layout is not None:
            return stored(served.ops, values.flatten(0, 1)) if len(shape) == 3 else values
        if len(shape) == 1:
            return values / 10 if name.endswith("norm.before") else values
        return stored(served.ops, values) if len(shape) == 2 else values

    decoder = decoder_spec(*specs, hidden=hidden_size(specs) if hidden is None else hidden)
    return [make_layer(decoder, i, get) for i in range(len(specs))]


def make_experts(served: Served, spec: ExpertsSpec, hidden: int = 144) -> ExpertsWeights:
    """Make experts with outputs as large as their inputs. Experts have biases of different sizes."""
    count, inner, dtype = spec.num_experts, spec.intermediate_size, served.dtype
    matrices = randn(count * 2 * inner, hidden, seed=2) / hidden**0.5, randn(count * hidden, inner, seed=4) / inner**0.5
    gate_up, down = (stored(served.ops, matrix.to(dtype)) for matrix in matrices)
    gate_up_bias = randn(count, 2 * inner, dtype=dtype, seed=3) if spec.bias else None
    down_bias = randn(count, hidden, dtype=dtype, seed=5) if spec.bias else None
    router = stored(served.ops, randn(count, hidden, dtype=dtype, seed=1))
    return ExpertsWeights(router, None, gate_up, gate_up_bias, down, down_bias)


def make_rotations(ops: Backend, decoder: DecoderSpec, positions: Tensor) -> list[Rotation]:
    return [turn(ops, spec, torch.tensor(spec.inv_freq), positions) for spec in decoder.rotations]


def empty_caches(blocks: int, block_size: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return caches of keys and values full of NaN."""
    shape = (blocks, block_size, kv_heads, size)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


class Paged:
    """Sequences of given lengths in a paged cache, with one query for each token. Unused places hold NaN.

    `attention`: the window and the soft cap of `paged_attention`. `sinks`: whether heads have sinks. `spans`: pairs
    (start, end) of tokens that see all tokens of their pair, in each sequence that has them. `q`, `k`, `v`: for each
    sequence [its length, heads, size]; keys and values have `kv_heads` heads. `latent`: in latent attention, the values
    are this number of elements of the keys.
    """

    def __init__(
        self,
        served: Served,
        lens: Sequence[int],
        heads: int = 6,
        kv_heads: int = 2,
        size: int = 64,
        block_size: int = 16,
        seed: int = 0,
        sinks: bool = False,
        spans: Sequence[tuple[int, int]] = (),
        latent: int | None = None,
        **attention: Any,
    ) -> None:
        self.ends = torch.arange(max(lens)) + 1
        for start, end in spans:
            self.ends[start:end] = end
        self.has_spans = bool(spans)
        if sinks:
            attention["sinks"] = randn(heads, dtype=served.dtype, seed=9)
        self.ops, self.lens, self.size, self.block_size, self.attention = served.ops, lens, size, block_size, attention
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 3
        self.k_cache, self.v_cache = empty_caches(num_blocks, block_size, kv_heads, size, served.dtype)
        if latent is not None:
            holds_values = getattr(served.ops, "HOLDS_VALUES", False)
            self.v_cache = (self.v_cache if holds_values else self.k_cache)[..., :latent]
            self.v_cache = self.v_cache.contiguous() if holds_values else self.v_cache
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = torch.zeros(len(lens), max(counts), dtype=torch.int64)
        self.q = [randn(n, heads, size, dtype=served.dtype, seed=100 * i) for i, n in enumerate(lens)]
        self.k = [randn(n, kv_heads, size, dtype=served.dtype, seed=100 * i + 1) for i, n in enumerate(lens)]
        self.v = [randn(n, kv_heads, size, dtype=served.dtype, seed=100 * i + 2) for i, n in enumerate(lens)]
        self.v = self.v if latent is None else [k[..., :latent] for k in self.k]
        for i, blocks in enumerate(order[: sum(counts)].split(counts)):
            self.tables[i, : len(blocks)] = blocks
            self.write(i)

    def slots(self, i: int) -> Tensor:
        """Return the slots of the tokens of sequence i."""
        tokens = torch.arange(self.lens[i])
        return self.tables[i, tokens // self.block_size] * self.block_size + tokens % self.block_size

    def write(self, i: int) -> None:
        """Store the current keys and values of sequence i."""
        self.ops.write_kv(self.k[i], self.v[i], self.k_cache, self.v_cache, self.slots(i))

    def attend(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        """Return the attention of each chunk (sequence, start, end), all computed in one call."""
        q, batch = self.batch(chunks)
        out = self.ops.paged_attention(q, self.k_cache, self.v_cache, batch, self.size**-0.5, **self.attention)
        return out.split([end - start for _, start, end in chunks])

    def batch(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[Tensor, AttentionBatch]:
        """Return the queries of chunks, and the batch that says which tokens they attend to."""
        ends = list(accumulate(end - start for _, start, end in chunks))
        tables = self.tables[[i for i, _, _ in chunks]]
        q = torch.cat([self.q[i][start:end] for i, start, end in chunks])
        seen = torch.cat([self.ends[start:end] for _, start, end in chunks]) if self.has_spans else None
        return q, AttentionBatch([0, *ends], [end for _, _, end in chunks], tables, ends=seen)

    def whole(self, i: int) -> Tensor:
        return self.attend([(i, 0, self.lens[i])])[0]
