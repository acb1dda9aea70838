"""FP8 in blocks, the format of the published checkpoints of DeepSeek V3, Kimi K2 and other families (DeepSeek-V3
Technical Report, 2024).

A matrix [R, C] of float8_e4m3fn is divided into blocks of 128 rows and 128 columns. The blocks at the right and lower
edges of the matrix may be smaller. The scales of the blocks are in a tensor [ceil(R / 128), ceil(C / 128)]. The tensor
has the name of the matrix with the suffix `SCALES`. The format is `fp8` of `kernels.quantization`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels.quantization import FORMATS, Quantized

FP8 = "F8_E4M3"
"""The dtype of a stored matrix, as in the header of a safetensors file."""
SCALES = "_scale_inv"
"""The suffix that is appended to the name of a matrix to name its scales."""
SCALE_DTYPES = ("F32", "F16", "BF16")
"""The dtypes that scales may have, as in the header of a safetensors file. All convert to float32 exactly."""
BLOCK = 128
_FORMAT = FORMATS["fp8"]


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales for a matrix of shape `shape`."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def check_scales(scales: Tensor) -> None:
    """Raise ValueError unless all scales are finite numbers of at least 0. A block of zeros may have the scale 0."""
    if num_bad := int((~(scales.isfinite() & (scales >= 0))).sum()):
        raise ValueError(f"{num_bad} of {scales.numel()} scales are NaN, infinite or negative")


def row_ranges(shape: tuple[int, ...], most_bytes: int) -> Iterator[range]:
    """Yield ranges of rows that together are all rows of a matrix. A range consists of whole rows of blocks. A range
    takes at most `most_bytes` bytes in float32, unless a single row of blocks takes more.
    """
    rows, columns = shape
    step = max(most_bytes // (4 * BLOCK * max(columns, 1)), 1) * BLOCK
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


def quantized(stored: Tensor, scales: Tensor, row: int = 0) -> Quantized:
    """Return rows of a matrix. `stored`: the rows' numbers. `scales`: the scales of the whole matrix. `row`: the index
    of the first row in the matrix.
    """
    blocks = torch.arange(row, row + len(stored)) // BLOCK
    return Quantized(_FORMAT, stored.contiguous().view(torch.uint8), scales.float()[blocks])


class Rows:
    """Some rows of a matrix in a file. Indexing works as for the result of `get_slice`: it reads a part from the file
    and dequantizes the part.

    `stored`: the matrix, as the result of `get_slice`. `scales`: the scales of the whole matrix.
    """

    def __init__(self, stored: Any, scales: Tensor, rows: range) -> None:
        self._stored, self._scales, self._rows = stored, scales, rows

    def quantized(self) -> Quantized:
        """Return all of these rows, as they are stored."""
        return quantized(self._stored[self._rows.start : self._rows.stop], self._scales, self._rows.start)

    def __getitem__(self, part: slice | tuple[slice, slice]) -> Tensor:
        """Return rows, or rows and columns, in float32."""
        of_rows, columns = part if isinstance(part, tuple) else (part, slice(None))
        rows = self._rows[of_rows]
        stored = self._stored[rows.start : rows.stop, columns]
        first = columns.start or 0
        begin = first // BLOCK
        end = -(-(first + stored.shape[1]) // BLOCK)
        padded = torch.nn.functional.pad(stored.contiguous().view(torch.uint8), (first % BLOCK, 0))
        return quantized(padded, self._scales[:, begin:end], rows.start).values()[:, first % BLOCK :]
