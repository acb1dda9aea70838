"""Matrices in the layout that the native products read, and what a call for a run of layers needs of their weights.

A panel holds 16 rows. For each step along the columns it has the values of its 16 rows side by side: one float32, or
two bfloat16 of neighbouring columns. Rows are filled up with zeros to whole panels, columns of bfloat16 to a multiple
of 32. The same layout serves every instruction set. `copy_` packs into a weight's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..contract import DenseLayer, Qkv, Weight
from .library import load_library

PANEL_ROWS = 16
COLUMN_MULTIPLE = {torch.float32: 1, torch.bfloat16: 32}
_PAIR = {torch.float32: 1, torch.bfloat16: 2}


class PackedWeight:
    """A matrix [rows, columns] of float32 or bfloat16. `data`: its panels, [padded rows, padded columns] in size."""

    def __init__(self, rows: int, columns: int, data: Tensor) -> None:
        self.shape, self.dtype, self.data = torch.Size((rows, columns)), data.dtype, data

    @classmethod
    def new(cls, rows: int, columns: int, empty: Callable[..., Tensor]) -> PackedWeight:
        """One that is uninitialized until something is copied into it, in memory from `empty(*shape)`."""
        multiple = COLUMN_MULTIPLE[empty(0).dtype]
        return cls(rows, columns, empty(_whole_panels(rows), -(-columns // multiple) * multiple))

    @property
    def pointer(self) -> int:
        """Its address."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The memory it takes, padding included."""
        return self.data.nbytes

    def copy_(self, source: Tensor | PackedWeight) -> None:
        """Stores a weight, or packs a tensor on any device and of any dtype. Raise ValueError for another shape."""
        if source.shape != self.shape:
            raise ValueError(f"weight: expected shape {list(self.shape)}, found {list(source.shape)}")
        if isinstance(source, PackedWeight):
            self.data.copy_(source.data)
            return
        rows = source.to("cpu", self.dtype).contiguous()
        load_library().pack(*self._arguments(rows.data_ptr(), self.pointer))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Overwrites the elements at flat indices (int64) into [rows, columns]. Raise IndexError if one is outside."""
        rows, columns = self.shape
        pair, row = _PAIR[self.dtype], torch.arange(rows)
        # Where a row begins, and how far from there a column is: a step holds `pair` columns of each row of a panel.
        starts = row // PANEL_ROWS * (PANEL_ROWS * self.data.shape[1]) + row % PANEL_ROWS * pair
        column = torch.arange(columns)
        distances = column // pair * (PANEL_ROWS * pair) + column % pair
        row = index // columns
        self.data.put_(starts[row] + distances[index.sub(row, alpha=columns)], source)

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Rows [start, start + length), sharing memory. Raise ValueError unless they are whole panels or the last."""
        end = start + length
        if dim != 0 or start % PANEL_ROWS or not (end % PANEL_ROWS == 0 or end == self.shape[0]):
            raise ValueError(f"weight: expected rows in multiples of {PANEL_ROWS}, found [{start}, {end}) of dim {dim}")
        if not 0 <= start <= end <= self.shape[0]:
            raise ValueError(f"weight: expected rows within [0, {self.shape[0]}), found [{start}, {end})")
        return PackedWeight(length, self.shape[1], self.data.narrow(0, start, _whole_panels(length)))

    def to_dense(self) -> Tensor:
        """A plain tensor [rows, columns] with the same values."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        load_library().unpack(*self._arguments(self.pointer, rows.data_ptr()))
        return rows

    def _arguments(self, source: int, destination: int) -> tuple[int, ...]:
        return (self.dtype == torch.bfloat16, source, destination, *self.shape)


class PackedLayers(tuple[DenseLayer, ...]):
    """Dense layers, with where their tensors lie: each one's storage, of which all may share one, and its place there.

    No address is kept, for a storage's memory may go away and come back elsewhere. Raise ValueError for a tensor whose
    values do not lie side by side.
    """

    def __init__(self, layers: Sequence[DenseLayer]) -> None:
        places = [_place(tensor) for layer in layers for tensor in _layer_tensors(layer)]
        numbers: dict[torch.UntypedStorage | None, int] = {None: 0}
        owners = torch.tensor([numbers.setdefault(storage, len(numbers)) for storage, _ in places])
        self._offsets = torch.tensor([offset for _, offset in places])
        self._storages = [(storage, (owners == i).long()) for storage, i in numbers.items() if storage is not None]

    def addresses(self) -> Tensor:
        """What native/api.cpp reads as an array of `LayerPointers`, int64. It holds for one call."""
        addresses = self._offsets
        for storage, lie_there in self._storages:
            addresses = torch.add(addresses, lie_there, alpha=storage.data_ptr())
        return addresses


def qkv_tensors(norm: Tensor, weights: Qkv) -> tuple[Tensor | None, ...]:
    """What `QkvPointers` in native/api.cpp points to, in its order."""
    matrices = _panels(weights.q), _panels(weights.k), _panels(weights.v)
    return norm, *matrices, *(weights.biases or (None,) * 3), *(weights.head_norms or (None,) * 2)


def _layer_tensors(layer: DenseLayer) -> tuple[Tensor | None, ...]:
    """What `LayerPointers` points to, in its order."""
    mlp = layer.post_norm, _panels(layer.gate), _panels(layer.up), _panels(layer.down)
    return *qkv_tensors(layer.input_norm, layer.qkv), _panels(layer.o), *mlp


def _panels(weight: Weight) -> Tensor:
    return cast(PackedWeight, weight).data


def _place(tensor: Tensor | None) -> tuple[torch.UntypedStorage | None, int]:
    """A tensor's storage, and how many bytes of it lie before the tensor."""
    if tensor is None:
        return None, 0
    if not tensor.is_contiguous():
        found = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"layers: expected values that lie side by side, found {found}; take the contiguous tensor")
    return tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize


def _whole_panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS
