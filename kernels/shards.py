"""A weight that holds a part of a checkpoint's tensor.

`Shard` accepts whole tensors, or single elements of a tensor, in the checkpoint's layout. Elements outside its part are
ignored.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .specs import Slice
from .stacks import Stack, StackLayout


def is_stack(weight: Any) -> TypeGuard[Stack]:
    """Return whether a weight is a `Stack`, or a shard of one. Such a shard has the attributes of a `Stack` too."""
    return isinstance(weight.own if isinstance(weight, Shard) else weight, Stack)


class Shard:
    """A `Weight` that has the shape of the checkpoint's tensor, but stores only a part of the tensor.

    `own`: the memory of the part, which is a tensor, a backend's weight, or a `Stack`. It is as long as the part along
    the part's axis. `shape`: the shape of the checkpoint's whole tensor. The source of `copy_` has the shape of the
    whole tensor, and the indices of `put_` are positions in the whole tensor. Elements outside the part are ignored.
    """

    def __init__(self, own: Any, part: Slice) -> None:
        self.own, self.slice = own, part
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
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the matrices or biases of all experts, for a shard of a `Stack`."""
        return self.slice.total, *self.own.own_shape[1:]

    @property
    def experts(self) -> range:
        """The experts that this shard of a `Stack` holds."""
        ((first, count),) = self.slice.ranges
        return range(first, first + count)

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
            parts = [source.narrow(self.slice.dim, start, length) for start, length in self.slice.ranges]
            self.own.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, self.slice.dim))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the whole tensor. Indices outside the part are
        ignored.
        """
        inner = math.prod(self.shape[self.slice.dim + 1 :])
        row, before = index // inner, 0
        for start, length in self.slice.ranges:
            place = row % self.slice.total - start
            is_own = (place >= 0) & (place < length)
            own = ((row // self.slice.total) * self.slice.length + before + place) * inner + index % inner
            self.own.put_(own[is_own], source[is_own])
            before += length

    def narrow(self, dim: int, start: int, length: int) -> Shard:
        """Return rows [start, start + length) of the whole tensor, as a shard that shares this shard's memory. `dim` is
        0.
        """
        if self.slice.dim != 0:
            return Shard(self.own.narrow(0, start, length), self.slice)
        ranges, first, before = list[tuple[int, int]](), 0, 0
        for own_start, own_length in self.slice.ranges:
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
        is_held = expert in self.experts
        own = self.own.part(expert - self.experts.start if is_held else 0, start, length if is_held else 0)
        return Shard(own, Slice(0, length, ((0, length if is_held else 0),)))

    def to_dense(self) -> Tensor:
        """Return the values of the part as a tensor."""
        return self.own.to_dense()
