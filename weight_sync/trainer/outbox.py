"""Tensors in, buckets out: packs pieces into two slots, one of which is filled while the other is under way.

Owns which slot is free. Does not own the slots' memory, nor the transaction that announces the buckets. Copies each
tensor once, straight into its slot, converting dtype and device on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..payload.manifest import Bucket, Elements, Piece, Rows, Shape, checksum
from ..payload.packing import Cut, Packer, row_layout
from ..payload.tensors import INDEX_DTYPE, raw_bytes, word_sum
from ..transports.ends import Slots
from .transaction import Transaction


@dataclass
class _Filling:
    """The bucket that is being filled: its number, where its content ends, and its pieces."""

    index: int = 0
    end: int = 0
    pieces: list[Piece] = field(default_factory=list)


class Outbox:
    """Sends tensors through `slots`, each in the dtype that `dtype_of(name)` says, in buckets that `transaction`
    announces.
    """

    def __init__(
        self, slots: Slots, transaction: Transaction, dtype_of: Callable[[str], torch.dtype], bucket_bytes: int
    ) -> None:
        self.num_bytes = 0
        self._slots = slots
        self._transaction = transaction
        self._dtype_of = dtype_of
        self._packer = Packer(bucket_bytes)
        self._filling = _Filling()
        self._staged: list[Future[list[Any]] | None] = [None] * len(slots.slots)

    def put_rows(self, name: str, tensor: torch.Tensor) -> None:
        """Send a whole tensor."""
        shape, dtype = tuple(tensor.shape), self._dtype_of(name)
        rows, row_bytes, multiple = row_layout(shape, dtype.itemsize)
        for cut in self._packer.place(rows, row_bytes, multiple):
            place = self._place(cut, cut.length * row_bytes)
            _fill(place, tensor[cut.start : cut.start + cut.length], dtype)
            fields = self._fields(name, shape, cut, place)
            self._filling.pieces.append(Rows(start=cut.start, length=cut.length, **fields))

    def put_elements(self, name: str, shape: Shape, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Send the changed elements of a tensor, of which there may be none."""
        total, dtype = len(indices), self._dtype_of(name)
        for cut in self._packer.place(total, INDEX_DTYPE.itemsize + dtype.itemsize):
            chosen = slice(cut.start, cut.start + cut.length)
            split = cut.length * INDEX_DTYPE.itemsize
            place = self._place(cut, split + cut.length * dtype.itemsize)
            place[:split].view(INDEX_DTYPE).copy_(indices[chosen])
            place[split:].view(dtype).copy_(values[chosen])
            fields = self._fields(name, shape, cut, place)
            self._filling.pieces.append(Elements(count=cut.length, total=total, **fields))

    def finish(self) -> None:
        """Send the last bucket, and wait until all have arrived."""
        if self._filling.pieces:
            self._send()
        for later in range(1, len(self._staged) + 1):  # the oldest first, for it tells what went wrong first
            self._free((self._filling.index + later) % len(self._staged))

    def _place(self, cut: Cut, num_bytes: int) -> torch.Tensor:
        if cut.bucket != self._filling.index:
            self._send()
            self._filling = _Filling(cut.bucket)
            self._free(self._slot)
        self._filling.end = cut.offset + num_bytes
        return self._slots.slots[self._slot][cut.offset : self._filling.end]

    @property
    def _slot(self) -> int:
        return self._filling.index % len(self._slots.slots)

    def _fields(self, name: str, shape: Shape, cut: Cut, place: torch.Tensor) -> dict[str, Any]:
        found = None if self._slots.has_word_sums else checksum(raw_bytes(place))
        return dict(name=name, shape=shape, offset=cut.offset, num_bytes=len(place), checksum=found)

    def _send(self) -> None:
        slot, filling = self._slot, self._filling
        content = self._slots.slots[slot][: filling.end]
        total = word_sum(content) if self._slots.has_word_sums else None  # which waits until the slot is filled
        bucket = Bucket(index=filling.index, num_bytes=filling.end, pieces=tuple(filling.pieces), word_sum=total)
        self._staged[slot] = self._transaction.stage(bucket)
        if filling.end:
            self._slots.send(slot, filling.end)
        self.num_bytes += filling.end

    def _free(self, slot: int) -> None:
        staged, self._staged[slot] = self._staged[slot], None
        if staged is not None:
            staged.result()
            self._slots.wait(slot)


def _fill(place: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> None:
    if rows.dtype == dtype and rows.is_contiguous() and rows.device.type == place.device.type == "cpu":
        # A plain copy keeps off torch's threads, which would take the cores that the worker's side needs meanwhile.
        np.copyto(place.numpy(), raw_bytes(rows))
    else:
        place.view(dtype).view(rows.shape).copy_(rows)
