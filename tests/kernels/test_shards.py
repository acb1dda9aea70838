"""A weight that holds only a part of a checkpoint's tensor can be written in the checkpoint's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.kernels.shards import Shard, Shards, is_stack
from trueroll.kernels.specs import Slice
from trueroll.kernels.stacks import Stack, StackLayout

from .backends import Served

ROWS, COLUMNS = 80, 70
PARTS = {
    "rows": Slice(0, ROWS, ((16, 48),)),
    "the last rows": Slice(0, ROWS, ((48, 32),)),
    "rows between panels": Slice(0, ROWS, ((10, 30),)),
    "columns": Slice(1, COLUMNS, ((32, 38),)),
    "three ranges of rows": Slice(0, ROWS, ((0, 16), (32, 16), (64, 16))),
    "short ranges of rows": Slice(0, ROWS, ((0, 8), (32, 8), (70, 4))),
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


DIVISIONS = {
    "rows": [Slice(0, ROWS, ((start, 20),)) for start in range(0, ROWS, 20)],
    "uneven columns": [Slice(1, COLUMNS, (each,)) for each in ((0, 32), (32, 32), (64, 6), (70, 0))],
    "shared rows": [Slice(0, ROWS, (each,)) for each in ((0, 40), (0, 40), (40, 40), (40, 40))],
    "two ranges of rows": [Slice(0, ROWS, ((start, 10), (40 + start, 10))) for start in range(0, 40, 10)],
}


def new_shards(served: Served, division: str) -> Shards:
    empty = torch.empty(0, dtype=served.dtype).new_empty
    shards = []
    for part in DIVISIONS[division]:
        shape = [ROWS, COLUMNS]
        shape[part.dim] = part.length
        shards.append(Shard(served.ops.new_weight(shape[0], shape[1], empty), part))
    return Shards(shards)


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_shards_of_all_ranks_hold_a_whole_tensor(served: Served, division: str) -> None:
    shards, tensor = new_shards(served, division), whole().to(served.dtype)
    assert shards.shape == tensor.shape and shards.dtype == tensor.dtype
    for start in range(0, ROWS, 16):
        shards.narrow(0, start, 16).copy_(tensor[start : start + 16])
    assert shards.to_dense().equal(tensor)
    assert all(shards.narrow(0, start, 16).to_dense().equal(tensor[start : start + 16]) for start in range(0, ROWS, 16))
    index = torch.arange(0, tensor.numel(), 7)
    values = torch.arange(len(index)).to(served.dtype)
    shards.put_(index, values)
    tensor.put_(index, values)
    other = new_shards(served, division)
    other.copy_(whole())
    other.narrow(0, 16, 32).copy_(shards.narrow(0, 16, 32))
    assert other.to_dense().equal(
        torch.cat((whole()[:16].to(tensor.dtype), tensor[16:48], whole()[48:].to(tensor.dtype)))
    )


@pytest.mark.parametrize("layout", [StackLayout(), StackLayout(transposed=True, in_turn=True)])
def test_the_shards_of_a_stack_hold_all_experts(layout: StackLayout) -> None:
    def stack(part: Slice) -> Shard:
        return Shard(Stack.new(lambda n, m, empty, unit: empty(n, m), torch.empty, (part.length, 4, 6), layout), part)

    shards = Shards([stack(Slice(0, 6, (each,))) for each in ((0, 3), (3, 3))])
    tensor = torch.randn(layout.shape((6, 4, 6)), generator=torch.Generator().manual_seed(0))
    assert is_stack(shards) and shards.experts == range(6) and shards.own_shape == (6, 4, 6)
    for expert in range(6):
        shards.narrow(0, expert, 1).copy_(tensor[expert : expert + 1])
    assert shards.to_dense().equal(tensor)
    shards.part(4, 1, 2).copy_(torch.full((2, 6), 5.0))
    rows = layout.rows_first(shards.to_dense())
    assert (rows[4, 1:3] == 5.0).all() and int((rows == 5.0).sum()) == 12


@pytest.mark.parametrize("layout", [StackLayout(), StackLayout(transposed=True, in_turn=True)])
def test_a_shard_of_a_stack_has_some_experts(layout: StackLayout) -> None:
    def empty(*shape: int) -> Any:
        return torch.empty(shape)

    shape = layout.shape((6, 4, 5))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    shard = Shard(
        Stack.new(lambda rows, columns, empty, unit: empty(rows, columns), empty, (2, 4, 5), layout),
        Slice(0, 6, ((3, 2),)),
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
