"""KV caches of 8 bits: the formats, and the values that they store, bit by bit.

A vector is the key or the value of one token and one key-value head, and has D numbers. A cache stores a vector as D
codes of 8 bits, and a few numbers in float16 that the whole vector shares. Keys are stored after the rotation. A vector
is quantized once, when it is written, and independently of all other vectors. Attention over a quantized cache has the
same bits as attention over a plain cache that holds the values of the codes. Worker and trainer therefore agree if both
round keys and values in the same way (`round_trip`): the worker stores codes, and the trainer computes with values.

====================  ==============================================  ==============================================
                      `int8`                                          `fp8`
====================  ==============================================  ==============================================
codes                 unsigned integers, 0 to 255                     float8_e4m3fn
shared numbers        scale and zero point                            scale
scale                 (most - least) / 255                            largest magnitude / 448
zero point            least                                           none
code                  nearest integer to (x - zero) / scale           nearest number to x / scale
value                 code * scale + zero                             number * scale
bytes of D elements   D + 4                                           D + 2
====================  ==============================================  ==============================================

Both formats follow these rules:

- All steps are computed in float32. Each step rounds to the nearest number; ties go to even. `least` and `most` are the
  least and the largest element of the vector.
- A scale is bounded to 2**-24 ... 65504, the positive range of float16, and then rounded to float16. A zero point is
  bounded to the range of float16 and rounded to float16; then -0.0 becomes 0.0. The codes are computed with the rounded
  scale and zero point.
- A quotient outside the range of the codes gets the nearest code (saturation).
- Products of a code's number and a scale are exact in float32. If the format has zero points, the addition of the zero
  point rounds a value once. The conversion to the dtype of the model rounds the value once more. Values can
  exceed the range of the dtype only if the dtype is float16. Such values become the largest number of the dtype.
- If any element of a vector is NaN or infinite, all of its values are NaN: the scale and the zero point are NaN, and
  all codes are 0. Tokens that attend to a vector of NaN values get NaN; no other token is affected.
- In latent attention, the latent row and the rotated key are two vectors. Attention uses the latent row as the value
  vector.

Recurrent states are not quantized. The cache of the module for multi-token prediction, which affects no bit of a
sample, is not quantized either.

Owns no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .quantization import divided

AUTO = "auto"
"""The setting for a cache in the dtype of the model."""
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
_LARGEST_CODE, _LARGEST_E4M3 = 255.0, 448.0


@dataclass(frozen=True)
class CacheFormat:
    """A format of keys and values.

    `dtype`: the dtype of the tensor that holds codes and shared numbers. `shared_bytes`: the size of the numbers that a
    vector shares. `has_zeros`: whether vectors have zero points.
    """

    name: str
    dtype: torch.dtype
    shared_bytes: int
    has_zeros: bool

    def row_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of a row that consists of vectors of the given sizes."""
        return sum(size + self.shared_bytes for size in sizes)


CACHE_FORMATS = {
    each.name: each
    for each in (CacheFormat("int8", torch.uint8, 4, True), CacheFormat("fp8", torch.float8_e4m3fn, 2, False))
}
"""The formats, by the names that settings use."""


class Coded(NamedTuple):
    """Quantized vectors [..., D].

    `codes`: uint8 [..., D]. `scales`: float16 [..., 1]. `zeros`: float16 [..., 1], or None for a format without zero
    points.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values that the codes stand for, [..., D]."""
        if self.zeros is None:
            values = self.codes.view(torch.float8_e4m3fn).float() * self.scales.float()
        else:
            values = self.codes.float() * self.scales.float() + self.zeros.float()
        largest = torch.finfo(dtype).max
        return values.clamp(-largest, largest).to(dtype)


def encode(x: Tensor, format: CacheFormat) -> Coded:
    """Quantize vectors x [..., D]."""
    wide = x.detach().float()
    is_finite = wide.isfinite().all(-1, keepdim=True)
    if not format.has_zeros:
        scales = _scales(divided(wide.abs().amax(-1, keepdim=True), _LARGEST_E4M3), is_finite)
        quotients = (wide / scales.float()).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
        numbers = torch.where(is_finite, quotients, 0.0)
        return Coded(numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales, None)
    least, most = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scales = _scales(divided(most - least, _LARGEST_CODE), is_finite)
    zeros = (least.clamp(-LARGEST_SCALE, LARGEST_SCALE).half() + 0.0).masked_fill(~is_finite, torch.nan)
    quotients = ((wide - zeros.float()) / scales.float()).round().clamp(0.0, _LARGEST_CODE)
    return Coded(torch.where(is_finite, quotients, 0.0).to(torch.uint8), scales, zeros)


def _scales(wanted: Tensor, is_finite: Tensor) -> Tensor:
    return wanted.clamp(LEAST_SCALE, LARGEST_SCALE).half().masked_fill(~is_finite, torch.nan)


class _Rounded(Function):
    """The gradient passes through the rounding unchanged (the straight-through estimator, Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: CacheFormat, sizes: Sequence[int]) -> Tensor:
        parts = [encode(part, format).values(x.dtype) for part in x.split(list(sizes), -1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def round_trip(x: Tensor, format: CacheFormat | None, sizes: Sequence[int]) -> Tensor:
    """Quantize rows x [..., sum of sizes], and return the values of the codes, in the dtype of x. A row consists of
    vectors of the given sizes. Without a format, return x itself. Gradients pass through the rounding unchanged.
    """
    return x if format is None else _Rounded.apply(x, format, sizes)  # type: ignore[return-value]
