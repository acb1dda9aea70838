"""Quantized matrices in the layout of the native kernels, which expand them to plain panels block by block
(native/codes.h).

A matrix is padded to whole panels of 16 rows, and to a multiple of 32 columns. A panel is contiguous, so a slice of
rows that begins at a panel is one contiguous range of the memory. A panel holds, one after the other:

- for `nvfp4`, the 16 row scales, float32;
- for each group of columns (`Format.group`; all columns if the format has one scale for each row):
    - the 16 scales of its rows, in the dtype of `Quantized.scales`;
    - for `awq`, the 16 zero points of its rows, one byte each;
    - the codes. `int8`: 16 bytes for each column. If activations are quantized to `int8`, the codes are the integers
      plus 128, and each four columns take 64 bytes, with a row's four codes side by side. `e4m3`: 32 bytes for each two
      columns, with a row's two codes side by side. Codes of 4 bits: 16 bytes for each two columns, with the left
      column's code in the lower half of a row's byte.

A row therefore takes 1 byte for each column in formats of the kinds `int8` and `e4m3`, and half a byte in `mxfp4`,
`nvfp4` and `awq`. In addition, a row takes 4 bytes in formats with one scale for each row, 4 bytes for each 128 columns
in `fp8`, 1 byte for each 32 columns in `mxfp8` and `mxfp4`, 1 byte for each 16 columns plus 4 bytes in `nvfp4`, and 3
bytes for each 128 columns in `awq`. In the padding, each code stands for the number 0, and each scale is 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..quantization import FORMATS, SCALE_DTYPES, Format, Quantized, quantize_part, refuse_elements, require_finite

PANEL_ROWS = 16
COLUMN_MULTIPLE = 32
_E8M0_ONE = 127
_OFFSET = 0x80  # converts an int8 to the integer plus 128
FORMAT_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(FORMATS, 1)}
"""The numbers of `Format` in native/common.h. A plain matrix has the number 0."""


class QuantizedWeight:
    """A matrix [rows, columns] of codes and scales, with the values of `Quantized.values`, rounded to `dtype`.

    `dtype`: the dtype of the tensors that `copy_` receives and of the activations. `unit`: as in `quantize`. `data`:
    the panels, uint8 [padded rows, bytes of a row]. `first`: the index of this weight's first row in the whole matrix
    that `new` made. `whole_rows`: the number of rows of the whole matrix.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        format: Format,
        unit: int | None,
        data: Tensor,
        first: int = 0,
        whole_rows: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.format, self.unit, self.data = torch.Size(shape), dtype, format, unit, data
        self._first, self._whole_rows = first, shape[0] if whole_rows is None else whole_rows

    @classmethod
    def new(
        cls, rows: int, columns: int, empty: Callable[..., Tensor], format: Format, unit: int | None
    ) -> QuantizedWeight:
        """Return an uninitialized weight. The weight's memory comes from `empty(*shape, dtype=torch.uint8)`."""
        panels = -(-rows // PANEL_ROWS)
        row_bytes = _sizes(format, columns)[2] // PANEL_ROWS
        data = empty(panels * PANEL_ROWS, row_bytes, dtype=torch.uint8)
        return cls((rows, columns), empty(0).dtype, format, unit, data)

    @property
    def pointer(self) -> int:
        """The address of the panels."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The memory size of the weight in bytes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor | Quantized | QuantizedWeight) -> None:
        """Store a tensor, which is converted to `dtype` and quantized; or a quantized matrix of this format.

        Raise ValueError for a source of another shape or format; for an element or a scale that is NaN or infinite; and
        if the rows of a tensor do not consist of whole blocks of rows.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, Tensor):
            own = self._first, self._whole_rows
            return self._pack(quantize_part(source.to("cpu", self.dtype), self.format, self.unit, *own))
        if source.format != self.format:
            raise ValueError(f"weight must be in the format {self.format.name} (got {source.format.name})")
        if isinstance(source, Quantized):
            require_finite(source)
            return self._pack(source)
        # torch is not used here, since torch's threads would compete with ops that run in other threads.
        ctypes.memmove(self.pointer, source.pointer, self.nbytes)

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Raise ValueError if there are elements to write, because a quantized matrix takes only whole rows."""
        refuse_elements(self.format, index)

    def narrow(self, dim: int, start: int, length: int) -> QuantizedWeight:
        """Return rows [start, start + length) as a weight that shares this weight's memory. Raise ValueError unless the
        first row begins a panel, and the last row ends a panel or is the last row of the weight.
        """
        check_rows(self.shape[0], dim, start, length)
        data = self.data.narrow(0, start, -(-length // PANEL_ROWS) * PANEL_ROWS)
        shape = length, self.shape[1]
        return QuantizedWeight(shape, self.dtype, self.format, self.unit, data, self._first + start, self._whole_rows)

    def copied(self) -> QuantizedWeight:
        """Return a weight with a copy of the codes and scales, in new memory."""
        shape, of_whole = (self.shape[0], self.shape[1]), (self._first, self._whole_rows)
        return QuantizedWeight(shape, self.dtype, self.format, self.unit, self.data.clone(), *of_whole)

    def to_dense(self) -> Tensor:
        """Return a plain tensor [rows, columns] with the same values."""
        return self.quantized().values().to(self.dtype)

    def quantized(self) -> Quantized:
        """Return a copy of the codes and scales."""
        (rows, columns), format = self.shape, self.format
        header, shared, panel_bytes = _sizes(format, columns)
        group, groups, _ = _groups(format, columns)
        panels = self.data.view(-1, panel_bytes)
        num_codes = group * PANEL_ROWS * format.bits // 8
        body = pad(panels[:, header:], (0, groups * (shared + num_codes) - (panel_bytes - header)))
        of_groups = body.unflatten(1, (groups, -1))
        codes = _codes_of_rows(of_groups[..., shared:].flatten(1), format)[:rows, :columns].contiguous()
        used = -(-columns // group)
        size = format.scale_bytes * PANEL_ROWS
        scales = _rows_first(of_groups[..., :size].contiguous().view(SCALE_DTYPES[format.scale]))[:rows, :used]
        zeros = _rows_first(of_groups[..., size:shared])[:rows, :used] if shared > size else None
        row_scales = panels[:, :header].contiguous().view(torch.float32).flatten()[:rows] if header else None
        return Quantized(format, codes, scales, zeros, row_scales)

    def _pack(self, source: Quantized) -> None:
        (rows, columns), format = self.shape, self.format
        header, shared, panel_bytes = _sizes(format, columns)
        group, groups, wide = _groups(format, columns)
        below, zeros = -rows % PANEL_ROWS, source.zeros
        codes = source.codes.cpu()
        if zeros is not None:
            codes = torch.cat((codes, zeros.cpu()[:, -1:].expand(rows, wide - columns)), 1)
        codes = pad(codes, (0, wide - codes.shape[1], 0, below))
        parts = [_panels_first(source.scales.cpu(), groups, below, _E8M0_ONE if format.scale == "e8m0" else 1)]
        parts += [] if zeros is None else [_panels_first(zeros.cpu(), groups, below, 0)]
        parts += [_codes_of_panels(codes, format).unflatten(1, (groups, -1))]
        body = torch.cat(parts, 2).flatten(1)
        panels = self.data.view(-1, panel_bytes)
        if source.row_scales is not None:
            panels[:, :header] = (
                pad(source.row_scales.cpu(), (0, below), value=1.0).view(-1, PANEL_ROWS).view(torch.uint8)
            )
        panels[:, header:] = body[:, : panel_bytes - header]


def check_rows(rows: int, dim: int, start: int, length: int) -> None:
    """Raise ValueError unless the rows [start, start + length) of a matrix with `rows` rows are whole panels."""
    end = start + length
    if dim != 0 or start % PANEL_ROWS or not (end % PANEL_ROWS == 0 or end == rows):
        raise ValueError(
            f"a slice of weight rows must begin and end at multiples of {PANEL_ROWS}, in dim 0 (got [{start}, "
            f"{end}) in dim {dim})"
        )
    if not 0 <= start <= end <= rows:
        raise ValueError(f"a slice of weight rows must lie in [0, {rows}) (got [{start}, {end}))")


def _groups(format: Format, columns: int) -> tuple[int, int, int]:
    """Return three numbers: the columns in a group, the groups in a panel, and the columns in all groups of a panel."""
    padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    group = format.group(padded)
    groups = -(-padded // group)
    return group, groups, groups * group


def _sizes(format: Format, columns: int) -> tuple[int, int, int]:
    """Return three sizes in bytes: a panel's header, the data before the codes of each group, and a whole panel."""
    header = 4 * PANEL_ROWS if format.scale == "e4m3" else 0
    shared = (format.scale_bytes + (format.element == "int4")) * PANEL_ROWS
    padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    codes = padded * PANEL_ROWS * format.bits // 8
    return header, shared, header + _groups(format, columns)[1] * shared + codes


def _codes_of_panels(codes: Tensor, format: Format) -> Tensor:
    """Return codes [R, C] in the order of the panels, uint8 [panels, bytes]."""
    if format.activations == "int8":
        return (codes ^ _OFFSET).view(-1, PANEL_ROWS, codes.shape[1] // 4, 4).transpose(1, 2).flatten(1)
    pairs = codes.view(-1, PANEL_ROWS, codes.shape[1] // 2, 2)
    if format.element == "int8":
        return pairs.permute(0, 2, 3, 1).flatten(1)
    pairs = pairs.transpose(1, 2)
    return (pairs if format.bits == 8 else pairs[..., 0] | pairs[..., 1] << 4).flatten(1)


def _codes_of_rows(panels: Tensor, format: Format) -> Tensor:
    """Return codes [panels, bytes] as [R, C]."""
    if format.activations == "int8":
        return (panels ^ _OFFSET).unflatten(1, (-1, PANEL_ROWS, 4)).transpose(1, 2).flatten(2).flatten(0, 1)
    if format.element == "int8":
        return panels.unflatten(1, (-1, PANEL_ROWS)).transpose(1, 2).flatten(0, 1)
    pairs = panels.unflatten(1, (-1, 2) if format.bits == 8 else (-1, 1))
    if format.bits == 4:
        pairs = torch.cat((pairs & 15, pairs >> 4), 2)
    return pairs.unflatten(1, (-1, PANEL_ROWS)).transpose(1, 2).flatten(2).flatten(0, 1)


def _panels_first(of_rows: Tensor, groups: int, below: int, fill: int) -> Tensor:
    """Pad `of_rows` [R, G], which has a number for each row and group, and return the bytes of each panel and group,
    uint8 [panels, groups, bytes].
    """
    rows, found = of_rows.shape
    padded = torch.full((rows + below, groups), fill, dtype=torch.float32).to(of_rows.dtype)
    padded[:rows, :found] = of_rows
    return padded.view(-1, PANEL_ROWS, groups).transpose(1, 2).contiguous().view(torch.uint8)


def _rows_first(of_panels: Tensor) -> Tensor:
    """Return the numbers [panels, groups, 16] as [R, G], with a number for each row and group."""
    return of_panels.transpose(1, 2).flatten(0, 1).contiguous()
