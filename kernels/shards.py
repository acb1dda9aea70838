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
from .stacks import StackLayout


class Shard:
    """A `Weight` that has the shape of the checkpoint's tensor, but stores only a part of the tensor.

    `own`: the memory of the part, which is a tensor, a backend's weight, or a `Stack`. It is as long as the part along
    the part's axis. `shape`: the shape of the checkpoint's whole tensor. The source of `copy_` has the shape of the
    whole tensor, and the indices of `put_` are positions in the whole tensor. Elements outside the part are ignored.
    """

    def __init__(self, own: Any, part: Slice) -> None:
        self.own, self.held = own, part
        shape = list(own.shape)
        shape[part.dim] = part.total
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.own.dtype

    @property
    def layout(self) -> StackLayout:
        """The layout of the checkpoint's tensor, for a shard of a `Stack`."""
        return self.own.layout

    @property
    def nbytes(self) -> int:
        """The memory size of the part in bytes."""
        return self.own.nbytes

    def copy_(self, source: Tensor | Shard) -> None:
        """Store this shard's part of a whole tensor, or copy another shard of the same part. Raise
        ValueError for another shape.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, Shard):
            self.own.copy_(source.own)
        else:
            parts = [source.narrow(self.held.dim, start, length) for start, length in self.held.ranges]
            self.own.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, self.held.dim))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the whole tensor. Indices outside the part are
        ignored.
        """
        inner = math.prod(self.shape[self.held.dim + 1 :])
        row, before = index // inner, 0
        for start, length in self.held.ranges:
            place = row % self.held.total - start
            is_own = (place >= 0) & (place < length)
            own = ((row // self.held.total) * self.held.length + before + place) * inner + index % inner
            self.own.put_(own[is_own], source[is_own])
            before += length

    def narrow(self, dim: int, start: int, length: int) -> Shard:
        """Return rows [start, start + length) of the whole tensor, as a shard that shares this shard's memory. `dim` is
        0.
        """
        if self.held.dim != 0:
            return Shard(self.own.narrow(0, start, length), self.held)
        ranges, first, before = list[tuple[int, int]](), 0, 0
        for own_start, own_length in self.held.ranges:
            begin, end = max(start, own_start), min(start + length, own_start + own_length)
            if begin < end:
                first = first if ranges else before + begin - own_start
                ranges.append((begin - start, end - begin))
            before += own_length
        part = Slice(0, length, tuple(ranges) or ((0, 0),))
        return Shard(self.own.narrow(0, first, part.length), part)

    def part(self, expert: int, start: int, length: int) -> Shard:
        """Return rows [start, start + length) of one expert's matrix, for a shard of a `Stack` with some experts. The
        result shares this shard's memory, and ignores all values if the shard does not hold the expert.
        """
        ((first, count),) = self.held.ranges
        is_held = first <= expert < first + count
        own = self.own.part(expert - first if is_held else 0, start, length if is_held else 0)
        return Shard(own, Slice(0, length, ((0, length if is_held else 0),)))

    def to_dense(self) -> Tensor:
        """Return the values of the part as a tensor."""
        return self.own.to_dense()
