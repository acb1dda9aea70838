"""Attention over the paged cache.

Owned here: which program computes what, and the order of every sum. Not owned: how keys and values come into the cache.
One promise of those who write it is used: a value in the cache is finite, and a token whose key or value was not finite
has a key of NaN throughout. So a token that a query does not see adds nothing to it, and one that it sees makes it NaN.

A row is a query and one head of the group that shares a key-value head. Rows are the columns of every tile: a product
is keys [KEYS, D] by queries [D, rows], or values [D, KEYS] by weights [KEYS, rows], and sums over keys run down a
column. So no bit depends on how many rows a tile has.

The key axis is cut at absolute multiples of PARTITION. A partition is reduced from fresh by online softmax (Milakov and
Gimelshein 2018), one tile of KEYS after the other; the partitions are folded from left to right. This is done in two
ways, by the same functions, so that a query's bits do not depend on the way:

- Sequences with one query: several programs share the partitions of a sequence and key-value head, and a second kernel
  folds what they leave in a workspace. Each key and value is read once; D + 2 float32 numbers for each partition and
  row are written and read.
- Sequences with more queries: one program takes a tile of rows through all its partitions and folds on the way. Keys
  and values are read once for each tile of rows.

A row that sees nothing of a tile or of a partition multiplies what it holds by 1 and adds zeros: that changes no more
than the sign of a zero, and zeros are made positive at the end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..contract import AttentionBatch
from ..transfer import to_device
from .launch import aligned, device_function, exact_jit, launch

KEYS = 64
PARTITION = 512
DECODE_PROGRAMS = 2048  # several for each multiprocessor of a large GPU
WARPS, STAGES = 4, 3
LOG2_E = 1.4426950408889634


class _Plan(NamedTuple):
    """Which kernel computes which sequence. The tensors are int64.

    `decodes` [n]: the sequences with one query. `tiles` [n, 2]: sequence and number of each tile of rows of the others.
    `starts` and `lens`: `query_starts` and `context_lens` of all sequences. `longest`: the longest of `decodes`.
    """

    decodes: Tensor
    tiles: Tensor
    starts: Tensor
    lens: Tensor
    longest: int


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D]: [M, heads, D].

    bfloat16 or float16, D up to 256. Scores, softmax and sums are float32; weights are rounded to the dtype before they
    multiply values. With `batch.lens`, what is computed follows from tensors on the device alone.
    """
    q, caches, tables = aligned(q), (k_cache, v_cache), aligned(batch.block_tables)
    out = torch.empty_like(q)
    if batch.lens is not None:
        lens = aligned(batch.lens)
        # Where sequences are not listed, the kernels read only the last of the three places.
        _decode(q, caches, tables, (lens, lens, lens), max(batch.context_lens), scale, out, listed=False)
        return out
    rows_per_query, tile_rows = q.shape[1] // k_cache.shape[2], _tile_rows(q.shape[2])
    plan = _plan(tuple(batch.query_starts), tuple(batch.context_lens), rows_per_query, tile_rows, q.device)
    places = plan.decodes, plan.starts, plan.lens
    _decode(q, caches, tables, places, plan.longest, scale, out, listed=True)
    _prefill(q, caches, tables, plan, scale, out)
    return out


@lru_cache(maxsize=1)
def _plan(
    starts: tuple[int, ...], lens: tuple[int, ...], rows_per_query: int, tile_rows: int, device: torch.device
) -> _Plan:
    """The plan of a batch, made once for all layers, which run on one stream.

    Of a sequence, the tiles that see the most keys come first.
    """
    queries = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    tile_counts = [-(-count * rows_per_query // tile_rows) if count > 1 else 0 for count in queries]
    tiles = [(i, tile) for i, count in enumerate(tile_counts) for tile in reversed(range(count))]
    decodes = [i for i, count in enumerate(queries) if count == 1]
    tensors = (to_device(torch.tensor(x, dtype=torch.int64), device) for x in (decodes, tiles, starts, lens))
    return _Plan(*tensors, longest=max((lens[i] for i in decodes), default=0))


def _tile_rows(head_dim: int) -> int:
    """How many rows a program takes where there are several queries: as many as its registers hold."""
    return 32 if head_dim <= 128 else 16


def _decode(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    tables: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    longest: int,
    scale: float,
    out: Tensor,
    listed: bool,
) -> None:
    """Computes the sequences that `places` lists, or if they are not listed, query i from sequence i for all.

    `places`: `decodes`, `starts` and `lens` of a plan. `longest`: the most tokens that such a sequence may have.
    """
    kv_heads, count, partitions = caches[0].shape[2], len(places[0]), -(-longest // PARTITION)
    group = q.shape[1] // kv_heads
    peaks = q.new_empty((count, kv_heads, partitions, group), dtype=torch.float32)
    parts = peaks, torch.empty_like(peaks), q.new_empty((*peaks.shape, q.shape[2]), dtype=torch.float32)
    shapes = _shapes(q, kv_heads, max(16, _power_of_2(group)))
    grid = count, kv_heads, min(partitions, -(-DECODE_PROGRAMS // max(1, count * kv_heads)))
    args = q, *caches, tables, *places, *parts, tables.shape[1], partitions, scale * LOG2_E
    form = dict(LISTED=listed, KEYS=KEYS, BLOCK=caches[0].shape[1], **shapes)
    launch(_decode_kernel, grid, *args, warps=WARPS, stages=STAGES, **form)
    launch(_fold_kernel, grid[:2], *parts, *places, out, partitions, warps=WARPS, LISTED=listed, **shapes)


def _prefill(q: Tensor, caches: tuple[Tensor, Tensor], tables: Tensor, plan: _Plan, scale: float, out: Tensor) -> None:
    """Computes the tiles of a plan."""
    _, block_size, kv_heads, head_dim = caches[0].shape
    args = q, *caches, tables, plan.tiles, plan.starts, plan.lens, out, tables.shape[1], scale * LOG2_E
    form = dict(KEYS=KEYS, BLOCK=block_size, **_shapes(q, kv_heads, _tile_rows(head_dim)))
    launch(_prefill_kernel, (len(plan.tiles), kv_heads), *args, warps=WARPS, stages=STAGES, **form)


def _shapes(q: Tensor, kv_heads: int, rows: int) -> dict[str, Any]:
    """Constants of all kernels. SIZE: D padded to what tiles may measure; a matrix instruction takes at least 64."""
    size = max(64, _power_of_2(q.shape[2]))
    return dict(GROUP=q.shape[1] // kv_heads, D=q.shape[2], SIZE=size, ROWS=rows, PARTITION=PARTITION)


def _power_of_2(n: int) -> int:
    """The lowest that is not below n."""
    return 1 << (n - 1).bit_length()


@exact_jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    sequences_ptr,
    starts_ptr,
    lens_ptr,
    peaks_ptr,
    totals_ptr,
    outs_ptr,
    width,
    partitions,
    scale,
    LISTED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Program (i, kv_head, j): partitions j, j + number of such programs, ... of the i-th sequence."""
    i, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, query, length = _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED)
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    head = (query * tl.num_programs(1) + kv_head) * GROUP + tl.minimum(row, GROUP - 1)
    q = tl.load(q_ptr + head[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
    position = tl.zeros([ROWS], tl.int32) + (length - 1)
    table_ptr = tables_ptr + sequence * width
    real = row < GROUP
    for index in range(tl.program_id(2), tl.cdiv(length, PARTITION), tl.num_programs(2)):
        start = index * PARTITION
        end = tl.minimum(start + PARTITION, length)
        peak, total, out = _partition(
            q, position, start, end, length - 1, table_ptr, k_ptr, v_ptr, scale, KEYS, BLOCK, D, SIZE, ROWS
        )
        part = ((i * tl.num_programs(1) + kv_head) * partitions + index) * GROUP + row
        tl.store(peaks_ptr + part, peak, mask=real)
        tl.store(totals_ptr + part, total, mask=real)
        tl.store(outs_ptr + part[None, :] * D + d[:, None], out, mask=real[None, :] & (d < D)[:, None])


@exact_jit
def _fold_kernel(
    peaks_ptr,
    totals_ptr,
    outs_ptr,
    sequences_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    partitions,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Program (i, kv_head): the result of the i-th sequence's query, from what `_decode_kernel` left."""
    i, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, query, length = _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED)
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    real = (row < GROUP)[None, :] & (d < D)[:, None]
    peak, total, out = _fresh(SIZE, ROWS)
    for index in tl.range(0, tl.cdiv(length, PARTITION), loop_unroll_factor=4):  # type: ignore[reportGeneralTypeIssues]
        part = ((i * tl.num_programs(1) + kv_head) * partitions + index) * GROUP + row
        part_peak = tl.load(peaks_ptr + part, mask=row < GROUP, other=0.0)
        part_total = tl.load(totals_ptr + part, mask=row < GROUP, other=1.0)
        part_out = tl.load(outs_ptr + part[None, :] * D + d[:, None], mask=real, other=0.0)
        peak, total, out = _fold(peak, total, out, part_peak, part_total, part_out)
    head = (query * tl.num_programs(1) + kv_head) * GROUP + row
    tl.store(out_ptr + head[None, :] * D + d[:, None], _mean(total, out), mask=real)


@exact_jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    tiles_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    width,
    scale,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Program (i, kv_head): the results of the rows of tile i."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 2)
    start = tl.load(starts_ptr + sequence)
    queries = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    length = tl.load(lens_ptr + sequence).to(tl.int32)
    first, last = tl.load(tiles_ptr + tile * 2 + 1).to(tl.int32) * ROWS, queries * GROUP - 1
    row, d = tl.minimum(first + tl.arange(0, ROWS), last), tl.arange(0, SIZE)
    head = ((start + row // GROUP) * tl.num_programs(1) + kv_head) * GROUP + row % GROUP
    q = tl.load(q_ptr + head[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
    position = length - queries + row // GROUP
    seen = length - queries + tl.minimum(first + ROWS - 1, last) // GROUP + 1
    table_ptr = tables_ptr + sequence * width
    peak, total, out = _fresh(SIZE, ROWS)
    for begin in range(0, seen, PARTITION):
        end = tl.minimum(begin + PARTITION, seen)
        part_peak, part_total, part_out = _partition(
            q, position, begin, end, length - 1, table_ptr, k_ptr, v_ptr, scale, KEYS, BLOCK, D, SIZE, ROWS
        )
        peak, total, out = _fold(peak, total, out, part_peak, part_total, part_out)
    real = (first + tl.arange(0, ROWS) <= last)[None, :] & (d < D)[:, None]
    tl.store(out_ptr + head[None, :] * D + d[:, None], _mean(total, out), mask=real)


@device_function
def _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED: tl.constexpr):
    """(sequence, its only query, context length) of the i-th sequence that decodes."""
    sequence = i
    query = i
    if LISTED:
        sequence = tl.load(sequences_ptr + i)
        query = tl.load(starts_ptr + sequence)
    return sequence, query, tl.load(lens_ptr + sequence).to(tl.int32)


@device_function
def _partition(
    q,
    position,
    start,
    end,
    last,
    table_ptr,
    k_ptr,
    v_ptr,
    scale,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The partial softmax of rows q [SIZE, ROWS] over keys [start, end), of which a row sees those up to its position.

    `last`: the sequence's last token, read again in place of later ones, which may be another sequence's.
    """
    d = tl.arange(0, SIZE)
    peak, total, out = _fresh(SIZE, ROWS)
    for first in range(start, end, KEYS):
        token = first + tl.arange(0, KEYS)
        stored = tl.minimum(token, last)
        slot = tl.load(table_ptr + stored // BLOCK) * BLOCK + stored % BLOCK
        place = (slot * tl.num_programs(1) + tl.program_id(1)) * D
        k = tl.load(k_ptr + place[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + place[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
        scores = _scores(q, k, token[:, None] <= position[None, :], scale)
        peak, total, out = _add_tile(peak, total, out, scores, v)
    return peak, total, out


@device_function
def _fresh(SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The partial softmax over no key: the highest score, the sum of weights, and that of weighted values."""
    return tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([SIZE, ROWS], tl.float32)


@device_function
def _scores(q, k, visible, scale):
    """Scores [KEYS, ROWS] of keys k [KEYS, SIZE] in powers of 2."""
    return tl.where(visible, tl.dot(k, q) * scale, -float("inf"))


@device_function
def _add_tile(peak, total, out, scores, v):
    """A partial softmax with the keys of a tile added, their values v [SIZE, KEYS].

    The highest score of a tile may pass over NaN, but its weight is NaN, and so are `total` and `out` from then on.
    """
    highest = tl.maximum(peak, tl.max(scores, axis=0), propagate_nan=tl.PropagateNan.ALL)
    base = _base(highest)
    weights = tl.exp2(scores - base[None, :])
    kept = tl.exp2(peak - base)
    return highest, total * kept + tl.sum(weights, axis=0), tl.dot(v, weights.to(v.dtype), out * kept[None, :])


@device_function
def _fold(left_peak, left_total, left_out, peak, total, out):
    """Two partial softmaxes as one."""
    highest = tl.maximum(left_peak, peak, propagate_nan=tl.PropagateNan.ALL)
    base = _base(highest)
    left_kept, kept = tl.exp2(left_peak - base), tl.exp2(peak - base)
    return (
        highest,
        left_total * left_kept + total * kept,
        left_out * left_kept[None, :] + out * kept[None, :],
    )


@device_function
def _base(peak):
    """What scores are taken relative to: the highest, or 0 where no key was seen, since -inf less -inf is NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@device_function
def _mean(total, out):
    """The weighted mean of the values [SIZE, ROWS]. -0 and 0 both become 0."""
    return out / total[None, :] + 0.0
