"""slime's pushes: a pull stages, an update commits; refused pushes leave the old weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from http_fronts import Front, front_end
from serving import serving
from slime_client import SlimeClient

from trueroll.errors import PushError
from trueroll.rollout import WeightPublisher

LOCAL, SOURCE = "/nvme/checkpoint", "/shared/deltas"


@dataclass
class Stage:
    """A stand-in for pulls. Version v consists of tensors filled with v. `calls`: what was called."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    refuses: bool = False

    def pull(self, publisher: WeightPublisher, source: str, version: int) -> Staged:
        self.calls.append(("pull", source, version))
        if self.refuses:
            raise PushError(f"version {version} has another base")
        return Staged(self, publisher, version)


@dataclass
class Staged:
    stage: Stage
    publisher: WeightPublisher
    version: int

    def commit(self) -> object:
        self.stage.calls.append(("commit", self.version))
        if self.stage.refuses:
            raise PushError("a worker is gone")
        tensors = {name: torch.full(shape, float(self.version)) for name, shape in SHAPES.items()}
        return self.publisher.push(tensors, self.version)

    def abort(self) -> None:
        self.stage.calls.append(("abort", self.version))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage, close = Stage(), WeightPublisher.close

    def closing(publisher: WeightPublisher) -> None:
        stage.calls.append(("close",))
        close(publisher)

    pull = lambda publisher, source, version: stage.pull(publisher, source, version)  # noqa: E731
    monkeypatch.setattr(WeightPublisher, "pull", pull, raising=False)
    monkeypatch.setattr(WeightPublisher, "close", closing)
    return stage


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def front(fake: FakeEngine, chat_model: Path, stage: Stage) -> Iterator[Front]:
    with serving(fake) as worker, front_end(worker.address, tokenizer=str(chat_model), sglang=True) as front:
        yield front


@pytest.fixture
def slime(front: Front) -> Iterator[SlimeClient]:
    with SlimeClient(front.url, local=LOCAL, source=SOURCE) as client:
        yield client


def served(fake: FakeEngine) -> set[float]:
    return {float(value) for tensor in fake.weights.live.values() for value in tensor.unique()}


def test_a_pull_stages_and_an_update_commits(slime: SlimeClient, fake: FakeEngine, stage: Stage) -> None:
    assert slime.version() == "3" and served(fake) == {0.0}
    slime.pull(4)
    assert slime.version() == "3" and served(fake) == {0.0} and stage.calls == [("pull", SOURCE, 4)]
    slime.pull(4)
    assert stage.calls == [("pull", SOURCE, 4)], "a repeated pull is a no-op"
    slime.push(4)
    assert slime.version() == "4" and served(fake) == {4.0}
    assert stage.calls == [("pull", SOURCE, 4), ("commit", 4), ("close",)]
    slime.update(LOCAL, 4)
    slime.pull(4)
    slime.update(LOCAL, 4)
    assert len(stage.calls) == 3, "the version is served"
    slime.push(5)
    told = slime.generate([1], dict(max_new_tokens=2))
    assert told["weight_version"] == "5" and served(fake) == {5.0}


def test_a_later_pull_replaces_an_earlier_one(slime: SlimeClient, fake: FakeEngine, stage: Stage) -> None:
    slime.pull(4)
    slime.pull(5)
    assert stage.calls == [("pull", SOURCE, 4), ("abort", 4), ("close",), ("pull", SOURCE, 5)]
    refused = _post(slime, "update_weights_from_disk", dict(model_path=LOCAL, weight_version="4"))
    assert refused["success"] is False and "version 5 was pulled (got 4)" in refused["message"]
    assert served(fake) == {0.0}
    slime.update(LOCAL, 5)
    assert served(fake) == {5.0}


def test_a_refused_pull_or_commit_leaves_the_old_weights(slime: SlimeClient, fake: FakeEngine, stage: Stage) -> None:
    stage.refuses = True
    refused = _post(slime, "pull_weights", dict(local_checkpoint_dir=LOCAL, source_dir=SOURCE, target_version=4))
    assert refused["success"] is False and refused["message"] == "version 4 has another base"
    assert refused["error"]["code"] == "push_failed"
    stage.refuses = False
    slime.pull(4)
    stage.refuses = True
    assert "a worker is gone" in _post(slime, "update_weights_from_disk", dict(model_path=LOCAL))["message"]
    assert stage.calls == [("pull", SOURCE, 4), ("close",), ("pull", SOURCE, 4), ("commit", 4), ("close",)]
    again = _post(slime, "update_weights_from_disk", dict(model_path=LOCAL))
    assert "has no weights that this server can read" in again["message"], "nothing is staged any more"
    assert slime.version() == "3" and served(fake) == {0.0}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(model_path="/x", weight_version="default"), "weight_version: must be a decimal number"),
        (dict(model_path="/x", weight_version=str(2**63)), "weight_version: must be a decimal number"),
        (dict(model_path="/x", load_format="flash_rl"), "load_format: 'flash_rl' is not supported"),
        (dict(model_path="/x", is_async=True), "is_async: True is not supported"),
        (dict(model_path="/x", manifest={}), "manifest: a map of 0 is not supported"),
        (dict(model_path=7), "model_path"),
    ],
)
def test_refused_fields_of_an_update(slime: SlimeClient, fields: dict[str, Any], names: str) -> None:
    told = _post(slime, "update_weights_from_disk", fields)
    assert told["success"] is False and names in told["message"]


def test_the_end_of_the_front_end_drops_what_is_staged(fake: FakeEngine, chat_model: Path, stage: Stage) -> None:
    with serving(fake) as worker:
        with front_end(worker.address, tokenizer=str(chat_model), sglang=True) as front:
            with SlimeClient(front.url, local=LOCAL, source=SOURCE) as slime:
                slime.pull(4)
        assert stage.calls[1:] == [("abort", 4), ("close",)]


def _post(slime: SlimeClient, endpoint: str, fields: dict[str, Any]) -> Any:
    answer = slime._client.post(f"{slime.url}/{endpoint}", json=fields)
    assert answer.status_code in (400, 409)
    return answer.json()
