"""A worker that receives pushes through gloo. No trainer can harm the worker, the requests of other clients, or later
pushes.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from pushing import ask
from serving import RawClient, fake_process, serving
from weight_sync.transports.gloo_push import (
    DAY,
    SECONDS,
    descendants,
    held_by,
    receiving_process,
    silent_store,
    source_at,
    wait_until,
)

from trueroll.errors import ConfigError, PushError
from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess
from trueroll.rollout.config import WorkerConfig
from trueroll.weight_sync.payload.manifest import CollectiveSource, checksum
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.transports.collective import GroupSlots
from trueroll.weight_sync.transports.policy import PushPolicy


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with fake_process() as process:
        push(process)
        yield process


def push(worker: WorkerProcess) -> None:
    """Push the next version. The push must succeed."""
    with RolloutClient(worker.address, timeout=SECONDS) as client:
        version = (client.health().weight_version or 0) + 1
    with WeightPublisher("collective", timeout=SECONDS) as publisher:
        publisher.connect([worker.address])
        publisher.push(tensors(version), version)
    with RolloutClient(worker.address, timeout=SECONDS) as client:
        found = client.stats().engine["checksums"]
    assert found == {name: checksum(raw_bytes(tensor)) for name, tensor in tensors(version).items()}


@pytest.mark.parametrize(
    ("factor", "words"), [(2, "SIGABRT; does the trainer broadcast as many bytes"), (0.5, "corrupt")]
)
def test_a_broadcast_of_another_size_than_announced_fails_only_its_push(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, factor: float, words: str
) -> None:
    def send(self: GroupSlots, slot: int, num_bytes: int) -> None:
        data = torch.zeros(int(num_bytes * factor), dtype=torch.uint8)
        self._works[slot] = self._group.broadcast(data, 0, self._timeout)

    with RawClient(worker.address) as other:
        other.generate("running", max_tokens=400)
        with monkeypatch.context() as patch, WeightPublisher("collective", timeout=SECONDS) as publisher:
            patch.setattr(GroupSlots, "send", send)
            publisher.connect([worker.address])
            with pytest.raises(PushError, match=words):
                publisher.push(tensors(7), 7)
        assert other.receive_until("done", "error")[-1]["finish_reasons"] == {"length": 1}
    assert worker.exit_code is None
    push(worker)


def test_a_receiving_process_killed_during_a_push_does_not_end_the_worker(worker: WorkerProcess) -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        os.kill(receiving_process(psutil.Process(worker.pid)).pid, signal.SIGKILL)
        yield from tensors(8).items()

    with WeightPublisher("collective", timeout=SECONDS) as publisher:
        publisher.connect([worker.address])
        with pytest.raises(PushError, match=f"worker {worker.address} failed: collective: .*ended with SIGKILL"):
            publisher.push(pairs(), 8)
    assert worker.exit_code is None
    push(worker)


def begin_push(client: RawClient, source: CollectiveSource, **fields: Any) -> str:
    """Send a begin_push. Return its push id, which is also the message id."""
    push_id = secrets.token_hex(16)
    fields = dict(weight_version=9, dtype="float32", timeout=DAY, source=source.model_dump()) | fields
    client.send("begin_push", id=push_id, push_id=push_id, **fields)
    return push_id


def test_abandoned_pushes_leave_nothing_behind(worker: WorkerProcess) -> None:
    with silent_store() as store, RawClient(worker.address) as client:
        client.health()
        process = psutil.Process(worker.pid)
        wait_until(lambda: len(descendants(process)) == 1)
        before = held_by(process)
        began, push_ids = 0, []
        for number in range(150):
            push_ids.append(begin_push(client, source_at(store), in_place=number % 2 == 0, in_flight="drain"))
            if number % 30 == 0:
                wait_until(lambda: held_by(process)[2] >= before[2] + 2)
                began += 1
        for push_id in push_ids:
            client.send("abort_push", id=f"abort {push_id}", push_id=push_id)
        replies = [client.receive() for _ in range(300)]
        assert began == 5 and [reply["type"] for reply in replies].count("error") == 150
        wait_until(lambda: held_by(process) == before)
    push(worker)


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """A store that never answers.

    Its address 0.0.0.0 is always an address of this machine, but not a loopback address.
    """
    with socket.create_server(("0.0.0.0", 0)) as store:
        with socket.create_connection(store.getsockname()):
            store.accept()[0].close()
        yield store


def test_a_host_that_is_not_allowed_is_not_connected_to(worker: WorkerProcess, store: socket.socket) -> None:
    host = store.getsockname()[0]
    with RawClient(worker.address) as client:
        for backend in ("gloo", "nccl"):
            source = source_at(store).model_copy(update=dict(backend=backend))
            begin_push(client, source, timeout=SECONDS)
            reply = client.receive()
            assert reply["code"] == "push_failed" and host in reply["message"] and "push_hosts" in reply["message"]
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.accept()
        ask(client, "abort_push", push_id="0" * 32)


def test_a_host_that_the_worker_allows_is_connected_to(store: socket.socket) -> None:
    host = store.getsockname()[0]
    with serving(FakeEngine(), push_hosts=[host]) as running, RawClient(running.address) as client:
        begin_push(client, source_at(store))
        store.settimeout(SECONDS)
        store.accept()[0].close()


def test_the_receiving_process_ends_with_a_killed_worker() -> None:
    with fake_process() as worker, silent_store() as store, RawClient(worker.address) as client:
        begin_push(client, source_at(store))
        process = psutil.Process(worker.pid)
        wait_until(lambda: len(descendants(process)) == 3)
        all_of_them = descendants(process)
        worker.kill()
        wait_until(lambda: not any(each.is_running() for each in all_of_them))


# The policy.

HOSTS = ("10.0.0.0/8", "192.168.1.5", "fd00::/8", "trainer.lan", "172.16.3.4/24")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.9.9.9", "::1", "localhost", "10.1.2.3", "192.168.1.5", "fd12::1", "trainer.lan", "172.16.3.9"],
)
def test_a_host_that_is_allowed(host: str) -> None:
    PushPolicy(hosts=HOSTS).check_host(host, "relay")


@pytest.mark.parametrize(
    "host",
    [
        "11.1.2.3",
        "192.168.1.6",
        "fe80::1",
        "::ffff:10.1.2.3",
        "0.0.0.0",
        "::",
        "127.1",
        "10",
        "trainer.lan.evil",
        "",
        "x",
    ],
)
def test_a_host_that_is_not_allowed(host: str) -> None:
    with pytest.raises(PushError, match="not in its push_hosts; .*--push-hosts"):
        PushPolicy(hosts=HOSTS).check_host(host, "relay")


def test_without_hosts_loopback_is_allowed_and_nothing_else() -> None:
    PushPolicy().check_host("127.0.0.1", "relay")
    with pytest.raises(PushError):
        PushPolicy().check_host("10.1.2.3", "relay")


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0/8", "trainer.lan/24", "/", "fd00::/129", " 10.0.0.0/8"])
def test_an_invalid_network_is_refused_at_startup(entry: str) -> None:
    message = f"push_hosts: '{entry}' is not a valid network"
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(push_hosts=["10.0.0.0/8", entry])


def test_hosts_of_every_kind_are_accepted() -> None:
    assert WorkerConfig(push_hosts=[*HOSTS]).push_hosts == [*HOSTS]
