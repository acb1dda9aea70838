"""Pushes between processes of their own: trainer and workers, trainers of several ranks, processes that are killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trueroll.rollout import RolloutClient
from trueroll.rollout.errors import PushError
from trueroll.weight_sync import WeightPublisher
from trueroll.weight_sync.manifest import checksum
from trueroll.weight_sync.tensors import raw_bytes

from .fake_worker import FakeWeights, FakeWorker

HERE = Path(__file__).parent
SHAPES = {"embed.weight": (512, 64), "layer.weight": (100, 128), "norm.weight": (64,)}
TRANSPORTS = ("shared", "collective", "disk")
SECONDS = 60


def trainer_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(raw_bytes(tensor.to(torch.bfloat16))) for name, tensor in tensors.items()}


@contextmanager
def worker_process(address: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "fake_worker.py"), address, json.dumps(SHAPES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def served_by(address: str) -> tuple[int | None, dict[str, Any] | None]:
    with RolloutClient(address, timeout=SECONDS) as client:
        health = client.health()
    return health.weight_version, health.engine


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_in_other_processes_serve_what_was_pushed(tmp_path: Path, transport: Any) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    folder = tmp_path / "pushes" if transport == "disk" else None
    with worker_process(addresses[0]), worker_process(addresses[1]):
        with WeightPublisher(transport, folder=folder, timeout=SECONDS, bucket_bytes=8192) as publisher:
            publisher.connect(addresses)
            for version in (1, 2):
                publisher.push(trainer_tensors(version), version)
                for address in addresses:
                    assert served_by(address) == (version, checksums(trainer_tensors(version)))


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_dies_in_a_push_stops_nobody(tmp_path: Path, transport: Any, sig: signal.Signals) -> None:
    """One of two is killed, or hangs, between two buckets (on disk: before it is told where they are)."""
    addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    folder = tmp_path / "pushes" if transport == "disk" else None
    struck = []

    def tensors_with_a_blow(process: subprocess.Popen[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in trainer_tensors(2).items():
            yield name, tensor
            if not struck:
                process.send_signal(sig)
                struck.append(name)

    with worker_process(addresses[0]), worker_process(addresses[1]) as victim:
        with WeightPublisher(transport, folder=folder, timeout=2.0, bucket_bytes=8192) as publisher:
            publisher.connect(addresses)
            publisher.push(trainer_tensors(1), 1)
            with pytest.raises(PushError) as error:
                publisher.push(tensors_with_a_blow(victim), 2)
            assert struck
            assert f"{addresses[0]} serves version 1" in str(error.value)
            assert served_by(addresses[0]) == (1, checksums(trainer_tensors(1)))
            publisher.connect(addresses[:1])
            publisher.push(trainer_tensors(3), 3)
            assert served_by(addresses[0]) == (3, checksums(trainer_tensors(3)))


TRAINER = """
import sys, time, torch
from trueroll.weight_sync import WeightPublisher
transport, folder, *addresses = sys.argv[1:]

def tensors():
    yield "embed.weight", torch.ones(512, 64)
    print("under way", flush=True)
    time.sleep(600)

with WeightPublisher(transport, folder=folder or None, timeout=2.0, bucket_bytes=8192) as publisher:
    publisher.connect(addresses)
    publisher.push(tensors(), 5)
"""


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_a_trainer_that_dies_in_a_push_frees_the_workers(tmp_path: Path, transport: Any) -> None:
    workers = [FakeWorker(f"ipc://{tmp_path}/{name}", FakeWeights(SHAPES)) for name in "ab"]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    addresses = [worker.address for worker in workers]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, transport, "", *addresses], stdout=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stdout.readline() == b"under way\n"
    receivers = push_threads()
    assert len(receivers) == 2  # premise: both have begun
    assert all("stage_bucket" in worker.calls for worker in workers)
    trainer.kill()
    trainer.wait()
    for receiver in receivers:
        receiver.join(SECONDS)
        assert not receiver.is_alive()
    with WeightPublisher(transport, timeout=SECONDS) as publisher:  # the trainer comes back
        publisher.connect(addresses)
        result = publisher.push(trainer_tensors(6), 6)
    for worker, thread in zip(workers, threads, strict=True):
        assert (worker.version, worker.push_id) == (6, result.push_id)
        assert checksums(worker.weights.live) == checksums(trainer_tensors(6))
        worker.end()
        thread.join(SECONDS)


def push_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("push-")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


RANK = """
import json, os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trueroll.rollout.errors import PushError
from trueroll.weight_sync import WeightPublisher

rank, port, transport, folder, address, shapes = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))

def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    for name, shape in json.loads(shapes).items():
        whole = torch.randn(shape, generator=generator)
        placement = Replicate() if name == "norm.weight" else Shard(0)
        yield name, distribute_tensor(whole, mesh, [placement])

with WeightPublisher(transport, folder=folder or None, timeout=5.0, bucket_bytes=8192) as publisher:
    if rank == "0":
        publisher.connect([address])
    result = publisher.push(tensors(1), 1)
    print("pushed", result.push_id, flush=True)
    result = publisher.push(dict(tensors(2)), 2)
    print("pushed", result.push_id, flush=True)
    for make in (lambda: dict(tensors(3)) | {"extra": torch.ones(3)}, lambda: (p for p in [*tensors(3)][:2])):
        try:
            publisher.push(make(), 3)
        except PushError as error:
            print("refused", error, flush=True)
    sys.stdin.readline()
    try:
        publisher.push(tensors(4), 4)
    except PushError as error:
        print("refused", error, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sharded_tensors_are_gathered_and_every_rank_learns_the_outcome(tmp_path: Path, transport: str) -> None:
    address = f"ipc://{tmp_path}/worker"
    folder = str(tmp_path / "pushes") if transport == "disk" else ""
    with worker_process(address) as worker:
        arguments = [str(free_port()), transport, folder, address, json.dumps(SHAPES)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        first = [rank.stdout.readline() for rank in ranks if rank.stdout]
        second = [rank.stdout.readline() for rank in ranks if rank.stdout]
        assert first[0] == first[1] != second[0] == second[1] and first[0].startswith("pushed")
        unknown = [rank.stdout.readline() for rank in ranks if rank.stdout]
        missing = [rank.stdout.readline() for rank in ranks if rank.stdout]
        assert all(line.startswith("refused") and "extra: unknown" in line for line in unknown)
        assert all(line.startswith("refused") and "missing are norm.weight" in line for line in missing)
        assert served_by(address) == (2, checksums(trainer_tensors(2)))
        worker.kill()
        worker.wait()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        outcomes = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        assert all(text.startswith("refused") and f"worker {address} failed" in text for text in outcomes)
        assert [rank.returncode for rank in ranks] == [0, 0]
