"""Fixtures: a worker with a tiny chat model, its front end and its client, and a worker with a fake engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from http_fronts import CHAT_TEMPLATE, Front, front_end
from serving import WorkerOnThread, serving

from trueroll.rollout import RolloutClient, WorkerProcess, launch_worker


@pytest.fixture(scope="session")
def chat_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("models") / "chat")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def worker(chat_model: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    with launch_worker(str(chat_model), num_blocks=256, num_threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with front_end(worker.address, model_name="tiny") as running:
        yield running


@pytest.fixture(scope="module")
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as running:
        yield running


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def running(fake: FakeEngine) -> Iterator[WorkerOnThread]:
    """A worker in front of the fake engine."""
    with serving(fake) as worker:
        yield worker
