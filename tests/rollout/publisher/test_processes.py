"""Pushes between separate processes: trainer and workers, and trainers with several ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES
from forked import workers_are_forked
from matrix import thinned
from serving import fake_process

from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess
from trueroll.weight_sync.payload.manifest import checksum
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.trainer import sender as sender_module

TRANSPORTS = ("shared", "collective", "relay", "disk")
SECONDS = 60
BUCKET_BYTES = 256
"""Small buckets, so that a push takes several buckets."""


def trainer_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def assert_serves(worker: WorkerProcess, version: int) -> None:
    """Assert that the worker serves `trainer_tensors(version)`."""
    with RolloutClient(worker.address, timeout=SECONDS) as client:
        assert client.health().weight_version == version
        found = client.stats().engine["checksums"]
    assert found == {name: checksum(raw_bytes(tensor)) for name, tensor in trainer_tensors(version).items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@thinned(lambda transport: transport == "collective")
def test_workers_in_other_processes_serve_pushed_weights(
    tmp_path: Path, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", dict.fromkeys(TRANSPORTS, BUCKET_BYTES))
    folder = tmp_path / "pushes" if transport == "disk" else None
    with fake_process() as first, fake_process() as second:
        with WeightPublisher(transport, folder=folder, timeout=SECONDS) as publisher:
            publisher.connect([first.address, second.address])
            for version in (1, 2):
                publisher.push(trainer_tensors(version), version)
                assert_serves(first, version)
                assert_serves(second, version)


def test_workers_killed_during_a_relayed_push_are_left_out_and_the_rest_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First the middle of a chain is killed, then the end of the chain."""
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", {"relay": BUCKET_BYTES})
    with workers_are_forked(), ExitStack() as stack:
        workers = [stack.enter_context(fake_process()) for _ in range(3)]

        def killing(worker: WorkerProcess, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
            *first, last = trainer_tensors(seed).items()
            yield from first
            with RolloutClient(worker.address, timeout=SECONDS) as client:
                while not ((push := client.health().push) and push.bytes_staged):
                    time.sleep(0.01)
            worker.kill()
            yield last

        with WeightPublisher("relay", timeout=SECONDS, on_lost="skip") as publisher:
            publisher.connect([worker.address for worker in workers])
            first, middle, last = workers
            result = publisher.push(killing(middle, 1), 1)
            assert result.left_out == [middle.address] and result.total_seconds < SECONDS / 2
            for worker in (first, last):
                assert_serves(worker, 1)
            publisher.connect([first.address, last.address])
            assert publisher.push(killing(last, 2), 2).left_out == [last.address]
            assert_serves(first, 2)
            assert publisher.stale_workers() == [last.address]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


RANK = """
import dataclasses, json, os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trueroll.errors import PushError
from trueroll.rollout import WeightPublisher
from trueroll.weight_sync.trainer import sender as sender_module

sender_module.BUCKET_BYTES = dict(shared=256, collective=256, relay=256)
rank, port, transport, folder, address, shapes = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))

def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    for name, shape in json.loads(shapes).items():
        whole = torch.randn(shape, generator=generator)
        placement = Replicate() if name == "b" else Shard(0)
        yield name, distribute_tensor(whole, mesh, [placement])

with WeightPublisher(transport, folder=folder or None, timeout=60.0) as publisher:
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
    publisher._settings = dataclasses.replace(publisher._settings, timeout=2.0)  # the push below takes that long
    try:
        publisher.push(tensors(4), 4)
    except PushError as error:
        print("refused", error, flush=True)
dist.destroy_process_group()
os._exit(0)  # DTensor's caches keep gloo's threads alive, which can abort a normal exit of the interpreter
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@thinned(lambda transport: transport == "shared")
def test_sharded_tensors_are_gathered_and_every_rank_gets_the_result(tmp_path: Path, transport: str) -> None:
    folder = str(tmp_path / "pushes") if transport == "disk" else ""
    with fake_process() as worker:
        arguments = [str(free_port()), transport, folder, worker.address, json.dumps(SHAPES)]
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
        assert all(line.startswith("refused") and "missing: embed" in line for line in missing)
        assert_serves(worker, 2)
        worker.kill()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        outcomes = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        assert all(text.startswith("refused") and f"worker {worker.address} failed" in text for text in outcomes)
        assert [rank.returncode for rank in ranks] == [0, 0]
