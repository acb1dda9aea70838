"""Ways in which ranks exchange tensors by libraries. Each way gives the sums of `kernels.ranks.fold`, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.engine.parallel import groups
from trueroll.engine.parallel.exchange import RankError
from trueroll.engine.parallel.groups import GroupExchange, SymmetricExchange
from trueroll.kernels.ranks import Rank, fold
from trueroll.kernels.triton.peers import fold_peers

SIZE = 4
INTERPRETER = threading.Lock()


class Buffers:
    """Stands for torch's symmetric memory: the ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self.memory = [torch.full((groups.BUFFER_BYTES,), 255, dtype=torch.uint8) for _ in range(size)]
        self.meeting = threading.Barrier(size, timeout=60)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        assert storage_offset == 0
        numel = torch.Size(sizes).numel()
        return self.memory[rank][: numel * dtype.itemsize].view(dtype).view(*sizes)

    def barrier(self, channel: int = 0) -> None:
        self.meeting.wait()


def fold_alone(sums: Sequence[Tensor]) -> Tensor:
    """Call the kernel. Threads cannot interpret kernels at the same time."""
    with INTERPRETER:
        return fold_peers(sums)


def symmetric(folder: Path) -> Callable[[int], SymmetricExchange]:
    buffers = Buffers(SIZE)

    def make(index: int) -> SymmetricExchange:
        exchange = SymmetricExchange(Rank(index, SIZE), "test", fold_alone)
        exchange._handle = buffers
        return exchange

    return make


def group(folder: Path) -> Callable[[int], GroupExchange]:
    store = groups.c10d.FileStore(str(folder / "store"), -1)

    def make(index: int) -> GroupExchange:
        exchange = GroupExchange(Rank(index, SIZE), "test", lambda: None)
        exchange.join(store, torch.device("cpu"))
        return exchange

    return make


def on_ranks(make: Callable[[int], Any], compute: Callable[[Any], Any]) -> list[Any]:
    """No rank leaves while another rank still connects. A rank without rows has nothing else to wait for."""
    with ThreadPoolExecutor(SIZE) as pool:
        exchanges = list(pool.map(make, range(SIZE)))
        return list(pool.map(compute, exchanges))


@pytest.fixture(params=[symmetric, group])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    monkeypatch.setattr(groups, "BUFFER_BYTES", 2**12)
    monkeypatch.setattr(groups, "ONE_SHOT_BYTES", 2**10)
    return request.param(tmp_path)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 15, 16, 17, 64, 65, 131])
def test_sums_are_those_of_the_tree(rows: int, make: Callable[[int], Any]) -> None:
    """With 16 columns, up to 16 rows are added in one shot, and up to 64 rows fit into a buffer. `finish` sees each row
    once, with the row's index.
    """
    own = [torch.randn(rows, 16, generator=torch.Generator().manual_seed(index)) for index in range(SIZE)]
    extra = torch.randn(rows, 16)
    expected = (fold(own) + extra).to(torch.bfloat16)
    if rows > 4:
        assert not torch.equal(fold(own), sum(own[1:], own[0])), "premise: the order of additions matters"

    def finish(total: Tensor, start: int) -> Tensor:
        return (total + extra[start : start + len(total)]).to(torch.bfloat16)

    found = on_ranks(make, lambda exchange: [exchange.add(own[exchange.rank.index], finish) for _ in range(3)])
    assert all(torch.equal(each, expected) for of_rank in found for each in of_rank)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2000,), (40, 3, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_tensors_are_gathered(shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[int], Any]) -> None:
    own = [(torch.arange(torch.Size(shape).numel()).view(shape) + 7 * index).to(dtype) for index in range(SIZE)]
    found = on_ranks(make, lambda exchange: [*exchange.gather(own[exchange.rank.index])])
    assert all(torch.equal(*pair) for of_rank in found for pair in zip(of_rank, own, strict=True))


def test_tensors_are_passed_to_the_next_stage(tmp_path: Path) -> None:
    store = groups.c10d.FileStore(str(tmp_path / "store"), -1)
    sent = [torch.randn(5, 3), torch.arange(4, dtype=torch.int32).view(2, 2)]

    def compute(index: int) -> list[Tensor]:
        exchange = GroupExchange(Rank(index, 2), "pair", lambda: None)
        exchange.join(store, torch.device("cpu"))
        if index == 0:
            for each in sent:
                exchange.send(each)
            return sent
        found = [torch.empty_like(each) for each in sent]
        for each in found:
            exchange.receive(each)
        return found

    with ThreadPoolExecutor(2) as pool:
        _, found = pool.map(compute, range(2))
    assert all(map(torch.equal, found, sent))


def test_a_failed_exchange_names_the_rank_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.time, "sleep", lambda seconds: None)
    calls = list[int]()

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RankError("rank 1 of 2 (process 7) ended with exit code -9")

    class Broken:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    exchange = GroupExchange(Rank(0, 2), "test", check)
    with pytest.raises(RankError, match="rank 1 of 2"):
        exchange._wait(Broken())
    calls.extend([1] * 100)
    with pytest.raises(RankError, match="the ranks could not exchange tensors: Connection closed by peer"):
        exchange._wait(Broken())


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_kernel_adds_the_sums_of_peers(count: int) -> None:
    for shape in ((1, 4), (3, 700)):
        sums = [torch.randn(shape) for _ in range(count)]
        assert torch.equal(fold_peers(sums), fold(sums))
