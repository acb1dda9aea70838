"""docs/map.md names every file that a request and a push pass through."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import trueroll
from trueroll.engine.config import EngineConfig
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine
from trueroll.rollout.worker.worker import Worker

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"


class Tracer:
    """Records the files of trueroll in which functions are called, on this thread and on all threads started later."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: object, event: str, arg: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        module = frame.f_globals.get("__name__", "")  # type: ignore[attr-defined]
        if event == "call" and module.startswith("trueroll.") and not code.co_filename.startswith("<"):
            self.files.add(module.removeprefix("trueroll.").replace(".", "/") + ".py")

    def of(self, call: Callable[[], object]) -> set[str]:
        """Return the files that a call passes through. Waits until no new file appears."""
        self.files = set()
        call()
        before = -1
        while len(self.files) != before:
            before = len(self.files)
            time.sleep(0.3)
        return {"rollout/trueroll/errors.py" if file == "errors.py" else file for file in self.files}


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer, before = Tracer(), sys.getprofile()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    yield tracer
    threading.setprofile(None)  # type: ignore[arg-type]
    sys.setprofile(before)


@contextmanager
def worker_of(model: Path) -> Iterator[Worker]:
    """A worker on a traced thread."""
    is_ready = threading.Event()
    config = EngineConfig(model=str(model), num_blocks=64, backend="cpu", num_threads=1)
    worker = Worker(WorkerConfig(), lambda: load_engine(config), lambda info: is_ready.set())
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert is_ready.wait(60)
    yield worker
    worker.drain()
    thread.join(30)
    assert not thread.is_alive()


def named(section: str) -> set[str]:
    """Return the files that are named in the text of a section of the page."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))


def test_every_file_that_a_request_or_a_push_passes_is_named(tiny_llama: Path, tracer: Tracer) -> None:
    model, params = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), SamplingParams(max_tokens=2)
    with (
        worker_of(tiny_llama) as worker,
        RolloutClient(worker.address) as client,
        WeightPublisher("shared") as publisher,
    ):
        client.generate([[1, 2, 3]], params)
        request = tracer.of(lambda: client.generate([list(range(3, 43))], params))
        publisher.connect([worker.address])
        tracer.of(lambda: publisher.push(model, version=1))
        push = tracer.of(lambda: publisher.push(model, version=2))
    assert "engine/running/sampler.py" in request and "weight_sync/worker/assembly.py" in push, "the premise"
    assert request <= named("A request"), sorted(request - named("A request"))
    assert push <= named("A request") | named("A push"), sorted(push - named("A request") - named("A push"))


def test_every_named_file_exists() -> None:
    missing = [file for name in ("A request", "A push") for file in named(name) if not (ROOT / file).exists()]
    assert not missing and Path(trueroll.__file__).exists()
