"""How far a result may be from float64, by the roundings that it takes."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest error of rounding to a dtype, relative to the value.
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = EPSILON[torch.float32]


def check(found: Tensor, expected: Tensor, roundings: int, terms: float, magnitude: Tensor) -> None:
    """A bound of `roundings` to the dtype, and float32 rounding for each of `terms` summed terms of this magnitude."""
    small = torch.finfo(found.dtype).tiny
    bound = EPSILON[found.dtype] * roundings * 1.01 * expected.abs() + terms * FLOAT32 * magnitude + small
    error = (found.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max():.3g}"
