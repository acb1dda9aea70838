"""Bounds on the error of a result against float64, derived from the number of roundings in the result.

Each addition to a float32 sum of products has a rounding error proportional to the sum so far. With terms of random
sign, the sum is a random walk. The final distance from zero is about d, the root of the sum of the terms' squares. The
average distance over the steps is (2 / 3) * sqrt(2 / pi) * d. The distance hardly ever exceeds 4 times this average, in
any order of the terms. The average error of a rounding is half of its largest error. All roundings may go in one
direction, for example if bits are truncated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest relative error of rounding to a dtype.
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = EPSILON[torch.float32]
# The maximum number of float32 roundings that one product adds to a sum. Rounding to nearest takes one rounding per
# product. A tensor core adds several products at a time and truncates bits. The coarsest core in use (sm_80) truncates
# 8 products and the previous sum at 2**-24 of the largest of them. Truncating these 9 terms takes 9 roundings. The
# result is truncated at 2**-23, which takes two more roundings. Hopper (sm_90) has 17 / 2 + 2 roundings for 16
# products.
ROUNDINGS_OF_A_PRODUCT = (9 + 2) / 8
MEAN_OF_A_WALK, MOST_OF_A_WALK = 2 / 3 * math.sqrt(2 / math.pi), 4.0


def check(found: Tensor, expected: Tensor, roundings: int, terms: float, magnitude: Tensor) -> None:
    """Check against a bound of `roundings` to the dtype, and one float32 rounding for each of `terms` summed terms.

    `magnitude`: the size of the terms.
    """
    small = torch.finfo(found.dtype).tiny
    bound = EPSILON[found.dtype] * roundings * 1.01 * expected.abs() + terms * FLOAT32 * magnitude + small
    error = (found.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max():.3g}"


def check_mean(found: Tensor, expected: Tensor, roundings: Tensor) -> None:
    """Check that the mean error is at most the average error of `roundings` float32 roundings of 1."""
    error, limit = (found.double() - expected).abs().mean(), FLOAT32 * roundings.mean()
    assert error <= limit, f"a mean error of {error:.3g}, {error / limit:.3g} times what is allowed"


def check_products(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Check float32 products of x [M, K] with weight [N, K], both of random sign, summed in float32."""
    exact, squares = x.double() @ weight.double().T, x.double().square() @ weight.double().square().T
    terms = x.shape[1] * ROUNDINGS_OF_A_PRODUCT
    check(found, exact, 0, terms * MOST_OF_A_WALK, squares.sqrt())
    check_mean(found, exact, terms * MEAN_OF_A_WALK / 2 * squares.sqrt())
