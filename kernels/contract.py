"""The ops a decoder is made of, and the contract they keep. `selection` chooses who computes them.

The contract: **a row's result depends on that row's inputs and on absolute positions only**, with one fixed order of
accumulation. It does not depend on how many rows share the call, which row it is, what the other rows hold, how a
prompt was cut into chunks, the block size of the cache, or the number of threads. Equality means equal bits.

- Matrix products accumulate over K in one order for every number of rows.
- Attention reads keys and values back from the paged cache, as stored. It cuts the key axis at absolute multiples of a
  length that each backend fixes, reduces each split in one order and folds the splits from left to right, in prefill
  and decode alike. A split that lies wholly behind a query's window leaves that query as it is, so it may be skipped.
- A recurrence takes a sequence's tokens one by one, in one order, prompts and decodes alike. Its state is float32 and
  never rounded, so that it is the same however a prompt was cut.
- Reductions and elementwise functions have no path that depends on a row's place in memory.
- A row's experts are added by ascending id, each product in the order it has for any number of rows.
- Ties go to the lower vocabulary id, or the lower expert id.
- Random numbers are a function of (seed, absolute position, vocabulary id).

A backend is a module with the functions of `Backend`: plain functions on tensors, with no state. Each backend is exact
against itself; between backends results agree within rounding, and those of `merge` to the bit. Rows are tokens or
sequences, always the first dimension. An op that joins several steps gives the bits of those steps one by one, each
rounded to the dtype.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from .specs import Activation, AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, NormSpec

KV_SPLIT = 128  # of reference and cpu; triton has its own

LOGITS_ROWS = 256  # ops that join the head to what follows hold the logits of no more rows at once
L2_EPS = 1e-6  # keeps a query or key of zeros from NaN
NO_SLOT = -1
CLAMP, CLAMPED_SLOPE = 7.0, 1.702
"""Of `clamped_silu`: activation(gate) * up is min(gate, CLAMP) * sigmoid(CLAMPED_SLOPE * min(gate, CLAMP)) times 1 +
up, with up held within [-CLAMP, CLAMP]."""

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of M tokens, each float32 [M, P], for the P pairs of a head that are rotated."""

Memory: TypeAlias = tuple[Tensor, Tensor]
"""What a layer remembers of all sequences, by its mixer. Attention: the caches of keys and of values, [blocks,
block_size, kv_heads, D] each. A delta net: the states, float32 [slots, value_heads, key_head_dim, value_head_dim], and
the tails, the last inputs of the convolution, oldest first, [slots, kernel_size - 1, channels]."""


@dataclass(frozen=True)
class AttentionBatch:
    """Which queries attend to which cached tokens: a mixed batch of prompt chunks and decodes.

    Sequence i owns query rows [query_starts[i], query_starts[i + 1]), the last ones of its `context_lens[i]` tokens,
    all of which are in the cache. Token t of it lies in block `block_tables[i, t // block_size]`, at offset t %
    block_size. `block_tables`: int64 [num_sequences, max_blocks], padded with any valid block id.

    `lens`: where a CUDA graph that holds the call finds the context lengths anew at each replay (int64
    [num_sequences]); each sequence then has one query, and `context_lens` says the most that they may become.
    """

    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Tensor
    lens: Tensor | None = None


@dataclass(frozen=True)
class StateBatch:
    """Which states a step's sequences go on from, and where they leave them: a mixed batch as in `AttentionBatch`.

    Sequence i owns rows [query_starts[i], query_starts[i + 1]), of which there may be none. It goes on from slot
    `reads[i]`, or from zeros where that is NO_SLOT, as a sequence does that begins; and what its rows make of that is
    left in slot `writes[i]`. Both int64 [num_sequences], on the device of the memory. A sequence that goes on where it
    was reads and writes one slot. To restore a checkpoint, or to fork, it reads another slot than it writes, which
    stays as it is; so any number of sequences may read one slot. No slot is written twice in a call, and none that one
    sequence writes is read by another: nothing of this is checked.
    """

    query_starts: Sequence[int]
    reads: Tensor
    writes: Tensor

    @cached_property
    def starts(self) -> Tensor:
        """`query_starts`, int64, made once for all layers."""
        # `torch.tensor` takes longer; `torch.frombuffer` refuses an empty buffer.
        starts = self.query_starts
        return torch.frombuffer(array("q", starts), dtype=torch.int64) if starts else torch.empty(0, dtype=torch.int64)


class Pages(NamedTuple):
    """Where a layer keeps the keys and values of a step's M tokens: `slots` (int64 [M], block * block_size + offset).

    `batch`: where it finds those of all tokens that they attend to. Layers of one window share blocks, and thus pages;
    what a table names behind the windows of all queries of its sequence is never read.
    """

    slots: Tensor
    batch: AttentionBatch


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of an attention.

    `q` [heads * D, H], or [heads * 2 * D, H] with an output gate; `k` and `v` [kv_heads * D, H]; `biases` of the three,
    or none; `qk_norms` of q and k, or none: [D], or [heads * D] and [kv_heads * D] if all heads are normed at once; `o`
    [H, heads * D]; `o_bias` [H] and `sinks` [heads], or none.
    """

    q: Weight
    k: Weight
    v: Weight
    biases: tuple[Tensor, Tensor, Tensor] | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Weight
    o_bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class DeltaNetWeights:
    """The weights of a delta net.

    `inputs`: of (q, k, v), z, b and a, with `channels`, `value_size`, value_heads and value_heads rows of H; joined: of
    (q, k, v, z) and (b, a). `convolution` [channels, 1, kernel_size], the oldest token's first. `decay` (the logarithm
    of its rate) and `bias` [value_heads]. `norm` [value_head_dim]. `o` [H, value_size].
    """

    inputs: tuple[Weight, ...]
    convolution: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    o: Weight


@dataclass(frozen=True)
class MlpWeights:
    """`gate` and `up` [I, H]; `down` [H, I]."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class ExpertsWeights:
    """The weights of E experts of intermediate size I.

    `router` [E, H] and `router_bias` [E]. `gate_up` [E * 2 * I, H]: of each expert the rows of gate, then those of up.
    `down` [E * H, I]: of each expert H rows. `gate_up_bias` [E, 2 * I] and `down_bias` [E, H] in the same order.
    Biases are none without `ExpertsSpec.bias`. `shared`: of the shared expert, and `shared_score` [1, H], or none.
    """

    router: Weight
    router_bias: Tensor | None
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    shared: MlpWeights | None = None
    shared_score: Weight | None = None


@dataclass(frozen=True)
class Norms:
    """The weights [H] of the norms around a mixer or an MLP; none where the spec has none."""

    before: Tensor | None
    after: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder with its weights. `pieces`: see `DecoderSpec`."""

    spec: LayerSpec
    mixer_norms: Norms
    mixer: AttentionWeights | DeltaNetWeights
    mlp_norms: Norms
    mlp: MlpWeights | ExpertsWeights
    pieces: int = 1


SAMPLE, GREEDY = -1, -2
LOWEST_TEMPERATURE = 1e-30
"""A lower one is taken as this, by worker and trainer: the same distribution, but the quotients stay within float32."""


@dataclass(frozen=True)
class Wanted:
    """What `next_tokens` is asked for, M times.

    `rows` int64: the hidden state that it reads, which others may read too. `targets` int64: SAMPLE, GREEDY, or the
    token whose log-prob is asked for. `temperatures` float32: divide the logits, 1 for greedy rows. `raw` bool: the
    log-prob is that of the logits as they are, not over the temperature. `seeds` (the bits of an unsigned 64-bit
    number) and `positions`, int64: read for SAMPLE rows only.
    """

    rows: Tensor
    targets: Tensor
    temperatures: Tensor
    raw: Tensor
    seeds: Tensor
    positions: Tensor


class TokenStatistics(NamedTuple):
    """What is known of a token and of the distribution that it comes from, M times.

    `logprobs` float32 [M]: of the token. `entropy` float32 [M]: of the distribution, in nats. `top_token_ids` int64
    [M, k] and `top_logprobs` float32 [M, k]: its most probable tokens, highest logit first, of equal ones the lower id
    first. Where fewer than k tokens have a probability the others follow, with log-prob -inf, the lowest ids first.
    """

    logprobs: Tensor
    entropy: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


class Weight(Protocol):
    """A matrix [rows, columns] in a layout that its backend's products read. A plain tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    def copy_(self, source: Tensor | Self, /) -> object:
        """Stores a tensor of the same shape, converted to the weight's dtype, or a weight of the same layout."""
        ...

    def put_(self, index: Tensor, source: Tensor, /) -> object:
        """Overwrites the elements at flat indices (int64 [n]) into [rows, columns] with `source` [n] of its dtype."""
        ...

    def narrow(self, dim: int, start: int, length: int, /) -> Self:
        """Rows [start, start + length) as a weight that shares this one's memory. `dim` is 0.

        `start` is a multiple of 16, and `length` too unless the rows reach the end.
        """
        ...

    def to_dense(self) -> Tensor:
        """A tensor [rows, columns] with the same values, perhaps the weight itself."""
        ...


class Backend(Protocol):
    """The functions every backend offers. M: rows, H: hidden size, V: vocabulary size, D: head size.

    The floating-point tensors, weights and caches of a call share one dtype and device where nothing else is said. Ids,
    slots and blocks must exist, and the block size is even: nothing of this is checked.
    """

    def instruction_set(self) -> str:
        """What the backend computes with on this machine, for logs and health."""
        ...

    def prepare(self, compute: Callable[[int], object], most_rows: int, device: torch.device) -> None:
        """Compiles what `compute(rows)` needs on `device` for any number of rows from 1 to `most_rows`, so that no
        later call has to; does nothing where nothing is compiled.

        `compute` may be called for some of these numbers: it computes with this backend, on tensors without memory
        (device meta). Raise ConfigError for files that cannot be used: the compiler's, or those that it leaves.
        """
        ...

    def new_weight(self, rows: int, columns: int, empty: Callable[..., Tensor]) -> Weight:
        """An uninitialized matrix for the products below, in memory from `empty(*shape)`.

        `empty` makes uninitialized tensors of one dtype on one device, each beginning at a multiple of 64 bytes.
        """
        ...

    def new_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """The same layers in the form that `layers` reads, made once for many calls.

        Their tensors are contiguous, and always the same ones: only what they hold may change, and between calls where
        their memory lies. Raise ValueError for a tensor that is not contiguous, where the backend needs it.
        """
        ...

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """weight [N, K] + scale * (b [N, R] times a [R, K]): [N, K] in weight's dtype, all of them plain tensors.

        In float32: an element's products are rounded and added to 0 one by one, ascending along R; their sum times
        `scale`, which is rounded to float32, is added to the weight; and that is rounded once. As each of these steps
        rounds exactly, the bits are the same on every backend, instruction set and device. May be called beside other
        ops.
        """
        ...

    def merge_into(self, out: Weight, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> bool:
        """Stores `merge(weight, a, b, scale)` in `out` [N, K] of weight's dtype. Whether all of it is finite, for which
        the device is waited for. May be called beside other ops.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows `token_ids` (int64 [M]) of weight [V, H]: [M, H]."""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
        """x [M, H] over its root mean square, computed in float32 and rounded to x's dtype, times weight [H], in x's
        dtype.

        If zero-centered: not rounded before, times 1 + weight in float32, rounded once. The weight may be float32.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
        ...

    def project_back(
        self, x: Tensor, weight: Weight, residual: Tensor | None = None, bias: Tensor | None = None, pieces: int = 1
    ) -> Tensor:
        """linear(x, weight, bias), plus residual [M, N] after rounding: the product that leads from heads, or from the
        inner features of an MLP, back to hidden states (o, down). Tensor parallelism cuts it along K.

        With several `pieces`, a power of two, piece i is the product of columns [i L, (i + 1) L) alone, in float32,
        where L is K / pieces rounded up. The pieces are added in float32 as a balanced binary tree: of four (0 + 1) +
        (2 + 3). The bias is added to their sum in float32, and that is rounded once. So whoever computes some subtree
        changes no bit. Raise ConfigError for a number of pieces that the backend does not compute.
        """
        ...

    def gate_up(self, x: Tensor, gate: Weight, up: Weight, activation: Activation) -> Tensor:
        """gate_mul(linear(x, gate), linear(x, up), activation) for gate and up [I, H]: [M, I]."""
        ...

    def gate_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of tensors of one shape, computed in float32 and rounded once.

        `sigmoid` is the gate of attention's output; `silu` also that of a delta net's. `clamped_silu` of experts clamps
        both, and adds 1 to up (`CLAMP`).
        """
        ...

    def route(self, logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(experts, gates) of a router's logits [M, E]: int32 and float32 [M, top_k].

        Each row's experts are those of the highest logits, of equal ones the lower id, or those `chosen` for it (int32
        [M, top_k], ascending); and they are listed by ascending id. A gate is e^(logit - peak) over the sum of these,
        in float32: over the experts of the row if `spec.normed`, added by ascending id, else over all. A row with NaN
        has gates of NaN, and different ids below E that mean nothing.
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
    ) -> Tensor:
        """What the experts of each row, as `route` gives them, make of x [M, H]: [M, H].

        An expert's inner row is `gate_mul` of its two `linear` products, each with its bias. Its product with `down`
        stays in float32, where the bias is added; it is multiplied by its gate, and the experts of a row are added by
        ascending id, at last `shared` [M, H], and rounded once. Reads no weight of router or shared expert.
        """
        ...

    def rotation(self, positions: Tensor, inv_freq: Tensor, scale: float) -> Rotation:
        """(cosines, sines) of the float32 angles positions (int64 [M]) times inv_freq (float32 [P]), times scale.

        Both float32 [M, P].
        """
        ...

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [M, heads, D] rotated in float32, in pairs (i, i + P) as in Hugging Face models: [M, heads, D].

        With cosines and sines of P < D / 2 pairs the rest of a head stays as it is.
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
        """Queries [M, heads, D] of x [M, H], as `layer.project` makes them; keys and values go to the caches like
        `write_kv`. With an output gate its values too, behind each head's query: [M, heads, 2 * D].
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Stores k and v [M, kv_heads, D] at `slots` (int64 [M], block * block_size + offset) of the caches.

        A cache is [blocks, block_size, kv_heads, D]; how a block holds its values is the backend's own affair.
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
        """Causal attention of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D]: [M, heads, D].

        A query at position p sees the tokens (p - window, p], or all up to p. A score s = scale * (q . k) becomes
        soft_cap * tanh(s / soft_cap) if there is a cap. `sinks` [heads]: the score of one key more that every query of
        a head sees, whose value is zero; it is folded in behind the last split.
        """
        ...

    def convolve(self, x: Tensor, weight: Tensor, tails: Tensor, batch: StateBatch) -> Tensor:
        """SiLU of a causal convolution of each channel by itself: [M, C] of x [M, C] and weight [C, 1, K].

        Row t of a sequence is the sum over j of weight[:, 0, j] times row t - (K - 1) + j, from the oldest on, in
        float32, and rounded once after SiLU. Rows before its first one are its tail. `tails` [slots, K - 1, C]: the
        sequence's last K - 1 rows, those of its tail included, are left there.
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
        """The recurrence of a gated delta net over each sequence's tokens, one after the other: [M, value_heads, V].

        `qkv` [M, channels]: q and k [key_heads, K] and v [value_heads, V] side by side. `b` and `a` [M, value_heads]:
        what its gates are made of. `states` float32 [slots, value_heads, K, V]. In float32, for each token and value
        head, whose key head is head * key_heads // value_heads:

            q = q / (sqrt(q . q + L2_EPS) * sqrt(K)),  k = k / sqrt(k . k + L2_EPS)
            S = S * e^(-e^decay * softplus(a + bias))
            S = S + k (sigmoid(b) * (v - k S))^T
            out = q S, which alone is rounded to the dtype of qkv
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
        """Hidden states [M, H] after a run of layers, from x [M, H], which stays as it is.

        `layers`: from `new_layers`. For each layer, with its memory and its pages, what `layer.run_layers` says; x
        itself if there is no layer. The batches of all pages, and `states`, are of the same sequences; `states` is None
        if no layer is a delta net. `routes`, int32 [layers with experts, M, top_k]: filled with the experts of each
        row, unless it is None. Raise ValueError unless `memories` and `pages` have one for each layer.
        """
        ...

    def next_tokens(self, hidden: Tensor, weight: Weight, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """(token ids int64, log-probs float32, whether the logit is finite and the log-prob a number), each [M].

        `hidden` [any number, H], `weight` [V, H]. The same as `lm_head`, division, `sample` or the lowest id of the
        highest logits, and `log_probs`, one after the other.
        """
        ...

    def next_token_statistics(
        self, hidden: Tensor, weight: Weight, wanted: Wanted, k: int
    ) -> tuple[Tensor, TokenStatistics, Tensor]:
        """`next_tokens`, with `token_statistics` of the logits that each log-prob is of in its place."""
        ...

    def lm_head(self, hidden: Tensor, weight: Weight) -> Tensor:
        """Logits of hidden [M, H] with weight [V, H]: float32 [M, V], accumulated and kept in float32."""
        ...

    def log_probs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The log-softmax of float32 logits [M, V] at one token (int64 [M]) of each row: float32 [M]."""
        ...

    def token_statistics(self, logits: Tensor, token_ids: Tensor, k: int) -> TokenStatistics:
        """`log_probs` of float32 logits [M, V] at `token_ids` (int64 [M]) with what else is known of each row.

        `k`: from 0 to V. The log-prob listed for a token has the bits that `log_probs` gives for it. A row with NaN, or
        without a finite peak, has NaN for log-probs and entropy, and ids that mean nothing.
        """
        ...

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """float32 logits [M, V] with the tokens that a row's filters drop set to -inf.

        `top_k` int64 [M] (-1: off), `top_p` and `min_p` float32 [M]. They apply in that order; the best token always
        stays, and a row with NaN stays as it is.
        """
        ...

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """One token id (int64 [M]) for each row of float32 logits [M, V], drawn from their softmax.

        Gumbel-max: the highest logit + noise, where noise is a function of the row's seed (int64 [M], the bits of an
        unsigned 64-bit number), its position (int64 [M]) and the vocabulary id. Raises no error: -inf is never drawn
        unless the whole row is -inf, and a row with NaN gives an arbitrary id.
        """
        ...
