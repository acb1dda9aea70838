"""Weights in the layout of each backend: what goes in comes out with the same bits."""

from __future__ import annotations

import pytest
import torch

from trueroll.kernels.cpu.weight import PackedWeight

from .backends import CPU, Served
from .inputs import randn, same_bits, stored

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
    weight = served.ops.new_weight(17, 33, served.dtype, CPU)
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
    weight = PackedWeight(17, 33, dtype)
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
    weight = PackedWeight(17, 33, torch.bfloat16)
    weight.copy_(randn(17, 33))
    before = weight.data.clone()
    with pytest.raises(ValueError, match=r"expected shape \[17, 33\], found"):
        weight.copy_(randn(*shape))
    assert same_bits(weight.data, before)
