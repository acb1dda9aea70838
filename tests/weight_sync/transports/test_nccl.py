"""The NCCL process group: joining, waiting, and failures."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from pydantic import ValidationError

from trueroll.errors import PushError
from trueroll.weight_sync.payload.manifest import Bucket, CollectiveSource
from trueroll.weight_sync.transports import nccl
from trueroll.weight_sync.transports.collective import MOST_JOINING, GroupSlots, NcclReader

from .stand_ins import BLOCKING_WAIT, NcclGroup, gpu

CPU = torch.device("cpu")
PUSH_ID = "0123456789abcdef" * 2
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setattr(nccl, "gpu_of", lambda device: gpu(0))
    NcclGroup.made.clear()
    yield
    assert BLOCKING_WAIT not in os.environ


def new_slots(num_workers: int, timeout: float = SECONDS) -> GroupSlots:
    slots = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
    return GroupSlots("nccl", slots, "127.0.0.1", num_workers, PUSH_ID, timeout, timeout)


def join(slots: GroupSlots, position: int, timeout: float = SECONDS) -> NcclReader:
    return read_from(slots.source(position), timeout)


def read_from(
    source: CollectiveSource, timeout: float = SECONDS, is_closed: Callable[[], bool] = lambda: False
) -> NcclReader:
    return NcclReader(source, PUSH_ID, timeout, timeout, CPU, is_closed)


def joined(num_workers: int, timeout: float = SECONDS) -> tuple[GroupSlots, list[NcclReader]]:
    slots = new_slots(num_workers, timeout)
    slots.open()
    with ThreadPoolExecutor(num_workers) as executor:
        readers = list(executor.map(lambda position: join(slots, position, timeout), range(num_workers)))
    slots.opened()
    return slots, readers


def close(slots: GroupSlots, readers: list[NcclReader]) -> None:
    for each in (slots, *readers):
        each.close()


def wait_until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_buckets_arrive_and_every_wait_has_a_timeout() -> None:
    slots, readers = joined(2)
    assert slots.has_word_sums and slots.source(1).backend == "nccl"
    for index in range(4):
        bucket = Bucket(index=index, num_bytes=1000, pieces=(), word_sum=0)
        slots.slots[index % 2].fill_(index + 1)
        slots.send(index % 2, 1000)
        for reader in readers:
            assert (reader.read(bucket)[:1000] == index + 1).all()
        slots.wait(index % 2)
    assert sorted(group.rank for group in NcclGroup.made) == [0, 1, 2]
    assert all(group.device == CPU and group.timeout == timedelta(seconds=SECONDS) for group in NcclGroup.made)
    assert all(group.has_stream_of_its_own for group in NcclGroup.made)
    waits = [work.waited_for for group in NcclGroup.made for work in group.works]
    assert waits == [timedelta(seconds=SECONDS)] * 12
    close(slots, readers)
    wait_until(lambda: all(group.is_aborted for group in NcclGroup.made))


def test_a_missing_bucket_is_an_error_within_the_timeout() -> None:
    slots, [reader] = joined(1, timeout=2.0)
    with pytest.raises(PushError, match="^collective: the transfer of a bucket failed"):
        reader.read(Bucket(index=0, num_bytes=1000, pieces=(), word_sum=0))
    close(slots, [reader])


def test_a_failed_broadcast_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, readers = joined(1)

    class Broken:
        def wait(self, timeout: timedelta) -> bool:
            assert timeout == timedelta(seconds=SECONDS)
            raise RuntimeError("NCCL communicator was aborted\nwith many words")

    monkeypatch.setattr(NcclGroup, "broadcast", lambda *_: Broken())
    slots.send(0, 1000)
    with pytest.raises(PushError, match="failed: NCCL communicator was aborted; push again$"):
        slots.wait(0)
    close(slots, readers)


def test_the_cause_reported_by_nccl_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, readers = joined(1)

    def broadcast(*_: Any) -> None:
        raise RuntimeError(
            "NCCL error in: a.cpp:5\nncclSystemError: a call failed.\nLast error:\nno route to host\nmore"
        )

    monkeypatch.setattr(NcclGroup, "broadcast", broadcast)
    with pytest.raises(
        PushError, match=r"failed: NCCL error in: a.cpp:5 \(Last error: no route to host\); push again$"
    ):
        slots.send(0, 1000)
    close(slots, readers)


def test_a_broadcast_that_cannot_begin_is_an_error_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, [reader] = joined(1)

    def broadcast(*_: Any) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(NcclGroup, "broadcast", broadcast)
    with pytest.raises(PushError, match="failed: NCCL error: remote process exited; push again$"):
        slots.send(0, 1000)
    with pytest.raises(PushError, match="failed: NCCL error: remote process exited; push again$"):
        reader.read(Bucket(index=0, num_bytes=1000, pieces=(), word_sum=0))
    close(slots, [reader])


def test_no_member_makes_a_group_before_all_have_met() -> None:
    """NCCL connects the members without a time limit."""
    slots = new_slots(2, timeout=1.0)
    slots.open()
    failures: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as executor:
        failures.append(executor.submit(join, slots, 0, 1.0))
        with pytest.raises(PushError, match="^collective: cannot join the group .* with 3 members"):
            slots.opened()
        with pytest.raises(PushError):
            failures[0].result()
    assert not NcclGroup.made
    slots.close()


def test_a_late_connection_is_left_behind_and_then_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    monkeypatch.setattr(NcclGroup, "eager_connect_single_device", lambda *_: released.wait(SECONDS))
    slots = new_slots(1, timeout=1.5)
    slots.open()
    with pytest.raises(PushError, match="^collective: NCCL did not connect the members within 1.5 s"):
        join(slots, 0, timeout=1.5)
    with pytest.raises(PushError, match="^collective: NCCL did not connect the members within 1.5 s"):
        slots.opened()
    slots.close()
    assert len(NcclGroup.made) == 2 and not any(group.is_aborted for group in NcclGroup.made)
    released.set()
    wait_until(lambda: all(group.is_aborted for group in NcclGroup.made))


def test_the_number_of_hanging_joins_is_limited() -> None:
    """The clients of a store that stops answering hang. Closing the push does not wait for these clients, and later
    pushes do not wait either.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = CollectiveSource(backend="nccl", host="127.0.0.1", port=silent.getsockname()[1], rank=1, world_size=2)
        for _ in range(MOST_JOINING):
            with pytest.raises(PushError, match="^collective: NCCL did not connect"):
                read_from(source, timeout=0.5, is_closed=lambda: True)
        assert len(joining_threads()) == MOST_JOINING
        with pytest.raises(PushError, match=f"^collective: {MOST_JOINING} pushes through NCCL are stuck"):
            read_from(source)
        assert len(joining_threads()) == MOST_JOINING
    wait_until(lambda: not joining_threads())  # closing the listener ended the clients' connections
    slots, readers = joined(1)
    close(slots, readers)


def joining_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "group-join"]


def test_a_worker_without_a_gpu_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "gpu_of", lambda device: None)
    with socket.create_server(("127.0.0.1", 0)) as store:
        source = CollectiveSource(backend="nccl", host="127.0.0.1", port=store.getsockname()[1], rank=1, world_size=2)
        with pytest.raises(PushError, match="^collective: NCCL needs a GPU, but the device is cpu"):
            read_from(source)
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.accept()


def test_a_trainer_that_cannot_start_a_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slots = new_slots(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(PushError, match="^collective: cannot start a thread, since the system's limit is reached"):
            slots.open()
    slots.close()


def test_an_abandoned_group_is_aborted() -> None:
    """A group is abandoned, for example, if a worker fails to begin the push after it has joined the group."""
    slots = new_slots(1)
    slots.open()
    reader = join(slots, 0)
    close(slots, [reader])
    wait_until(lambda: len(NcclGroup.made) == 2 and all(group.is_aborted for group in NcclGroup.made))


def test_a_device_that_is_not_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "gpu_of", lambda device: None)
    with pytest.raises(PushError, match="^collective: NCCL needs a GPU, but the device is cpu"):
        nccl.new_group(torch.distributed.HashStore(), 0, 1, timedelta(seconds=SECONDS), CPU)
    assert not NcclGroup.made


@pytest.mark.parametrize("change", [dict(rank=0), dict(rank=2**16), dict(world_size=1), dict(world_size=2**16 + 1)])
def test_an_invalid_group_is_refused(change: dict[str, int]) -> None:
    right = dict(host="127.0.0.1", port=1, rank=2**16 - 1, world_size=2**16)
    assert CollectiveSource.model_validate(right).rank == 2**16 - 1
    with pytest.raises(ValidationError):
        CollectiveSource.model_validate(right | change)


def test_a_torch_without_nccl_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL")
    slots = new_slots(1)
    with pytest.raises(PushError, match="^collective: this torch has no NCCL"):
        join(slots, 0)
    slots.close()


@pytest.mark.parametrize("before", ["0", None])
def test_the_environment_is_restored(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    store = torch.distributed.HashStore()
    nccl.new_group(store, 0, 1, timedelta(seconds=SECONDS), CPU)
    assert os.environ.get(BLOCKING_WAIT) == before
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)


def test_a_group_of_another_kind_is_left_alone() -> None:
    class Group:
        def abort(self) -> None:
            raise AssertionError("aborted")

    nccl.abort(Group())
