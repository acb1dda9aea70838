"""Quantized matrices as rows of bytes, for the backends `triton` and `reference`.

A row of a matrix occupies a multiple of 32 bytes. A row holds, one after the other:

- the codes, padded to a multiple of 16 bytes: one byte for each column; or, for codes of 4 bits, one byte for each two
  columns, with the left column's code in the lower half;
- for `nvfp4`, the row scale, float32;
- for each group of columns (`Format.group`), its scale in the dtype of `Quantized.scales`; for `awq`, 4 bytes: the
  scale, the zero point and a byte of zeros.

The padding consists of zeros. Rows are stored one after the other, so a slice of rows is one contiguous range of the
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .quantization import SCALE_DTYPES, Format, Quantized, quantize_part, refuse_elements, require_finite

_UNIT, _CODES_UNIT = 32, 16


class Places(NamedTuple):
    """The byte offsets of the row scale and of the groups' scales in a row, and the row's size in bytes. The codes
    begin at offset 0.
    """

    row_scale: int
    scales: int
    size: int


def places_of(format: Format, columns: int) -> Places:
    """Return the `Places` of a row, for a matrix with this many columns."""
    row_scale = -(-columns * format.bits // (8 * _CODES_UNIT)) * _CODES_UNIT
    scales = row_scale + (4 if format.scale == "e4m3" else 0)
    end = scales + _groups(format, columns) * _group_bytes(format)
    return Places(row_scale, scales, -(-end // _UNIT) * _UNIT)


def _groups(format: Format, columns: int) -> int:
    return 1 if format.columns is None else -(-columns // format.columns)


def _group_bytes(format: Format) -> int:
    return 4 if format.element == "int4" else format.scale_bytes


class CodedWeight:
    """A `Weight` [rows, columns] of codes and scales, with the values of `Quantized.values`, rounded to `dtype`.

    `dtype`: the dtype of the tensors that `copy_` receives and of the activations. `data`: the rows, uint8 [rows, bytes
    of a row]. `unit`: as in `quantize`. `first`: the index of this weight's first row in the whole matrix that `new`
    made. `whole_rows`: the number of rows of the whole matrix.
    """

    def __init__(
        self,
        columns: int,
        dtype: torch.dtype,
        format: Format,
        unit: int | None,
        data: Tensor,
        first: int = 0,
        whole_rows: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.format, self.unit = torch.Size((len(data), columns)), dtype, format, unit
        self.data, self._first, self._whole_rows = data, first, len(data) if whole_rows is None else whole_rows

    @classmethod
    def new(
        cls, rows: int, columns: int, empty: Callable[..., Tensor], format: Format, unit: int | None
    ) -> CodedWeight:
        """Return an uninitialized weight. The weight's memory comes from `empty(*shape, dtype=torch.uint8)`."""
        data = empty(rows, places_of(format, columns).size, dtype=torch.uint8)
        return cls(columns, empty(0).dtype, format, unit, data)

    @property
    def nbytes(self) -> int:
        """The memory size of the weight in bytes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor | Quantized | CodedWeight) -> None:
        """Store a tensor, which is converted to `dtype` and quantized on its device; or a quantized matrix of this
        format.

        Raise ValueError for a source of another shape or format; for an element or a scale that is NaN or infinite; and
        if the rows of a tensor do not consist of whole blocks of rows.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, Tensor):
            matrix, own = source.to(self.dtype), (self._first, self._whole_rows)
            self.data.copy_(_rows_of(quantize_part(matrix, self.format, self.unit, *own)))
            return
        if source.format != self.format:
            raise ValueError(f"weight must be in the format {self.format.name} (got {source.format.name})")
        if isinstance(source, Quantized):
            require_finite(source)
            self.data.copy_(_rows_of(source))
        else:
            self.data.copy_(source.data)

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Raise ValueError if there are elements to write, because a quantized matrix takes only whole rows."""
        refuse_elements(self.format, index)

    def narrow(self, dim: int, start: int, length: int) -> CodedWeight:
        """Return rows [start, start + length) as a weight that shares this weight's memory. `dim` is 0."""
        return self._with(self.data.narrow(dim, start, length), start)

    def copied(self, device: torch.device) -> CodedWeight:
        """Return a copy on `device`, in memory of its own."""
        return self._with(self.data.to(device, copy=True), 0)

    def to_dense(self) -> Tensor:
        """Return a plain tensor [rows, columns] with the same values."""
        return self.quantized().values().to(self.dtype)

    def quantized(self) -> Quantized:
        """Return the codes and scales. If the codes have 8 bits, they share this weight's memory."""
        columns, format = self.shape[1], self.format
        places, groups = places_of(format, columns), _groups(format, columns)
        codes = self.data[:, : -(-columns * format.bits // 8)]
        if format.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, :columns]
        of_groups = self.data.narrow(1, places.scales, groups * _group_bytes(format)).unflatten(1, (groups, -1))
        scales = of_groups[..., : format.scale_bytes].contiguous().view(SCALE_DTYPES[format.scale]).flatten(1)
        zeros = of_groups[..., 2].contiguous() if format.element == "int4" else None
        row_scales = None
        if format.scale == "e4m3":
            row_scales = self.data.narrow(1, places.row_scale, 4).contiguous().view(torch.float32).flatten()
        return Quantized(format, codes, scales, zeros, row_scales)

    def _with(self, data: Tensor, start: int) -> CodedWeight:
        of_whole = self._first + start, self._whole_rows
        return CodedWeight(self.shape[1], self.dtype, self.format, self.unit, data, *of_whole)


def _rows_of(source: Quantized) -> Tensor:
    """Return the rows of a quantized matrix, uint8 [rows, bytes of a row]."""
    places, codes = places_of(source.format, source.shape[1]), source.codes
    if source.format.bits == 4:
        even = pad(codes, (0, codes.shape[1] % 2))
        codes = even[:, ::2] | even[:, 1::2] << 4
    scales = source.scales.contiguous().view(torch.uint8)
    if source.zeros is not None:
        scales = torch.cat((scales.unflatten(1, (-1, 2)), pad(source.zeros[..., None], (0, 1))), 2).flatten(1)
    if source.row_scales is not None:
        scales = torch.cat((source.row_scales[:, None].view(torch.uint8), scales), 1)
    widths = places.row_scale, places.size - places.row_scale
    return torch.cat(
        [pad(part, (0, width - part.shape[1])) for part, width in zip((codes, scales), widths, strict=True)], 1
    )
