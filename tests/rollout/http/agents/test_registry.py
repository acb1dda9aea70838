"""The open sessions: capabilities, bounds, and sessions without requests. No session here draws anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h11
import pytest
from fake_engine import FakeEngine
from http_fronts import Front, error_of, front_end
from serving import serving

from trueroll.rollout.http.agents.chat import read_chat_call
from trueroll.rollout.http.agents.registry import OpenSession, Registry
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.errors import HttpError
from trueroll.rollout.http.exchange import Exchange
from trueroll.rollout.http.paths import capability_in, without_capability
from trueroll.rollout.network.keys import OWNER


class Idle:
    """Stands for a session. `num_bytes`: its memory."""

    num_bytes = 0
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def opened(session: Idle | None = None) -> OpenSession:
    return OpenSession(session or Idle(), OWNER, {}, {})  # type: ignore[arg-type]


def sessions(**settings: Any) -> Registry:
    return Registry(HttpConfig(address="ipc://x", **settings))


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(HttpError) as caught:
        call()
    return caught.value.code


def test_a_capability_opens_one_session() -> None:
    registry, session, other_session = sessions(), Idle(), Idle()
    mine, other = opened(session), opened(other_session)
    first, second = registry.begin(mine), registry.begin(other)
    assert first != second and len(first) == 32
    assert registry.find(first) is mine and registry.find(second) is other
    wrong = ("", first[:-1], f"{first}x", first.swapcase(), "é" * 200, "\udcff")
    assert all(code_of(lambda each=each: registry.find(each)) == "session_not_found" for each in wrong)
    asyncio.run(registry.end(first))
    assert session.is_closed and not other_session.is_closed
    assert code_of(lambda: registry.find(first)) == "session_not_found"
    assert code_of(lambda: asyncio.run(registry.end(first))) == "session_not_found"
    assert registry.find(second) is other


def test_arguments_of_the_template_of_a_session_replace_those_of_a_call() -> None:
    session = OpenSession(Idle(), OWNER, {}, {"enable_thinking": False})  # type: ignore[arg-type]
    call = read_chat_call(
        {"messages": [{"role": "user"}], "chat_template_kwargs": {"enable_thinking": True, "more": 1}}
    )
    assert session.template_of(call) == {"enable_thinking": False, "more": 1}


def test_sessions_are_bounded_in_number_and_memory() -> None:
    registry = sessions(max_sessions=2, max_session_bytes=2**20)
    growing = Idle()
    large, small = opened(growing), opened()
    first, _ = registry.begin(large), registry.begin(small)
    assert code_of(lambda: registry.begin(opened())) == "sessions_full"
    with registry.request(large, adds=True), registry.request(small, adds=True):
        growing.num_bytes = 2**20
    assert code_of(lambda: registry.request(small, adds=True).__enter__()) == "sessions_full"
    with registry.request(small):
        pass  # reading needs no room
    asyncio.run(registry.end(first))
    with registry.request(small, adds=True):
        registry.begin(opened())


def test_a_session_that_ends_during_a_request_frees_its_memory() -> None:
    registry, growing = sessions(max_session_bytes=2**20), Idle()
    ending = opened(growing)
    capability = registry.begin(ending)
    with registry.request(ending, adds=True):
        asyncio.run(registry.end(capability))
        growing.num_bytes = 2**30
    registry.begin(opened())


def test_a_session_without_requests_is_deleted() -> None:
    registry, used, unused = sessions(session_seconds=0.04), Idle(), Idle()
    busy, idle = opened(used), opened(unused)

    async def work() -> None:
        kept, dropped = registry.begin(busy), registry.begin(idle)
        running = asyncio.create_task(registry.run())
        with registry.request(busy):
            while not idle.is_ended:
                await asyncio.sleep(0.01)
            assert registry.find(kept) is busy and code_of(lambda: registry.find(dropped)) == "session_not_found"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    assert unused.is_closed and used.is_closed


def test_paths_without_capabilities() -> None:
    for path in ("/sessions", "/sessions/", "/v1/sessions/x", "/sessionsx/y", "/"):
        assert without_capability(path) == path and capability_in(path) is None
    for rest in ("", "/v1/chat/completions", "/", "/a/b/c"):
        assert "secret" not in without_capability(f"/sessions/secret{rest}")
        assert capability_in(f"/sessions/secret{rest}") == "secret"
    assert without_capability("/sessions/secret/samples") == "/sessions/{id}/samples"


def test_a_capability_needs_no_key_and_opens_nothing_else(tiny_llama: Path) -> None:
    settings: dict[str, Any] = dict(key="0123456789abcdef", tokenizer=str(tiny_llama))
    with serving(FakeEngine()) as running, front_end(running.address, **settings) as front:
        begun = front.post("/sessions", {})
        capability = begun.json()["session_id"]
        bare = Front(front.url, front.model, "wrong")
        for path in (f"/sessions/{capability}", f"/sessions/{capability}/samples", f"/sessions/{capability}/v1/models"):
            assert bare.get(path).status_code == 200, path
        assert bare.post("/sessions", {}).status_code == 401
        for path in ("/metrics", "/v1/models", "/sessions"):
            assert bare.get(path, Authorization=f"Bearer {capability}").status_code == 401, path
        refused = bare.get(f"/sessions/{capability[::-1]}/samples")
        assert refused.status_code == 404 and error_of(refused)["code"] == "session_not_found"
        assert bare.post(f"/sessions/{capability}/pause").status_code == 404
        assert bare.get(f"/sessions/{capability}%0A").status_code == 404
        metrics = front.get("/metrics").text
        assert capability not in metrics and 'path="/sessions/{id}/samples",status="200"' in metrics
        assert bare.delete(f"/sessions/{capability}").status_code == 200
        for end in (bare.delete, bare.get):
            assert end(f"/sessions/{capability}").status_code == 404


def test_the_log_of_a_failure_has_no_capability(caplog: pytest.LogCaptureFixture) -> None:
    request = h11.Request(method="GET", target="/sessions/secret/samples", headers=[("Host", "localhost")])

    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    asyncio.run(Exchange(Mock(), request).run(fail))
    assert "/sessions/{id}/samples" in caplog.text and "secret" not in caplog.text
