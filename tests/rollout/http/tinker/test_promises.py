"""Promises of the Tinker API, with the fake engine: retries, polls, cancels, bounds, users and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FAIL_IN_STEP, FakeEngine, expected_tokens
from http_fronts import Front, error_of, front_end
from serving import WorkerOnThread, wait_until
from tinker_client import Sampled, TinkerClient

from trueroll.engine.request import derive_seed
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.errors import HttpError
from trueroll.rollout.http.paths import SAMPLER, without_capability
from trueroll.rollout.http.tinker import endpoints, promises
from trueroll.rollout.http.tinker.promises import Promises
from trueroll.rollout.network.keys import OWNER, Client

ALICE, BOB = (f"tml-{name}-0123456789abcdef" for name in ("alice", "bob"))
SAMPLING = dict(max_tokens=6, seed=5)
TOKENS = expected_tokens(derive_seed(5, 0), 0, 6)
"""The tokens of a request with `SAMPLING`."""


@pytest.fixture
def front(running: WorkerOnThread, chat_model: Path) -> Iterator[Front]:
    with front_end(running.address, tokenizer=str(chat_model), tinker=True) as front:
        yield front


def test_a_request_sent_again_is_not_generated_again(front: Front, fake: FakeEngine) -> None:
    tinker = TinkerClient(front)
    fake.flow.clear()
    one, again = (tinker.begin([1], SAMPLING, seq_id=7, num_samples=2).json() for _ in range(2))
    assert one == again and one["request_id"] == f"{tinker.sampling_session_id}:7"
    assert one["sample_sequence_ids"] == [f"{one['request_id']}:{i}" for i in range(2)]
    other = tinker.begin([1, 2], SAMPLING, seq_id=7, num_samples=2)
    assert other.status_code == 409 and error_of(other)["param"] == "seq_id"
    fake.flow.set()
    told = [tinker.retrieve(one["request_id"]).content for _ in range(3)]
    assert told[0] == told[1] == told[2], "an answer that was lost can be read again"
    assert Sampled.of(told[0]).token_ids[0] == TOKENS
    assert tinker.begin([1], SAMPLING, seq_id=7, num_samples=2).json() == one
    assert len(fake.requests) == 1
    second = tinker.begin_sampling(base_model=front.model, sampling_session_seq_id=1).json()["sampling_session_id"]
    tinker.sample([1], SAMPLING, seq_id=7, sampling_session_id=second)
    assert len(fake.requests) == 2, "another sampling session has its own numbers"


def test_a_poll_ends_before_its_request(front: Front, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert promises.POLL_SECONDS < 45 and promises.SILENT_SECONDS > 4 * 10
    monkeypatch.setattr(promises, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(endpoints, "INLINE_BYTES", 10)
    tinker = TinkerClient(front)
    fake.flow.clear()
    id = tinker.begin([1], SAMPLING).json()["request_id"]
    for _ in range(2):
        told = tinker.retrieve(id).json()
        assert told == {"type": "try_again", "request_id": id, "queue_state": "active"}
    fake.flow.set()
    wait_until(lambda: tinker.retrieve(id).json().get("status") == "complete_metadata")
    size = tinker.retrieve(id).json()["response_payload_size"]
    assert len(tinker.retrieve(id, allow_metadata_only=False).content) == size > 10
    assert len(fake.requests) == 1


def test_a_cancelled_request_ends_with_an_error(front: Front, fake: FakeEngine) -> None:
    tinker = TinkerClient(front)
    fake.flow.clear()
    id, other = (tinker.begin([1], SAMPLING).json()["request_id"] for _ in range(2))
    wait_until(lambda: len(fake.requests) == 2)
    assert tinker.call("cancel_future", request_id=id).status_code == 204
    wait_until(lambda: len(fake._open) == 1)
    fake.flow.set()
    for _ in range(2):
        assert tinker.retrieve(id).json() == {"error": "the request was cancelled", "category": "user"}
    answer = tinker.retrieve(other)
    assert Sampled.of(answer.content).token_ids
    assert tinker.call("cancel_future", request_id=other).status_code == 204
    assert tinker.retrieve(other).content == answer.content, "a cancel after the end changes nothing"


def test_requests_that_fail_end_with_an_error(front: Front, fake: FakeEngine) -> None:
    tinker = TinkerClient(front)
    fake.flow.clear()
    aborted = tinker.begin([1], SAMPLING).json()["request_id"]
    wait_until(lambda: len(fake.requests) == 1)
    assert front.post("/pause?mode=abort").status_code == 200
    told = tinker.retrieve(aborted).json()
    assert told["category"] == "server" and "was aborted" in told["error"]
    assert front.post("/resume").status_code == 200
    fake.flow.set()
    failed = tinker.begin([FAIL_IN_STEP], SAMPLING).json()["request_id"]
    told = tinker.retrieve(failed).json()
    assert told.keys() == {"error", "category"} and told["category"] == "server"


def test_unread_promises_are_bounded(running: WorkerOnThread, chat_model: Path, fake: FakeEngine) -> None:
    with front_end(running.address, tokenizer=str(chat_model), tinker=True, max_open_requests=2) as front:
        tinker = TinkerClient(front)
        assert tinker.call("client/config").json()["sample_max_concurrent_requests"] == 2
        first, second = (tinker.begin([1], SAMPLING).json()["request_id"] for _ in range(2))
        refused = tinker.begin([1], SAMPLING)
        assert refused.status_code == 429 and error_of(refused)["code"] == "queue_full"
        assert refused.headers["Retry-After"] and "--max-open-requests" in error_of(refused)["message"]
        for id in (first, second):
            tinker.retrieve(id)
        ids = [first, second]
        for _ in range(3):
            ids.append(tinker.begin([1], SAMPLING).json()["request_id"])
            assert Sampled.of(tinker.retrieve(ids[-1]).content).token_ids
        assert [tinker.retrieve(id).status_code for id in ids[:2]] == [410, 410], "the oldest are dropped"
        assert tinker.retrieve(ids[-1]).status_code == 200
        assert front.metric("trueroll_http_tinker_promises") <= 3
        assert front.metric('trueroll_http_over_limit_total{limit="max_open_requests"}') == 1


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "clients"
    file.write_text(f"generate alice {ALICE}\ngenerate bob {BOB}\n")
    file.chmod(0o600)
    return str(file)


def test_ids_open_nothing_for_other_users(
    running: WorkerOnThread, chat_model: Path, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with front_end(running.address, tokenizer=str(chat_model), tinker=True, clients_file=keys) as front:
        alice, bob = TinkerClient(front, ALICE), TinkerClient(front, BOB)
        promise = alice.begin([1], SAMPLING).json()["request_id"]
        front.key = BOB
        refused = {
            404: [
                bob.begin([1], SAMPLING, sampling_session_id=alice.sampling_session_id),
                bob.begin_sampling(session_id=alice.session_id, base_model="fake"),
                front.get(f"/api/v1/samplers/{alice.sampling_session_id}"),
            ],
            410: [
                bob.call("session_heartbeat", session_id=alice.session_id, type="session_heartbeat"),
                bob.retrieve(promise),
                bob.call("cancel_future", request_id=promise),
            ],
        }
        for status, answers in refused.items():
            assert [answer.status_code for answer in answers] == [status] * 3
        wrong = ("", ":", promise[1:], promise.replace(":0:", ":1:"), f"{promise}0", f"{promise}x", promise.swapcase())
        assert [alice.retrieve(id).status_code for id in wrong] == [410] * len(wrong)
        assert alice.call("session_heartbeat", session_id=alice.session_id).json() == {"type": "session_heartbeat"}
        assert Sampled.of(alice.retrieve(promise).content).token_ids
        for key in ("", "tml-", ALICE[:-1], f"{ALICE}x"):
            answer = front.post("/api/v1/create_session", {}, Authorization="", **{"X-API-Key": key})
            assert answer.status_code == 401
        answer = front.post("/v1/completions", {"prompt": [1]}, Authorization="", **{"X-API-Key": ALICE})
        assert answer.status_code == 401, "only the Tinker API takes a key from X-API-Key"
        assert alice.session_id not in front.get("/metrics").text and SAMPLER in front.get("/metrics").text
        assert without_capability(f"/api/v1/samplers/{promise}") == SAMPLER
    said = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]  # the test's client
    assert said and not any(secret in text for text in said for secret in (ALICE, BOB, alice.session_id))


def test_paths_that_train_are_refused(front: Front, fake: FakeEngine) -> None:
    tinker = TinkerClient(front)
    paths = (
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "retrieve_futures",
        "a/b",
    )
    for path in paths:
        refused = tinker.call(path, model_id="a")
        assert refused.status_code == 400 and error_of(refused)["code"] == "unsupported_path"
        assert f"/api/v1/{path}" in error_of(refused)["message"] and "WeightPublisher" in error_of(refused)["message"]
    assert front.get("/api/v1/sessions").status_code == front.delete("/api/v1/sessions/a").status_code == 400
    assert not fake.requests and not fake.actions


def test_the_api_is_off_by_default(running: WorkerOnThread, chat_model: Path) -> None:
    with front_end(running.address, tokenizer=str(chat_model)) as front:
        for path in ("create_session", "asample", "retrieve_future", "create_model"):
            assert front.post(f"/api/v1/{path}", {}).status_code == 404


def store(**settings: Any) -> Promises:
    return Promises(HttpConfig(address="ipc://x", **settings))


async def answer_of(length: int) -> bytes:
    return bytes(length)


def run(kept: Promises, check: Callable[[], Awaitable[None]]) -> None:
    """Run a check while sessions and outcomes expire."""

    async def both() -> None:
        running = asyncio.create_task(kept.run())
        try:
            await check()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(both())


def test_a_session_without_requests_ends_with_its_promises() -> None:
    kept = store(session_seconds=0.02)
    ended = list[bool]()

    async def never() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return b""

    async def check() -> None:
        id = kept.begin_session(OWNER)
        kept.begin(kept.sampling_session(f"{id}:0", OWNER), 0, b"", 10, never)
        promise = kept.find(f"{id}:0:0", OWNER)
        for _ in range(4):
            await asyncio.sleep(0.005)
        await asyncio.wait({promise.task}, timeout=60)
        assert ended == [True] and promise.task.cancelled()
        for call in (lambda: kept.session(id, OWNER), lambda: kept.find(f"{id}:0:0", OWNER)):
            with pytest.raises(HttpError):
                call()

    run(kept, check)
    assert [family.samples[0].value for family in kept.collect()] == [0, 0, 0]


def test_outcomes_are_bounded_in_memory() -> None:
    kept = store(max_session_bytes=2**20, max_sessions=1)

    async def check() -> None:
        id = kept.begin_session(OWNER)
        with pytest.raises(HttpError, match="--max-sessions"):
            kept.begin_session(Client("other", "generate"))
        place = kept.sampling_session(f"{id}:0", OWNER)
        for seq_id in range(3):
            kept.begin(place, seq_id, b"", 10, lambda: answer_of(2**19))
            promise = kept.find(f"{id}:0:{seq_id}", OWNER)
            await kept.wait(promise)
            if seq_id == 0:
                kept.tell(promise)
        with pytest.raises(HttpError, match="no longer kept"):
            kept.find(f"{id}:0:0", OWNER)
        with pytest.raises(HttpError, match="--max-session-bytes"):
            kept.begin(place, 3, b"", 10, lambda: answer_of(1))
        kept.tell(kept.find(f"{id}:0:2", OWNER))
        kept.begin(place, 3, b"", 10, lambda: answer_of(1))
        assert (await kept.find(f"{id}:0:1", OWNER).task) == bytes(2**19), "an outcome that nobody read is kept"

    run(kept, check)
    assert [family.samples[0].value for family in kept.collect()] == [0, 0, 0]


def test_outcomes_that_nobody_reads_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "TOLD_SECONDS", 0.0)
    kept = store(session_seconds=1.0)

    async def check() -> None:
        id = kept.begin_session(OWNER)
        place = kept.sampling_session(f"{id}:0", OWNER)
        for seq_id in range(2):
            kept.begin(place, seq_id, b"", 10, lambda: answer_of(1))
            await kept.wait(kept.find(f"{id}:0:{seq_id}", OWNER))
        kept.tell(kept.find(f"{id}:0:0", OWNER))
        kept._collect()
        with pytest.raises(HttpError):
            kept.find(f"{id}:0:0", OWNER)
        unread = kept.find(f"{id}:0:1", OWNER)
        assert unread.since is not None
        unread.since -= 2.0
        kept._collect()
        with pytest.raises(HttpError):
            kept.find(f"{id}:0:1", OWNER)
        assert kept.session(id, OWNER)

    run(kept, check)
