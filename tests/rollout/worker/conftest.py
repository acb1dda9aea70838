"""A worker with a fake engine, and a plain client of the worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from serving import RawClient, WorkerOnThread, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[WorkerOnThread]:
    with serving(engine) as running:
        yield running
    assert running.error is None


@pytest.fixture
def raw(worker: WorkerOnThread) -> Iterator[RawClient]:
    with RawClient(worker.address) as client:
        yield client
