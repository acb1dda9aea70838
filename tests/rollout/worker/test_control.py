"""Lifecycle calls and pushes through the worker's socket, with the fake engine behind it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, STAGING_BYTES, FakeEngine, FakeStaging
from pushing import HandPush, ask
from serving import RawClient, WorkerOnThread, serving, stop_after_a_step

from trueroll.errors import DeadlineError, IllegalStateError
from trueroll.rollout import RolloutClient
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker import pushes
from trueroll.weight_sync.transports.disk import read_manifest
from trueroll.weight_sync.worker import receiver as receiver_module
from trueroll.weight_sync.worker.assembly import Assembly
from trueroll.weight_sync.worker.receiver import Receiver

LIFECYCLE = ("pause", "resume", "drain", "sleep", "wake_up", "invalidate")
NEW = {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def raw(worker: WorkerOnThread) -> Iterator[RawClient]:
    with RawClient(worker.address) as client:
        wait_for(client, "ready")
        yield client


def wait_for(client: RawClient, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while (health := client.health())["state"] != state:
        assert time.monotonic() < deadline, f"{health['state']}, not {state}"
        time.sleep(0.002)
    return health


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_serves(engine: FakeEngine, tensors: dict[str, torch.Tensor]) -> None:
    assert engine.weights.live.keys() == tensors.keys()
    assert all(torch.equal(engine.weights.live[name], tensor) for name, tensor in tensors.items())


# Pausing and draining.


def test_a_pause_keeps_running_requests_and_lets_new_ones_wait(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    assert ask(raw, "pause")["state"] == "paused"
    engine.flow.set()
    steps = engine.stats().steps
    raw.generate("b")
    health = raw.health()
    assert health["state"] == "paused" and health["requests"]["open"] == 2
    assert ask(raw, "pause")["state"] == "paused" and engine.stats().steps == steps
    assert [request.id for request in engine.requests] == ["a"]
    raw.send("resume", id="go")
    replies = [raw.receive() for _ in range(5)]
    assert sorted(reply["id"] for reply in replies if reply["type"] == "done") == ["a", "b"]
    assert {"type": "status", "version": 1, "id": "go", "state": "ready", "weight_version": 3} in replies


def test_a_drain_finishes_what_was_accepted_and_then_pauses(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    raw.send("drain", id="drain")
    wait_for(raw, "draining")
    raw.generate("late")
    engine.flow.set()
    replies = raw.receive_until("status")
    assert [reply["type"] for reply in replies] == ["sample", "done", "status"] and replies[-1]["state"] == "paused"
    assert [request.id for request in engine.requests] == ["a"]
    ask(raw, "resume")
    wait_until(lambda: [request.id for request in engine.requests] == ["a", "late"])


def test_a_drain_that_takes_too_long_changes_nothing(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    error = ask(raw, "drain", timeout=0.05)
    assert error["code"] == "deadline_exceeded" and "1 unfinished" in error["message"]
    assert raw.health()["state"] == "ready"
    engine.flow.set()
    assert raw.receive_until("done")[-1]["id"] == "a"


def test_during_a_drain_lifecycle_calls_are_refused(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    raw.send("drain", id="drain")
    wait_for(raw, "draining")
    for call in LIFECYCLE:
        error = ask(raw, call)
        assert error["code"] == "illegal_state" and "in state draining" in error["message"], call
    engine.flow.set()
    assert raw.receive_until("status")[-1]["id"] == "drain"


def test_a_drain_covers_every_request_before_it(raw: RawClient, engine: FakeEngine) -> None:
    for number in range(20):
        engine.gate.clear()
        engine.at_gate.clear()
        raw.generate(f"first {number}")
        assert engine.at_gate.wait(timeout=20)
        raw.send("invalidate", id=f"invalidate {number}")  # waits for the step; so does the request behind this call
        raw.generate(f"second {number}")
        raw.send("drain", id=f"drain {number}")
        raw.health()
        engine.gate.set()
        before: list[str] = []
        while (reply := raw.receive())["id"] != f"drain {number}":
            before += [reply["id"]] if reply["type"] == "done" else []
        assert sorted(before) == [f"first {number}", f"second {number}"] and reply["state"] == "paused"
        ask(raw, "resume")


def test_new_requests_are_refused_with_while_unavailable_reject(engine: FakeEngine) -> None:
    with serving(engine, while_unavailable="reject") as running, RawClient(running.address) as raw:
        wait_for(raw, "ready")
        ask(raw, "pause")
        raw.generate("a")
        error = raw.receive()
        assert error["code"] == "unavailable" and "in state paused" in error["message"] and error["id"] == "a"
        ask(raw, "resume")
        raw.generate("a")
        assert raw.receive_until("done")


def test_an_abort_reaches_a_request_that_waits(raw: RawClient, engine: FakeEngine) -> None:
    ask(raw, "pause")
    raw.generate("a", n=2)
    raw.send("abort", id="abort", request_id="a", index=None)
    replies = raw.receive_until("aborted")
    assert [reply["type"] for reply in replies] == ["sample", "sample", "done", "aborted"]
    assert replies[-1]["num_samples"] == 2 and replies[0]["token_ids"] == b"" and replies[0]["weight_versions"] == []


def test_a_call_sent_again_is_done_once(worker: WorkerOnThread, raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    raw.send("sleep", id="same", in_flight="drain")
    wait_for(raw, "draining")
    with RawClient(worker.address) as other:
        other.send("sleep", id="same", in_flight="drain")
        other.health()
        engine.flow.set()
        assert other.receive_until("status")[-1]["state"] == "asleep"
    assert [action[0] for action in engine.actions] == ["sleep"]


def test_an_id_in_use_for_another_call_is_refused(worker: WorkerOnThread, raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    raw.send("drain", id="same")
    raw.send("drain", id="same")
    wait_for(raw, "draining")
    with RawClient(worker.address) as other:
        other.send("drain", id="same", timeout=5.0)
        error = other.receive()
        assert error["code"] == "id_conflict" and error["id"] == "same"
    engine.flow.set()
    assert [raw.receive_until("status")[-1]["id"] for _ in range(2)] == ["same", "same"]


def test_an_abort_of_one_waiting_sample_does_not_keep_a_drain_waiting(raw: RawClient, engine: FakeEngine) -> None:
    ask(raw, "sleep", level=2)
    ask(raw, "wake_up")
    raw.generate("a", n=2)
    raw.send("abort", id="abort", request_id="a", index=1)
    assert [reply["type"] for reply in raw.receive_until("aborted")] == ["sample", "aborted"]
    with HandPush(raw, NEW) as push:
        assert push.begin(in_place=True, in_flight="drain")["phase"] == "begun"
        push.stage()
        push.verify()
        raw.send("commit_push", id="commit", push_id=push.push_id, in_flight="drain")
        replies = [raw.receive() for _ in range(3)]
    assert sorted(reply["type"] for reply in replies) == ["done", "push_status", "sample"]
    assert replies[-1]["type"] == "done" and replies[-1]["finish_reasons"] == {"abort": 1, "length": 1}


def test_calls_before_the_model_has_loaded_are_refused() -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(timeout=20)
        return FakeEngine()

    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        raw.generate("a")
        calls = {call: {} for call in (*LIFECYCLE, "weights")} | {"abort_push": {"push_id": "0" * 32}}
        for call, fields in calls.items():
            error = ask(raw, call, **fields)
            assert error["code"] == "illegal_state" and "(state loading)" in error["message"], call
        running.worker.drain()
        wait_for(raw, "draining")
        for call, fields in calls.items():
            assert ask(raw, call, **fields)["code"] == "illegal_state", call
        may_load.set()
        assert raw.receive_until("done")[-1]["id"] == "a"
    running.join()
    assert running.error is None


# Sleeping and waking.


def test_sleep_and_wake_up_in_stages(raw: RawClient, engine: FakeEngine) -> None:
    assert ask(raw, "sleep", level=2)["state"] == "asleep"
    health = raw.health()
    assert health["sleeping"] == ["kv_cache", "weights"] and health["state"] == "asleep"
    assert ask(raw, "begin_push", **begin_fields())["code"] == "illegal_state"
    assert ask(raw, "wake_up", tags=["weights"])["state"] == "waking"
    with HandPush(raw, NEW) as push:
        assert push.run()["phase"] == "committed"
    assert raw.health()["state"] == "waking"
    assert ask(raw, "wake_up", tags=["kv_cache"])["state"] == "ready"
    tags = ("weights", "kv_cache")
    assert engine.actions == [
        ("sleep", 2, tags, "recompute"),
        ("wake_up", ("weights",)),
        ("commit", 5, "recompute"),
        ("wake_up", ("kv_cache",)),
    ]


def begin_fields() -> dict[str, Any]:
    source = {"kind": "disk", "folder": "/nowhere"}
    return dict(push_id="0" * 32, weight_version=1, dtype="float32", source=source)


def test_after_level_2_a_worker_is_dirty_until_a_push(raw: RawClient, engine: FakeEngine) -> None:
    ask(raw, "sleep", level=2)
    assert ask(raw, "wake_up")["state"] == "dirty"
    raw.generate("a")
    for call in ("pause", "resume", "drain"):
        error = ask(raw, call)
        assert error["code"] == "illegal_state" and "in state dirty" in error["message"]
    assert engine.requests == []
    with HandPush(raw, NEW) as push:
        assert push.run()["phase"] == "committed"
    assert raw.health()["state"] == "ready"
    wait_until(lambda: [request.id for request in engine.requests] == ["a"])


def test_sleeping_deeper_drops_the_weights_too(raw: RawClient, engine: FakeEngine) -> None:
    ask(raw, "sleep", level=1)
    ask(raw, "sleep", level=1)
    ask(raw, "sleep", level=2, tags=["weights"])
    assert engine.actions == [
        ("sleep", 1, ("weights", "kv_cache"), "recompute"),
        ("sleep", 1, ("weights", "kv_cache"), "recompute"),
        ("sleep", 2, ("weights",), "recompute"),
    ]
    assert ask(raw, "wake_up")["state"] == "dirty"


@pytest.mark.parametrize("in_flight", ["recompute", "abort", "drain"])
def test_running_requests_at_a_sleep(raw: RawClient, engine: FakeEngine, in_flight: str) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    raw.send("sleep", id="sleep", in_flight=in_flight)
    if in_flight == "drain":
        wait_for(raw, "draining")
        engine.flow.set()
    replies = raw.receive_until("status")
    reasons = [reply["finish_reason"] for reply in replies if reply["type"] == "sample"]
    assert reasons == {"recompute": [], "abort": ["abort"], "drain": ["length"]}[in_flight]
    engine.flow.set()
    ask(raw, "wake_up")
    if in_flight == "recompute":
        assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}


def test_a_drain_of_requests_that_nothing_computes_is_refused(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    ask(raw, "pause")
    error = ask(raw, "sleep", in_flight="drain")
    assert error["code"] == "illegal_state" and "paused" in error["message"] and engine.actions == []
    assert raw.health()["state"] == "paused"


def test_a_drain_of_a_paused_worker_is_a_no_op_without_running_requests(raw: RawClient, engine: FakeEngine) -> None:
    ask(raw, "pause")
    raw.generate("later")
    assert ask(raw, "drain")["state"] == "paused" and not engine.requests
    engine.flow.clear()
    ask(raw, "resume")
    wait_until(lambda: len(engine.requests) == 1)
    ask(raw, "pause")
    error = ask(raw, "drain")
    assert error["code"] == "illegal_state" and "1 unfinished" in error["message"] and "resume" in error["message"]
    engine.flow.set()
    ask(raw, "resume")


def test_invalidate(raw: RawClient, engine: FakeEngine) -> None:
    assert ask(raw, "invalidate")["state"] == "ready" and engine.actions == [("invalidate",)]


def test_weights_are_written_for_a_push_by_disk(raw: RawClient, engine: FakeEngine, tmp_path: Path) -> None:
    error = ask(raw, "save_weights", folder=str(tmp_path))
    assert error["code"] == "push_failed" and "only pushed weights can be saved" in error["message"]
    with HandPush(raw, NEW) as push:
        push.run()
    for folder in (tmp_path / "none", tmp_path / "open"):
        (tmp_path / "open").mkdir(exist_ok=True)
        (tmp_path / "open").chmod(0o777)
        error = ask(raw, "save_weights", folder=str(folder))
        assert error["code"] == "push_failed" and "cannot write into" in error["message"]
    assert ask(raw, "save_weights", folder=str(tmp_path))["state"] == "ready"
    (folder,) = tmp_path.glob("version-*")
    assert read_manifest(folder).push_id == push.push_id and read_manifest(folder).weight_version == push.version
    error = ask(raw, "save_weights", folder=str(tmp_path))
    assert error["code"] == "push_failed" and raw.health()["state"] == "ready", "the folder exists already"


# Pushes.


@pytest.mark.parametrize(("version", "is_later"), [(4, True), (3, False), (1, False)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_that_is_not_later_needs_allow_older(
    raw: RawClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, version: int, is_later: bool, in_place: bool
) -> None:
    assert raw.health()["weight_version"] == 3
    if not is_later:
        with HandPush(raw, NEW, version) as refused:
            error = refused.begin(in_place=in_place)
        assert error["code"] == "push_failed" and "allow_older" in error["message"]
        assert f"version {version} is not newer than the served version 3;" in error["message"]
        assert raw.health()["state"] == "ready" and not engine.actions
    with HandPush(raw, NEW, version) as push:
        push.up_to_verify(allow_older=True, in_place=in_place)
        assert push.commit()["weight_version"] == version
    assert (f"version {version} replaces version 3" in caplog.text) == (not is_later)


@pytest.mark.parametrize("lost_by", ["sleep", "push in place"])
def test_a_lost_version_may_be_pushed_again_but_no_older_one(raw: RawClient, lost_by: str) -> None:
    if lost_by == "sleep":
        ask(raw, "sleep", level=2, tags=["weights"])
        ask(raw, "wake_up")
    else:
        with HandPush(raw, NEW, version=4) as broken:
            broken.begin(in_place=True)
            broken.abort()
    assert raw.health()["state"] == "dirty" and raw.health()["weight_version"] == 3
    with HandPush(raw, NEW, version=2) as older:
        assert "version 2 is not newer than the served version 3" in older.begin()["message"]
    with HandPush(raw, NEW, version=3) as again:
        assert again.run()["weight_version"] == 3
    assert raw.health()["state"] == "ready"


@pytest.mark.parametrize("timeout", [1e-6, 20.0])
def test_a_commit_refuses_the_other_calls_of_its_push_once(
    raw: RawClient, worker: WorkerOnThread, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    engine.flow.clear()
    with RawClient(worker.address) as bystander, HandPush(raw, NEW) as push:
        bystander.generate("a")
        bystander.health()
        push.up_to_verify()
        monkeypatch.setattr(Receiver, "take", lambda *_: None)  # the thread does not reach this call before the commit
        raw.send("verify_push", id="again", push_id=push.push_id, num_buckets=1)
        raw.send("commit_push", id="commit", push_id=push.push_id, in_flight="drain", timeout=timeout)
        replies = [raw.receive()]
        engine.flow.set()
        replies.append(raw.receive())
        assert sorted(reply["id"] for reply in replies) == ["again", "commit"]
        assert next(reply["type"] for reply in replies if reply["id"] == "again") == "error"
        assert bystander.receive_until("done", "error")[-1]["type"] == "done"


def test_a_push_is_served_after_its_commit(raw: RawClient, engine: FakeEngine) -> None:
    before = ask(raw, "weights")
    assert before["push_id"] is None and before["weight_version"] == 3 and before["tied"] == {"head": "embed"}
    assert {name: tuple(shape) for name, shape in before["shapes"].items()} == SHAPES
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        health = raw.health()
        assert health["push"]["phase"] == "verified" and health["push"]["weight_version"] == 5
        assert health["push"]["bytes_staged"] > 0 and health["memory"]["staging"] == STAGING_BYTES
        assert not any(torch.equal(engine.weights.live[name], tensor) for name, tensor in NEW.items())
        committed = push.commit()
        assert committed["phase"] == "committed" and committed["weight_version"] == 5
        assert push.commit()["phase"] == "committed"  # a repeated call, for example after a reconnect
    assert_serves(engine, NEW)
    after = ask(raw, "weights")
    assert after["push_id"] == push.push_id and after["weight_version"] == 5
    assert raw.health()["push"] is None and raw.health()["memory"]["staging"] == 0
    assert [action[0] for action in engine.actions] == ["commit"]


@pytest.mark.parametrize("spoil", ["missing", "unknown", "misshapen", "corrupted"])
def test_a_push_with_a_fault_leaves_the_old_weights(raw: RawClient, engine: FakeEngine, spoil: str) -> None:
    with HandPush(raw, NEW) as push:
        assert push.begin()["phase"] == "begun"
        bucket = push.bucket()
        piece = bucket["pieces"][0]
        if spoil == "missing":
            del bucket["pieces"][0]
        elif spoil == "unknown":
            piece["name"] = "nobody"
        elif spoil == "misshapen":
            piece["shape"] = [48, 5]
        else:
            push.memory.slots[0][3] ^= 1
        replies = [push.call("stage_bucket", bucket=bucket)]
        if spoil == "missing":
            assert replies[-1]["phase"] == "staged"
            replies.append(push.verify())
        assert replies[-1]["code"] == "push_failed"
        named = {"missing": "missing: a;", "unknown": "tensor nobody:"}.get(spoil, "tensor a:")
        assert named in replies[-1]["message"]
        assert push.commit()["code"] == "push_failed"
    assert engine.actions == [] and ask(raw, "weights")["push_id"] is None
    with HandPush(raw, NEW) as push:
        assert push.run()["phase"] == "committed"


def test_a_push_that_was_not_verified_is_not_committed(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        push.begin()
        push.stage()
        error = push.commit()
        assert error["code"] == "push_failed" and "verify" in error["message"]
        push.verify()
        assert push.commit()["phase"] == "committed"


def test_a_new_push_ends_the_one_before(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as old, HandPush(raw, NEW, version=6) as new:
        old.begin()
        old.stage()
        assert new.run()["weight_version"] == 6
        assert old.verify()["code"] == "push_failed" and old.commit()["code"] == "push_failed"
        assert old.abort()["phase"] == "aborted"
        assert new.abort()["phase"] == "committed"
    assert_serves(engine, NEW)


def test_a_push_breaks_off_if_no_call_comes(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        assert push.begin(timeout=0.1)["phase"] == "begun"
        wait_until(lambda: raw.health()["push"] is None)
        assert push.stage()["code"] == "push_failed"


class Hanging:
    """Makes pushes to `engine` hang before they begin, until `released`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.released = threading.Event()
        self._new_staging = engine.weights.new_staging
        engine.weights.new_staging = self._hang  # type: ignore[method-assign]

    def _hang(self, in_place: bool) -> Any:
        self.released.wait(20)
        return self._new_staging(in_place)


@pytest.fixture
def hanging(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(pushes, "MARGIN_SECONDS", 0.1)
    hanging = Hanging(engine)
    yield hanging
    hanging.released.set()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_push_that_hangs_is_given_up(raw: RawClient, hanging: Hanging, in_place: bool) -> None:
    with HandPush(raw, NEW) as push:
        error = push.begin(timeout=0.1, drain_timeout=0.1, in_flight="drain", in_place=in_place)
        assert error["code"] == "deadline_exceeded" and "made no progress" in error["message"]
        assert raw.health()["push"] is None and push.stage()["code"] == "push_failed"
        hanging.released.set()
    with HandPush(raw, NEW) as push:
        assert push.run()["phase"] == "committed"


def test_the_number_of_hanging_pushes_is_limited(raw: RawClient, hanging: Hanging, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        for _ in range(pushes.MOST_ABANDONED):
            assert push.begin(timeout=0.1)["code"] == "deadline_exceeded"
        threads = threading.active_count()
        for in_place in (False, True):
            error = push.begin(timeout=0.1, in_place=in_place)
            assert error["code"] == "push_failed" and "4 abandoned pushes" in error["message"]
        assert threading.active_count() == threads and raw.health()["state"] == "ready"
        hanging.released.set()
        wait_until(lambda: threading.active_count() == threads - pushes.MOST_ABANDONED)
        assert push.run()["phase"] == "committed"
    assert_serves(engine, NEW)


@pytest.mark.parametrize("call", ["stage_bucket", "verify_push"])
def test_a_call_of_a_push_that_hangs_is_given_up(
    raw: RawClient, worker: WorkerOnThread, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    jump, jumped, released = 0.0, threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        nonlocal jump
        jump = 3600.0
        jumped.set()
        released.wait(20)

    monkeypatch.setattr(Assembly, {"stage_bucket": "take", "verify_push": "finish"}[call], hang)
    monkeypatch.setattr(pushes, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + jump))
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        assert push.begin(timeout=20.0)["phase"] == "begun"
        fields: dict[str, Any] = {"bucket": push.bucket()}
        if call == "verify_push":
            assert push.stage()["phase"] == "staged"
            fields = {"num_buckets": 1}
        raw.send(call, id="hangs", push_id=push.push_id, **fields)
        assert jumped.wait(20) and other.health(), "a message lets the worker check its clock"
        reply = raw.receive()
        assert reply["code"] == "deadline_exceeded" and "timeout of 20 s" in reply["message"]
        released.set()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_system_without_threads_refuses_a_push(
    raw: RawClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    def start(receiver: Receiver) -> None:
        raise RuntimeError("can't start new thread")

    with HandPush(raw, NEW) as push:
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "start", start)
            error = push.begin(in_place=in_place)
            assert error["code"] == "push_failed" and "cannot start another thread" in error["message"]
        assert raw.health()["push"] is None and raw.health()["state"] == "ready" and engine.actions == []
        assert push.run()["phase"] == "committed"
    assert_serves(engine, NEW)


def test_an_aborted_push_is_forgotten(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        assert push.abort()["phase"] == "aborted" and push.abort()["phase"] == "aborted"
        assert push.commit()["code"] == "push_failed"
    assert engine.actions == [] and raw.health()["push"] is None


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_the_staging_of_a_push_is_freed_without_garbage_collection(
    raw: RawClient, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    staged: list[weakref.ref[FakeStaging]] = []
    new = FakeStaging.__init__

    def note(staging: FakeStaging, *args: Any) -> None:
        staged.append(weakref.ref(staging))
        new(staging, *args)

    monkeypatch.setattr(FakeStaging, "__init__", note)
    gc.disable()
    try:
        with HandPush(raw, NEW) as push:
            push.up_to_verify()
            assert staged[0]() is not None
            getattr(push, end)()
            wait_until(lambda: staged[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("in_flight", ["recompute", "abort", "drain", "keep"])
def test_running_requests_at_a_commit(raw: RawClient, engine: FakeEngine, in_flight: str) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        raw.send("commit_push", id="commit", push_id=push.push_id, in_flight=in_flight)
        if in_flight == "drain":
            wait_for(raw, "updating")
            raw.generate("late")
            health = raw.health()
            assert health["requests"]["open"] == 2 and len(engine.requests) == 1
            assert health["push"]["phase"] == "verified" and health["memory"]["staging"] == STAGING_BYTES
            engine.flow.set()
        replies = raw.receive_until("push_status")
        reasons = [reply["finish_reason"] for reply in replies if reply["type"] == "sample"]
        assert reasons == {"recompute": [], "abort": ["abort"], "drain": ["length"], "keep": []}[in_flight]
        versions = [span[0] for reply in replies for span in reply.get("weight_versions", [])]
        assert versions == {"recompute": [], "abort": [], "drain": [3], "keep": []}[in_flight]
    engine.flow.set()
    assert_serves(engine, NEW)


def test_a_sample_that_kept_its_kv_says_so(raw: RawClient, engine: FakeEngine) -> None:
    stop_after_a_step(engine)
    raw.generate("a", max_tokens=2)
    wait_until(lambda: engine.stats().computed_tokens > 0)
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        assert push.commit(in_flight="keep")["phase"] == "committed"
    engine.flow.set()
    [sample] = [reply for reply in raw.receive_until("done") if reply["type"] == "sample"]
    assert sample["old_kv"] == [[3, 1, 2]]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_push_that_keeps_old_kv_is_refused_while_a_request_wants_one_version(
    raw: RawClient, engine: FakeEngine, in_place: bool
) -> None:
    engine.flow.clear()
    raw.generate("a", one_version=True)
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push:
        if in_place:
            error = push.begin(in_place=True, in_flight="keep")
        else:
            push.up_to_verify()
            error = push.commit(in_flight="keep")
        assert error["code"] == "push_failed" and error["field"] == "in_flight"
        assert "1 unfinished requests that set one_version" in error["message"]
        assert engine.actions == [] and raw.health()["state"] == "ready" and raw.health()["weight_version"] == 3
        engine.flow.set()
        assert raw.receive_until("done")
        if not in_place:
            assert push.commit(in_flight="keep")["phase"] == "committed", "the push was only postponed"


def test_a_push_that_keeps_old_kv_is_refused_before_any_worker_commits(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a", one_version=True)
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push:
        push.begin(in_flight="keep")
        push.stage()
        error = push.verify()
        assert error["code"] == "push_failed" and error["message"].startswith("verify_push: in_flight keep would")
        engine.flow.set()
        assert raw.receive_until("done")
        assert push.verify()["phase"] == "verified" and push.commit(in_flight="keep")["phase"] == "committed"


def test_a_sleep_cannot_keep_the_kv(raw: RawClient, engine: FakeEngine) -> None:
    error = ask(raw, "sleep", in_flight="keep")
    assert error["code"] == "invalid_message" and error["field"] == "in_flight" and engine.actions == []


def test_a_commit_that_cannot_drain_in_time_commits_nothing(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        assert push.commit(in_flight="drain", timeout=0.05)["code"] == "deadline_exceeded"
    assert engine.actions == [] and raw.health()["state"] == "ready"
    engine.flow.set()
    assert raw.receive_until("done")


def test_a_commit_that_drains_can_be_aborted(worker: WorkerOnThread, raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        push.up_to_verify()
        other.send("commit_push", id="commit", push_id=push.push_id, in_flight="drain")
        wait_for(raw, "updating")
        assert push.abort()["phase"] == "aborted"
        error = other.receive()
        assert error["id"] == "commit" and error["code"] == "push_failed"
    assert raw.health()["state"] == "ready" and engine.actions == []


@pytest.mark.parametrize("call", ["sleep", "begin_push"])
def test_a_refused_call_does_not_end_the_current_push(raw: RawClient, engine: FakeEngine, call: str) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push, HandPush(raw, NEW, version=6) as other:
        push.up_to_verify()
        if call == "sleep":
            error = ask(raw, "sleep", level=2, in_flight="drain", timeout=0.05)
        else:
            error = other.begin(in_place=True, in_flight="drain", drain_timeout=0.05)
        assert error["code"] == "deadline_exceeded" and raw.health()["state"] == "ready"
        ask(raw, "pause")
        if call == "sleep":
            error = ask(raw, "sleep", level=2, in_flight="drain")
        else:
            error = other.begin(in_place=True, in_flight="drain")
        assert error["code"] == "illegal_state"
        assert push.commit()["phase"] == "committed"
    assert [action[0] for action in engine.actions] == ["commit"]


@pytest.mark.parametrize("fields", [dict(dtype="bfloat16"), dict(base="1" * 32)], ids=["dtype", "base"])
def test_an_invalid_begin_in_place_interrupts_nothing(
    raw: RawClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push:
        assert push.begin(in_place=True, in_flight="abort", **fields)["code"] == "push_failed"
    assert raw.health()["state"] == "ready" and engine.actions == []
    engine.flow.set()
    assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}


@pytest.mark.parametrize("is_folder", [True, False], ids=["disk", "shared"])
def test_a_refused_source_in_place_interrupts_nothing(
    raw: RawClient, engine: FakeEngine, tmp_path: Path, is_folder: bool
) -> None:
    gone = {"kind": "shared", "name": f"trueroll-{'0' * 32}", "slot_bytes": 4096, "num_slots": 2}
    source = {"kind": "disk", "folder": str(tmp_path)} if is_folder else gone
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as before, HandPush(raw, NEW, version=6) as push:
        before.up_to_verify()
        reply = push.begin(in_place=True, in_flight="abort", source=source)
        assert reply["code"] == "push_failed" and source["kind"] in reply["message"]
        assert raw.health()["state"] == "ready" and engine.actions == []
        assert before.commit()["phase"] == "committed", "the current push goes on"
    engine.flow.set()
    assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}
    assert_serves(engine, NEW)


@pytest.mark.parametrize("end", ["abort", "timeout", "shutdown"])
def test_in_place_a_source_that_hangs_interrupts_nothing(
    worker: WorkerOnThread, raw: RawClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    entered, go_on, open_source = threading.Event(), threading.Event(), receiver_module._open_source

    def hang(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return open_source(*args)

    monkeypatch.setattr(receiver_module, "_open_source", hang)
    monkeypatch.setattr(pushes, "MARGIN_SECONDS", 0.0)
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        fields = push.begin_fields(in_place=True, timeout=0.05 if end == "timeout" else 20.0)
        other.send("begin_push", id="begin", push_id=push.push_id, **fields)
        assert entered.wait(20)
        if end == "abort":
            assert push.abort()["phase"] == "aborted"
        elif end == "shutdown":
            worker.worker.drain()
        error = other.receive()
        codes = {"abort": "push_failed", "timeout": "deadline_exceeded", "shutdown": "unavailable"}
        assert (error["id"], error["code"]) == ("begin", codes[end]) and engine.actions == []
        [abandoned] = worker.worker._control.pushes._abandoned
        go_on.set()
        abandoned.join(20)
        assert not abandoned.is_alive()
        if end != "shutdown":
            assert raw.health()["state"] == "ready"
            assert push.begin(in_place=True)["phase"] == "begun" and raw.health()["state"] == "dirty"


def test_a_begin_in_place_that_drains_can_be_aborted(
    worker: WorkerOnThread, raw: RawClient, engine: FakeEngine
) -> None:
    engine.flow.clear()
    raw.generate("a")
    wait_until(lambda: len(engine.requests) == 1)
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        begin = push.begin_fields(in_place=True, in_flight="drain")
        other.send("begin_push", id="begin", push_id=push.push_id, **begin)
        wait_for(raw, "updating")
        assert push.abort()["phase"] == "aborted"
        error = other.receive()
        assert error["id"] == "begin" and error["code"] == "push_failed"
    assert raw.health()["state"] == "ready" and engine.actions == []


def test_a_begin_that_waits_can_be_aborted(worker: WorkerOnThread, raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a")
    assert engine.at_gate.wait(timeout=20)
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        raw.send("invalidate", id="invalidate")
        raw.health()
        other.send("begin_push", id="begin", push_id=push.push_id, **push.begin_fields())
        other.health()
        assert push.abort()["phase"] == "aborted"
        assert other.receive()["code"] == "push_failed"
        engine.gate.set()
        assert raw.receive_until("done")
    assert raw.health()["push"] is None


@pytest.mark.parametrize("in_place", [False, True])
def test_an_abort_that_comes_too_late_is_answered_with_the_outcome(
    worker: WorkerOnThread, raw: RawClient, engine: FakeEngine, in_place: bool
) -> None:
    with HandPush(raw, NEW) as push, RawClient(worker.address) as other:
        if not in_place:
            push.up_to_verify()
        engine.gate.clear()
        raw.generate("a")
        assert engine.at_gate.wait(timeout=20)
        if in_place:
            other.send("begin_push", id="late", push_id=push.push_id, **push.begin_fields(in_place=True))
        else:
            other.send("commit_push", id="late", push_id=push.push_id)
        wait_for(raw, "updating")
        wait_until(
            lambda: (under_way := worker.worker._control._operations.current) is not None and under_way.run is not None
        )
        raw.send("abort_push", id="abort", push_id=push.push_id)
        raw.health()
        engine.gate.set()
        reply = raw.receive_until("push_status")[-1]
        late = other.receive()
    assert reply["phase"] == ("aborted" if in_place else "committed")
    assert (late.get("code"), late.get("phase")) == (("push_failed", None) if in_place else (None, "committed"))
    assert raw.health()["state"] == ("dirty" if in_place else "ready")


def test_in_place_is_dirty_until_the_commit(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        assert push.begin(in_place=True)["phase"] == "begun"
        assert raw.health()["state"] == "dirty"
        raw.generate("a")
        push.stage()
        push.verify()
        assert engine.requests == []
        assert push.commit()["phase"] == "committed"
    assert raw.receive_until("done")[-1]["id"] == "a"
    assert_serves(engine, NEW)


def test_a_broken_push_in_place_stays_dirty_until_the_next(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        push.begin(in_place=True)
        push.stage()
        push.abort()
    assert raw.health()["state"] == "dirty" and ask(raw, "weights")["push_id"] is None
    with HandPush(raw, NEW, version=9) as push:
        assert push.run()["weight_version"] == 9
    assert raw.health()["state"] == "ready"


def test_changes_need_the_push_that_they_refer_to(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        assert push.begin(base="1" * 32)["code"] == "version_gap"
        assert push.run()["phase"] == "committed"
    with HandPush(raw, {}, version=6) as changes:
        assert changes.begin(base=push.push_id, in_place=True)["code"] == "push_failed"
        assert changes.begin(base=push.push_id)["phase"] == "begun"
    ask(raw, "sleep", level=2)
    ask(raw, "wake_up")
    with HandPush(raw, {}, version=7) as changes:
        assert changes.begin(base=push.push_id)["code"] == "version_gap"


def test_dropping_the_weights_ends_a_push(raw: RawClient, engine: FakeEngine) -> None:
    with HandPush(raw, NEW) as push:
        push.up_to_verify()
        ask(raw, "sleep", level=2)
        ask(raw, "wake_up")
        assert push.commit()["code"] == "push_failed" and raw.health()["state"] == "dirty"


# Shutdown.


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_a_held_worker_shuts_down_with_partial_samples(engine: FakeEngine, call: str) -> None:
    with serving(engine, drain_seconds=600.0) as running, RawClient(running.address) as raw:
        wait_for(raw, "ready")
        engine.flow.clear()
        raw.generate("running")
        wait_until(lambda: len(engine.requests) == 1)
        ask(raw, call)
        raw.generate("waiting")
        raw.health()
        running.worker.drain()
        replies = raw.receive_until("done") + raw.receive_until("done")
        assert {reply["finish_reason"] for reply in replies if reply["type"] == "sample"} == {"abort"}
        running.join()


def test_pending_calls_are_answered_at_shutdown(engine: FakeEngine) -> None:
    with serving(engine) as running, RawClient(running.address) as raw:
        wait_for(raw, "ready")
        engine.flow.clear()
        raw.generate("a")
        wait_until(lambda: len(engine.requests) == 1)
        with HandPush(raw, NEW) as push:
            push.begin()
            raw.send("drain", id="drain")
            wait_for(raw, "draining")
            running.worker.drain()
            error = raw.receive()
            assert error["id"] == "drain" and error["code"] == "unavailable"
            calls = (
                push.stage(),
                push.call("verify_push", num_buckets=0),
                push.call("commit_push"),
                push.call("abort_push"),
            )
            for reply in calls:
                assert reply["code"] == "unavailable", "a fleet's publisher can then go on without this worker"
            engine.flow.set()
            assert raw.receive_until("done")


def test_calls_are_answered_when_the_engine_fails(engine: FakeEngine) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken sleep")

    engine.sleep = broken  # type: ignore[method-assign, assignment]
    running = WorkerOnThread(WorkerConfig(), lambda: engine)
    with RawClient(running.address) as raw:
        wait_for(raw, "ready")
        error = ask(raw, "sleep")
        assert error["code"] == "worker_failed" and "broken sleep" in error["message"]
    running.join()
    assert running.error is not None


# Through the client.


def test_the_client_has_the_lifecycle_calls(worker: WorkerOnThread, raw: RawClient, engine: FakeEngine) -> None:
    with RolloutClient(worker.address) as client:
        assert client.pause().state == "paused" and client.resume().state == "ready"
        assert client.drain(timeout=5.0).state == "paused" and client.resume().state == "ready"
        assert client.sleep(2, ["kv_cache"], in_flight="abort").state == "asleep"
        with pytest.raises(IllegalStateError, match="in state asleep"):
            client.pause()
        assert client.wake_up().state == "ready" and client.invalidate_prefix_cache().weight_version == 3
        engine.flow.clear()
        raw.generate("a")
        wait_until(lambda: len(engine.requests) == 1)
        with pytest.raises(DeadlineError):
            client.drain(timeout=0.05)
        engine.flow.set()
