"""The Triton kernels of rows: results against float64, the contract to the bit, and the epilogue of q, k and v against
its separate steps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import CLAMP, CLAMPED_SLOPE
from trueroll.kernels.specs import NormSpec
from trueroll.kernels.triton import rows

from ..accuracy import check
from ..backends import both_dtypes
from ..inputs import NORM, ZERO_CENTERED, empty_caches, randn, same_bits

ROWS = 5
HEAD_SIZES = [16, 64, 80, 96, 128, 256]


def angles(count: int, size: int) -> tuple[Tensor, Tensor]:
    return reference.rotation(torch.arange(count) * 11, 10000.0 ** (-torch.arange(0, size, 2) / size), 1.2)


@both_dtypes
@pytest.mark.parametrize("size", [1, 7, 16, 80, 577, 3584, 8192])
def test_rmsnorm(size: int, dtype: torch.dtype) -> None:
    x, weight = randn(ROWS, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + NORM.eps).sqrt() * weight.double()
    check(rows.rmsnorm(x, weight, NORM), expected, 2, size / 2 + 8, expected.abs())


@both_dtypes
@pytest.mark.parametrize("size", [1, 80, 577])
def test_zero_centered_rmsnorm(size: int, dtype: torch.dtype) -> None:
    """The result is rounded once, even if 1 + weight is 0."""
    x, weight = randn(ROWS, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    weight[-1] = -1
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + NORM.eps).sqrt() * (1 + weight.double())
    check(rows.rmsnorm(x, weight, ZERO_CENTERED), expected, 1, size / 2 + 9, expected.abs())


@both_dtypes
def test_rmsnorm_of_zeros_and_of_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 48, dtype=dtype)
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    found = rows.rmsnorm(x, torch.ones(48, dtype=dtype), NORM)
    assert found[0].eq(0).all() and found[1].isnan().all() and found[2, 3].isnan()


@both_dtypes
@pytest.mark.parametrize("shape", [(63,), (3, 1500), (2, 3, 1024)])
def test_gate_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = (4 * randn(*shape)).to(dtype), randn(*shape, dtype=dtype, seed=1)
    special = torch.tensor([0.0, 1e-3, -1e-3, 20.0, -20.0, 87.0, -87.0, 89.0, -104.0, 6e4, -6e4])
    gate.view(-1)[: len(special)], up.view(-1)[: len(special)] = special.to(dtype), 1.0
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    check(rows.gate_mul(gate, up, "silu"), expected, 1, 8, expected.abs())
    slope = gate.double() * (reference.GELU_SLOPE + reference.GELU_CUBIC * gate.double() ** 2)
    expected = gate.double() / (1 + torch.exp(-slope)) * up.double()
    # The error of the exponential is proportional to its argument.
    check(rows.gate_mul(gate, up, "gelu_tanh"), expected, 1, 8, expected.abs() * (1 + slope.abs().clamp(max=110)))
    up.view(-1)[-1] = 60.0
    held = gate.double().clamp(max=CLAMP)
    expected = held / (1 + torch.exp(-CLAMPED_SLOPE * held)) * (1 + up.double().clamp(-CLAMP, CLAMP))
    size = expected.abs() * (1 + CLAMPED_SLOPE * held.abs().clamp(max=110))
    check(rows.gate_mul(gate, up, "clamped_silu"), expected, 1, 8, size)


def test_clamping_keeps_nan() -> None:
    numbers, nan = torch.tensor([1.0, 90.0, -90.0]), torch.full((3,), torch.nan)
    for gate, up in ((nan, numbers), (numbers, nan)):
        assert rows.gate_mul(gate.bfloat16(), up.bfloat16(), "clamped_silu").isnan().all()


@both_dtypes
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_rope(size: int, dtype: torch.dtype) -> None:
    x, rotation = randn(ROWS, 3, size, dtype=dtype), angles(ROWS, size)
    cosines, sines = (part.double()[:, None] for part in rotation)
    low, high = x.double().chunk(2, -1)
    expected = torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)
    found = rows.rope(x, rotation)
    check(found, expected, 1, 2, torch.cat((low.abs() + high.abs(),) * 2, -1) * 1.2)
    neighbours = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    assert torch.equal(rows.rope(neighbours, rotation, True), torch.stack(found.chunk(2, -1), -1).flatten(-2))


def epilogue_inputs(heads: int, kv_heads: int, size: int, pieces: int) -> tuple[Tensor, ...]:
    """Return parts, cosines, sines and slots of ROWS rows. The third part nearly cancels the second part. No two slots
    are in the same block.
    """
    parts = randn(pieces, ROWS, (heads + 2 * kv_heads) * size)
    parts[1:2] *= 2**12
    parts[2:] -= parts[1:2]
    return parts, *angles(ROWS, size), torch.arange(ROWS - 1, -1, -1) * 2 + 1


def make_biases(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(n * size, dtype=dtype, seed=4 + i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    return q, k, v


def make_norms(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(size, dtype=dtype, seed=2), randn(size, dtype=dtype, seed=3)


def summed(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Finish parts [P, M, N] as `linear` does."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return (total if bias is None else total + bias.float()).to(dtype)


@both_dtypes
@pytest.mark.parametrize(
    "with_biases,norm,pieces", [(False, None, 1), (True, None, 3), (False, ZERO_CENTERED, 3), (True, NORM, 1)]
)
@pytest.mark.parametrize(
    "heads,kv_heads,size", [(4, 2, 16), (3, 1, 64), (2, 2, 80), (3, 1, 96), (2, 1, 128), (1, 1, 256)]
)
@thinned(lambda dtype, **_: dtype == torch.bfloat16)
def test_the_epilogue_gives_the_bits_of_its_steps(
    heads: int, kv_heads: int, size: int, with_biases: bool, norm: NormSpec | None, pieces: int, dtype: torch.dtype
) -> None:
    parts, cosines, sines, slots = epilogue_inputs(heads, kv_heads, size, pieces)
    biases, norms = make_biases(heads, kv_heads, size, dtype), make_norms(size, dtype)
    caches, expected_caches = (empty_caches(ROWS, 2, kv_heads, size, dtype) for _ in range(2))

    options = biases if with_biases else None, norms if norm else None, norm
    found = rows.qkv_epilogue(parts, *options, (cosines, sines), *caches, slots)

    bias = torch.cat(biases) if with_biases else None
    columns = summed(parts, bias, dtype)
    if pieces > 1:
        descending = summed(parts.flip(0), bias, dtype)
        assert not torch.equal(columns, descending), "the order of the parts matters"
    q, k, v = columns.view(ROWS, -1, size).split([heads, kv_heads, kv_heads], 1)
    if norm is not None:
        q, k = (rows.rmsnorm(x.reshape(-1, size), w, norm).view_as(x) for x, w in zip((q, k), norms, strict=True))
    assert same_bits(found, rows.rope(q, (cosines, sines)))
    rows.write_kv(rows.rope(k, (cosines, sines)), v, *expected_caches, slots)
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert cache.isnan().sum() == ROWS * kv_heads * size, "the other places are untouched"
        assert same_bits(cache, expected)


def test_write_kv_stores_finite_values_as_they_are() -> None:
    k, v = (randn(ROWS, 3, 80, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    k_cache, v_cache = empty_caches(4, 6, 3, 80, torch.bfloat16)
    slots = torch.tensor([23, 0, 7, 6, 11])
    rows.write_kv(k, v, k_cache, v_cache, slots)
    for cache, x in ((k_cache, k), (v_cache, v)):
        assert same_bits(cache.flatten(0, 1)[slots], x)
        assert cache.isnan().sum() == (24 - ROWS) * 3 * 80, "the other places are untouched"


@both_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_cache_marks_non_finite_values_only_in_k(value: float, dtype: torch.dtype) -> None:
    k, v = (randn(ROWS, 3, 80, dtype=dtype, seed=seed) for seed in (1, 2))
    k[1, 2, 79] = k[2, 0, 3] = v[2, 0, 40] = v[3, 1, 0] = v[3, 1, 79] = value
    k_cache, v_cache = (x[:, 0] for x in empty_caches(ROWS, 1, 3, 80, dtype))
    rows.write_kv(k, v, k_cache[:, None], v_cache[:, None], torch.arange(ROWS))
    expected_k, expected_v = k.clone(), v.clone()
    expected_k[1, 2], expected_k[2, 0], expected_k[3, 1] = torch.nan, torch.nan, torch.nan
    expected_v[2, 0, 40] = expected_v[3, 1, 0] = expected_v[3, 1, 79] = 0.0
    assert torch.equal(k_cache.isnan(), expected_k.isnan())
    assert same_bits(k_cache.nan_to_num(), expected_k.nan_to_num()) and same_bits(v_cache, expected_v)


def test_the_epilogue_marks_values_that_round_to_infinity() -> None:
    """1e5 is finite in float32 but not in float16."""
    heads, kv_heads, size = 1, 2, 16
    for head, v_is_zero in ((1, False), (3, True)):
        parts, cosines, sines, slots = epilogue_inputs(heads, kv_heads, size, 1)
        parts[0, 3, head * size + 5] = 1e5
        k_cache, v_cache = empty_caches(ROWS, 2, kv_heads, size, torch.float16)
        rows.qkv_epilogue(parts, None, None, None, (cosines, sines), k_cache, v_cache, slots)
        k, v = k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots]
        assert k[3, 0].isnan().all() and k.isnan().sum() == size
        assert v.isfinite().all() and (v[3, 0, 5] == 0) == v_is_zero


def some_ops(dtype: torch.dtype) -> dict[str, tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """Return for each op the ROWS rows, and a function of rows that returns one or several results for each row."""
    weight, biases, norms = randn(577, dtype=dtype, seed=1), make_biases(2, 1, 80, dtype), make_norms(80, dtype)
    parts, *others = epilogue_inputs(2, 1, 80, 2)

    def epilogue(left: Tensor, right: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        caches = empty_caches(ROWS, 2, 1, 80, dtype)
        q = rows.qkv_epilogue(torch.stack((left, right)), biases, norms, NORM, (cosines, sines), *caches, slots)
        return q, *(cache[slots // 2] for cache in caches)

    def write_kv(k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        caches = empty_caches(ROWS, 2, 3, 80, dtype)
        rows.write_kv(k, v, *caches, slots)
        return tuple(cache[slots // 2] for cache in caches)

    heads, more_heads = (randn(ROWS, 3, 80, dtype=dtype, seed=seed) for seed in (1, 2))
    return {
        "rmsnorm": (lambda x: (rows.rmsnorm(x, weight, NORM),), (randn(ROWS, 577, dtype=dtype),)),
        "gate_mul": (lambda gate, up: (rows.gate_mul(gate, up, "silu"),), tuple(randn(2, ROWS, 1030, dtype=dtype))),
        "rope": (lambda x, *rotation: (rows.rope(x, rotation),), (heads, *angles(ROWS, 80))),
        "write_kv": (write_kv, (heads, more_heads, others[-1])),
        "qkv_epilogue": (epilogue, (*parts, *others)),
    }


every_op = pytest.mark.parametrize("name", ["rmsnorm", "gate_mul", "rope", "write_kv", "qkv_epilogue"])


@every_op
@both_dtypes
def test_a_row_does_not_depend_on_how_many_share_the_call_or_where_it_stands(name: str, dtype: torch.dtype) -> None:
    op, inputs = some_ops(dtype)[name]
    together = op(*inputs)
    order = torch.tensor([3, 0, 4, 1, 2])
    for batch in (*torch.arange(ROWS)[:, None], torch.tensor([1, 2, 3]), order):
        for found, expected in zip(op(*(x[batch] for x in inputs)), together, strict=True):
            assert same_bits(found, expected[batch]), batch


@every_op
@both_dtypes
def test_a_row_does_not_depend_on_what_the_others_hold(name: str, dtype: torch.dtype) -> None:
    op, inputs = some_ops(dtype)[name]
    together = op(*inputs)
    for value in (torch.nan, torch.inf):
        others = [x.clone() for x in inputs]
        for x in others:
            if x.is_floating_point():
                x[[0, 1, 3]] = value
        for found, expected in zip(op(*others), together, strict=True):
            assert same_bits(found[[2, 4]], expected[[2, 4]])


@every_op
def test_a_row_does_not_depend_on_its_place_in_memory(name: str) -> None:
    op, inputs = some_ops(torch.bfloat16)[name]
    together = op(*inputs)
    shifted = [torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in inputs]
    strided = [torch.stack((x, x), -1)[..., 0] for x in inputs]
    assert all(x.data_ptr() % 16 for x in shifted) and not any(x.is_contiguous() for x in strided)
    for moved in (shifted, strided):
        for found, expected in zip(op(*moved), together, strict=True):
            assert same_bits(found, expected)


@every_op
def test_no_rows(name: str) -> None:
    op, inputs = some_ops(torch.bfloat16)[name]
    for found, expected in zip(op(*(x[:0] for x in inputs)), op(*inputs), strict=True):
        assert found.shape == (0, *expected.shape[1:])
