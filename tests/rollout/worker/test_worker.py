"""The worker through its socket, with the fake engine: replies, ids, limits, drains and failures."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import zmq
from fake_engine import FAIL_IN_ADD, FAIL_IN_STEP, FakeEngine, FakeGrammars, expected_tokens
from rollout.network.certificates import make_certificates
from serving import RawClient, WorkerOnThread, check_group, serving

from trueroll.engine.grammars.source import Grammar
from trueroll.engine.request import ContentSpan
from trueroll.errors import ConfigError, InvalidRequestError, ModelError, WorkerFailedError, WorkerLostError
from trueroll.rollout import RolloutClient, SamplingParams
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.grammars import GrammarThread, Preparation
from trueroll.rollout.worker.worker import Worker


def test_samples_arrive_one_by_one_and_done_ends_them(raw: RawClient) -> None:
    raw.generate("a", n=3, max_tokens=3)
    *samples, done = raw.receive_until("done", "error")
    assert [sample["index"] for sample in samples] == [2, 1, 0]
    assert [len(sample["token_ids"]) // 4 for sample in samples] == [1, 2, 3]
    assert done["params"]["seed"] == 7 and done["params"]["temperature"] == 1.0
    assert done["num_prompt_tokens"] == 3 and done["finish_reasons"] == {"length": 3}


def test_without_a_seed_the_seed_follows_from_the_id(raw: RawClient, engine: FakeEngine) -> None:
    raw.generate("a", seed=None)
    first = raw.receive_until("done")
    raw.generate("a", seed=None)
    again = raw.receive_until("done")
    assert first == again and first[-1]["params"]["seed"] is not None
    assert [request.id for request in engine.requests] == ["a"]


def test_score(raw: RawClient) -> None:
    raw.send("score", id="s", token_ids=b"\1\0\0\0\2\0\0\0\4\0\0\0", distribution={"temperature": 2.0}, cache_salt=None)
    scores = raw.receive()
    assert scores["type"] == "scores" and memoryview(scores["logprobs"]).cast("f").tolist() == [-1.0, -2.0]


class SlowGrammars(FakeGrammars):
    """Each grammar is prepared when `gate` is set; the regex `(` is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.prepared = list[Grammar]()

    def find(self, grammar: Grammar) -> object | None:
        return grammar if grammar in self.prepared else None

    def prepare(self, grammar: Grammar) -> object:
        assert self.gate.wait(20)
        self.prepared.append(grammar)
        if grammar.regex == "(":
            raise InvalidRequestError("structured_outputs: unclosed", field="structured_outputs")
        return grammar


def test_a_slow_grammar_delays_only_its_own_requests(engine: FakeEngine) -> None:
    engine.grammars = slow = SlowGrammars()
    with serving(engine) as worker, RawClient(worker.address) as raw:
        for id, regex in (("bad", "("), ("aborted", "b"), ("good", "a"), ("equal", "a")):
            raw.generate(id, structured_outputs={"regex": regex})
        raw.generate("plain")
        assert {reply["id"] for reply in raw.receive_until("done")} == {"plain"}
        raw.send("abort", id="x", request_id="aborted")
        assert [reply["type"] for reply in raw.receive_until("aborted")] == ["sample", "done", "aborted"]
        slow.gate.set()
        error = raw.receive_until("error")[-1]
        assert (error["id"], error["code"], error["field"]) == ("bad", "invalid_request", "structured_outputs")
        finished = raw.receive_until("done") + raw.receive_until("done")
        assert [reply["id"] for reply in finished if reply["type"] == "done"] == ["good", "equal"]
        assert [request.id for request in engine.requests] == ["plain", "good", "equal"]
        assert Grammar(regex="a") in slow.prepared and Grammar(regex="b") not in slow.prepared


def test_users_take_turns_with_their_grammars() -> None:
    slow, done = SlowGrammars(), SimpleQueue[Preparation]()
    thread = GrammarThread(slow, done.put)
    for key in ("a0", "a1", "a2", "a3", "b0"):
        thread.prepare(key[0], key, Grammar(regex=key))
    slow.gate.set()
    keys = [done.get(timeout=20).key for _ in range(5)]
    assert keys.index("b0") < keys.index("a2") and [key for key in keys if key != "b0"] == ["a0", "a1", "a2", "a3"]


def test_the_error_of_a_grammar_does_not_reach_a_later_request_with_the_same_id(engine: FakeEngine) -> None:
    engine.grammars = slow = SlowGrammars()
    with serving(engine) as worker, RawClient(worker.address) as raw:
        raw.generate("a", structured_outputs={"regex": "("})
        raw.send("abort", id="x", request_id="a")
        raw.receive_until("aborted")
        raw.send("ack", ids=["a"])
        raw.generate("a", structured_outputs={"regex": "b"})
        raw.health()
        slow.gate.set()
        assert [reply["type"] for reply in raw.receive_until("done", "error")] == ["sample", "done"]
        assert slow.prepared[-1].regex == "b"


def test_an_equal_submission_joins_and_gets_all_replies(worker: WorkerOnThread, engine: FakeEngine) -> None:
    engine.gate.clear()
    with RawClient(worker.address) as first, RawClient(worker.address) as second:
        for client in (first, second, second):
            client.generate("a", n=2)
            client.health()  # the reply comes after the submission was received
        engine.gate.set()
        assert len(first.receive_until("done")) == 3
        twice = second.receive_until("done") + second.receive_until("done")
    assert sorted(reply["type"] for reply in twice) == ["done", "done"] + ["sample"] * 4 and len(engine.requests) == 1


def test_joining_late_replays_what_has_finished(raw: RawClient, worker: WorkerOnThread, engine: FakeEngine) -> None:
    raw.generate("a", n=2, max_tokens=400)
    raw.generate("b", n=200, max_tokens=200)
    first = raw.receive_until("sample")[0]
    with RawClient(worker.address) as late:
        late.generate(first["id"], n=200, max_tokens=200)
        *samples, _ = late.receive_until("done")
    assert samples[0] == first and len({sample["index"] for sample in samples}) == len(samples) == 200


def test_an_id_with_other_content_is_a_conflict_and_the_first_goes_on(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a")
    raw.generate("a", max_tokens=5)
    assert raw.receive()["code"] == "id_conflict"
    engine.gate.set()
    assert raw.receive_until("done", "error")[-1]["type"] == "done"
    raw.generate("a", temperature=0.5)
    assert raw.receive()["code"] == "id_conflict"


def test_other_spans_with_the_same_tokens_are_a_conflict(raw: RawClient, engine: FakeEngine) -> None:
    fields = dict(prompt_token_ids=np.array([1, 2, 3], "<i4").tobytes(), params=dict(max_tokens=4, seed=7))
    one, other = ([[1, 2, bytes([number] * 32)]] for number in (1, 2))
    raw.send("generate", id="a", spans=one, **fields)
    replies = raw.receive_until("done")
    assert engine.requests[-1].spans == (ContentSpan(1, 2, bytes([1] * 32)),)
    raw.send("generate", id="a", spans=one, **fields)
    assert raw.receive_until("done") == replies
    for spans in (other, []):
        raw.send("generate", id="a", spans=spans, **fields)
        assert raw.receive()["code"] == "id_conflict"
    raw.send("generate", id="b", spans=[[1, 2, bytes(32), 0]], **fields)
    assert raw.receive()["code"] == "invalid_message"
    raw.send("score", id="s", token_ids=fields["prompt_token_ids"], spans=one)
    assert raw.receive()["type"] == "scores" and engine.requests[-1].spans == (ContentSpan(1, 2, bytes([1] * 32)),)


def test_a_result_is_kept_for_a_vanished_client_until_acknowledged(worker: WorkerOnThread, engine: FakeEngine) -> None:
    engine.gate.clear()
    with RawClient(worker.address) as vanishing:
        vanishing.generate("a")
        vanishing.health()
    engine.gate.set()
    with RawClient(worker.address) as client:
        client.generate("a")
        assert client.receive_until("done")[-1]["id"] == "a" and len(engine.requests) == 1
        assert client.health()["requests"]["kept"] == 1
        client.send("ack", ids=["a", "unknown"])
        assert client.health()["requests"]["kept"] == 0
        client.generate("a")
        client.receive_until("done")
    assert len(engine.requests) == 2


def test_an_identity_in_use_cannot_be_taken_over(worker: WorkerOnThread, engine: FakeEngine) -> None:
    engine.gate.clear()
    with RawClient(worker.address, b"me") as first, RawClient(worker.address, b"me") as second:
        first.generate("a")
        first.health()
        second.generate("b")
        engine.gate.set()
        assert first.receive_until("done")[-1]["id"] == "a"
        second.socket.set(zmq.RCVTIMEO, 300)
        with pytest.raises(zmq.Again):
            second.receive()


def test_the_result_of_a_request_acknowledged_while_it_runs_is_not_kept(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a")
    raw.send("ack", ids=["a"])
    raw.health()
    engine.gate.set()
    raw.receive_until("done")
    assert raw.health()["requests"]["kept"] == 0


@pytest.mark.parametrize("bound", [{"max_kept_results": 2}, {"max_kept_bytes": 7000}])
def test_the_oldest_results_are_dropped_beyond_the_bound(engine: FakeEngine, bound: dict[str, int]) -> None:
    with serving(engine, **bound) as worker, RawClient(worker.address) as raw:
        for i in range(8):
            raw.generate(str(i))
            raw.receive_until("done")
        assert 0 < raw.health()["requests"]["kept"] < 8
        raw.generate("7")
        raw.receive_until("done")
        assert len(engine.requests) == 8
        raw.generate("0")
        raw.receive_until("done")
    assert len(engine.requests) == 9


def test_abort_ends_one_sample_or_all_with_what_they_have(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a", n=3, max_tokens=400)
    assert engine.at_gate.wait(timeout=20)
    raw.send("abort", id="1", request_id="a", index=1)
    raw.send("abort", id="2", request_id="a", index=None)
    raw.send("abort", id="3", request_id="a", index=9)
    raw.health()  # the reply comes after the aborts were received
    engine.gate.set()
    replies = [raw.receive() for _ in range(7)]
    ended = [(reply["type"], reply.get("index"), reply.get("finish_reason")) for reply in replies]
    assert ended[:2] == [("sample", 1, "abort"), ("aborted", None, None)]
    assert sorted(ended[2:4]) == [("sample", 0, "abort"), ("sample", 2, "abort")]
    assert replies[4]["finish_reasons"] == {"abort": 3} and replies[5]["num_samples"] == 2
    assert replies[6]["id"] == "3" and replies[6]["code"] == "unknown_request"


def test_abort_of_a_score(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("blocks the step")
    assert engine.at_gate.wait(timeout=20)
    raw.send("score", id="s", token_ids=bytes(8))
    raw.send("abort", id="1", request_id="s")
    raw.health()  # the reply comes after the abort was received
    engine.gate.set()
    scores, aborted = (reply for reply in (raw.receive() for _ in range(4)) if reply["type"] in ("scores", "aborted"))
    assert (scores["finish_reason"], scores["logprobs"]) == ("abort", b"") and aborted["num_samples"] == 1


def test_a_caller_that_gives_up_leaves_a_request_to_the_others(worker: WorkerOnThread, engine: FakeEngine) -> None:
    engine.gate.clear()
    with RawClient(worker.address) as first, RawClient(worker.address) as second:
        for client, caller in ((first, "x"), (second, "y")):
            client.generate("a", caller=caller, n=2)
            client.health()  # the reply comes after the submission was received
        first.send("abort", id="give up", request_id="a", caller="x")
        assert first.receive() == dict(version=1, type="aborted", id="give up", request_id="a", num_samples=0)
        engine.gate.set()
        assert second.receive_until("done")[-1]["finish_reasons"] == {"length": 2}
        requests = first.health()["requests"]
        assert (requests["open"], requests["kept"]) == (0, 1)
        second.send("abort", id="too late", request_id="a", caller="y")
        assert second.receive()["num_samples"] == 0 and second.health()["requests"]["kept"] == 0


def test_a_request_ends_and_is_not_kept_when_the_last_caller_gives_it_up(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a", caller="x", n=2)
    raw.generate("a", caller="y", n=2)
    raw.send("abort", id="x gives up", request_id="a", caller="x")
    assert raw.receive()["num_samples"] == 0
    raw.send("abort", id="y gives up", request_id="a", caller="y")
    raw.health()
    engine.gate.set()
    assert raw.receive()["num_samples"] == 2  # and no samples arrived before this reply
    requests = raw.health()["requests"]
    assert (requests["open"], requests["kept"]) == (0, 0)
    raw.send("abort", id="again", request_id="a", caller="x")
    assert raw.receive()["code"] == "unknown_request"
    raw.send("abort", id="both", request_id="a", caller="x", index=1)
    assert raw.receive()["code"] == "invalid_message"


def test_a_submission_after_an_abort_gets_whole_samples(worker: WorkerOnThread, engine: FakeEngine) -> None:
    engine.gate.clear()
    with RawClient(worker.address) as first, RawClient(worker.address) as second:
        first.generate("a", caller="x", max_tokens=9)
        assert engine.at_gate.wait(timeout=20)
        first.send("abort", id="end", request_id="a")
        first.health()
        second.generate("a", caller="y", max_tokens=9)  # before the engine has ended the request
        second.generate("a", max_tokens=8)
        assert second.receive()["code"] == "id_conflict"
        engine.gate.set()
        ended = first.receive_until("aborted")
        assert [reply["type"] for reply in ended] == ["sample", "done", "aborted"]
        assert ended[0]["finish_reason"] == "abort"
        whole = second.receive_until("done")
        assert whole[0]["finish_reason"] == "length" and len(whole[0]["token_ids"]) == 4 * 9
        first.generate("a", caller="z", max_tokens=9)
        assert first.receive_until("done") == [reply | {"caller": "z"} for reply in whole]
    assert [request.id for request in engine.requests] == ["a", "a"]


def test_a_kept_aborted_result_goes_only_to_earlier_callers(raw: RawClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    raw.generate("a", caller="x")
    raw.send("abort", id="end", request_id="a")
    aborted = raw.receive_until("aborted")[:-1]
    raw.generate("a", caller="x")  # sent again, as after a lost reply
    assert raw.receive_until("done") == aborted
    engine.flow.set()
    raw.generate("a", caller="y")
    assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}
    raw.generate("a", caller="x")
    assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}


def test_an_abort_that_ended_nothing_does_not_prevent_joins(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a", caller="x", n=2)
    raw.send("abort", id="end", request_id="a", index=9)
    raw.generate("a", caller="y", n=2)
    raw.send("health", id="health")
    ends = [
        reply for reply in raw.receive_until("health") if reply["type"] == "error"
    ]  # the error of the abort, if it has arrived
    engine.gate.set()
    while len(ends) < 3:
        ends.append(raw.receive_until("done", "error")[-1])
    assert sorted(end["type"] for end in ends) == ["done", "done", "error"] and len(engine.requests) == 1


def test_a_call_that_is_sent_again_is_done_once_and_answered_again(raw: RawClient, engine: FakeEngine) -> None:
    raw.generate("a", max_tokens=400)
    for call, fields in (("abort", dict(request_id="a")), ("drain", {}), ("resume", {}), ("resume", {"id": "2"})):
        fields = {"id": call, **fields}
        raw.send(call, **fields)
        first = raw.receive_until("aborted", "status")[-1]
        raw.send(call, **fields)
        assert raw.receive() == first
    raw.send("drain", id="resume")
    assert raw.receive()["code"] == "id_conflict"
    raw.send("abort", id="abort", request_id="b")
    assert raw.receive()["code"] == "id_conflict"
    raw.send("abort", id="unknown", request_id="b")
    refusal = raw.receive()
    raw.generate("b", max_tokens=400)
    raw.send("abort", id="unknown", request_id="b")
    assert raw.receive() == refusal and refusal["code"] == "unknown_request"
    assert [action[0] for action in engine.actions] == []


def test_a_late_abort_does_not_end_a_later_request_with_the_same_id(
    worker: WorkerOnThread, raw: RawClient, engine: FakeEngine
) -> None:
    may_abort, abort = threading.Event(), engine.abort
    engine.abort = lambda *request: (may_abort.wait(), abort(*request))[1]  # type: ignore[method-assign]
    engine.gate.clear()
    raw.generate("a", caller="x", max_tokens=1)
    assert engine.at_gate.wait(timeout=20)
    raw.send("abort", id="late", request_id="a")
    raw.health()
    engine.gate.set()
    whole = raw.receive_until("done")
    raw.generate("a", caller="y", max_tokens=1)
    again = raw.receive_until("done")
    assert again == [reply | {"caller": "y"} for reply in whole], "a request that has ended cannot be aborted"
    raw.send("ack", ids=["a"])
    raw.generate("a", caller="z", max_tokens=1)
    raw.health()
    may_abort.set()
    replies = [raw.receive() for _ in range(3)]
    assert sorted(reply["type"] for reply in replies) == ["done", "error", "sample"]
    raw.generate("a", caller="w", max_tokens=1)
    assert (
        raw.receive_until("done")[0]["finish_reason"] == "length" and worker.worker._book.ledger.num_samples_left == 0
    )


def test_submissions_that_wait_for_an_abort_are_limited(engine: FakeEngine) -> None:
    with serving(engine, max_queued_requests=3) as worker, RawClient(worker.address) as raw:
        engine.flow.clear()
        raw.generate("a", caller="first", n=2)
        raw.send("abort", id="end", request_id="a", index=1)
        raw.receive_until("aborted")
        for number in range(4):
            raw.generate("a", caller=str(number), n=2)
        refusal = raw.receive()
        assert (refusal["code"], refusal["caller"]) == ("queue_full", "3")
        raw.send("abort", id="nothing", request_id="a", index=7)
        assert raw.receive()["code"] == "unknown_request"
        assert len(worker.worker._book.ledger.open["a"].successors) == 3
        engine.flow.set()
        ends = [raw.receive_until("done")[-1] for _ in range(4)]
    assert {end["caller"]: end["finish_reasons"] for end in ends} == {
        "first": {"abort": 1, "length": 1},
        **{caller: {"length": 2} for caller in "012"},
    }


def test_no_submission_joins_a_request_that_a_sleep_will_abort(raw: RawClient, engine: FakeEngine) -> None:
    engine.gate.clear()
    raw.generate("a", caller="x", max_tokens=9)
    assert engine.at_gate.wait(timeout=20)
    raw.send("sleep", id="sleep", in_flight="abort")
    raw.generate("a", caller="y", max_tokens=9)
    raw.health()
    engine.gate.set()
    ended = raw.receive_until("status")
    assert [(reply["finish_reason"], reply["caller"]) for reply in ended if reply["type"] == "sample"] == [
        ("abort", "x")
    ]
    raw.send("wake_up", id="wake up")
    whole = raw.receive_until("done")
    assert [reply["caller"] for reply in whole[1:]] == ["y", "y"] and whole[1]["finish_reason"] == "length"


def test_a_request_given_up_while_paused_is_counted_once(raw: RawClient) -> None:
    raw.send("pause", id="pause")
    raw.receive()
    raw.generate("a", caller="x")
    raw.send("abort", id="give up", request_id="a", caller="x")
    raw.receive_until("aborted")
    raw.generate("a", caller="y")
    raw.send("drain", id="drain")
    assert raw.receive()["state"] == "paused"


def test_a_kept_result_is_dropped_when_all_callers_have_given_it_up(raw: RawClient) -> None:
    for caller in "xy":
        raw.generate("a", caller=caller)
        raw.receive_until("done")
    for caller in "xy":
        assert raw.health()["requests"]["kept"] == 1
        raw.send("abort", id=f"{caller} gives up", request_id="a", caller=caller)
        raw.receive()
    assert raw.health()["requests"]["kept"] == 0


def test_the_oldest_replies_are_forgotten(raw: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueroll.rollout.worker.ledger.MAX_REMEMBERED", 2)
    for id in "abc":
        raw.send("pause" if id == "a" else "resume", id=id)
        raw.receive()
    raw.send("resume", id="a")
    assert raw.receive()["type"] == "status"
    raw.send("pause", id="c")
    assert raw.receive()["code"] == "id_conflict"


def test_health_and_stats_answer_during_a_long_step(raw: RawClient, engine: FakeEngine) -> None:
    while raw.health()["state"] != "ready":
        pass
    engine.gate.clear()
    raw.generate("a")
    health = raw.health()
    assert health["state"] == "ready" and health["requests"]["open"] == 1 and health["weight_version"] == 3
    assert health["engine"]["backend"] == "fake" and health["seconds_since_progress"] >= 0
    assert (
        health["memory"].keys() == {"process", "images", "replies", "weights", "kv_cache", "staging"}
        and health["memory"]["process"] > 2**20
    )
    assert health["limits"]["max_n"] == 1024
    while raw.health()["seconds_since_progress"] <= health["seconds_since_progress"]:
        pass  # the time must grow, since the step blocks
    raw.send("stats", id="x")
    stats = raw.receive()
    assert stats["id"] == "x" and stats["service"]["accepted"] == 1 and stats["engine"]["steps"] == 0


def test_requests_wait_while_the_model_loads() -> None:
    engine, may_load = FakeEngine(), threading.Event()

    def load() -> FakeEngine:
        may_load.wait()
        return engine

    worker = WorkerOnThread(WorkerConfig(), load)
    with RawClient(worker.address) as raw:
        raw.generate("a")
        health = raw.health()
        assert health["state"] == "loading" and health["engine"] is None and health["weight_version"] is None
        may_load.set()
        assert raw.receive_until("done", "error")[-1]["type"] == "done"
    worker.worker.drain()
    worker.join()
    assert worker.error is None


def test_a_full_queue_refuses_and_the_rest_goes_on(engine: FakeEngine) -> None:
    with serving(engine, max_queued_requests=2) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        for id in "abc":
            raw.generate(id)
        refusal = raw.receive()
        assert (refusal["id"], refusal["code"]) == ("c", "queue_full")
        raw.generate("a")  # a request that joins another needs no room in the queue
        engine.gate.set()
        ends = [raw.receive_until("done", "error")[-1] for _ in range(3)]
    assert sorted((end["type"], end["id"]) for end in ends) == [("done", "a"), ("done", "a"), ("done", "b")]


def test_unfinished_samples_are_limited(engine: FakeEngine) -> None:
    with serving(engine, max_queued_samples=4, max_n=4) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        raw.generate("a", n=3)
        raw.generate("b", n=2)
        refusal = raw.receive()
        assert (refusal["id"], refusal["code"]) == (
            "b",
            "queue_full",
        ) and "max_queued_samples = 4 is exceeded" in refusal["message"]
        raw.send("score", id="s", token_ids=bytes(8))
        raw.send("score", id="t", token_ids=bytes(8))
        assert raw.receive()["code"] == "queue_full"
        engine.gate.set()
        for _ in range(2):
            raw.receive_until("done", "scores")
        raw.generate("b", n=4)
        assert raw.receive_until("done", "error")[-1]["finish_reasons"] == {"length": 4}
    with pytest.raises(ConfigError, match="max_n: 1024 is more than max_queued_samples = 4"):
        WorkerConfig(max_queued_samples=4)


@pytest.mark.parametrize("token", [FAIL_IN_STEP, FAIL_IN_ADD])
def test_if_the_engine_fails_all_requests_get_the_cause(
    engine: FakeEngine, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueroll.rollout.worker.worker.FAILED_SECONDS", 2.0)
    with serving(engine) as worker, RawClient(worker.address) as raw, RawClient(worker.address) as other:
        engine.gate.clear()
        other.generate("b", max_tokens=400)
        assert engine.at_gate.wait(timeout=20)
        raw.generate("a", prompt=[token])
        raw.health()
        engine.gate.set()
        for client in (raw, other):
            error = client.receive_until("error")[-1]
            assert error["code"] == "worker_failed" and "broken" in error["message"]
        assert raw.health()["state"] == "failed"
        raw.generate("late")
        assert raw.receive()["code"] == "unavailable"
    assert isinstance(worker.error, WorkerFailedError) and "broken" in str(worker.error)


def test_a_model_that_cannot_be_loaded_ends_the_worker_with_its_error() -> None:
    may_fail = threading.Event()

    def load() -> FakeEngine:
        may_fail.wait()
        raise ModelError("model: no such folder")

    worker = WorkerOnThread(WorkerConfig(), load)
    with RawClient(worker.address) as raw:
        raw.generate("a")
        raw.health()
        may_fail.set()
        error = raw.receive()
        assert error["code"] == "worker_failed" and "no such folder" in error["message"]
        worker.join()
    assert isinstance(worker.error, ModelError)


def test_draining_lets_running_requests_finish_and_refuses_new_ones(engine: FakeEngine) -> None:
    with serving(engine) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        raw.generate("a", max_tokens=5)
        raw.health()
        worker.worker.drain()
        while raw.health()["state"] != "draining":
            pass
        raw.generate("b")
        refusal = raw.receive()
        assert refusal["code"] == "unavailable" and "draining" in refusal["message"]
        engine.gate.set()
        assert raw.receive_until("done", "error")[-1]["finish_reasons"] == {"length": 1}
        worker.join()
    assert worker.error is None


def test_a_worker_that_loads_beyond_its_drain_deadline_refuses_waiting_requests(engine: FakeEngine) -> None:
    may_load = threading.Event()
    worker = WorkerOnThread(WorkerConfig(drain_seconds=0.1), lambda: (may_load.wait(), engine)[1])
    with RawClient(worker.address) as raw:
        raw.generate("a", n=2)
        raw.generate("b", n=2)
        raw.send("abort", id="end", request_id="b")
        assert raw.health()["requests"]["open"] == 2
        worker.worker.drain()
        refused = [raw.receive() for _ in range(3)]
    worker.join()
    may_load.set()
    assert {reply["id"] for reply in refused} == {"a", "b", "end"} and worker.error is None
    assert {reply["code"] for reply in refused} == {"unavailable"}


def test_draining_aborts_the_rest_at_its_deadline(engine: FakeEngine) -> None:
    with serving(engine, drain_seconds=0.05) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        raw.generate("a", n=2, max_tokens=400)
        assert engine.at_gate.wait(timeout=20)
        worker.worker.drain()
        while raw.health()["state"] != "draining" or not worker.worker._ending.is_aborting:
            pass
        engine.gate.set()
        *samples, done = raw.receive_until("done", "error")
        worker.join()
    assert done["finish_reasons"] == {"abort": 2} and len(samples) == 2 and worker.error is None


def test_an_abort_that_comes_too_late_is_answered_before_a_drained_worker_ends(engine: FakeEngine) -> None:
    may_abort, abort = threading.Event(), engine.abort
    engine.abort = lambda *request: (may_abort.wait(), abort(*request))[1]  # type: ignore[method-assign]
    with serving(engine) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        raw.generate("a", max_tokens=1)
        assert engine.at_gate.wait(timeout=20)
        raw.send("abort", id="late", request_id="a", index=None)
        worker.worker.drain()
        while raw.health()["state"] != "draining":
            pass
        engine.gate.set()
        assert raw.receive_until("done")[-1]["finish_reasons"] == {"length": 1}
        may_abort.set()
        assert raw.receive()["code"] == "unknown_request"
        worker.join()


def test_if_the_engine_fails_aborts_get_the_cause(engine: FakeEngine) -> None:
    with serving(engine) as worker, RawClient(worker.address) as raw:
        engine.gate.clear()
        raw.generate("bad", prompt=[FAIL_IN_STEP])
        assert engine.at_gate.wait(timeout=20)
        raw.send("abort", id="abort", request_id="bad", index=None)
        raw.health()
        engine.gate.set()
        assert {raw.receive()["id"] for _ in range(2)} == {"bad", "abort"}
        worker.join()
    assert isinstance(worker.error, WorkerFailedError)


# Addresses and keys.


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.1.2:5555", "tcp://example.org:1", "udp://127.0.0.1:1", "x"],
)
def test_an_open_address_needs_keys_on_both_sides(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        WorkerConfig(address=address)
    with pytest.raises(ConfigError, match="address"):
        RolloutClient(address)


def test_an_address_in_use_is_an_error(worker: WorkerOnThread, engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="another process already listens"):
        Worker(WorkerConfig(address=worker.address), lambda: engine)
    with serving(FakeEngine(), address="tcp://127.0.0.1:*") as other:
        with pytest.raises(ConfigError, match="in use"):
            Worker(WorkerConfig(address=other.address), lambda: engine)


def test_the_default_address_is_in_a_private_folder(worker: WorkerOnThread) -> None:
    socket_file = Path(worker.address.removeprefix("ipc://"))
    assert socket_file.is_socket() and socket_file.parent.stat().st_mode & 0o777 == 0o700


def test_only_clients_with_the_right_keys_can_use_an_open_address(tmp_path: Path, engine: FakeEngine) -> None:
    certificates = make_certificates(tmp_path, {"alice": "generate"})
    other_key = zmq.curve_keypair()[0].decode()
    with serving(engine, **(certificates.settings | {"address": "tcp://0.0.0.0:*"})) as worker:
        address = worker.address.replace("0.0.0.0", "127.0.0.1")
        with RolloutClient(address, **certificates.client("alice")) as client:
            check_group(client.generate([[1]], SamplingParams(n=2))[0], 2)
        mistakes: list[dict[str, Any]] = [{}, certificates.client("alice") | {"server_public_key": other_key}]
        for wrong in mistakes:
            with RolloutClient(address, timeout=0.5, **wrong) as client, pytest.raises(WorkerLostError):
                client.health()


def test_key_files_must_be_private_and_hold_a_secret(tmp_path: Path, engine: FakeEngine) -> None:
    settings = make_certificates(tmp_path, {"alice": "generate"}).settings
    public_file, secret_file = tmp_path / "worker.key", tmp_path / "worker.key_secret"
    secret_file.chmod(0o644)
    public_file.chmod(0o600)
    with pytest.raises(ConfigError, match="chmod 600"):
        Worker(WorkerConfig(**settings), lambda: engine)
    with pytest.raises(ConfigError, match="No such file"):
        Worker(WorkerConfig(**(settings | {"curve_secret_key_file": str(tmp_path / "missing")})), lambda: engine)
    with pytest.raises(ConfigError, match="has no secret key"):
        Worker(WorkerConfig(**(settings | {"curve_secret_key_file": str(public_file)})), lambda: engine)


def test_the_tokens_come_from_the_engine(raw: RawClient) -> None:
    raw.generate("a", max_tokens=6)
    sample = raw.receive()
    assert memoryview(sample["token_ids"]).cast("i").tolist() == expected_tokens(7, 0, 6)
