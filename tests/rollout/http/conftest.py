"""Fixtures: a worker with a tiny chat model, and a front end and a client of the worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_fronts import CHAT_TEMPLATE, Front, front_end

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
