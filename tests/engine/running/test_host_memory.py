"""Copies between blocks and slots of the host tier, against copies that are made one after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from trueroll.engine.running import host_memory
from trueroll.engine.running.host_memory import HostMemory, rounds
from trueroll.errors import ConfigError

BLOCKS, SLOTS = 6, 4


def group(*shapes: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    return [torch.zeros((BLOCKS, *shape), dtype=dtype) for shape, dtype in shapes]


def fill(tensors: list[Tensor], seed: int) -> None:
    """Fill tensors with random bytes, so that some values are NaN."""
    generator = torch.Generator().manual_seed(seed)
    for each in tensors:
        raw = each.view(len(each), -1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def raw(tensors: list[Tensor], block: int) -> list[bytes]:
    return [each[block].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]


def moves(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Return random copies. No copy has a slot on both sides."""
    found = list[tuple[int, int]]()
    for _ in range(count):
        block, other = rng.sample(range(BLOCKS), 2)
        place = ~rng.randrange(SLOTS)
        found.append(rng.choice([(block, other), (block, place), (place, block)]))
    return found


@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize(
    "shapes",
    [
        [((4, 2, 8), torch.bfloat16), ((4, 2, 8), torch.bfloat16), ((2, 3, 4), torch.float32)],
        [((3, 5), torch.bfloat16), ((7,), torch.float32)],
    ],
)
def test_copies_made_at_once_equal_copies_made_in_order(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, other = group(*shapes), group(((2, 2), torch.float32))
    size = sum(each[0].nbytes for each in tensors)
    monkeypatch.setattr(host_memory, "MOST_BYTES_ON_CPU", most * size)
    memory, rng = HostMemory([tensors, other], [SLOTS, 1]), random.Random(most)
    assert memory.num_held == SLOTS * size + 16
    for seed in range(30):
        fill([*tensors, *other], seed)
        expected = {block: raw(tensors, block) for block in range(BLOCKS)}
        untouched = raw(other, 0)
        copies = [*((slot, ~slot) for slot in range(SLOTS)), *moves(rng, 25)]
        for source, destination in copies:
            expected[destination] = expected[source]
        memory.copy([np.array(copies), np.empty((0, 2), np.int64)])
        assert {block: raw(tensors, block) for block in range(BLOCKS)} == {b: expected[b] for b in range(BLOCKS)}
        # Then every slot is copied back.
        memory.copy([np.array([(~slot, slot) for slot in range(SLOTS)]), np.empty((0, 2), np.int64)])
        assert [raw(tensors, slot) for slot in range(SLOTS)] == [expected[~slot] for slot in range(SLOTS)]
        assert raw(other, 0) == untouched


def test_a_round_ends_before_a_copy_that_depends_on_it() -> None:
    copies = np.array([(0, -1), (-2, 0), (1, -2), (-1, 1), (2, 3), (4, 3)])
    assert [part.tolist() for part in rounds(copies, 10)] == [
        [[0, -1], [-2, 0], [1, -2]],
        [[-1, 1], [2, 3]],
        [[4, 3]],
    ]
    assert [len(part) for part in rounds(copies[:3], 2)] == [2, 1] and not list(rounds(copies[:0], 1))


def test_sleep_returns_the_memory_and_waking_makes_it_usable_again() -> None:
    tensors = group(((2, 8), torch.float32))
    memory = HostMemory([tensors], [SLOTS])
    assert memory.num_held == SLOTS * 64
    memory.sleep()
    assert memory.num_held == 0
    memory.wake_up()
    fill(tensors, 1)
    expected = raw(tensors, 2)
    memory.copy([np.array([(2, -1), (-1, 5)])])
    assert memory.num_held == SLOTS * 64 and raw(tensors, 5) == expected != raw(tensors, 4)


class Pins:
    """CUDA's list of pinned memory: the size of each part, by address. Pinning fails with the error `status`."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.sizes = status, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if address in self.sizes:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if not self.status:
            self.sizes[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.sizes[address]
        return 0


def asleep_on_cuda(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """Return slots that are asleep, and are pinned when they wake up."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pins)
    memory = HostMemory([group(((2, 8), torch.float32))], [SLOTS])
    memory.sleep()
    memory._devices = {torch.device("cuda")}
    return memory


def test_memory_is_pinned_once_while_it_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Pins()
    memory = asleep_on_cuda(pins, monkeypatch)
    for _ in range(2):  # a worker with only its weights asleep may be told to wake up the KV cache, too
        memory.wake_up()
        assert pins.sizes == {memory._memory.data_ptr(): SLOTS * 64}
    for _ in range(2):
        memory.sleep()
        assert not pins.sizes
    memory.wake_up()
    assert pins.sizes
    del memory
    assert not pins.sizes, "memory is no longer pinned when it is freed"


def test_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"host_cache_bytes: CUDA cannot pin 256 bytes .*error 2\); lower"):
        asleep_on_cuda(Pins(status=2), monkeypatch).wake_up()
