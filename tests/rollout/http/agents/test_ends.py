"""Sessions that end while their requests are in flight: each request gets one answer, and the front end goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from http_fronts import Front, error_of, front_end
from serving import serving, stop_after_a_step

from trueroll.rollout.http.agents import endpoints
from trueroll.rollout.http.agents.call import AgentCall
from trueroll.rollout.http.agents.endpoints import SessionEndpoints

GO: dict[str, Any] = dict(messages=[dict(role="user", content="go")])


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that draws one token of each sample, and then waits."""
    engine = FakeEngine()
    stop_after_a_step(engine)
    return engine


@pytest.fixture
def front(engine: FakeEngine, chat_model: Path) -> Iterator[Front]:
    with serving(engine) as running, front_end(running.address, tokenizer=str(chat_model)) as front:
        yield front


def test_a_session_is_deleted_during_its_calls(front: Front, engine: FakeEngine) -> None:
    """The calls are a stream, a whole answer, a call that waits for the whole answer, and a second deletion."""
    path = f"/sessions/{front.post('/sessions', {}).json()['session_id']}"
    chat, retry = f"{path}/v1/chat/completions", {"x-stainless-retry-count": "1"}
    client = front.openai().with_options(base_url=f"{front.url}{path}/v1")
    with ThreadPoolExecutor(2) as threads:
        engine.flow.set()
        stream = client.chat.completions.create(model=front.model, stream=True, **GO)
        assert next(stream).choices
        sent = []
        for number, headers in enumerate([{}, retry], 2):
            sent.append(threads.submit(front.post, chat, GO | {"n": 1}, **headers))
            front.wait_for("trueroll_http_open_requests", number)
            engine.flow.set()
        while len(engine.requests) < 2:
            time.sleep(0.001)
        assert front.get(path).json()["num_messages"] == 0
        assert [front.delete(path).status_code for _ in range(2)] == [200, 404]
        with pytest.raises(openai.APIError, match="^session: closed during the call; "):
            list(stream)
        whole = [each.result(60) for each in sent]
    assert [(each.status_code, error_of(each)["message"][:16]) for each in whole] == [(409, "session: closed ")] * 2
    front.wait_for("trueroll_http_open_requests", 0)
    assert len(engine.requests) == 2 and front.get(path).status_code == 404


def test_a_session_expires_while_a_body_arrives(engine: FakeEngine, chat_model: Path) -> None:
    settings: dict[str, Any] = dict(tokenizer=str(chat_model), session_seconds=0.05)
    with serving(engine) as running, front_end(running.address, **settings) as front, front.raw() as raw:
        path, body = f"/sessions/{front.post('/sessions', {}).json()['session_id']}", json.dumps(GO).encode()
        raw.send_head("POST", f"{path}/v1/chat/completions", f"Content-Length: {len(body)}")
        raw.send(body[:-1])
        front.wait_for("trueroll_http_expired_sessions_total", 1)
        raw.send(body[-1:])
        status, _, answer = raw.answer()
        assert (status, answer["error"]["code"]) == (404, "session_not_found") and not engine.requests
        assert front.post("/sessions", {}).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_a_session_ends_while_a_body_is_read(
    front: Front, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is refused, because it begins after the end."""
    session = f"/sessions/{front.post('/sessions', {}).json()['session_id']}"
    read, is_reading, may_read = SessionEndpoints._call, threading.Event(), threading.Event()

    def slowly(*given: Any) -> AgentCall:
        is_reading.set()
        assert may_read.wait(60)
        return read(*given)

    monkeypatch.setattr(SessionEndpoints, "_call", slowly)
    monkeypatch.setattr(endpoints, "is_small", lambda body: False)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(front.post, f"{session}/v1/{path}", GO)
        assert is_reading.wait(60) and front.delete(session).status_code == 200
        may_read.set()
        refused = sent.result(60)
    assert (refused.status_code, error_of(refused)["message"]) == (409, "session: closed; begin a new session")
    assert not engine.requests
