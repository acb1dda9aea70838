"""The ops a decoder is made of, the contract they keep, and the choice of who computes them.

The contract: **a row's result depends on that row's inputs and on absolute positions only**, with one fixed order of
accumulation. It does not depend on how many rows share the call, which row it is, what the other rows hold, how a
prompt was cut into chunks, the block size of the cache, or the number of threads. Equality means equal bits.

- Matrix products accumulate over K in one order for every number of rows.
- Attention reads keys and values back from the paged cache, as stored. It cuts the key axis at absolute multiples of a
  length that each backend fixes, reduces each split in one order and folds the splits from left to right, in prefill
  and decode alike.
- Reductions and elementwise functions have no path that depends on a row's place in memory.
- Ties go to the lower vocabulary id.
- Random numbers are a function of (seed, absolute position, vocabulary id).

A backend is a module with the functions of `Backend`: plain functions on tensors, with no state. Each backend is exact
against itself; between backends results agree within rounding. Rows are tokens or sequences, always the first
dimension. An op that joins several steps gives the bits of those steps one by one, each rounded to the dtype.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

KV_SPLIT = 128  # of reference and cpu; triton has its own
BACKENDS = ("cpu", "triton", "reference")


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

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """`query_starts` and `context_lens`, int64, made once for all layers."""
        return _int64(self.query_starts), _int64(self.context_lens)


def _int64(values: Sequence[int]) -> Tensor:
    """`values` as a tensor. `torch.tensor` takes longer; `torch.frombuffer` refuses an empty buffer."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Qkv:
    """The weights that turn a hidden state into one layer's queries, keys and values.

    `q` [heads * D, H], `k` and `v` [kv_heads * D, H]; `biases` of the three, or none; `head_norms` [D] of each head of
    q and k, or none.
    """

    q: Weight
    k: Weight
    v: Weight
    biases: tuple[Tensor, Tensor, Tensor] | None
    head_norms: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class DenseLayer:
    """The weights of one layer of a dense decoder.

    `input_norm` and `post_norm` [H]; `o` [H, heads * D]; `gate` and `up` [I, H]; `down` [H, I].
    """

    input_norm: Tensor
    qkv: Qkv
    o: Weight
    post_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


SAMPLE, GREEDY = -1, -2


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

    def new_weight(self, rows: int, columns: int, empty: Callable[..., Tensor]) -> Weight:
        """An uninitialized matrix for the products below, in memory from `empty(*shape)`.

        `empty` makes uninitialized tensors of one dtype on one device, each beginning at a multiple of 64 bytes.
        """
        ...

    def new_layers(self, layers: Sequence[DenseLayer]) -> Sequence[DenseLayer]:
        """The same layers in the form that `layers` reads, made once for many calls.

        Their tensors are contiguous, and always the same ones: only what they hold may change, and between calls where
        their memory lies. Raise ValueError for a tensor that is not contiguous, where the backend needs it.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows `token_ids` (int64 [M]) of weight [V, H]: [M, H]."""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [M, H] over its root mean square, computed in float32 and rounded to x's dtype, times weight [H]."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
        ...

    def linear_add(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        """linear(x, weight) + residual [M, N]."""
        ...

    def gate_up(self, x: Tensor, norm: Tensor, eps: float, gate: Weight, up: Weight) -> Tensor:
        """silu_mul(linear(h, gate), linear(h, up)) for h = rmsnorm(x, norm, eps), gate and up [I, H]: [M, I]."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up of tensors of one shape, computed in float32 and rounded once."""
        ...

    def rotation(self, positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(cosines, sines) of the float32 angles positions (int64 [M]) times inv_freq (float32 [D / 2]), times scale.

        Both float32 [M, D / 2].
        """
        ...

    def rope(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x [M, heads, D] rotated in float32, in pairs (i, i + D / 2) as in Hugging Face models: [M, heads, D]."""
        ...

    def qkv(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weights: Qkv,
        rotation: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Queries [M, heads, D] of hidden states x [M, H]; their keys and values go to the caches like `write_kv`.

        From rmsnorm(x, norm, eps): products with their biases, norms of the heads of q and k with the same eps, and
        `rope` of q and k.
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Stores k and v [M, kv_heads, D] at `slots` (int64 [M], block * block_size + offset) of the caches.

        A cache is [blocks, block_size, kv_heads, D]; how a block holds its values is the backend's own affair.
        """
        ...

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Causal attention of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D]: [M, heads, D]."""
        ...

    def layers(
        self,
        x: Tensor,
        layers: Sequence[DenseLayer],
        eps: float,
        rotation: tuple[Tensor, Tensor],
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Hidden states [M, H] after a run of dense layers of one size, from x [M, H], which stays as it is.

        `layers`: from `new_layers`. For each layer, with its caches, what `run_layers` says; x itself if there is no
        layer. A model with layers of several kinds calls it for each run of dense ones. Raise ValueError unless
        `kv_caches` has a pair for each layer.
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


def run_layers(
    ops: Backend,
    x: Tensor,
    layers: Sequence[DenseLayer],
    eps: float,
    rotation: tuple[Tensor, Tensor],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    slots: Tensor,
    batch: AttentionBatch,
    scale: float,
) -> Tensor:
    """`Backend.layers` by the other ops."""
    for layer, (k_cache, v_cache) in zip(layers, kv_caches, strict=True):
        q = ops.qkv(x, layer.input_norm, eps, layer.qkv, rotation, k_cache, v_cache, slots)
        attention = ops.paged_attention(q, k_cache, v_cache, batch, scale)
        x = ops.linear_add(attention.flatten(1), layer.o, x)
        x = ops.linear_add(ops.gate_up(x, layer.post_norm, eps, layer.gate, layer.up), layer.down, x)
    return x


@dataclass(frozen=True)
class SelectedBackend:
    """The backend for a model. `note`: why a faster one is not used, or empty.

    `can_capture`: whether a CUDA graph can hold its calls.
    """

    name: str
    ops: Backend
    note: str
    can_capture: bool = False


def select_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> SelectedBackend:
    """The backend called `name`, or the best one for the device and the model if `name` is `auto`.

    Raise ValueError if there is no such backend, if it cannot serve the model, or if TRUEROLL_CPU_ISA names an
    instruction set that this machine does not have.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend: expected one of auto, {', '.join(BACKENDS)}, found {name!r}")
    fastest = "cpu" if device.type == "cpu" else "triton"
    wanted = fastest if name == "auto" else name
    if wanted == "reference":
        return _select("reference", device, "")
    obstacle = _obstacle(wanted, device, dtype, head_dim)
    if not obstacle:
        return _select(wanted, device, "")
    if name == wanted:
        raise ValueError(f"backend: expected one that can serve this model on {device}, found {name}: {obstacle}")
    return _select("reference", device, obstacle)


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the backend cannot serve such a model, or an empty string."""
    from . import cpu, triton

    if name == "triton":
        return triton.obstacle(device, dtype, head_dim)
    return cpu.obstacle(dtype, head_dim) if device.type == "cpu" else f"it computes on a CPU, not on {device}"


def _select(name: str, device: torch.device, note: str) -> SelectedBackend:
    return SelectedBackend(name, _ops(name), note, name == "triton" and device.type == "cuda")


def _ops(name: str) -> Backend:
    if name == "cpu":
        from .cpu import backend as cpu

        return cast(Backend, cpu)
    if name == "triton":
        from .triton import backend as triton

        return cast(Backend, triton)
    from . import reference

    return cast(Backend, reference)
