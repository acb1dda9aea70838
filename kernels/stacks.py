"""Holds the matrices of a layer's experts in one weight of the backend.

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


@dataclass(frozen=True)
class StackLayout:
    """How a checkpoint stores matrices [E, R, C] and biases [E, R].

    `transposed`: matrices are stored as [E, C, R]. `in_turn`: the rows of the first half and of the second half
    alternate. Biases have rows only, so `transposed` does not affect them. `or_transposed`: the files of a checkpoint
    may have all matrices as [E, C, R] instead, which the shapes tell. Pushes may not.
    """

    transposed: bool = False
    in_turn: bool = False
    or_transposed: bool = False

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
        return cls(new_weight(count * rows, columns, empty), shape, layout)

    @property
    def experts(self) -> range:
        """The experts in this stack."""
        return range(self.own_shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.matrix.dtype

    @property
    def nbytes(self) -> int:
        """The memory size of the stack in bytes."""
        return self.matrix.nbytes

    def copy_(self, source: Tensor | Stack) -> None:
        """Store a tensor of the checkpoint's shape, or a stack of this layout. Raise ValueError for another shape."""
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        self.matrix.copy_(source.matrix if isinstance(source, Stack) else self._flat(source))

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
