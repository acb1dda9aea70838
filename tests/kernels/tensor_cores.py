"""What the tensor cores of NVIDIA GPUs compute, bit for bit: sums in float32 of products of bfloat16 or float16.

NVIDIA does not document it. This is the arithmetic that two groups found by experiments, apart from each other, and on
which they agree: MMA-Sim (Xie et al., arXiv:2511.10909), and Khattak and Mikaitis (arXiv:2512.07004).

A number is a significand times a power of two. A normal number's significand is in [1, 2), a subnormal number has the
least exponent of its dtype, and zero has none. Two numbers are multiplied by multiplying their significands and adding
their exponents, so that a product's significand may reach 4. The sum so far and `terms` products are added at a time:
each is cut, toward zero, `fraction_bits` behind the binary point of the one with the highest exponent, they are added
exactly, and the sum is cut, toward zero, to a float32. From 2**128 on it is infinite.

The two groups differ on sums none of whose terms reaches 2**-126: what they come to is not promised. Nor are the bits
of NaN, nor the sign of zero within a chain, on which no product of `kernels/triton` depends; here it is positive.

It is computed in float64, where each step is exact, and on the device of its inputs.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class TensorCore(NamedTuple):
    """`terms`: products that are added at a time. `fraction_bits`: those that are kept of the largest of them."""

    terms: int
    fraction_bits: int


# By the major number of the compute capability.
TENSOR_CORES = {8: TensorCore(8, 24), 9: TensorCore(16, 25), 10: TensorCore(16, 25)}
# What a difference is compared with, so that one run tells which arithmetic a GPU has.
CANDIDATES = tuple(TensorCore(*each) for each in product((4, 8, 16, 32), range(21, 28)))
_LEAST = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}
_HIGHEST = 127
_NONE = -1000  # of zero: below every exponent, also when another is added


def multiply_add(core: TensorCore, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total [...] plus the products of a [..., K] and b [..., K], of one 16-bit dtype, in ascending order: float32."""
    wide = [(x.double(), _exponents(x)) for x in (a, b)]
    for start in range(0, a.shape[-1], core.terms):
        columns = slice(start, start + core.terms)
        (a_part, a_exponents), (b_part, b_exponents) = ((x[..., columns], e[..., columns]) for x, e in wide)
        total = _add(core, total, a_part * b_part, a_exponents + b_exponents)
    return total


def _add(core: TensorCore, total: Tensor, products: Tensor, exponents: Tensor) -> Tensor:
    """One sum: total [...] plus products [..., terms], in float64, with these exponents."""
    highest = torch.maximum(exponents.amax(-1), _exponents(total)).clamp(min=2 * _LEAST[torch.bfloat16])
    scale = _power_of_two(core.fraction_bits - highest)
    units = (total.double() * scale).trunc() + (products * scale[..., None]).trunc().sum(-1)
    return _cut_to_float32(units * _power_of_two(highest - core.fraction_bits))


def _cut_to_float32(x: Tensor) -> Tensor:
    """Of float64 whose significand has at most 53 bits, toward zero; zeros become positive."""
    unit = _power_of_two(_field(x).clamp(_LEAST[torch.float32], _HIGHEST) - 23)
    return ((x / unit).trunc() * unit + 0.0).float()


def _exponents(x: Tensor) -> Tensor:
    """As an adder sees them, where subnormal numbers are not normalised; of infinity and NaN the highest."""
    wide = x.double()
    return torch.where(wide == 0, _NONE, _field(wide).clamp(_LEAST[x.dtype], _HIGHEST))


def _field(x: Tensor) -> Tensor:
    """The exponents of float64, as int64."""
    return (x.view(torch.int64) >> 52 & 0x7FF) - 1023


def _power_of_two(exponents: Tensor) -> Tensor:
    return (exponents + 1023 << 52).view(torch.float64)


def multiply(core: TensorCore, x: Tensor, weight: Tensor, piece: int) -> Tensor:
    """x [M, K] times weight [N, K] transposed, as `kernels/triton/products.py` sums it up: float32 [M, N].

    Pieces of `piece` columns, each from zero, are added to +0.0 in ascending order, rounding to nearest.
    """
    zeros = torch.zeros(len(x), len(weight), device=x.device)
    total = zeros
    for a, b in zip(x.split(piece, 1), weight.split(piece, 1), strict=True):
        total = total + multiply_add(core, zeros, a[:, None], b[None])
    return total


def check_product(core: TensorCore, found: Tensor, x: Tensor, weight: Tensor, piece: int) -> None:
    """`found` [M, N] has the bits of `multiply`. If not, says where, and which other tensor core would have them."""
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
        + (f"{' and '.join(map(str, fitting))} would give what was found" if fitting else _NO_CANDIDATE)
    )


_NO_CANDIDATE = (
    f"none of {CANDIDATES[0]} to {CANDIDATES[-1]} would give what was found: compare the order of K, and the pieces"
)


def _bits(x: Tensor) -> Tensor:
    """Of float32; those of all NaN are alike."""
    assert x.dtype == torch.float32
    return x.contiguous().view(torch.int32).masked_fill(x.isnan(), 0x7FFFFFFF)


def _show(x: Tensor) -> str:
    return f"{int(_bits(x)) & 0xFFFFFFFF:#010x} ({float(x):.9g})"
