"""Pushes of weights from GPU to GPU, by CUDA IPC on one GPU and by NCCL between two GPUs. Every bit arrives, and no
memory leaks.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import make_tiny_model
from trueroll.errors import ConfigError, PushError
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker
from trueroll.weight_sync.payload.tensors import word_sum
from trueroll.weight_sync.trainer import sender as sender_module

from .push_worker import checksums_of, start_worker, trainer_tensors

SECONDS = 60.0
SHORT = 3.0
"""Seconds. Timeout of pushes that must fail, in seconds. Tests wait for this timeout."""
pytestmark = pytest.mark.usefixtures("gpu")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that torch can use")
LEAK = 2 * sender_module.GPU_BUCKET_BYTES
"""Bytes that a push would leak if its buckets were not freed."""
TRAINER = Path(__file__).with_name("push_trainer.py")


def assert_serves(worker: WorkerProcess, version: int, seed: int) -> None:
    with RolloutClient(worker.address, timeout=SECONDS) as client:
        assert client.health().weight_version == version
        assert client.stats().engine["checksums"] == checksums_of(trainer_tensors(seed, "cuda:0"))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


def free_memory() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


def publisher_to(worker: WorkerProcess, transport: Any, timeout: float = SECONDS) -> WeightPublisher:
    publisher = WeightPublisher(transport, timeout=timeout)
    publisher.connect([worker.address])
    return publisher


def push_twice(worker: WorkerProcess, publisher: WeightPublisher) -> int:
    """Push versions 1 and 2, and return the free bytes afterwards. torch keeps the memory that it allocates during
    these pushes.
    """
    for version in (1, 2):
        publisher.push(trainer_tensors(version, "cuda:0"), version)
        assert_serves(worker, version, version)
    return free_memory()


def kill_a_trainer_in_its_push(worker: WorkerProcess, transport: str) -> None:
    command = [sys.executable, str(TRAINER), worker.address, transport, "cuda:0", str(SHORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "held\n"
        with RolloutClient(worker.address, timeout=SECONDS) as client:
            wait_until(lambda: staged_bytes(client) > 0)
            trainer.kill()
            assert trainer.wait() == -signal.SIGKILL
            wait_until(lambda: client.health().push is None)


def staged_bytes(client: RolloutClient) -> int:
    progress = client.health().push
    assert progress is not None
    return progress.bytes_staged


def killing(worker: WorkerProcess, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors. Kill the worker after the first tensor, which is larger than a bucket."""
    for name, tensor in tensors.items():
        if name == "layer.weight":
            worker.kill()
        yield name, tensor


@pytest.mark.parametrize("size", [0, 7, 64, 2**24 + 5, 2**25])
def test_the_word_sum_is_that_of_the_cpu(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    assert word_sum(data) == word_sum(data.cpu())


def test_by_cuda_ipc_every_bit_arrives_and_all_memory_comes_back(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, str], None]
) -> None:
    with start_worker("cuda:0") as worker, publisher_to(worker, "shared") as publisher:
        monkeypatch.setattr(sender_module, "SharedSlots", None)  # only a push through host memory would need this
        before = push_twice(worker, publisher)
        for version in range(3, 7):
            result = publisher.push(trainer_tensors(version, "cuda:0"), version)
            assert_serves(worker, version, version)
            wait_until(lambda: before - free_memory() < LEAK)
    speed = result.num_bytes / result.total_seconds / 1e9
    record_property("found", f"{result.num_bytes} bytes at {speed:.1f} GB/s, pause {result.pause_seconds * 1e3:.1f} ms")


def test_by_cuda_ipc_a_failed_push_gives_its_memory_back() -> None:
    with start_worker("cuda:0") as worker, publisher_to(worker, "shared") as publisher:
        wrong = trainer_tensors(3, "cuda:0")
        wrong["more"] = wrong.pop("last")
        before = push_twice(worker, publisher)
        for _ in range(3):
            with pytest.raises(PushError, match="more: unknown"):
                publisher.push(iter(wrong.items()), 3)
            wait_until(lambda: before - free_memory() < LEAK)
        assert_serves(worker, 2, 2)


def test_by_cuda_ipc_a_killed_trainer_harms_nobody() -> None:
    with start_worker("cuda:0") as worker, publisher_to(worker, "shared") as publisher:
        before = push_twice(worker, publisher)
        kill_a_trainer_in_its_push(worker, "shared")
        assert_serves(worker, 2, 2)
        wait_until(lambda: before - free_memory() < LEAK)
        publisher.push(trainer_tensors(3, "cuda:0"), 3)
        assert_serves(worker, 3, 3)


def test_by_cuda_ipc_a_killed_worker_is_an_error_and_its_successor_gets_the_next_push() -> None:
    first, second = trainer_tensors(1, "cuda:0"), trainer_tensors(2, "cuda:0")
    before = free_memory()
    with start_worker("cuda:0") as worker, publisher_to(worker, "shared", SHORT) as publisher:
        publisher.push(first, 1)
        with pytest.raises(PushError, match=f"worker {worker.address} failed"):
            publisher.push(killing(worker, second), 2)
        wait_until(lambda: before - free_memory() < LEAK)
        with start_worker("cuda:0") as successor:
            publisher.connect([successor.address])
            publisher.push(trainer_tensors(3, "cuda:0"), 3)
            assert_serves(successor, 3, 3)


def test_on_one_gpu_collective_is_refused() -> None:
    with start_worker("cuda:0") as worker, publisher_to(worker, "collective") as publisher:
        with pytest.raises(ConfigError, match="needs a GPU of its own; push by 'shared'"):
            publisher.push(trainer_tensors(1, "cuda:0"), 1)


@pytest.mark.parametrize(("trainer", "worker"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_where_one_side_is_on_a_cpu_host_memory_is_used(transport: str, trainer: str, worker: str) -> None:
    with start_worker(worker) as process, publisher_to(process, transport) as publisher:
        publisher.push(trainer_tensors(1, trainer), 1)
        assert_serves(process, 1, 1)


def test_an_engine_on_the_gpu_generates_as_if_it_had_loaded_what_was_pushed(tmp_path: Path) -> None:
    old = make_tiny_model("llama", tmp_path / "old")
    shutil.copytree(old, tmp_path / "new")
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(old / "model.safetensors").items()}
    save_file(tensors, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = dict(device="cuda", backend="triton", dtype="bfloat16", num_blocks=64)
    params = SamplingParams(n=4, max_tokens=24, seed=5)
    generated = []
    for name in ("new", "old"):
        with launch_worker(str(tmp_path / name), **settings) as worker:
            with RolloutClient(worker.address, timeout=SECONDS) as client, publisher_to(worker, "shared") as publisher:
                if name == "old":
                    before = client.generate([[1, 20, 30, 40]], params)
                    publisher.push({key: tensor.to("cuda") for key, tensor in tensors.items()}, 1)
                    assert bits_of(before) != generated[0], "premise: the weights matter"
                generated.append(bits_of(client.generate([[1, 20, 30, 40]], params)))
    assert generated[0] == generated[1]


def bits_of(groups: list[Any]) -> list[tuple[tuple[int, ...], bytes]]:
    samples = [sample for group in groups for sample in group.samples]
    assert samples and all(sample.logprobs is not None for sample in samples)
    return [(tuple(sample.token_ids), sample.logprobs.tobytes()) for sample in samples]


@NEEDS_TWO
def test_by_nccl_every_bit_arrives_and_all_memory_comes_back() -> None:
    with start_worker("cuda:1") as worker, publisher_to(worker, "collective") as publisher:
        before = push_twice(worker, publisher)
        for version in range(3, 7):
            publisher.push(trainer_tensors(version, "cuda:0"), version)
            assert_serves(worker, version, version)
        wait_until(lambda: before - free_memory() < LEAK)


@NEEDS_TWO
def test_by_nccl_a_killed_trainer_harms_nobody() -> None:
    with start_worker("cuda:1") as worker, publisher_to(worker, "collective") as publisher:
        publisher.push(trainer_tensors(1, "cuda:0"), 1)
        kill_a_trainer_in_its_push(worker, "collective")
        assert_serves(worker, 1, 1)
        publisher.push(trainer_tensors(2, "cuda:0"), 2)
        assert_serves(worker, 2, 2)


@NEEDS_TWO
def test_by_nccl_a_killed_worker_is_an_error_and_its_successor_gets_the_next_push() -> None:
    with start_worker("cuda:1") as worker, publisher_to(worker, "collective", SHORT) as publisher:
        publisher.push(trainer_tensors(1, "cuda:0"), 1)
        with pytest.raises(PushError, match=f"worker {worker.address} failed"):
            publisher.push(killing(worker, trainer_tensors(2, "cuda:0")), 2)
    with start_worker("cuda:1") as successor, publisher_to(successor, "collective") as publisher:
        publisher.push(trainer_tensors(3, "cuda:0"), 3)
        assert_serves(successor, 3, 3)
