"""How far a result may be from float64, by the roundings that it takes.

A float32 sum of products is rounded each time that something is added to it, by a share of what it has come to by
then. Terms of either sign make that a random walk: it ends about the root of the sum of their squares away from zero,
on average over its steps (2 / 3) * sqrt(2 / pi) of that, and hardly ever 4 times as much, in whatever order they are
added. A rounding takes half of its most, on average; all may go in one direction, as they do where bits are cut off.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest error of rounding to a dtype, relative to the value.
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = EPSILON[torch.float32]
# The most roundings to float32 that a product costs a sum. To nearest, each costs one. A tensor core adds several at a
# time and cuts bits off; the coarsest in use (sm_80) cuts 8 products and the sum before at 2**-24 of the largest, one
# rounding each, and what they come to at 2**-23, two more. That of Hopper (sm_90) costs 17 / 2 + 2 for 16 products.
ROUNDINGS_OF_A_PRODUCT = (9 + 2) / 8
MEAN_OF_A_WALK, MOST_OF_A_WALK = 2 / 3 * math.sqrt(2 / math.pi), 4.0


def check(found: Tensor, expected: Tensor, roundings: int, terms: float, magnitude: Tensor) -> None:
    """A bound of `roundings` to the dtype, and float32 rounding for each of `terms` summed terms of this magnitude."""
    small = torch.finfo(found.dtype).tiny
    bound = EPSILON[found.dtype] * roundings * 1.01 * expected.abs() + terms * FLOAT32 * magnitude + small
    error = (found.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max():.3g}"


def check_mean(found: Tensor, expected: Tensor, roundings: Tensor) -> None:
    """The mean error is at most so many roundings to float32 of 1, on average."""
    error, limit = (found.double() - expected).abs().mean(), FLOAT32 * roundings.mean()
    assert error <= limit, f"a mean error of {error:.3g}, {error / limit:.3g} times what is allowed"


def check_products(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """float32 products of x [M, K] with weight [N, K], of numbers of either sign by chance, summed in float32."""
    exact, squares = x.double() @ weight.double().T, x.double().square() @ weight.double().square().T
    terms = x.shape[1] * ROUNDINGS_OF_A_PRODUCT
    check(found, exact, 0, terms * MOST_OF_A_WALK, squares.sqrt())
    check_mean(found, exact, terms * MEAN_OF_A_WALK / 2 * squares.sqrt())
