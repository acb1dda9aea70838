"""The page at `/ui`: access to the page's data, the kept groups, and the bitwise comparison when samples are scored
again.

tests/integrations/ui tests the page in a browser.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from http_fronts import Front, error_of, events, front_end
from transformers import AutoModelForCausalLM

from trueroll.engine.request import SampleOutput, SamplingParams, WeightSpan
from trueroll.errors import WorkerLostError
from trueroll.rollout import RolloutClient, WeightPublisher, WorkerProcess
from trueroll.rollout.http import guard, pages, samples, watch
from trueroll.rollout.http.samples import NUMBER_BYTES, OBJECT_BYTES, SampleLog

PROMPT = list(range(40, 80))
FILES = guard.OPEN_PATHS - {"/", "/health", "/health_generate"}


def newest(front: Front) -> dict[str, Any]:
    """Return the page's data about the latest group."""
    told = front.get("/ui/live").json()["groups"][-1]
    return front.get(f"/ui/group?group={told['id']}").json()


def tokens_of(front: Front, group: dict[str, Any], index: int) -> dict[str, Any]:
    return front.get(f"/ui/tokens?group={group['id']}&sample={index}").json()


def score(front: Front, group: dict[str, Any], index: int) -> dict[str, Any]:
    return front.post("/ui/score", {"group": group["id"], "sample": index}).json()


def test_the_files_need_no_key_and_the_data_do(worker: WorkerProcess) -> None:
    with front_end(worker.address, key="secret", model_name="nobody-knows") as front:
        assert front.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        front.key = "wrong"
        texts = [front.get(path) for path in sorted(FILES)]
        assert [each.status_code for each in texts] == [200] * len(FILES) and len(FILES) == 8
        assert not any("nobody-knows" in each.text or "secret" in each.text for each in texts)
        for path in ("/ui/live", "/ui/group?group=1", "/ui/tokens?group=1"):
            assert error_of(front.get(path))["code"] == "invalid_api_key"
        refused = front.post("/ui/score", {"group": 1, "sample": 0})
        assert refused.status_code == 401


def test_the_page_may_load_and_run_its_own_files_alone(front: Front) -> None:
    page = front.get("/ui")
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and page.headers["X-Content-Type-Options"] == "nosniff"
    assert re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", page.text) is None
    loaded = {*re.findall(r'(?:src|href)="(/[^"]+)"', page.text)}
    for name in ("page.js", "charts.js", "samples.js", "base.js"):
        text = front.get(f"/ui/{name}").text
        loaded |= {f"/ui/{each}" for each in re.findall(r'from "\./([^"]+)"', text)}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", text)
    assert loaded == FILES - {"/ui"}


def test_the_root_leads_to_the_page(worker: WorkerProcess) -> None:
    """The redirect needs no key, and points to this server whatever `Host` names."""
    with front_end(worker.address, key="secret") as front:
        response = httpx2.get(f"{front.url}/", headers={"Host": "elsewhere.example"})
        assert response.status_code == 307 and response.headers["Location"] == "/ui"
        assert httpx2.get(front.url, follow_redirects=True).text == front.get("/ui").text


USER = {"role": "user", "content": "Who?"}
LONG = "What is\n 6 times 7? " + "W" * 300


@pytest.mark.parametrize(
    ("messages", "preview"),
    [
        ([{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "I."}], "Who?"),
        ([USER, {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}], "a b"),
        ([{"role": "user", "content": LONG}], f"What is 6 times 7? {'W' * 61}…"),
        ([{"role": "system", "content": "Be brief."}], "Be brief. <assistant>"),
    ],
    ids=["last", "parts", "long", "none"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_is_listed_by_its_last_user_message(
    front: Front, messages: list[dict[str, Any]], preview: str, is_stream: bool
) -> None:
    body = {"messages": messages, "max_tokens": 1, "stream": is_stream}
    front.post("/v1/chat/completions", body).raise_for_status()
    assert newest(front)["preview"].endswith(preview)


def test_answers_are_kept_to_the_bit(front: Front, client: RolloutClient) -> None:
    """Covers a whole answer, a stream, and `/inference/v1/generate`."""
    salted = {"cache_salt": "between us", "n": 2, "max_tokens": 6, "seed": 2**63 + 1, "temperature": 0.8}
    fields = salted | {"prompt": PROMPT, "logprobs": 0, "stop": ["never"]}
    [group] = client.generate([PROMPT], SamplingParams(n=2, max_tokens=6, temperature=0.8), seed=2**63 + 1)
    asked = [("/v1/completions", fields), ("/v1/completions", fields | {"stream": True})]
    asked += [("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": salted | {"logprobs": 0}})]
    for path, body in asked:
        front.post(path, body).raise_for_status()
        kept = newest(front)
        assert kept["params"] == {"n": 2, "max_tokens": 6, "temperature": 0.8} and kept["seed"] == str(2**63 + 1)
        assert "between us" not in str(kept) and kept["num_prompt_tokens"] == len(PROMPT)
        assert front.get(f"/ui/tokens?group={kept['id']}").json()["token_ids"] == PROMPT
        for told, sample in zip(kept["samples"], group.samples, strict=True):
            assert (told["index"], told["seed"]) == (sample.index, str(sample.seed))
            assert told["finish_reason"] == sample.finish_reason and told["stop_reason"] is None
            assert told["weight_versions"] == [[span.version, span.start, span.end] for span in sample.weight_versions]
            tokens = tokens_of(front, kept, sample.index)
            assert sample.logprobs is not None and tokens["logprobs"] == sample.logprobs.tolist()
            assert tokens["token_ids"] == sample.token_ids
    # The earlier requests have left the full blocks of the prompt in the cache, under the salt.
    assert max(told["num_cached_tokens"] for told in newest(front)["samples"]) >= 32


def test_live_data_is_returned_once(front: Front) -> None:
    front.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
    while not (first := front.get("/ui/live").json())["looks"]["time"]:
        time.sleep(0.01)
    looks, last = first["looks"], first["groups"][-1]["id"]
    assert looks.keys() == {*watch.COLUMNS} and {len(column) for column in looks.values()} == {len(looks["time"])}
    assert looks["state"][0] == "ready" and looks["num_running"][0] is not None and looks["in_use"][0] is not None
    front.post("/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 2})
    then = front.get(f"/ui/live?since={looks['time'][-1]}&after={last}").json()
    assert [group["id"] for group in then["groups"]] == [last + 1, last + 2] and then["run"] == first["run"]
    assert [group["preview"] for group in then["groups"]] == ["a", "b"] and then["groups"][0]["num_samples"] == 3
    assert not {*then["looks"]["time"]} & {*looks["time"]}


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=0.0),
        dict(temperature=0.7, n=2),
        dict(top_p=0.8, top_k=30),
        dict(min_tokens=3, stop="<300>", stop_token_ids=[*range(100, 400)]),
        dict(repetition_penalty=1.3, frequency_penalty=1, logit_bias={"7": 2.5}, bad_words=["a", "once upon"]),
    ],
    ids=["greedy", "sampled", "filtered", "not-ended", "edited"],
)
def test_scoring_again_gives_the_same_bits(front: Front, sampling: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, "seed": 5, "logprobs": 0} | sampling
    front.post("/v1/completions", body).raise_for_status()
    group = newest(front)
    for sample in group["samples"]:
        told = score(front, group, sample["index"])
        assert told["difference"] is None
        assert told["num_compared"] == told["num_equal"] == sample["num_tokens"] > 0
        assert told["weight_versions"][0][0] == sample["weight_versions"][0][0]


def test_without_log_probs_there_is_nothing_to_compare(front: Front, client: RolloutClient) -> None:
    front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hm"}], "max_tokens": 5, "seed": 3})
    group = newest(front)
    assert tokens_of(front, group, 0)["logprobs"] is None and group["samples"][0]["mean_logprob"] is None
    told = score(front, group, 0)
    prompt = front.get(f"/ui/tokens?group={group['id']}").json()["token_ids"]
    [expected] = client.generate([prompt], SamplingParams(max_tokens=5), seed=3)
    assert expected.samples[0].logprobs is not None and told["logprobs"] == expected.samples[0].logprobs.tolist()
    assert "difference" not in told


def test_other_weights_give_other_bits_and_say_which(front: Front, worker: WorkerProcess, chat_model: Path) -> None:
    front.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "logprobs": 0})
    group = newest(front)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        publisher.push(model, version=100)
    told = score(front, group, 0)
    at, before, again = told["difference"]
    assert at == 0 and before != again and told["num_equal"] < 6
    assert told["weight_versions"] == [[100, 0, 6]] and group["samples"][0]["weight_versions"][0][0] < 100
    front.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "logprobs": 0})
    assert score(front, newest(front), 0)["difference"] is None


def test_long_texts_come_in_parts_that_fit_together(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts fit together for any text, and for parts that begin anywhere, even within a character."""
    text = "<img src=x onerror=alert(1)>\u202eתודה\x00\x1b[31m 🙂🙂 e\u0301"
    monkeypatch.setattr(pages, "MOST_TOKENS", 5)
    front.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    group, told = newest(front), []
    while len(told) < group["num_prompt_tokens"]:
        part = front.get(f"/ui/tokens?group={group['id']}&start={len(told)}").json()
        assert part["logprobs"] is None and 0 < len(part["texts"]) == len(part["token_ids"]) <= 5
        told += part["texts"]
    assert "".join(told) == text and told.count("") == len(text.encode()) - len(text) == 13


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/ui/group?group=999999", 404, "group"),
        ("/ui/group", 404, "group"),
        ("/ui/tokens?group=999999&sample=0", 404, "group"),
        ("/ui/group?group=-1", 400, "group"),
        ("/ui/live?since=nan", 400, "since"),
        ("/ui/live?after=x", 400, "after"),
        ("/ui/live?after=1&after=1", 400, "after"),
    ],
)
def test_unknown_groups_and_invalid_queries_are_refused(front: Front, path: str, status: int, param: str) -> None:
    refused = front.get(path)
    assert refused.status_code == status and error_of(refused)["param"] == param


def test_an_unknown_sample_is_refused(front: Front) -> None:
    front.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
    id = newest(front)["id"]
    assert error_of(front.get(f"/ui/tokens?group={id}&sample=1"))["param"] == "sample"
    assert error_of(front.post("/ui/score", {"group": id, "sample": 1}))["param"] == "sample"
    assert error_of(front.post("/ui/score", {"group": id, "sample": 0, "what": 1}))["code"] == "unknown_parameter"
    assert httpx2.post(f"{front.url}/ui/score", content=b"[" * 5000).status_code == 413


def test_a_request_that_failed_is_not_kept(front: Front) -> None:
    before = front.get("/ui/live").json()["groups"]
    assert front.post("/v1/completions", {"prompt": [5], "max_tokens": 2000}).status_code == 400
    assert front.get("/ui/live").json()["groups"] == before
    assert events(front.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "stream": True}))[-1] == "[DONE]"
    assert len(front.get("/ui/live").json()["groups"]) == len(before) + 1


def sample(index: int, num_tokens: int, **fields: Any) -> SampleOutput:
    spans = (WeightSpan(1, 0, num_tokens),)
    logprobs = np.zeros(num_tokens, np.float32)
    told: dict[str, Any] = dict(finish_reason="length", seed=7, num_cached_tokens=0, weight_versions=spans) | fields
    return SampleOutput("id", index, [1] * num_tokens, logprobs, **told)


def test_kept_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_GROUPS", 4)
    monkeypatch.setattr(samples, "MOST_BYTES", 40_000)
    monkeypatch.setattr(samples, "MOST_GROUP_BYTES", 20_000)
    log = SampleLog()
    assert log.first_id == 1
    for _ in range(6):
        log.add([1, 2], SamplingParams(), None, [sample(0, 3)])
    assert [group.id for group in log.after(0)] == [3, 4, 5, 6] and log.first_id == 3
    assert log.num_bytes == 4 * (2 * OBJECT_BYTES + 4 * 2 + 8 * 3)
    log.add([1], SamplingParams(n=3), 9, [sample(2, 9), sample(0, 1500), sample(1, 900)])
    [last] = log.after(6)
    assert [each.index for each in last.samples] == [0], "after a sample that does not fit, no later one is kept"
    for id in range(8, 12):
        log.add([1], SamplingParams(), None, [sample(0, 1500)])
        assert log.num_bytes == sum(group.num_bytes for group in log.after(0)) <= 40_000 and log.get(id) is not None
    assert len(log.after(0)) == 2
    log.add([1] * 6000, SamplingParams(), None, [sample(0, 1)])
    assert log.after(11) == [], "its prompt alone is too long"


def test_long_stop_strings_and_errors_are_cut() -> None:
    log = SampleLog()
    stopped = sample(0, 1, finish_reason="stop", stop_reason="x" * 1000, error="y" * 9999)
    log.add([1], SamplingParams(stop=("x" * 1000,), stop_token_ids=(7,)), None, [stopped])
    [group] = log.after(0)
    assert len(str(group.samples[0].stop_reason)) == len(str(group.samples[0].error)) == 500
    assert group.params.stop == () and group.num_bytes == 2 * OBJECT_BYTES + NUMBER_BYTES + 4 + 8


def test_bits_are_compared_not_numbers() -> None:
    before = np.array([-1, 0.0, np.nan, -2, -np.inf], np.float32)
    assert pages.compared(before, before.copy()) == dict(num_compared=5, num_equal=5, difference=None)
    again = np.array([-1, -0.0, np.nan, -2, -np.inf], np.float32)
    assert pages.compared(before, again) == dict(num_compared=5, num_equal=4, difference=[1, 0.0, -0.0])
    assert pages.compared(before[:0], again[:0])["num_compared"] == 0


def test_looks_are_bounded_and_go_on_without_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        async def health(self) -> None:
            raise WorkerLostError("gone")

    monkeypatch.setattr(watch, "LOOK_SECONDS", 0)
    monkeypatch.setattr(watch, "MOST_LOOKS", 3)

    async def look() -> watch.Watch:
        looking = watch.Watch(Gone())  # type: ignore[arg-type]
        task = asyncio.create_task(looking.run())
        while len(looking.since(0)["time"]) < 3:
            await asyncio.sleep(0)
        first = looking.since(0)["time"][0]
        while looking.since(0)["time"][0] == first:
            await asyncio.sleep(0)
        task.cancel()
        return looking

    looks = asyncio.run(look()).since(0)
    assert looks["state"] == [watch.UNREACHABLE] * 3 and looks["num_running"] == looks["in_use"] == [None] * 3
