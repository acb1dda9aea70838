"""Products of tokens with weights. The bits of a product's elements do not depend on the number of tokens.

An element of a product is the sum over K of a weight row times a token. Only the shape of the weight, or the `Pieces`
of the call, determines how K is cut into pieces (split-K, `k_splits`). One chain of matrix instructions sums a piece:
the chain starts from zero and adds 16 columns at a time, in ascending order of the columns. The sums of the pieces are
added to +0.0 in the order of the pieces; the sums of given `Pieces` are added as a balanced binary tree. The tile of a
program, and the number of columns that a program loads at a time, may depend on the number of tokens. The tile and the
number of columns loaded at a time do not affect the order in which an element's products are added. One program may sum
all pieces of its tile, or each piece may have its own program, which writes the sum (a "part") to a workspace. Features
are on the M side of the instruction, which holds 64 features (sm_80: 16; sm_100: 64 or 128, depending on the tile).
Tokens are on the N side of the instruction, which holds all tokens of the tile.

A sum that starts at +0.0 is never -0.0, because x + y rounded to nearest is -0.0 only if x and y are -0.0. Adding a
part that is +0.0 therefore changes no bit. If a weight has fewer pieces than another weight of the same kernel, its
missing parts are +0.0.

This module owns the division of K into pieces, the tiles of all products, and the epilogues of products: bias,
residual, activation. This module does not own norms, or the epilogue of the products with the weights of q, k and v.
Activations are copied if `launch` cannot use them in place; weights must be contiguous and begin at a multiple of 16
bytes. A weight may be quantized: `weights` turns its codes into values, which then take the place of a plain weight. A
weight may be a shard, which holds some rows of a whole weight (`contract.mark_rows`). Each element of a product has the
same bits with the shard as with the whole weight.

A cost model of an H100 (`machine`), fitted to measured times, chooses the tiles. Each element of a weight is read from
L2 once per tile of tokens. Each element of a token is read from L2 once per tile of features. The SM with the most
programs finishes last. Matrix instructions and loads compete for the bandwidth of shared memory. With few tokens, the
time of a product is the time to read the weights from memory. For up to 128 tokens, reading the weights from L2 takes
most of the time. Every further tile of tokens would read the weights again, so up to 128 tokens form one tile. Weights
with at least 8192 rows have enough tiles to occupy all SMs. Weights with fewer rows are cut along their columns into up
to four pieces, which gives programs to more SMs. No piece of a cut weight has fewer than 768 columns, so a program
still reads at least 96 KB. Each piece has its own program if this saves more time than it takes to store and fold the
parts. A program that sums all pieces needs a second accumulator and therefore smaller tiles. For many tokens, tiles are
as large as registers allow. The cost model counts quantized weights as if they were plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton.language as tl
from torch import Tensor

from ..coded import CodedWeight
from ..contract import CLAMP, CLAMPED_SLOPE, full_rows_of
from ..quantization import Format, format_of
from ..reference import GELU_CUBIC, GELU_SLOPE, ROOT_HALF
from ..specs import WHOLE, Activation, Pieces, pieces_of
from .launch import ALIGNMENT, aligned, device_function, exact_jit, launch
from .machine import H100
from .weights import load_columns, load_weight, memory_of, row_size


class Tile(NamedTuple):
    """The work of one program, which computes `features` x (`tokens` + `more`) elements and loads `depth` columns of K
    at a time. `more`: the number of tokens in a second accumulator. With a second accumulator, a tile can have, for
    example, 96 or 288 tokens.
    """

    features: int
    tokens: int
    more: int
    depth: int
    warps: int
    stages: int

    @property
    def width(self) -> int:
        return self.tokens + self.more


# In a tile of gate and up, half of the features belong to gate and half to up.
TILES = (
    Tile(64, 16, 0, 128, 4, 3),
    Tile(64, 32, 0, 128, 4, 3),
    Tile(64, 64, 0, 64, 4, 4),
    Tile(64, 128, 0, 64, 4, 4),
    Tile(128, 64, 0, 64, 4, 4),
    Tile(128, 64, 32, 64, 8, 4),
    Tile(128, 128, 0, 64, 8, 4),
    Tile(128, 128, 16, 64, 8, 4),
    Tile(256, 128, 0, 64, 8, 4),
    Tile(128, 256, 0, 64, 8, 4),
    Tile(128, 256, 32, 64, 8, 3),
    Tile(128, 256, 64, 64, 8, 3),
)
# Smaller tiles, for programs that need registers to sum several pieces or to store results one by one.
CUT_TILES = (Tile(64, 64, 0, 64, 4, 4), Tile(64, 128, 0, 64, 4, 4), Tile(128, 128, 0, 64, 8, 4))
CODED_CUT_TILES = CUT_TILES[0], CUT_TILES[2]
NARROW_TILE = Tile(64, 32, 0, 32, 4, 2)  # for a K that is not a multiple of 8: elements are loaded one by one
APART_TOKENS = 1024  # the parts of more tokens would take hundreds of MB
HEAD_FEATURES, HEAD_DEPTH = 64, 64  # the tile of a program that multiplies one head
FOLD_COLUMNS = 1024
FEW_TOKENS = 192  # up to this number of tokens, one token tile is preferred to several tiles
TWO_ACCUMULATORS = 1.2  # relative time of two accumulators for the same work; fitted
FOLD_PASSES = 3  # how often parts pass through memory; fitted
SPLIT_UNIT = 128  # the pieces of `k_splits` are multiples of this number, which is a multiple of every depth
_SWIZZLE = tl.constexpr(8)  # token tiles that neighbouring programs process in turn
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_GELU_SLOPE, _GELU_CUBIC = tl.constexpr(GELU_SLOPE), tl.constexpr(GELU_CUBIC)
_ROOT_HALF = tl.constexpr(ROOT_HALF)
_CLAMP, _CLAMPED_SLOPE = tl.constexpr(CLAMP), tl.constexpr(CLAMPED_SLOPE)


Way: TypeAlias = tuple[Tile, bool]
"""A tile, and whether each piece has its own program."""


Matrix: TypeAlias = Tensor | CodedWeight
"""A plain or a quantized weight."""


class Factor(NamedTuple):
    """The weights that one kernel multiplies side by side. All weights have the same number of columns, and the same
    format or none. `pieces`: for each weight, the pieces that its columns are cut into. `is_tree`: whether the sums of
    the pieces are added as a balanced binary tree.
    """

    weights: tuple[Matrix, ...]
    pieces: tuple[Pieces, ...]
    is_tree: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(weight.shape[0] for weight in self.weights)

    @property
    def format(self) -> Format | None:
        """The format of the weights; None if they are plain."""
        return format_of(self.weights[0])

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """The arguments of the kernel for the weights."""
        return tuple(map(memory_of, self.weights))

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def most_pieces(self) -> int:
        """The largest number of pieces of any weight."""
        return max(pieces.count for pieces in self.pieces)

    @property
    def unit(self) -> int:
        """The largest unit (see `unit`) of the columns and of the lengths of all pieces."""
        return unit(math.gcd(self.columns, *(pieces.length for pieces in self.pieces)))

    @property
    def piece_lengths(self) -> list[int]:
        """The length of each weight's pieces, in units. The last piece of each weight may be shorter."""
        return [pieces.length // self.unit for pieces in self.pieces]

    @property
    def tree(self) -> int:
        """The number of pieces that are added as a tree; 1 if the pieces are added in order."""
        return self.most_pieces if self.is_tree else 1


def k_splits(rows: int, columns: int) -> int:
    """Return the number of pieces into which K is cut, for a weight [rows, columns] and for all shards of its rows."""
    return 1 if rows >= 8192 else min(4, max(1, columns // 768))


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Multiply x [M, K] by weight [N, K] transposed, add bias [N] in float32, and round once. Return [M, N] in x's
    dtype.

    All tensors share one dtype, bfloat16 or float16.
    """
    return _linear(x, factor_of(weight), bias, None, x.dtype)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of x [M, heads, K] by the transpose of the head's rows of weight [heads * N, K], and round
    once. Return [M, heads, N].

    A chain of matrix instructions sums all of K. All programs compute the same number of features. As in all products,
    the number of tokens of a program affects no bit of the result.
    """
    x = aligned(x)
    tokens, heads, columns = x.shape
    features, width = len(weight) // heads, 16 if len(x) <= 16 else 64
    out = x.new_empty(tokens, heads, features)
    grid = divide_up(features, HEAD_FEATURES), divide_up(tokens, width), heads
    sizes = dict(HEADS=heads, COLUMNS=columns, ROWS=features, FEATURES=HEAD_FEATURES, TOKENS=width, DEPTH=HEAD_DEPTH)
    launch(_head_linear_kernel, grid, x, weight, out, tokens, warps=4, stages=3, **sizes)
    return out


def project_back(
    x: Tensor,
    weight: Matrix,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    pieces: Pieces = WHOLE,
) -> Tensor:
    """Return linear(x, weight, bias) [M, N], plus `residual` [M, N] if it is given. The product is rounded before the
    residual is added, and the sum is rounded again.

    With several `pieces`, K is cut into these pieces instead of the pieces of `k_splits`.
    """
    factor = factor_of(weight) if pieces.count == 1 else Factor((weight,), (pieces,), is_tree=True)
    return _linear(x, factor, bias, residual, x.dtype)


def back_sums(x: Tensor, weight: Matrix, pieces: Pieces) -> Tensor:
    """Return the float32 sums [M, N] of `project_back`, before bias, rounding and residual. If there is only one piece,
    one chain of matrix instructions sums the piece.
    """
    if pieces.count == 1:
        pieces = pieces_of(1, x.shape[1], SPLIT_UNIT)
    return _linear(x, Factor((weight,), (pieces,), is_tree=True), None, None, torch.float32)


def gate_up(x: Tensor, gate: Matrix, up: Matrix, activation: Activation) -> Tensor:
    """Return gate_mul(linear(x, gate), linear(x, up), activation), to the bit. `gate` and `up` are [I, H]; the result
    is [M, I].
    """
    x, factor = aligned(x), factor_of(gate, up)
    out = x.new_empty(len(x), gate.shape[0])
    tile, apart = way_of(len(x), factor)
    if apart:
        _launch_fold(_fold_gate_up_kernel, _parts(x, factor, tile, apart), out, ACTIVATION=activation)
    else:
        _launch_whole(_gate_up_kernel, tile, x, factor, out, ACTIVATION=activation)
    return out


def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply hidden [M, H] by weight [V, H] transposed. Return the logits, float32 [M, V], without rounding."""
    return _linear(hidden, factor_of(weight), None, None, torch.float32)


def qkv_parts(hidden: Tensor, weights: tuple[Matrix, Matrix, Matrix]) -> Tensor:
    """Multiply hidden [M, H] by weights [Nq, H], [Nk, H] and [Nv, H], and return the products side by side, in parts.

    The result is float32 [P, M, Nq + Nk + Nv], to be summed by `fold_parts`; P is 1 for many tokens. Summing the parts,
    adding a bias and rounding once gives the same bits as `linear` with each weight alone.
    """
    factor = factor_of(*weights)
    return _parts(aligned(hidden), factor, *way_of(len(hidden), factor))


def _linear(x: Tensor, factor: Factor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return, in this dtype, the product of x and the factor's only weight, after the epilogue of `_finish`."""
    x = aligned(x)
    out = x.new_empty(len(x), *factor.rows, dtype=dtype)
    # A pointer must be valid even if the kernel does not read it.
    extras = [x if extra is None else aligned(extra) for extra in (bias, residual)]
    which = dict(BIAS=bias is not None, RESIDUAL=residual is not None)
    tile, apart = way_of(len(x), factor)
    if apart:
        _launch_fold(_fold_kernel, _parts(x, factor, tile, apart), *extras, out, **which, TREE=factor.tree)
    else:
        _launch_whole(_linear_kernel, tile, x, factor, *extras, out, **which, TREE=factor.tree)
    return out


def factor_of(*weights: Matrix) -> Factor:
    """Return the `Factor` of weights that are multiplied side by side. The weights have the same number of columns."""
    columns = weights[0].shape[1]
    return Factor(
        weights, tuple(pieces_of(k_splits(full_rows_of(each), columns), columns, SPLIT_UNIT) for each in weights)
    )


def way_of(tokens: int, factor: Factor) -> Way:
    """For a product with this many tokens, return the way to multiply that is fastest according to the cost model."""
    return _fastest(tokens, factor.columns, factor.rows, factor.most_pieces, factor.format is not None)


@lru_cache(maxsize=4096)
def _fastest(tokens: int, columns: int, rows: tuple[int, ...], pieces: int, coded: bool) -> Way:
    ways = ways_of(tokens, columns, rows, pieces, coded)
    return min(ways, key=lambda way: _cost(way[0], tokens, columns, rows, pieces if way[1] else 1))


def ways_of(tokens: int, columns: int, rows: tuple[int, ...], pieces: int, coded: bool = False) -> list[Way]:
    """Return all ways to multiply weights of these shapes side by side; all ways give the same bits. `pieces`: the
    largest number of pieces of any weight. `coded`: whether the weights are quantized.
    """
    tiles, cut = TILES if math.gcd(*rows) % 8 == 0 else CUT_TILES, CUT_TILES
    if coded:  # the values of codes need the registers of a second accumulator, and of some sums of a tree
        tiles, cut = tuple(tile for tile in tiles if not tile.more), CODED_CUT_TILES
    whole, apart = (cut, tiles) if pieces > 1 else (tiles, ())
    if pieces > 4:
        whole = cut[:1]  # each level of the tree needs an accumulator, so larger tiles would spill
    if columns % 8:
        whole, apart = (NARROW_TILE,), apart and (NARROW_TILE,)
    if tokens > APART_TOKENS:
        apart = ()
    return [(tile, False) for tile in whole] + [(tile, True) for tile in apart]


def _cost(tile: Tile, tokens: int, columns: int, rows: tuple[int, ...], parts: int) -> tuple[float, int, int]:
    """Return the sort key of one way to compute a product: modelled seconds, then the number of token tiles (if there
    are few tokens), then the tile's size.

    The modelled seconds on an H100 are the time of the slowest resource, plus the time to fold the parts.
    """
    programs, length = math.prod(_grid(tile, tokens, rows)) * parts, columns / parts
    loaded = 2 * (tile.features + tile.width) * length
    stored = 4 * parts * tokens * sum(rows) if parts > 1 else 0
    read = length * tile.features / 1024 * (2048 * (1 + (tile.more > 0)) + 32 * tile.width)
    clocks = max(
        tile.features * tile.width * length / H100.multiply_adds,
        (read + loaded) / H100.shared_bytes,
    )
    if tile.more:
        clocks *= TWO_ACCUMULATORS
    stage = 2 * (tile.features + tile.width) * tile.depth
    waves = divide_up(programs, H100.sms * (H100.shared_memory // (stage * tile.stages)))
    folding = FOLD_PASSES * stored / H100.memory + H100.launch if parts > 1 else 0.0
    seconds = folding + max(
        2 * columns * sum(rows) / H100.memory,
        (programs * loaded + stored) / H100.l2,
        divide_up(programs, H100.sms) * clocks / H100.clock,
        waves * length / tile.depth * H100.latency / (tile.stages - 1),
    )
    return seconds, divide_up(tokens, tile.width) if tokens <= FEW_TOKENS else 0, tile.features * tile.width


def _grid(tile: Tile, tokens: int, features: Sequence[int]) -> tuple[int, int]:
    """Return two numbers: how many tiles of features and how many tiles of tokens there are. The features of each
    weight are cut into tiles separately.
    """
    return sum(divide_up(n, tile.features) for n in features), divide_up(tokens, tile.width)


def divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _constants(tile: Tile, factor: Factor) -> dict[str, Any]:
    """Return the compile-time constants of the kernels for matrix products."""
    sizes = dict(FEATURES=tile.features, TOKENS=tile.tokens, MORE=tile.more, DEPTH=tile.depth)
    return dict(FORMAT=factor.format, UNIT=factor.unit, **sizes, warps=tile.warps, stages=tile.stages)


def unit(size: int) -> int:
    """Return the largest power of two up to 128 that divides `size`. Kernels can load and store a whole unit at
    once.
    """
    return math.gcd(size, 128)


def _launch_whole(kernel: Any, tile: Tile, x: Tensor, factor: Factor, *others: Tensor, **constants: Any) -> None:
    """Launch a kernel that sums and finishes the products of x with each weight."""
    tokens, columns, features = len(x), factor.columns, factor.rows[0]
    width_unit = unit(features)
    numbers = (tokens, features // width_unit, columns // factor.unit, factor.piece_lengths[0])
    constants |= _constants(tile, factor) | dict(CUT=factor.most_pieces > 1, WIDTH_UNIT=width_unit)
    launch(kernel, _grid(tile, tokens, [sum(factor.rows)]), x, *factor.memories, *others, *numbers, **constants)


def _launch_fold(kernel: Any, parts: Tensor, *tensors: Tensor, **constants: Any) -> None:
    """Launch a kernel that folds `parts`, finishes the sums and stores them in the last of `tensors`."""
    tokens, features = tensors[-1].shape
    grid = (divide_up(features, FOLD_COLUMNS), tokens)
    constants |= dict(PIECES=len(parts), COLUMNS=FOLD_COLUMNS)
    launch(kernel, grid, parts, *tensors, tokens, features, warps=4, **constants)


def _parts(x: Tensor, factor: Factor, tile: Tile, apart: bool) -> Tensor:
    """Multiply x by one, two or three weights, and return the products side by side. With `apart`, the result has a
    separate part for each piece; otherwise it has one part.
    """
    tokens, columns, rows = len(x), factor.columns, factor.rows
    out = x.new_empty(factor.most_pieces if apart else 1, tokens, sum(rows), dtype=torch.float32)
    absent = [0] * (3 - len(rows))  # weights without rows, which no program reads
    tensors = (x, *factor.memories, *[factor.memories[0] for _ in absent], out)
    width_unit = unit(math.gcd(*rows))
    sizes = [n // width_unit for n in rows]
    numbers = (tokens, columns // factor.unit, *sizes, *absent, *factor.piece_lengths, *absent)
    grid = (*_grid(tile, tokens, rows), len(out))
    constants = _constants(tile, factor) | dict(CUT=factor.most_pieces > 1, APART=apart, WIDTH_UNIT=width_unit)
    launch(_parts_kernel, grid, *tensors, *numbers, **constants)
    return out


@device_function
def _tile_of_program():
    """Return (token tile, feature tile) of this program. Programs that run at the same time share token and feature
    tiles.
    """
    return tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), _SWIZZLE)


@device_function
def _row(base_ptr, row, rows, size):
    """Return the addresses of rows of a matrix with `rows` rows. `size`: the distance between rows. Rows past the end
    wrap around to the first rows, and the results of these rows are not stored.

    Clamping instead of wrapping would make every program read the same line of memory again and again.
    """
    return base_ptr + (row % rows).to(tl.int64) * size


@device_function
def _token_rows(x_ptr, places, tokens, columns):
    return _row(x_ptr, places[0], tokens, columns), _row(x_ptr, places[1], tokens, columns)


@device_function
def _places(tile, TOKENS: tl.constexpr, MORE: tl.constexpr):
    """Return the tokens of both accumulators of a tile. Without a second accumulator, return the same tokens twice."""
    first = tile * (TOKENS + MORE)
    token = first + tl.arange(0, TOKENS)
    more = token
    if MORE:
        more = first + TOKENS + tl.arange(0, MORE)
    return token, more


@device_function
def _sums(
    w_row,
    x_rows,
    start,
    stop,
    columns,
    FORMAT: tl.constexpr,
    MORE: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply weight rows by the tokens of both accumulators over columns [start, stop). Return the sums of each
    accumulator: float32 [rows, tokens].

    `start` and `stop` are multiples of `UNIT`. Without `MORE`, the sums of the second accumulator are zeros.
    """
    step = tl.arange(0, DEPTH)
    w_tile = w_row[:, None] + step[None, :]
    x_tile, more_tile = x_rows[0][None, :] + step[:, None], x_rows[1][None, :] + step[:, None]
    total, more = _zeros(w_row, x_rows)
    for k in range(start, stop, DEPTH):
        w = load_weight(w_row, w_tile, k, stop, columns, x_rows[0].dtype.element_ty, FORMAT, UNIT, DEPTH)
        x = load_columns(x_tile + k, (step < stop - k)[:, None], UNIT, DEPTH)
        total = tl.dot(w, x, total, input_precision="ieee")
        if MORE:
            x = load_columns(more_tile + k, (step < stop - k)[:, None], UNIT, DEPTH)
            more = tl.dot(w, x, more, input_precision="ieee")
    return total, more


@device_function
def _zeros(w_row, x_rows):
    total = tl.zeros([w_row.shape[0], x_rows[0].shape[0]], tl.float32)
    return total, tl.zeros([w_row.shape[0], x_rows[1].shape[0]], tl.float32)


@device_function
def sums_of_pieces(
    w_row,
    x_rows,
    columns,
    piece,
    CUT: tl.constexpr,
    FORMAT: tl.constexpr,
    MORE: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sum each piece of `piece` columns, and add the sums to +0.0 in the order of the pieces."""
    total, more = _zeros(w_row, x_rows)
    if CUT:
        for start in range(0, columns, piece):
            stop = tl.minimum(start + piece, columns)
            sums = _sums(w_row, x_rows, start, stop, columns, FORMAT, MORE, UNIT, DEPTH)
            total += sums[0]
            if MORE:
                more += sums[1]
    else:
        sums = _sums(w_row, x_rows, 0, columns, columns, FORMAT, MORE, UNIT, DEPTH)
        total, more = sums[0] + 0.0, sums[1] + 0.0
    return total, more


@device_function
def _tree_of_pieces(
    w_row,
    x_rows,
    first,
    columns,
    piece,
    PIECES: tl.constexpr,
    FORMAT: tl.constexpr,
    MORE: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sum the pieces [first, first + PIECES) of `piece` columns, and add the sums to +0.0 as a balanced binary tree.
    Each level of the tree is a loop, so that the compiled kernel contains one copy of the innermost loop.
    """
    if PIECES == 1:
        start, stop = tl.minimum(first * piece, columns), tl.minimum((first + 1) * piece, columns)
        total, more = _sums(w_row, x_rows, start, stop, columns, FORMAT, MORE, UNIT, DEPTH)
    else:
        total, more = _zeros(w_row, x_rows)
        for half in range(0, PIECES, PIECES // 2):
            sums = _tree_of_pieces(w_row, x_rows, first + half, columns, piece, PIECES // 2, FORMAT, MORE, UNIT, DEPTH)
            total += sums[0]
            if MORE:
                more += sums[1]
    return total, more


@device_function
def fold_parts(parts_ptr, tokens, width, token, column, inside, PIECES: tl.constexpr):
    """Add elements of parts [PIECES, tokens, width] to +0.0 in the order of the parts. The result is float32 and has
    the shape of `inside`. `token` and `column` (each is a number or a tile) select the elements; elements that are not
    `inside` give 0.
    """
    total = tl.zeros(inside.shape, tl.float32)
    for piece in tl.static_range(PIECES):  # type: ignore[reportGeneralTypeIssues]
        row = (tl.cast(piece, tl.int64) * tokens + token) * width
        total += tl.load(parts_ptr + row + column, mask=inside, other=0.0)
    return total


@device_function
def _tree_of_parts(parts_ptr, tokens, width, token, column, inside, FIRST: tl.constexpr, PIECES: tl.constexpr):
    """Like `fold_parts` for the parts [FIRST, FIRST + PIECES), but add the parts as a balanced binary tree."""
    if PIECES == 1:
        row = (tl.cast(FIRST, tl.int64) * tokens + token) * width
        total = tl.load(parts_ptr + row + column, mask=inside, other=0.0)
    else:
        total = _tree_of_parts(parts_ptr, tokens, width, token, column, inside, FIRST, PIECES // 2)
        total += _tree_of_parts(parts_ptr, tokens, width, token, column, inside, FIRST + PIECES // 2, PIECES // 2)
    return total


@device_function
def gate_mul_tile(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up for float32 tiles. The calling code rounds the result once."""
    if ACTIVATION == "clamped_silu":  # comparisons keep NaN
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
    if ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * _ROOT_HALF)) * up
    if ACTIVATION == "relu":
        return tl.where(gate < 0.0, 0.0, gate) * up
    slope = gate
    if ACTIVATION == "clamped_silu":
        slope = gate * _CLAMPED_SLOPE
    if ACTIVATION == "gelu_tanh":
        slope = gate * (_GELU_SLOPE + _GELU_CUBIC * (gate * gate))
    if ACTIVATION == "sigmoid":
        gate = 1.0
    return gate / (1.0 + tl.exp(-slope)) * up


@device_function
def gate_mul_halves(total, out_ptr, ACTIVATION: tl.constexpr):
    """Return gate_mul of the upper half of a tile (`gate`) and the lower half (`up`). Both halves are first rounded to
    the dtype of `out_ptr`.
    """
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(total.reshape(2, total.shape[0] // 2, total.shape[1]).permute(1, 2, 0))
    return gate_mul_tile(gate, up, ACTIVATION)


@device_function
def _store_part(total, parts_ptr, feature, token, width, tokens, inside):
    """Store a tile of this program's piece, for the features that are `inside`."""
    row = (tl.program_id(2) * tokens + token).to(tl.int64) * width
    tl.store(parts_ptr + row[None, :] + feature[:, None], total, mask=inside[:, None] & (token < tokens)[None, :])


@device_function
def _finish_tile(
    total,
    bias_ptr,
    residual_ptr,
    out_ptr,
    feature,
    token,
    features,
    tokens,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    inside = (feature < features)[:, None] & (token < tokens)[None, :]
    column, row = feature[:, None], token[None, :]
    _finish(total, bias_ptr, residual_ptr, out_ptr, column, row, features, inside, BIAS, RESIDUAL)


@device_function
def _finish(
    total,
    bias_ptr,
    residual_ptr,
    out_ptr,
    feature,
    token,
    features,
    inside,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store sums at (token, feature) of out [tokens, features], in the dtype of out, where `inside` is true.

    With `BIAS`, a bias [features] is added before rounding. With `RESIDUAL`, a residual [tokens, features] is added
    after rounding.
    """
    at = tl.cast(token, tl.int64) * features + feature
    if BIAS:
        total += tl.load(bias_ptr + feature, mask=feature < features, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        result = result.to(tl.float32) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@exact_jit
def _head_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (i, j, head) computes a tile of features and a tile of tokens of one head."""
    head = tl.program_id(2).to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    place = token.to(tl.int64) * HEADS + head
    sums = tl.zeros([FEATURES, TOKENS], tl.float32)
    for start in range(0, COLUMNS, DEPTH):
        column = start + tl.arange(0, DEPTH)
        in_rows = (feature < ROWS)[:, None] & (column < COLUMNS)[None, :]
        rows = tl.load(weight_ptr + (head * ROWS + feature)[:, None] * COLUMNS + column[None, :], in_rows, other=0.0)
        in_x = (column < COLUMNS)[:, None] & (token < tokens)[None, :]
        x = tl.load(x_ptr + place[None, :] * COLUMNS + column[:, None], in_x, other=0.0)
        sums = tl.dot(rows, x, sums)
    stored = (feature < ROWS)[:, None] & (token < tokens)[None, :]
    tl.store(out_ptr + place[None, :] * ROWS + feature[:, None], sums.to(out_ptr.dtype.element_ty), mask=stored)


@exact_jit
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    tokens,
    features,
    columns,
    piece,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TREE: tl.constexpr,
    CUT: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    MORE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes one tile of a product: sums all pieces, then applies the epilogue. `features`, `columns` and `piece` are
    counted in units. `TREE`: `Factor.tree`.
    """
    features, columns, piece = features * WIDTH_UNIT, columns * UNIT, piece * UNIT
    tile = _tile_of_program()
    places = _places(tile[0], TOKENS, MORE)
    feature = tile[1] * FEATURES + tl.arange(0, FEATURES)
    w_row = _row(w_ptr, feature, features, row_size(columns, FORMAT))
    x_rows = _token_rows(x_ptr, places, tokens, columns)
    if TREE > 1:
        sums = _tree_of_pieces(w_row, x_rows, 0, columns, piece, TREE, FORMAT, MORE, UNIT, DEPTH)
    else:
        sums = sums_of_pieces(w_row, x_rows, columns, piece, CUT, FORMAT, MORE, UNIT, DEPTH)
    _finish_tile(sums[0], bias_ptr, residual_ptr, out_ptr, feature, places[0], features, tokens, BIAS, RESIDUAL)
    if MORE:
        _finish_tile(sums[1], bias_ptr, residual_ptr, out_ptr, feature, places[1], features, tokens, BIAS, RESIDUAL)


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
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    MORE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Like `_linear_kernel`, for tiles with `gate` in the upper half and `up` in the lower half."""
    features, columns, piece = features * WIDTH_UNIT, columns * UNIT, piece * UNIT
    tile = _tile_of_program()
    places = _places(tile[0], TOKENS, MORE)
    half: tl.constexpr = FEATURES // 2
    row = tl.arange(0, FEATURES)
    # Triton 3.9 does not infer that a choice of two aligned pointers is aligned.
    base_ptr = tl.multiple_of(tl.where(row < half, gate_ptr, up_ptr), _ALIGNMENT)
    w_row = _row(base_ptr, tile[1] * half + row % half, features, row_size(columns, FORMAT))
    x_rows = _token_rows(x_ptr, places, tokens, columns)
    sums = sums_of_pieces(w_row, x_rows, columns, piece, CUT, FORMAT, MORE, UNIT, DEPTH)
    feature = tile[1] * half + tl.arange(0, half)
    product = gate_mul_halves(sums[0], out_ptr, ACTIVATION)
    _finish_tile(product, x_ptr, x_ptr, out_ptr, feature, places[0], features, tokens, False, False)
    if MORE:
        product = gate_mul_halves(sums[1], out_ptr, ACTIVATION)
        _finish_tile(product, x_ptr, x_ptr, out_ptr, feature, places[1], features, tokens, False, False)


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
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH_UNIT: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    MORE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes one tile of the product of x with one of the weights a, b and c. With `APART`, the program sums one
    piece of the tile; without `APART`, it sums all pieces. Each part holds the product with a, the product with b and
    the product with c, side by side.
    """
    columns, a_rows, b_rows, c_rows = columns * UNIT, a_rows * WIDTH_UNIT, b_rows * WIDTH_UNIT, c_rows * WIDTH_UNIT
    tiles = _tile_of_program()
    places = _places(tiles[0], TOKENS, MORE)
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
    w_row = _row(w_ptr, feature, rows, row_size(columns, FORMAT))
    x_rows = _token_rows(x_ptr, places, tokens, columns)
    if APART:
        start = tl.program_id(2) * piece * UNIT
        stop = tl.minimum(start + piece * UNIT, columns)
        sums = _sums(w_row, x_rows, start, stop, columns, FORMAT, MORE, UNIT, DEPTH)
    else:
        sums = sums_of_pieces(w_row, x_rows, columns, piece * UNIT, CUT, FORMAT, MORE, UNIT, DEPTH)
    width = a_rows + b_rows + c_rows
    inside = feature < rows
    _store_part(sums[0], parts_ptr + first, feature, places[0], width, tokens, inside)
    if MORE:
        _store_part(sums[1], parts_ptr + first, feature, places[1], width, tokens, inside)


@exact_jit
def _fold_kernel(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    tokens,
    features,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TREE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """For one token, fold the parts and finish the sums."""
    token = tl.program_id(1)
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < features
    if TREE > 1:
        total = _tree_of_parts(parts_ptr, tokens, features, token, feature, inside, 0, TREE)
    else:
        total = fold_parts(parts_ptr, tokens, features, token, feature, inside, PIECES)
    _finish(total, bias_ptr, residual_ptr, out_ptr, feature, token, features, inside, BIAS, RESIDUAL)


@exact_jit
def _fold_gate_up_kernel(
    parts_ptr, out_ptr, tokens, features, ACTIVATION: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Fold the parts of one token, which hold `gate` and `up` side by side. Store gate_mul of `gate` and `up`."""
    token = tl.program_id(1)
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < features
    gate = fold_parts(parts_ptr, tokens, 2 * features, token, feature, inside, PIECES)
    up = fold_parts(parts_ptr, tokens, 2 * features, token, features + feature, inside, PIECES)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product = gate_mul_tile(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    _finish(product, parts_ptr, parts_ptr, out_ptr, feature, token, features, inside, False, False)
