"""Pushes between separate processes: trainer and workers, and trainers with several ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES
from matrix import thinned
from serving import fake_process

from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess
from trueroll.weight_sync.payload.manifest import checksum
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.trainer import sender as sender_module

TRANSPORTS = ("shared", "collective", "disk")
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

sender_module.BUCKET_BYTES = dict(shared=256, collective=256)
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
