"""Bodies that are still arriving: the shared byte budget of all connections, time limits, and that an incomplete body
takes no request slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from http_fronts import Front, front_end
from serving import serving

from trueroll.errors import ConfigError
from trueroll.rollout.http.bodies import Bodies, drop_body, taken_body
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.errors import Gone, HttpError

KIB = 2**10


class Client:
    """A client that sends the body of a request. `send` sends the next part."""

    def __init__(self, bodies: Bodies) -> None:
        self.scope: dict[str, Any] = {"headers": []}
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reading = asyncio.create_task(bodies.read(self.scope, self._parts.get, may_be_long=True))  # type: ignore[arg-type]

    async def send(self, num_bytes: int, is_last: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * num_bytes, "more_body": not is_last})
        while not self._parts.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})
        await asyncio.wait([self.reading])

    async def refusal(self) -> HttpError:
        with pytest.raises(HttpError) as caught:
            await self.reading
        return caught.value


def bodies(**settings: Any) -> Bodies:
    settings = {"max_body_bytes": 8 * KIB, "max_unfinished_bytes": 16 * KIB} | settings
    return Bodies(HttpConfig(address="ipc://x", **settings))


def held(bodies: Bodies) -> float:
    return next(iter(bodies.collect())).samples[0].value


def test_large_slow_bodies_give_way_and_small_ones_get_through() -> None:
    async def check() -> None:
        reader = bodies()
        large = [Client(reader) for _ in range(3)]
        for client in large[:2]:
            await client.send(7 * KIB)
        small = Client(reader)
        await small.send(KIB)
        assert held(reader) == 15 * KIB
        await large[2].send(4 * KIB)
        refused = await large[0].refusal()  # this body has held the most bytes for the longest time
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "bodies_full", "1")
        assert held(reader) == 12 * KIB
        await small.send(1, is_last=True)
        await small.reading
        assert held(reader) == 12 * KIB + 1, "it counts until it is parsed"
        with taken_body(small.scope) as body:
            assert body == b"x" * (KIB + 1)
        assert held(reader) == 11 * KIB
        for client in large[1:]:
            await client.leave()
            with pytest.raises(Gone):
                await client.reading
        assert held(reader) == 0

    asyncio.run(check())


def test_an_unused_body_is_returned_to_the_budget() -> None:
    async def check() -> None:
        reader = bodies()
        client = Client(reader)
        await client.send(KIB, is_last=True)
        await client.reading
        assert held(reader) == KIB
        for _ in range(2):
            drop_body(client.scope)
            assert held(reader) == 0 and "trueroll.body" not in client.scope

    asyncio.run(check())


def test_data_for_an_evicted_body_is_discarded() -> None:
    """The last part of the body may arrive before the reading task learns of the eviction."""

    async def check() -> None:
        reader = bodies(max_unfinished_bytes=8 * KIB)
        first, second = Client(reader), Client(reader)
        await first.send(7 * KIB)
        second._parts.put_nowait({"type": "http.request", "body": b"x" * 2 * KIB, "more_body": True})
        first._parts.put_nowait({"type": "http.request", "body": b"end", "more_body": False})
        assert (await first.refusal()).status == 503
        assert "trueroll.body" not in first.scope
        await second.leave()

    asyncio.run(check())


def test_a_body_can_be_evicted_right_after_its_timeout() -> None:
    """Rescheduling an expired timeout raises an error. The error must not reach the body that needs the room."""

    async def check() -> None:
        reader = bodies()
        late = Client(reader)
        await late.send(KIB)
        [body] = reader._unfinished
        body.limit.reschedule(0.0)
        await asyncio.sleep(0)
        assert body.limit.expired() and not late.reading.done()
        body.give_way()
        assert (await late.refusal()).status == 503
        assert held(reader) == 0

    asyncio.run(check())


def test_a_body_is_bounded_in_length_and_time() -> None:
    async def check() -> None:
        reader = bodies(body_seconds=0.05)
        declared, long, slow = Client(reader), Client(reader), Client(reader)
        declared.scope["headers"] = [(b"content-length", b"8193")]
        assert (await declared.refusal()).code == "body_too_large"
        await long.send(8 * KIB)
        assert not long.reading.done()
        await long.send(1)
        assert (await long.refusal()).code == "body_too_large"
        assert (await slow.refusal()).status == 408
        refused = [*reader.collect()][1].samples
        assert {sample.labels["reason"]: sample.value for sample in refused} == {"length": 2, "time": 1}
        assert held(reader) == 0

    asyncio.run(check())


def test_the_budget_must_have_room_for_one_body() -> None:
    with pytest.raises(ConfigError, match=r"max_unfinished_bytes: 2048 is less than max_body_bytes \(4096\)"):
        HttpConfig(address="ipc://x", max_body_bytes=4096, max_unfinished_bytes=2048)


@pytest.fixture(scope="module")
def narrow(chat_model: Path) -> Iterator[Front]:
    """A front end that accepts one request at a time."""
    with (
        serving(FakeEngine()) as running,
        front_end(running.address, tokenizer=str(chat_model), max_open_requests=1) as front,
    ):
        yield front


def test_a_request_takes_no_slot_before_its_body_is_whole(narrow: Front) -> None:
    body = b'{"prompt": [1], "max_tokens": 1}'
    with narrow.raw() as slow:
        slow.send_head("POST", "/v1/completions", f"Content-Length: {len(body)}")
        slow.send(body[:5])
        narrow.wait_for("trueroll_http_unfinished_body_bytes", 5)
        assert narrow.metric("trueroll_http_open_requests") == 0
        assert narrow.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).status_code == 200
        slow.send(body[5:])
        assert slow.answer()[0] == 200
    narrow.wait_for("trueroll_http_open_requests", 0)
