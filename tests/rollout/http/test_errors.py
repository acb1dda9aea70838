"""Refused requests: statuses, OpenAI's error body, limits, keys, and that bad requests do not affect other requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fake_engine import FAIL_IN_ADD, FakeEngine
from http_fronts import Front, error_of, front_end
from pydantic import ValidationError
from raw_http import Raw
from serving import WorkerOnThread, serving

from trueroll.errors import ConfigError
from trueroll.rollout.http.app import DetokenizeFields
from trueroll.rollout.http.chat import ChatFields
from trueroll.rollout.http.clients import api_key
from trueroll.rollout.http.completions import CompletionFields
from trueroll.rollout.http.config import API_KEY_VARIABLE, HttpConfig
from trueroll.rollout.http.fields import IGNORED, OFF, EditFields, Fields
from trueroll.rollout.http.generate import GenerateFields

GENERATING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def started(fake: FakeEngine, chat_model: Path) -> Iterator[Callable[..., tuple[Front, WorkerOnThread]]]:
    """Return a function that starts a worker with the fake engine and the given settings, and a front end of the
    worker.
    """
    opened: list[Any] = []

    def start(worker: dict[str, Any] | None = None, **settings: Any) -> tuple[Front, WorkerOnThread]:
        opened.append(serving(fake, **(worker or {})))
        running = opened[0].__enter__()
        opened.append(front_end(running.address, tokenizer=str(chat_model), **settings))
        return opened[1].__enter__(), running

    yield start
    for each in reversed(opened):
        each.__exit__(None, None, None)


@pytest.fixture(scope="module")
def plain(chat_model: Path) -> Iterator[Front]:
    with serving(FakeEngine()) as running, front_end(running.address, tokenizer=str(chat_model)) as front:
        yield front


BAD, KWARGS = "invalid_request", "chat_template_kwargs"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": []}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [[1], []]}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [10**30]}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [2000]}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [2000], "stream": True}, 400, "prompt", "invalid_request"),
        ("/v1/completions", {"prompt": [[1], [2000]], "echo": True, "logprobs": 1}, 400, "prompt", "invalid_request"),
        ("/inference/v1/generate", {"token_ids": [2000], "sampling_params": {}}, 400, "token_ids", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "n": True}, 400, "n", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "n": 2000}, 400, "n", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "n": 10**30}, 400, "n", "invalid_request"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"min_tokens": 2**64}},
            400,
            "min_tokens",
            BAD,
        ),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, 400, KWARGS, BAD),
        ("/v1/chat/completions/", {"messages": HELLO}, 404, None, "not_found"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "top_p": 2}, 400, "top_p", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "seed": -1}, 400, "seed", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1025}, 400, "logprobs", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 65}, 400, "stop", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "stop": 3}, 400, "stop", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "wat": 1}, 400, "wat", "unknown_parameter"),
        ("/v1/completions", {"prompt": "x", "echo": True, "stream": True}, 400, "echo", "unsupported_parameter"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"x": 1}}, 400, "stream_options", "unknown_parameter"),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"continuous_usage_stats": True}},
            *(400, "stream_options", "invalid_request"),
        ),
        ("/v1/completions", {"prompt": "x", "max_tokens": 500}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 600}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        ("/inference/v1/generate", {"token_ids": [1]}, 400, "sampling_params", "invalid_request"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"a": 1}}, 400, "a", "unknown_parameter"),
        ("/inference/v1/generate", {"sampling_params": {}}, 400, "token_ids", "invalid_request"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400, "token_ids", "invalid_request"),
        ("/tokenize", {}, 400, "prompt", "invalid_request"),
        ("/tokenize", {"prompt": 3}, 400, "prompt", "invalid_request"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens", "invalid_request"),
        ("/pause?mode=nap", None, 400, "mode", "invalid_request"),
        ("/pause?mode=keep&mode=abort", None, 400, "mode", "invalid_request"),
        ("/v1/completions", {"prompt": "x", "best_of": True}, 400, "best_of", "unsupported_parameter"),
        ("/v1/completions", {"prompt": "x", "use_beam_search": 0}, 400, "use_beam_search", "unsupported_parameter"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {"prl_compact_logprobs": 1}}},
            *(400, "extra_args", "unsupported_parameter"),
        ),
        ("/v1/completions", {"prompt": "x", "top_k": False}, 400, "top_k", "invalid_request"),
        ("/sleep?depth=2", None, 400, "depth", "invalid_request"),
        ("/update_weights", {}, 400, "weight_dir", "invalid_request"),
        ("/update_weights", {"weight_dir": "/nowhere"}, 409, None, "push_failed"),
        ("/nowhere", {}, 404, None, "not_found"),
        ("/v1/models", {}, 405, None, "method_not_allowed"),
    ],
)
def test_the_error_names_the_wrong_field(
    plain: Front, path: str, body: Any, status: int, param: str | None, code: str
) -> None:
    response = plain.post(path, body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error


def test_a_worker_that_fails_is_named(started: Callable[..., tuple[Front, WorkerOnThread]]) -> None:
    front, _ = started()
    response = front.post("/v1/completions", {"prompt": [FAIL_IN_ADD]})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (503, None, "worker_failed"), error


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionFields, {"prompt": [-1] * 1000}),
        (CompletionFields, {"prompt": [[1], *["a"] * 1000]}),
        (CompletionFields, {"prompt": "x", **{f"field{i}": 1 for i in range(1000)}}),
        (CompletionFields, {"prompt": "x", "stream_options": {f"field{i}": 1 for i in range(1000)}}),
        (EditFields, {"logit_bias": {f"x{i}": "y" for i in range(1000)}}),
        (EditFields, {"bad_words": [3] * 1000}),
        (ChatFields, {"messages": [3] * 1000}),
        (ChatFields, {"messages": [{"role": "user", "content": [3] * 1000}]}),
        (ChatFields, {"messages": [{"role": "user"}], "tools": [3] * 1000}),
        (GenerateFields, {"token_ids": ["x"] * 1000, "sampling_params": {}}),
        (DetokenizeFields, {"tokens": [2**31] * 1000}),
    ],
)
def test_very_many_invalid_elements_give_few_faults(kind: type[Fields], fields: dict[str, Any]) -> None:
    """Reporting a fault for each of a million elements would take all memory."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10


def test_more_prompts_than_the_worker_takes_are_refused(
    started: Callable[..., tuple[Front, WorkerOnThread]],
) -> None:
    front, _ = started({"max_queued_requests": 3})
    assert len(front.post("/v1/completions", {"prompt": [[1]] * 3}).json()["choices"]) == 3
    response = front.post("/v1/completions", {"prompt": ["x"] * 4})
    assert response.status_code == 400 and error_of(response)["param"] == "prompt"
    assert "4 prompts are too many (limit 3, the worker's max_queued_requests)" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias", "must match pattern"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "must match pattern"),
        ({"logit_bias": {"5": True}}, "logit_bias", "must be a valid number"),
        ({"logit_bias": {"5": 101}}, "logit_bias[0][1]", "must be at most 100 (got 101.0)"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias[0][0]", "must be less than"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "at most 4096 items"),
        ({"logit_bias": [[5, 1]]}, "logit_bias", "must be a valid dictionary"),
        ({"bad_words": "x"}, "bad_words", "must be a valid list"),
        ({"bad_words": ["x", ""]}, "bad_words", "must have at least 1 character"),
        ({"bad_words": ["x"] * 513}, "bad_words", "at most 512 items"),
        ({"bad_words": ["x", "y" * 65]}, "bad_words[1]", "tokens (limit 64 tokens); give a shorter word"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be at least 0.0001 (got 0)"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "must be at most 2 (got 2.5)"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "must be at least 0 (got -1)"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag: unexpected"),
        ({"structured_outputs": {}}, "structured_outputs", "(got none of them)"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs", "is not valid JSON"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "must be false"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be given"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format",
            "json_schema has the unknown parameter 'x'",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "not together with structured_outputs",
        ),
    ],
)
def test_invalid_edits_are_refused(plain: Front, fields: dict[str, Any], param: str, message: str) -> None:
    response = plain.post("/v1/completions", {"prompt": [1], "max_tokens": 2} | fields)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_request"), error
    assert message in error["message"]


OTHERS = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_unsupported_fields_must_be_off(plain: Front, path: str) -> None:
    is_generate = path.startswith("/inference")

    def post(fields: dict[str, Any]) -> httpx2.Response:
        fields = {"max_tokens": 2, **fields}
        return plain.post(
            path, {"token_ids": [1], "sampling_params": fields} if is_generate else {"prompt": [1], **fields}
        )

    off = {name: neutral for name, values in OFF.items() for neutral in values[:1]}
    assert post(off | dict.fromkeys(OFF.keys() - off.keys()) | dict.fromkeys(IGNORED, "anything")).status_code == 200
    # /inference/v1/generate returns no text, so the field has no effect there.
    for name in OFF.keys() - ({"include_stop_str_in_output"} if is_generate else set()):
        response = post({name: OTHERS.get(name, {"other": "value"})})
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert error["message"].startswith(f"{name}: ") and "is not supported" in error["message"]


def test_the_openai_package_raises_its_own_errors(plain: Front) -> None:
    client = plain.openai()
    with pytest.raises(openai.BadRequestError, match="top_p: must be greater than 0") as caught:
        client.completions.create(model="fake", prompt="x", top_p=0)
    assert (caught.value.param, caught.value.code) == ("top_p", "invalid_request")
    with pytest.raises(openai.NotFoundError, match="the served model is 'fake'"):
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="fake", prompt="x", max_tokens=1000, stream=True)


MALFORMED = [
    *(b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"{'prompt': 1}"),
    *(
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": Infinity}',
    ),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udfff"}', b'{"prompt": "x", "cache_salt": "\\ud800"}'),
    b'{"prompt": "x", "\\ud800": 1}',
    *(b'{"prompt": "x", "n": 1, "n": 1}', b'{"prompt": "x", "stream_options": {"a": 1, "\\u0061": 2}}'),
]


def mutated(generator: random.Random) -> bytes:
    """Return a good request with some bytes changed, doubled or left out, so that it is most likely malformed."""
    body = bytearray(b'{"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "stop": ["a"], "logprobs": 1, "n": 2}')
    for _ in range(generator.randint(1, 6)):
        at = generator.randrange(len(body))
        body[at : at + generator.randint(0, 2)] = bytes(generator.choices(b'"[]{},:0-9e\\\x00\xc3ntf ', k=2))
    return bytes(body)


def test_malformed_requests_harm_no_good_one(plain: Front) -> None:
    good = dict(prompt=[5, 6, 904], max_tokens=6, seed=3, logprobs=1)  # 904 steps, each of which takes a while
    expected = plain.post("/v1/completions", good).json()["choices"]
    is_over = threading.Event()

    def ask_on() -> int:
        count = 0
        while not is_over.is_set():
            assert plain.post("/v1/completions", good).json()["choices"] == expected
            count += 1
        return count

    generator = random.Random(7)
    bodies = MALFORMED + [mutated(generator) for _ in range(300)]
    with ThreadPoolExecutor(3) as threads, httpx2.Client(timeout=60) as client:
        asking = [threads.submit(ask_on) for _ in range(3)]
        statuses = []
        try:
            for number, body in enumerate(bodies):
                response = client.post(plain.url + GENERATING[number % 3], content=body)
                statuses.append(response.status_code)
                if response.status_code != 200:
                    error_of(response)
        finally:
            is_over.set()
        assert min(each.result() for each in asking) > 0
    assert {*statuses} <= {200, 400} and statuses.count(400) > 250
    assert plain.get("/health").json()["state"] == "ready"
    assert plain.metric("trueroll_http_open_requests") == 0.0


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * 2**25 + b"\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n"
        b"0\r\n\r\n",
    ],
)
def test_malformed_http_gets_an_error_and_is_cut(plain: Front, data: bytes) -> None:
    with plain.raw() as connection:
        with suppress(ConnectionError):
            connection.send(data)
        status, headers, told = connection.answer()
        assert 400 <= status < 500 and headers["connection"] == "close" and connection.is_closed()
        assert told["error"].keys() == {"message", "type", "param", "code"}
    assert plain.get("/health").status_code == 200


def test_a_long_body_is_not_read(started: Callable[..., tuple[Front, WorkerOnThread]]) -> None:
    front, _ = started(max_body_bytes=2000)
    assert front.post("/v1/completions", {"prompt": [1] * 400, "max_tokens": 1}).status_code == 200
    response = front.post("/v1/completions", {"prompt": [1] * 1000})
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"
    in_chunks = httpx2.post(f"{front.url}/v1/completions", content=iter([b"[" * 1500, b"[" * 1500]))
    assert in_chunks.status_code == 413


def test_a_full_worker_gives_429(started: Callable[..., tuple[Front, WorkerOnThread]], fake: FakeEngine) -> None:
    front, running = started({"max_queued_requests": 1})
    fake.flow.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(front.post, "/v1/completions", {"prompt": [1]})
        assert fake.at_gate.wait(20)
        while running.worker._vitals.health().requests["open"] == 0:
            pass
        for is_stream in (False, True):
            response = front.post("/v1/completions", {"prompt": [1], "stream": is_stream})
            assert response.status_code == 429 and error_of(response)["code"] == "queue_full"
            assert response.headers["Retry-After"] == "1"
        fake.flow.set()
        assert first.result().status_code == 200
    assert front.post("/v1/completions", {"prompt": [1]}).status_code == 200


def test_a_full_front_end_gives_429(started: Callable[..., tuple[Front, WorkerOnThread]], fake: FakeEngine) -> None:
    front, _ = started(max_open_requests=1)
    fake.flow.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(front.post, "/v1/completions", {"prompt": [1]})
        assert fake.at_gate.wait(20)
        response = front.post("/tokenize", {"prompt": "x"})
        assert response.status_code == 429 and response.headers["Retry-After"] == "1"
        assert error_of(response)["type"] == "rate_limit_error"
        assert front.post("/pause?mode=keep").status_code == 200, "calls that may end the jam are let through"
        assert front.post("/resume").status_code == 200
        fake.flow.set()
        assert first.result().status_code == 200


def test_a_sleeping_worker_that_rejects_requests_gives_503(
    started: Callable[..., tuple[Front, WorkerOnThread]],
) -> None:
    front, _ = started({"while_unavailable": "reject"})
    assert front.post("/sleep").status_code == 200
    response = front.post("/v1/completions", {"prompt": [1]})
    assert response.status_code == 503 and response.headers["Retry-After"] == "1"
    assert error_of(response)["code"] == "unavailable" and "asleep" in error_of(response)["message"]
    response = front.post("/resume")
    assert response.status_code == 409 and error_of(response)["code"] == "illegal_state"
    assert front.post("/wake_up").status_code == 200
    assert front.post("/v1/completions", {"prompt": [1]}).status_code == 200


KEY = "s3cret-key"


def test_a_key_is_asked_for_everywhere_but_health(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving(FakeEngine()) as running:
        with front_end(running.address, KEY, tokenizer=str(chat_model)) as front:
            assert front.openai().completions.create(model="fake", prompt="x").choices
            front.key = "wrong"
            with pytest.raises(openai.AuthenticationError, match="API key"):
                front.openai().models.list()
            for wrong in ("Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer " + "x" * 10_000, ""):
                response = front.post("/v1/completions", {"prompt": [1]}, Authorization=wrong)
                assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
                assert error_of(response)["code"] == "invalid_api_key" and KEY not in response.text
            for path in ("/metrics", "/is_sleeping", "/nowhere"):
                assert front.get(path).status_code == 401
            assert front.post("/sleep").status_code == 401
            assert httpx2.get(f"{front.url}/health").status_code == 200
    assert KEY not in caplog.text


def test_a_client_without_a_key_is_answered_and_its_body_is_not_parsed(chat_model: Path) -> None:
    """After a wrong key, the client sends an endless body in one-byte chunks."""
    with serving(FakeEngine()) as running, front_end(running.address, KEY, tokenizer=str(chat_model)) as front:
        with Raw(front.connect(), key="wrong") as stranger:
            stranger.send_head("POST", "/v1/completions", "Transfer-Encoding: chunked")
            stranger.send(b"1\r\n[\r\n" * 1000)
            status, headers, told = stranger.answer()
            assert (status, headers["connection"], told["error"]["code"]) == (401, "close", "invalid_api_key")
            assert stranger.is_closed()
            assert stranger.send_until_refused(b"1\r\n[\r\n" * 10_000, most=2**28) < 2**28
        assert front.get("/health").status_code == 200


NOT_LOCAL = (
    *("x@127.0.0.1", "[::1].evil", "localhost:evil", "localhost.evil", "127.0.0.1:80:80", "127.1", "[::1", "::1"),
    *("localhost:", "localhost:123456", "127.0.0.1 evil", "localhost/", "[fe80::1]", "0.0.0.0"),
)


def test_web_pages_of_other_servers_are_refused(plain: Front) -> None:
    own = plain.url.removeprefix("http://")
    port = own.rpartition(":")[2]
    for host in (own, f"localhost:{port}", "LOCALHOST", "[::1]:80"):
        assert plain.get("/health", Host=host).status_code == 200
    for host in (f"evil.example:{port}", "", "127.0.0.1.evil.example", "[bad", *NOT_LOCAL):
        assert plain.get("/health", Host=host).status_code == 403
    assert plain.post("/pause", Origin="http://evil.example").status_code == 403
    for origin in ("null", "http://[evil", "", plain.url + "0"):
        assert plain.post("/pause", Origin=origin).status_code == 403
    assert plain.get("/is_paused", Origin=plain.url).json() == {"is_paused": False}


def test_beyond_loopback_there_must_be_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert api_key(HttpConfig(address="ipc://x")) is None
    assert api_key(HttpConfig(address="ipc://x", host="::1")) is None
    for host in ("0.0.0.0", "10.0.0.1", "::", "example.org"):
        with pytest.raises(ConfigError, match="host: .* is not a loopback IP and needs an API key"):
            api_key(HttpConfig(address="ipc://x", host=host))
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    config = HttpConfig(address="ipc://x", host="0.0.0.0", api_key_file=str(file))
    with pytest.raises(ConfigError, match="api_key_file: .* a file that belongs to you .* chmod 600"):
        api_key(config)
    file.chmod(0o600)
    assert api_key(config) == KEY.encode()
    file.write_text("two words")
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        api_key(config)
    assert "words" not in str(caught.value)
    monkeypatch.setenv(API_KEY_VARIABLE, "other")
    assert api_key(HttpConfig(address="ipc://x", host="0.0.0.0")) == b"other"
