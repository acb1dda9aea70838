"""Weights in the layout of each backend: stored values are read back with the same bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from trueroll.kernels.contract import Weight
from trueroll.kernels.cpu.backend import PackedWeight

from ..backends import Served
from ..inputs import randn, same_bits, stored

SHAPES = [(1, 1), (1, 7), (7, 1), (16, 32), (17, 33), (513, 130), (576, 576)]


@pytest.mark.parametrize("rows,columns", SHAPES)
def test_a_stored_matrix_comes_back(served: Served, rows: int, columns: int) -> None:
    matrix = randn(rows, columns, dtype=served.dtype)
    matrix.view(-1)[0], matrix.view(-1)[-1] = torch.nan, -0.0
    weight = stored(served.ops, matrix)
    assert same_bits(weight.to_dense(), matrix)
    assert (weight.shape, weight.dtype) == (matrix.shape, matrix.dtype)
    assert weight.nbytes >= matrix.nbytes
    assert same_bits(served.ops.embedding(torch.arange(rows), weight), matrix)


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_source_of_another_dtype_is_rounded(served: Served, source: torch.dtype) -> None:
    matrix = randn(17, 33, dtype=source)
    weight = served.ops.new_weight(17, 33, partial(torch.empty, dtype=served.dtype))
    weight.copy_(matrix)
    assert same_bits(weight.to_dense(), matrix.to(served.dtype))


def test_a_source_may_be_strided(served: Served) -> None:
    matrix = randn(33, 17, dtype=served.dtype)
    for source in (
        matrix.T,
        randn(34, 66, dtype=served.dtype)[::2, ::2],
        randn(1, 33, dtype=served.dtype).expand(17, -1),
    ):
        assert not source.is_contiguous()
        assert same_bits(stored(served.ops, source).to_dense(), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_copy_goes_to_the_same_memory_and_fills_the_padding_with_zeros(dtype: torch.dtype) -> None:
    weight = PackedWeight.new(17, 33, partial(torch.empty, dtype=dtype))
    weight.data.fill_(torch.nan)
    addresses = weight.pointer, weight.data.data_ptr()
    for seed in (0, 1):
        matrix = randn(17, 33, dtype=dtype, seed=seed)
        weight.copy_(matrix)
        assert same_bits(weight.to_dense(), matrix)
    assert (weight.pointer, weight.data.data_ptr()) == addresses
    assert weight.nbytes == weight.data.nbytes > 17 * 33 * dtype.itemsize
    assert weight.data.count_nonzero() == 17 * 33 and not weight.data.isnan().any()


@pytest.mark.parametrize("shape", [(33, 17), (17, 32), (16, 33), (1, 33), (561,), (17, 33, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    weight = PackedWeight.new(17, 33, partial(torch.empty, dtype=torch.bfloat16))
    weight.copy_(randn(17, 33))
    before = weight.data.clone()
    with pytest.raises(ValueError, match=r"must have shape \[17, 33\]"):
        weight.copy_(randn(*shape))
    assert same_bits(weight.data, before)


def poisoned(served: Served, rows: int, columns: int) -> Weight:
    """Return a weight with memory full of NaN, padding included."""
    return served.ops.new_weight(rows, columns, lambda *shape: torch.full(shape, torch.nan, dtype=served.dtype))


def memory_of(weight: Weight) -> torch.Tensor:
    """Return the memory of a weight, padding included."""
    return weight.data if isinstance(weight, PackedWeight) else weight.to_dense()


@pytest.mark.parametrize("rows,columns", SHAPES)
@pytest.mark.parametrize("step", [16, 48])
def test_a_matrix_stored_piece_by_piece_is_the_one_stored_whole(
    served: Served, rows: int, columns: int, step: int
) -> None:
    matrix = randn(rows, columns, dtype=served.dtype)
    weight = poisoned(served, rows, columns)
    for start in range(0, rows, step):
        length = min(step, rows - start)
        piece = weight.narrow(0, start, length)
        piece.copy_(matrix[start : start + length])
        assert (piece.shape, piece.dtype) == ((length, columns), served.dtype)
        assert same_bits(piece.to_dense(), matrix[start : start + length])
    assert same_bits(memory_of(weight), memory_of(stored(served.ops, matrix)))


def test_a_piece_shares_memory_and_leaves_the_rest_alone(served: Served) -> None:
    matrix = randn(53, 33, dtype=served.dtype)
    weight = stored(served.ops, matrix)
    piece = weight.narrow(0, 16, 16)
    piece.copy_(matrix[:16])
    assert same_bits(weight.to_dense(), torch.cat((matrix[:16], matrix[:16], matrix[32:])))


@pytest.mark.parametrize("dim,start,length", [(1, 0, 16), (0, 8, 16), (0, 0, 17), (0, 16, 1), (0, 48, 16), (0, 64, 0)])
def test_a_piece_that_is_not_of_whole_panels_is_refused(dim: int, start: int, length: int) -> None:
    weight = PackedWeight.new(53, 33, torch.empty)
    with pytest.raises(ValueError, match="weight rows must"):
        weight.narrow(dim, start, length)
    assert weight.narrow(0, 48, 5).shape == (5, 33)


@pytest.mark.parametrize("rows,columns", SHAPES)
def test_elements_are_overwritten_in_place(served: Served, rows: int, columns: int) -> None:
    matrix = randn(rows, columns, dtype=served.dtype)
    count = max(1, matrix.numel() // 3)
    index = torch.randperm(matrix.numel(), generator=torch.Generator().manual_seed(1))[:count]
    index[0] = matrix.numel() - 1
    values = randn(count, dtype=served.dtype, seed=1)
    weight = stored(served.ops, matrix)
    expected = matrix.clone().put_(index, values)
    assert not same_bits(expected, matrix)
    weight.put_(index, values)
    assert same_bits(memory_of(weight), memory_of(stored(served.ops, expected)))
    weight.put_(index[:0], values[:0])
    assert same_bits(weight.to_dense(), expected)


@pytest.mark.parametrize("index", [17 * 33, -17 * 33 - 1])
def test_an_element_outside_is_refused(served: Served, index: int) -> None:
    weight = stored(served.ops, randn(17, 33, dtype=served.dtype))
    before = memory_of(weight).clone()
    with pytest.raises(IndexError):
        weight.put_(torch.tensor([index]), torch.ones(1, dtype=served.dtype))
    assert same_bits(memory_of(weight), before)


def test_a_weight_takes_the_values_of_another(served: Served) -> None:
    matrix = randn(53, 33, dtype=served.dtype)
    weight = poisoned(served, 53, 33)
    weight.copy_(stored(served.ops, matrix))
    assert same_bits(memory_of(weight), memory_of(stored(served.ops, matrix)))


def test_a_weight_without_memory_knows_its_size(served: Served) -> None:
    weight = served.ops.new_weight(53, 33, partial(torch.empty, dtype=served.dtype, device="meta"))
    real = stored(served.ops, randn(53, 33, dtype=served.dtype))
    assert (weight.shape, weight.dtype, weight.nbytes) == (real.shape, real.dtype, real.nbytes)
