"""slime's pushes: a pull stages, an update commits; refused pushes leave the old weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from http_fronts import Front, front_end
from serving import WorkerOnThread, serving, stop_after_a_step, wait_until
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

    pull = lambda publisher, source, version, reads_chain: stage.pull(publisher, source, version)  # noqa: E731
    monkeypatch.setattr(WeightPublisher, "pull", pull)
    monkeypatch.setattr(WeightPublisher, "close", closing)
    return stage


@pytest.fixture
def front(running: WorkerOnThread, chat_model: Path, stage: Stage) -> Iterator[Front]:
    with front_end(running.address, tokenizer=str(chat_model), sglang=True) as front:
        yield front


@pytest.fixture
def slime(front: Front) -> Iterator[SlimeClient]:
    with SlimeClient(front.url, local=LOCAL, source=SOURCE) as client:
        yield client


def served(fake: FakeEngine) -> set[float]:
    return {float(value) for tensor in fake.weights.live.values() for value in tensor.unique()}


def test_a_pull_stages_and_an_update_commits(
    slime: SlimeClient, running: WorkerOnThread, fake: FakeEngine, stage: Stage
) -> None:
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
    with WeightPublisher("shared") as other:
        other.connect([running.address])
        other.push({name: torch.ones(shape) for name, shape in SHAPES.items()}, 7, allow_older=True)
    refused = _post(slime, "update_weights_from_disk", dict(model_path=LOCAL, weight_version="4"))
    assert "version 7 has replaced it" in refused["message"]
    slime.push(8)
    told = slime.generate([1], dict(max_new_tokens=2))
    assert told["weight_version"] == "8" and served(fake) == {8.0}


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
    assert f"no version is staged for '{LOCAL}' any more" in again["message"]
    assert slime.version() == "3" and served(fake) == {0.0}


def test_the_local_folder_of_a_failed_pull_is_never_served(
    slime: SlimeClient, fake: FakeEngine, stage: Stage, tmp_path: Path
) -> None:
    """slime's local folder may hold the checkpoint from which slime began."""
    with serving(FakeEngine()) as other, WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect([other.address])
        publisher.push({name: torch.ones(shape) for name, shape in SHAPES.items()}, 9)
    slime.local, stage.refuses = str(next(tmp_path.iterdir())), True
    _post(slime, "pull_weights", dict(local_checkpoint_dir=slime.local, source_dir=SOURCE, target_version=9))
    told = _post(slime, "update_weights_from_disk", dict(model_path=slime.local))
    assert told["success"] is False and "pull the version again" in told["message"]
    assert slime.version() == "3" and served(fake) == {0.0}


def test_a_pull_of_the_same_version_from_another_chain_replaces_the_first(slime: SlimeClient, stage: Stage) -> None:
    slime.pull(4)
    slime.source = "/shared/other"
    slime.pull(4)
    assert stage.calls == [("pull", SOURCE, 4), ("abort", 4), ("close",), ("pull", "/shared/other", 4)]


@pytest.mark.parametrize("source", ["http://169.254.169.254/x", "simplecache::s3://key:secret@bucket/run"])
def test_the_front_end_opens_no_url(slime: SlimeClient, stage: Stage, source: str) -> None:
    fields = dict(local_checkpoint_dir=LOCAL, source_dir=source, target_version=4)
    told = _post(slime, "pull_weights", fields)
    assert told["success"] is False and "source_dir: must be a folder, not a URL" in told["message"]
    assert stage.calls == [] and "secret" not in str(told)


def test_an_answer_marks_tokens_over_old_kv(slime: SlimeClient, running: WorkerOnThread, fake: FakeEngine) -> None:
    stop_after_a_step(fake)
    with ThreadPoolExecutor(1) as threads, WeightPublisher("shared", in_flight="keep") as publisher:
        asked = threads.submit(slime.generate, [1], dict(max_new_tokens=2))
        wait_until(lambda: not fake.flow.is_set())
        publisher.connect([running.address])
        publisher.push({name: torch.ones(shape) for name, shape in SHAPES.items()}, 4)
        fake.flow.set()
        meta = asked.result()["meta"]
    assert meta["old_kv"] == [{"version": "3", "start": 1, "end": 2}] and meta["weight_version"] == "4"


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


def test_areal_pushes_a_folder_and_goes_on_with_an_interrupted_sample(
    front: Front, fake: FakeEngine, tmp_path: Path
) -> None:
    """AReaL 1.0.4: the requests of `sglang_remote.py`, `build_generation_request`, `get_pause_request`,
    `build_disk_weight_update_requests` and `get_resume_request`, in the loop of `remote_inf_engine.py`, `agenerate`.
    """
    with serving(FakeEngine()) as other, WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect([other.address])
        publisher.push({name: torch.ones(shape) for name, shape in SHAPES.items()}, 9)
    sampling: dict[str, Any] = dict(top_p=1.0, top_k=10**8, max_new_tokens=6, temperature=1.0, stop_token_ids=[])
    sampling |= dict(ignore_eos=False, skip_special_tokens=True, frequency_penalty=0.0)
    body: dict[str, Any] = dict(input_ids=[1], image_data=None, sampling_params=sampling, return_logprob=True)
    body["stream"] = False
    stop_after_a_step(fake)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(front.post, "/generate", body)
        wait_until(lambda: not fake.flow.is_set())
        assert front.post("/pause_generation", {}).status_code == 200
        first = asked.result().json()
        folder = str(next(tmp_path.iterdir()))
        told = front.post("/update_weights_from_disk", dict(model_path=folder, abort_all_requests=True))
        assert told.json() == {"success": True, "message": "weight version 9 is served"}
        assert served(fake) == {1.0}
        assert front.post("/continue_generation", {}).status_code == 200
        fake.step = type(fake).step.__get__(fake)  # type: ignore[method-assign]
        fake.flow.set()
        tokens = [item[1] for item in first["meta_info"]["output_token_logprobs"]]
        assert first["meta_info"]["finish_reason"]["type"] == "abort" and len(tokens) == 1
        rest = body | dict(input_ids=[1, *tokens], sampling_params=sampling | dict(max_new_tokens=5))
        second = front.post("/generate", rest).json()
    assert second["meta_info"]["finish_reason"]["type"] == "length" and len(second["output_ids"]) == 5
    assert (first["meta_info"]["weight_version"], second["meta_info"]["weight_version"]) == ("3", "9")


def _post(slime: SlimeClient, endpoint: str, fields: dict[str, Any]) -> Any:
    answer = slime._client.post(f"{slime.url}/{endpoint}", json=fields)
    assert answer.status_code in (400, 409)
    return answer.json()
