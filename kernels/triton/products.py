"""Products of tokens with weights, whose bits do not depend on the number of tokens.

An element of a product is the sum over K of a weight row times a token. K is cut into pieces (split-K) by the shape of
the weight alone (`k_splits`). A piece is summed from zero in ascending order by one chain of matrix instructions of 16
columns each, and the sums of the pieces are added to +0.0 in ascending order. All else may follow the number of tokens,
because no element's order of additions depends on it: the tile of a program, the columns it loads at a time, and
whether one program sums all pieces of its tile or each piece has a program of its own, which writes its sum ("part") to
a workspace. Features lie on the M side of the instruction, where it takes 64 of them (sm_80: 16, sm_100: 64 or 128, as
many as the tile allows), tokens on the N side, where it takes what the tile has.

A sum that starts at +0.0 is never -0.0, because x + y rounded to nearest is -0.0 only if both are. So to add a part of
+0.0 changes no bit, and weights with fewer pieces than others beside them have such parts.

Owns: the cut of K, the tiles of all products, and the epilogues of products: bias, residual, activation. Does not own:
norms, and what follows the products of q, k and v. Activations are copied if `launch` could not take them; weights must
be contiguous and begin at a multiple of 16 bytes.

How the tables were chosen, for an H200 (132 SMs, 4.8 TB/s), by arithmetic and not by measurement. Up to `FEW_TOKENS`
tokens the time is that of reading the weights, which takes programs on all SMs with about 36 KB on the way to each SM
at any time. So one tile takes all tokens, has the fewest features that an instruction takes, and leaves room for three
programs on an SM (two for more than 64 tokens), which then have 48 to 144 KB of weights on the way. Weights of 8192
rows have enough of such tiles. Others are cut: into four pieces at most, and none below 768 columns, so that a program
reads 96 KB or more. For Qwen2.5-7B that makes 288 programs for q, k and v, 224 for the output and the down projection
each, 296 for gate and up (of 396 that run at a time), 2376 for the head; for Qwen3-0.6B 64, 32, 64, 48 and 2374.
For more tokens the time is that of multiplying: the largest tile that gives every SM a program. A cut K needs a second
accumulator, which is why gate and up, both in one tile, then have smaller tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..reference import GELU_CUBIC, GELU_SLOPE
from ..specs import Activation
from .launch import ALIGNMENT, aligned, device_function, exact_jit, launch


class Tile(NamedTuple):
    """What one program computes: `features` x `tokens` elements, from `depth` columns of K at a time."""

    features: int
    tokens: int
    depth: int
    warps: int
    stages: int


SMS = 132
FEW_TOKENS = 128
TILES = (
    Tile(64, 16, 128, 4, 3),
    Tile(64, 32, 128, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 3),
)
# Half of the features of a tile are of the gate, half of the up projection.
PAIR_TILES = (
    Tile(128, 16, 64, 4, 4),
    Tile(128, 32, 64, 4, 3),
    Tile(128, 64, 64, 4, 3),
    Tile(128, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
)
CUT_PAIR_TILES = PAIR_TILES[:4]
NARROW_TILE = Tile(64, 32, 32, 4, 2)  # where K is no multiple of 8 and elements are loaded one by one
FOLD_COLUMNS = 1024
_PIECE_UNIT = tl.constexpr(128)  # a piece is a multiple of it, and it is a multiple of every depth
_SWIZZLE = tl.constexpr(8)  # token tiles that neighbouring programs take in turn
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_GELU_SLOPE, _GELU_CUBIC = tl.constexpr(GELU_SLOPE), tl.constexpr(GELU_CUBIC)


def k_splits(rows: int, columns: int) -> int:
    """Into how many pieces K is cut for a weight [rows, columns]."""
    return 1 if rows >= 8192 else min(4, max(1, columns // 768))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] in float32, rounded once: [M, N] in x's dtype.

    All tensors share one dtype, bfloat16 or float16.
    """
    if bias is None:
        return _linear(x, weight, "none", x, x.dtype)
    return _linear(x, weight, "bias", bias, x.dtype)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """linear(x, weight) + residual [M, N], rounded twice: [M, N]."""
    return _linear(x, weight, "residual", residual, x.dtype)


def gate_up(x: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The bits of gate_mul(linear(x, gate), linear(x, up), activation) for gate and up [I, H]: [M, I]."""
    x = aligned(x)
    out = x.new_empty(len(x), len(gate))
    if _apart(x, (gate, up)):
        _launch_fold(_fold_gate_up_kernel, _parts(x, (gate, up)), out, ACTIVATION=activation)
    else:
        tiles = PAIR_TILES if k_splits(*gate.shape) == 1 else CUT_PAIR_TILES
        _launch_whole(_gate_up_kernel, tiles, x, (gate, up), out, ACTIVATION=activation)
    return out


def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of hidden [M, H] with weight [V, H]: float32 [M, V], never rounded."""
    return _linear(hidden, weight, "none", hidden, torch.float32)


def qkv_parts(hidden: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The products of hidden [M, H] with weights [Nq, H], [Nk, H] and [Nv, H], side by side, in parts.

    float32 [P, M, Nq + Nk + Nv], to be summed by `fold_parts`; P is 1 for many tokens. The sum, plus a bias, rounded
    once, has the bits of `linear` with that weight alone.
    """
    return _parts(aligned(hidden), weights)


def _linear(
    x: Tensor, weight: Tensor, kind: Literal["none", "bias", "residual"], extra: Tensor, dtype: torch.dtype
) -> Tensor:
    """The product, finished with `extra` in the way that `_finish` calls `kind`, in this dtype."""
    x, extra = aligned(x), aligned(extra)
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    if _apart(x, (weight,)):
        _launch_fold(_fold_kernel, _parts(x, (weight,)), extra, out, EXTRA=kind)
    else:
        _launch_whole(_linear_kernel, TILES, x, (weight,), extra, out, EXTRA=kind)
    return out


def _apart(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether each piece has a program of its own."""
    return len(x) <= FEW_TOKENS and _most_pieces(weights) > 1


def _most_pieces(weights: Sequence[Tensor]) -> int:
    return max(k_splits(*weight.shape) for weight in weights)


def _piece(weight: Tensor) -> int:
    """The length of the weight's pieces in units of `_PIECE_UNIT`. The last piece may be shorter."""
    return _divide_up(weight.shape[1], k_splits(*weight.shape) * _PIECE_UNIT.value)


def _choose(tiles: Sequence[Tile], columns: int, tokens: int, features: int) -> Tile:
    """The smallest tile that takes all tokens; if none does, the largest one that gives every SM a program."""
    if columns % 8:
        return NARROW_TILE
    for tile in tiles:
        if tokens <= tile.tokens:
            return tile
    for tile in reversed(tiles):
        if math.prod(_grid(tile, tokens, [features])) >= SMS:
            return tile
    return tiles[0]


def _grid(tile: Tile, tokens: int, features: Sequence[int]) -> tuple[int, int]:
    """Tiles of features, cut separately for each weight, and of tokens."""
    return sum(_divide_up(n, tile.features) for n in features), _divide_up(tokens, tile.tokens)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _constants(tile: Tile, weights: Sequence[Tensor]) -> dict[str, Any]:
    """What the kernels of products are compiled for."""
    sizes = dict(FEATURES=tile.features, TOKENS=tile.tokens, DEPTH=tile.depth, warps=tile.warps, stages=tile.stages)
    return dict(UNIT=_unit(weights[0].shape[1]), CUT=_most_pieces(weights) > 1, **sizes)


def _unit(size: int) -> int:
    """The largest power of two up to 128 that divides `size`. Kernels that know it load and store many at once."""
    return math.gcd(size, 128)


def _launch_whole(
    kernel: Any, tiles: Sequence[Tile], x: Tensor, weights: Sequence[Tensor], *others: Tensor, **constants: Any
) -> None:
    """Launches a kernel on x, the weights and others: products of x with each weight, summed and finished."""
    (tokens, columns), features = x.shape, len(weights) * len(weights[0])
    tile = _choose(tiles, columns, tokens, features)
    unit, width_unit = _unit(columns), _unit(len(weights[0]))
    numbers = (tokens, len(weights[0]) // width_unit, columns // unit, _piece(weights[0]))
    constants |= _constants(tile, weights)
    launch(kernel, _grid(tile, tokens, [features]), x, *weights, *others, *numbers, WIDTH_UNIT=width_unit, **constants)


def _launch_fold(kernel: Any, parts: Tensor, *tensors: Tensor, **constants: Any) -> None:
    """Launches a kernel on parts, ..., out, that folds parts and finishes the sums into out."""
    tokens, features = tensors[-1].shape
    grid = (_divide_up(features, FOLD_COLUMNS), tokens)
    constants |= dict(PIECES=len(parts), COLUMNS=FOLD_COLUMNS)
    launch(kernel, grid, parts, *tensors, tokens, features, warps=4, **constants)


def _parts(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Products of x with one to three weights side by side: a part for each piece if they are `_apart`, else one."""
    (tokens, columns), sizes, apart = x.shape, [len(weight) for weight in weights], _apart(x, weights)
    tile = _choose(TILES, columns, tokens, sum(sizes))
    out = x.new_empty(_most_pieces(weights) if apart else 1, tokens, sum(sizes), dtype=torch.float32)
    absent = [0] * (3 - len(weights))  # weights that no program reads, since they have no rows
    tensors = (x, *weights, *[weights[0] for _ in absent], out)
    numbers = (tokens, columns // _unit(columns), *sizes, *absent, *map(_piece, weights), *absent)
    grid = (*_grid(tile, tokens, sizes), len(out))
    launch(_parts_kernel, grid, *tensors, *numbers, APART=apart, **_constants(tile, weights))
    return out


@device_function
def _tile_of_program():
    """(token tile, feature tile) of this program, such that programs that run at the same time share what they read."""
    return tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), _SWIZZLE)


@device_function
def _row(base_ptr, row, rows, columns):
    """Where rows of a matrix [rows, columns] begin. Rows past its end are its last one: nothing of them is stored."""
    return base_ptr + tl.minimum(row, rows - 1).to(tl.int64) * columns


@device_function
def _sum(w_row, x_row, start, stop, columns, UNIT: tl.constexpr, DEPTH: tl.constexpr):
    """Products of weight rows and tokens over columns [start, stop): float32 [len(w_row), len(x_row)].

    `columns` is a multiple of `UNIT`; `start` is one of `DEPTH`, and `stop` too unless it is `columns`.
    """
    step = tl.arange(0, DEPTH)
    w_tile = w_row[:, None] + step[None, :]
    x_tile = x_row[None, :] + step[:, None]
    total = tl.zeros([w_row.shape[0], x_row.shape[0]], tl.float32)
    for k in range(start, stop, DEPTH):
        if UNIT % DEPTH == 0:
            w = tl.load(w_tile + k)
            x = tl.load(x_tile + k)
        else:
            inside = step < columns - k
            w = tl.load(w_tile + k, mask=inside[None, :], other=0.0)
            x = tl.load(x_tile + k, mask=inside[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    return total


@device_function
def _sum_of_pieces(w_row, x_row, columns, piece, CUT: tl.constexpr, UNIT: tl.constexpr, DEPTH: tl.constexpr):
    """The sums of pieces of `piece` columns, added to +0.0 in ascending order."""
    if CUT:
        total = tl.zeros([w_row.shape[0], x_row.shape[0]], tl.float32)
        for start in range(0, columns, piece):
            total += _sum(w_row, x_row, start, tl.minimum(start + piece, columns), columns, UNIT, DEPTH)
    else:
        total = _sum(w_row, x_row, 0, columns, columns, UNIT, DEPTH) + 0.0
    return total


@device_function
def fold_parts(parts_ptr, tokens, width, token, column, inside, PIECES: tl.constexpr):
    """Elements of parts [PIECES, tokens, width], added to +0.0 in ascending order: float32 of the shape of `inside`.

    `token` and `column` (a number or a tile each) say where; those that are not `inside` are 0.
    """
    total = tl.zeros(inside.shape, tl.float32)
    for piece in tl.static_range(PIECES):  # type: ignore[reportGeneralTypeIssues]
        row = (tl.cast(piece, tl.int64) * tokens + token) * width
        total += tl.load(parts_ptr + row + column, mask=inside, other=0.0)
    return total


@device_function
def gate_mul_tile(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up of float32 tiles, to be rounded once."""
    slope = gate
    if ACTIVATION == "gelu_tanh":
        slope = gate * (_GELU_SLOPE + _GELU_CUBIC * (gate * gate))
    return gate / (1.0 + tl.exp(-slope)) * up


@device_function
def _finish(total, extra_ptr, out_ptr, feature, token, features, inside, EXTRA: tl.constexpr):
    """Stores sums at (token, feature) of out [tokens, features] in its dtype, where that is `inside`.

    `EXTRA`: "bias" [features] is added before the sums are rounded, "residual" [tokens, features] after it; "none".
    """
    at = tl.cast(token, tl.int64) * features + feature
    if EXTRA == "bias":
        total += tl.load(extra_ptr + feature, mask=feature < features, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    if EXTRA == "residual":
        result = result.to(tl.float32) + tl.load(extra_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@exact_jit
def _linear_kernel(
    x_ptr,
    w_ptr,
    extra_ptr,
    out_ptr,
    tokens,
    features,
    columns,
    piece,
    EXTRA: tl.constexpr,
    CUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of a product, all pieces, finished. `features`, `columns` and `piece` are counted in their units."""
    features, columns, piece = features * WIDTH_UNIT, columns * UNIT, piece * _PIECE_UNIT
    tile = _tile_of_program()
    token = tile[0] * TOKENS + tl.arange(0, TOKENS)
    feature = tile[1] * FEATURES + tl.arange(0, FEATURES)
    w_row, x_row = _row(w_ptr, feature, features, columns), _row(x_ptr, token, tokens, columns)
    total = _sum_of_pieces(w_row, x_row, columns, piece, CUT, UNIT, DEPTH)
    inside = (feature < features)[:, None] & (token < tokens)[None, :]
    _finish(total, extra_ptr, out_ptr, feature[:, None], token[None, :], features, inside, EXTRA)


@exact_jit
def _gate_up_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    tokens,
    features,
    columns,
    piece,
    ACTIVATION: tl.constexpr,
    CUT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Like `_linear_kernel`, for tiles whose upper half is of gate and whose lower half is of up."""
    features, columns, piece = features * WIDTH_UNIT, columns * UNIT, piece * _PIECE_UNIT
    tile = _tile_of_program()
    token = tile[0] * TOKENS + tl.arange(0, TOKENS)
    half: tl.constexpr = FEATURES // 2
    row = tl.arange(0, FEATURES)
    # Triton 3.9 does not see that a choice of two aligned pointers is aligned.
    base_ptr = tl.multiple_of(tl.where(row < half, gate_ptr, up_ptr), _ALIGNMENT)
    w_row = _row(base_ptr, tile[1] * half + row % half, features, columns)
    total = _sum_of_pieces(w_row, _row(x_ptr, token, tokens, columns), columns, piece, CUT, UNIT, DEPTH)
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(total.reshape(2, half, TOKENS).permute(1, 2, 0))
    feature = tile[1] * half + tl.arange(0, half)
    inside = (feature < features)[:, None] & (token < tokens)[None, :]
    product = gate_mul_tile(gate, up, ACTIVATION)
    _finish(product, x_ptr, out_ptr, feature[:, None], token[None, :], features, inside, "none")


@exact_jit
def _parts_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    parts_ptr,
    tokens,
    columns,
    a_rows,
    b_rows,
    c_rows,
    a_piece,
    b_piece,
    c_piece,
    APART: tl.constexpr,
    CUT: tl.constexpr,
    UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the product with a, b or c, which lie side by side in parts: one piece (`APART`), or all of them."""
    columns = columns * UNIT
    tiles = _tile_of_program()
    token = tiles[0] * TOKENS + tl.arange(0, TOKENS)
    tile = tiles[1]
    a_tiles, b_tiles = tl.cdiv(a_rows, FEATURES), tl.cdiv(b_rows, FEATURES)
    w_ptr, rows, piece, first = a_ptr, a_rows, a_piece, 0
    if tile >= a_tiles + b_tiles:
        w_ptr, rows, piece, first = c_ptr, c_rows, c_piece, a_rows + b_rows
        tile -= a_tiles + b_tiles
    elif tile >= a_tiles:
        w_ptr, rows, piece, first = b_ptr, b_rows, b_piece, a_rows
        tile -= a_tiles
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    w_row, x_row = _row(w_ptr, feature, rows, columns), _row(x_ptr, token, tokens, columns)
    if APART:
        start = tl.program_id(2) * piece * _PIECE_UNIT
        stop = tl.minimum(start + piece * _PIECE_UNIT, columns)
        total = _sum(w_row, x_row, start, stop, columns, UNIT, DEPTH)
    else:
        total = _sum_of_pieces(w_row, x_row, columns, piece * _PIECE_UNIT, CUT, UNIT, DEPTH)
    width = a_rows + b_rows + c_rows
    part_row = (tl.program_id(2) * tokens + token).to(tl.int64) * width + first
    inside = (feature < rows)[:, None] & (token < tokens)[None, :]
    tl.store(parts_ptr + part_row[None, :] + feature[:, None], total, mask=inside)


@exact_jit
def _fold_kernel(
    parts_ptr, extra_ptr, out_ptr, tokens, features, EXTRA: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Folds parts of one token and finishes the sums."""
    token = tl.program_id(1)
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = fold_parts(parts_ptr, tokens, features, token, feature, feature < features, PIECES)
    _finish(total, extra_ptr, out_ptr, feature, token, features, feature < features, EXTRA)


@exact_jit
def _fold_gate_up_kernel(
    parts_ptr, out_ptr, tokens, features, ACTIVATION: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Folds parts of one token, gate and up side by side, and stores gate_mul of the two."""
    token = tl.program_id(1)
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < features
    gate = fold_parts(parts_ptr, tokens, 2 * features, token, feature, inside, PIECES)
    up = fold_parts(parts_ptr, tokens, 2 * features, token, features + feature, inside, PIECES)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product = gate_mul_tile(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    _finish(product, parts_ptr, out_ptr, feature, token, features, inside, "none")
