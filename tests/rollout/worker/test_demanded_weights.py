"""Requests that demand newer weights than a worker serves. The worker refuses the request, or the request waits for a
push.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from pushing import HandPush, ask
from serving import RawClient, WorkerOnThread, serving

from trueroll.errors import InvalidRequestError
from trueroll.rollout import AsyncRolloutClient, RolloutClient, SamplingParams, StaleWeightsError
from trueroll.rollout.client.continuation import continuation
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker import book

NEW = {name: torch.ones(shape) for name, shape in SHAPES.items()}
SERVED, LATER = 3, 5
"""The version with which the fake engine begins, and the version that `HandPush` pushes."""
PROMPT = np.array([1, 2, 3], "<i4").tobytes()


def demand(client: RawClient, id: str, version: int = LATER, waits: bool = True, **fields: Any) -> None:
    """Request four tokens without waiting for a reply. By default, demand weights that have not been pushed yet."""
    params = dict(max_tokens=4, seed=7) | fields.pop("params", {})
    fields |= dict(min_weight_version=version, wait_for_weights=waits)
    client.send("generate", id=id, prompt_token_ids=PROMPT, params=params, **fields)


def push(client: RawClient, version: int = LATER, **fields: Any) -> None:
    with HandPush(client, NEW, version) as push:
        assert push.run(**fields)["weight_version"] == version


def num_open(client: RawClient) -> int:
    return client.health()["requests"]["open"]


def versions(replies: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [reply["weight_versions"] for reply in replies if reply["type"] in ("sample", "scores")]


@pytest.mark.parametrize("version", [0, SERVED])
def test_demands_for_served_versions_are_met(raw: RawClient, version: int) -> None:
    demand(raw, "a", version, waits=False)
    assert versions(raw.receive_until("done", "error")) == [[[SERVED, 0, 4]]]


@pytest.mark.parametrize("type", ["generate", "score"])
def test_older_weights_are_refused_and_the_id_is_free_again(raw: RawClient, engine: FakeEngine, type: str) -> None:
    fields = dict(prompt_token_ids=PROMPT, params={"max_tokens": 4}) if type == "generate" else dict(token_ids=PROMPT)
    raw.send(type, id="a", min_weight_version=LATER, **fields)
    error = raw.receive()
    assert (error["type"], error["code"], error["id"]) == ("error", "stale_weights", "a")
    assert (
        "needs version 5 or later, but the worker serves version 3" in error["message"]
        and "push newer weights" in error["message"]
    )
    assert num_open(raw) == 0 and not engine.requests
    raw.send(type, id="a", min_weight_version=SERVED, **fields)
    assert raw.receive_until("done", "scores", "error")[-1]["type"] != "error"


def test_waiting_requests_begin_in_order_with_the_commit(raw: RawClient, engine: FakeEngine) -> None:
    demand(raw, "far", LATER + 1)
    demand(raw, "a")
    raw.send("score", id="s", token_ids=PROMPT, min_weight_version=LATER, wait_for_weights=True)
    raw.generate("anyone")
    assert versions(raw.receive_until("done")) == [[[SERVED, 0, 4]]], "other requests do not wait"
    assert num_open(raw) == 3 and [request.id for request in engine.requests] == ["anyone"]
    push(raw)
    assert num_open(raw) >= 1
    push(raw, LATER + 1)
    while num_open(raw):
        pass
    assert [request.id for request in engine.requests] == ["anyone", "a", "s", "far"]
    demand(raw, "far", LATER + 1)
    assert versions(raw.receive_until("done")) == [[[LATER + 1, 0, 4]]]


@pytest.mark.parametrize("how", ["commit", "in place"])
def test_a_push_that_drains_does_not_wait_for_requests_that_wait_for_it(raw: RawClient, how: str) -> None:
    demand(raw, "a")
    with HandPush(raw, NEW) as push:
        push.up_to_verify(in_place=how == "in place", in_flight="drain")
        raw.send("commit_push", id="commit", push_id=push.push_id, in_flight="drain")
        replies = raw.receive_until("done")
    assert replies[0]["id"] == "commit" and versions(replies) == [[[LATER, 0, 4]]]


def test_requests_keep_waiting_after_a_failed_push(raw: RawClient, engine: FakeEngine) -> None:
    demand(raw, "a")
    with HandPush(raw, NEW) as broken:
        broken.up_to_verify()
        broken.abort()
    ask(raw, "pause")
    ask(raw, "resume")
    assert num_open(raw) == 1 and not engine.requests


@pytest.mark.parametrize("waits", [False, True])
def test_a_demand_during_a_pause_is_checked_after_it(raw: RawClient, waits: bool) -> None:
    ask(raw, "pause")
    demand(raw, "a", waits=waits)
    demand(raw, "b", LATER + 1, waits=False)
    push(raw)
    raw.send("resume", id="resume")
    replies = [raw.receive() for _ in range(4)]
    assert versions(replies) == [[[LATER, 0, 4]]]
    assert [(reply["id"], reply["code"]) for reply in replies if reply["type"] == "error"] == [("b", "stale_weights")]


def test_demands_during_loading_are_checked_after_it(engine: FakeEngine) -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(timeout=20)
        return engine

    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        demand(raw, "enough", SERVED, waits=False)
        demand(raw, "stale", waits=False)
        demand(raw, "given up", params=dict(max_tokens=None))  # the model will give the number
        demand(raw, "waits")
        raw.send("abort", id="abort", request_id="given up")
        assert [reply["type"] for reply in raw.receive_until("aborted")] == ["sample", "done", "aborted"]
        assert num_open(raw) == 3
        may_load.set()
        replies = [raw.receive() for _ in range(3)]
        assert sorted((reply["id"], reply["type"]) for reply in replies) == [
            ("enough", "done"),
            ("enough", "sample"),
            ("stale", "error"),
        ]
        assert num_open(raw) == 1
        push(raw)
        demand(raw, "waits")
        assert versions(raw.receive_until("done"))[-1] == [[LATER, 0, 4]]
    running.worker.drain()
    running.join()
    assert running.error is None


def test_a_join_must_have_the_same_demand_and_gets_the_same_samples(
    worker: WorkerOnThread, raw: RawClient, engine: FakeEngine
) -> None:
    demand(raw, "a", caller="x")
    with RawClient(worker.address) as other:
        for version, waits in ((LATER + 1, True), (LATER, False)):
            demand(other, "a", version, waits, caller="y")
            assert other.receive()["code"] == "id_conflict"
        demand(other, "a", caller="y")
        other.health()
        push(other)
        for client in (raw, other):
            assert versions(client.receive_until("done")) == [[[LATER, 0, 4]]]
    assert len(engine.requests) == 1


def test_waiting_requests_count_against_the_limits(engine: FakeEngine) -> None:
    with serving(engine, max_queued_requests=2) as worker, RawClient(worker.address) as raw:
        for id in ("a", "b", "c"):
            demand(raw, id)
        error = raw.receive()
        assert (error["id"], error["code"]) == ("c", "queue_full")
        raw.send("abort", id="abort", request_id="a")
        raw.receive_until("aborted")
        demand(raw, "c")
        assert num_open(raw) == 2


def test_an_abort_of_a_waiting_request_computes_nothing(raw: RawClient, engine: FakeEngine) -> None:
    demand(raw, "a", params=dict(n=3, logprobs=None))
    raw.send("score", id="s", token_ids=PROMPT, min_weight_version=LATER, wait_for_weights=True)
    for number, (id, index, ended) in enumerate(
        [("a", 1, 1), ("a", 1, 0), ("s", 0, 0), ("s", None, 1), ("a", None, 2)]
    ):
        raw.send("abort", id=str(number), request_id=id, index=index)
        *replies, last = raw.receive_until("aborted", "error")
        assert last.get("code", "") == ("" if ended else "unknown_request")
        assert last.get("num_samples", 0) == ended == len(versions(replies))
        assert all(reply["finish_reason"] == "abort" for reply in replies if reply["type"] in ("sample", "scores"))
    assert num_open(raw) == 0 and not engine.requests
    push(raw)
    raw.generate("b")
    raw.receive_until("done")
    assert [request.id for request in engine.requests] == ["b"]


def test_a_sample_aborted_while_it_waited_is_not_computed_later(raw: RawClient, engine: FakeEngine) -> None:
    demand(raw, "a", params=dict(n=3, max_tokens=9))
    raw.send("abort", id="abort", request_id="a", index=1)
    [ended, aborted] = raw.receive_until("aborted")
    assert (ended["index"], ended["token_ids"], ended["weight_versions"], aborted["num_samples"]) == (1, b"", [], 1)
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        raw.send("commit_push", id="commit", push_id=push.push_id)
        replies = raw.receive_until("done")
    assert sorted(reply["index"] for reply in replies if reply["type"] == "sample") == [0, 2]
    assert replies[-1]["finish_reasons"] == {"abort": 1, "length": 2}


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_shutdown_aborts_waiting_requests(engine: FakeEngine, is_paused: bool) -> None:
    with serving(engine) as worker, RawClient(worker.address) as raw:
        demand(raw, "a", params=dict(n=2))
        raw.send("score", id="s", token_ids=PROMPT, min_weight_version=LATER, wait_for_weights=True)
        if is_paused:
            ask(raw, "pause")
            demand(raw, "late", waits=False)
        raw.health()
        worker.worker.drain()
        replies = [raw.receive() for _ in range(5 if is_paused else 4)]
        ended = {reply["id"]: reply["finish_reason"] for reply in replies if "finish_reason" in reply}
        assert ended == {"a": "abort", "s": "abort"}
        assert [reply["code"] for reply in replies if reply["type"] == "error"] == ["stale_weights"] * is_paused
        worker.join()
    assert worker.error is None and not engine.requests


def test_a_shutdown_during_loading_refuses_waiting_requests(engine: FakeEngine) -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(timeout=20)
        return engine

    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        demand(raw, "a")
        raw.health()
        running.worker.drain()
        while raw.health()["state"] != "draining":
            pass
        may_load.set()
        assert raw.receive_until("done", "error")[-1].get("finish_reasons") == {"abort": 1}
    running.join()
    assert running.error is None


def test_no_reply_is_lost_if_the_model_loads_while_a_message_is_handled(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(timeout=20)
        return engine

    def seed_once_it_is_loaded(id: str, prompt: bytes) -> int:
        may_load.set()
        while running.worker._engine_thread.snapshot is None:
            pass
        return 7

    monkeypatch.setattr(book, "seed_of", seed_once_it_is_loaded)
    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        demand(raw, "a", waits=False, params={"seed": None})
        assert raw.receive()["code"] == "stale_weights"
        running.worker.drain()
        running.join()
    assert running.error is None


def test_a_request_without_clients_does_not_wait_for_weights(raw: RawClient, worker: WorkerOnThread) -> None:
    with RawClient(worker.address) as gone:
        demand(gone, "a", params={"n": 3})
        demand(gone, "b")
        demand(raw, "b")
        while num_open(raw) < 2:
            pass
    while num_open(raw) > 1:
        pass
    assert raw.health()["requests"]["kept"] == 0
    push(raw)
    assert [reply["id"] for reply in raw.receive_until("done")] == ["b", "b"]


# Through the clients.


def test_a_sample_aborted_while_waiting_can_be_continued(worker: WorkerOnThread) -> None:
    async def generate() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            params = SamplingParams(max_tokens=4, top_logprobs=3)
            waiting = client.generate([[1]], params, min_weight_version=LATER, wait_for_weights=True)
            call = asyncio.create_task(waiting)
            while not (await client.health()).requests["open"]:
                await asyncio.sleep(0)
            assert await client.abort_all() == 1
            [group] = await call
            [sample] = group.samples
            assert (sample.token_ids, sample.weight_versions, sample.finish_reason) == ([], (), "abort")
            assert sample.top_token_ids is not None and sample.top_token_ids.shape == (0, 3)
            assert continuation(0, PROMPT, sample, params)["num_prior_tokens"] == 0

    asyncio.run(generate())


def test_calls_of_a_client_raise_or_wait(worker: WorkerOnThread) -> None:
    with RolloutClient(worker.address) as client, RawClient(worker.address) as raw:
        stale: dict[str, Any] = dict(min_weight_version=LATER)
        for call in (client.generate, client.score, lambda *args, **fields: list(client.stream(*args, **fields))):
            with pytest.raises(StaleWeightsError, match="needs version 5 or later, but the worker serves version 3"):
                call([[1, 2]], **stale)
            with pytest.raises(InvalidRequestError, match="wait_for_weights: requires min_weight_version"):
                call([[1, 2]], wait_for_weights=True)
            with pytest.raises(InvalidRequestError, match="min_weight_version"):
                call([[1, 2]], min_weight_version=-1)
        threading.Timer(0.05, push, [raw]).start()
        [group] = client.generate([[1, 2]], SamplingParams(max_tokens=4), wait_for_weights=True, **stale)
        assert [span.version for span in group.samples[0].weight_versions] == [LATER]
        assert len(client.score([[1, 2]], **stale)[0].logprobs) == 1
        assert len(list(client.stream([[1, 2]], **stale))) == 1


def test_a_wait_survives_a_lost_connection_and_ends_with_a_cancelled_call(
    worker: WorkerOnThread, engine: FakeEngine
) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            demanded: dict[str, Any] = dict(min_weight_version=LATER, wait_for_weights=True)
            kept = asyncio.create_task(client.generate([[1]], request_ids=["kept"], **demanded))
            given_up = asyncio.create_task(client.generate([[1]], request_ids=["given up"], **demanded))
            while (await client.health()).requests["open"] < 2:
                pass
            given_up.cancel()
            while (await client.health()).requests["open"] > 1:
                pass
            line, window = client._connection._line, client._connection._window
            line._socket.disconnect(line.address)
            window.is_open = False
            line._socket.connect(line.address)
            await asyncio.to_thread(push_by_itself)
            [group] = await kept
            assert [span.version for span in group.samples[0].weight_versions] == [LATER]
            assert client._connection._window is not window, "the client has reconnected"

    def push_by_itself() -> None:
        with RawClient(worker.address) as raw:
            push(raw)

    asyncio.run(run())
    assert [request.id for request in engine.requests] == ["kept"]
