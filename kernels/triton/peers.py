"""A kernel that adds the sums of several ranks. Each sum is in the memory of its rank's GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from .launch import exact_jit, launch

_TILE, _MOST_RANKS = 1024, 8


def fold_peers(sums: Sequence[Tensor]) -> Tensor:
    """Add float32 tensors of the same shape as a balanced binary tree. Each tensor is contiguous, and may be in the
    memory of another GPU that this GPU can read. The number of tensors is a power of two, at most 8.
    """
    out = torch.empty_like(sums[0])
    places = [*sums, *[sums[0]] * (_MOST_RANKS - len(sums))]  # a pointer must be valid even if it is not read
    grid = (-(-out.numel() // _TILE),)
    launch(_fold_kernel, grid, *places, out, out.numel(), warps=4, RANKS=len(sums), TILE=_TILE)
    return out


@exact_jit
def _fold_kernel(
    p0_ptr,
    p1_ptr,
    p2_ptr,
    p3_ptr,
    p4_ptr,
    p5_ptr,
    p6_ptr,
    p7_ptr,
    out_ptr,
    count,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < count
    total = tl.load(p0_ptr + at, mask=mask)
    if RANKS >= 2:
        total = total + tl.load(p1_ptr + at, mask=mask)
    if RANKS >= 4:
        total = total + (tl.load(p2_ptr + at, mask=mask) + tl.load(p3_ptr + at, mask=mask))
    if RANKS == 8:
        left = tl.load(p4_ptr + at, mask=mask) + tl.load(p5_ptr + at, mask=mask)
        right = tl.load(p6_ptr + at, mask=mask) + tl.load(p7_ptr + at, mask=mask)
        total = total + (left + right)
    tl.store(out_ptr + at, total, mask=mask)
