"""The layouts of quantized matrices: which tensors store a matrix [R, C], and what the tensors mean.

A matrix has the name of a module, followed by `.weight`. The module has one tensor with the codes, and further tensors
with scales and zero points. The names of all tensors of a module begin with the module's name. Codes and scales are
read in the format of the layout (`kernels.quantization`). Only the second of the following conversions rounds:

- Scales of another dtype are converted to the dtype of the format's scales. The conversion of a scale must be possible
  without rounding.
- In NVFP4 of compressed-tensors, scales are divided by a stored number. The format in `kernels.quantization` multiplies
  scales by the reciprocal of the stored number, rounded to float32.

Owns nothing. Guarantees: NaN, infinite and negative scales are refused, and so are codes that mean NaN. Sources:
DeepSeek-V3 Technical Report (2024) for `fp8`; AutoAWQ 0.2 for `awq`; ModelOpt 0.40 for `modelopt-nvfp4`;
compressed-tensors 0.20 for all other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.quantization import FORMATS, ROWS, Format, Quantized
from .packing import awq_words, nibbles, words, words_of_rows

_WEIGHT = "weight"
_FLOATS = ("F32", "F16", "BF16")
_NAN_E8M0 = 255
_WORD = 8
"""The number of codes in a word."""
_MIDDLE = 8
"""The zero point of symmetric codes of 4 bits."""
Shape = tuple[int, ...]


class UnfitError(ValueError):
    """The stored values are valid, but the layout's format cannot hold the values."""


class Member(NamedTuple):
    """One of the tensors that store a matrix.

    `suffix`: the part of the name after the module's name and a period. `dtypes`: the dtypes that the tensor may have,
    as in the header of a safetensors file. `shape(R, C)`: returns the tensor's shape for a matrix of R rows and C
    columns. `read(tensor, (R, C))`: checks the tensor, and converts the tensor to the form that `Matrix.fields` holds;
    raises ValueError if the tensor is invalid.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], Shape]
    read: Callable[[Tensor, Shape], Tensor] = lambda tensor, shape: tensor


@dataclass(frozen=True)
class Layout:
    """The tensors that store a matrix in a format.

    `codes`: the tensor with the codes. `unpack`: returns the codes, uint8 [r, c], of a part of the tensor `codes`.
    `is_swapped`: whether the rows of the tensor `codes` are the columns of the matrix. `packed`: the number of codes
    that an element of the tensor `codes` holds, along the tensor's last axis. `others`: the tensors other than `codes`,
    by the names of the fields of `Quantized`. If `Member.read` checks a tensor but does not keep it, the tensor's name
    is not a field of `Quantized`. `left_out`: the suffixes of unused tensors, which serve the quantization of
    activations, or of keys and values.
    """

    format: Format
    codes: Member
    others: Mapping[str, Member]
    unpack: Callable[[Tensor], Tensor] = lambda part: part.contiguous().view(torch.uint8)
    packed: int = 1
    is_swapped: bool = False
    left_out: tuple[str, ...] = ()

    def matrix_of(self, name: str) -> str:
        """Return the name of the matrix to which the tensor `name` belongs. If no matrix has such a tensor, return
        `name`.
        """
        for member in (self.codes, *self.others.values()):
            if name.endswith("." + member.suffix):
                return name.removesuffix(member.suffix) + _WEIGHT
        return name

    def names(self, matrix: str) -> dict[str, str]:
        """Return the names of the tensors that store a matrix: `codes`, and the keys of `others`. The result is empty
        if `matrix` is not the name of a matrix.
        """
        if not matrix.endswith("." + _WEIGHT):
            return {}
        module = matrix.removesuffix(_WEIGHT)
        return {kind: module + member.suffix for kind, member in self.members.items()}

    @property
    def members(self) -> dict[str, Member]:
        """All tensors of a matrix: `codes` and the tensors in `others`."""
        return {"codes": self.codes, **self.others}

    def is_left_out(self, name: str) -> bool:
        """Return whether a tensor serves only the quantization of activations, or of keys and values."""
        return name.rpartition(".")[2] in self.left_out


@dataclass(frozen=True)
class Matrix:
    """A stored matrix [R, C] without its codes. `fields`: results of `Member.read`, by the keys of `Layout.others`."""

    layout: Layout
    shape: Shape
    fields: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """The memory size of the fields in bytes."""
        return sum(tensor.nbytes for tensor in self.fields.values())

    def part(self, stored: Any, rows: range, columns: range) -> Quantized:
        """Return the given rows and columns of the matrix. Both ranges must begin at the first element of a group or
        word, and end at the last element of a group, a word or the matrix. `stored`: the tensor with the codes, as a
        tensor or as the result of `get_slice`. Raise ValueError if a code means NaN.
        """
        layout, group = self.layout, self.layout.format.group(self.shape[1])
        outer, inner = (columns, rows) if layout.is_swapped else (rows, columns)
        elements = slice(inner.start // layout.packed, -(-inner.stop // layout.packed))
        codes = layout.unpack(stored[outer.start : outer.stop, elements])[: len(rows), : len(columns)].contiguous()
        if layout.format.element == "e4m3":
            _refuse_nan(codes)
        block = layout.format.rows
        chosen = torch.arange(rows.start, rows.stop) // block if block > 1 else slice(rows.start, rows.stop)
        groups = slice(columns.start // group, max(-(-columns.stop // group), 1))
        scales, zeros = self.fields["scales"][chosen, groups], self.fields.get("zeros")
        if layout.format.element == "int4":
            zeros = torch.full(scales.shape, _MIDDLE, dtype=torch.uint8) if zeros is None else zeros[chosen, groups]
        factor = self.fields.get("row_scales")
        return Quantized(layout.format, codes, scales, zeros, None if factor is None else factor.expand(len(rows)))


class Rows:
    """Some rows of a matrix in a file. Indexing works as for the result of `get_slice`: it reads a part from the file
    and dequantizes the part.

    `stored`: the codes, as the result of `get_slice`. `rows`: a range of rows that begins at a multiple of `ROWS`.
    """

    def __init__(self, stored: Any, matrix: Matrix, rows: range) -> None:
        self._stored, self._matrix, self._rows = stored, matrix, rows

    @property
    def format(self) -> Format:
        """The format of the matrix."""
        return self._matrix.layout.format

    def quantized(self) -> Quantized:
        """Return all of these rows in quantized form. Raise ValueError if a code means NaN."""
        return self._matrix.part(self._stored, self._rows, range(self._matrix.shape[1]))

    def __getitem__(self, part: slice | tuple[slice, slice]) -> Tensor:
        """Return rows, or rows and columns, in float32. Raise ValueError if a code means NaN."""
        of_rows, of_columns = part if isinstance(part, tuple) else (part, slice(None))
        rows, columns = self._rows[of_rows], range(self._matrix.shape[1])[of_columns]
        wide_rows = _whole(rows, _WORD, self._matrix.shape[0])
        wide_columns = _whole(columns, self.format.columns or 1, self._matrix.shape[1])
        values = self._matrix.part(self._stored, wide_rows, wide_columns).values()
        first_row, first_column = rows.start - wide_rows.start, columns.start - wide_columns.start
        return values[first_row : first_row + len(rows), first_column : first_column + len(columns)]


def _whole(part: range, unit: int, end: int) -> range:
    """Extend `part` to a range that begins at a multiple of `unit`, and ends at a multiple of `unit` or at `end`."""
    return range(part.start // unit * unit, min(-(-part.stop // unit) * unit, end))


def row_ranges(shape: Shape, most_bytes: int) -> Iterator[range]:
    """Yield ranges of rows that together are all rows of a matrix. A range begins at a multiple of `ROWS` rows. A range
    takes at most `most_bytes` bytes in float32, unless `ROWS` rows take more.
    """
    rows, columns = shape
    step = max(most_bytes // (4 * ROWS * max(columns, 1)), 1) * ROWS
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


def _refuse_nan(codes: Tensor) -> None:
    """Raise ValueError if a float8 code means NaN."""
    magnitudes = codes & 0x7F
    if codes.numel() and int(magnitudes.max()) == 0x7F:
        raise ValueError(f"{int((magnitudes == 0x7F).sum())} of {codes.numel()} numbers are NaN")


def _read_floats(tensor: Tensor, shape: Shape) -> Tensor:
    """Check scales, and return them in float32. A block of zeros may have the scale 0."""
    wide = tensor.float()
    if num_bad := int((~(wide.isfinite() & (wide >= 0))).sum()):
        raise ValueError(f"{num_bad} of {tensor.numel()} scales are NaN, infinite or negative")
    return wide


def _read_float16(tensor: Tensor, shape: Shape) -> Tensor:
    wide = _read_floats(tensor, shape)
    found = wide.half()
    if num_bad := int((found.float() != wide).sum()):
        raise UnfitError(f"{num_bad} of {tensor.numel()} scales are no float16 numbers, which the format awq needs")
    return found


def _read_swapped_float16(tensor: Tensor, shape: Shape) -> Tensor:
    return _read_float16(tensor, shape).T.contiguous()


def _read_e8m0(tensor: Tensor, shape: Shape) -> Tensor:
    if num_nan := int((tensor == _NAN_E8M0).sum()):
        raise ValueError(f"{num_nan} of {tensor.numel()} scales are NaN (byte {_NAN_E8M0})")
    return tensor


def _read_e4m3(tensor: Tensor, shape: Shape) -> Tensor:
    _read_floats(tensor, shape)
    return tensor


def _read_factor(tensor: Tensor, shape: Shape) -> Tensor:
    return _read_floats(tensor.reshape(1), shape)


def _read_divisor(tensor: Tensor, shape: Shape) -> Tensor:
    found = 1 / tensor.reshape(1)
    if not (found.isfinite() & (found > 0)).all():
        raise ValueError(f"the scale must be a positive number with a finite reciprocal (got {tensor.item()})")
    return found


def _read_shape(tensor: Tensor, shape: Shape) -> Tensor:
    if tensor.tolist() != [*shape]:
        raise ValueError(f"the shape must be {[*shape]} (got {tensor.tolist()})")
    return tensor


def _read_zeros(tensor: Tensor, shape: Shape) -> Tensor:
    return words_of_rows(tensor)[: shape[0]].contiguous()


def _read_awq_zeros(tensor: Tensor, shape: Shape) -> Tensor:
    return awq_words(tensor)[: shape[0]].contiguous()


def _whole_shape(rows: int, columns: int) -> Shape:
    return rows, columns


def _by(of_rows: int, of_columns: int) -> Callable[[int, int], Shape]:
    """Return a function that divides the numbers of rows and columns, rounding up."""
    return lambda rows, columns: (-(-rows // of_rows), -(-columns // of_columns))


def _swapped(of_columns: int, of_rows: int) -> Callable[[int, int], Shape]:
    return lambda rows, columns: (-(-columns // of_columns), -(-rows // of_rows))


def _one_per_row(rows: int, columns: int) -> Shape:
    return rows, 1


_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale")
_SCALES = "weight_scale"
_BYTES = Member(_WEIGHT, ("F8_E4M3",), _whole_shape)
_PAIRS = Member("weight_packed", ("U8",), _by(1, 2))
_WORDS = Member("weight_packed", ("I32",), _by(1, _WORD))
_OF_ROWS = Member(_SCALES, _FLOATS, _one_per_row, _read_floats)
_OF_SIXTEEN = Member(_SCALES, ("F8_E4M3",), _by(1, 16), _read_e4m3)
_OF_32 = Member(_SCALES, ("U8",), _by(1, 32), _read_e8m0)
_INT4 = {
    "scales": Member(_SCALES, _FLOATS, _by(1, 128), _read_float16),
    "shape": Member("weight_shape", ("I64",), lambda rows, columns: (2,), _read_shape),
}
_INT4_ZEROS = {"zeros": Member("weight_zero_point", ("I32",), _by(_WORD, 128), _read_zeros)}


def _blocks(suffix: str) -> dict[str, Member]:
    return {"scales": Member(suffix, _FLOATS, _by(128, 128), _read_floats)}


def _compressed(format: str, codes: Member, others: Mapping[str, Member], **packing: Any) -> Layout:
    return Layout(FORMATS[format], codes, others, left_out=_UNUSED, **packing)


_PACKED_PAIRS = dict(unpack=nibbles, packed=2)
_PACKED_WORDS = dict(unpack=words, packed=_WORD)
LAYOUTS = {
    "fp8": Layout(FORMATS["fp8"], _BYTES, _blocks("weight_scale_inv")),
    "awq": Layout(
        FORMATS["awq"],
        Member("qweight", ("I32",), _swapped(1, _WORD)),
        {
            "zeros": Member("qzeros", ("I32",), _swapped(128, _WORD), _read_awq_zeros),
            "scales": Member("scales", _FLOATS, _swapped(128, 1), _read_swapped_float16),
        },
        unpack=awq_words,
        packed=_WORD,
        is_swapped=True,
    ),
    "modelopt-nvfp4": _compressed(
        "nvfp4",
        Member(_WEIGHT, ("U8",), _by(1, 2)),
        {
            "scales": _OF_SIXTEEN,
            "row_scales": Member("weight_scale_2", ("F32",), lambda rows, columns: (), _read_factor),
        },
        **_PACKED_PAIRS,
    ),
    "fp8_block": _compressed("fp8", _BYTES, _blocks(_SCALES)),
    "fp8_channel": _compressed("fp8_channel", _BYTES, {"scales": _OF_ROWS}),
    "int8": _compressed("int8", Member(_WEIGHT, ("I8",), _whole_shape), {"scales": _OF_ROWS}),
    "mxfp8": _compressed("mxfp8", _BYTES, {"scales": _OF_32}),
    "mxfp4": _compressed("mxfp4", _PAIRS, {"scales": _OF_32}, **_PACKED_PAIRS),
    "nvfp4": _compressed(
        "nvfp4",
        _PAIRS,
        {
            "scales": _OF_SIXTEEN,
            "row_scales": Member("weight_global_scale", ("F32",), lambda rows, columns: (1,), _read_divisor),
        },
        **_PACKED_PAIRS,
    ),
    "int4_symmetric": _compressed("awq", _WORDS, _INT4, **_PACKED_WORDS),
    "int4": _compressed("awq", _WORDS, _INT4 | _INT4_ZEROS, **_PACKED_WORDS),
}
"""The layouts, by the names that `kernels.stored` uses."""
