"""Pushes through gloo: a fault of the trainer or of the receiving process ends only the push, not the worker."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from trueroll.errors import PushError
from trueroll.weight_sync.payload.manifest import Bucket
from trueroll.weight_sync.transports import gloo_reader as gloo_reader_module
from trueroll.weight_sync.transports.collective import GroupSlots
from trueroll.weight_sync.transports.gloo import STORE_SECONDS, connect
from trueroll.weight_sync.transports.gloo_reader import GlooReader

from .gloo_push import (
    DAY,
    PUSH_ID,
    SECONDS,
    SLOT_BYTES,
    descendants,
    held_by,
    joined,
    new_slots,
    receiving_process,
    silent_store,
    source_at,
    wait_until,
    warm_up,
)

ME = psutil.Process()


def bucket(index: int, num_bytes: int = SLOT_BYTES) -> Bucket:
    return Bucket(index=index, num_bytes=num_bytes, pieces=())


def send(slots: GroupSlots, index: int, num_bytes: int = SLOT_BYTES) -> None:
    slots.slots[index % 2].fill_(index + 1)
    slots.send(index % 2, num_bytes)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Assert that a push leaves only the fork server behind. Processes of earlier tests may end in the meantime."""
    warm_up()
    wait_until(lambda: len(descendants(ME)) == 1)
    before = held_by(ME)
    yield
    wait_until(
        lambda: all(now <= then for now, then in zip(held_by(ME), before, strict=True)),
        lambda: f"{before} before, {held_by(ME)} after",
    )


def test_buckets_of_any_size_arrive() -> None:
    slots, reader = joined()
    for index, num_bytes in enumerate((10, 0, 4096, 4096, 7, 300)):
        if num_bytes:
            send(slots, index, num_bytes)
        if index == 2:
            reader.prepare(bucket(2, 4096))
        data = reader.read(bucket(index, num_bytes))
        assert len(data) >= num_bytes and (data[:num_bytes] == index + 1).all()
        slots.wait(index % 2)
    reader.close()
    reader.close()
    slots.close()


def test_the_trainer_may_join_later_than_the_timeout_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer joins late, for example, if another worker drains before it begins. The test moves the worker's clock
    forward, so that the test need not wait.
    """
    slots, jump, hear = new_slots(), 0.0, GlooReader._hear

    def hear_and_jump(reader: GlooReader, deadline: float) -> dict[str, Any] | None:
        nonlocal jump
        word = hear(reader, deadline)
        if word == {"did": "connect"}:
            jump = SECONDS / 2
        elif jump and word is None and slots._joining is None:
            slots.open()
        return word

    monkeypatch.setattr(gloo_reader_module, "STORE_SECONDS", SECONDS / 4)
    monkeypatch.setattr(gloo_reader_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + jump))
    monkeypatch.setattr(GlooReader, "_hear", hear_and_jump)
    reader = GlooReader(slots.source(0), PUSH_ID, SECONDS, SECONDS, lambda: False)
    assert jump, "the worker waited for the trainer"
    slots.opened()
    for each in (reader, slots):
        each.close()


def test_a_wait_for_a_key_of_a_reached_store_ends_with_the_callers_timeout() -> None:
    slots = new_slots()
    store = connect(slots.source(0).host, slots.source(0).port, PUSH_ID, timedelta(seconds=DAY))
    assert STORE_SECONDS < DAY and store.timeout == timedelta(seconds=DAY)
    slots.close()


def test_a_killed_receiving_process_is_an_error_and_the_next_push_succeeds() -> None:
    slots, reader = joined()
    os.kill(receiving_process(ME).pid, signal.SIGKILL)
    with pytest.raises(
        PushError, match="^collective: the transfer of a bucket failed: .* ended with SIGKILL; .*push again$"
    ):
        reader.read(bucket(0))
    for each in (reader, slots, *joined()):
        each.close()


def test_a_receiving_process_ends_with_its_watcher() -> None:
    slots, reader = joined()
    receiving = receiving_process(ME)
    os.kill(receiving.ppid(), signal.SIGKILL)
    with pytest.raises(PushError, match="the receiving process is gone; push again$"):
        reader.read(bucket(0))
    wait_until(lambda: not receiving.is_running())
    for each in (reader, slots):
        each.close()


def test_a_killed_fork_server_is_restarted() -> None:
    [server] = ME.children()
    server.kill()
    server.wait()
    slots, reader = joined()
    send(slots, 0)
    assert (reader.read(bucket(0)) == 1).all()
    assert server.pid not in [process.pid for process in ME.children()]
    for each in (reader, slots):
        each.close()


def test_a_missing_bucket_is_an_error_within_the_timeout() -> None:
    slots, reader = joined(timeout=0.5)
    with pytest.raises(PushError, match="^collective: the transfer of a bucket failed: .*; push again$"):
        reader.read(bucket(0))
    for each in (reader, slots):
        each.close()


def test_a_process_that_hangs_is_given_up_within_the_timeout() -> None:
    slots, reader = joined(timeout=0.5)
    receiving_process(ME).suspend()
    with pytest.raises(PushError, match="^collective: the transfer of a bucket failed: no data for 0.5 s; push again$"):
        reader.read(bucket(0))
    for each in (reader, slots):
        each.close()


@pytest.mark.parametrize("cause", ["timeout", "closed"])
def test_a_store_that_stops_answering_is_given_up(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    monkeypatch.setattr(gloo_reader_module, "STORE_SECONDS", 0.1 if cause == "timeout" else SECONDS)
    with silent_store() as store:
        words = {"timeout": "cannot reach the store at .*: no answer", "closed": "the push was closed"}[cause]
        with pytest.raises(PushError, match=f"^collective: {words}; push again$"):
            GlooReader(source_at(store), PUSH_ID, DAY, DAY, lambda: cause == "closed" and len(descendants(ME)) == 3)


def test_a_system_without_free_processes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(gloo_reader_module, "_fork_server", gloo_reader_module._ForkServer())
    monkeypatch.setattr(subprocess, "Popen", popen)
    with (
        silent_store() as store,
        pytest.raises(PushError, match="cannot start the receiving process: Resource temporarily unavailable; free"),
    ):
        GlooReader(source_at(store), PUSH_ID, DAY, DAY, lambda: False)


def test_the_fork_server_imports_only_torch() -> None:
    code = "import sys, trueroll.weight_sync.transports.fork_server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=Path("/"))
    found = {
        name for name in done.stdout.split() if name.split(".")[0] in ("trueroll", "pydantic", "zmq", "transformers")
    }
    assert found == {
        "trueroll",
        "trueroll.weight_sync",
        "trueroll.weight_sync.transports",
        "trueroll.weight_sync.transports.gloo",
        "trueroll.weight_sync.transports.fork_server",
    }
