"""Tiles of weights in registers. A weight is a plain tensor, or rows of codes and scales (`coded.CodedWeight`).

The value of an element of a quantized weight is the float32 product of the number that the element's code stands for
and the element's scale, rounded to the dtype of the activations. A product with a quantized weight
therefore has the same bits as the product with a plain weight of these values. Once a tile is loaded, the
kernels do not distinguish the two kinds of weights. `FORMAT` is the `Format`
of a weight, or None for a plain weight. Kernels read only the fields of a format, because the key of Triton's cache has
the fields, but not the code of properties.

The bits of a float code are shifted to the places of a float16. Because the exponent of a code has another bias than
the exponent of a float16, the shifted number is multiplied by a power of two, which is exact.
"""

# A constexpr has the fields of its value.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq, is_cuda

from ..coded import CodedWeight
from .launch import device_function


def memory_of(weight: Tensor | CodedWeight) -> Tensor:
    """Return the memory of a weight, which kernels take as an argument."""
    return weight.data if isinstance(weight, CodedWeight) else weight


@device_function
def places_in_row(columns, FORMAT: tl.constexpr):
    """Return `coded.places_of`: the places of the row scale and of the groups' scales, and the bytes of a row."""
    groups = 1
    if FORMAT.columns is not None:
        groups = (columns + FORMAT.columns - 1) // FORMAT.columns
    codes = columns
    if FORMAT.element == "e2m1" or FORMAT.element == "int4":
        codes = (columns + 1) // 2
    row_scale = (codes + 15) // 16 * 16
    scales = row_scale
    if FORMAT.scale == "e4m3":
        scales = row_scale + 4
    end = scales + groups
    if FORMAT.scale == "float32" or FORMAT.scale == "float16":
        end = scales + 4 * groups
    return row_scale, scales, (end + 31) // 32 * 32


@device_function
def row_size(columns, FORMAT: tl.constexpr):
    """Return the distance between rows: in elements of a plain weight, in bytes of a quantized weight."""
    if FORMAT is None:
        return columns
    else:
        return places_in_row(columns, FORMAT)[2]


@device_function
def load_columns(tile_ptr, inside, UNIT: tl.constexpr, DEPTH: tl.constexpr):
    """Load the elements, codes or scales of `DEPTH` columns, with 0 for columns that are not `inside`. No mask is
    needed if `UNIT` is a multiple of `DEPTH`.
    """
    if UNIT % DEPTH == 0:
        return tl.load(tile_ptr)
    else:
        return tl.load(tile_ptr, mask=inside, other=0.0)


@device_function
def load_weight(
    w_row,
    w_tile,
    k,
    stop,
    columns,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Load columns [k, k + DEPTH) of the rows that begin at `w_row`, as values of `DTYPE`. Columns from `stop` on are
    0.

    `w_tile`: the addresses of the first `DEPTH` elements of each row, or, for a quantized weight, of the first `DEPTH`
    bytes of each row. `columns`: the columns of the weight. `k` is a multiple of `UNIT` or of `DEPTH`, and `stop` is a
    multiple of `UNIT`.
    """
    if FORMAT is None:
        step = tl.arange(0, DEPTH)
        return load_columns(w_tile + k, (step < stop - k)[None, :], UNIT, DEPTH)
    else:
        # `SPAN` columns share a scale. If a row has several scales, `stop` never cuts a span. If a row has one scale,
        # `stop` may cut the span, and the codes from `stop` on are 0.
        LEAST: tl.constexpr = UNIT if UNIT < DEPTH else DEPTH
        GROUP: tl.constexpr = DEPTH if FORMAT.columns is None else FORMAT.columns
        SPAN: tl.constexpr = GROUP if FORMAT.columns is None or GROUP < LEAST else LEAST
        STEPS: tl.constexpr = DEPTH // SPAN
        row_scale, scales, _ = places_in_row(columns, FORMAT)
        if FORMAT.columns is None:
            group = tl.zeros([1], tl.int32)
        elif SPAN == FORMAT.columns:  # in this form, the compiler can join the loads of neighbouring scales
            group = tl.multiple_of(k // SPAN, LEAST // SPAN) + tl.arange(0, STEPS)
        else:
            group = (k + tl.arange(0, STEPS) * SPAN) // FORMAT.columns
        inside = (k + tl.arange(0, STEPS) * SPAN < stop)[None, :]
        scale, zero = _load_scales(w_row, row_scale, scales, group[None, :], inside, FORMAT, UNIT, DEPTH)
        numbers = _numbers(_load_codes(w_row, w_tile, k, stop, FORMAT, UNIT, DEPTH), FORMAT)
        numbers = numbers.reshape(w_row.shape[0], STEPS, SPAN)
        if FORMAT.element == "int4":
            numbers = numbers - zero[:, :, None]
        values = (numbers * scale[:, :, None]).reshape(w_row.shape[0], DEPTH)
        return _with_columns_in_order(values.to(DTYPE))


@device_function
def _with_columns_in_order(values):
    """Return a tile of 16-bit values, unchanged.

    For sm_80, Triton orders the columns in a matrix instruction by the width of the loaded elements. With codes of 8
    bits, an instruction would add other columns than with a plain weight. The inline assembly hides the loads from
    Triton. On targets later than sm_80, the order of the columns is fixed.
    """
    if is_cuda() and not cuda_capability_geq(9):
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], values.dtype, is_pure=False, pack=2)
    else:
        return values


@device_function
def _load_codes(w_row, w_tile, k, stop, FORMAT: tl.constexpr, UNIT: tl.constexpr, DEPTH: tl.constexpr):
    """Load the codes of the columns [k, k + DEPTH), uint8. Columns from `stop` on have the code 0."""
    if FORMAT.element == "e4m3" or FORMAT.element == "int8":
        step = tl.arange(0, DEPTH)
        return load_columns(w_tile + k, (step < stop - k)[None, :], UNIT, DEPTH)
    elif UNIT % 2 == 0:
        pair = tl.arange(0, DEPTH // 2)
        tile_ptr = (w_row[:, None] + pair[None, :]) + (k >> 1)
        packed = load_columns(tile_ptr, (2 * pair < stop - k)[None, :], UNIT, DEPTH)
        return tl.join(packed & 15, packed >> 4).reshape(w_row.shape[0], DEPTH)
    else:
        column = k + tl.arange(0, DEPTH)
        inside = (column < stop)[None, :]
        packed = tl.load(w_row[:, None] + (column >> 1)[None, :], mask=inside, other=0)
        return (packed >> ((column & 1) * 4).to(tl.uint8)[None, :]) & 15


@device_function
def _numbers(codes, FORMAT: tl.constexpr):
    """Return the numbers that the codes stand for, as float32. The zero points of `int4` are not subtracted."""
    if FORMAT.element == "e4m3":
        return _small_floats(codes, 0x7F, 7, 256.0)
    elif FORMAT.element == "e2m1":
        return _small_floats(codes, 0x07, 9, 16384.0)
    elif FORMAT.element == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return codes.to(tl.float32)


@device_function
def _small_floats(codes, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, FACTOR: tl.constexpr):
    """Return the numbers of codes that consist of a sign bit and a magnitude. A shift by `SHIFT` moves the magnitude to
    the place of a float16 magnitude. `FACTOR`: 2 to the power of the difference between the biases of the two
    exponents.
    """
    wide = codes.to(tl.int32)
    SIGN: tl.constexpr = 0x8000 // (MAGNITUDE + 1)
    bits = ((wide & MAGNITUDE) << SHIFT) | ((wide & (MAGNITUDE + 1)) * SIGN)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * FACTOR


@device_function
def _load_scales(
    w_row,
    row_scale,
    scales,
    group,
    inside,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Load the scales and the zero points of groups of columns, float32 [rows, groups], with 0 for groups that are not
    `inside`. The zero points of a format without zero points are unused.
    """
    scales_ptr = (w_row + scales)[:, None]
    if FORMAT.scale == "float32":
        scale = load_columns(scales_ptr.to(tl.pointer_type(tl.float32)) + group, inside, UNIT, DEPTH)
        return scale, scale
    elif FORMAT.scale == "float16":
        word = load_columns(scales_ptr.to(tl.pointer_type(tl.int32)) + group, inside, UNIT, DEPTH)
        return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32), (word >> 16).to(tl.float32)
    elif FORMAT.scale == "e8m0":
        exponent = load_columns(scales_ptr + group, inside, UNIT, DEPTH).to(tl.int32) << 23
        scale = tl.where(exponent == 0, 1 << 22, exponent).to(tl.float32, bitcast=True)  # 2**-127 is denormal
        return scale, scale
    else:
        of_rows = tl.load((w_row + row_scale).to(tl.pointer_type(tl.float32)))
        scale = _small_floats(load_columns(scales_ptr + group, inside, UNIT, DEPTH), 0x7F, 7, 256.0) * of_rows[:, None]
        return scale, scale
