"""Matrices in the layout that the native products read.

A panel holds 16 rows. For each step along the columns it has the values of its 16 rows side by side: one float32, or
two bfloat16 of neighbouring columns. Rows are filled up with zeros to whole panels, columns of bfloat16 to a multiple
of 32. The same layout serves every instruction set. Memory belongs to the weight and never moves: `copy_` packs into
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import load_library

PANEL_ROWS = 16
COLUMN_MULTIPLE = {torch.float32: 1, torch.bfloat16: 32}


class PackedWeight:
    """A matrix [rows, columns] of float32 or bfloat16, uninitialized until something is copied into it."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size((rows, columns)), dtype
        multiple = COLUMN_MULTIPLE[dtype]
        padded = -(-rows // PANEL_ROWS) * PANEL_ROWS, -(-columns // multiple) * multiple
        self.data = torch.empty(padded, dtype=dtype)

    @property
    def pointer(self) -> int:
        """Its address."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The memory it takes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor) -> None:
        """Packs a tensor of the same shape, on any device and of any dtype. Raise ValueError for another shape."""
        if source.shape != self.shape:
            raise ValueError(f"weight: expected shape {list(self.shape)}, found {list(source.shape)}")
        rows = source.to("cpu", self.dtype).contiguous()
        load_library().pack(*self._arguments(rows.data_ptr(), self.pointer))

    def to_dense(self) -> Tensor:
        """A plain tensor [rows, columns] with the same values."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        load_library().unpack(*self._arguments(self.pointer, rows.data_ptr()))
        return rows

    def _arguments(self, source: int, destination: int) -> tuple[int, ...]:
        return (torch.get_num_threads(), self.dtype == torch.bfloat16, source, destination, *self.shape)
