"""Mixtures of experts: the choice of each row's experts, and the sum of the experts' outputs.

A pair is a row and one expert of the row; pairs are numbered row by row. `experts` lists the pairs expert by expert and
cuts each expert's list into tiles. A program multiplies one tile of pairs by some rows of the expert's weight. An
expert's weight is therefore read once for each tile of the expert's pairs. The host does not know the number of tiles:
the grid has the largest possible size, and programs beyond the last tile end immediately.

A product follows the rules of `products`. The rows of x are on the N side of the matrix instruction. The shape of one
expert's weight determines the pieces that K is cut into. One program sums all pieces in ascending order. Each element
of a product is therefore bit-identical to the result of `linear` with the weight of this expert alone, whatever other
rows are in the list. The products with `down` are multiplied by the gates (the
weights of a row's experts in the sum) and stored pair by pair in float32. A last
kernel adds the products of a row in ascending order of expert id. No kernel adds floats atomically.

This module owns the choice of experts, the lists of pairs, the tiles of the experts' products and the sum over a row's
experts. This module does not own the router's product, the shared expert, or the summation over K (products.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ExpertsWeights
from ..quantization import format_of
from ..specs import ExpertsSpec
from .launch import aligned, device_function, exact_jit, launch
from .products import (
    FOLD_COLUMNS,
    NARROW_TILE,
    SPLIT_UNIT,
    Matrix,
    Tile,
    divide_up,
    fold_parts,
    gate_mul_halves,
    k_splits,
    lm_head,
    sums_of_pieces,
    unit,
)
from .rows import sum_in_pairs
from .weights import memory_of, row_size

# Tiles in ascending order of the number of tokens. The tiles leave registers for the sums of several pieces of K.
TILES = (
    Tile(64, 16, 0, 128, 4, 3),
    Tile(64, 32, 0, 128, 4, 3),
    Tile(64, 64, 0, 64, 4, 4),
    Tile(128, 128, 0, 64, 8, 3),
)
MOST_MADE = 2**28  # bytes of products with `down` that are held at once, unless 16 rows take more
_LISTED = 1024  # pairs that a program lists at a time
_WIDE_FEATURES, _WIDE_DEPTH = 16, 128
_NO_KEY = tl.constexpr(-(2**63))  # below the key that `_are_best` gives to any expert


class _Lists(NamedTuple):
    """The pairs, expert by expert. All tensors are int32.

    `pairs`: [pairs]. `tiles`: [most, 3]. Each row of `tiles` describes one tile: its expert, and its start and end in
    `pairs`. `counts`: [experts + 1]. The last element of `counts` is the total number of tiles, and each other element
    is the number of pairs of one expert.
    """

    pairs: Tensor
    tiles: Tensor
    counts: Tensor


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [M, K] by the transpose of weight [N, K], and return float32 [M, N]. A float32 weight is multiplied
    without matrix instructions, which would round the weight.
    """
    if weight.dtype == x.dtype:
        return lm_head(x, weight)
    (rows, columns), features = x.shape, len(weight)
    out = torch.empty(rows, features, dtype=torch.float32, device=x.device)
    grid = rows, divide_up(features, _WIDE_FEATURES)
    sizes = dict(FEATURES=_WIDE_FEATURES, DEPTH=_WIDE_DEPTH)
    launch(_wide_kernel, grid, aligned(x), aligned(weight), out, features, columns, warps=4, **sizes)
    return out


def route(
    logits: Tensor, spec: ExpertsSpec, chosen: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's experts (int32 [M, top_k]) and their gates (float32 [M, top_k]) for logits [M, E]. If `chosen`
    is given, a row's experts are taken from `chosen` instead of being chosen by the router.

    Sums over the chosen experts are computed in the order of the experts' ids. The denominator of a softmax over all
    experts is summed in the order of `sum_in_pairs`.
    """
    logits, router = aligned(logits), spec.router
    rows, count = logits.shape
    experts = logits.new_empty(rows, spec.top_k, dtype=torch.int32)
    gates = torch.empty_like(experts, dtype=torch.float32)
    # A pointer must be valid even if the kernel does not read it.
    given = logits if chosen is None else aligned(chosen)
    added = logits if correction is None else aligned(correction)
    args = logits, added, given, experts, gates, router.eps, router.floor, router.scale
    span = triton.next_power_of_2(count)
    sizes = dict(E=count, SPAN=span, TOP_K=spec.top_k)
    groups = dict(GROUPS=router.groups, GROUP_SPAN=triton.next_power_of_2(router.groups), KEPT=router.kept_groups)
    which: dict[str, Any] = dict(SCORE=router.score, RANKS_SCORES=router.ranks_scores, GROUP_BEST=router.group_best)
    which |= dict(CORRECTED=correction is not None, NORMED=router.normed, CHOSEN=chosen is not None)
    launch(_route_kernel, (rows,), *args, warps=max(1, span // 256), **sizes, **groups, **which)
    return experts, gates


def experts(
    x: Tensor,
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    experts: Tensor,
    gates: Tensor,
    shared: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """Apply each row's experts to x [M, H], add the outputs in float32 in ascending order of expert id, add `shared`
    [M, H], and return the sum [M, H]. With several `groups`, the sums of the groups are added as a balanced binary
    tree.

    Rows are processed in parts, so that the products of one part take at most MOST_MADE bytes.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    most = _most_rows(spec, x)
    for start in range(0, len(x), most):
        part = slice(start, start + most)
        others = None if shared is None else shared[part]
        _mix(aligned(x[part]), spec, weights, aligned(experts[part]), aligned(gates[part]), others, groups, out[part])
    return out


def expert_sums(
    x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor, gates: Tensor, groups: int
) -> Tensor:
    """Return the float32 sums [M, H] of `experts` over the experts that `spec.own` names, before the
    shared expert is added and before the sums are rounded.
    """
    (first, count), out = spec.own, torch.empty(x.shape, dtype=torch.float32, device=x.device)
    # No kernel reads the outputs of experts with the id `count`.
    experts = torch.where((experts >= first) & (experts < first + count), experts - first, count).int()
    most = _most_rows(spec, x)
    for start in range(0, len(x), most):
        part = slice(start, start + most)
        inputs = aligned(x[part]), spec, weights, aligned(experts[part]), aligned(gates[part])
        _mix(*inputs, None, groups, out[part], count)
    return out


def _most_rows(spec: ExpertsSpec, x: Tensor) -> int:
    """Return the maximum number of rows in a part. The result is a multiple of 16, which keeps each part aligned to 16
    bytes.
    """
    return max(16, MOST_MADE // (4 * spec.top_k * x.shape[1]) // 16 * 16)


def _mix(
    x: Tensor,
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    experts: Tensor,
    gates: Tensor,
    shared: Tensor | None,
    groups: int,
    out: Tensor,
    held: int | None = None,
) -> None:
    """Compute the result of the function `experts` for one part of the rows, and store it in `out`. `held`: the number
    of experts in `weights`, if a row may have experts outside `weights`; otherwise None. In the argument `experts`, the
    id of every expert outside `weights` is `held`.
    """
    (rows, hidden), inner, count = x.shape, spec.intermediate_size, held or spec.num_experts
    tile = _tile(experts.numel(), count, hidden, inner)
    lists = _list(experts, count, tile.tokens)
    active = x.new_empty(experts.numel(), inner)
    made = x.new_empty(experts.numel(), hidden, dtype=torch.float32)
    constants = dict(TOP_K=spec.top_k, ACTIVATION=spec.activation)
    gate_up = x, cast(Matrix, weights.gate_up), weights.gate_up_bias
    _multiply(_gate_up_kernel, tile, lists, *gate_up, active, sides=2, **constants)
    down = active, cast(Matrix, weights.down), weights.down_bias
    _multiply(_down_kernel, tile, lists, *down, gates, made, sides=1)
    others, grid = x if shared is None else aligned(shared), (rows, divide_up(hidden, FOLD_COLUMNS))
    options = dict(SHARED=shared is not None, TOP_K=spec.top_k, COLUMNS=FOLD_COLUMNS)
    options |= dict(GROUPS=groups, GROUP=count // groups, GAPS=groups > 1 or held is not None)
    launch(_add_kernel, grid, made, experts, others, out, hidden, warps=4, **options)


def _tile(pairs: int, num_experts: int, *columns: int) -> Tile:
    """Return the narrowest tile with room for at least twice the average number of rows per expert.

    With tiles of this width, few experts need a second tile. Multiplying unused columns of a tile takes less time than
    reading a weight twice.
    """
    if any(n % 8 for n in columns):
        return NARROW_TILE
    return next((tile for tile in TILES if tile.tokens * num_experts >= 2 * pairs), TILES[-1])


def most_tiles(pairs: int, num_experts: int, width: int) -> int:
    """Return the maximum number of tiles of this width that this many pairs need. In the worst case, each expert's last
    tile has a single pair.
    """
    begun = min(pairs, num_experts)
    return begun + (pairs - begun) // width


def _list(experts: Tensor, num_experts: int, width: int) -> _Lists:
    """List the pairs of each expert, and cut each list into tiles of this width. `experts`: [M, top_k]."""
    pairs = experts.numel()
    shapes = (pairs,), (most_tiles(pairs, num_experts, width), 3), (num_experts + 1,)
    lists = _Lists(*(torch.empty(shape, dtype=torch.int32, device=experts.device) for shape in shapes))
    launch(_count_kernel, (num_experts,), experts, lists.counts, pairs, warps=4, TILE=_LISTED)
    sizes = dict(E=num_experts, SPAN=triton.next_power_of_2(num_experts), TILE=_LISTED)
    launch(_list_kernel, (num_experts,), experts, *lists, pairs, width, warps=4, **sizes)
    return lists


def _multiply(
    kernel: Any,
    tile: Tile,
    lists: _Lists,
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    *others: Tensor,
    sides: int,
    **constants: Any,
) -> None:
    """Launch a kernel that multiplies x [rows, K] by a weight that holds `sides` matrices of each expert."""
    count, columns = len(lists.counts) - 1, x.shape[1]
    rows = weight.shape[0] // (count * sides)
    pieces, width_unit = k_splits(rows, columns), unit(rows)
    numbers = (
        rows // width_unit,
        columns // unit(columns),
        divide_up(columns, pieces * SPLIT_UNIT) * SPLIT_UNIT // unit(columns),
    )
    constants |= dict(E=count, BIAS=bias is not None, CUT=pieces > 1, UNIT=unit(columns), WIDTH_UNIT=width_unit)
    constants |= dict(FORMAT=format_of(weight), FEATURES=tile.features, TOKENS=tile.tokens, DEPTH=tile.depth)
    args = x, memory_of(weight), x if bias is None else aligned(bias), *lists, *others, *numbers
    grid = divide_up(rows * sides, tile.features), len(lists.tiles)
    launch(kernel, grid, *args, warps=tile.warps, stages=tile.stages, **constants)


@exact_jit
def _wide_kernel(x_ptr, w_ptr, out_ptr, features, columns, FEATURES: tl.constexpr, DEPTH: tl.constexpr):
    """Program (row, i) multiplies a row by block i of the rows of a float32 weight. Each of DEPTH sums takes every
    DEPTH-th column, and the sums are added at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    feature, depth = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, DEPTH)
    w_row = w_ptr + tl.minimum(feature, features - 1).to(tl.int64)[:, None] * columns
    total = tl.zeros([FEATURES, DEPTH], tl.float32)
    for start in range(0, columns, DEPTH):
        inside = start + depth < columns
        x = tl.load(x_ptr + row * columns + start + depth, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(w_row + start + depth[None, :], mask=inside[None, :], other=0.0) * x[None, :]
    tl.store(out_ptr + row * features + feature, tl.sum(total, axis=1), mask=feature < features)


@exact_jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    chosen_ptr,
    experts_ptr,
    gates_ptr,
    eps,
    floor,
    scale,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    KEPT: tl.constexpr,
    SCORE: tl.constexpr,
    RANKS_SCORES: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMED: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Program i computes the experts of row i and the gates of these experts. If `CHOSEN`, the experts are given;
    otherwise the program chooses the experts with the highest ranks.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, SPAN)
    logits = tl.load(logits_ptr + row * E + expert, mask=expert < E, other=-float("inf")).to(tl.float32)
    scores = logits
    if SCORE == "softmax":
        weights = tl.exp(logits - tl.max(logits, axis=0))
        scores = tl.div_rn(weights, tl.broadcast_to(sum_in_pairs(weights), [SPAN]))
    elif SCORE == "sigmoid":
        scores = tl.div_rn(tl.full([SPAN], 1.0, tl.float32), 1.0 + tl.exp(-logits))
    if CHOSEN:
        mine = _are_listed(expert, chosen_ptr + row * TOP_K, TOP_K)
    else:
        ranks = scores if RANKS_SCORES else logits
        if CORRECTED:
            ranks += tl.load(correction_ptr + expert, mask=expert < E, other=0.0)
        if GROUPS > 1:
            kept = _are_in_best_groups(ranks, expert, E // GROUPS, GROUPS, GROUP_SPAN, KEPT, GROUP_BEST)
            ranks = tl.where(kept, ranks, -float("inf"))
        mine = _are_best(ranks, expert, E, SPAN, TOP_K)
    place = tl.cumsum(mine.to(tl.int32), axis=0) - 1
    if SCORE == "softmax_of_chosen":
        chosen = tl.where(mine, logits, -float("inf"))
        weights = tl.exp(chosen - tl.max(chosen, axis=0))
        scores = tl.div_rn(weights, tl.broadcast_to(_sum_of_places(weights, mine, place, TOP_K), [SPAN]))
    if NORMED:
        total = tl.maximum(_sum_of_places(scores, mine, place, TOP_K) + eps, floor)
        scores = tl.div_rn(scores, tl.broadcast_to(total, [SPAN]))
    is_broken = tl.max((logits != logits).to(tl.int32), axis=0) > 0  # type: ignore[reportOperatorIssue]
    gates = tl.where(is_broken, float("nan"), scores * scale)
    at = row * TOP_K + place
    tl.store(experts_ptr + at, expert, mask=mine)
    tl.store(gates_ptr + at, gates, mask=mine)


@device_function
def _sum_of_places(x, mine, place, TOP_K: tl.constexpr):
    """Sum the elements of the chosen experts to [1], in the order of the experts' places."""
    total = tl.zeros([1], tl.float32)
    for i in range(TOP_K):
        total += tl.sum(tl.where(mine & (place == i), x, 0.0), axis=0)
    return total


@device_function
def _are_in_best_groups(
    ranks,
    expert,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Return a mask of the experts in the KEPT groups with the highest sums of their GROUP_BEST highest ranks. A group
    has SIZE experts.
    """
    group = tl.arange(0, GROUP_SPAN)
    sums = tl.full([GROUP_SPAN], -float("inf"), tl.float32)
    for i in range(GROUPS):
        mine = tl.where(expert // SIZE == i, ranks, -float("inf"))
        best = tl.max(mine, axis=0)
        if GROUP_BEST == 2:
            first = tl.min(tl.where(mine == best, expert, ranks.shape[0]), axis=0)
            best += tl.max(tl.where(expert == first, -float("inf"), mine), axis=0)  # type: ignore[reportOperatorIssue]
        sums = tl.where(group == i, best, sums)
    kept = _are_best(sums, group, GROUPS, GROUP_SPAN, KEPT).to(tl.int32)
    found = expert < 0
    for i in range(GROUPS):
        is_kept = tl.max(tl.where(group == i, kept, 0), axis=0) > 0  # type: ignore[reportOperatorIssue]
        found = found | ((expert // SIZE == i) & is_kept)
    return found


@device_function
def _are_listed(expert, chosen_ptr, TOP_K: tl.constexpr):
    """Return a mask over all experts that marks the experts in a list."""
    listed = expert < 0
    for i in range(TOP_K):
        listed = listed | (expert == tl.load(chosen_ptr + i))
    return listed


@device_function
def _are_best(ranks, expert, E: tl.constexpr, SPAN: tl.constexpr, TOP_K: tl.constexpr):
    """Return a mask of the TOP_K of E experts with the highest ranks. Among equal ranks, lower ids are chosen first.
    Any NaN ranks highest.

    Ranks and ids are mapped to distinct integers, ordered by rank and then by descending id.
    """
    bits = (ranks + 0.0).to(tl.int32, bitcast=True)  # makes -0 equal to 0
    bits = tl.where(ranks == ranks, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = tl.where(expert < E, bits.to(tl.int64) * SPAN + (SPAN - 1 - expert), _NO_KEY)
    for _ in range(TOP_K):
        key = tl.where(key == tl.max(key, axis=0), _NO_KEY, key)
    return (key == _NO_KEY) & (expert < E)


@exact_jit
def _count_kernel(experts_ptr, counts_ptr, pairs, TILE: tl.constexpr):
    """Program i counts the pairs of expert i."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, pairs, TILE):
        count += _of_expert(experts_ptr, start + tl.arange(0, TILE), pairs).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count, axis=0))


@exact_jit
def _list_kernel(
    experts_ptr,
    pairs_ptr,
    tiles_ptr,
    counts_ptr,
    pairs,
    width,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program i writes the list and the tiles of expert i. The list is placed after the lists of experts with lower
    ids. The last program counts all tiles.
    """
    expert, other, place = tl.program_id(0), tl.arange(0, SPAN), tl.arange(0, TILE)
    counts = tl.load(counts_ptr + other, mask=other < E, other=0)
    first = tl.sum(tl.where(other < expert, counts, 0), axis=0)
    end = tl.sum(tl.where(other <= expert, counts, 0), axis=0)
    tiles = (counts + width - 1) // width
    tile = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    if expert == E - 1:
        tl.store(counts_ptr + E, tl.sum(tiles, axis=0))
    for begin in range(first, end, TILE * width):  # type: ignore[reportArgumentType]
        begins = begin + place * width
        at = tiles_ptr + (tile + (begin - first) // width + place) * 3  # type: ignore[reportOperatorIssue]
        tl.store(at, tl.zeros([TILE], tl.int32) + expert, mask=begins < end)
        tl.store(at + 1, begins, mask=begins < end)
        tl.store(at + 2, tl.minimum(begins + width, end), mask=begins < end)
    for start in range(0, pairs, TILE):
        mine = _of_expert(experts_ptr, start + place, pairs)
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(pairs_ptr + first + rank - 1, start + place, mask=mine)
        first += tl.max(rank, axis=0)


@device_function
def _of_expert(experts_ptr, pair, pairs):
    """Return a mask that marks the pairs of this program's expert."""
    return tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == tl.program_id(0)


@exact_jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    counts_ptr,
    out_ptr,
    features,
    columns,
    piece,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    CUT: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (i, tile) computes block i of the features of a tile's inner rows. An inner row is activation(gate) * up
    for one pair. The inner rows are stored in the order of the lists.

    The first half of a tile's features belongs to `gate`, and the second half belongs to `up`. `features`, `columns`
    and `piece` are counted in units (`products.unit`).
    """
    if tl.program_id(1) >= tl.load(counts_ptr + E):
        return
    features, columns = features * WIDTH_UNIT, columns * UNIT
    expert, place, end = _tile_of_program(tiles_ptr, TOKENS)
    pair = tl.load(pairs_ptr + tl.minimum(place, end - 1))
    half: tl.constexpr = FEATURES // 2
    row, first = tl.arange(0, FEATURES), tl.program_id(0) * half
    feature = tl.minimum(first + row % half, features - 1)
    w_row = (2 * expert + row // half) * features + feature
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * columns
    total = _product(w_ptr, w_row, x_row, bias_ptr, columns, piece, BIAS, CUT, FORMAT, UNIT, DEPTH)
    active = gate_mul_halves(total, out_ptr, ACTIVATION).to(out_ptr.dtype.element_ty)
    feature = first + tl.arange(0, half)
    at = place.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(out_ptr + at, active, mask=(feature < features)[:, None] & (place < end)[None, :])


@exact_jit
def _down_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    counts_ptr,
    gates_ptr,
    out_ptr,
    features,
    columns,
    piece,
    E: tl.constexpr,
    BIAS: tl.constexpr,
    CUT: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Like `_gate_up_kernel`, but multiply inner rows by `down` and then by their gates, and store the results pair by
    pair.
    """
    if tl.program_id(1) >= tl.load(counts_ptr + E):
        return
    features, columns = features * WIDTH_UNIT, columns * UNIT
    expert, place, end = _tile_of_program(tiles_ptr, TOKENS)
    stored = tl.minimum(place, end - 1)
    pair = tl.load(pairs_ptr + stored)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    w_row = expert * features + tl.minimum(feature, features - 1)
    x_row = x_ptr + stored.to(tl.int64) * columns
    total = _product(w_ptr, w_row, x_row, bias_ptr, columns, piece, BIAS, CUT, FORMAT, UNIT, DEPTH)
    made = total * tl.load(gates_ptr + pair)[None, :]
    at = pair.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(out_ptr + at, made, mask=(feature < features)[:, None] & (place < end)[None, :])


@device_function
def _tile_of_program(tiles_ptr, TOKENS: tl.constexpr):
    """Return (expert, indices into the lists, end of the tile) for the tile of this program."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    return tl.load(tile_ptr), tl.load(tile_ptr + 1) + tl.arange(0, TOKENS), tl.load(tile_ptr + 2)


@device_function
def _product(
    w_ptr,
    w_row,
    x_row,
    bias_ptr,
    columns,
    piece,
    BIAS: tl.constexpr,
    CUT: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply weight rows by the rows at `x_row`, add the biases of the weight rows, and return the sums: float32
    [rows, tokens].
    """
    w = w_ptr + w_row.to(tl.int64) * row_size(columns, FORMAT)
    total = sums_of_pieces(w, (x_row, x_row), columns, piece * UNIT, CUT, FORMAT, 0, UNIT, DEPTH)[0]
    if BIAS:
        total += tl.load(bias_ptr + w_row).to(tl.float32)[:, None]
    return total


@exact_jit
def _add_kernel(
    made_ptr,
    experts_ptr,
    shared_ptr,
    out_ptr,
    features,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GAPS: tl.constexpr,
):
    """Program (row, i) adds the outputs of a row's experts in block i of the columns. The outputs of a group of `GROUP`
    experts are added in the order in which the row lists the experts. `GAPS`: whether a row may have none of a group's
    experts.
    """
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < features
    made_ptr += row * TOP_K * features
    if GAPS:
        total = _tree_of_groups(made_ptr, experts_ptr + row * TOP_K, features, feature, inside, 0, GROUPS, GROUP, TOP_K)
    else:
        total = fold_parts(made_ptr, 1, features, 0, feature, inside, TOP_K)
    at = row * features + feature
    if SHARED:
        total += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@device_function
def _tree_of_groups(
    made_ptr,
    experts_ptr,
    features,
    feature,
    inside,
    FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Add the outputs of a row's experts in the groups [FIRST, FIRST + GROUPS). The outputs of a group are added to
    +0.0 in the order in which the row lists the experts. The sums of the groups are added as a balanced binary tree.
    """
    if GROUPS == 1:
        total = tl.zeros(inside.shape, tl.float32)
        for i in range(TOP_K):  # not unrolled, because the loads of all groups would take too many registers
            mine = inside & (tl.load(experts_ptr + i) // GROUP == FIRST)
            total += tl.load(made_ptr + i * features + feature, mask=mine, other=0.0)
    else:
        total = _tree_of_groups(
            made_ptr, experts_ptr, features, feature, inside, FIRST, GROUPS // 2, GROUP, TOP_K
        ) + _tree_of_groups(
            made_ptr, experts_ptr, features, feature, inside, FIRST + GROUPS // 2, GROUPS // 2, GROUP, TOP_K
        )
    return total
