"""The book of requests with outboxes on a fake socket, without an engine: what the book keeps when clients are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zmq

from trueroll.engine.grammars.source import Grammar
from trueroll.engine.request import Distribution, SampleOutput, SamplingParams
from trueroll.errors import InvalidRequestError, WorkerFailedError
from trueroll.rollout import protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.network.router import Outboxes
from trueroll.rollout.worker.admission import Conditions, Versions
from trueroll.rollout.worker.book import RequestBook
from trueroll.rollout.worker.engine_thread import Add, Command, End, Ended
from trueroll.rollout.worker.grammars import Preparation

TOKENS = bytes(4 * 5)
VERSIONS = Versions(3, {})
READY = Conditions("ready", False, True, VERSIONS)
PAUSED = Conditions("paused", False, False, VERSIONS)
MESSAGES: dict[str, Any] = {
    "score": protocol.GetScores(
        id="r", token_ids=TOKENS, distribution=Distribution(), min_weight_version=9, wait_for_weights=True
    ),
    "generate": protocol.Generate(
        id="r",
        prompt_token_ids=TOKENS,
        params=SamplingParams(n=3, max_tokens=4),
        min_weight_version=9,
        wait_for_weights=True,
    ),
}


class Socket:
    """A fake router socket. `sent`: messages that clients have read. `full`: clients that do not read. `gone`: lost
    clients.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        identity, frame = frames
        if identity in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if identity in self.full:
            raise zmq.Again
        self.sent.append((identity, protocol.from_worker(frame)))

    def types(self, identity: bytes) -> list[str]:
        return [message.type for to, message in self.sent if to == identity]


class Desk:
    """A book with outboxes of `max_bytes`. `commands`: commands that were sent to the engine."""

    def __init__(self, conditions: Conditions = READY, max_bytes: int = 10**6) -> None:
        self.socket, self.conditions, self.commands = Socket(), conditions, list[Command]()
        router: Any = self.socket
        self.outboxes = Outboxes(
            router, max_bytes, lambda identity: self.book.lose(identity), lambda identity: identity
        )
        self.book = RequestBook(
            WorkerConfig(), self.commands.append, self.outboxes.send, self.outboxes.takes, lambda: self.conditions
        )
        self.book.max_model_len = 64

    def fill(self, identity: bytes, room: int) -> None:
        """Fill the client's outbox until only `room` bytes are free, because the client does not read."""
        self.outboxes.send(identity, bytes(self.outboxes._max_bytes - room))

    def ends(self) -> list[End]:
        return [command for command in self.commands if isinstance(command, End)]

    def is_empty(self) -> bool:
        ledger = self.book.ledger
        counts = ledger.num_samples_left, ledger.num_bytes_open, ledger.awaited.num_bytes, ledger.num_bytes_replied
        return not ledger.open and not self.book.has_unanswered and counts == (0, 0, 0, 0)


def request(id: str, n: int = 1, **fields: Any) -> protocol.Generate:
    return protocol.Generate(id=id, prompt_token_ids=TOKENS, params=SamplingParams(n=n, max_tokens=4), **fields)


def output(index: int, id: str = "k") -> SampleOutput:
    return SampleOutput(id, index, [1, 2, 3, 4], np.zeros(4, np.float32), "length", 1, 0, ())


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("kind", MESSAGES)
def test_an_abort_of_a_waiting_request_is_counted_once_even_if_its_client_is_gone(kind: str, is_there: bool) -> None:
    """The loss of the client also aborts its requests."""
    desk = Desk()
    desk.book.submit(b"me", None, MESSAGES[kind])
    assert len(desk.book.ledger.open) == 1
    assert desk.book.ledger.num_samples_left == {"score": 1, "generate": 3}[kind]
    if not is_there:
        desk.socket.gone.add(b"me")
    desk.book.abort(b"me", None, protocol.Abort(id="abort", request_id="r"))
    desk.outboxes.report_lost()
    assert desk.is_empty() and bool(desk.socket.sent) == is_there


def test_the_failure_of_all_requests_reaches_each_client_even_if_one_is_dropped_meanwhile() -> None:
    desk = Desk(PAUSED, max_bytes=2000)
    for identity in (b"A", b"B", b"C"):
        desk.book.submit(identity, None, request(identity.decode(), while_connected=True))
    desk.socket.full = {b"A", b"B"}
    desk.fill(b"B", room=100)
    desk.conditions = Conditions("failed", False, False, VERSIONS)
    desk.book.fail_all(WorkerFailedError("engine failed"))
    assert desk.outboxes.is_dropped(b"B"), "premise"
    desk.outboxes.report_lost()
    assert desk.socket.types(b"C") == ["error"] and desk.is_empty()


def test_a_client_that_is_dropped_while_it_joins_waits_for_nothing() -> None:
    desk = Desk(max_bytes=1500)
    desk.book.submit(b"A", None, request("k", n=8, while_connected=True))
    desk.book.take_outputs([output(index) for index in range(6)])
    desk.socket.full = {b"B"}
    desk.book.submit(b"B", None, request("k", n=8, while_connected=True))
    assert desk.outboxes.is_dropped(b"B"), "premise"
    desk.outboxes.report_lost()
    assert [each.identity for each in desk.book.ledger.open["k"].subscribers] == [b"A"]
    desk.book.lose(b"A")
    assert len(desk.ends()) == 1 and desk.book.ledger.awaited.num_bytes == 0


def test_old_replies_that_drop_another_client_leave_no_bytes_behind() -> None:
    desk = Desk(PAUSED, max_bytes=1500)
    desk.book.submit(b"B", None, request("k", n=8, while_connected=True))
    for index in range(3):
        desk.book.abort(b"Z", None, protocol.Abort(id=f"abort {index}", request_id="k", index=index))
    desk.socket.full = {b"A", b"B"}
    desk.fill(b"B", room=100)
    desk.book.submit(b"A", None, request("k", n=8, while_connected=True))
    assert desk.outboxes.is_dropped(b"B") or desk.outboxes.is_dropped(b"A"), "premise"
    desk.outboxes.report_lost()
    for identity in (b"A", b"B"):
        desk.book.lose(identity)
    assert desk.is_empty() and desk.book.ledger.kept.num_bytes == 0


@pytest.mark.parametrize("conditions", [READY, PAUSED])
def test_a_request_that_waits_for_weights_ends_with_its_last_client(conditions: Conditions) -> None:
    desk = Desk(conditions)
    desk.book.submit(b"A", None, MESSAGES["generate"])
    desk.book.lose(b"A")
    assert desk.is_empty()


def test_a_request_whose_weights_are_there_outlives_its_client() -> None:
    desk = Desk(PAUSED)
    desk.book.submit(b"A", None, request("k", min_weight_version=3, wait_for_weights=True))
    desk.book.lose(b"A")
    assert "k" in desk.book.ledger.open


def test_an_abort_after_a_resubmission_ends_the_resubmitted_request() -> None:
    desk = Desk()
    aborted = SampleOutput("k", 0, [], np.zeros(0, np.float32), "abort", 1, 0, ())
    for number, caller in enumerate(("one", "two")):
        desk.book.submit(b"A", None, request("k", caller=caller))
        desk.book.abort(b"A", None, protocol.Abort(id=f"abort {number}", request_id="k"))
    first, second = desk.ends()
    desk.book.take_ended(Ended(first, [aborted]))
    assert "k" in desk.book.ledger.open, "premise: the second submission has opened the request again"
    desk.book.take_ended(Ended(second, []))
    [third] = desk.ends()[2:]
    desk.book.take_ended(Ended(third, [aborted]))
    assert desk.is_empty() and desk.socket.types(b"A").count("aborted") == 2
    assert "error" not in desk.socket.types(b"A")


def test_a_successor_that_gives_up_is_withdrawn_without_an_error() -> None:
    desk = Desk()
    desk.book.submit(b"A", None, request("k", caller="one"))
    desk.book.abort(b"A", None, protocol.Abort(id="abort", request_id="k"))
    desk.book.submit(b"B", None, request("k", caller="two"))
    desk.book.submit(b"C", None, request("k", caller="three"))
    desk.book.lose(b"A")
    desk.book.abort(b"B", None, protocol.Abort(id="give up", request_id="k", caller="two"))
    assert desk.socket.types(b"B") == ["aborted"] and len(desk.ends()) == 1


def test_the_open_request_with_the_most_reply_bytes_fails_alone() -> None:
    """Until the engine has aborted its samples, the failed request stays open. A client that joins gets the error."""
    desk = Desk()
    desk.book.submit(b"A", None, request("k", n=8, caller="one"))
    desk.book.submit(b"B", None, request("small", n=3))
    desk.book.take_outputs([output(0, "small"), output(0), output(1)])
    desk.book.max_record_bytes = desk.book.ledger.num_bytes_replied
    desk.book.take_outputs([output(1, "small"), output(2)])
    [end] = desk.ends()
    small = desk.book.ledger.open["small"]
    assert (end.request_id, end.index) == ("k", None)
    assert desk.book.ledger.num_bytes_replied == sum(map(len, small.replies)) > 0
    desk.book.take_outputs([output(3)])
    desk.book.lose(b"A")
    desk.book.submit(b"A2", None, request("k", n=8, caller="one"))
    assert desk.socket.types(b"A") == ["sample"] * 3 and desk.socket.types(b"A2") == [], "no more samples are sent"
    desk.book.take_ended(Ended(end, [output(index) for index in range(4, 8)]))
    [error] = [message for to, message in desk.socket.sent if to == b"A2"]
    assert (error.type, error.code) == ("error", "invalid_request") and "max_record_bytes" in error.message
    desk.book.take_outputs([output(2, "small")])
    assert desk.socket.types(b"B") == ["sample"] * 3 + ["done"] and desk.is_empty()
    stats = desk.book.ledger.stats
    assert (stats.accepted, stats.finished, stats.failed, stats.reply_errors) == (2, 1, 1, 1)


@pytest.mark.parametrize("is_submitted_again", [True, False])
def test_an_abort_call_crosses_the_failure_of_its_request(is_submitted_again: bool) -> None:
    desk = Desk()
    desk.book.max_record_bytes = 1
    desk.book.submit(b"A", None, request("k", n=3, caller="one"))
    desk.book.abort(b"C", None, protocol.Abort(id="abort", request_id="k", index=1))
    if is_submitted_again:
        desk.book.submit(b"B", None, request("k", n=3, caller="two"))
    desk.book.take_outputs([output(0)])
    first, second = desk.ends()
    desk.book.take_ended(Ended(first, [output(1)]))
    desk.book.take_ended(Ended(second, [output(2)]))
    assert desk.socket.types(b"A") == ["sample", "error"] and desk.socket.types(b"C") == ["aborted"]
    assert desk.socket.types(b"B") == ["error"] * is_submitted_again and desk.is_empty()


def test_a_waiting_request_fails_at_once() -> None:
    desk = Desk(PAUSED)
    desk.book.max_record_bytes = 1
    desk.book.submit(b"A", None, request("k", n=3))
    desk.book.abort(b"A", None, protocol.Abort(id="abort", request_id="k", index=1))
    assert desk.socket.types(b"A") == ["sample", "error", "aborted"] and desk.is_empty() and not desk.commands


class Grammars:
    """Grammars that are never prepared by themselves. `asked`: what the book asked for."""

    def __init__(self) -> None:
        self.asked, self.done = list[Preparation](), set[Grammar]()

    def find(self, grammar: Grammar) -> object | None:
        return grammar if grammar in self.done else None

    def prepare(self, user: str | None, key: str, grammar: Grammar) -> Preparation:
        self.asked.append(Preparation(key, grammar))
        return self.asked[-1]


def test_a_grammar_of_an_ended_request_says_nothing_about_its_successor() -> None:
    desk, grammars = Desk(), Grammars()
    desk.book.grammars = grammars  # type: ignore[assignment]
    for regex in ("(", "a"):
        params = SamplingParams(max_tokens=4, structured_outputs=Grammar(regex=regex))
        desk.book.submit(b"me", None, protocol.Generate(id="r", prompt_token_ids=TOKENS, params=params))
        if regex == "(":
            desk.book.abort(b"me", None, protocol.Abort(id="abort", request_id="r"))
            desk.book.acknowledge(None, protocol.Ack(ids=("r",)))
    refused, good = grammars.asked
    assert (refused.key, refused.is_wanted, good.is_wanted) == (good.key, False, True)
    refused.error = InvalidRequestError("structured_outputs: unclosed")
    desk.book.take_prepared(refused)
    refused.error = None
    desk.book.take_prepared(refused)
    assert "r" in desk.book.waiting_room and not desk.commands
    grammars.done.add(good.grammar)
    desk.book.take_prepared(good)
    assert [command.request.id for command in desk.commands if isinstance(command, Add)] == ["r"]
    assert desk.socket.types(b"me") == ["sample", "done", "aborted"]
