"""Holds many matrices, such as the matrices of a layer's experts, in a few weights of the backend. Ops multiply the
matrices one by one.

A backend holds the E experts' matrices [R, C] as one matrix of E * R rows. A checkpoint has one tensor with the same
elements, either in the shape [E, R, C] or in the order of a `StackLayout`. `Stack` accepts whole tensors, or single
elements of a tensor, in the checkpoint's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .contract import Weight
from .quantization import Format, Quantized, format_of, join


@dataclass(frozen=True)
class StackLayout:
    """How a checkpoint stores matrices [E, R, C] and biases [E, R].

    `transposed`: matrices are stored as [E, C, R]. `in_turn`: the rows of the first half and the rows of the second
    half of a matrix alternate. Biases have rows only, so `transposed` does not affect biases. `or_transposed`: the
    files of a checkpoint may instead store all matrices as [E, C, R], which the loader recognizes by their shapes.
    Pushes must not use the alternative order [E, C, R]. `parts`: the number of parts of equal height, such as gate and
    up, that a matrix consists of.
    """

    transposed: bool = False
    in_turn: bool = False
    or_transposed: bool = False
    parts: int = 1

    def shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the shape of the checkpoint's tensor for matrices or biases of this shape."""
        return torch.Size((shape[0], *reversed(shape[1:])) if self.transposed else shape)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """Convert a checkpoint's tensor to matrices [E, R, C] or biases [E, R], without a copy where possible."""
        tensor = tensor.transpose(1, 2) if self.transposed and tensor.dim() == 3 else tensor
        return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.in_turn else tensor

    def as_stored(self, tensor: Tensor) -> Tensor:
        """Convert matrices or biases to the checkpoint's layout. `rows_first` does the reverse."""
        tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if self.in_turn else tensor
        return tensor.transpose(1, 2) if self.transposed and tensor.dim() == 3 else tensor

    def places(self, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convert flat indices of the checkpoint's tensor to flat indices of matrices or biases of this shape."""
        _, rows, *others = shape
        columns = others[0] if others else 1
        matrix, place = index // (rows * columns), index % (rows * columns)
        row, column = (place % rows, place // rows) if self.transposed else (place // columns, place % columns)
        if self.in_turn:
            row = row % 2 * (rows // 2) + row // 2
        return (matrix * rows + row) * columns + column


@dataclass(frozen=True)
class HeadLayout:
    """How a checkpoint stores the two matrices of each head of latent attention as one matrix [heads * (K + V), C].

    Each head has K = `key_rows` rows and then V = `value_rows` rows. The ops read the K rows transposed, as [heads * C,
    K], and the V rows as [heads * V, C].
    """

    key_rows: int
    value_rows: int

    @property
    def head_rows(self) -> int:
        """The number of rows of a head."""
        return self.key_rows + self.value_rows

    def shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the shape of the checkpoint's tensor, which is `shape`."""
        return torch.Size(shape)

    def rows_first(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a checkpoint's tensor to the matrices that the ops read: the K rows and the V rows of all heads."""
        keys, values = tensor.unflatten(0, (-1, self.head_rows)).tensor_split([self.key_rows], 1)
        return keys.transpose(1, 2).flatten(0, 1), values.flatten(0, 1)


class HeadMatrices:
    """A `Weight` with the shape and element order of a checkpoint's matrix that `HeadLayout` describes, or of only the
    rows [first, first + rows) of this matrix. `matrix`: the two matrices that hold the elements of all rows.
    """

    def __init__(self, matrix: tuple[Weight, Weight], layout: HeadLayout, first: int, rows: int) -> None:
        self.matrix, self.layout, self._first = matrix, layout, first
        self.shape, self.dtype = torch.Size((rows, matrix[1].shape[1])), matrix[1].dtype

    @classmethod
    def new(
        cls,
        new_weight: Callable[..., Weight],
        empty: Callable[..., Tensor],
        shape: tuple[int, ...],
        layout: HeadLayout,
    ) -> HeadMatrices:
        """Return uninitialized matrices for a checkpoint's matrix of this shape."""
        rows, columns = shape
        heads = rows // layout.head_rows
        keys = new_weight(heads * columns, layout.key_rows, empty)
        return cls((keys, new_weight(heads * layout.value_rows, columns, empty)), layout, 0, rows)

    @property
    def nbytes(self) -> int:
        """The memory size of the rows in bytes, padding included."""
        heads = self.matrix[1].shape[0] // self.layout.value_rows
        return sum(each.nbytes for each in self.matrix) * self.shape[0] // (heads * self.layout.head_rows)

    def copy_(self, source: Tensor | HeadMatrices) -> None:
        """Store a tensor of this shape, or the same rows of another `HeadMatrices`. Raise ValueError if the source has
        another shape.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        rows = source.to_dense() if isinstance(source, HeadMatrices) else source
        unit, end = self.layout.head_rows, self._first + len(rows)
        first_head, end_head = -(-self._first // unit), end // unit
        if first_head >= end_head:
            return self._put_rows(0, rows)
        begin, stop = (head * unit - self._first for head in (first_head, end_head))
        self._put_rows(0, rows[:begin])
        parts = self.layout.rows_first(rows[begin:stop])
        for own, part, size in zip(self.matrix, parts, (rows.shape[1], self.layout.value_rows), strict=True):
            own.narrow(0, first_head * size, len(part)).copy_(part)
        self._put_rows(stop, rows[stop:])

    def _put_rows(self, start: int, rows: Tensor) -> None:
        if len(rows):
            index = torch.arange(rows.numel(), device=rows.device) + start * rows.shape[1]
            self.put_(index, rows.flatten().to(self.dtype))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the rows."""
        keys, values = self.layout.key_rows, self.layout.value_rows
        columns, unit = self.shape[1], self.layout.head_rows
        row, column = index // columns + self._first, index % columns
        head, row = row // unit, row % unit
        places = (head * columns + column) * keys + row, (head * values + row - keys) * columns + column
        for matrix, place, chosen in zip(self.matrix, places, (row < keys, row >= keys), strict=True):
            matrix.put_(place[chosen], source[chosen])

    def narrow(self, dim: int, start: int, length: int) -> HeadMatrices:
        """Return rows [start, start + length), which share this weight's memory. `dim` is 0."""
        return HeadMatrices(self.matrix, self.layout, self._first + start, length)

    def to_dense(self) -> Tensor:
        """Return a tensor of `shape` with the same values."""
        keys, values = (matrix.to_dense() for matrix in self.matrix)
        of_heads = keys.view(-1, self.shape[1], self.layout.key_rows).transpose(1, 2)
        rows = torch.cat((of_heads, values.view(len(of_heads), -1, self.shape[1])), 1).flatten(0, 1)
        return rows.narrow(0, self._first, self.shape[0])


class Stack:
    """A `Weight` of matrices [E, R, C] or biases [E, R], with the shape and element order of the checkpoint's tensor.

    `matrix`: the memory of the stack. Matrices are in a backend's weight [E * R, C], biases are in a tensor [E, R].
    """

    def __init__(self, matrix: Any, shape: tuple[int, ...], layout: StackLayout) -> None:
        self.matrix, self.own_shape, self.layout = matrix, shape, layout
        self.shape = layout.shape(shape)

    @classmethod
    def new(
        cls,
        new_weight: Callable[..., Weight],
        empty: Callable[..., Tensor],
        shape: tuple[int, ...],
        layout: StackLayout,
    ) -> Stack:
        """Return an uninitialized stack of matrices or biases of this shape."""
        if len(shape) == 2:
            return cls(empty(*shape), shape, layout)
        count, rows, columns = shape
        return cls(new_weight(count * rows, columns, empty, unit=rows // layout.parts), shape, layout)

    @property
    def experts(self) -> range:
        """The experts in this stack."""
        return range(self.own_shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.matrix.dtype

    @property
    def format(self) -> Format | None:
        """The format of the matrices; None if they are not quantized."""
        return format_of(self.matrix)

    @property
    def nbytes(self) -> int:
        """The memory size of the stack in bytes."""
        return self.matrix.nbytes

    def copy_(self, source: Tensor | Stack) -> None:
        """Store a tensor of the checkpoint's shape, or a stack of this layout. Raise ValueError if the source has
        another shape.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        self.matrix.copy_(source.matrix if isinstance(source, Stack) else self._flat(source))

    def put_quantized(self, expert: int, source: Quantized) -> None:
        """Store the quantized matrix of an expert. The rows of `source` are in the order of the checkpoint's tensor."""
        if self.layout.in_turn:
            source = join([source.rows(slice(first, None, 2)) for first in range(2)], 0)
        rows = self.own_shape[1]
        self.matrix.narrow(0, expert * rows, rows).copy_(source)

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the checkpoint's tensor."""
        self.matrix.put_(self.layout.places(index, self.own_shape), source)

    def narrow(self, dim: int, start: int, length: int) -> Stack:
        """Return experts [start, start + length), as a stack that shares this stack's memory. `dim` is 0."""
        return Stack(self._part(start, length), (length, *self.own_shape[1:]), self.layout)

    def part(self, expert: int, start: int, length: int) -> Weight:
        """Return rows [start, start + length) of one expert's matrix, as a weight that shares this stack's memory."""
        return self.matrix.narrow(0, expert * self.own_shape[1] + start, length)

    def to_dense(self) -> Tensor:
        """Return a tensor of `shape` with the same values."""
        if len(self.own_shape) == 2:
            return self.layout.as_stored(self.matrix)
        return self.layout.as_stored(self.matrix.to_dense().view(self.own_shape))

    def _part(self, start: int, length: int) -> Any:
        rows = 1 if len(self.own_shape) == 2 else self.own_shape[1]
        return self.matrix.narrow(0, start * rows, length * rows)

    def _flat(self, source: Tensor) -> Tensor:
        tensor = self.layout.rows_first(source)
        return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[2])
