"""Attention by Triton's interpreter: against float64, and the same bits whichever kernel computes a query."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.triton import attention
from trueroll.kernels.triton.attention import KEYS, PARTITION, paged_attention

from .backends import Served
from .inputs import Paged, same_bits

DTYPES = (torch.bfloat16, torch.float16)
Chunk = tuple[int, int, int]  # sequence, first query, end of the queries


def sequences_of(
    lens: Sequence[int], dtype: torch.dtype, size: int = 16, group: int = 2, kv_heads: int = 1, block_size: int = 16
) -> Paged:
    """Sequences in a cache, attended to by the Triton kernels."""
    ops: Any = SimpleNamespace(paged_attention=paged_attention, write_kv=reference.write_kv)
    return Paged(Served(ops, dtype), lens, kv_heads * group, kv_heads, size, block_size)


def attend_in_a_graph(sequences: Paged, chunks: Sequence[Chunk], most: int) -> Tensor:
    """The attention of single queries by the way of graphs: context lengths on the device, of up to `most` tokens."""
    q, batch = sequences.batch(chunks)
    batch = dataclasses.replace(batch, context_lens=[most] * len(chunks), lens=torch.tensor(batch.context_lens))
    return paged_attention(q, sequences.k_cache, sequences.v_cache, batch, sequences.size**-0.5)


def by_torch(sequences: Paged, i: int, dtype: torch.dtype) -> Tensor:
    q, k, v = (x[i].to(dtype).transpose(0, 1)[None] for x in (sequences.q, sequences.k, sequences.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched on grids that are not empty."""
    names: list[str] = []
    launch = attention.launch

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        if 0 not in grid:
            names.append(kernel.fn.__name__)
        launch(kernel, grid, *args, **settings)

    monkeypatch.setattr(attention, "launch", record)
    return names


PREFILL, DECODE = ["_prefill_kernel"], ["_decode_kernel", "_fold_kernel"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size,group,kv_heads", [(16, 7, 1), (64, 1, 2), (80, 2, 1), (128, 2, 2), (256, 1, 1)])
def test_error_is_not_above_that_of_torch(dtype: torch.dtype, size: int, group: int, kv_heads: int) -> None:
    sequences = sequences_of([150], dtype, size, group, kv_heads)
    exact = by_torch(sequences, 0, torch.float64)
    error = (sequences.whole(0) - exact).abs().mean()
    torch_error = (by_torch(sequences, 0, dtype) - exact).abs().mean()
    assert 0 < error <= 1.01 * torch_error


@pytest.mark.parametrize(
    "dtype,size,group,length,chunk_ends",
    [
        (torch.bfloat16, 16, 1, 1111, (64, 65, 300, 512, 513, 1023, 1024, 1100)),
        (torch.float16, 16, 2, 530, (1, 40, 64, 129, 512, 513)),
        (torch.float16, 80, 2, 140, (63, 64, 128)),
        (torch.bfloat16, 80, 7, 70, (63, 64)),
        (torch.float16, 128, 7, 70, (63, 64)),
        (torch.bfloat16, 128, 2, 140, (63, 64, 128)),
        (torch.bfloat16, 256, 1, 70, (63, 64)),
    ],
)
def test_chunks_and_single_queries_give_the_bits_of_the_whole(
    launched: list[str], dtype: torch.dtype, size: int, group: int, length: int, chunk_ends: tuple[int, ...]
) -> None:
    sequences = sequences_of([length], dtype, size, group)
    whole = sequences.whole(0)
    assert launched == PREFILL and len(whole.unique()) > len(whole)
    chunks = [(0, start, end) for start, end in pairwise((0, *chunk_ends, length))]
    for chunk in chunks:
        assert same_bits(sequences.attend([chunk])[0], whole[chunk[1] : chunk[2]]), chunk
    launched.clear()
    singles = [(0, end - 1, end) for end in (1, *chunk_ends, length)]
    found = torch.cat(sequences.attend(singles))
    assert launched == DECODE
    assert same_bits(found, whole[[start for _, start, _ in singles]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_does_not_matter(launched: list[str], dtype: torch.dtype) -> None:
    """Chunks and single queries in one call, in an order that mixes them."""
    sequences = sequences_of([40, 530, 130, 64], dtype, group=3, kv_heads=2)
    chunks = [(2, 120, 130), (1, 529, 530), (0, 0, 40), (3, 63, 64), (1, 500, 520), (2, 64, 65)]
    together = sequences.attend(chunks)
    assert launched == DECODE + PREFILL
    for chunk, found in zip(chunks, together, strict=True):
        assert same_bits(found, sequences.attend([chunk])[0]), chunk
    assert same_bits(torch.cat(together[::-1]), torch.cat(sequences.attend(chunks[::-1])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_size_does_not_matter(launched: list[str], dtype: torch.dtype) -> None:
    chunks = [(0, 500, 540), (1, 69, 70), (0, 514, 515)]
    found = [torch.cat(sequences_of([540, 70], dtype, block_size=n).attend(chunks)) for n in (2, 16, 64, 48)]
    assert launched == (DECODE + PREFILL) * 4
    assert not found[0].isnan().any()
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_context_lengths_on_the_device_decide(launched: list[str], dtype: torch.dtype) -> None:
    """Whatever the host takes for the longest context, and however many programs share the partitions."""
    sequences = sequences_of([1100, 70, 513], dtype, group=7)
    chunks = [(0, 1099, 1100), (1, 69, 70), (2, 512, 513), (0, 40, 41)]
    expected = torch.cat(sequences.attend(chunks))
    for most in (1100, 4 * PARTITION):
        assert same_bits(attend_in_a_graph(sequences, chunks, most), expected)
    assert launched == DECODE * 3


def test_few_programs_may_share_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = sequences_of([1100], torch.bfloat16)
    expected = sequences.attend([(0, 1099, 1100)])[0]
    monkeypatch.setattr(attention, "DECODE_PROGRAMS", 1)
    assert same_bits(sequences.attend([(0, 1099, 1100)])[0], expected)


@pytest.mark.parametrize("place", [KEYS - 1, KEYS, PARTITION - 4, PARTITION])
def test_a_token_that_is_not_finite_reaches_those_who_see_it(launched: list[str], place: int) -> None:
    """Stored as `write_kv` does: 0 for the values that are not finite, NaN for the whole key."""
    sequences = sequences_of([place + 9], torch.bfloat16, kv_heads=2)
    chunk, singles = (0, place - 3, place + 9), [(0, i, i + 1) for i in (place - 1, place, place + 8)]

    def attend() -> tuple[Tensor, Tensor]:
        return sequences.attend([chunk])[0], torch.cat(sequences.attend(singles))

    before = attend()
    sequences.v[0][place, 0, 3] = 0
    sequences.k[0][place, 0] = torch.nan
    sequences.write(0)
    after = attend()
    assert launched == (PREFILL + DECODE) * 2
    for was, now, hidden in zip(before, after, (3, 1), strict=True):
        assert not was.isnan().any()
        assert now[hidden:, :2].isnan().all(), "the head that has the token, for those who see it"
        assert same_bits(now[:hidden], was[:hidden]) and same_bits(now[:, 2:], was[:, 2:])


def test_what_another_sequence_left_in_a_block_is_never_read() -> None:
    sequences = sequences_of([70], torch.bfloat16)
    assert sequences.k_cache[sequences.tables[0, -1]].isnan().any(), "the last block is not full"
    assert not sequences.whole(0).isnan().any() and not sequences.attend([(0, 69, 70)])[0].isnan().any()
