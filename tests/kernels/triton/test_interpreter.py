"""The patched interpreter computes like a GPU: conversions are compared with torch, products with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..inputs import randn, same_bits


@triton.jit
def convert_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, rows, columns, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * columns + n[None, :])
    at = m[:, None] * columns + n[None, :]
    tl.store(c_ptr + at, tl.dot(a, b, tl.load(c_ptr + at)))


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty(len(x), dtype=dtype)
    convert_kernel[(len(x) // 1024,)](x, y, BLOCK=1024)  # type: ignore[arg-type]
    return y


def dot(a: Tensor, b: Tensor, c: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return c + a @ b, computed by a kernel with tiles of this shape."""
    (rows, k), columns, c = a.shape, b.shape[1], c.clone()
    sizes: dict[str, Any] = dict(M=tile[0], N=tile[1], K=k)
    dot_kernel[rows // tile[0], columns // tile[1]](a, b, c, rows, columns, **sizes)
    return c


def all_16_bits(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def float32_of_every_kind() -> Tensor:
    """Return random bits, and values that are equal to, next to, and halfway between values of a 16-bit dtype."""
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    near = [
        all_16_bits(dtype).float().view(torch.int32) + offset
        for dtype, half in ((torch.bfloat16, 1 << 15), (torch.float16, 1 << 12))
        for offset in (0, 1, half - 1, half, half + 1)
    ]
    x = torch.cat((bits, *near)).view(torch.float32)
    subnormal = (x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)
    assert subnormal.any() and x.isnan().any() and x.isinf().any()
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact(dtype: torch.dtype) -> None:
    x = all_16_bits(dtype)
    found = convert(x, torch.float32)
    assert torch.equal(found.isnan(), x.isnan()) and x.isnan().any()
    assert same_bits(found[~x.isnan()], x.float()[~x.isnan()])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    x = float32_of_every_kind()
    expected, found = x.to(dtype), convert(x, dtype)
    assert (expected.float() != x).sum() > len(x) // 2, "most values are rounded"
    assert torch.equal(found.isnan(), x.isnan())
    assert same_bits(found[~x.isnan()], expected[~x.isnan()])


@triton.jit
def masked_kernel(x_ptr, limit_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=(at > 2) & (tl.load(limit_ptr) >= 0), other=7.0))


def test_one_comparison_masks_a_whole_tile() -> None:
    x, y = randn(16), torch.empty(16)
    for limit, first in ((5, 3), (-1, 16)):
        masked_kernel[(1,)](x, torch.tensor([limit]), y, BLOCK=16)  # type: ignore[arg-type]
        assert same_bits(y, torch.where(torch.arange(16) < first, 7.0, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_right_and_does_not_depend_on_its_tile(dtype: torch.dtype) -> None:
    a, b, c = randn(64, 256, dtype=dtype), randn(256, 128, dtype=dtype, seed=1), randn(64, 128, seed=2)
    found = dot(a, b, c, (64, 128))
    bound = 256 * 2.0**-24 * (a.double().abs() @ b.double().abs() + c.abs())
    assert ((found - (a.double() @ b.double() + c)).abs() <= bound).all()
    for tile in ((64, 16), (16, 128), (32, 64)):
        assert same_bits(dot(a, b, c, tile), found), tile


def test_a_product_propagates_nan_and_infinity() -> None:
    """As with a matrix instruction, NaN and infinity affect only the rows and columns that contain them."""
    a, b, c = randn(16, 32), randn(32, 16, seed=1), torch.zeros(16, 16)
    a[3, 5], b[7, 2], b[8, 4], a[1, 8] = torch.nan, torch.inf, torch.inf, 0.0
    found = dot(a.bfloat16(), b.bfloat16(), c, (16, 16))
    expected = torch.full((16, 16), False)
    expected[3], expected[:, 2], expected[:, 4] = True, True, True
    assert torch.equal(~found.isfinite(), expected)
    assert found[3].isnan().all() and found[1, 4].isnan(), "0 times infinity is NaN"
