"""Named adapters over HTTP: each is chosen by its name, loaded and unloaded through any front end, in all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from adapters import adapt, change
from http_fronts import Front, error_of, events, front_end

from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker
from trueroll.rollout.http import watch

PROMPT = list(range(3, 43))
ASKED: dict[str, Any] = dict(prompt=PROMPT, max_tokens=4, seed=1, logprobs=0, return_token_ids=True)
CHAT: dict[str, Any] = dict(messages=[dict(role="user", content="Hi")], max_tokens=4)


@pytest.fixture(scope="module")
def worker(chat_model: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    settings: dict[str, Any] = dict(num_blocks=256, num_threads=1, dtype="bfloat16", adapter_bytes=2**26)
    with launch_worker(str(chat_model), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def publisher(worker: WorkerProcess) -> Iterator[WeightPublisher]:
    with WeightPublisher("shared", timeout=20.0) as publisher:
        publisher.connect([worker.address])
        yield publisher


@pytest.fixture(scope="module")
def model(chat_model: Path) -> Any:
    return adapt(chat_model, seed=1)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the adapter that has the seed 1."""
    folder = tmp_path_factory.mktemp("adapters") / "a"
    change(model, 1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def other(worker: WorkerProcess) -> Iterator[Front]:
    """Another front end of the worker, with SGLang's paths."""
    with front_end(worker.address, model_name="tiny", sglang=True) as running:
        yield running


@pytest.fixture
def push(publisher: WeightPublisher, client: RolloutClient, model: Any) -> Iterator[Any]:
    """Push an adapter. At the end, unload all adapters."""

    def push(name: str, seed: int = 1) -> None:
        change(model, seed)
        publisher.push(model, client.health().adapters.get(name, 0) + 1, adapters=True, adapter=name)

    yield push
    change(model, 1)
    for name in client.health().adapters:
        client.unload_adapter(name)


def bits(client: RolloutClient, adapter: str | None) -> tuple[list[int], list[float]]:
    [group] = client.generate([PROMPT], SamplingParams(max_tokens=4, top_logprobs=None), seed=1, adapter=adapter)
    [sample] = group.samples
    assert sample.logprobs is not None
    return sample.token_ids, sample.logprobs.tolist()


def asked(front: Front, **fields: Any) -> tuple[list[int], list[float]]:
    response = front.post("/v1/completions", ASKED | fields)
    assert response.status_code == 200, response.text
    told = response.json()
    assert told["model"] == fields.get("model", "tiny")
    [choice] = told["choices"]
    return choice["token_ids"], np.array(choice["logprobs"]["token_logprobs"], np.float32).tolist()


def test_every_api_chooses_the_adapter_by_its_name(
    front: Front, other: Front, client: RolloutClient, push: Any
) -> None:
    push("a", 1)
    push("b", 2)
    expected = {name: bits(client, name) for name in ("a", "b", None)}
    assert len({str(each) for each in expected.values()}) == 3
    assert asked(front, model="a") == expected["a"] and asked(other, model="b") == expected["b"]
    assert asked(front) == asked(front, model="tiny") == expected[None]
    streamed = events(front.post("/v1/completions", ASKED | dict(model="b", stream=True)))
    assert [id for event in streamed[:-1] for id in event["choices"][0]["token_ids"]] == expected["b"][0]
    told = front.post(
        "/inference/v1/generate",
        dict(model="a", token_ids=PROMPT, sampling_params=dict(max_tokens=4, seed=1, prompt_logprobs=0)),
    ).json()
    assert told["choices"][0]["token_ids"] == expected["a"][0]
    [score] = client.score([PROMPT], adapter="a")
    entries = told["prompt_logprobs"][1:]
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, PROMPT[1:], strict=True)]
    assert np.array(found, np.float32).tobytes() == score.logprobs.tobytes()
    echoed = front.post("/v1/completions", ASKED | dict(model="a", echo=True)).json()["choices"][0]["logprobs"]
    assert np.array(echoed["token_logprobs"][1:40], np.float32).tobytes() == score.logprobs.tobytes()
    answers = {model: front.post("/v1/chat/completions", CHAT | dict(model=model, seed=1)) for model in ("a", "tiny")}
    texts = {model: answer.json()["choices"][0]["message"]["content"] for model, answer in answers.items()}
    assert answers["a"].json()["model"] == "a" and texts["a"] != texts["tiny"]
    sampling = dict(max_new_tokens=4, sampling_seed=1)
    asks = dict(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    told = other.post("/generate", asks | dict(lora_path="a")).json()
    assert told["output_ids"] == expected["a"][0]
    [score] = client.score([PROMPT], adapter="a")
    found = [each[0] for each in told["meta_info"]["input_token_logprobs"][1:]]
    assert np.array(found, np.float32).tobytes() == score.logprobs.tobytes()


def test_the_page_scores_a_sample_with_its_adapter(front: Front, push: Any) -> None:
    push("a")
    asked(front, model="a")
    group = front.get("/ui/live").json()["groups"][-1]["id"]
    assert front.get(f"/ui/group?group={group}").json()["params"]["adapter"] == "a"
    scored = front.post("/ui/score", {"group": group, "sample": 0}).json()
    assert scored["num_equal"] == scored["num_compared"] == 4


def test_sessions_have_a_model_or_choose_it_with_each_call(front: Front, push: Any) -> None:
    push("a")

    def begin(**fields: Any) -> str:
        return front.post("/sessions", dict(seed=1, sampling_params=dict(temperature=1.0)) | fields).json()["url"]

    def drawn(url: str, api: str, model: str) -> Any:
        body = {
            "chat/completions": CHAT,
            "messages": CHAT,
            "responses": dict(input="Hi", max_output_tokens=4),
        }[api]
        told = front.post(f"{url}/{api}", body | dict(model=model)).json()
        sample = front.get(f"{url.removesuffix('/v1')}/samples").json()["samples"][0]
        return told["model"], sample["token_ids"]

    for api in ("chat/completions", "messages", "responses"):
        base, adapted = drawn(begin(), api, "any"), drawn(begin(), api, "a")
        assert (base[0], adapted[0]) == ("tiny", "a") and base[1] != adapted[1]
        assert drawn(begin(model="a"), api, "any") == adapted and drawn(begin(model="tiny"), api, "a") == base
    refused = front.post("/sessions", dict(model="c"))
    assert refused.status_code == 404 and error_of(refused)["code"] == "model_not_found"
    url = begin(model="a")
    assert front.post("/v1/unload_lora_adapter", dict(lora_name="a")).status_code == 200
    refused = front.post(f"{url}/chat/completions", CHAT)
    assert refused.status_code == 404 and error_of(refused)["code"] == "model_not_found"


def test_a_retry_repeats_the_call_of_its_adapter(front: Front, push: Any) -> None:
    push("a")
    url = front.post("/sessions", dict(seed=1)).json()["url"]
    retried: dict[str, Any] = {"x-stainless-retry-count": "1"}
    first = front.post(f"{url}/chat/completions", CHAT | dict(model="a")).json()
    assert front.post(f"{url}/chat/completions", CHAT | dict(model="a"), **retried).json()["id"] == first["id"]
    assert front.post(f"{url}/chat/completions", CHAT, **retried).json()["id"] != first["id"]


def test_vllms_paths_load_and_unload(front: Front, other: Front, client: RolloutClient, push: Any, folder: str) -> None:
    """What one front end loads or unloads, the other one serves or refuses at once."""
    push("pushed", 1)
    body = dict(lora_name="a", lora_path=folder)
    loaded = front.post("/v1/load_lora_adapter", body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    assert asked(other, model="a") == asked(front, model="a") == bits(client, "pushed")
    client.unload_adapter("pushed")
    again = front.post("/v1/load_lora_adapter", body)
    assert again.status_code == 400 and "'a' has already been loaded; set load_inplace" in error_of(again)["message"]
    assert other.post("/v1/load_lora_adapter", body | dict(load_inplace=True)).status_code == 200
    with front.openai() as api:
        base, card = api.models.list().data
        assert (base.id, card.id) == ("tiny", "a")
        length = (base.model_extra or {})["max_model_len"]
        assert card.model_extra == dict(root="a", parent="tiny", weight_version=2, max_model_len=length)
        assert api.models.retrieve("a") == card
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("b")
    gone = other.post("/v1/unload_lora_adapter", dict(lora_name="a", lora_int_id=1))
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
    for each in (front, other):
        refused = each.post("/v1/completions", ASKED | dict(model="a"))
        assert refused.status_code == 404 and error_of(refused)["code"] == "model_not_found"
    missing = front.post("/v1/unload_lora_adapter", dict(lora_name="a"))
    assert missing.status_code == 404 and error_of(missing)["param"] == "lora_name"
    assert front.post("/tokenize", dict(model="a", prompt="x")).status_code == 404


def test_sglangs_paths_load_and_unload(other: Front, push: Any, folder: str) -> None:
    body = dict(lora_name="a", lora_path=folder, pinned=True)
    told = other.post("/load_lora_adapter", body).json()
    assert told == dict(success=True, error_message=None, loaded_adapters={"a": "1"})
    again = other.post("/load_lora_adapter", body)
    assert again.status_code == 400 and again.json()["success"] is False
    assert "already been loaded; unload it first" in again.json()["error_message"]
    assert other.post("/unload_lora_adapter", dict(lora_name="a")).json()["loaded_adapters"] == {}
    gone = other.post("/unload_lora_adapter", dict(lora_name="a"))
    assert gone.status_code == 400 and gone.json()["success"] is False
    refused = other.post("/generate", dict(input_ids=PROMPT, lora_path="a"))
    assert refused.status_code == 400 and error_of(refused)["param"] == "lora_path"


def test_a_stale_report_lets_no_unloaded_adapter_through(
    front: Front, other: Front, client: RolloutClient, push: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a report still lists an adapter that another client has unloaded, the worker's refusal is a 404, too."""
    push("a")
    health = client.health()
    monkeypatch.setattr(watch.Watch, "report", lambda self: (health, 0.0))
    client.unload_adapter("a")
    for stream in (False, True):
        refused = front.post("/v1/completions", ASKED | dict(model="a", stream=stream))
        assert refused.status_code == 404 and error_of(refused)["param"] == "model"
        assert "'a' is not served; its adapter is not loaded" in error_of(refused)["message"]
    refused = other.post("/generate", dict(input_ids=PROMPT, lora_path="a"))
    assert refused.status_code == 400 and error_of(refused)["param"] == "lora_path"


def test_requests_for_the_base_model_ask_for_no_adapters(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(self: watch.Watch) -> None:
        raise AssertionError("the worker was asked for its adapters")

    monkeypatch.setattr(watch.Watch, "now", ask)
    for model in ("tiny", None):
        assert front.post("/v1/completions", ASKED | dict(model=model)).status_code == 200
    assert front.post("/v1/completions", ASKED | dict(model="other")).status_code == 500, "asks, so the patch works"


@pytest.mark.parametrize(
    ("fields", "status", "fault"),
    [
        (dict(lora_path="/missing"), 409, "/missing"),
        (dict(lora_path="adapters/a"), 400, "absolute path"),
        (dict(lora_path="/" + "a" * 4096), 400, "4096"),
        (dict(lora_path="/a\0"), 400, "absolute path"),
        (dict(lora_name="a" * 257), 400, "lora_name"),
        (dict(lora_name="a\nb"), 400, "lora_name"),
        (dict(lora_name=""), 400, "lora_name"),
        (dict(lora_name="tiny"), 400, "the name of the served model"),
        (dict(is_3d_lora_weight=True), 400, "is_3d_lora_weight"),
        (dict(base=1), 400, "base"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(
    front: Front, client: RolloutClient, folder: str, fields: dict[str, Any], status: int, fault: str
) -> None:
    refused = front.post("/v1/load_lora_adapter", dict(lora_name="a", lora_path=folder) | fields)
    assert refused.status_code == status and fault in error_of(refused)["message"]
    assert client.health().adapters == {}


def test_a_worker_without_memory_for_adapters_is_not_asked(
    running: Any, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    now = watch.Watch.now

    async def count(self: watch.Watch) -> Any:
        nonlocal asked
        asked += 1
        return await now(self)

    monkeypatch.setattr(watch.Watch, "now", count)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.01)
    with front_end(running.address, tokenizer=str(chat_model), model_name="tiny") as front:
        front.wait_for("trueroll_http_open_requests", 0)
        asked = 0
        for _ in range(3):
            assert [card["id"] for card in front.get("/v1/models").json()["data"]] == ["tiny"]
            assert front.post("/v1/completions", ASKED | dict(model="a")).status_code == 404
        assert asked == 0
