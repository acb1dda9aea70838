"""The HTTP fuzzer in CI: a short campaign, and a check that the harness finds each wrong answer."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzz.campaign import Plan
from fuzz.good import good_requests
from fuzz.http_attack import HttpAttacker
from fuzz.http_corpus import HttpCorpus, is_tame
from fuzz.http_good import HttpGoodClient
from fuzz.http_mutate import framed, plain_body
from fuzz.http_rounds import HTTP_SHARES, HttpRounds
from fuzz.target import tiny_campaign
from fuzz.violation import Sent, Trace, Violation, read_trace

from trueroll.rollout.http import app

SENT = Sent("plain", 0, [b"GET /health HTTP/1.1\r\n\r\n"])
OK = b"HTTP/1.1 200 OK\r\n\r\n"


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body


@pytest.fixture
def saying() -> Iterator[Callable[[bytes], tuple[str, int]]]:
    """A function that starts a server. The server answers each connection with the same bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(data: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(2**16)
                connection.sendall(data)

    def start(data: bytes) -> tuple[str, int]:
        threading.Thread(target=serve, args=(data,), daemon=True).start()
        return listener.getsockname()

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_corpus_has_every_path() -> None:
    corpus = HttpCorpus(random.Random(0))
    requests = [corpus.request() for _ in range(3000)]
    assert all(is_tame(framed(request, plain_body(request))) for request in requests)
    paths = {*re.findall(r'Route\(\s*"([^"]+)"', Path(app.__file__).read_text())} - {"/v1/models/{name:path}"}
    assert paths <= {request.target.partition("?")[0] for request in requests} and len(paths) >= 20


@pytest.mark.parametrize(
    ("target", "is_let_through"),
    [
        ("/pause?mode=keep", True),
        ("/sleep?mode=keep&level=1&tags=weights", True),
        ("/is_paused", True),
        ("/pause", False),
        ("/sleep?level=1", False),
        ("/pause?mode=abort", False),
        ("/pause?mode=kee", False),
    ],
)
def test_requests_that_end_requests_of_others_are_not_sent(target: str, is_let_through: bool) -> None:
    assert is_tame(f"POST {target} HTTP/1.1\r\n\r\n".encode()) == is_let_through


def test_a_seed_gives_the_same_round_and_a_saved_round_is_read_back(tmp_path: Path) -> None:
    trace = Trace()
    trace.start_round()
    for sent in HttpRounds(7).draw(3):
        trace.add(sent)
    trace.save(tmp_path / "trace")
    first = list(read_trace(tmp_path / "trace"))
    assert first == list(HttpRounds(7).draw(3)) != list(HttpRounds(8).draw(3))
    assert {sent.kind for sent in first} == {*HTTP_SHARES}
    bodies = [
        sent.frames[-1].partition(b"\r\n\r\n")[2] for sent in first if sent.kind == "body" and len(sent.frames) == 1
    ]
    assert len(bodies) // 4 < sum(map(_is_json, bodies)) < len(bodies) and max(map(len, bodies)) > 10_000


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


ERROR = {"message": "m", "type": "t", "param": None, "code": "c"}


@pytest.mark.parametrize(
    ("said", "kind", "found"),
    [
        (b"", "plain", "no answer to"),
        (b"", "head", None),
        (b"\x15\x03\x01", "head", "something other than HTTP"),
        (answer(500, b"Internal Server Error"), "body", "was answered with"),
        (answer(500, b"other"), "body", "was answered with"),
        (answer(418, b"tea"), "head", "was answered with"),
        (answer(400, b"Invalid HTTP request received."), "plain", "an error without its body"),
        (answer(400, json.dumps({"error": {"message": "m"}}).encode()), "plain", "an error of another form"),
        (answer(400, json.dumps({"error": ERROR | {"message": "x" * 4000}}).encode()), "body", "an error of another"),
        (answer(400, json.dumps({"error": ERROR}).encode()), "body", None),
        (OK + b'data: {"error":{"code":"internal"}}\n\n', "plain", "was answered with"),
        (OK + b'data: {"error":{"code":"worker_lost"}}\n\n', "repeated", "was answered with"),
        (OK, "plain", None),
    ],
)
def test_a_wrong_answer_is_found(
    saying: Callable[[bytes], tuple[str, int]], said: bytes, kind: str, found: str | None
) -> None:
    attacker = HttpAttacker(saying(said), 20.0, lambda: None)
    attacker.send(SENT._replace(kind=kind))
    assert attacker._socket is not None
    attacker._socket.recv(1, socket.MSG_PEEK)  # waits for the answer, or for the end of the connection
    if found is None:
        attacker.finish()
        assert attacker.statuses.total() == 1
        return
    with pytest.raises(Violation, match=found):
        attacker.finish()
    attacker.close()


def test_an_answer_that_does_not_come_is_found(saying: Callable[[bytes], tuple[str, int]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        attacker = HttpAttacker(silent.getsockname(), 0.2, lambda: None)
        attacker.send(SENT)
        with pytest.raises(Violation, match=r"after 0.2 s no whole answer to"):
            attacker.finish()
        attacker.close()


@pytest.mark.parametrize("fault", ["a bit", "an error"])
def test_a_good_request_that_is_harmed_is_found(saying: Callable[[bytes], tuple[str, int]], fault: str) -> None:
    entry = {"logprob": -0.25}
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [entry]}, "finish_reason": "length"}
    right = ("samples", (0, b"\7\0\0\0", b"\0\0\x80\xbe", "length"))
    wrong = ("samples", (0, b"\7\0\0\0", b"\1\0\x80\xbe", "length"))
    body = json.dumps({"choices": [choice]}).encode()
    address = saying(answer(200, body) if fault == "a bit" else answer(400, b"{}"))
    client = HttpGoodClient(address, 20.0, good_requests(1), [wrong if fault == "a bit" else right])
    client.start()
    client.join(20.0)
    assert isinstance(client.failure, Violation)
    assert ("another result" if fault == "a bit" else "answered with 400") in str(client.failure)


def test_no_request_harms_a_front_end_or_a_good_request() -> None:
    with tiny_campaign(Plan(5_000, seed=1, warm_up=1500, http=True)) as campaign:
        numbers = campaign.run()
    assert numbers.messages >= 5_000 and set(numbers.sent) == {*HTTP_SHARES}
    assert {"200", "400", "403", "404", "405", "409", "413", "none"} <= {*numbers.replies}
    assert numbers.replies["200"] > 500 and numbers.replies["400"] > 1000
    assert numbers.good_requests > 50 and numbers.good_tokens > 500
    assert numbers.front_before is not None and numbers.front_after is not None
