"""The backend `trueroll` of vLLM's trainer side, with a stand-in for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from serving import WorkerOnThread, serving
from vllm_stand_in import WeightTransferTrainerFactory, vllm_backend

from trueroll.errors import ConfigError, PushError
from trueroll.rollout import WeightPublisher

__all__ = ["vllm_backend"]


class Source:
    """vLLM's `WeightSource` over a dict. `read`: the names that were read, over all passes."""

    def __init__(self, value: float) -> None:
        self.value, self.read = value, list[str]()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in SHAPES.items():
            self.read.append(name)
            yield name, torch.full(shape, self.value)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(fake: FakeEngine) -> Iterator[WorkerOnThread]:
    with serving(fake) as worker:
        yield worker


@pytest.fixture
def publisher(worker: WorkerOnThread) -> Iterator[WeightPublisher]:
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        yield publisher


def served(fake: FakeEngine) -> tuple[int, set[float]]:
    values = {float(value) for tensor in fake.weights.live.values() for value in tensor.unique()}
    return fake.weight_version, values


def engine_of(backend: Any, source: Any, **fields: Any) -> Any:
    info = backend.TruerollInitInfo(**fields)
    return WeightTransferTrainerFactory.trainer_init(info, client=None, source=source)


def test_each_round_pushes_the_next_version(vllm_backend: Any, fake: FakeEngine, publisher: WeightPublisher) -> None:
    source = Source(1.0)
    engine = engine_of(vllm_backend, source, rank=0, publisher=publisher, version=3)
    assert served(fake) == (3, {0.0})
    for version in (4, 5, 6):
        source.value = float(version)
        engine.send_weights()
        assert served(fake) == (version, {float(version)}) and engine.version == version
    assert source.read == [*SHAPES] * 3, "each round reads the source once, because reading may gather shards"
    engine.shutdown()


def test_other_ranks_only_read_the_source(vllm_backend: Any, fake: FakeEngine, publisher: WeightPublisher) -> None:
    source = Source(1.0)
    engine = engine_of(vllm_backend, source, rank=1, version=3)
    engine.send_weights()
    assert source.read == [*SHAPES] and engine.version == 4 and served(fake) == (3, {0.0})


def test_a_refused_push_reads_the_source_to_its_end(
    vllm_backend: Any, fake: FakeEngine, publisher: WeightPublisher
) -> None:
    source = Source(1.0)
    engine = engine_of(vllm_backend, source, rank=0, publisher=publisher, version=2)
    with pytest.raises(PushError, match="version 3 is not newer"):
        engine.send_weights()
    assert source.read == [*SHAPES] and engine.version == 2 and served(fake) == (3, {0.0})


def test_what_is_missing_is_named(vllm_backend: Any, publisher: WeightPublisher) -> None:
    with pytest.raises(ConfigError, match="source: is missing"):
        engine_of(vllm_backend, None, rank=0, publisher=publisher)
    with pytest.raises(ConfigError, match="publisher: is missing on rank 0"):
        engine_of(vllm_backend, Source(1.0), rank=0)
