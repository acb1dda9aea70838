"""The ops of a decoder, and the contract that every backend keeps. `selection` chooses the backend that computes the
ops.

The contract: **a row's result depends on that row's inputs and on absolute positions only**, with one fixed order of
accumulation. The result does not depend on the number of rows in the call, the index of the row, or the contents of
other rows. The division of a prompt into chunks, the block size of the cache and the number of threads do not change
the result either. Equality means equal bits.

- Matrix products accumulate over K in the same order for any number of rows.
- Attention reads keys and values back from the paged cache, as stored. Prefill and decode both split the key axis at
  absolute multiples of a length that each backend fixes. Each split is reduced in a fixed order, and splits are folded
  from left to right. A split that ends before a query's window cannot change the query's result, so a backend may skip
  the split.
- A recurrence processes a sequence's tokens one by one and in order, both in prompts and in decodes. The state of a
  recurrence is float32 and never rounded, so the state does not depend on how a prompt is cut into chunks.
- Reductions and elementwise functions have no code path that depends on a row's place in memory.
- Within a group of experts, the outputs of a row's experts are added in ascending order of expert id. Products with an
  expert's matrix are accumulated in the same order for any number of rows.
- Where tensor parallelism splits a sum, the sum is computed in pieces, which are added as a balanced binary tree. The
  number of pieces depends on the decoder, and not on the number of devices (`kernels.pieces`).
- Among equal logits or scores, the lower vocabulary id, expert id or group of experts wins.
- Random numbers are a function of (seed, absolute position, vocabulary id).

A backend is a module with the functions of `Backend`: plain functions on tensors, without state. Two runs on the same
backend give bit-identical results. Results of different backends agree within rounding, but `merge` gives the same bits
on every backend. Rows are tokens or sequences, and are always the first dimension. A fused op gives the same bits as
running the op's steps one by one and rounding the result of each step to the dtype.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from .cache_formats import CacheFormat
from .journal import Journal
from .quantization import Format
from .specs import (
    PLAIN_HEAD,
    WHOLE,
    Activation,
    AttentionSpec,
    CachedSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    LayerNormSpec,
    LayerSpec,
    Mamba2Spec,
    NormSpec,
    Pieces,
)

KV_SPLIT = 128  # split length of the backends reference and cpu; triton uses another length

LOGITS_ROWS = 256  # ops that join the head to later steps hold the logits of at most this many rows at once
MASK_BITS = 32  # tokens in one word of a mask
L2_EPS = 1e-6  # keeps the norm of an all-zero query or key from giving NaN
NO_SLOT = -1
CLAMP, CLAMPED_SLOPE = 7.0, 1.702
"""Constants of `clamped_silu`. activation(gate) * up is min(gate, CLAMP) * sigmoid(CLAMPED_SLOPE * min(gate, CLAMP)) *
(1 + up), with up clamped to [-CLAMP, CLAMP].
"""


class Rotation(NamedTuple):
    """Cosines and sines of M tokens, each float32 [M, P], for the P rotated pairs of a head. `q_scale` (float32 [M]):
    multiplies the queries after the rotation; None for no factor. The product of query and `q_scale` is computed in
    float32 and rounded once.
    """

    cosines: Tensor
    sines: Tensor
    q_scale: Tensor | None = None


Memory: TypeAlias = tuple[Tensor, ...]
"""The memory of one layer for all sequences: two tensors for each mixer. The contents of the memory depend on the kind
of mixer. In a layer with two mixers, the caches come before the states.

Attention: the caches of keys and of values, each [blocks, block_size, kv_heads, D]. Latent attention: the same, with
one key-value head; the values are the first elements of the keys, and the second cache is a view of the first one
unless the backend `HOLDS_VALUES`. A mixer with a recurrent state: the states, float32 [slots, *state_shape], and the
tails [slots, kernel_size - 1, channels]. A tail holds the last inputs of the convolution, oldest first.
"""


class Memories(tuple[Memory, ...]):
    """The memories of layers. An object is valid only until the address of one of the memories' tensors changes."""

    @cached_property
    def addresses(self) -> array[int]:
        """The addresses of all tensors, as an array of pointers."""
        return array("Q", [tensor.data_ptr() for memory in self for tensor in memory])


@dataclass(frozen=True)
class AttentionBatch:
    """The queries of a batch that mixes prompt chunks and decodes, and the cached tokens that each query attends to.

    Sequence i owns the query rows [query_starts[i], query_starts[i + 1]). The query rows of a sequence are the
    sequence's last tokens. All `context_lens[i]` tokens of the sequence are in the cache. Token t of sequence i lies in
    block `block_tables[i, t // block_size]`, at offset t % block_size. `block_tables`: int64 [num_sequences,
    max_blocks], padded with any valid block id.

    `lens` (int64 [num_sequences]): the context lengths, on the device. A CUDA graph that captures a call with `lens`
    reads `lens` again at each replay. If `lens` is given, each sequence has one query, and `context_lens` holds only
    upper bounds of `lens`.

    `ends` (int64 [M], on the device): query row r sees the tokens of its sequence before ends[r], within the window. If
    `ends` is None, attention is causal, so the end is the query's position + 1. Each end is at least the query's
    position + 1. The ends of a sequence's rows never decrease, and the last end is the sequence's context length.
    """

    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Tensor
    lens: Tensor | None = None
    ends: Tensor | None = None


@dataclass(frozen=True)
class StateBatch:
    """The recurrent states that the sequences of a step read and write. The batch mixes prompt chunks and decodes, as
    in `AttentionBatch`.

    Sequence i owns the rows [query_starts[i], query_starts[i + 1]), possibly none. `reads[i]`: the slot with the state
    from which sequence i starts, or NO_SLOT to start from zeros. `writes[i]`: the slot that receives the state after
    the rows of sequence i. `reads` and `writes` are int64 [num_sequences], on the device of the memory.

    If a sequence continues in place, it reads and writes the same slot. When a sequence forks or restores a checkpoint,
    it reads one slot and writes another slot. The slot that is read stays unchanged, so any number of sequences may
    read the same slot. In one call, two sequences must not write the same slot, and a sequence must not read a slot
    that another sequence writes. Backends do not check which slots are read and written.

    `drafted[i]`: the number of drafted rows at the end of sequence i. Drafted rows are computed like other rows, but do
    not enter the state that is written. `drafted` is empty if no row is drafted. `journal`: describes how a step's rows
    become the rows of this batch. `journal` is None unless a sequence has drafted rows or repeats drafted rows.
    """

    query_starts: Sequence[int]
    reads: Tensor
    writes: Tensor
    drafted: Sequence[int] = ()
    journal: Journal | None = None

    @cached_property
    def starts(self) -> Tensor:
        """`query_starts` as an int64 tensor, created once for all layers."""
        # `torch.tensor` is slower; `torch.frombuffer` refuses an empty buffer.
        starts = self.query_starts
        return torch.frombuffer(array("q", starts), dtype=torch.int64) if starts else torch.empty(0, dtype=torch.int64)

    @property
    def num_kept(self) -> Tensor:
        """For each sequence, the number of rows that enter the state. The tensor is int64 [num_sequences] on the
        host.
        """
        counts = self.starts.diff()
        return counts - torch.tensor(self.drafted, dtype=torch.int64) if any(self.drafted) else counts


class Pages(NamedTuple):
    """Where a step of M tokens stores and reads keys and values in the cache.

    `slots` (int64 [M]): the cache slot for each token's key and value. A slot is block * block_size + offset. `batch`:
    the cached tokens that the M tokens attend to. Layers with the same window share blocks of the cache, and therefore
    share `Pages`. A block table's entry is never read if the entry's block lies before the window of every query of the
    sequence.
    """

    slots: Tensor
    batch: AttentionBatch


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of an attention.

    `q`: [heads * D, H], or [heads * 2 * D, H] with an output gate, unless `gate` [heads * D, H] computes the gates. `k`
    and `v`: [kv_heads * D, H]. `biases`: the biases of q, k and v, or None. `qk_norms`: the norms of q and k, or None.
    Each norm is [D]. If one norm covers all heads, the norm of q is [heads * D] and the norm of k is [kv_heads * D].
    `o`: [H, heads * D]. `o_bias`: [H] or None. `sinks`: [heads] or None.
    """

    q: Weight
    k: Weight
    v: Weight
    biases: tuple[Tensor, Tensor, Tensor] | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Weight
    o_bias: Tensor | None = None
    sinks: Tensor | None = None
    gate: Weight | None = None


@dataclass(frozen=True)
class LatentWeights:
    """The weights of a latent attention.

    `q_a` [q_rank, H], `q_a_bias` [q_rank] and `q_norm` [q_rank] compute the row that `q` reads. All three are None if
    `q` reads hidden states, and `q_a_bias` is also None without biases.
    `q`: [heads * query_dim, q_rank or H]. `kv_a`: [head_dim, H], for the latent row and then the shared
    key. `kv_a_bias`: [head_dim] or None. `kv_norm`: [latent_dim]. `up`: the matrices of the heads, for
    `Backend.head_linear`: `k_up` [heads * latent_dim, nope_dim] and `v_up` [heads * value_dim, latent_dim]. `o`: [H,
    heads * value_dim]. `o_bias`: [H] or None.
    """

    q_a: Weight | None
    q_a_bias: Tensor | None
    q_norm: Tensor | None
    q: Weight
    kv_a: Weight
    kv_a_bias: Tensor | None
    kv_norm: Tensor
    up: tuple[Weight, Weight]
    o: Weight
    o_bias: Tensor | None = None


@dataclass(frozen=True)
class DeltaNetWeights:
    """The weights of a delta net.

    `inputs`: one matrix each for (q, k, v), for z, for b and for a. The matrix of (q, k, v) has `channels` rows, the
    matrix of z has `value_size` rows, and the matrices of b and a have value_heads rows each. Each row has length H. If
    `DeltaNetSpec.joined` is set, `inputs` holds two matrices: one of (q, k, v, z) and one of (b, a). `convolution`
    [channels, 1, kernel_size] begins with the weight of the oldest token. `decay` (the logarithm of the decay rate) and
    `bias`: [value_heads]. `norm`: [value_head_dim]. `o`: [H, value_size].
    """

    inputs: tuple[Weight, ...]
    convolution: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    o: Weight


@dataclass(frozen=True)
class Mamba2Weights:
    """The weights of a layer's state space (Mamba-2).

    `inputs`: [inner_size + channels + heads, H]; first the rows of the output gate z, then the rows of (x, B, C), then
    the rows of the time steps. `convolution` [channels, 1, kernel_size] begins with the weight of the oldest token.
    `convolution_bias`: [channels] or None. `decay` (the logarithm of the decay rate), `bias` (of the time steps) and
    `skip` (the factor of a head's input in the head's output): [heads]. `norm`: [inner_size] or None. `o`: [H,
    inner_size].
    """

    inputs: Weight
    convolution: Tensor
    convolution_bias: Tensor | None
    decay: Tensor
    bias: Tensor
    skip: Tensor
    norm: Tensor | None
    o: Weight


@dataclass(frozen=True)
class MlpWeights:
    """The weights of an MLP: `gate` and `up` [I, H]; `down` [H, I]. `gate` is None if the MLP is not gated. `biases`:
    the biases of gate and up [I], and of down [H], or None.
    """

    gate: Weight | None
    up: Weight
    down: Weight
    biases: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True)
class ExpertsWeights:
    """The weights of E experts of intermediate size I.

    `router`: [E, H]. `router_bias`: [E]. `gate_up` [E * 2 * I, H] holds, for each expert, the rows of gate followed by
    the rows of up; if the experts are not gated, it is [E * I, H] and holds the rows of up. `down` [E * H, I] holds H
    rows for each expert. `gate_up_bias` [E, 2 * I] and `down_bias` [E, H] are in the same order as the rows of
    `gate_up` and `down`. If `ExpertsSpec.bias` is False, all biases are None. `latent`: the matrices [L, H] before and
    [H, L] after the experts, or None. If `latent` is given, L replaces H in the shapes of `gate_up` and `down`.
    `shared`: the weights of the shared expert, or None. `shared_score`: [1, H] or None. `correction`: float32 [E] or
    None (`RouterSpec.correction`). If `RouterSpec.wide` is set, `router` may be float32 in a model of another dtype.
    """

    router: Weight
    router_bias: Tensor | None
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    shared: MlpWeights | None = None
    shared_score: Weight | None = None
    correction: Tensor | None = None
    latent: tuple[Weight, Weight] | None = None


@dataclass(frozen=True)
class Norms:
    """The weights [H] of the norms around a mixer or an MLP; None where the spec has no norm."""

    before: Tensor | None
    after: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder with its weights. `mixer_pieces`, `recurrent_pieces`: the pieces of the weight `o` of
    `mixer` and of `recurrent_mixer`. `mlp_pieces`: the pieces of `down` in the MLP or in the shared expert. The number
    of pieces in `mlp_pieces` is also the number of groups of experts.
    """

    spec: LayerSpec
    mixer_norms: Norms
    mixer: AttentionWeights | LatentWeights | DeltaNetWeights | Mamba2Weights | None
    mlp_norms: Norms
    mlp: MlpWeights | ExpertsWeights | None
    mixer_pieces: Pieces = WHOLE
    mlp_pieces: Pieces = WHOLE
    recurrent_mixer: DeltaNetWeights | Mamba2Weights | None = None
    recurrent_pieces: Pieces = WHOLE


SAMPLE, GREEDY = -1, -2
LOWEST_TEMPERATURE = 1e-30
"""Worker and trainer replace lower temperatures with this value, so that logit / temperature does not overflow float32.
The distribution stays the same.
"""


@dataclass(frozen=True)
class Wanted:
    """M requests to `next_tokens`.

    `rows` (int64): for each request, the index of the hidden state that it reads. Several requests may read the same
    hidden state. `targets` (int64): SAMPLE, GREEDY, or the id of the token to score. `temperatures` (float32): the
    divisors of the logits; 1 for greedy rows. `raw` (bool): whether to compute the log-prob from the logits before they
    are divided by the temperature. `seeds` and `positions` (int64) are read for SAMPLE rows only. Each seed holds the
    bits of an unsigned 64-bit number.
    """

    rows: Tensor
    targets: Tensor
    temperatures: Tensor
    raw: Tensor
    seeds: Tensor
    positions: Tensor


class TokenStatistics(NamedTuple):
    """Statistics of M tokens and of the distributions that the tokens come from.

    `logprobs` (float32 [M]): the log-probs of the tokens. `entropy` (float32 [M]): the entropies of the distributions,
    in nats. `top_token_ids` (int64 [M, k]) and `top_logprobs` (float32 [M, k]): the most probable tokens and their
    log-probs, sorted from the highest logit to the lowest. Tokens with equal logits are sorted by id, lowest first. If
    fewer than k tokens have a nonzero probability, tokens with log-prob -inf fill up the list, lowest ids first.
    """

    logprobs: Tensor
    entropy: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class Edits:
    """The edits and the targets of M requests to `edited_tokens`. All tensors are on the host.

    `entries` (uint8 [E, 16]): the edits of single logits, each an `ENTRY` of `kernels.edits`. Request i owns the
    entries [starts[i], starts[i + 1]), in ascending order of their tokens, with at most one entry for a token.
    `penalties` (float32 [M, 3]): as in `RowEdits`. `masks` (int32 [N, ceil(V / MASK_BITS)]): as in `mask_logits`.
    `mask_places` (int64 [M]): the index of each request's mask in `masks`, or -1 for a request without a mask.
    `targets` (int64 [K]): the tokens for which log-probs are computed. Request i owns the targets [target_starts[i],
    target_starts[i + 1]). `starts`, `target_starts`: int64 [M + 1].
    """

    starts: Tensor
    entries: Tensor
    penalties: Tensor
    mask_places: Tensor
    masks: Tensor
    target_starts: Tensor
    targets: Tensor


class FoldedHead(NamedTuple):
    """The results of `next_tokens`, and the statistics if they were requested."""

    token_ids: Tensor
    logprobs: Tensor
    finite: Tensor
    statistics: TokenStatistics | None


def new_caches(
    ops: Backend, mixer: CachedSpec, blocks: int, block_size: int, empty: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return uninitialized caches of keys and values. The caches' memory comes from `empty(*shape)`, or from
    `empty(*shape, dtype=...)` for caches of codes.
    """
    key_size, value_size = mixer.cached_sizes
    shape = blocks, block_size, mixer.num_kv_heads
    if (format := stored_format(ops, mixer)) is not None:
        rows = mixer.key_sizes, (value_size,)
        keys, values = (empty(*shape, format.row_bytes(sizes), dtype=format.dtype) for sizes in rows)
        return keys, values
    keys = empty(*shape, key_size)
    if isinstance(mixer, LatentSpec) and not ops.HOLDS_VALUES:
        return keys, keys[..., :value_size]
    return keys, empty(*shape, value_size)


def stored_format(ops: Backend, mixer: CachedSpec) -> CacheFormat | None:
    """Return the format of the codes that the caches hold; None for plain caches. Plain caches hold keys and values; if
    the backend has no caches of the mixer's format, plain caches hold the values of codes.
    """
    format = mixer.cache_format
    return format if format is not None and format.name in ops.CACHE_FORMATS else None


class Weight(Protocol):
    """A matrix [rows, columns] in the memory layout that the backend's matrix products need. A plain tensor is a
    `Weight` too.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    def copy_(self, source: Tensor | Self, /) -> object:
        """Store a tensor or a weight of the same shape. A tensor is converted to this weight's dtype. If `source` is a
        weight, it must have the same layout as this weight.
        """
        ...

    def put_(self, index: Tensor, source: Tensor, /) -> object:
        """Overwrite some elements with `source` [n], which has the weight's dtype. `index` (int64 [n]) holds the flat
        indices of the overwritten elements in the matrix [rows, columns].
        """
        ...

    def narrow(self, dim: int, start: int, length: int, /) -> Self:
        """Return rows [start, start + length) as a weight that shares this weight's memory. `dim` is 0.

        `start` is a multiple of 16. `length` is a multiple of 16, unless the rows reach the end of the weight.
        """
        ...

    def to_dense(self) -> Tensor:
        """Return a tensor [rows, columns] with the same values. The tensor may be the weight itself."""
        ...


def mark_rows(weight: Any, full_rows: int) -> Any:
    """Mark a matrix that holds only some rows of a whole weight, and return the matrix. `full_rows`: the number of rows
    of the whole weight.

    The bits of some products depend on the shape of the weight. Backends with products that depend on this shape read
    the mark with `full_rows_of`.
    """
    weight.full_rows = full_rows
    return weight


def full_rows_of(weight: Any) -> int:
    """Return the number of rows of the whole weight. `weight`: a matrix that holds some or all rows of the whole
    weight.
    """
    return getattr(weight, "full_rows", weight.shape[0])


def as_weight(ops: Backend, matrix: Tensor, format: Format | None = None) -> Weight:
    """Return a copy of a matrix [rows, columns] in the memory layout of the backend. `format`: a format of the backend
    that quantizes each row separately; None for a plain copy.
    """
    rows, columns = matrix.shape
    weight = ops.new_weight(rows, columns, matrix.new_empty, format)
    weight.copy_(matrix)
    return weight


class Backend(Protocol):
    """The functions of a backend. M: rows, H: hidden size, V: vocabulary size, D: head size.

    The floating-point tensors, weights and caches of a call share one dtype and device unless stated otherwise. Ids,
    slots and blocks must exist, and the block size must be even. Backends do not check ids, slots, blocks or the block
    size.

    HEAD_SECTION: parts of the head, for `head_sections`, begin at ids that are multiples of HEAD_SECTION, which is a
    multiple of 16. HOLDS_VALUES: whether values have a cache of their own even if they are parts of the keys, as in
    latent attention. FORMATS: the names of the formats of quantized matrices that the backend stores. The embeddings,
    the head, routers, the scores of shared experts, and the matrices of `head_linear` are never quantized.
    CACHE_FORMATS: the names of the formats (`kernels.cache_formats`) in which the backend stores keys and values as
    codes. If CACHE_FORMATS is not empty, HOLDS_VALUES is true. FUSES_EDITS: whether the backend is an `EditingBackend`.
    """

    HEAD_SECTION: int
    HOLDS_VALUES: bool
    FORMATS: frozenset[str]
    CACHE_FORMATS: frozenset[str]
    FUSES_EDITS: bool

    def instruction_set(self) -> str:
        """Return the instruction set or GPU architecture that the backend uses, for logs and health."""
        ...

    def prepare(self, compute: Callable[[int], object], most_rows: int, device: torch.device) -> None:
        """Compile everything that `compute(rows)` needs on `device` for any number of rows from 1 to `most_rows`.

        Later calls of the backend's ops then compile nothing. In a backend that never compiles, `prepare` is a no-op.
        `compute` runs this backend on tensors without memory (device meta), and must accept any number of rows up to
        `most_rows`. Raise ConfigError if the compiler, or the folder for its output, cannot be used.
        """
        ...

    def new_weight(
        self,
        rows: int,
        columns: int,
        empty: Callable[..., Tensor],
        format: Format | None = None,
        unit: int | None = None,
    ) -> Weight:
        """Return an uninitialized matrix for the backend's products. The matrix's memory comes from `empty(*shape)`.

        `empty` returns uninitialized tensors of one dtype on one device. Each tensor from `empty` begins at a multiple
        of 64 bytes.

        `format`: one of the backend's `FORMATS`, or None for a matrix that is not quantized. A quantized matrix has the
        dtype of `empty(0)`, and its memory comes from `empty(*shape, dtype=torch.uint8)`. The matrix's `copy_`
        quantizes a tensor (`quantization.quantize`, with this `unit`), and also stores a `Quantized` of the format. The
        matrix's `put_` raises ValueError. A product with a quantized matrix has the same bits as the product with the
        plain matrix of its values (`Weight.to_dense`), unless the format also quantizes activations. `kernels.dynamic`
        defines the product for formats that quantize activations.
        """
        ...

    def new_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Convert layers to the form that the op `layers` reads. One conversion serves many calls to `layers`.

        The layers' tensors must be contiguous and must stay the same objects. The contents of the layers' tensors may
        change, and the tensors' memory may move between calls. Raise ValueError for a tensor that is not contiguous, if
        the backend requires contiguous tensors.
        """
        ...

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return weight + scale * (b @ a) in weight's dtype, for weight [N, K], b [N, R] and a [R, K]. All arguments
        are plain tensors.

        The computation is in float32. For each element, the sum starts at 0, and the rounded products are added one by
        one, in ascending order of their index along R. The sum of the products is multiplied by `scale`, rounded to
        float32, and added to the weight. The result is rounded once. Each step is correctly rounded, so the bits are
        the same on every backend, instruction set and device. `merge` may run concurrently with other ops.
        """
        ...

    def merge_into(self, out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
        """Store `merge(weight, a, b, scale)` in `out` [N, K], which has the dtype of weight. Return whether all values
        are finite; if not, a quantized `out` stays unchanged.

        Synchronizes the device. The op may run concurrently with other ops.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Return the rows of weight [V, H] at the indices `token_ids` (int64 [M]). The result is [M, H]."""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        """Divide x [M, H] by its root mean square and multiply by weight [H]. The result is [M, H] in x's dtype.

        The quotient is computed in float32 and rounded to x's dtype before the multiplication. With a zero-centered
        norm, the quotient is multiplied by 1 + weight in float32, and only the product is rounded. The weight may be
        float32.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, norm: LayerNormSpec) -> Tensor:
        """Subtract the mean of each row from x [M, H], divide by the standard deviation, multiply by weight [H] and add
        bias [H]. The result is computed in float32 and rounded once: [M, H] in x's dtype.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Multiply x [M, K] by the transpose of weight [N, K] and add bias [N]. The result is [M, N] in x's dtype."""
        ...

    def wide_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the product of x [M, K] and the transpose of weight [N, K] in float32, [M, N], accumulated in
        float32. The weight has x's dtype, or is float32.
        """
        ...

    def head_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Multiply each head of x [M, heads, A] by the transpose of the head's matrix in weight [heads * B, A], as
        `linear` does. The result is [M, heads, B].

        The bits of a head's result do not depend on the number of heads.
        """
        ...

    def project_back(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        pieces: Pieces = WHOLE,
    ) -> Tensor:
        """Return linear(x, weight, bias) [M, N]. If residual [M, N] is given, it is added after linear's result is
        rounded.

        The weight is `o` of an attention or a delta net, or `down` of an MLP. Tensor parallelism splits this product
        along K.

        With several `pieces`, the sum of a piece is the float32 product over the columns of the piece, as if the piece
        were a weight of its own; the sum of an empty piece is +0.0. The sums are added in float32 as a balanced binary
        tree. For example, four sums s0 to s3 are added as (s0 + s1) + (s2 + s3). The bias is added to the total in
        float32, and the result is rounded once. A process can therefore compute any subtree of the sum without changing
        the bits. For the backend `cpu`, `pieces.length` is a multiple of 16.
        """
        ...

    def back_sums(self, x: Tensor, weight: Weight, pieces: Pieces, peaks: Tensor | None = None) -> Tensor:
        """Return the float32 sums [M, N] of `project_back`, before bias, rounding and residual. A single piece is
        summed in the same way as one of several pieces, so the bits may differ from the bits of `linear`.

        `peaks` (float32 [M]): if the product quantizes activations and x has only some columns of each row, the peaks
        of the whole rows (`dynamic.row_peaks`).
        """
        ...

    def gate_up(self, x: Tensor, gate: Weight, up: Weight, activation: Activation) -> Tensor:
        """Return gate_mul(linear(x, gate), linear(x, up), activation) [M, I], for gate and up [I, H]."""
        ...

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up for two tensors of the same shape. The result is computed in float32 and rounded
        once.

        `sigmoid` is the gate of attention's output. `silu` is the gate of MLPs and of a delta net's output.
        `clamped_silu` is the gate of some experts: it clamps both inputs and adds 1 to `up`, as documented at `CLAMP`.
        If `gate` and `up` are the same tensor, `relu` gives the squared ReLU of this tensor. `gelu`, with an `up` of
        ones, is the activation of vision towers; the fused ops do not support it.
        """
        ...

    def route(
        self, logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (experts, gates) for a router's logits [M, E], which are in the model's dtype or float32. `experts` is
        int32 [M, top_k], and `gates` is float32 [M, top_k]. All steps of `route` are in float32.

        Scores. `softmax`: e^(logit - highest logit), divided by the sum of these exponentials over all experts.
        `softmax_of_chosen`: a softmax over the row's experts only; the exponentials are added in ascending order of
        expert id. `sigmoid`: 1 / (1 + e^-logit).

        Choice. Experts are ranked by logits, or, if `RouterSpec.ranks_scores`, by scores plus `correction` (float32
        [E], or None). A row's experts are the `top_k` experts with the highest rank; among equals, lower ids are chosen
        first. With several groups, group i holds the experts [i G, (i + 1) G), where G is the number of experts divided
        by `groups`. A row's experts then come from the `kept_groups` best groups. A group is ranked by the sum of its
        `group_best` highest numbers, where the numbers are the logits or scores that rank the experts. Among equal
        groups, lower groups are kept first. If `chosen` (int32 [M, top_k], ascending) is given, a row's experts are the
        experts in the same row of `chosen`, and `correction` is not read. Returned experts are in ascending order in
        each row.

        Gates. A gate is the expert's score. If `normed`, the score is divided by max(sum + eps, floor), where sum is
        the sum of the scores of the row's experts, added in ascending order of expert id. Then the gate is multiplied
        by `scale`. A row with NaN gets NaN gates and arbitrary distinct ids below E.
        """
        ...

    def experts(
        self,
        x: Tensor,
        spec: ExpertsSpec,
        weights: ExpertsWeights,
        experts: Tensor,
        gates: Tensor,
        shared: Tensor | None = None,
        groups: int = 1,
    ) -> Tensor:
        """For each row of x [M, H], apply the experts that `route` returned for the row. The result is [M, H].

        An expert's inner row is `gate_mul` of the expert's two `linear` products, which include the biases; if the
        experts are not gated, it is `gate_mul` of one product with itself. The product of the inner row with `down`
        stays in float32. The addition of the bias and the multiplication by the router's gate are also in float32. The
        outputs of a row's experts are added group by group, then `shared` [M, H] is added, and the result is rounded
        once. The op reads neither the router's weights nor the shared expert's weights.

        `groups`: a power of two that divides the number of experts. Group i holds the experts [i G, (i + 1) G), where G
        is the number of experts divided by `groups`. Within a group, the outputs are added in ascending order of expert
        id. If there are several groups of experts, the sum of each group starts at +0.0. The sums of the groups are
        added as a balanced binary tree.
        """
        ...

    def expert_sums(
        self, x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor, gates: Tensor, groups: int
    ) -> Tensor:
        """Return the float32 sums [M, H] that the op `experts` computes, but only over the experts that `spec.own`
        names. The output of the shared expert is not added, and the sums are not rounded. `weights` has only the
        experts in `spec.own`, and their number is a multiple of `groups`. The outputs of a group are added to +0.0,
        even if there is only one group. The argument `experts` may have ids of any expert, including experts outside
        `spec.own`.
        """
        ...

    def rotation(self, positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines) of the angles. Cosines and sines are float32 [M, P], and include the factor `scale`.

        Each angle is the float32 product of a position in `positions` (int64 [M]) and a frequency in `inv_freq`
        (float32 [P]).
        """
        ...

    def rope(self, x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor:
        """Rotate the elements of each head of x [M, heads, D] in float32. As in most Hugging Face models, elements i
        and i + P form pair i. If `interleaved` is set, elements 2 i and 2 i + 1 form pair i.

        If there are P < D / 2 pairs, the elements of a head at index 2 P and above stay unchanged.
        """
        ...

    def qkv(
        self,
        x: Tensor,
        spec: AttentionSpec,
        weights: AttentionWeights,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Return the queries [M, heads, D] of x [M, H], as `layer.project` does, and store the keys and values in the
        caches, as `layer.store` does.

        With an output gate, each head's query is followed by its gate values: [M, heads, 2 * D].
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store k and v [M, kv_heads, D] at `slots` (int64 [M], block * block_size + offset) of the caches.

        A cache has shape [blocks, block_size, kv_heads, D]. The order of values inside a block is up to the backend. In
        latent attention, a row of v holds the first elements of the same row of k. Caches of codes, which `new_caches`
        allocates, have the dtype of their format and rows of `CacheFormat.row_bytes`; they receive the codes of k and
        v. Attention over caches of codes has the same bits as attention over plain caches with the values of the codes.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [M, heads, D] of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D].

        In latent attention, the values have V < D elements, and the result is [M, heads, V].

        A query at position p with the end e (`AttentionBatch.ends`; p + 1 for causal attention) sees the tokens t
        with p - window < t < e; without a window, the query sees all tokens before e.
        With a cap, a score s = scale * (q . k)
        becomes soft_cap * tanh(s / soft_cap). `sinks` [heads]: for each head, the score of an additional key that every
        query sees. The value vector of the additional key is zero. The additional key is folded in after the last
        split.
        """
        ...

    def convolve(
        self, x: Tensor, weight: Tensor, tails: Tensor, batch: StateBatch, bias: Tensor | None = None
    ) -> Tensor:
        """Apply a causal convolution to each channel, then SiLU. The result is [M, C] for x [M, C] and weight [C, 1,
        K].

        Before SiLU, row t of a sequence's result is `bias` [C] (or 0) plus the sum over j of weight[:, 0, j] *
        x[t - (K - 1) + j], where x[t] is row t of the sequence's input. The sum is in float32, starts with the bias and
        the oldest row, and is rounded once, after SiLU. The K - 1 rows before a sequence's first row are the sequence's
        tail. `tails`: [slots, K - 1, C]. To get the new tail, append the sequence's rows, except drafted rows, to the
        old tail, and keep the last K - 1 rows.
        """
        ...

    def delta_rule(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        spec: DeltaNetSpec,
        weights: DeltaNetWeights,
        states: Tensor,
        batch: StateBatch,
    ) -> Tensor:
        """Run the recurrence of a gated delta net over each sequence's tokens, one by one. Return [M, value_heads, V].

        `qkv` [M, channels]: each row holds q [key_heads, K], k [key_heads, K] and v [value_heads, V] side by side. `b`
        and `a`: [M, value_heads], the inputs of the gates. `states`: float32 [slots, value_heads, K, V]. Value head h
        reads key head h * key_heads // value_heads. For each token and value head, the following is computed in
        float32:

            q = q / (sqrt(q . q + L2_EPS) * sqrt(K)),  k = k / sqrt(k . k + L2_EPS)
            S = S * e^(-e^decay * softplus(a + bias))
            S = S + k (sigmoid(b) * (v - k S))^T
            out = q S, the only value that is rounded to the dtype of qkv
        """
        ...

    def state_space(
        self,
        xbc: Tensor,
        steps: Tensor,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        states: Tensor,
        batch: StateBatch,
    ) -> Tensor:
        """Run the recurrence of a state space over each sequence's tokens, one by one. Return [M, heads, V].

        `xbc` [M, channels]: each row holds x [heads, V], B [groups, N] and C [groups, N] side by side. `steps`: [M,
        heads], the inputs of the time steps. `states`: float32 [slots, heads, N, V]. Head h reads group h * groups //
        heads. For each token and head, the following is computed in float32:

            step = clamp(softplus(steps + bias), *time_step_limit)
            S = S * e^(-e^decay * step)
            S = S + B (step * x)^T
            out = C S + skip * x, the only value that is rounded to the dtype of xbc
        """
        ...

    def layers(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        rotations: Sequence[Rotation],
        memories: Sequence[Memory],
        pages: Sequence[Pages],
        states: StateBatch | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Run layers on x [M, H] and return the hidden states [M, H]. x stays unchanged.

        `layers`: from `new_layers`. `layer.run_layers` defines the computation. Each layer has its own memory and
        pages. If `layers` is empty, the result is x itself. `states` and the batches of all pages describe the same
        sequences. `states` is None if no layer has a recurrent state. `routes` (int32 [layers with experts, M, top_k])
        receives the experts of each row; pass None if the experts are not needed. Raise ValueError unless `memories`
        and `pages` have one entry for each layer.
        """
        ...

    def next_tokens(
        self, hidden: Tensor, weight: Weight, wanted: Wanted, head: HeadSpec = PLAIN_HEAD
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (token ids, log-probs, validity), each [M]; their dtypes are int64, float32 and bool.

        A result is valid if the token's logit is finite and its log-prob is not NaN. `hidden`: [any number, H];
        `weight`: [V, H]. The op fuses `lm_head`, division by the temperature, the choice of a token, and `log_probs`.
        The token is chosen by `sample`; for greedy rows, it is the token with the highest logit (the lowest id if
        several logits are equal).
        """
        ...

    def next_token_statistics(
        self, hidden: Tensor, weight: Weight, wanted: Wanted, k: int, head: HeadSpec = PLAIN_HEAD
    ) -> tuple[Tensor, TokenStatistics, Tensor]:
        """Like `next_tokens`, but return `token_statistics` of the same logits instead of log-probs."""
        ...

    def head_sections(
        self,
        hidden: Tensor,
        weight: Weight,
        wanted: Wanted,
        k: int | None,
        first: int,
        head: HeadSpec = PLAIN_HEAD,
    ) -> tuple[Tensor, ...]:
        """Return partial results of `next_tokens`, or of `next_token_statistics` if `k` is not None, for the token ids
        from `first` on. `first` is a multiple of HEAD_SECTION. `weight` has the rows of the token ids from `first` on;
        it may have no rows.

        The results are tensors [M, ...], in a format of the backend. To get the results of all ids, join the partial
        results of consecutive ranges of ids along the second axis, and pass the joined tensors to `fold_sections`.
        """
        ...

    def fold_sections(self, found: Sequence[Tensor], wanted: Wanted, k: int | None) -> FoldedHead:
        """Return the results of `next_tokens` or `next_token_statistics`. `found`: the joined results of
        `head_sections` for all ids.
        """
        ...

    def lm_head(self, hidden: Tensor, weight: Weight, head: HeadSpec = PLAIN_HEAD) -> Tensor:
        """Return the logits of hidden [M, H] for the head's weight [V, H]. The logits are float32 [M, V], accumulated
        in float32, then scaled and capped as `head` requires.
        """
        ...

    def log_probs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """For each row of float32 logits [M, V], return the log-softmax at the row's tokens in `token_ids` (int64 [M],
        or [M, K] for K tokens per row). The result is float32, in the shape of `token_ids`.
        """
        ...

    def token_statistics(self, logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
        """For each row of float32 logits [M, V], return `log_probs` of the row's token in `token_ids` (int64 [M]), the
        row's entropy, and the row's k best tokens.

        `k` is a number from 0 to V. The log-prob of a listed token has the same bits as the token's result from
        `log_probs`. If a row has NaN or no finite maximum, its log-probs and entropy are NaN and its ids are arbitrary.
        """
        ...

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of excluded tokens to -inf, in place. `logits`: float32 [M, V], contiguous.

        `masks` (int32 [N, ceil(V / MASK_BITS)]) has a bit for each token, the lowest bit first; a token with bit 0 is
        excluded. Mask i applies to row `rows[i]` (int64 [N]) of the logits. No row occurs twice in `rows`.
        """
        ...

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """In each row of `logits` (float32 [M, V], contiguous), find the tokens that the row's filters drop, and
        set the logits of these tokens to -inf, in place. Return `logits`.

        `top_k` (int64 [M]) is -1 for rows without this filter. `top_p` and `min_p` are float32 [M]. The filters apply
        in the order top_k, top_p, min_p. No filter drops the token with the highest logit. A row with NaN stays
        unchanged.
        """
        ...

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw one token id from the softmax of each row of float32 logits [M, V]. The result is int64 [M].

        By the Gumbel-max method, the drawn token is the token with the highest sum of logit and noise. The noise is a
        function of the row's seed, the row's position and the vocabulary id. `seeds` (the bits of unsigned 64-bit
        numbers) and `positions` are int64 [M]. Raises no error. A token with logit -inf is drawn only if the whole row
        is -inf. A row with NaN gives an arbitrary id.
        """
        ...


class EditingBackend(Backend, Protocol):
    """A backend that can edit logits and read the logits of targets while it computes the logits, and can record which
    tokens filters keep.
    """

    def prepare_edits(self, edits: Edits) -> Any:
        """Return the edits in the form that `edited_tokens` takes. The host prepares them faster before the layers than
        afterwards.
        """
        ...

    def edited_tokens(
        self,
        hidden: Tensor,
        weight: Weight,
        wanted: Wanted,
        edits: Any,
        k: int | None,
        head: HeadSpec = PLAIN_HEAD,
    ) -> tuple[FoldedHead, Tensor]:
        """Return the results of `next_tokens`, or of `next_token_statistics` if `k` is not None, for edited logits, and
        the log-probs of `Edits.targets` (float32 [K]). `edits`: the result of `prepare_edits`.

        The op fuses `lm_head`, the edits, division by the temperature, the choice of a token, `log_probs` and
        `token_statistics`. In rows with `Wanted.raw`, log-probs are computed from the edited logits, before they are
        divided by the temperature.
        """
        ...

    def filter_recorded(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
        """Like `filter_logits`, but return a record of each row: (kept tokens, sums before the filters).

        The kept tokens are uint8 [M, ceil(V / 8)], with a bit for each token, the lowest bit first. A bit is 0 for a
        token with logit -inf after the filters. As an exception, if no token has logit -inf after the filters, all bits
        are 0. The sums, for `log_probs_of`, are float32 [M, 2].
        """
        ...

    def log_probs_of(self, logits: Tensor, sums: Tensor) -> Tensor:
        """For each of M rows, return the log-prob of one token. `logits` (float32 [M]) has the logit of each of these
        tokens. `sums`: the sums of the rows from `filter_recorded`. The result is float32 [M], and has the same bits as
        `log_probs` of the whole rows.
        """
        ...
