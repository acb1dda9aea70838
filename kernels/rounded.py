"""Quantized weights in the memory layout of plain weights, where a backend does not store the codes of a format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import Weight
from .quantization import Format, Quantized, quantize, refuse_elements


class RoundedWeight:
    """A `Weight` that holds the values of a quantized matrix, rounded to the dtype, in the plain weight `plain`. A
    `RoundedWeight` takes as much memory as the plain weight.

    `plain`: a weight that is not quantized. `unit`: as for `quantize`.
    """

    def __init__(self, plain: Any, format: Format, unit: int | None = None) -> None:
        self.plain, self.format, self._unit = plain, format, unit

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.plain.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.plain.dtype

    @property
    def nbytes(self) -> int:
        """The memory size of the weight in bytes."""
        return self.plain.nbytes

    def copy_(self, source: Tensor | Quantized | RoundedWeight) -> None:
        """Store the values of a quantized matrix, or quantize a tensor. Raise ValueError for a tensor that the format
        cannot store.
        """
        if isinstance(source, RoundedWeight):
            self.plain.copy_(source.plain)
            return
        if isinstance(source, Tensor):
            source = quantize(source.to(self.dtype), self.format, self._unit)
        self.plain.copy_(source.values().to(self.dtype))

    def put_(self, index: Tensor, source: Tensor) -> None:
        """Raise ValueError if there are elements to write, because a quantized matrix takes only whole rows."""
        refuse_elements(self.format, index)

    def narrow(self, dim: int, start: int, length: int) -> RoundedWeight:
        """Return rows [start, start + length) as a weight that shares this weight's memory. `dim` is 0."""
        return RoundedWeight(self.plain.narrow(dim, start, length), self.format, self._unit)

    def copied(self, device: torch.device) -> RoundedWeight:
        """Return a `RoundedWeight` with a copy of the values. The copy is a plain tensor on `device`."""
        return RoundedWeight(self.plain.to_dense().to(device, copy=True), self.format, self._unit)

    def to_dense(self) -> Tensor:
        """Return the values as a tensor."""
        return self.plain.to_dense()


def plain_of(weight: Weight | Any) -> Any:
    """Return the weight that ops read: the plain weight of a `RoundedWeight`, or the weight itself."""
    return weight.plain if isinstance(weight, RoundedWeight) else weight
