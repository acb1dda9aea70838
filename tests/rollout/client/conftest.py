"""A client, connected to a worker with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from serving import WorkerOnThread, serving

from trueroll.rollout import RolloutClient


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[WorkerOnThread]:
    with serving(engine, max_message_bytes=4096) as running:
        yield running


@pytest.fixture
def client(worker: WorkerOnThread) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as client:
        yield client
