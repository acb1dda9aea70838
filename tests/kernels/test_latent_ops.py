"""The ops of latent attention against their definitions, and the weight that holds the matrices of its heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueroll.kernels.contract import Backend, Weight
from trueroll.kernels.shards import Shard
from trueroll.kernels.specs import Slice
from trueroll.kernels.stacks import HeadLayout, HeadMatrices

from .backends import Served
from .inputs import Paged, randn, same_bits, stored

LAYOUT, HEADS, COLUMNS = HeadLayout(24, 16), 5, 32
UNIT = LAYOUT.head_rows
SHAPE = HEADS * UNIT, COLUMNS


def test_the_product_of_a_head_has_the_bits_of_the_head_alone(served: Served) -> None:
    x, weight = randn(7, 3, 40, dtype=served.dtype), randn(3 * 32, 40, dtype=served.dtype, seed=1)
    together = served.ops.head_linear(x, stored(served.ops, weight))
    assert together.shape == (7, 3, 32)
    for head in range(3):
        own = stored(served.ops, weight[head * 32 : (head + 1) * 32])
        assert same_bits(served.ops.head_linear(x[:, head : head + 1], own)[:, 0], together[:, head])
        exact = x[:, head].double() @ weight[head * 32 : (head + 1) * 32].double().T
        error = (together[:, head].double() - exact).abs()
        assert error.max() <= 2 * (exact.to(served.dtype).double() - exact).abs().max() + 1e-5


@pytest.mark.parametrize(("heads", "size", "latent"), [(5, 80, 64), (4, 576, 512)])
def test_attention_over_latent_rows_is_that_of_its_definition(
    quick: Served, heads: int, size: int, latent: int
) -> None:
    paged = Paged(quick, [150], heads, 1, size, latent=latent)
    q, k = paged.q[0].double().transpose(0, 1), paged.k[0].double().transpose(0, 1)
    scores = (q @ k.mT * size**-0.5).masked_fill(~torch.ones(150, 150).tril().bool(), -torch.inf)
    exact = (scores.softmax(-1) @ k[..., :latent]).transpose(0, 1)
    found = paged.whole(0)
    assert found.shape == (150, heads, latent)
    rounding = 2.0**-8 if quick.dtype == torch.bfloat16 else 1e-6
    assert (found.double() - exact).abs().mean() < rounding * exact.abs().mean()


def new_matrices(ops: Backend, dtype: torch.dtype, heads: int = HEADS) -> HeadMatrices:
    empty = torch.empty(0, dtype=dtype).new_empty
    return HeadMatrices.new(ops.new_weight, empty, (heads * UNIT, COLUMNS), LAYOUT)


def checkpoint(dtype: torch.dtype) -> Tensor:
    return randn(*SHAPE, dtype=dtype)


def test_the_matrices_of_heads_are_split_and_the_first_are_transposed(served: Served) -> None:
    tensor, weight = checkpoint(served.dtype), new_matrices(served.ops, served.dtype)
    weight.copy_(tensor)
    keys, values = (matrix.to_dense() for matrix in weight.matrix)
    for head in range(HEADS):
        rows = tensor[head * UNIT : (head + 1) * UNIT]
        assert keys[head * COLUMNS : (head + 1) * COLUMNS].equal(rows[:24].T)
        assert values[head * 16 : (head + 1) * 16].equal(rows[24:])
    assert weight.shape == SHAPE and weight.dtype == served.dtype and weight.to_dense().equal(tensor)
    assert weight.nbytes == sum(matrix.nbytes for matrix in weight.matrix)
    assert all(map(torch.equal, LAYOUT.rows_first(tensor), (keys, values)))
    other = new_matrices(served.ops, served.dtype)
    other.copy_(weight)
    assert other.to_dense().equal(tensor)
    with pytest.raises(ValueError, match=r"must have shape \[200, 32\] .got \[160, 32\]"):
        weight.copy_(tensor[:160])


@pytest.mark.parametrize("step", [16, UNIT, 72, 200])
def test_the_matrices_of_heads_come_in_pieces_and_elements(served: Served, step: int) -> None:
    tensor, weight = checkpoint(served.dtype), new_matrices(served.ops, served.dtype)
    for start in range(0, SHAPE[0], step):
        rows = tensor[start : start + step]
        part = weight.narrow(0, start, len(rows))
        part.copy_(rows)
        assert part.to_dense().equal(rows)
    assert weight.to_dense().equal(tensor)
    index = torch.arange(3, tensor.numel(), 7)
    values = torch.arange(len(index)).to(served.dtype)
    weight.put_(index, values)
    tensor.put_(index, values)
    assert weight.to_dense().equal(tensor)
    other = new_matrices(served.ops, served.dtype)
    other.narrow(0, 16, 160).copy_(weight.narrow(0, 16, 160))
    assert other.narrow(0, 16, 160).to_dense().equal(tensor[16:176])


def test_a_rank_holds_the_matrices_of_its_heads(served: Served) -> None:
    tensor = checkpoint(served.dtype)
    own: Weight = Shard(new_matrices(served.ops, served.dtype, 2), Slice(0, SHAPE[0], ((2 * UNIT, 2 * UNIT),)))
    for start in range(0, SHAPE[0], 16):
        own.narrow(0, start, min(16, SHAPE[0] - start)).copy_(tensor[start : start + 16])
    assert own.shape == SHAPE and own.to_dense().equal(tensor[2 * UNIT : 4 * UNIT])
    index = torch.arange(1, tensor.numel(), 3)
    own.put_(index, torch.full((len(index),), 7.0, dtype=served.dtype))
    tensor.view(-1)[index] = 7.0
    assert own.to_dense().equal(tensor[2 * UNIT : 4 * UNIT])
