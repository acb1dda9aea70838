"""Caches and logits of more than 2**31 elements, for which kernels must compute large offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from trueroll.kernels.contract import AttentionBatch, Backend

from .moved import DEVICE, random, same, sized

BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 16, 4, 28, 128
LENS = sized((1500, 700, 3), (40, 3))
WIDTH = -(-max(LENS) // BLOCK_SIZE)
BLOCKS = 2**31 // (BLOCK_SIZE * KV_HEADS * SIZE) + len(LENS) * WIDTH


def new_cache() -> Tensor:
    return torch.empty(BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)


def slots_of(tables: Tensor) -> Tensor:
    """Return the slots of the tokens of sequences with lengths LENS."""
    token = [torch.arange(n, device=DEVICE) for n in LENS]
    blocks = [row[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for row, t in zip(tables, token, strict=True)]
    return torch.cat(blocks)


def test_attention_at_both_ends_of_large_caches(kernels: Backend) -> None:
    """Run prefill, decode, and a graph's decode, on equal keys and values in the first and in the last blocks."""
    k_cache, v_cache = new_cache(), new_cache()
    near = torch.arange(len(LENS) * WIDTH, device=DEVICE).view(len(LENS), WIDTH)
    far = BLOCKS - 1 - near
    assert int(slots_of(far).min()) * KV_HEADS * SIZE >= 2**31, "premise: beyond 2**31 elements"
    k, v = (random(sum(LENS), KV_HEADS, SIZE, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    for tables in (near, far):
        kernels.write_kv(k, v, k_cache, v_cache, slots_of(tables))
    q = random(sum(LENS), HEADS, SIZE, dtype=torch.bfloat16)
    ends = torch.tensor(LENS).cumsum(0)
    last, lens = q[ends.to(DEVICE) - 1], torch.tensor(LENS, device=DEVICE)
    queries = [0, *ends.tolist()]
    found = []
    for tables in (near, far):
        batches = (
            (q, AttentionBatch(queries, list(LENS), tables)),
            (last, AttentionBatch(range(len(LENS) + 1), list(LENS), tables)),
            (last, AttentionBatch(range(len(LENS) + 1), [WIDTH * BLOCK_SIZE] * len(LENS), tables, lens)),
        )
        found.append([kernels.paged_attention(rows, k_cache, v_cache, batch, SIZE**-0.5) for rows, batch in batches])
    assert all(out.isfinite().all() for out in found[0])
    assert all(same(*pair) for pair in zip(*found, strict=True))
    assert same(found[0][0][ends.to(DEVICE) - 1], found[0][1]) and same(found[0][1], found[0][2])


def test_logits_of_many_rows(gpu: torch.device, kernels: Backend) -> None:
    rows, vocabulary, hidden = 14_200, 152_064, 256
    assert rows * vocabulary > 2**31
    x, weight = (random(n, hidden, dtype=torch.bfloat16, seed=n) for n in (rows, vocabulary))
    logits = kernels.lm_head(x, weight)
    for row in (0, rows // 2, rows - 1):
        assert same(logits[row : row + 1], kernels.lm_head(x[row : row + 1], weight))
