"""Attention in Triton's interpreter: against float64, and the same bits from every kernel that computes a query."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.triton import attention
from trueroll.kernels.triton.attention import NARROW, PARTITION, paged_attention

from ..backends import Served, both_dtypes
from ..inputs import Paged, randn, same_bits

KEYS = NARROW[0]
Chunk = tuple[int, int, int]  # sequence, first query, end of the queries


def sequences_of(
    lens: Sequence[int],
    dtype: torch.dtype,
    size: int = 16,
    group: int = 2,
    kv_heads: int = 1,
    block_size: int = 16,
    sinks: Tensor | None = None,
    **attention: Any,
) -> Paged:
    """Return sequences in a cache that the Triton kernels attend to. `attention`: their window and soft cap."""
    ops: Any = SimpleNamespace(paged_attention=paged_attention, write_kv=reference.write_kv)
    sequences = Paged(Served(ops, dtype), lens, kv_heads * group, kv_heads, size, block_size, **attention)
    sequences.attention |= dict(sinks=sinks)
    return sequences


def attend_in_a_graph(sequences: Paged, chunks: Sequence[Chunk], most: int) -> Tensor:
    """Return the attention of single queries as in a CUDA graph: context lengths on the device, up to `most` tokens."""
    q, batch = sequences.batch(chunks)
    batch = dataclasses.replace(batch, context_lens=[most] * len(chunks), lens=torch.tensor(batch.context_lens))
    caches = sequences.k_cache, sequences.v_cache
    return paged_attention(q, *caches, batch, sequences.size**-0.5, **sequences.attention)


def in_float64(
    sequences: Paged, i: int, window: int | None, soft_cap: float | None, sinks: Tensor | None, rounded: bool = False
) -> Tensor:
    """Return the attention of sequence i; if `rounded`, with weights relative to the highest rounded to the dtype."""
    q, k, v = (x[i].double().transpose(0, 1) for x in (sequences.q, sequences.k, sequences.v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * sequences.size**-0.5
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores.masked_fill_((distance < 0) | (distance >= (window or q.shape[1])), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weighed = (weights.to(sequences.v[i].dtype).double() if rounded else weights) @ v
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.double()[:, None, None] - scores.amax(-1, keepdim=True)).exp()
    return (weighed / total).transpose(0, 1)


def sinks_of(heads: int, dtype: torch.dtype) -> Tensor:
    """Return sinks, some below all scores and some above."""
    return randn(heads, dtype=dtype, seed=9) * 4


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched on non-empty grids."""
    names: list[str] = []
    launch = attention.launch

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        if 0 not in grid:
            names.append(kernel.fn.__name__)
        launch(kernel, grid, *args, **settings)

    monkeypatch.setattr(attention, "launch", record)
    return names


PREFILL, DECODE = ["_prefill_kernel"], ["_decode_kernel", "_fold_kernel"]


@both_dtypes
@pytest.mark.parametrize(
    "size,group,kv_heads,window,soft_cap,with_sinks",
    [
        (16, 7, 1, None, None, False),
        (64, 1, 2, None, None, False),
        (80, 2, 1, None, 2.0, False),
        (128, 2, 2, None, None, False),
        (256, 1, 1, None, None, False),
        (16, 1, 1, 1, None, False),
        (16, 2, 1, 70, None, False),
        (16, 2, 1, 20, 0.5, False),
        (16, 3, 2, None, None, True),
        (64, 2, 1, 20, 0.5, True),
    ],
)
def test_error_is_that_of_rounding_weights_and_results(
    dtype: torch.dtype,
    size: int,
    group: int,
    kv_heads: int,
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
) -> None:
    sinks = sinks_of(kv_heads * group, dtype) if with_sinks else None
    sequences = sequences_of([150], dtype, size, group, kv_heads, window=window, soft_cap=soft_cap, sinks=sinks)
    exact = in_float64(sequences, 0, window, soft_cap, sinks)
    rounded = in_float64(sequences, 0, window, soft_cap, sinks, rounded=True).to(dtype)
    error, least = ((x - exact).abs() for x in (sequences.whole(0), rounded))
    assert error.mean() <= 1.01 * least.mean()


@pytest.mark.parametrize(
    "dtype,size,group,length,chunk_ends,window,soft_cap",
    [
        (torch.bfloat16, 16, 1, 1111, (64, 65, 300, 512, 513, 1023, 1024, 1100), None, None),
        (torch.bfloat16, 16, 1, 640, (64, 65, 300, 512, 513, 582, 600), 70, None),
        (torch.bfloat16, 16, 1, 600, (64, 511, 512, 513, 576), 513, 1.0),
        (torch.float16, 16, 2, 530, (1, 40, 64, 129, 512, 513), None, None),
        (torch.float16, 16, 3, 200, (1, 3, 5, 40, 64, 66, 129), 3, None),
        (torch.float16, 80, 2, 140, (63, 64, 128), None, None),
        (torch.bfloat16, 16, 64, 70, (1, 63, 64), None, None),
        (torch.bfloat16, 80, 7, 70, (63, 64), None, None),
        (torch.float16, 128, 7, 70, (63, 64), None, None),
        (torch.bfloat16, 128, 2, 140, (63, 64, 128), None, 2.0),
        (torch.bfloat16, 256, 1, 70, (63, 64), None, None),
        (torch.bfloat16, 256, 2, 140, (63, 64, 128), 64, None),
    ],
)
@thinned(lambda dtype, **_: dtype == torch.bfloat16)
def test_chunks_and_single_queries_give_the_bits_of_the_whole(
    launched: list[str],
    dtype: torch.dtype,
    size: int,
    group: int,
    length: int,
    chunk_ends: tuple[int, ...],
    window: int | None,
    soft_cap: float | None,
) -> None:
    sequences = sequences_of([length], dtype, size, group, window=window, soft_cap=soft_cap)
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


@pytest.mark.parametrize("window,soft_cap", [(None, None), (70, None), (513, 2.0)])
@thinned(lambda window, soft_cap: window == 513)
def test_sinks_have_the_same_bits_in_chunks_single_queries_and_graphs(
    launched: list[str], window: int | None, soft_cap: float | None
) -> None:
    """The sink is added after the last partition. The contexts have one or two partitions."""
    attention: dict[str, Any] = dict(window=window, soft_cap=soft_cap)
    sinks, ends = sinks_of(6, torch.bfloat16), (1, 40, 512, 513, 520)
    with_sinks = sequences_of([520], torch.bfloat16, group=3, kv_heads=2, sinks=sinks, **attention)
    without = sequences_of([520], torch.bfloat16, group=3, kv_heads=2, **attention)
    whole = with_sinks.whole(0)
    assert ((whole != without.whole(0)).flatten(0, 1).any(0)).all(), "premise: sinks change results"
    for start, end in ((33, 40), (500, 520)):
        assert same_bits(with_sinks.attend([(0, start, end)])[0], whole[start:end])
    singles = [(0, end - 1, end) for end in ends]
    launched.clear()
    for found in (torch.cat(with_sinks.attend(singles)), attend_in_a_graph(with_sinks, singles, 2 * PARTITION)):
        assert same_bits(found, whole[[end - 1 for end in ends]])
    assert launched == DECODE * 2


@both_dtypes
def test_sinks_without_weight_change_no_bit_and_high_ones_leave_nothing(dtype: torch.dtype) -> None:
    """Every head has a different sink."""
    sinks = torch.tensor([-torch.inf, 1e4, -1e4, 0.0]).to(dtype)
    without, with_sinks = (sequences_of([70], dtype, group=2, kv_heads=2, sinks=given) for given in (None, sinks))
    for each in (without, with_sinks):
        assert same_bits(each.attend([(0, 69, 70)])[0][0], each.whole(0)[69])
    expected, found = without.whole(0), with_sinks.whole(0)
    assert same_bits(found[:, [0, 2]], expected[:, [0, 2]]) and found[:, 1].eq(0).all()
    assert (found[:, 3] != expected[:, 3]).any(1).all()


@both_dtypes
def test_results_do_not_depend_on_other_sequences(launched: list[str], dtype: torch.dtype) -> None:
    """One call computes chunks and single queries in a mixed order."""
    sequences = sequences_of([40, 530, 130, 64], dtype, group=3, kv_heads=2, sinks=sinks_of(6, dtype))
    chunks = [(2, 120, 130), (1, 529, 530), (0, 0, 40), (3, 63, 64), (1, 500, 520), (2, 64, 65)]
    together = sequences.attend(chunks)
    assert launched == DECODE + PREFILL
    for chunk, found in zip(chunks, together, strict=True):
        assert same_bits(found, sequences.attend([chunk])[0]), chunk
    assert same_bits(torch.cat(together[::-1]), torch.cat(sequences.attend(chunks[::-1])))


@both_dtypes
def test_results_do_not_depend_on_block_size(launched: list[str], dtype: torch.dtype) -> None:
    chunks = [(0, 500, 540), (1, 69, 70), (0, 514, 515)]
    found = [torch.cat(sequences_of([540, 70], dtype, block_size=n).attend(chunks)) for n in (2, 16, 64, 48)]
    assert launched == (DECODE + PREFILL) * 4
    assert not found[0].isnan().any()
    assert all(same_bits(found[0], other) for other in found[1:])


def test_a_window_over_all_tokens_changes_no_bit() -> None:
    sequences, windowed = (sequences_of([600], torch.bfloat16, window=window) for window in (None, 520))
    chunk, singles = [(0, 500, 560)], [(0, 519, 520), (0, 520, 521)]
    for found, expected, inside in (
        (windowed.attend(x), sequences.attend(x), n) for x, n in ((chunk, 20), (singles, 1))
    ):
        found, expected = torch.cat(found), torch.cat(expected)
        assert same_bits(found[:inside], expected[:inside])
        assert (found[inside:] != expected[inside:]).flatten(1).any(1).all()


@pytest.mark.parametrize("window", [70, 600])
def test_skipping_keys_behind_a_window_changes_no_bit(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions and tiles behind the window are skipped. Computing all of their keys gives the same bits."""
    sequences = sequences_of([1111], torch.bfloat16, window=window)
    attend = (lambda: sequences.attend([(0, 1075, 1111)])), (lambda: sequences.attend([(0, 575, 576), (0, 1110, 1111)]))
    tiles = count_tiles(monkeypatch)
    expected = [torch.cat(each()) for each in attend]
    computed = len(tiles)
    monkeypatch.setattr(attention, "_oldest", lambda position, window: 0)
    monkeypatch.setattr(attention, "_most_partitions", lambda longest, window: -(-longest // PARTITION))
    assert all(same_bits(torch.cat(each()), x) for each, x in zip(attend, expected, strict=True))
    assert computed < len(tiles) - computed, "premise"


def test_a_window_bounds_the_tiles_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window also bounds memory, even if context lengths are on the device."""
    sequences = sequences_of([5000], torch.bfloat16, window=KEYS)
    tiles = count_tiles(monkeypatch)
    sequences.attend([(0, 4992, 5000)])
    sequences.attend([(0, 4999, 5000)])
    attend_in_a_graph(sequences, [(0, 4999, 5000)], 2**17)
    assert len(tiles) == 3 * 2
    assert [attention._most_partitions(n, KEYS) for n in (5, PARTITION, PARTITION + 1, 2**17)] == [1, 1, 2, 2]
    assert [attention._most_partitions(2**17, n) for n in (1, 2, PARTITION + 1, PARTITION + 2)] == [1, 2, 2, 3]


def count_tiles(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows by one for each tile of keys that a program computes."""
    tiles: list[None] = []
    add_tile = attention._add_tile
    monkeypatch.setattr(attention, "_add_tile", lambda *args: (tiles.append(None), add_tile(*args))[1])
    return tiles


@pytest.mark.parametrize("window", [1, 70, 600])
def test_table_entries_behind_the_windows_are_never_read(launched: list[str], window: int) -> None:
    """The blocks behind the windows may already belong to other sequences, or to none."""
    sequences = sequences_of([1111], torch.bfloat16, window=window)
    chunk, single = (0, 1080, 1100), (0, 1110, 1111)
    expected = [sequences.attend([each])[0] for each in (chunk, single)]
    unused = next(i for i, block in enumerate(sequences.k_cache) if block.isnan().all())
    for (_, first, end), before in zip((chunk, single), expected, strict=True):
        sequences.tables[0, : (first - window + 1) // sequences.block_size] = unused
        assert sequences.v_cache[sequences.tables[0, 0]].isnan().all()
        assert same_bits(sequences.attend([(0, first, end)])[0], before)
    assert launched == (PREFILL + DECODE) * 2
    assert same_bits(attend_in_a_graph(sequences, [single], 2048), expected[1])


@pytest.mark.parametrize("window", [None, 70])
@both_dtypes
def test_context_lengths_on_the_device_decide(launched: list[str], dtype: torch.dtype, window: int | None) -> None:
    """The host may assume any maximum context, and any number of programs may share the partitions."""
    sequences = sequences_of([1100, 70, 513], dtype, group=7, window=window)
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


@pytest.mark.parametrize(
    "place,window", [(KEYS - 1, None), (KEYS, 5), (PARTITION - 4, None), (PARTITION - 4, 5), (PARTITION, 5)]
)
def test_a_non_finite_token_reaches_only_queries_that_see_it(
    launched: list[str], place: int, window: int | None
) -> None:
    """The token is stored as by `write_kv`: values that are not finite become 0, and the whole key becomes NaN."""
    sequences = sequences_of([place + 9], torch.bfloat16, kv_heads=2, window=window)
    chunk, singles = (0, place - 3, place + 9), [(0, i, i + 1) for i in (place - 1, place, place + 4, place + 8)]

    def attend() -> tuple[Tensor, Tensor]:
        return sequences.attend([chunk])[0], torch.cat(sequences.attend(singles))

    before = attend()
    sequences.v[0][place, 0, 3] = 0
    sequences.k[0][place, 0] = torch.nan
    sequences.write(0)
    after = attend()
    assert launched == (PREFILL + DECODE) * 2
    seen = 9 if window is None else window
    for was, now, positions in zip(before, after, (range(-3, 9), (-1, 0, 4, 8)), strict=True):
        sees = torch.tensor([0 <= distance < seen for distance in positions])
        assert not was.isnan().any()
        assert now[sees, :2].isnan().all(), "the head that has the token, in queries that see it"
        assert same_bits(now[~sees], was[~sees]) and same_bits(now[:, 2:], was[:, 2:])


def test_what_another_sequence_left_in_a_block_is_never_read() -> None:
    sequences = sequences_of([70], torch.bfloat16)
    assert sequences.k_cache[sequences.tables[0, -1]].isnan().any(), "the last block is not full"
    assert not sequences.whole(0).isnan().any() and not sequences.attend([(0, 69, 70)])[0].isnan().any()


def test_a_plan_is_read_on_the_stream_alone_that_it_was_copied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream would not wait for the plan's tensors to arrive."""
    sequences, copied = sequences_of([5, 3], torch.bfloat16), []
    to_device, streams = attention.to_device, iter("aaba")
    monkeypatch.setattr(attention, "to_device", lambda x, device: copied.append(x) or to_device(x, device))
    monkeypatch.setattr(attention, "current_stream", lambda device: next(streams), raising=False)
    counts = [(sequences.attend([(0, 1, 5), (1, 2, 3)]), len(copied))[1] for _ in range(4)]
    assert counts[0] == 4, "premise: a plan is four tensors"
    assert counts == [4, 4, 8, 12], "kept for the layers of a step, made anew for another stream"
