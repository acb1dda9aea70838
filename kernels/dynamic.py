"""Products with quantized activations: formats with `Format.activations`, such as `int8_dynamic` and `fp8_dynamic`.

A product of x [M, K] with a quantized matrix first quantizes each row of x separately. A row is a token. L is the
largest number of the kind `Format.activations` (`LARGEST`: 127 for `int8`, 448 for `e4m3`):

- The peak of a row is its largest magnitude. The row's scale is peak / L, rounded to float32, and bounded to
  [`LEAST_SCALE`, `MOST` / L] (`kernels.quantization`). The quotients of the elements and the scale are rounded to
  float32, and then to the nearest number of the kind. Ties go to the number with an even code. The numbers are
  therefore from -L to L, and a row of zeros is quantized to zeros.
- If an element is NaN or infinite, the scale is NaN, and all results of the row are NaN. Rows without NaN and infinite
  elements are not affected.

The products of the row's numbers and the matrix's numbers are summed over K, to a float32 number:

- `int8`: the exact sum of integers, rounded once. The order in which the integers are added does not matter.
- `e4m3`: the `back_sums` that the same backend computes for plain matrices of these numbers. The dtype of x represents
  each of these numbers exactly.

The float32 result is

    (the sum) * (the scale of the matrix's row) * (the row's scale)

from left to right, and rounded to float32 after each step. The float32 result replaces the float32 sum of a plain
product. `back_sums` uses the float32 result as the whole sum, or as the sum of one piece. Other ops add the bias to the
float32 result, and round the total to the dtype of x.

A product with only some columns of x uses the scales of the whole rows, so all parts of a row have the same scale.

The values of the matrix are the same as in the same format without quantized activations. `Weight.to_dense` and the
backward pass of a trainer therefore use a plain matrix of these values.

Owns no memory. Source: LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339) for one scale per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .quantization import LARGEST, LEAST_SCALE, MOST, Format, Quantized, divided, nearest

MOST_COLUMNS = (2**31 - 1) // (127 * 128)  # published codes of weights may be -128
"""A matrix with activations of the kind `int8` has at most this number of columns, so that sums have 32 bits."""

Sums: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Returns the plain float32 sums [M, N] of rows [M, K] and a matrix [N, K], both float32."""

_SLICE = 2**22  # elements of a matrix that are converted to numbers at a time
_ROWS = 512  # the rows of a tile into which `reference` cuts a plain matrix; a slice consists of whole tiles


class CodedRows(NamedTuple):
    """Quantized rows of activations. `numbers`: float32 [M, K]; 0 in rows with NaN. `scales`: float32 [M]."""

    numbers: Tensor
    scales: Tensor

    def columns(self, start: int, end: int) -> CodedRows:
        """Return the columns [start, end) of the rows, with the scales of the whole rows."""
        return CodedRows(self.numbers[:, start:end], self.scales)


def row_peaks(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of x [M, K], as float32 [M]. The peak of a row with NaN or an infinite
    element is NaN.
    """
    wide = x.float()
    peaks = wide.abs().amax(1) if x.shape[1] else wide.new_zeros(len(x))
    return peaks.where(peaks.isfinite(), torch.nan)


def quantize_rows(x: Tensor, format: Format, peaks: Tensor | None = None) -> CodedRows:
    """Quantize each row of x [M, K] as a format with quantized activations requires. `peaks`: the peaks of the whole
    rows, if x has only some columns of each row; None if x has whole rows.
    """
    assert format.activations is not None, f"a format with plain activations (got {format})"
    peaks, largest = row_peaks(x) if peaks is None else peaks, LARGEST[format.activations]
    scales = divided(peaks, largest).clamp_(LEAST_SCALE, MOST / largest)
    quotients = (x.float() / scales[:, None]).where(scales.isfinite()[:, None], 0.0)
    return CodedRows(nearest(quotients, format.activations), scales)


def coded_product(rows: CodedRows, weight: Quantized, plain_sums: Sums) -> Tensor:
    """Return the float32 product [M, N] of quantized rows and a quantized matrix [N, K]. `plain_sums`: the backend's
    function of the type `Sums`.
    """
    sums = _exact_sums if weight.format.activations == "int8" else plain_sums
    out = rows.numbers.new_empty(len(rows.numbers), weight.shape[0])
    step = max(_SLICE // max(weight.shape[1], 1) // _ROWS, 1) * _ROWS
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        out[:, part] = sums(rows.numbers, weight.rows(part).numbers())
    return out.mul_(weight.scales[:, 0]).mul_(rows.scales[:, None])


def _exact_sums(rows: Tensor, matrix: Tensor) -> Tensor:
    # Each sum is an integer below 2**31, so every order of additions in float64 is exact.
    return (rows.double() @ matrix.double().T).float()


class DynamicValues(NamedTuple):
    """The values of a quantized matrix [R, C], or of matrices [E, R, C], in a trainer. Products quantize their
    activations as `format` requires, and quantize the values again, which gives the same codes and scales. The backward
    pass computes the gradients of a product of the unquantized activations and the values.
    """

    values: Tensor
    format: Format

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.values.shape

    def narrow(self, dim: int, start: int, length: int) -> DynamicValues:
        """Return rows [start, start + length). `dim` is 0."""
        return DynamicValues(self.values.narrow(dim, start, length), self.format)


def apart(weight: Any) -> tuple[Any, Format | None]:
    """Return the tensor of a trainer's weight, and the format in which a product quantizes the tensor; None for plain
    products.
    """
    return (weight.values, weight.format) if isinstance(weight, DynamicValues) else (weight, None)
