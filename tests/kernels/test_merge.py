"""Weights with merged adapters: the same bits on every backend, and gradients as if the product were exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.autograd import GradientOps

from .backends import Served
from .inputs import randn, same_bits

SCALE = 1.7  # rounded to float32 by merge

# Rows, columns and rank: more than a tile of the reference, whole vectors, tails, a single element.
SIZES = [(300, 257, 5), (16, 64, 16), (7, 33, 1), (1, 1, 3)]


def matrices(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    weight, a, b = randn(rows, columns, dtype=dtype), randn(rank, columns, dtype=dtype), randn(rows, rank, dtype=dtype)
    return weight, a, b


def exact(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return weight.double() + torch.tensor(SCALE).double() * (b.double() @ a.double())


@pytest.mark.parametrize("size", SIZES)
def test_every_backend_gives_the_same_bits(served: Served, size: tuple[int, int, int]) -> None:
    given = matrices(*size, served.dtype)
    found = served.ops.merge(*given, SCALE)
    assert found.dtype == served.dtype and same_bits(found, reference.merge(*given, SCALE))
    assert not same_bits(found, given[0])
    rounding = torch.finfo(served.dtype).eps * exact(*given).abs().max()
    assert (found.double() - exact(*given)).abs().max() <= rounding


def test_rows_do_not_depend_on_the_others_and_layouts_change_nothing(served: Served) -> None:
    weight, a, b = matrices(37, 50, 3, served.dtype)
    found = served.ops.merge(weight, a, b, SCALE)
    assert same_bits(served.ops.merge(weight[5:9], a, b[5:9], SCALE), found[5:9])
    turned = (tensor.T.contiguous().T for tensor in (weight, a, b))
    assert same_bits(served.ops.merge(*turned, scale=SCALE), found)


def test_denormal_numbers_nan_and_infinity(served: Served) -> None:
    """The CPU's own instructions for bfloat16 would treat denormal numbers as zero."""
    weight, a, b = matrices(20, 40, 2, served.dtype)
    smallest = torch.finfo(served.dtype).smallest_normal
    weight[0], b[0] = smallest / 4, 0.0
    weight[1], b[1] = float("inf"), 1.0
    weight[2, 3] = float("nan")
    found = served.ops.merge(weight, a, b, SCALE)
    assert (found[0] == smallest / 4).all() and (found[0] != 0).all() and found[1].isinf().all()
    assert found[2, 3].isnan()
    expected = reference.merge(weight, a, b, SCALE)
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("size", SIZES)
def test_merge_into_stores_the_result_of_merge(served: Served, size: tuple[int, int, int]) -> None:
    weight, a, b = matrices(*size, served.dtype)
    out = served.ops.new_weight(*weight.shape, empty=partial(torch.zeros, dtype=served.dtype))
    assert served.ops.merge_into(out, weight, a, b, SCALE)
    assert same_bits(out.to_dense(), served.ops.merge(weight, a, b, SCALE))
    assert not same_bits(out.to_dense(), weight)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_single_non_finite_value_is_reported(served: Served, value: float) -> None:
    weight, a, b = matrices(37, 50, 3, served.dtype)
    out = served.ops.new_weight(*weight.shape, empty=partial(torch.zeros, dtype=served.dtype))
    for row, column in ((0, 0), (36, 49), (16, 31)):
        broken = weight.clone()
        broken[row, column] = value
        assert not served.ops.merge_into(out, broken, a, b, SCALE)
        assert not out.to_dense()[row, column].isfinite() and out.to_dense().isfinite().sum() == weight.numel() - 1
    largest = torch.full_like(weight, torch.finfo(served.dtype).max)
    assert served.ops.merge_into(out, largest, a * 0, b, SCALE) and served.ops.merge_into(
        out, -largest, a * 0, b, SCALE
    )


@thinned(lambda served: not isinstance(served, tuple) or not served[0].interpreted)  # a dtype on a GPU
def test_weights_are_merged_while_other_ops_run(served: Served) -> None:
    """A worker generates while it receives a push, so that merges and other ops run at the same time."""
    weight, a, b = matrices(700, 300, 16, served.dtype)
    out = served.ops.new_weight(*weight.shape, empty=partial(torch.zeros, dtype=served.dtype))
    served.ops.merge_into(out, weight, a, b, SCALE)
    expected, x = out.to_dense().clone(), randn(40, 300, dtype=served.dtype)
    product = served.ops.linear(x, out)
    with ThreadPoolExecutor(2) as pool:
        merged = pool.submit(lambda: [served.ops.merge(weight, a, b, SCALE) for _ in range(20)])
        products = pool.submit(lambda: [served.ops.linear(x, out) for _ in range(20)])
    assert all(same_bits(each, expected) for each in merged.result())
    assert all(same_bits(each, product) for each in products.result())


def test_another_order_of_additions_would_show() -> None:
    weight, a, b = matrices(64, 64, 16, torch.float32)
    assert not same_bits(reference.merge(weight, a, b, SCALE), reference.merge(weight, a.flip(0), b.flip(1), SCALE))


def test_gradients_reach_what_needs_them(served: Served) -> None:
    weight, a, b = matrices(37, 50, 3, served.dtype)
    grad = randn(37, 50, dtype=served.dtype)
    # Two roundings to the dtype, and one to float32 for each of up to 50 terms.
    rounding = 2 * torch.finfo(served.dtype).eps + 50 * torch.finfo(torch.float32).eps
    wide = [tensor.double().requires_grad_() for tensor in (weight, a, b)]
    exact(*wide).backward(grad.double())
    for needed in ((False, True, True), (True, False, True)):
        given = [tensor.clone().requires_grad_(needs) for tensor, needs in zip((weight, a, b), needed, strict=True)]
        GradientOps(served.ops).merge(*given, scale=SCALE).backward(grad)
        for found, expected, needs in zip(given, wide, needed, strict=True):
            assert (found.grad is not None) == needs
            if found.grad is not None and expected.grad is not None:
                error = (found.grad.double() - expected.grad).abs().max()
                assert error <= rounding * expected.grad.abs().max()
