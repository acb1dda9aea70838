"""FP8 in blocks, the format of the published checkpoints of DeepSeek V3, Kimi K2 and other families (DeepSeek-V3
Technical Report, 2024).

A matrix [R, C] of float8_e4m3fn is divided into blocks of 128 rows and 128 columns. The blocks at the right and lower
edges of the matrix may be smaller. The scales of the blocks are in a tensor [ceil(R / 128), ceil(C / 128)]. The tensor
has the name of the matrix with the suffix `SCALES`. An element's value is the float32 product of the stored number and
its block's scale. The caller rounds the dequantized value once, to the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FP8 = "F8_E4M3"
"""The dtype of a stored matrix, as in the header of a safetensors file."""
SCALES = "_scale_inv"
"""The suffix that is appended to the name of a matrix to name its scales."""
SCALE_DTYPES = ("F32", "F16", "BF16")
"""The dtypes that scales may have, as in the header of a safetensors file. All convert to float32 exactly."""
BLOCK = 128
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales for a matrix of shape `shape`."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def check_scales(scales: Tensor) -> None:
    """Raise ValueError unless all scales are finite numbers of at least 0. A block of zeros may have the scale 0."""
    if num_bad := int((~(scales.isfinite() & (scales >= 0))).sum()):
        raise ValueError(f"{num_bad} of {scales.numel()} scales are NaN, infinite or negative")


def dequantize(stored: Tensor, scales: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """Return a part of a matrix in float32. `stored`: the part's numbers. `scales`: the scales of the whole matrix.
    `row`, `column`: where the part begins in the matrix.
    """
    # Four times as fast as torch's conversion.
    values = _VALUES.index_select(0, stored.contiguous().view(torch.uint8).flatten().int()).view(stored.shape)
    end = row + len(values)
    for block in range(row // BLOCK, -(-end // BLOCK)):
        of_columns = scales[block].float().repeat_interleave(BLOCK)[column : column + values.shape[1]]
        values[max(block * BLOCK - row, 0) : (block + 1) * BLOCK - row] *= of_columns
    return values


def row_ranges(shape: tuple[int, ...], most_bytes: int) -> Iterator[range]:
    """Yield ranges of rows that together are all rows of a matrix. A range consists of whole rows of blocks. A range
    takes at most `most_bytes` bytes in float32, unless a single row of blocks takes more.
    """
    rows, columns = shape
    step = max(most_bytes // (4 * BLOCK * max(columns, 1)), 1) * BLOCK
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


class Rows:
    """Some rows of a matrix in a file. Indexing works as for the result of `get_slice`: it reads a part from the file
    and dequantizes the part.

    `stored`: the matrix, as the result of `get_slice`. `scales`: the scales of the whole matrix.
    """

    def __init__(self, stored: Any, scales: Tensor, rows: range) -> None:
        self._stored, self._scales, self._rows = stored, scales, rows

    def __getitem__(self, part: slice | tuple[slice, slice]) -> Tensor:
        """Return rows, or rows and columns, in float32."""
        of_rows, columns = part if isinstance(part, tuple) else (part, slice(None))
        rows = self._rows[of_rows]
        stored = self._stored[rows.start : rows.stop, columns]
        return dequantize(stored, self._scales, rows.start, columns.start or 0)
