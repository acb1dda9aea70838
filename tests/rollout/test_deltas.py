"""Deltas of growing samples on the way from the worker to the caller, with slow readers, late joins, aborts and
reconnects.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, expected_tokens
from serving import RawClient, WorkerOnThread, serving

from trueroll.engine.request import Output
from trueroll.rollout import AsyncRolloutClient, RolloutClient, SampleDelta, SampleOutput, SamplingParams

from .client.test_client import proxied

LONG = SamplingParams(n=2, max_tokens=60)
Event = tuple[int, SampleDelta | SampleOutput]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[WorkerOnThread]:
    with serving(engine) as running:
        yield running


@pytest.fixture
def client(worker: WorkerOnThread) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as client:
        yield client


@pytest.fixture
def steps(engine: FakeEngine) -> Steps:
    return Steps(engine)


class Steps:
    """Controls an engine, which adds one token to each sample at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self._left = 0
        self._engine, self._step = engine, engine.step
        engine.step = self._limited
        engine.flow.clear()

    def _limited(self) -> list[Output]:
        if not self._left:
            return self._step()
        self._engine.flow.set()
        outputs = self._step()
        self._engine.flow.clear()
        self._left -= 1
        return outputs

    def take(self, count: int) -> None:
        self._left = count
        while self._left:
            time.sleep(0.001)

    def run(self) -> None:
        self._engine.step = self._step
        self._engine.flow.set()


def pieces_of(events: Iterable[Event]) -> dict[tuple[int, int], list[SampleDelta]]:
    """Check that the pieces of each sample add up to the sample, bit for bit, and return the pieces."""
    pieces: defaultdict[tuple[int, int], list[SampleDelta]] = defaultdict(list)
    for position, event in events:
        found = pieces[position, event.index]
        if isinstance(event, SampleDelta):
            assert event.start == sum(len(piece.token_ids) for piece in found)
            found.append(event)
            continue
        assert [token for piece in found for token in piece.token_ids] == event.token_ids
        assert joined([piece.logprobs for piece in found]) == joined([event.logprobs])
    return pieces


def joined(columns: list[np.ndarray | None]) -> list[bytes | None]:
    given = [column.tobytes() for column in columns if column is not None]
    return [b"".join(given)] if len(given) == len(columns) else [None]


def test_the_pieces_add_up_to_the_samples(client: RolloutClient) -> None:
    params = [SamplingParams(n=3, max_tokens=40), SamplingParams(max_tokens=1), SamplingParams(logprobs=None)]
    events = list(client.stream([[1], [2], [3]], params, deltas=True, seed=5))
    pieces = pieces_of(events)
    samples = {(position, event.index): event for position, event in events if isinstance(event, SampleOutput)}
    assert pieces.keys() == samples.keys() == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)}
    assert len(pieces[0, 0]) > 1, "premise: there are several pieces"
    plain: dict[tuple[int, int], SampleOutput] = {}
    for position, sample in client.stream([[1], [2], [3]], params, seed=5):
        plain[position, sample.index] = sample
    assert {key: sample.token_ids for key, sample in plain.items()} == {k: s.token_ids for k, s in samples.items()}


def test_the_asynchronous_client_gets_deltas_too(worker: WorkerOnThread) -> None:
    async def run() -> list[Event]:
        async with AsyncRolloutClient(worker.address) as client:
            return [event async for event in client.stream([[1]], LONG, deltas=True)]

    assert len(pieces_of(asyncio.run(run()))[0, 0]) > 1


def deltas_in(replies: list[dict[str, Any]]) -> list[list[tuple[str, int, int, list[int]]]]:
    """Return (request, sample index, start, tokens) of each delta, grouped by message."""
    return [
        [(d["id"], d["index"], d["start"], np.frombuffer(d["token_ids"], "<i4").tolist()) for d in reply["samples"]]
        for reply in replies
        if reply["type"] == "deltas"
    ]


def test_a_step_sends_one_message_to_each_caller(worker: WorkerOnThread, steps: Steps) -> None:
    with RawClient(worker.address) as raw:
        raw.generate("a", caller="me", deltas=True, n=2, max_tokens=9)
        raw.generate("b", caller="me", deltas=True, max_tokens=9)
        raw.generate("c", caller="another", deltas=True, max_tokens=9)
        raw.generate("d", caller="me", max_tokens=9)
        raw.health()
        steps.take(1)
        replies = [raw.receive() for _ in range(2)]
        assert {reply["caller"] for reply in replies} == {"me", "another"}
        mine, other = sorted(replies, key=lambda reply: reply["caller"] != "me")
        assert [d[:3] for d in deltas_in([mine])[0]] == [("a", 0, 0), ("a", 1, 0), ("b", 0, 0)]
        assert [d[:3] for d in deltas_in([other])[0]] == [("c", 0, 0)]
        assert deltas_in([mine])[0][0][3] == expected_tokens(7, 0, 1)
        steps.take(1)
        assert {d[:3] for message in deltas_in([raw.receive(), raw.receive()]) for d in message} == {
            ("a", 0, 1),
            ("a", 1, 1),
            ("b", 0, 1),
            ("c", 0, 1),
        }
        steps.run()
        replies = [reply for _ in range(4) for reply in raw.receive_until("done")]
        assert sum(reply["type"] == "done" for reply in replies) == 4, "one terminal reply for each request"


def test_a_request_without_deltas_gets_none(worker: WorkerOnThread, engine: FakeEngine) -> None:
    with RawClient(worker.address) as raw:
        raw.generate("a", n=3, max_tokens=30)
        assert [reply["type"] for reply in raw.receive_until("done")] == ["sample"] * 3 + ["done"]
        assert engine._told == {}


def test_a_late_join_first_gets_all_earlier_tokens(worker: WorkerOnThread, steps: Steps) -> None:
    """`deltas` is not part of a request's content: submissions with and without it join the same request."""
    with RawClient(worker.address) as first, RawClient(worker.address) as late, RawClient(worker.address) as plain:
        first.generate("a", caller="first", max_tokens=9)
        first.health()
        steps.take(3)
        late.generate("a", caller="late", deltas=True, max_tokens=9)
        assert deltas_in([late.receive()]) == [[("a", 0, 0, expected_tokens(7, 0, 3))]]
        plain.generate("a", caller="plain", max_tokens=9)
        steps.take(1)
        assert deltas_in([late.receive()]) == [[("a", 0, 3, expected_tokens(7, 0, 4)[3:])]]
        late.generate("a", caller="late", deltas=True, max_tokens=9)
        assert deltas_in([late.receive()]) == [[("a", 0, 0, expected_tokens(7, 0, 4))]], "a resend gets all tokens"
        steps.run()
        for raw in (first, plain):
            assert [reply["type"] for reply in raw.receive_until("done")] == ["sample", "done"]
        assert [late.receive_until("done")[-1]["type"] for _ in range(2)] == ["done"] * 2


def test_a_join_during_a_pause_gets_the_earlier_tokens(client: RolloutClient, steps: Steps) -> None:
    with (
        RawClient(client._client._connection._line.address) as first,
        RawClient(first.socket.LAST_ENDPOINT.decode()) as late,
    ):
        first.generate("a", max_tokens=9)
        first.health()
        steps.take(2)
        client.pause()
        late.generate("a", deltas=True, max_tokens=9)
        assert deltas_in([late.receive()]) == [[("a", 0, 0, expected_tokens(7, 0, 2))]]
        client.resume()
        steps.run()
        late.receive_until("done")


def test_a_join_to_a_finished_request_gets_only_its_samples(worker: WorkerOnThread) -> None:
    with RawClient(worker.address) as raw:
        raw.generate("a", n=2)
        raw.receive_until("done")
        raw.generate("a", n=2, deltas=True)
        assert [reply["type"] for reply in raw.receive_until("done")] == ["sample", "sample", "done"]


def test_a_submission_after_an_abort_gets_deltas_of_the_new_samples(worker: WorkerOnThread, steps: Steps) -> None:
    with RawClient(worker.address) as first, RawClient(worker.address) as next_one:
        first.generate("a", caller="first", deltas=True, n=2, max_tokens=9)
        first.health()
        steps.take(3)
        first.send("abort", id="end", request_id="a", index=0)
        first.receive_until("aborted")
        next_one.generate("a", caller="next", deltas=True, n=2, max_tokens=9)
        next_one.health()
        steps.run()
        replies = next_one.receive_until("done")
        assert first.receive_until("done")[-1]["finish_reasons"] == {"abort": 1, "length": 1}
        assert replies[-1]["finish_reasons"] == {"length": 2}
        starts = [d[1:3] for message in deltas_in(replies) for d in message]
        assert {(0, 0), (1, 0)} <= set(starts) and len(set(starts)) == len(starts)


def test_a_caller_that_gives_up_gets_no_more_deltas(worker: WorkerOnThread, steps: Steps) -> None:
    with RawClient(worker.address) as raw, RawClient(worker.address) as other:
        raw.generate("a", caller="x", deltas=True, max_tokens=9)
        other.generate("a", caller="y", deltas=True, max_tokens=9)
        raw.health()
        other.health()
        steps.take(1)
        raw.send("abort", id="end", request_id="a", caller="x")
        raw.receive_until("aborted")
        steps.take(1)
        assert sum(map(len, deltas_in([other.receive(), other.receive()]))) == 2
        steps.run()
        assert other.receive_until("done")[-1]["type"] == "done"
        assert raw.health()["requests"]["open"] == 0
        assert worker.worker._book.streams._streams == {} and worker.worker._book.streams._progress == {}


def test_a_slow_reader_gets_one_combined_message_later(
    worker: WorkerOnThread, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = threading.Event()
    monkeypatch.setattr(worker.worker._book.streams, "_takes", lambda identity: reads.is_set())
    with RawClient(worker.address) as raw:
        raw.generate("a", deltas=True, n=2, max_tokens=200)
        raw.health()
        steps.take(100)
        raw.send("health", id="still nothing")
        assert raw.receive()["id"] == "still nothing"
        reads.set()
        raw.send("health", id="look")
        [message] = deltas_in(raw.receive_until("deltas"))
        assert message == [("a", index, 0, expected_tokens(7, index, 100)) for index in range(2)]
        steps.run()
        raw.receive_until("done")


def test_an_aborted_sample_equals_its_deltas(client: RolloutClient, steps: Steps) -> None:
    stream = client.stream([[1]], LONG, deltas=True, request_ids=["a"])
    with RawClient(client._client._connection._line.address) as raw:
        events: list[Event] = []
        reader = threading.Thread(target=lambda: events.extend(stream))
        reader.start()
        while not raw.health()["requests"]["open"]:
            pass
        steps.take(4)
        raw.send("abort", id="end", request_id="a")
        raw.receive_until("aborted")
        reader.join(20)
    pieces = pieces_of(events)
    ends = [event for _, event in events if isinstance(event, SampleOutput)]
    assert [len(sample.token_ids) for sample in ends] == [4, 4] and {s.finish_reason for s in ends} == {"abort"}
    assert pieces.keys() == {(0, 0), (0, 1)}


def test_a_reconnect_repeats_no_token(worker: WorkerOnThread, steps: Steps) -> None:
    with proxied(worker) as proxy, RolloutClient(proxy.address) as client, RawClient(worker.address) as other:
        events: list[Event] = []
        stream = client.stream([[1]], LONG, deltas=True, request_ids=["a"])
        reader = threading.Thread(target=lambda: events.extend(stream))
        reader.start()
        while not other.health()["requests"]["open"]:
            pass
        steps.take(4)
        while not events:
            time.sleep(0.001)
        proxy.cut()
        while not client.stats().service["joined"]:
            time.sleep(0.001)
        steps.run()
        reader.join(20)
    assert not reader.is_alive() and pieces_of(events).keys() == {(0, 0), (0, 1)}


def test_a_lost_connection_leaves_no_reader(worker: WorkerOnThread, steps: Steps) -> None:
    with RawClient(worker.address) as other:
        with RawClient(worker.address) as raw:
            raw.generate("a", deltas=True, max_tokens=9)
            raw.health()
            assert worker.worker._book.streams._progress
        while worker.worker._book.streams._progress:
            other.health()
        steps.run()
        other.generate("a", deltas=True, max_tokens=9)
        other.receive_until("done")
