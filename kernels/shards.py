"""Weights that hold parts of a checkpoint's tensor.

`Shard` is the part of one rank. A `Shard` accepts whole tensors, or single elements of a tensor, in the checkpoint's
layout, and ignores elements outside its part. `Shards` is the whole tensor, as the parts of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .quantization import Format, Quantized, format_of, join, quantize
from .rounded import RoundedWeight
from .specs import Slice
from .stacks import Stack, StackLayout

_ALIGNED = 16
"""`Weight.narrow` of a matrix accepts rows that begin and end at multiples of this number, or end at the last row."""


def is_stack(weight: Any) -> TypeGuard[Stack]:
    """Return whether a weight is a `Stack`, or consists of shards of a `Stack`, which have the attributes of a `Stack`
    too.
    """
    if isinstance(weight, Shards):
        weight = weight.shards[0]
    return isinstance(weight.own if isinstance(weight, Shard) else weight, Stack)


class Shard:
    """A `Weight` that has the shape of the checkpoint's tensor, but stores only a part of the tensor.

    `own`: the memory of the part, which is a tensor, a backend's weight, or a `Stack`. Along the part's axis, the
    length of `own` is the length of the part. `shape`: the shape of the checkpoint's whole tensor. The source of
    `copy_` has the shape of the whole tensor, and the indices of `put_` are positions in the whole tensor. Elements
    outside the part are ignored.
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
    def format(self) -> Format | None:
        """The format of the weight; None if the weight is not quantized."""
        return format_of(self.own)

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

    def copy_(self, source: Tensor | Quantized | Shard) -> None:
        """Store this shard's part of a whole tensor, or copy another shard of the same part. Raise
        ValueError if the source has another shape.
        """
        if source.shape != self.shape:
            raise ValueError(f"weight must have shape {list(self.shape)} (got {list(source.shape)})")
        if isinstance(source, Shard):
            self.own.copy_(source.own)
        elif self.slice.length:
            source = _prepared(source, self)
            if isinstance(source, Quantized) and isinstance(self.own, RoundedWeight):
                self.own.plain.copy_(_part(source.values(), self.slice))
            else:
                self.own.copy_(_part(source, self.slice))

    def put_quantized(self, expert: int, source: Quantized) -> None:
        """See `Stack.put_quantized`. An expert that this shard does not hold is ignored."""
        if expert in self.experts:
            self.own.put_quantized(expert - self.experts.start, source)

    def read(self, file: Any) -> int:
        """Store this shard's part of a tensor in a safetensors file, and read no other part. `file`: the result of
        `get_slice`. Return the number of bytes that were read.
        """
        ends = [slice(start, start + length) for start, length in self.slice.ranges if length]
        if not ends:
            return 0
        parts = [file[:, each] if self.slice.dim else file[each] for each in ends]
        own = parts[0] if len(parts) == 1 else torch.cat(parts, self.slice.dim)
        self.own.copy_(own)
        return own.nbytes

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
        return Shard(_rows(self.own, first, part.length), part)

    def part(self, expert: int, start: int, length: int) -> Shard:
        """Return rows [start, start + length) of one expert's matrix, for a shard that holds some experts of a `Stack`.
        The result shares this shard's memory, and ignores all values if the shard does not hold the expert.
        """
        is_held = expert in self.experts
        own = self.own.part(expert - self.experts.start if is_held else 0, start, length if is_held else 0)
        return Shard(own, Slice(0, length, ((0, length if is_held else 0),)))

    def to_dense(self) -> Tensor:
        """Return the values of the part as a tensor."""
        return self.own.to_dense()


def _prepared(source: Tensor | Quantized, weight: Shard | Shards) -> Tensor | Quantized:
    """Quantize a tensor for a quantized matrix. The scale of a row or block does not depend on how the tensor is
    divided among the ranks.
    """
    if isinstance(source, Quantized) or weight.format is None or is_stack(weight):
        return source
    return quantize(source.to(weight.dtype), weight.format)


def _part(source: Tensor | Quantized, part: Slice) -> Tensor | Quantized:
    if isinstance(source, Tensor):
        tensors = [source.narrow(part.dim, start, length) for start, length in part.ranges]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, part.dim)
    if part.dim == 0:
        return join([source.rows(slice(start, start + length)) for start, length in part.ranges], 0)
    return join([source.columns(start, length) for start, length in part.ranges], 1)


def _rows(weight: Any, start: int, length: int) -> Any:
    """Return rows [start, start + length) of a weight. The rows may begin and end anywhere."""
    end = start + length
    is_aligned = start % _ALIGNED == 0 and (end % _ALIGNED == 0 or end == weight.shape[0])
    is_matrix = len(weight.shape) == 2 and not isinstance(weight, Stack)
    return weight.narrow(0, start, length) if is_aligned or not is_matrix else _Rows(weight, start, length)


class _Rows:
    """Rows of a matrix that begin or end where `Weight.narrow` cannot cut. The rows are written element by element."""

    def __init__(self, weight: Any, start: int, length: int) -> None:
        self._weight, self._start = weight, start
        self.shape, self.dtype = torch.Size((length, *weight.shape[1:])), weight.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def copy_(self, source: Tensor | _Rows) -> None:
        source = source.to_dense() if isinstance(source, _Rows) else source
        self.put_(torch.arange(self.shape.numel()), source.flatten().to(self.dtype))

    def put_(self, index: Tensor, source: Tensor) -> None:
        self._weight.put_(index + self._start * self.shape[1], source)

    def to_dense(self) -> Tensor:
        return self._weight.to_dense().narrow(0, self._start, self.shape[0])


class Shards:
    """A `Weight` that consists of the shards of all ranks. The weight has the shape of the checkpoint's tensor."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.shape, self.dtype = shards[0].shape, shards[0].dtype

    @property
    def format(self) -> Format | None:
        """See `Shard.format`."""
        return self.shards[0].format

    @property
    def layout(self) -> StackLayout:
        """See `Shard.layout`."""
        return self.shards[0].layout

    @property
    def own_shape(self) -> tuple[int, ...]:
        """See `Shard.own_shape`."""
        return self.shards[0].own_shape

    @property
    def experts(self) -> range:
        """The experts that the shards of a `Stack` hold."""
        return range(self.shape[0])

    @property
    def nbytes(self) -> int:
        """The memory size of all shards in bytes."""
        return sum(shard.nbytes for shard in self.shards)

    def copy_(self, source: Tensor | Quantized | Shards) -> None:
        """Store a whole tensor, or copy other shards of the same parts. Raise ValueError if the source has another
        shape.
        """
        if isinstance(source, Shards):
            sources: Sequence[Any] = source.shards
        else:
            sources = [_prepared(source, self)] * len(self.shards)
        for shard, own in zip(self.shards, sources, strict=True):
            shard.copy_(own)

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrite the elements at these flat indices (int64) of the whole tensor."""
        for shard in self.shards:
            shard.put_(index, source)

    def narrow(self, dim: int, start: int, length: int) -> Shards:
        """Return rows [start, start + length), as shards that share the memory of these shards. `dim` is 0."""
        return Shards([shard.narrow(dim, start, length) for shard in self.shards])

    def part(self, expert: int, start: int, length: int) -> Shards:
        """See `Shard.part`."""
        return Shards([shard.part(expert, start, length) for shard in self.shards])

    def to_dense(self) -> Tensor:
        """Return the whole tensor."""
        found: Tensor | None = None
        for shard in self.shards:
            if not shard.slice.length:
                continue
            own = shard.to_dense()
            found = own.new_empty(self.shape) if found is None else found
            before = 0
            for start, length in shard.slice.ranges:
                found.narrow(shard.slice.dim, start, length).copy_(own.narrow(shard.slice.dim, before, length))
                before += length
        assert found is not None, "the ranges of the shards cover the tensor"
        return found
