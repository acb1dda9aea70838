"""Random inputs of the ops, equality of bits, and sequences in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trueroll.kernels.ops import AttentionBatch, Backend, DenseLayer, Qkv, Weight

from .backends import Served


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of bits: distinguishes zeros by sign and takes NaN for equal to itself."""
    assert left.dtype == right.dtype and left.shape == right.shape
    left_bytes, right_bytes = (
        x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy() for x in (left, right)
    )
    return np.array_equal(left_bytes, right_bytes)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(ops: Backend, matrix: Tensor) -> Weight:
    """A matrix [rows, columns] in the backend's layout."""
    weight = ops.new_weight(*matrix.shape, partial(torch.empty, dtype=matrix.dtype))
    weight.copy_(matrix)
    return weight


def strided(x: Tensor) -> Tensor:
    """The same values, not side by side."""
    strided = torch.stack((x, torch.zeros_like(x)), dim=-1)[..., 0]
    assert not strided.is_contiguous() or strided.numel() == 1
    return strided


def make_qkv(
    served: Served, heads: int, kv_heads: int, size: int, biases: bool, norms: bool, hidden: int, seed: int = 0
) -> Qkv:
    """Random weights of a layer's queries, keys and values, with or without biases and norms of the heads."""
    sizes = [n * size for n in (heads, kv_heads, kv_heads)]
    q, k, v = (stored(served.ops, randn(n, hidden, dtype=served.dtype, seed=seed + i)) for i, n in enumerate(sizes))
    bq, bk, bv = (randn(n, dtype=served.dtype, seed=seed + 3 + i) for i, n in enumerate(sizes))
    head_norms = (randn(size, dtype=served.dtype, seed=seed + 7), randn(size, dtype=served.dtype, seed=seed + 8))
    return Qkv(q, k, v, (bq, bk, bv) if biases else None, head_norms if norms else None)


def make_layer(served: Served, qkv: Qkv, intermediate: int, seed: int = 0) -> DenseLayer:
    """`qkv` with the other weights of a layer, random. Norms are small, so that queries do not see one key alone."""
    width, hidden = qkv.q.shape

    def matrix(rows: int, columns: int, seed: int) -> Weight:
        return stored(served.ops, randn(rows, columns, dtype=served.dtype, seed=seed))

    return DenseLayer(
        input_norm=randn(hidden, dtype=served.dtype, seed=seed) / 10,
        qkv=qkv,
        o=matrix(hidden, width, seed + 1),
        post_norm=randn(hidden, dtype=served.dtype, seed=seed + 2) / 10,
        gate=matrix(intermediate, hidden, seed + 3),
        up=matrix(intermediate, hidden, seed + 4),
        down=matrix(hidden, intermediate, seed + 5),
    )


def empty_caches(blocks: int, block_size: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches of keys and values in which every place holds NaN."""
    shape = (blocks, block_size, kv_heads, size)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


class Paged:
    """Sequences of given lengths in a paged cache whose unused places hold NaN, with one query for each token.

    `q`, `k`, `v`: for each sequence [its length, heads, size], those of keys and values with `kv_heads` heads.
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
    ) -> None:
        self.ops, self.lens, self.size, self.block_size = served.ops, lens, size, block_size
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 3
        self.k_cache, self.v_cache = empty_caches(num_blocks, block_size, kv_heads, size, served.dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = torch.zeros(len(lens), max(counts), dtype=torch.int64)
        self.q = [randn(n, heads, size, dtype=served.dtype, seed=100 * i) for i, n in enumerate(lens)]
        self.k = [randn(n, kv_heads, size, dtype=served.dtype, seed=100 * i + 1) for i, n in enumerate(lens)]
        self.v = [randn(n, kv_heads, size, dtype=served.dtype, seed=100 * i + 2) for i, n in enumerate(lens)]
        for i, blocks in enumerate(order[: sum(counts)].split(counts)):
            self.tables[i, : len(blocks)] = blocks
            self.write(i)

    def slots(self, i: int) -> Tensor:
        """Where the tokens of sequence i stand."""
        tokens = torch.arange(self.lens[i])
        return self.tables[i, tokens // self.block_size] * self.block_size + tokens % self.block_size

    def write(self, i: int) -> None:
        """Stores the keys and values of sequence i as they are now."""
        self.ops.write_kv(self.k[i], self.v[i], self.k_cache, self.v_cache, self.slots(i))

    def attend(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        """The attention of chunks (sequence, start, end), computed in one call; one tensor for each chunk."""
        q, batch = self.batch(chunks)
        out = self.ops.paged_attention(q, self.k_cache, self.v_cache, batch, self.size**-0.5)
        return out.split([end - start for _, start, end in chunks])

    def batch(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[Tensor, AttentionBatch]:
        """The queries of chunks, and which tokens they attend to."""
        ends = list(accumulate(end - start for _, start, end in chunks))
        tables = self.tables[[i for i, _, _ in chunks]]
        q = torch.cat([self.q[i][start:end] for i, start, end in chunks])
        return q, AttentionBatch([0, *ends], [end for _, _, end in chunks], tables)

    def whole(self, i: int) -> Tensor:
        return self.attend([(i, 0, self.lens[i])])[0]
