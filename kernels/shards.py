"""A weight that holds a part of a checkpoint's tensor.

`Shard` accepts whole tensors, or single elements of a tensor, in the checkpoint's layout. `Shard` stores only the
elements of its own part.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .specs import Slice


class Shard:
    """A `Weight` that has the shape of the checkpoint's tensor, but stores only a part of the tensor.

    `own`: the memory of the part, which is a tensor, a backend's weight, or a `Stack`. `shape`: the shape of the
    checkpoint's whole tensor. The source of `copy_` has the shape of the whole tensor, and the indices of
    `put_` are positions in the whole tensor. Elements outside the part are ignored.
    """

    def __init__(self, own: Any, part: Slice) -> None:
        self.own, self.part = own, part
        shape = list(own.shape)
        shape[part.dim] = part.total
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.own.dtype

    @property
    def nbytes(self) -> int:
        """The memory size of the part in bytes."""
        return self.own.nbytes

    @property
    def length(self) -> int:
        """The length of the part along its axis."""
        return self.own.shape[self.part.dim]

    def copy_(self, source: Tensor | Shard) -> None:
        """Store this shard's part of a whole tensor, or copy another shard of the same part. Raise
        ValueError for another shape.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, Shard):
            self.own.copy_(source.own)
        else:
            self.own.copy_(source.narrow(self.part.dim, self.part.start, self.length))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the whole tensor. Indices outside the part are
        ignored.
        """
        inner = math.prod(self.shape[self.part.dim + 1 :])
        row = index // inner
        place = row % self.part.total - self.part.start
        is_own = (place >= 0) & (place < self.length)
        own = ((row // self.part.total) * self.length + place) * inner + index % inner
        self.own.put_(own[is_own], source[is_own])

    def narrow(self, dim: int, start: int, length: int) -> Shard:
        """Return rows [start, start + length) of the whole tensor, as a shard that shares this shard's memory. `dim` is
        0.
        """
        if self.part.dim != 0:
            return Shard(self.own.narrow(0, start, length), self.part)
        begin, end = max(start, self.part.start), min(start + length, self.part.start + self.length)
        if begin >= end:
            return Shard(self.own.narrow(0, 0, 0), Slice(0, 0, length))
        return Shard(self.own.narrow(0, begin - self.part.start, end - begin), Slice(0, begin - start, length))

    def to_dense(self) -> Tensor:
        """Return the values of the part as a tensor."""
        return self.own.to_dense()
