"""A bit-exact model of NVIDIA's tensor cores: float32 sums of products of bfloat16 or float16.

NVIDIA does not document this arithmetic. Two groups independently measured the arithmetic and agree on it: MMA-Sim (Xie
et al., arXiv:2511.10909), and Khattak and Mikaitis (arXiv:2512.07004).

A number is a significand times a power of two. The significand of a normal number is in [1, 2). A subnormal number has
the least exponent of its dtype, and zero has no exponent. A product's significand is the product of the two
significands, so it is below 4. A product's exponent is the sum of the two exponents. One addition has `terms` products
and the sum so far. Each of these terms is truncated toward zero, `fraction_bits` after the binary point of the term
with the highest exponent. The truncated terms are added exactly, and the sum is truncated toward zero to float32. A sum
of 2**128 or more is infinite.

The two groups differ on sums in which no term reaches 2**-126. The model does not promise the result of such a sum, the
bits of NaN, or the sign of a zero within a chain. No product of `kernels/triton` depends on these bits. In the model,
zeros are positive.

The model computes in float64, in which every step is exact, on the device of the inputs.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class TensorCore(NamedTuple):
    """`terms`: number of products in one addition. `fraction_bits`: number of fraction bits that are kept of the
    largest term.
    """

    terms: int
    fraction_bits: int


# Tensor cores by major version of the compute capability.
TENSOR_CORES = {8: TensorCore(8, 24), 9: TensorCore(16, 25), 10: TensorCore(16, 25)}
# Candidate cores to explain a difference. With the candidates, one run shows which arithmetic a GPU has.
CANDIDATES = tuple(TensorCore(*each) for each in product((4, 8, 16, 32), range(21, 28)))
_LEAST = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}
_HIGHEST = 127
_NONE = -1000  # the exponent of zero, which stays below every exponent even after an addition


def multiply_add(core: TensorCore, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total [...] plus the products of a and b [..., K], of one 16-bit dtype, in ascending order: float32."""
    wide = [(x.double(), _exponents(x)) for x in (a, b)]
    for start in range(0, a.shape[-1], core.terms):
        columns = slice(start, start + core.terms)
        (a_part, a_exponents), (b_part, b_exponents) = ((x[..., columns], e[..., columns]) for x, e in wide)
        total = _add(core, total, a_part * b_part, a_exponents + b_exponents)
    return total


def _add(core: TensorCore, total: Tensor, products: Tensor, exponents: Tensor) -> Tensor:
    """Add once: total [...] plus products [..., terms], in float64, with these exponents."""
    highest = torch.maximum(exponents.amax(-1), _exponents(total)).clamp(min=2 * _LEAST[torch.bfloat16])
    scale = _power_of_two(core.fraction_bits - highest)
    units = (total.double() * scale).trunc() + (products * scale[..., None]).trunc().sum(-1)
    return _cut_to_float32(units * _power_of_two(highest - core.fraction_bits))


def _cut_to_float32(x: Tensor) -> Tensor:
    """Cut float64 with significands of at most 53 bits toward zero to float32; zeros become positive."""
    unit = _power_of_two(_field(x).clamp(_LEAST[torch.float32], _HIGHEST) - 23)
    return ((x / unit).trunc() * unit + 0.0).float()


def _exponents(x: Tensor) -> Tensor:
    """Return the exponents that an adder uses. Subnormal numbers are not normalized. Infinity and NaN have the highest
    exponent.
    """
    wide = x.double()
    return torch.where(wide == 0, _NONE, _field(wide).clamp(_LEAST[x.dtype], _HIGHEST))


def _field(x: Tensor) -> Tensor:
    """Return the exponents of float64 as int64."""
    return (x.view(torch.int64) >> 52 & 0x7FF) - 1023


def _power_of_two(exponents: Tensor) -> Tensor:
    return (exponents + 1023 << 52).view(torch.float64)


def multiply(core: TensorCore, x: Tensor, weight: Tensor, piece: int) -> Tensor:
    """Multiply x [M, K] by weight [N, K] transposed, summed as in `kernels/triton/products.py`: float32 [M, N].

    Pieces of `piece` columns are each summed from zero and added to +0.0 in ascending order, rounding to nearest.
    """
    zeros = torch.zeros(len(x), len(weight), device=x.device)
    total = zeros
    for a, b in zip(x.split(piece, 1), weight.split(piece, 1), strict=True):
        total = total + multiply_add(core, zeros, a[:, None], b[None])
    return total


def check_product(core: TensorCore, found: Tensor, x: Tensor, weight: Tensor, piece: int) -> None:
    """Check that `found` [M, N] has the bits of `multiply`. The AssertionError says where the bits differ, and which
    core would explain the difference.
    """
    expected = multiply(core, x, weight, piece)
    different = (_bits(found) != _bits(expected)).nonzero()
    if not len(different):
        return
    row, feature = different[0].tolist()
    rows = different[:, 0].unique()[:4]
    fitting = [c for c in CANDIDATES if torch.equal(_bits(multiply(c, x[rows], weight, piece)), _bits(found[rows]))]
    raise AssertionError(
        f"{len(different)} of {found.numel()} elements differ from {core} with pieces of {piece} columns, the first at "
        f"row {row}, feature {feature}: expected {_show(expected[row, feature])}, found {_show(found[row, feature])}; "
        + (f"{' and '.join(map(str, fitting))} would give the found bits" if fitting else _NO_CANDIDATE)
    )


_NO_CANDIDATE = (
    f"none of {CANDIDATES[0]} to {CANDIDATES[-1]} would give the found bits: compare the order of K, and the pieces"
)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of float32. All NaN have the same bits."""
    assert x.dtype == torch.float32
    return x.contiguous().view(torch.int32).masked_fill(x.isnan(), 0x7FFFFFFF)


def _show(x: Tensor) -> str:
    return f"{int(_bits(x)) & 0xFFFFFFFF:#010x} ({float(x):.9g})"
