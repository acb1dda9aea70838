"""The worker's lifecycle over HTTP, disconnecting clients, and a kill of the front end or the worker."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from fake_engine import SHAPES, SLOW_STEP, FakeEngine
from http_fronts import Front, error_of, events, front_end
from serving import WorkerOnThread, fake_process, serving, wait_until
from starlette.requests import Request
from transformers import AutoModelForCausalLM

from trueroll.engine.request import FinishReason
from trueroll.errors import brief
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, protocol
from trueroll.rollout.http import app, lifecycle, server, watch
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.lifecycle import Lifecycle
from trueroll.weight_sync.payload.manifest import MANIFEST_FILE

PROGRAM = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()")


@pytest.fixture
def fronted(running: WorkerOnThread, chat_model: Path) -> Iterator[Front]:
    """A front end of the worker with the fake engine."""
    with front_end(running.address, tokenizer=str(chat_model)) as front:
        yield front


def num_open(running: WorkerOnThread) -> int:
    return running.worker._vitals.health().requests["open"]


def test_pause_keeps_or_ends_running_requests(fronted: Front, running: WorkerOnThread, fake: FakeEngine) -> None:
    body = {"prompt": [1], "max_tokens": 5, "seed": 1}
    expected = fronted.post("/v1/completions", body).json()["choices"]
    with ThreadPoolExecutor(2) as threads:
        fake.flow.clear()
        kept = threads.submit(fronted.post, "/v1/completions", body)
        wait_until(lambda: num_open(running) == 1)
        assert fronted.post("/pause?mode=keep").json() == {"status": "paused"}
        assert fronted.get("/is_paused").json() == {"is_paused": True}
        fake.flow.set()
        assert fronted.post("/resume").json() == {"status": "resumed"}
        assert kept.result().json()["choices"] == expected
        wait_until(lambda: num_open(running) == 0)  # the next open request is then the new one
        fake.flow.clear()
        ended = threads.submit(fronted.post, "/v1/completions", body)
        wait_until(lambda: num_open(running) == 1)
        assert fronted.post("/pause").json() == {"status": "paused"}
        [choice] = ended.result().json()["choices"]
        assert choice["finish_reason"] == "abort" and ("invalidate",) in fake.actions
        fake.flow.set()
        assert fronted.post("/resume").status_code == 200
    assert fronted.post("/pause?mode=wait&clear_cache=false").status_code == 200
    assert fronted.post("/resume").status_code == 200


def test_sleep_and_wake_up_reach_the_engine(fronted: Front, fake: FakeEngine) -> None:
    assert fronted.get("/is_sleeping").json() == {"is_sleeping": False}
    assert fronted.post("/sleep?level=2&tags=weights&tags=kv_cache&mode=keep").json()["state"] == "asleep"
    assert fronted.get("/is_sleeping").json() == {"is_sleeping": True}
    fronted.post("/wake_up?tags=kv_cache")
    assert fronted.post("/wake_up?tags=weights").json()["state"] == "dirty", "level 2 dropped them"
    sleep, *wakes = [action for action in fake.actions if action[0] in ("sleep", "wake_up")]
    assert sleep == ("sleep", 2, ("weights", "kv_cache"), "recompute")
    assert wakes == [("wake_up", ("kv_cache",)), ("wake_up", ("weights",))]


def test_the_openai_package_reaches_every_path(fronted: Front, tmp_path: Path) -> None:
    own, root = fronted.openai(), openai.OpenAI(base_url=fronted.url, api_key="none", max_retries=0)
    model, hello = "fake", [{"role": "user", "content": "hi"}]

    def post(path: str, body: Any = None) -> Any:
        return root.post(path, body=body, cast_to=object)

    def get(path: str) -> Any:
        return root.get(path, cast_to=object)

    assert own.models.list().data[0].id == own.models.retrieve(model).id == model
    assert own.completions.create(model=model, prompt="x", max_tokens=2).choices
    assert own.chat.completions.create(model=model, messages=hello, max_tokens=2).choices  # type: ignore[call-overload]
    asked = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
    assert len(post("/inference/v1/generate", asked)["choices"][0]["token_ids"]) == 2
    assert post("/detokenize", {"tokens": post("/tokenize", {"prompt": "hi"})["tokens"]}) == {"prompt": "hi"}
    assert get("/health")["state"] == "ready"
    assert post("/pause?mode=keep") == {"status": "paused"} and get("/is_paused") == {"is_paused": True}
    assert post("/resume") == {"status": "resumed"}
    assert post("/sleep")["state"] == "asleep" and get("/is_sleeping") == {"is_sleeping": True}
    assert post("/wake_up")["state"] == "ready"
    assert post("/reset_prefix_cache")["state"] == "ready"
    with pytest.raises(openai.ConflictError, match="has no weights that this server can read") as caught:
        post("/update_weights", {"weight_dir": str(tmp_path)})
    assert caught.value.code == "push_failed"
    with pytest.raises(openai.ConflictError, match="has no memory for named adapters"):
        post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    with pytest.raises(openai.NotFoundError, match="no adapter with this name is loaded"):
        post("/v1/unload_lora_adapter", {"lora_name": "a"})
    reached = re.findall(r'trueroll_http_requests_total{path="([^"]+)",status="(?:200|404|409)"}', get("/metrics"))
    template = {"/v1/models/{name:path}"}
    of_the_page = r'(?!/ui|/")'
    paths = {*re.findall(rf'Route\("({of_the_page}[^"]+)"', Path(app.__file__).read_text())} - template - {"/metrics"}
    assert paths <= {*reached} and len(paths) > 10


def test_reset_prefix_cache_reaches_the_engine(fronted: Front, fake: FakeEngine) -> None:
    assert fronted.post("/reset_prefix_cache").json() == {"state": "ready", "weight_version": 3}
    assert fake.actions == [("invalidate",)]


def test_metrics_tell_of_worker_and_front_end(fronted: Front) -> None:
    fronted.post("/v1/completions", {"prompt": [1]})
    fronted.post("/v1/completions", {"prompt": [1], "bad": 1})
    fronted.get("/secret/path")
    lines = fronted.get("/metrics", Accept="application/openmetrics-text;version=none").text.splitlines()
    assert 'trueroll_http_requests_total{path="/v1/completions",status="200"} 1.0' in lines
    assert 'trueroll_http_requests_total{path="/v1/completions",status="400"} 1.0' in lines
    assert 'trueroll_http_requests_total{path="other",status="404"} 1.0' in lines
    assert 'trueroll_state{state="ready"} 1.0' in lines and "trueroll_requests_accepted_total 1.0" in lines


def test_weights_come_from_a_checkpoint(front: Front, client: RolloutClient, chat_model: Path, tmp_path: Path) -> None:
    prompt, params = [4, 5, 6], SamplingParams(max_tokens=8)
    before = client.generate([prompt], params, seed=1)[0].samples[0]
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(tmp_path)
    version = client.health().weight_version
    assert version is not None
    told = front.post("/update_weights", {"weight_dir": str(tmp_path)})
    assert told.json() == {"status": "updated", "weight_version": version + 1}
    body = {"prompt": prompt, "max_tokens": 8, "seed": 1, "return_token_ids": True}
    [choice] = front.post("/v1/completions", body).json()["choices"]
    after = client.generate([prompt], params, seed=1)[0].samples[0]
    assert choice["token_ids"] == after.token_ids != before.token_ids
    assert choice["weight_versions"] == [{"version": str(version + 1), "start": 0, "end": 8}]
    refused = front.post("/update_weights", {"weight_dir": str(tmp_path), "weight_version": 0})
    assert refused.status_code == 409 and "is not newer than" in error_of(refused)["message"]
    beyond = front.post("/update_weights", {"weight_dir": str(tmp_path), "weight_version": 2**63 - 1})
    assert beyond.status_code == 400 and error_of(beyond)["param"] == "weight_version"
    (tmp_path / "model.safetensors").write_bytes(b"no")
    assert front.post("/update_weights", {"weight_dir": str(tmp_path)}).status_code == 409
    assert client.health().weight_version == version + 1


def test_no_version_follows_the_last_one(fronted: Front, running: WorkerOnThread, tmp_path: Path) -> None:
    with WeightPublisher("shared") as publisher:
        publisher.connect([running.address])
        publisher.push({name: torch.ones(shape) for name, shape in SHAPES.items()}, 2**63 - 2)
    answered = fronted.post("/update_weights", {"weight_dir": str(tmp_path)})
    assert answered.status_code == 409
    assert error_of(answered)["message"].startswith(f"weight_version: the served version {2**63 - 2} is the largest")


def test_a_choice_says_which_tokens_were_drawn_over_old_kv(fronted: Front, fake: FakeEngine) -> None:
    class Kept(dict[tuple[str, int], tuple[int, int]]):
        def pop(self, *_: Any) -> tuple[int, int]:
            return 2, 1

    asked = {"prompt": [1], "max_tokens": 4}
    assert "old_kv" not in fronted.post("/v1/completions", asked).json()["choices"][0]
    fake._kept = Kept()
    [choice] = fronted.post("/v1/completions", asked).json()["choices"]
    assert choice["old_kv"] == [{"version": "2", "start": 1, "end": 4}]
    group = fronted.get("/ui/live").json()["groups"][-1]
    told = fronted.get(f"/ui/group?group={group['id']}").json()
    assert told["samples"][0]["old_kv"] == [[2, 1, 4]]
    refused = fronted.post("/ui/score", {"group": group["id"], "sample": 0})
    assert refused.status_code == 400 and "drawn over KV of older weights" in error_of(refused)["message"]


def test_weights_come_from_the_folder_of_a_push(fronted: Front, fake: FakeEngine, tmp_path: Path) -> None:
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with serving(FakeEngine()) as other, WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect([other.address])
        publisher.push(tensors, version=9)
    [folder] = tmp_path.iterdir()
    refused = fronted.post("/update_weights", {"weight_dir": str(folder), "weight_version": 10})
    assert refused.status_code == 400 and error_of(refused)["param"] == "weight_version"
    told = fronted.post("/update_weights", {"weight_dir": str(folder), "in_flight": "keep"})
    assert told.json() == {"status": "updated", "weight_version": 9}
    assert ("commit", 9, "keep") in fake.actions


def test_errors_do_not_reveal_which_files_exist(
    fronted: Front, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every path without weights gets the same error text, whether or not a file exists at the path. The log has the
    cause.
    """
    made = {name: tmp_path / name for name in ("absent", "file", "empty", "fifo", "broken", "loop", "push", "json")}
    made["file"].write_text("secret")
    os.mkfifo(made["fifo"])
    made["loop"].symlink_to(made["loop"])
    for name in ("empty", "broken", "push", "json"):
        made[name].mkdir()
    (made["broken"] / "model.safetensors").write_bytes(b"no")
    (made["push"] / MANIFEST_FILE).write_text("{}")
    (made["json"] / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    texts = set()
    for path in (*map(str, made.values()), "\0", "x" * 5000, "/proc/self/mem", "/etc/passwd"):
        caplog.clear()
        refused = fronted.post("/update_weights", {"weight_dir": path})
        assert refused.status_code == 409 and error_of(refused)["code"] == "push_failed", path
        texts.add(error_of(refused)["message"].replace(brief(path), "PATH"))
        assert "cannot read weights from" in caplog.text
    assert len(texts) == 1 and "has no weights that this server can read" in texts.pop()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_ends_its_request(
    fronted: Front,
    running: WorkerOnThread,
    fake: FakeEngine,
    is_stream: bool,
    has_begun: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client leaves before the first token, or in the middle of the answer."""
    if not has_begun:
        fake.flow.clear()
    body = json.dumps({"prompt": [1, SLOW_STEP], "max_tokens": 400, "stream": is_stream})
    with fronted.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        wait_until(lambda: num_open(running) == 1)
        if has_begun and is_stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: num_open(running) == 0)
    fake.flow.set()
    assert fake.stats().samples_finished["abort"] == 1
    wait_until(lambda: fronted.metric("trueroll_http_open_requests") == 0.0)
    status = 200 if has_begun and is_stream else 499
    assert fronted.metric(f'trueroll_http_requests_total{{path="/v1/completions",status="{status}"}}') == 1.0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == [], "a disconnect is not an error"


def test_a_sample_that_fails_is_an_error(fronted: Front, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = fake._finish

    def fail(request_id: str, index: int, reason: FinishReason) -> Any:
        output: Any = finish(request_id, index, reason)
        return type(output)(**vars(output) | {"finish_reason": "error", "error": "logits: found nan"})

    monkeypatch.setattr(fake, "_finish", fail)
    response = fronted.post("/v1/completions", {"prompt": [1]})
    assert response.status_code == 500 and error_of(response)["code"] == "sample_failed"
    *_, last = events(fronted.post("/v1/completions", {"prompt": [1, SLOW_STEP], "stream": True}))
    assert "logits: found nan" in last["error"]["message"]


def test_a_stream_of_a_killed_worker_ends_with_an_error(chat_model: Path, tmp_path: Path, forked_workers: None) -> None:
    address = f"ipc://{tmp_path}/worker.sock"
    worker = fake_process(address=address)
    try:
        with front_end(address, tokenizer=str(chat_model)) as front:
            fields: dict[str, Any] = dict(model="fake", prompt=[1, SLOW_STEP], max_tokens=400)
            stream = iter(front.openai().completions.create(**fields, stream=True))
            first = [*itertools.islice(stream, 3)]
            assert len(first) == 3, "the stream was in flight"
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(front.post, "/v1/completions", {"prompt": [1, SLOW_STEP], "max_tokens": 400})
                wait_until(lambda: front.metric("trueroll_http_open_requests") == 2.0)
                worker.kill()
                worker = fake_process(address=address)
                with pytest.raises(openai.APIError, match="was restarted; submit the request again"):
                    list(stream)
                assert waiting.result().status_code == 503 and error_of(waiting.result())["code"] == "worker_lost"
            assert front.openai().completions.create(model="fake", prompt=[1]).choices, "the next one is served"
    finally:
        worker.close()


def test_without_a_worker_health_says_so(
    chat_model: Path, tmp_path: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WORKER_SECONDS", 1.0)
    worker = fake_process(address=f"ipc://{tmp_path}/worker.sock")
    with front_end(worker.address, tokenizer=str(chat_model)) as front:
        worker.kill()
        wait_until(lambda: front.get("/health").status_code == 503)  # the last report is valid for a moment
        for response in (front.get("/health"), front.post("/v1/completions", {"prompt": [1]}), front.get("/metrics")):
            assert response.status_code == 503 and error_of(response)["code"] == "worker_lost"
            assert response.headers["Retry-After"] == "1"


class SlowWorker:
    """A client of a worker that answers only while `answers` is set."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.state = "ready"
        self.num_asked = 0

    async def health(self) -> protocol.Health:
        self.num_asked += 1
        state = self.state
        await self.answers.wait()
        fields = dict(id="a", instance="b", seconds_since_progress=0.0, weight_version=3, engine=None)
        return protocol.Health(state=state, requests={}, memory={}, limits={}, **fields)  # type: ignore[arg-type]

    async def stats(self) -> protocol.Stats:
        return protocol.Stats(id="a", engine={}, service={})

    async def resume(self) -> None:
        self.state = "paused"  # as if another client had paused the worker in the meantime


async def asked_by_turns(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_health_returns_the_last_report_while_the_worker_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is never older than the last state change that this front end has called for."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0)
    monkeypatch.setattr(watch, "REPORT_SECONDS", 60.0)
    request = Request({"type": "http", "method": "GET", "query_string": b"", "headers": []})

    async def ask() -> None:
        worker = SlowWorker()
        looking = watch.Watch(worker)  # type: ignore[arg-type]
        calls = Lifecycle(worker, looking, "", (None, None), None)  # type: ignore[arg-type]
        worker.answers.set()
        assert json.loads(bytes((await calls.health(request)).body)) == dict(
            state="ready", weight_version=3, age_seconds=0
        )
        looks = asyncio.create_task(looking.run())
        await asked_by_turns(lambda: looking.report() is not None)
        worker.answers.clear()
        told = json.loads(bytes((await calls.health(request)).body))
        assert told["state"] == "ready" and 0 < told["age_seconds"] < 60
        num_asked = worker.num_asked
        await asked_by_turns(lambda: worker.num_asked > num_asked)  # a poll that the worker answers after the change
        await calls.resume(request)
        assert looking.report() is None
        asked = asyncio.create_task(calls.health(request))
        await asyncio.wait({asked}, timeout=4 * lifecycle.PATIENCE_SECONDS)
        assert not asked.done()
        worker.answers.set()
        assert json.loads(bytes((await asked).body)) == dict(state="paused", weight_version=3, age_seconds=0)
        await asked_by_turns(lambda: looking.report() is not None)
        health, _ = looking.report() or (None, None)
        assert health is not None and health.state == "paused"
        monkeypatch.setattr(watch, "REPORT_SECONDS", -1.0)
        assert looking.report() is None, "too old"
        looks.cancel()

    asyncio.run(ask())


def test_texts_get_503_while_no_process_can_be_forked(fronted: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", no_process)
        response = fronted.post("/v1/completions", body)
        assert response.status_code == 503 and response.headers["Retry-After"] == "1"
        error = error_of(response)
        assert error["code"] == "unavailable" and "cannot start another process" in error["message"]
    assert fronted.post("/v1/completions", body).status_code == 200


def no_process() -> int:
    raise BlockingIOError("no room")


def test_the_command_serves_until_it_is_told_to_end(worker: WorkerProcess, chat_model: Path) -> None:
    process = subprocess.Popen([*PROGRAM, "http", worker.address, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready url=http://127.0.0.1:") and line.endswith(f" address={worker.address}\n")
        front = Front(line.split("url=")[1].split()[0], str(chat_model))
        assert f" page={front.url}/ui " in line
        stream = front.openai().completions.create(model=front.model, prompt=[1], max_tokens=900, stream=True)
        stream = iter(stream)
        assert next(stream).choices
        process.send_signal(signal.SIGTERM)
        assert [*stream][-1].choices[0].finish_reason in ("stop", "length"), "open requests are finished"
        assert process.wait(60) == 0 and process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()


def test_a_signal_ends_the_front_end_as_soon_as_it_is_ready(
    running: WorkerOnThread, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.gc, "freeze", lambda: None)  # the change would affect all later tests in this process
    rescue = threading.Timer(60, lambda: signal.raise_signal(signal.SIGINT))
    rescue.start()
    config = HttpConfig(address=running.address, port=0, tokenizer=str(chat_model))
    server.serve(config, (None, None), lambda url, model: signal.raise_signal(signal.SIGTERM))
    assert rescue.is_alive(), "it ended before the rescue"
    rescue.cancel()


def test_an_ended_front_end_leaves_no_process(worker: WorkerProcess, chat_model: Path) -> None:
    before = set(psutil.Process().children())
    with front_end(worker.address, tokenizer=str(chat_model)) as front:
        chat = front.openai().chat.completions
        assert chat.create(model=front.model, messages=[{"role": "user", "content": "a"}], max_tokens=1).choices
        assert len(set(psutil.Process().children()) - before) == 1, "the chat template is rendered in one"
    assert set(psutil.Process().children()) <= before


def test_the_requests_of_a_killed_front_end_end(running: WorkerOnThread, fake: FakeEngine, chat_model: Path) -> None:
    """Running requests end, streamed or not, and so does a request held up by a pause. A request of another client
    continues.
    """
    body = {"prompt": [1, SLOW_STEP], "max_tokens": 400}
    with RolloutClient(running.address) as client, ThreadPoolExecutor(4) as threads:
        with command(running.address, "0", "--tokenizer", str(chat_model)) as front:
            asked = [threads.submit(front.post, "/v1/completions", body | {"stream": flag}) for flag in (True, False)]
            other = threads.submit(lambda: client.generate([[1, SLOW_STEP]], SamplingParams(max_tokens=60)))
            wait_until(lambda: num_open(running) == 3)
            client.pause()
            asked.append(threads.submit(front.post, "/v1/completions", body))
            wait_until(lambda: num_open(running) == 4)
        wait_until(lambda: num_open(running) == 1)
        client.resume()
        assert len(other.result()[0].samples[0].token_ids) == 60
        wait_until(lambda: running.worker._vitals.health().requests["kept"] == 0)
        assert fake.stats().samples_finished == {"abort": 2, "length": 1}, "the held request had not begun"
        assert all(each.exception() is not None for each in asked)


@contextmanager
def command(address: str, port: str, *more: str) -> Iterator[Front]:
    """A front end in a separate process, which is killed at the end."""
    options = ("--port", port, "--model-name", "tiny", *more)
    process = subprocess.Popen([*PROGRAM, "http", address, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Front(process.stdout.readline().split("url=")[1].split()[0], "tiny")
    finally:
        process.kill()
        process.wait()


def test_the_next_front_end_serves_after_one_that_was_killed(running: WorkerOnThread, chat_model: Path) -> None:
    options = ("--tokenizer", str(chat_model))
    with command(running.address, "0", *options) as front:
        create = front.openai().completions.create
        stream = iter(create(model="tiny", prompt=[1, SLOW_STEP], max_tokens=400, stream=True))
        assert next(stream).choices
        port = front.url.rpartition(":")[2]
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    with RolloutClient(running.address) as client:
        [group] = client.generate([[1, 2]], SamplingParams(max_tokens=3), seed=4)
    with command(running.address, port, *options) as front:
        assert front.url.endswith(f":{port}")
        body = {"prompt": [1, 2], "max_tokens": 3, "seed": 4, "return_token_ids": True}
        [choice] = front.post("/v1/completions", body).json()["choices"]
        assert choice["token_ids"] == group.samples[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ipc:///nowhere", "--host", "0.0.0.0"), "trueroll: host: '0.0.0.0' is not a loopback IP"),
        (("tcp://127.0.0.1:5",), "trueroll: tokenizer: the worker at tcp://127.0.0.1:5 may run on another"),
        (("ipc:///nowhere,tcp://127.0.0.1:5",), "trueroll: tokenizer: the worker at "),
        (("ipc:///nowhere", "--port", "70000"), "trueroll: port: must be at most 65535"),
    ],
)
def test_a_wrong_setting_of_the_command_is_one_clear_line(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run([*PROGRAM, "http", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.splitlines()[-1].startswith(said), done.stderr
