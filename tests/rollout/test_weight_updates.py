"""Pushes to a real worker process, and its sleeps. Afterwards, samples have the same bits as samples of a worker that
was started from the pushed checkpoint, whatever was cached before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from machines import lends_huge_pages
from proofs import proves
from safetensors.torch import load_file, save_file

from tiny import make_tiny_model
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker

PROMPTS = [[*range(3, 90), 200 + i] for i in range(4)]
PARAMS = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = dict(num_blocks=256, device="cpu")
Bits = list[tuple[tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def old(forked_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("versions") / "old", dtype="bfloat16")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which about every tenth weight differs."""
    folder = make_tiny_model("qwen2", tmp_path_factory.mktemp("versions") / "new", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[::10] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(new: Path) -> Bits:
    """The bits of samples from a worker that was started from the new checkpoint."""
    with launch_worker(str(new), **SETTINGS) as worker, RolloutClient(worker.address) as client:
        return generate(client)[0]


@pytest.fixture
def worker(old: Path) -> Iterator[WorkerProcess]:
    with launch_worker(str(old), **SETTINGS) as worker:
        yield worker


def generate(client: RolloutClient) -> tuple[Bits, set[int], int]:
    """Return the bits of the samples, the weight versions, and the number of cached prompt tokens."""
    samples = [sample for group in client.generate(PROMPTS, PARAMS, seed=5) for sample in group.samples]
    assert all(sample.logprobs is not None for sample in samples)
    bits = [(tuple(sample.token_ids), np.asarray(sample.logprobs).view(np.int32).tobytes()) for sample in samples]
    versions = {span.version for sample in samples for span in sample.weight_versions}
    return bits, versions, sum(sample.num_cached_tokens for sample in samples)


@proves("pushes", family="qwen2", backend="cpu", dtype="bfloat16")
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(transport="collective"),
        dict(transport="disk"),
        dict(transport="delta"),
        dict(sparse=True),
        dict(in_place=True),
    ],
    ids=["shared", "collective", "disk", "delta", "sparse", "in_place"],
)
def test_a_push_gives_the_bits_of_a_worker_started_with_these_weights(
    worker: WorkerProcess, old: Path, new: Path, expected: Bits, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if settings.get("transport") in ("disk", "delta"):
        settings = settings | {"folder": tmp_path}
    with RolloutClient(worker.address) as client, WeightPublisher(**settings) as publisher:
        publisher.connect([worker.address])
        publisher.push(load_file(old / "model.safetensors"), 1)
        before, versions, cold = generate(client)
        again, _, hot = generate(client)
        assert again == before != expected and versions == {1} and hot > cold, "premise: prefixes are cached"
        result = publisher.push(load_file(new / "model.safetensors"), 2)
        assert result.is_sparse == ("sparse" in settings or settings.get("transport") == "delta")
        after, versions, cached = generate(client)
        assert after == expected and versions == {2} and cached == cold


@lends_huge_pages
def test_workers_of_one_machine_share_pushed_weights_and_each_outlives_the_others(
    old: Path, new: Path, expected: Bits
) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(launch_worker(str(old), **SETTINGS)) for _ in range(3)]
        clients = [stack.enter_context(RolloutClient(worker.address)) for worker in workers]
        publisher = stack.enter_context(WeightPublisher())
        publisher.connect([worker.address for worker in workers])
        for version, folder in ((1, old), (2, new)):
            publisher.push(load_file(folder / "model.safetensors"), version)
            shared = [shared_memory(worker) for worker in workers]
            assert len(shared[0]) == 1 and shared == [shared[0]] * 3, "the memory of the old version is gone"
        workers[0].kill()
        assert [generate(client)[0] for client in clients[1:]] == [expected] * 2
        assert clients[1].sleep(level=2).state == "asleep" and not shared_memory(workers[1])
        assert generate(clients[2])[0] == expected and shared_memory(workers[2]) == shared[0]


def shared_memory(worker: WorkerProcess) -> set[str]:
    """Return the inode numbers of the unnamed files that contain the worker's weights."""
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    return set(re.findall(r"(\d+) +/memfd:trueroll-weights", maps))


def test_a_sleep_returns_memory_and_a_push_brings_the_weights_back(
    worker: WorkerProcess, new: Path, expected: Bits
) -> None:
    process = psutil.Process(worker.pid)
    with RolloutClient(worker.address) as client, WeightPublisher() as publisher:
        publisher.connect([worker.address])
        before = generate(client)[0]
        assert before != expected
        awake = client.health().memory
        assert awake["weights"] > 0 and awake["kv_cache"] > 0
        resident = process.memory_info().rss
        assert client.sleep(level=2).state == "asleep"
        assert client.health().memory["weights"] == client.health().memory["kv_cache"] == 0
        assert process.memory_info().rss < resident
        assert client.wake_up(["weights"]).state == "waking"
        publisher.push(load_file(new / "model.safetensors"), 7)
        assert client.wake_up(["kv_cache"]).state == "ready"
        assert generate(client)[:2] == (expected, {7})
        assert client.sleep(level=1).state == "asleep" and client.wake_up().state == "ready"
        assert generate(client)[0] == expected
