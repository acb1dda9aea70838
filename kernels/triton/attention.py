"""Attention over the paged cache.

This module defines the assignment of work to programs, and the order of every sum. Other modules write keys and values
to the cache. The code that writes the cache must guarantee that all values (V) in the cache are finite. If a token has
a non-finite key or value, all elements of the token's key in the cache are NaN. Since all values are finite, a token
that a query does not see adds nothing to the query's result. A visible token with a key of NaN makes the result NaN.

A row pairs one query with one head of the group of heads that share a key-value head. A tile always has ROWS rows, even
if fewer are needed, because a matrix instruction has a minimum size. A matrix product multiplies queries [ROWS, D] by
keys [D, KEYS], or weights [ROWS, KEYS] by values [KEYS, D]. Each warp computes its own rows. Softmax weights therefore
stay in the registers where the scores were computed, and a row's highest score and sum need no shared memory. All
programs use the same tile shape and the same number of warps, so the compiled kernel fixes the order of a row's sums.

The keys of a sequence are cut into partitions at the multiples of PARTITION, counted from the first token of the
sequence. Each partition is reduced separately by online softmax (Milakov and Gimelshein 2018), one tile of KEYS keys
after the other. The partitions are folded from left to right. Two variants of the kernel use the same functions, so a
query gets the same bits from either variant:

- Sequences with one query: for each sequence and key-value head, the partitions are divided among several programs. The
  programs store their results in a workspace, and a second kernel folds the results. Each key and value is read once.
  The workspace takes D + 2 float32 numbers per partition and row.
- Sequences with more queries: one program computes all partitions of a tile of rows and folds each one immediately.
  Keys and values are read once for each tile of rows.

In latent attention, all heads share one key-value head, and the values are the first V elements of the keys [D]. A
Triton program multiplies a query by a key in two parts: by the first V elements of the key, and then by the rest. The
program uses the first part of the key again as the value. The heads are cut into groups of up to ROWS heads, which take
the place of the groups that share a key-value head. The first part of a cached key is always finite: `write_kv` marks a
token with non-finite elements by NaNs in the rest of the key.

A sink is an additional key with a value of zero. Every query of the sink's head sees the sink. Both variants fold in
the sink after the last partition, with the same function.

If a row does not see a tile or partition, the row's sums are multiplied by 1, and zeros are added. Until the program
reaches the first key that the row sees, the row's sums are zeros, and the factor of their rescaling is 0. A tile or
partition that a row does not see can therefore change only the sign of a zero in the row's sums, and zeros are made
positive at the end. A program may therefore skip the partitions and tiles that lie before the windows of all its rows.
Even in the first tile, a program reads no keys at positions that precede the windows, so the block table's entries for
these positions may have any value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..contract import AttentionBatch
from ..transfer import current_stream, to_device
from . import MOST_GROUP
from .launch import aligned, device_function, exact_jit, launch

ROWS = MOST_GROUP
# (keys of a tile, warps, stages), for heads of size up to 128 and for wider heads, which take more registers.
NARROW, WIDE = (64, 4, 3), (32, 8, 2)
LATENT = (32, 8, 2)
PARTITION = 512
DECODE_PROGRAMS = 2048  # several per multiprocessor of a large GPU
NO_WINDOW = 2**31 - 1  # no position is higher
_LOG2_E = tl.constexpr(1.4426950408889634)


class _Inputs(NamedTuple):
    """The inputs of all kernels.

    `groups`: the number of groups of heads; each group has its own programs. `value_size`: V. In latent attention,
    `k_cache` and `v_cache` are both the cache of the keys. `tables`: the block tables. `scale`: the factor of the
    scores, which includes log2(e), since the kernels use scores as exponents of 2. `sinks`: [heads], or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    scale: float
    window: int
    soft_cap: float | None
    sinks: Tensor | None
    groups: int
    value_size: int


class _Plan(NamedTuple):
    """The assignment of a batch's sequences to the kernels. The tensors are int64.

    `decodes`: [n], the sequences with one query. `tiles`: [n, 2]; each entry names a tile of rows by the tile's
    sequence and by the tile's number in the sequence. Only sequences with several queries have tiles. `starts` and
    `lens`: `query_starts` and `context_lens` of all sequences. `longest`: the longest context of `decodes`. A
    sequence with a single query ends at its context length, so only tiles need `AttentionBatch.ends`.
    """

    decodes: Tensor
    tiles: Tensor
    starts: Tensor
    lens: Tensor
    longest: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of q [M, heads, D] over the caches [blocks, block_size, kv_heads, D]. The result has the
    shape [M, heads, D]. If `v_cache` has shorter rows than `k_cache` (latent attention), the result has the shape [M,
    heads, V].

    The kernels support bfloat16 or float16, D up to 256, and up to ROWS heads for each key-value head; in latent
    attention, V up to 512 and any number of heads. Scores, softmax and sums are float32. Softmax weights are rounded to
    the dtype before they multiply values. If `batch.lens` is given, the computation depends only on tensors on the
    device. A block table entry may be any block if the entry's tokens lie before the window of every query of the
    sequence.
    """
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    tables, scale, sinks = aligned(batch.block_tables), scale * _LOG2_E.value, None if sinks is None else aligned(sinks)
    groups, value_size = k_cache.shape[2], v_cache.shape[3]
    if value_size < k_cache.shape[3]:
        groups, v_cache = groups_of(q.shape[1]), k_cache
    inputs = _Inputs(aligned(q), k_cache, v_cache, tables, scale, window, soft_cap, sinks, groups, value_size)
    out = q.new_empty(*q.shape[:2], value_size)
    if batch.lens is not None:
        lens = aligned(batch.lens)
        # With `listed=False`, the kernels read only the last of the three tensors.
        _decode(inputs, (lens, lens, lens), max(batch.context_lens), out, listed=False)
        return out
    rows_per_query, stream = q.shape[1] // groups, current_stream(q.device)
    plan = _plan(tuple(batch.query_starts), tuple(batch.context_lens), rows_per_query, q.device, stream)
    _decode(inputs, (plan.decodes, plan.starts, plan.lens), plan.longest, out, listed=True)
    _prefill(inputs, plan, batch.ends, out)
    return out


def groups_of(heads: int) -> int:
    """Return the number of groups of equal size into which the heads of latent attention are cut."""
    return next(count for count in range(-(-heads // ROWS), heads + 1) if heads % count == 0)


@lru_cache(maxsize=1)
def _plan(
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    rows_per_query: int,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> _Plan:
    """Return the plan of a batch, made once for all layers.

    The plan's copy to the device is queued on `stream`, so no other stream may read the plan. The tiles of a sequence
    are listed in descending order of the number of keys that they see.
    """
    queries = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    tile_counts = [-(-count * rows_per_query // ROWS) if count > 1 else 0 for count in queries]
    tiles = [(i, tile) for i, count in enumerate(tile_counts) for tile in reversed(range(count))]
    decodes = [i for i, count in enumerate(queries) if count == 1]
    tensors = (to_device(torch.tensor(x, dtype=torch.int64), device) for x in (decodes, tiles, starts, lens))
    return _Plan(*tensors, longest=max((lens[i] for i in decodes), default=0))


def _decode(inputs: _Inputs, places: tuple[Tensor, Tensor, Tensor], longest: int, out: Tensor, listed: bool) -> None:
    """Compute attention for the sequences that `places` lists. If `listed` is False, compute attention for all
    sequences; query i belongs to sequence i.

    `places`: the tensors `decodes`, `starts` and `lens` of a plan. `longest`: an upper bound on the sequences' context
    lengths.
    """
    q, groups, count, window = inputs.q, inputs.groups, len(places[0]), inputs.window
    group, partitions = q.shape[1] // groups, _most_partitions(longest, window)
    peaks = q.new_empty((count, groups, partitions, group), dtype=torch.float32)
    parts = peaks, torch.empty_like(peaks), q.new_empty((*peaks.shape, inputs.value_size), dtype=torch.float32)
    shapes = _shapes(inputs, _power_of_2(group))
    del shapes["D"], shapes["REST"]  # these constants describe keys, which the fold does not read
    grid = count, groups, min(partitions, -(-DECODE_PROGRAMS // max(1, count * groups)))
    args = *inputs[:4], *places, *parts, inputs.tables.shape[1], partitions, window, inputs.scale
    launch(_decode_kernel, grid, *args, LISTED=listed, **_scoring(inputs))
    sinks, which = _sinks(inputs)
    args = *parts, *places, sinks, out, partitions, window
    warps = 16 if shapes["SIZE"] > 256 else 4
    launch(_fold_kernel, grid[:2], *args, warps=warps, LISTED=listed, **which, **shapes)


def _most_partitions(longest: int, window: int) -> int:
    """Return the largest number of partitions that a query can see in a context of up to `longest` tokens."""
    return min(-(-longest // PARTITION), (window + PARTITION - 2) // PARTITION + 1)


def _prefill(inputs: _Inputs, plan: _Plan, ends: Tensor | None, out: Tensor) -> None:
    """Compute attention for the tiles of a plan. `ends`: as in `AttentionBatch`."""
    numbers = inputs.tables.shape[1], inputs.window, inputs.scale
    sinks, which = _sinks(inputs)
    which["ENDS"], ends = ends is not None, plan.lens if ends is None else aligned(ends)
    args = *inputs[:4], plan.tiles, plan.starts, plan.lens, ends, sinks, out, *numbers
    launch(_prefill_kernel, (len(plan.tiles), inputs.groups), *args, **which, **_scoring(inputs))


def _sinks(inputs: _Inputs) -> tuple[Tensor, dict[str, Any]]:
    """Return the sinks for the kernels that store results; without sinks, return a tensor that the kernels do not
    read.
    """
    return inputs.q if inputs.sinks is None else inputs.sinks, dict(SINKS=inputs.sinks is not None)


def _scoring(inputs: _Inputs) -> dict[str, Any]:
    """Return the launch arguments of the kernels that read keys. The launch arguments that affect a row's bits depend
    only on D and V.
    """
    shapes = _shapes(inputs, ROWS)
    keys, warps, stages = LATENT if shapes["REST"] else WIDE if shapes["SIZE"] > 128 else NARROW
    settings = dict(KEYS=keys, BLOCK=inputs.k_cache.shape[1], SOFT_CAP=inputs.soft_cap, warps=warps, stages=stages)
    return settings | shapes


def _shapes(inputs: _Inputs, rows: int) -> dict[str, Any]:
    """Return the compile-time constants that all kernels share. `SIZE`: V, padded to a size that a
    tile may have. `REST`: D - V, padded to a size that a tile may have; 0 if D equals V.
    """
    (_, heads, key_size), value_size = inputs.q.shape, inputs.value_size
    rest = max(16, _power_of_2(key_size - value_size)) if key_size > value_size else 0
    sizes = dict(D=key_size, V=value_size, SIZE=max(64, _power_of_2(value_size)), REST=rest)
    return dict(GROUP=heads // inputs.groups, **sizes, ROWS=rows, PARTITION=PARTITION)


def _power_of_2(n: int) -> int:
    """Return the lowest power of 2 that is at least n."""
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
    window,
    scale,
    LISTED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Of the partitions that query i sees, program (i, kv_head, j) computes the partitions with the numbers j, j + n, j
    + 2 n and so on, counted from 0. Here, n is tl.num_programs(2).
    """
    i, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, query, length = _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED)
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    head = (query * tl.num_programs(1) + kv_head) * GROUP + tl.minimum(row, GROUP - 1)
    q = _queries(q_ptr + head * D, D, V, SIZE, REST)
    position = tl.zeros([ROWS], tl.int32) + (length - 1)
    sight = position, position + 1, window
    table_ptr = tables_ptr + sequence * width
    real = row < GROUP
    oldest = _oldest(length - 1, window)
    first = oldest // PARTITION
    for index in range(first + tl.program_id(2), tl.cdiv(length, PARTITION), tl.num_programs(2)):
        start = index * PARTITION
        seen = oldest, start, tl.minimum(start + PARTITION, length), length - 1
        peak, total, out = _partition(
            q, sight, seen, table_ptr, k_ptr, v_ptr, scale, KEYS, BLOCK, SOFT_CAP, D, V, SIZE, REST, ROWS
        )
        part = ((i * tl.num_programs(1) + kv_head) * partitions + index - first) * GROUP + row
        tl.store(peaks_ptr + part, peak, mask=real)
        tl.store(totals_ptr + part, total, mask=real)
        tl.store(outs_ptr + part[:, None] * V + d[None, :], out, mask=real[:, None] & (d < V)[None, :])


@exact_jit
def _fold_kernel(
    peaks_ptr,
    totals_ptr,
    outs_ptr,
    sequences_ptr,
    starts_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    partitions,
    window,
    LISTED: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Program (i, kv_head) computes the result of the i-th sequence's query. The program reads the workspace of
    `_decode_kernel`.
    """
    i, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, query, length = _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED)
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    real = (row < GROUP)[:, None] & (d < V)[None, :]
    peak, total, out = _fresh(SIZE, ROWS)
    first, end = _oldest(length - 1, window) // PARTITION, tl.cdiv(length, PARTITION)
    for index in tl.range(first, end, loop_unroll_factor=4):  # type: ignore[reportGeneralTypeIssues]
        part = ((i * tl.num_programs(1) + kv_head) * partitions + index - first) * GROUP + row
        part_peak = tl.load(peaks_ptr + part, mask=row < GROUP, other=0.0)
        part_total = tl.load(totals_ptr + part, mask=row < GROUP, other=1.0)
        part_out = tl.load(outs_ptr + part[:, None] * V + d[None, :], mask=real, other=0.0)
        peak, total, out = _fold(peak, total, out, part_peak, part_total, part_out)
    if SINKS:
        total, out = _add_sinks(peak, total, out, sinks_ptr + kv_head * GROUP + tl.minimum(row, GROUP - 1))
    head = (query * tl.num_programs(1) + kv_head) * GROUP + row
    tl.store(out_ptr + head[:, None] * V + d[None, :], _mean(total, out), mask=real)


@exact_jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    tiles_ptr,
    starts_ptr,
    lens_ptr,
    ends_ptr,
    sinks_ptr,
    out_ptr,
    width,
    window,
    scale,
    SINKS: tl.constexpr,
    ENDS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Program (i, kv_head) computes the results of the rows of tile i."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 2)
    start = tl.load(starts_ptr + sequence)
    queries = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    length = tl.load(lens_ptr + sequence).to(tl.int32)
    first, last = tl.load(tiles_ptr + tile * 2 + 1).to(tl.int32) * ROWS, queries * GROUP - 1
    row, d = tl.minimum(first + tl.arange(0, ROWS), last), tl.arange(0, SIZE)
    head = ((start + row // GROUP) * tl.num_programs(1) + kv_head) * GROUP + row % GROUP
    q = _queries(q_ptr + head * D, D, V, SIZE, REST)
    position = length - queries + row // GROUP
    oldest = _oldest(length - queries + first // GROUP, window)
    last_query = tl.minimum(first + ROWS - 1, last) // GROUP
    end = length - queries + last_query + 1
    row_end = position + 1
    if ENDS:
        end = tl.load(ends_ptr + start + last_query).to(tl.int32)
        row_end = tl.load(ends_ptr + start + row // GROUP).to(tl.int32)
    sight = position, row_end, window
    table_ptr = tables_ptr + sequence * width
    peak, total, out = _fresh(SIZE, ROWS)
    for start in range(oldest // PARTITION * PARTITION, end, PARTITION):
        seen = oldest, start, tl.minimum(start + PARTITION, end), length - 1
        part_peak, part_total, part_out = _partition(
            q, sight, seen, table_ptr, k_ptr, v_ptr, scale, KEYS, BLOCK, SOFT_CAP, D, V, SIZE, REST, ROWS
        )
        peak, total, out = _fold(peak, total, out, part_peak, part_total, part_out)
    if SINKS:
        total, out = _add_sinks(peak, total, out, sinks_ptr + kv_head * GROUP + row % GROUP)
    real = (first + tl.arange(0, ROWS) <= last)[:, None] & (d < V)[None, :]
    tl.store(out_ptr + head[:, None] * V + d[None, :], _mean(total, out), mask=real)


@device_function
def _place(i, sequences_ptr, starts_ptr, lens_ptr, LISTED: tl.constexpr):
    """Return (sequence, its only query, context length) of the i-th sequence with one query."""
    sequence = i
    query = i
    if LISTED:
        sequence = tl.load(sequences_ptr + i)
        query = tl.load(starts_ptr + sequence)
    return sequence, query, tl.load(lens_ptr + sequence).to(tl.int32)


@device_function
def _queries(rows_ptr, D: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, REST: tl.constexpr):
    """Load the first elements of queries as [ROWS, SIZE], and the remaining elements as [ROWS, REST]."""
    d = tl.arange(0, SIZE)
    q = tl.load(rows_ptr[:, None] + d[None, :], mask=(d < V)[None, :], other=0.0)
    rest = q
    if REST:
        e = tl.arange(0, REST)
        rest = tl.load(rows_ptr[:, None] + V + e[None, :], mask=(e < D - V)[None, :], other=0.0)
    return q, rest


@device_function
def _oldest(position, window):
    """Return the first key that a query at this position sees."""
    return tl.maximum(position - window + 1, 0)


@device_function
def _partition(
    q,
    sight,
    seen,
    table_ptr,
    k_ptr,
    v_ptr,
    scale,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the partial softmax of the rows of `_queries` over those keys of a partition that the rows see.

    `sight`: the positions of the rows and the ends of the keys that they see, both [ROWS], and the window. `seen`: the
    first key that any row sees, the start and end of the partition, and the sequence's last token. Keys before the
    first visible key or after the last token may belong to another sequence. If a key may belong to another sequence,
    the kernel reads the first visible key or the last token instead.
    """
    d = tl.arange(0, SIZE)
    (position, row_end, window), (oldest, start, end, last) = sight, seen
    peak, total, out = _fresh(SIZE, ROWS)
    for first in range(tl.maximum(start, oldest // KEYS * KEYS), end, KEYS):
        token = first + tl.arange(0, KEYS)
        stored = tl.minimum(tl.maximum(token, oldest), last)
        # Slots are 32-bit numbers, since 64 bits would take too many registers. A cache has fewer than 2**31 slots over
        # all heads.
        slot = tl.load(table_ptr + stored // BLOCK).to(tl.int32) * BLOCK + stored % BLOCK
        place = slot.to(tl.int64) * D if REST else (slot * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * D
        k = tl.load(k_ptr + place[None, :] + d[:, None], mask=(d < V)[:, None], other=0.0)
        products = tl.dot(q[0], k)
        if REST:
            e = tl.arange(0, REST)
            rest = tl.load(k_ptr + place[None, :] + V + e[:, None], mask=(e < D - V)[:, None], other=0.0)
            products = tl.dot(q[1], rest, products)
            v = tl.trans(k)
        else:
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=(d < V)[None, :], other=0.0)
        visible = (token[None, :] < row_end[:, None]) & (position[:, None] - token[None, :] < window)
        scores = _scores(products, visible, scale, SOFT_CAP)
        peak, total, out = _add_tile(peak, total, out, scores, v)
    return peak, total, out


@device_function
def _fresh(SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Return an empty partial softmax: highest score, sum of weights, and sum of weighted values."""
    return tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)


@device_function
def _scores(products, visible, scale, SOFT_CAP: tl.constexpr):
    """Return scores [ROWS, KEYS] for the products of queries and keys, as exponents of 2."""
    scores = products * scale
    if SOFT_CAP is not None:
        scores = _capped(scores, SOFT_CAP)
    return tl.where(visible, scores, -float("inf"))


@device_function
def _capped(scores, SOFT_CAP: tl.constexpr):
    """Return SOFT_CAP * tanh(score / SOFT_CAP). The argument and the result are exponents of 2."""
    decay = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP))
    capped = (1.0 - decay) / (1.0 + decay) * (SOFT_CAP * _LOG2_E)
    return tl.where(scores < 0, -capped, capped)


@device_function
def _add_tile(peak, total, out, scores, v):
    """Add the keys of a tile to a partial softmax. `v`: the values of the tile's keys, [KEYS, SIZE].

    The computation of a tile's highest score may ignore a NaN score. The softmax weight of a NaN score is still NaN,
    and makes `total` and `out` NaN.
    """
    highest = tl.maximum(peak, tl.max(scores, axis=1), propagate_nan=tl.PropagateNan.ALL)
    base = _base(highest)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(peak - base)
    out = tl.dot(weights.to(v.dtype), v, out * kept[:, None])
    return highest, total * kept + tl.sum(weights, axis=1), out


@device_function
def _fold(left_peak, left_total, left_out, peak, total, out):
    """Fold two partial softmaxes into one."""
    highest = tl.maximum(left_peak, peak, propagate_nan=tl.PropagateNan.ALL)
    base = _base(highest)
    left_kept, kept = tl.exp2(left_peak - base), tl.exp2(peak - base)
    return (
        highest,
        left_total * left_kept + total * kept,
        left_out * left_kept[:, None] + out * kept[:, None],
    )


@device_function
def _add_sinks(peak, total, out, sinks_ptr):
    """Add a sink to each row of a partial softmax: an additional score with a value vector of zeros."""
    sink = tl.load(sinks_ptr).to(tl.float32) * _LOG2_E
    base = _base(tl.maximum(peak, sink, propagate_nan=tl.PropagateNan.ALL))
    kept = tl.exp2(peak - base)
    return total * kept + tl.exp2(sink - base), out * kept[:, None]


@device_function
def _base(peak):
    """Return the score to subtract from all scores: the highest score, or 0 if no key was seen, since (-inf) - (-inf)
    is NaN.
    """
    return tl.where(peak == -float("inf"), 0.0, peak)


@device_function
def _mean(total, out):
    """Return the weighted mean of the values [ROWS, SIZE]. -0 becomes 0."""
    return out / total[:, None] + 0.0
