"""Worker processes that are killed and started again with the same `save_folder`. Samples have the same bits as before,
and trainers go on as if nothing had happened.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from adapters import adapt, change
from engine.checkpoints import read_tensors
from serving import wait_until

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.errors import ConfigError
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker
from trueroll.weight_sync.worker import saver
from trueroll.weight_sync.worker.adapters import served_checksums
from trueroll.weight_sync.worker.saved_folder import SavedFolder

PROMPTS = [[1, 20, 30, 40] * 6, [7]]
EXHAUSTIVE = pytest.mark.exhaustive
pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), dtype="bfloat16")


@contextmanager
def worker_of(model: Path, folder: Path, **settings: Any) -> Iterator[WorkerProcess]:
    sizes: dict[str, Any] = dict(device="cpu", num_blocks=64, num_threads=1)
    address = f"ipc://{folder}.socket"
    with launch_worker(str(model), address=address, save_folder=str(folder), **sizes, **settings) as worker:
        yield worker


def bits_of(worker: WorkerProcess) -> list[Any]:
    with RolloutClient(worker.address) as client:
        groups = client.generate(PROMPTS, SamplingParams(n=2, max_tokens=20), seed=5)
    return [(s.token_ids, np.asarray(s.logprobs).tobytes()) for group in groups for s in group.samples]


def checksums_of(worker: WorkerProcess) -> dict[str, int]:
    with RolloutClient(worker.address) as client:
        return dict(client.weight_checksums().checksums)


def wait_until_saved(worker: WorkerProcess, version: int) -> None:
    def is_saved() -> bool:
        saved = client.health().saved
        assert saved is not None and not saved.error
        return saved.weight_version == version

    with RolloutClient(worker.address) as client:
        wait_until(is_saved)


def kill(worker: WorkerProcess) -> None:
    children = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    assert worker.exit_code == -signal.SIGKILL and psutil.wait_procs(children, 20)[1] == []


@pytest.mark.parametrize(
    "ranks", [{}, pytest.param(dict(tensor_parallel_size=2, pipeline_parallel_size=2), marks=EXHAUSTIVE)]
)
def test_a_killed_worker_serves_the_last_push(model: Path, tmp_path: Path, ranks: dict[str, int]) -> None:
    tensors = read_tensors(model)
    for tensor in tensors.values():
        tensor.view(-1)[::3].mul_(1.1)
    with worker_of(model, tmp_path / "saved", **ranks) as worker, WeightPublisher(sparse=True) as publisher:
        checkpoint = bits_of(worker)
        publisher.connect([worker.address])
        publisher.push(tensors, 41)
        before = bits_of(worker), checksums_of(worker)
        assert before[0] != checkpoint
        wait_until_saved(worker, 41)
        kill(worker)
        with worker_of(model, tmp_path / "saved", **ranks) as again:
            with RolloutClient(again.address) as client:
                assert client.health().weight_version == 41
            assert (bits_of(again), checksums_of(again)) == before
            assert publisher.stale_workers() == []
            next(iter(tensors.values())).view(-1)[0] += 1
            assert publisher.push(tensors, 42).is_sparse, "the changes refer to the push that was saved"
            assert checksums_of(again) != before[1]


def has_written(thread: saver.Saver) -> bool:
    return not thread.state.is_writing


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_killed_worker_gets_adapters_alone_as_before(model: Path, tmp_path: Path, quantization: str) -> None:
    adapted, folder = adapt(model), tmp_path / "saved"
    settings = dict(quantization=quantization)
    with worker_of(model, folder, **settings) as worker, WeightPublisher() as publisher:
        publisher.connect([worker.address])
        for version in (1, 2):
            change(adapted, version)
            publisher.push(adapted, version, adapters=True)
            wait_until_saved(worker, version)
        [base] = (folder / "base").iterdir()
        assert base.name.startswith("version-1-"), "the second push did not write the base weights again"
        before = bits_of(worker)
        kill(worker)
    others = worker_of(model, tmp_path / "other", **settings)
    with worker_of(model, folder, **settings) as worker, others as other:
        assert bits_of(worker) == before != bits_of(other)
        with WeightPublisher() as publisher:
            publisher.connect([worker.address, other.address])
            change(adapted, 3)
            publisher.push(adapted, 3, adapters=True)
        assert checksums_of(worker) == checksums_of(other) and bits_of(worker) == bits_of(other)
        wait_until_saved(worker, 3)
        assert [*(folder / "base").iterdir()] == [base]


def test_a_folder_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    with worker_of(model, tmp_path / "saved") as worker, WeightPublisher() as publisher:
        publisher.connect([worker.address])
        publisher.push(read_tensors(model), 1)
        wait_until_saved(worker, 1)
        with pytest.raises(ConfigError, match="another worker uses"), worker_of(model, tmp_path / "saved"):
            pass
    moved = model.rename(model.with_name("moved"))
    try:
        with pytest.raises(ConfigError, match="saved has weights of"), worker_of(moved, tmp_path / "saved"):
            pass
    finally:
        moved.rename(model)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_5", pytest.param("bamba", marks=EXHAUSTIVE)])
def test_every_layout_of_weights_is_saved_in_chunks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(family, tmp_path / "model", dtype="bfloat16")
    settings: dict[str, Any] = dict(model=str(folder), device="cpu", num_blocks=16, num_threads=1)
    monkeypatch.setattr(saver, "CHUNK_BYTES", 1024)
    engine, other = Engine(EngineConfig(**settings)), Engine(EngineConfig(**settings))
    for weight in other.weights.tensors.values():
        weight.copy_(torch.zeros(weight.shape, dtype=weight.dtype))
    expected = served_checksums(engine.weights)
    assert served_checksums(other.weights) != expected
    for each in (engine, other):
        with closing(SavedFolder(str(tmp_path / "saved"))) as saved:
            thread = saver.Saver(saved, each.weights, str(folder), "cpu", lambda: None)
            thread.restore(each)
            thread.start()
            thread.save("0" * 32, 7)
            wait_until(partial(has_written, thread))
            thread.close()
            thread.join()
            assert thread.state.push is not None and not thread.state.error
    assert served_checksums(other.weights) == expected and other.weight_version == 7
