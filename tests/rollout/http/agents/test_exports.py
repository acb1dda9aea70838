"""Exports of sessions to clients that leave or read slowly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from trueroll.rollout.http.agents import endpoints
from trueroll.rollout.http.agents.endpoints import MOST_EXPORTS, Exports
from trueroll.rollout.http.agents.registry import OpenSession, Registry
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.errors import Gone
from trueroll.rollout.http.turns import Turns
from trueroll.rollout.network.keys import OWNER


class Slow:
    """Stands for a session that returns its samples once `free` is set. `num_readers`: number of calls."""

    num_bytes = num_readers = 0

    def __init__(self) -> None:
        self.free = threading.Event()

    def samples(self) -> list[Any]:
        self.num_readers += 1
        assert self.free.wait(60)
        return []


class Client:
    """A client that reads once `reads` is set, and leaves once `leaves` is set. `got`: types of the messages."""

    def __init__(self) -> None:
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.got: list[str] = []

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.got.append(message["type"])


Export: TypeAlias = Callable[[OpenSession, Client], asyncio.Task[None]]
WHOLE = ["http.response.start", "http.response.body"]


def opened(session: Slow) -> OpenSession:
    return OpenSession(session, OWNER, {}, {})  # type: ignore[arg-type]


def with_exports(work: Callable[[Export], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        exports = Exports(Registry(HttpConfig(address="ipc://x")), Turns())

        def export(session: OpenSession, client: Client) -> asyncio.Task[None]:
            sending = exports.send(session, "json", {"type": "http"}, client.receive, client.send)
            return asyncio.create_task(sending)

        await work(export)

    asyncio.run(run())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_export_ends_when_its_client_leaves() -> None:
    """An export that waits ends at once. An export that reads the session keeps its place until it has read."""
    sessions = [Slow() for _ in range(MOST_EXPORTS + 1)]

    async def work(export: Export) -> None:
        clients = [Client() for _ in sessions]
        first, *others, last = (export(opened(each), client) for each, client in zip(sessions, clients, strict=True))
        while sum(each.num_readers for each in sessions) < MOST_EXPORTS:
            await asyncio.sleep(0.001)
        clients[-1].leaves.set()
        with pytest.raises(Gone):
            await last
        clients[0].leaves.set()
        await turns()
        assert not first.done() and sessions[-1].num_readers == 0
        for session, client in zip(sessions, clients, strict=True):
            session.free.set()
            client.reads.set()
        with pytest.raises(Gone):
            await first
        await asyncio.gather(*others)
        assert [client.got for client in clients] == [[], *[WHOLE] * len(others), []]

    with_exports(work)


def test_a_session_has_one_export_at_a_time() -> None:
    """The exports of other sessions do not wait for a client that reads slowly."""

    async def work(export: Export) -> None:
        session, other = Slow(), Slow()
        session.free.set()
        other.free.set()
        busy, slow, waiting, quick = opened(session), Client(), Client(), Client()
        sending, second = export(busy, slow), export(busy, waiting)
        quick.reads.set()
        await export(opened(other), quick)
        while not session.num_readers:
            await asyncio.sleep(0.001)
        assert quick.got == WHOLE and (session.num_readers, busy.num_open) == (1, 2)
        waiting.leaves.set()
        with pytest.raises(Gone):
            await second
        assert busy.num_open == 1
        slow.reads.set()
        await sending
        assert slow.got == WHOLE and busy.num_open == 0

    with_exports(work)


def test_clients_that_read_slowly_lose_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "EXPORT_SECONDS", 0.05)

    async def work(export: Export) -> None:
        sessions, quick = [Slow() for _ in range(MOST_EXPORTS + 1)], Client()
        for session in sessions:
            session.free.set()
        slow = [(opened(session), Client()) for session in sessions[:-1]]
        holding = [export(*each) for each in slow]
        while not all(session.num_readers for session in sessions[:-1]):
            await asyncio.sleep(0.001)
        quick.reads.set()
        await export(opened(sessions[-1]), quick)
        await asyncio.gather(*holding)
        assert quick.got == WHOLE and [client.got for _, client in slow] == [[]] * MOST_EXPORTS
        assert [session.num_open for session, _ in slow] == [0] * MOST_EXPORTS

    with_exports(work)
