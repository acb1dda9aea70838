"""The ops a decoder is made of, the contract they keep, and the choice of who computes them.

The contract: **a row's result depends on that row's inputs and on absolute positions only**, with one fixed order of
accumulation. It does not depend on how many rows share the call, which row it is, what the other rows hold, how a
prompt was cut into chunks, the block size of the cache, or the number of threads. Equality means equal bits.

- Matrix products accumulate over K in one order for every number of rows.
- Attention reads keys and values back from the paged cache, as stored. It cuts the key axis at absolute multiples of
  `KV_SPLIT`, reduces each split in one order and folds the splits from left to right, in prefill and decode alike.
- Reductions and elementwise functions have no path that depends on a row's place in memory.
- Ties go to the lower vocabulary id.
- Random numbers are a function of (seed, absolute position, vocabulary id).

A backend is a module with the functions of `Backend`: plain functions on tensors, with no state. Each backend is exact
against itself; between backends results agree within rounding. Rows are tokens or sequences, always the first
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

KV_SPLIT = 128


@dataclass(frozen=True)
class AttentionBatch:
    """Which queries attend to which cached tokens: a mixed batch of prompt chunks and decodes.

    Sequence i owns query rows [query_starts[i], query_starts[i + 1]), the last ones of its `context_lens[i]` tokens,
    all of which are in the cache. Token t of it lies in block `block_tables[i, t // block_size]`, at offset t %
    block_size. `block_tables`: int64 [num_sequences, max_blocks], padded with any valid block id.
    """

    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Tensor


class Backend(Protocol):
    """The functions every backend offers. M: rows, H: hidden size, V: vocabulary size, D: head size."""

    def instruction_set(self) -> str:
        """What the backend computes with on this machine, for logs and health."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
        ...

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows `token_ids` (int64 [M]) of weight [V, H]: [M, H]."""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H] over its root mean square, computed in float32 and rounded to x's dtype, times weight [H]."""
        ...

    def add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rmsnorm(x + residual), x + residual), both [M, H]."""
        ...

    def rope(self, x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
        """Rotates x [M, heads, D] by the float32 angles positions (int64 [M]) times inv_freq (float32 [D / 2]).

        Pairs are (i, i + D / 2), as in Hugging Face models; sines and cosines are multiplied by `scale`.
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Stores k and v [M, kv_heads, D] at `slots` (int64 [M], block * block_size + offset) of the caches."""
        ...

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Causal attention of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D]: [M, heads, D]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [M, 2 * I] = (gate, up): [M, I]."""
        ...

    def lm_head(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of hidden [M, H] with weight [V, H]: float32 [M, V], accumulated and kept in float32."""
        ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 [M, V] to float32 [M, V]."""
        ...

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """float32 logits [M, V] with the tokens that a row's filters drop set to -inf.

        `top_k` int64 [M] (-1: off), `top_p` and `min_p` float32 [M]. They apply in that order; the best token always
        stays.
        """
        ...

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """One token id (int64 [M]) for each row of float32 logits [M, V], drawn from their softmax.

        Gumbel-max: the highest logit + noise, where noise is a function of the row's seed (int64 [M], the bits of an
        unsigned 64-bit number), its position (int64 [M]) and the vocabulary id. Raises no error: -inf is never drawn
        unless the whole row is -inf, and a row with NaN gives an arbitrary id.
        """
        ...


def select_backend(name: str, device: torch.device) -> tuple[str, Backend]:
    """The backend called `name`, or the best one for `device` if `name` is `auto`, with its name."""
    from . import reference

    if name not in ("auto", "reference"):
        raise ValueError(f"backend: expected auto or reference for device {device}, found {name!r}")
    return "reference", cast(Backend, reference)
