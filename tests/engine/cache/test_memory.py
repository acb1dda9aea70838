"""Arenas: tensors that stay valid while their memory is released, restored or exchanged."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from trueroll.engine.cache import memory
from trueroll.engine.cache.lending import LendableArena
from trueroll.engine.cache.memory import ALIGNMENT, Arena, DeviceArena, HostArena, bytes_needed, new_arena
from trueroll.engine.cache.shared import FileArena
from trueroll.engine.models.trials import attempt
from trueroll.kernels.cpu.backend import PackedWeight

CPU = torch.device("cpu")
MIB = 2**20
SHAPES = [(1,), (3, 5), (2, 8, 8), (0,), (700, 1000), (1,)]

KINDS: dict[str, Callable[[int], Arena]] = {
    "huge pages": partial(HostArena, huge_pages=True),
    "small pages": partial(HostArena, huge_pages=False),
    "device": partial(DeviceArena, device=CPU),
    "to lend": LendableArena,
    "to share": FileArena,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Arena]:
    return KINDS[request.param]


def build(empty: Callable[..., Tensor]) -> list[Tensor]:
    return [empty(*shape) for shape in SHAPES]


def filled(make: Callable[[int], Arena], seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Arena, list]:
    """Return an arena that contains only random tensors of SHAPES."""
    arena = make(bytes_needed(build, dtype))
    tensors = build(partial(arena.empty, dtype))
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return arena, tensors


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_are_aligned_zero_and_apart(make: Callable[[int], Arena], dtype: torch.dtype) -> None:
    arena = make(bytes_needed(build, dtype))
    tensors = build(partial(arena.empty, dtype))
    assert [tuple(tensor.shape) for tensor in tensors] == SHAPES and {tensor.dtype for tensor in tensors} == {dtype}
    assert all(tensor.data_ptr() % ALIGNMENT == 0 and not tensor.any() for tensor in tensors)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))
    assert arena.num_held == bytes_needed(build, dtype)
    with pytest.raises(MemoryError, match=f"arena of {arena.num_held} bytes is too small"):
        arena.empty(dtype, 1)


def test_memory_that_is_dropped_and_restored_is_zero(make: Callable[[int], Arena]) -> None:
    arena, tensors = filled(make)
    for _ in range(2):
        arena.drop(keep=False)
        assert arena.num_held == 0
    for _ in range(2):
        arena.restore()
        assert arena.num_held == bytes_needed(build, torch.float32)
    assert not any(tensor.any() for tensor in tensors)
    tensors[1].fill_(1)
    arena.restore()
    assert tensors[1].all()


def test_memory_that_is_kept_comes_back(make: Callable[[int], Arena]) -> None:
    arena, tensors = filled(make)
    for _ in range(2):
        arena.drop(keep=True)
    arena.restore()
    assert same(tensors, filled(make)[1])
    arena.drop(keep=True)
    arena.drop(keep=False)
    arena.drop(keep=True)
    arena.restore()
    assert not any(tensor.any() for tensor in tensors)


def test_a_packed_weight_follows_its_memory(make: Callable[[int], Arena]) -> None:
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    arena = make(bytes_needed(lambda empty: PackedWeight.new(64, 48, empty), torch.float32))
    weight = PackedWeight.new(64, 48, partial(arena.empty, torch.float32))
    weight.copy_(rows)
    arena.drop(keep=True)
    elsewhere = [torch.full((64, 48), torch.nan) for _ in range(8)]
    arena.restore()
    assert torch.equal(weight.to_dense(), rows)
    weight.copy_(2 * rows)
    assert torch.equal(weight.to_dense(), 2 * rows) and all(tensor.isnan().all() for tensor in elsewhere)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "device"])
def test_forked_processes_do_not_have_the_memory(kind: str) -> None:
    """If a forked process had the memory, it would stay in use after `drop`, and each write would copy pages."""
    arena, other = KINDS[kind](4 * MIB), KINDS[kind](4 * MIB)
    address = arena.empty(torch.uint8, 4 * MIB).data_ptr()
    other.empty(torch.uint8, 4 * MIB)

    def holds() -> bool:
        bounds = [line.split(" ", 1)[0].split("-") for line in open("/proc/self/maps")]
        return any(int(first, 16) <= address < int(end, 16) for first, end in bounds)

    def check() -> None:
        assert not holds()

    assert holds(), "premise"
    attempt(check)
    arena.take(other)
    attempt(check)
    arena.drop(keep=False)
    attempt(check)
    arena.restore()
    attempt(check)
    assert holds(), "premise"


def test_a_device_releases_kept_memory_too() -> None:
    arena, tensors = filled(KINDS["device"])
    arena.drop(keep=True)
    assert arena.num_held == tensors[0].untyped_storage().nbytes() == 0


def test_an_arena_takes_the_content_of_another(make: Callable[[int], Arena]) -> None:
    arena, tensors = filled(make, seed=1)
    other, _ = filled(make, seed=2)
    before = [tensor.data_ptr() for tensor in tensors]
    expected = filled(make, seed=2)[1]
    assert not same(tensors, expected)
    arena.take(other)
    del other
    assert same(tensors, expected) and [tensor.data_ptr() for tensor in tensors] == before
    arena.take(filled(make, seed=3)[0])
    assert same(tensors, filled(make, seed=3)[1])
    arena.drop(keep=False)
    arena.restore()
    assert not any(tensor.any() for tensor in tensors)


def test_pages_are_exchanged_instead_of_being_copied() -> None:
    arena, _ = filled(KINDS["huge pages"])
    other, theirs = filled(KINDS["huge pages"], seed=1)
    arena.take(other)
    assert same(theirs, filled(KINDS["huge pages"])[1]) and arena.copy_note == ""


def test_memory_that_is_set_aside_can_be_filled_again(make: Callable[[int], Arena]) -> None:
    """Only private pages of the host are set aside. All other arenas stay as they are."""
    arena, tensors = filled(make)
    expected = filled(make)[1]
    if arena.set_aside():
        assert type(arena) is HostArena
        for tensor, value in zip(tensors, expected, strict=True):
            tensor.copy_(value)
    else:
        assert type(arena) is not HostArena
    assert same(tensors, expected) and arena.num_held


def test_pages_of_a_file_are_not_set_aside_after_an_exchange() -> None:
    arena, tensors = filled(KINDS["huge pages"])
    other, _ = filled(KINDS["to lend"], seed=1)
    arena.take(other)
    assert not arena.set_aside() and same(tensors, filled(KINDS["to lend"], seed=1)[1])
    last, theirs = filled(KINDS["huge pages"], seed=2)
    arena.take(last)
    assert arena.set_aside() and not last.set_aside()
    assert same(theirs, filled(KINDS["to lend"], seed=1)[1])


def test_where_pages_cannot_move_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena, tensors = filled(KINDS["huge pages"])
    other, theirs = filled(KINDS["huge pages"], seed=1)
    monkeypatch.setattr(memory, "_MOVE_FLAGS", memory._MOVE_FLAGS | 1 << 20)  # a flag that no kernel knows
    assert not memory._move_pages(other._memory.data_ptr(), arena._memory.data_ptr(), arena._memory.nbytes)
    assert arena.copy_note == "" and not caplog.messages
    arena.take(other)
    assert same(tensors, filled(KINDS["huge pages"], seed=1)[1]) and same(theirs, tensors)
    assert arena.copy_note == (
        "memory pages are copied, because this system cannot move pages (mremap: Invalid argument)"
    )
    arena.take(other)
    [line] = caplog.messages
    assert line.startswith(arena.copy_note)


def test_a_move_that_fails_half_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _ = filled(KINDS["huge pages"])
    monkeypatch.setattr(memory, "_CANNOT_MOVE", ())
    with pytest.raises(OSError, match="cannot move the pages") as caught:
        memory._move_pages(1, arena._memory.data_ptr(), arena._memory.nbytes)
    assert caught.value.errno == errno.EINVAL


def test_another_layout_is_refused(make: Callable[[int], Arena]) -> None:
    arena, other = make(4096), make(4096)
    arena.empty(torch.float32, 8)
    other.empty(torch.float32, 16)
    for source in (other, make(4096), make(8192)):
        with pytest.raises(ValueError, match="tensors of different sizes"):
            arena.take(source)


@pytest.mark.parametrize("huge_pages", [False, True])
def test_host_memory_is_resident_only_while_it_is_used(huge_pages: bool) -> None:
    size = 256 * MIB
    arena = new_arena(size, CPU, huge_pages)
    assert isinstance(arena, HostArena)
    tensor, start = arena.empty(torch.uint8, size), resident()
    for _ in range(2):
        tensor.fill_(1)
        assert resident() - start > 0.95 * size
        arena.drop(keep=False)
        assert resident() - start < 0.05 * size
        arena.restore()
        assert resident() - start < 0.05 * size
    tensor[: size // 4] = 1
    assert 0.2 * size < resident() - start < 0.3 * size


def test_a_moved_arena_leaves_nothing_behind() -> None:
    size = 64 * MIB
    arena = HostArena(size, huge_pages=True)
    tensor = arena.empty(torch.uint8, size)
    tensor.fill_(0)
    start = resident()
    for i in range(10):
        other = HostArena(size, huge_pages=True)
        other.empty(torch.uint8, size).fill_(i)
        assert resident() - start > 0.9 * size
        arena.take(other)
        del other
        assert resident() - start < 0.1 * size
        assert np.all(tensor.numpy() == i)


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match=str(2**60)):
        new_arena(2**60, CPU, huge_pages=True)
