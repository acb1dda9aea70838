"""SGLang's paths that end, pause and continue generation, with the fake engine; what routers and trainers read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_engine import FakeEngine, expected_tokens
from http_fronts import Front, error_of, events, front_end
from serving import WorkerOnThread, stop_after_a_step, wait_until
from slime_client import SlimeClient

from trueroll.engine.request import derive_seed
from trueroll.rollout.http.sglang.control import REFUSED

TOKENS = expected_tokens(derive_seed(5, 0), 0, 50)
"""The tokens of a request with the seed 5."""


@pytest.fixture
def front(running: WorkerOnThread, chat_model: Path) -> Iterator[Front]:
    with front_end(running.address, tokenizer=str(chat_model), sglang=True) as front:
        yield front


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def begin(front: Front, threads: ThreadPoolExecutor, fake: FakeEngine, rid: str, **fields: Any) -> Future[Any]:
    """Send a request, and wait until the engine has it."""
    before = len(fake.requests)
    body = dict(input_ids=[1], sampling_params=dict(max_new_tokens=50, sampling_seed=5), rid=rid, **fields)
    asked = threads.submit(front.post, "/generate", body)
    wait_until(lambda: len(fake.requests) > before)
    return asked


def test_an_abort_by_name_ends_one_request(front: Front, fake: FakeEngine, threads: ThreadPoolExecutor) -> None:
    stop_after_a_step(fake)
    one, two = (begin(front, threads, fake, rid, return_logprob=True) for rid in ("a", "b"))
    for fields in ({"rid": "nobody"}, {"rid": ""}, {}, {"rid": None}, {"prefix": False}):
        assert front.post("/abort_request", fields).status_code == 200, "as SGLang: nothing to end"
    refused = front.post("/abort_request", {"rid": "a", "prefix": True})
    assert refused.status_code == 400 and "prefix: True is not supported" in error_of(refused)["message"]
    assert front.post("/abort_request", {"rid": "a"}).status_code == 200
    ended = one.result()
    assert ended.status_code == 200 and ended.json()["meta_info"]["finish_reason"]["type"] == "abort"
    tokens = ended.json()["output_ids"]
    assert tokens == TOKENS[: len(tokens)] and not two.done()
    fake.flow.set()
    assert front.post("/abort_request", {"abort_all": True}).status_code == 200
    two.result()


def test_an_aborted_stream_ends_with_all_its_tokens(
    front: Front, fake: FakeEngine, threads: ThreadPoolExecutor
) -> None:
    stop_after_a_step(fake)
    asked = begin(front, threads, fake, "a", stream=True)
    wait_until(lambda: not fake.flow.is_set())
    front.post("/abort_request", {"rid": "a"})
    *_, last, done = events(asked.result())
    assert done == "[DONE]" and last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"] == TOKENS[:1]


def test_names_of_ended_requests_are_forgotten(front: Front, fake: FakeEngine) -> None:
    asked = dict(input_ids=[1], sampling_params=dict(max_new_tokens=2), rid="a")
    for stream in (False, True):
        assert front.post("/generate", asked | {"stream": stream}).status_code == 200
    assert front.post("/abort_request", {"rid": "a"}).status_code == 200
    assert fake.actions == []


def test_slime_aborts_until_the_server_is_idle(front: Front, fake: FakeEngine, threads: ThreadPoolExecutor) -> None:
    fake.flow.clear()
    asked = [begin(front, threads, fake, rid, return_logprob=True) for rid in "ab"]
    assert front.get("/v1/loads").json()["loads"][0]["num_reqs"] == 2
    [load] = front.get("/get_load").json()
    assert load["num_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"] == 2
    with SlimeClient(front.url) as slime:
        slime.abort_until_idle()
    for each in asked:
        assert each.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_pause_ends_or_keeps_running_requests(front: Front, fake: FakeEngine, threads: ThreadPoolExecutor) -> None:
    fake.flow.clear()
    ended = begin(front, threads, fake, "a")
    flushed = front.get("/flush_cache")
    assert flushed.status_code == 400 and "1 requests are running" in error_of(flushed)["message"]
    assert front.post("/pause_generation", {}).json()["status"] == "ok"
    assert ended.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert ("invalidate",) not in fake.actions
    late = threads.submit(front.post, "/generate", dict(input_ids=[1], sampling_params=dict(max_new_tokens=2)))
    wait_until(lambda: front.get("/v1/loads").json()["loads"][0]["num_reqs"] == 1)
    fake.flow.set()
    assert front.post("/flush_cache").status_code == 200 and fake.actions[-1] == ("invalidate",)
    assert not late.done(), "new requests wait"
    assert front.post("/continue_generation", {"torch_empty_cache": True}).status_code == 200
    assert len(late.result().json()["output_ids"]) == 2
    fake.flow.clear()
    kept = begin(front, threads, fake, "b")
    assert front.post("/pause_generation", {"mode": "retract"}).status_code == 200
    assert front.get("/flush_cache").status_code == 200 and not kept.done()
    fake.flow.set()
    assert front.post("/continue_generation", {}).status_code == 200
    assert kept.result().json()["output_ids"] == TOKENS
    refused = front.post("/pause_generation", {"mode": "in_place"})
    assert refused.status_code == 400 and "set in_flight in /update_weights" in error_of(refused)["message"]
    assert front.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_image_in_a_web_page_of_another_origin_flushes_nothing(front: Front, fake: FakeEngine, site: str) -> None:
    """A browser sends such a GET without `Origin`."""
    refused = front.get("/flush_cache", **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
    assert refused.status_code == 403 and "web pages of other origins" in error_of(refused)["message"]
    assert front.get("/ui", **{"Sec-Fetch-Site": site}).status_code == 200, "a link to the page works"
    assert ("invalidate",) not in fake.actions
    assert front.get("/flush_cache", **{"Sec-Fetch-Site": "none"}).status_code == 200
    assert fake.actions[-1] == ("invalidate",)


def test_memory_is_released_and_allocated(front: Front, fake: FakeEngine) -> None:
    assert front.post("/release_memory_occupation", {}).json()["state"] == "asleep"
    front.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert front.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).json()["state"] == "ready"
    sleep, *wakes = [action for action in fake.actions if action[0] in ("sleep", "wake_up")]
    assert sleep == ("sleep", 1, ("weights", "kv_cache"), "recompute")
    assert wakes == [("wake_up", ("weights",)), ("wake_up", ("kv_cache",))]
    assert front.post("/release_memory_occupation", {"tags": ["all"]}).status_code == 400


def test_paths_with_pickles_or_nccl_are_refused(front: Front, fake: FakeEngine) -> None:
    for path in REFUSED:
        refused = front.post(path, {"serialized_named_tensors": ["gASVBQAAAAAAAABLAS4="]})
        assert refused.status_code == 400 and error_of(refused)["code"] == "unsupported_path"
        instead = "/load_lora_adapter" if "lora" in path else "/pull_weights"
        assert path in error_of(refused)["message"] and f" {instead}" in error_of(refused)["message"]
    assert fake.actions == []


def test_what_routers_and_trainers_read(front: Front) -> None:
    host, port = httpx2.URL(front.url).host, httpx2.URL(front.url).port
    with SlimeClient(front.url) as slime:
        slime.check({"enable_memory_saver": False})
        # miles, sglang_engine.py, `_init_external`, for an engine with one GPU
        ours = dict(tp_size=1, dp_size=1, pp_size=1, ep_size=1, nnodes=1, node_rank=0, gpu_id_step=1, base_gpu_id=0)
        info = slime.check(ours | dict(host=host, port=port))
    assert info == front.get("/get_server_info").json() and info["enable_return_routed_experts"] is False
    model = front.get("/model_info").json()
    assert model == front.get("/get_model_info").json()
    assert (model["weight_version"], model["served_model_name"], model["is_generation"]) == ("3", "fake", True)
    assert front.get("/get_weight_version").json() == {"weight_version": "3"}
    # AReaL, remote_inf_engine.py, `check_health`, sends an empty object with a GET
    for path in ("/health", "/health_generate"):
        assert httpx2.request("GET", front.url + path, json={}, verify=False).status_code == 200


def test_the_paths_are_off_by_default(running: WorkerOnThread, chat_model: Path) -> None:
    with front_end(running.address, tokenizer=str(chat_model)) as front:
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk"):
            assert front.post(path, {}).status_code == 404
        assert front.get("/health_generate").status_code == 404
