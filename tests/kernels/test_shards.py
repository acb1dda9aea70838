"""A weight that holds only a part of a checkpoint's tensor can be written in the checkpoint's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.kernels.shards import Shard
from trueroll.kernels.specs import Slice
from trueroll.kernels.stacks import Stack, StackLayout

from .backends import Served

ROWS, COLUMNS = 80, 70
PARTS = {
    "rows": Slice(0, ROWS, ((16, 48),)),
    "the last rows": Slice(0, ROWS, ((48, 32),)),
    "columns": Slice(1, COLUMNS, ((32, 38),)),
    "three ranges of rows": Slice(0, ROWS, ((0, 16), (32, 16), (64, 16))),
}


def whole(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def of(tensor: Tensor, which: str) -> Tensor:
    part = PARTS[which]
    return torch.cat([tensor.narrow(part.dim, start, length) for start, length in part.ranges], part.dim)


def new_shard(served: Served, which: str) -> Shard:
    rows, columns = of(whole(), which).shape
    empty = torch.empty(0, dtype=served.dtype).new_empty
    return Shard(served.ops.new_weight(rows, columns, empty), PARTS[which])


@pytest.mark.parametrize("which", list(PARTS))
def test_a_shard_takes_its_part_of_a_tensor(served: Served, which: str) -> None:
    shard, tensor = new_shard(served, which), whole().to(served.dtype)
    assert shard.shape == tensor.shape and shard.dtype == served.dtype
    shard.copy_(whole())
    assert shard.to_dense().equal(of(tensor, which))
    other = new_shard(served, which)
    other.copy_(shard)
    assert other.to_dense().equal(of(tensor, which))
    with pytest.raises(ValueError, match=r"must have shape \[80, 70\]"):
        shard.copy_(of(tensor, which))


@pytest.mark.parametrize("which", list(PARTS))
@pytest.mark.parametrize("step", [16, 48, 80])
def test_rows_come_in_pieces_of_the_whole(served: Served, which: str, step: int) -> None:
    shard, tensor = new_shard(served, which), whole().to(served.dtype)
    for start in range(0, ROWS, step):
        piece = shard.narrow(0, start, min(step, ROWS - start))
        rows = tensor[start : start + step]
        assert piece.shape == rows.shape
        piece.copy_(rows)
    assert shard.to_dense().equal(of(tensor, which))


@pytest.mark.parametrize("which", list(PARTS))
def test_elements_outside_the_part_are_left_out(served: Served, which: str) -> None:
    shard, tensor = new_shard(served, which), whole().to(served.dtype)
    shard.copy_(tensor)
    index = torch.arange(0, tensor.numel(), 7)
    values = torch.arange(len(index)).to(served.dtype)
    tensor.put_(index, values)
    shard.put_(index, values)
    assert shard.to_dense().equal(of(tensor, which))


@pytest.mark.parametrize("layout", [StackLayout(), StackLayout(transposed=True, in_turn=True)])
def test_a_shard_of_a_stack_has_some_experts(layout: StackLayout) -> None:
    def empty(*shape: int) -> Any:
        return torch.empty(shape)

    shape = layout.shape((6, 4, 5))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    shard = Shard(
        Stack.new(lambda rows, columns, empty: empty(rows, columns), empty, (2, 4, 5), layout), Slice(0, 6, ((3, 2),))
    )
    assert shard.shape == shape and shard.nbytes == 2 * 4 * 5 * 4
    for expert in range(6):
        shard.narrow(0, expert, 1).copy_(tensor[expert : expert + 1])
    assert shard.to_dense().equal(tensor[3:5])
    index = torch.arange(1, tensor.numel(), 3)
    tensor.view(-1)[index] = 7.0
    shard.put_(index, torch.full((len(index),), 7.0))
    assert shard.to_dense().equal(tensor[3:5])


def test_a_shard_of_a_vector() -> None:
    shard, tensor = Shard(torch.zeros(3), Slice(0, 9, ((4, 3),))), torch.arange(9.0)
    shard.narrow(0, 2, 4).copy_(tensor[2:6])
    assert shard.own.tolist() == [4.0, 5.0, 0.0]
    shard.put_(torch.tensor([0, 6, 8]), torch.tensor([1.0, 2.0, 3.0]))
    assert shard.own.tolist() == [4.0, 5.0, 2.0]
