"""Connections from accept to close, tested with raw sockets and a small application."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from raw_http import Raw

from trueroll.errors import ConfigError
from trueroll.rollout.http import accepting, connections, exchange
from trueroll.rollout.http.accepting import Acceptor
from trueroll.rollout.http.bounds import READ_BYTES
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.connections import FEWEST_WRITTEN_BYTES, Connections, most_connections
from trueroll.rollout.http.server import listen

DEADLINE = 60.0
LONG_BYTES = 24 * 2**20
"""A number of bytes larger than the kernel's buffers for a client that does not read."""


class Panic(BaseException):
    """Represents the exception that a panic in a Rust library raises."""


class Server:
    """Connections on a thread, in front of a small application.

    The application's paths:

    - `/hold` answers once `flow` is set.
    - `/read` answers after the whole body.
    - `/wait` answers once the client has disconnected.
    - `/long` answers with `LONG_BYTES`.
    - `/broken` sends only the beginning of an answer.
    - `/panic` does not answer.
    - `/refused` answers and closes the connection.
    - All other paths answer at once.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = HttpConfig(address="ipc://x", port=0, **settings)
        self.flow = threading.Event()
        self.scopes: list[dict[str, Any]] = []
        self.num_left = 0
        self.listener = listen(self.config)
        self.port = self.listener.getsockname()[1]
        self.loop = asyncio.new_event_loop()
        self.connections: Connections
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(DEADLINE)
        return self

    def __exit__(self, *_: object) -> None:
        self.flow.set()
        self.loop.call_soon_threadsafe(self._told.set)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self.loop.close()

    async def _serve(self) -> None:
        self._told = asyncio.Event()
        self.connections = Connections(self._app, self.config)
        with self.listener, Acceptor(self.listener, self.connections):
            self._ready.set()
            await self._told.wait()
        await self.connections.end(self.config.drain_seconds)
        assert len(self.connections) == 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        content = scope["path"].encode()
        if scope["path"] == "/read":
            content = await self._read(receive)
        while scope["path"] == "/wait" and (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += scope["path"] == "/wait"
        while scope["path"] == "/hold" and not self.flow.is_set():
            await asyncio.sleep(0.01)
        if scope["path"] == "/panic":
            raise Panic
        if scope["path"] == "/broken":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        if scope["path"] == "/long":
            content = b"x" * LONG_BYTES
        told = json.dumps(content.decode()).encode()
        headers = [(b"content-length", b"%d" % len(told))]
        if scope["path"] == "/refused" or scope["query_string"] == b"close":
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    async def _read(self, receive: Any) -> bytes:
        content = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return b""
            content += message["body"]
            if not message["more_body"]:
                return str(len(content)).encode()

    def connect(self) -> Raw:
        return Raw(socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE))

    def ask(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the server's thread, and return its result."""
        told: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: told.set_result(function()))
        return told.result(DEADLINE)

    def stages(self) -> dict[str, int]:
        """Return the number of connections in each stage."""
        return self.ask(lambda: {s.labels["stage"]: int(s.value) for s in self._samples(0) if s.value})

    def closed(self) -> dict[str, int]:
        """Return the number of closed connections by reason."""
        return self.ask(lambda: {s.labels["reason"]: int(s.value) for s in self._samples(2) if s.value})

    def _samples(self, number: int) -> Any:
        return [*self.connections.collect()][number].samples

    def wait_for(self, told: Callable[[], Any], value: Any) -> None:
        end = time.monotonic() + DEADLINE
        while (found := told()) != value:
            assert time.monotonic() < end, f"{found}, not {value}"


@contextmanager
def clients(server: Server, count: int) -> Iterator[list[Raw]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(count)]


def error_code(raw: Raw, status: int) -> str:
    """Return the code of the error that the server answers, and check that it closes the connection then."""
    found, headers, told = raw.answer()
    assert (found, headers["connection"], headers["content-type"]) == (status, "close", "application/json"), told
    assert told["error"].keys() == {"message", "type", "param", "code"} and raw.is_closed()
    return told["error"]["code"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with Server(max_body_bytes=2**20, max_body_chunks=100, head_seconds=3600.0) as server:
        yield server


def test_requests_follow_each_other_on_a_connection(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send_head("GET", "/health")
        assert raw.answer()[2] == "/health"
        raw.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nPOST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET")
        assert [raw.answer()[2], raw.answer()[2]] == ["/a", "3"]
        raw.send(b" /%E2%82%AC?a=b HTTP/1.0\r\n\r\n")
        assert raw.answer()[2] == "/€" and plain.scopes[-1]["query_string"] == b"a=b"
        assert raw.is_closed()


def test_answers_are_sent_at_once(plain: Server) -> None:
    """Nagle's algorithm is disabled, so no segment of an answer waits for an acknowledgement."""
    with plain.connect() as raw:
        raw.send_head("GET", "/health")
        raw.answer()
        [transport] = plain.ask(lambda: [each._transport for each in plain.connections._stages])
        told = transport.get_extra_info("socket")
        assert told.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_expects_100_continue_is_told_to_send_its_body(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send_head("POST", "/read", "Content-Length: 2", "Expect: 100-continue")
        assert raw.line().startswith(b"HTTP/1.1 100") and raw.line() == b"\r\n"
        raw.send(b"ab")
        assert raw.answer()[2] == "2"
    with plain.connect() as raw:
        raw.send_head("POST", "/refused", "Content-Length: 2", "Expect: 100-continue")
        assert raw.answer()[2] == "/refused", "the server did not ask for the body"


def test_scopes_of_open_connections_have_different_clients(plain: Server) -> None:
    with clients(plain, 3) as raws:
        for raw in raws:
            raw.send_head("GET", "/health")
            raw.answer()
        told = [scope["client"] for scope in plain.scopes[-3:]]
        assert told == [raw.socket.getsockname() for raw in raws]


def test_a_refused_client_gets_its_answer_and_its_body_is_not_read_on(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send_head("POST", "/refused", "Transfer-Encoding: chunked")
        status, headers, _ = raw.answer()
        assert (status, headers["connection"]) == (200, "close") and raw.is_closed()
        plain.wait_for(plain.stages, {"closing": 1})
        assert raw.send_until_refused(b"1\r\nx\r\n" * 10_000) < 64 * 2**20
    plain.wait_for(plain.stages, {})
    assert plain.closed()["dropped"] == 1


def test_a_long_body_that_is_not_read_does_not_keep_its_sender_from_the_answer(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send_head("POST", "/refused", f"Content-Length: {2**20 - 1}")
        raw.send(b"x" * (2**20 - 1))
        assert raw.answer()[0] == 200 and raw.is_closed()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400, "malformed"),
        (b"GET\r\n\r\n", 400, "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed"),
        (b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400, "malformed"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "malformed"),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400, "malformed"),
        (
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
            *(400, "invalid_request_error"),
        ),
        (b"POST /read HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_request_error"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2**15, 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2**20 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\n" * 300 + b"\n", 431, "head_too_large"),
        (
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 101,
            *(413, "body_too_large"),
        ),
        (
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"1;" + b"e" * 9_000 + b"\r\nx\r\n") * 99,
            *(413, "body_too_large"),
        ),
        (
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a:b\r\n" * 20_000,
            *(431, "malformed"),
        ),
    ],
)
def test_requests_refused_before_the_application_get_the_usual_error(
    plain: Server, data: bytes, status: int, code: str
) -> None:
    with plain.connect() as raw:
        raw.send(data)
        if data.startswith(b"HEAD"):
            assert raw.line().startswith(b"HTTP/1.1 400")
        else:
            assert error_code(raw, status) == code


def test_as_many_chunks_and_lines_as_are_allowed_are_read(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send_head("POST", "/read", "Transfer-Encoding: chunked", *["a: b"] * 200)
        raw.send(b"1;e=f\r\nx\r\n" * 100 + b"0\r\nt: u\r\n\r\n")
        assert raw.answer()[2] == "100"


def test_a_request_after_another_is_bounded_like_the_first(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n" + b"a:\n" * 300 + b"\n")
        assert raw.answer()[2] == "/a"
        assert error_code(raw, 431) == "head_too_large"


def test_the_event_loop_has_its_turn_between_many_chunks(plain: Server) -> None:
    """The events of one TCP segment are handled a few at a time."""
    with events_of_iterations(plain) as taken, plain.connect() as raw:
        raw.send_head("POST", "/read", "Transfer-Encoding: chunked")
        raw.send(b"1\r\nx\r\n" * 100 + b"0\r\n\r\n")
        assert raw.answer()[2] == "100"
    assert sum(taken) > 100 and max(taken) <= 2 * connections.EVENTS_PER_TURN


def test_the_event_loop_has_its_turn_between_many_bodies(plain: Server) -> None:
    """The rests of many bodies, which have all arrived, are handled a few at a time."""
    begun, are_sent = threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        are_sent.wait()

    with events_of_iterations(plain) as taken, clients(plain, 40) as many:
        for raw in many:
            raw.send_head("POST", "/read", "Content-Length: 2")
        plain.wait_for(lambda: plain.stages().get("body"), len(many))
        plain.loop.call_soon_threadsafe(stand_still)
        begun.wait()
        taken.append(0)
        before = len(taken)
        for raw in many:
            raw.send(b"xy")
        are_sent.set()
        assert [raw.answer()[2] for raw in many] == ["2"] * len(many)
    assert sum(taken[before:]) >= 2 * len(many) and max(taken[before:]) <= connections.EVENTS_PER_TURN


@contextmanager
def events_of_iterations(server: Server) -> Iterator[list[int]]:
    """Yield the numbers of HTTP events that the iterations of the event loop handle. In each iteration, only one queued
    callback runs.
    """
    taken: list[int] = []
    http = connections.h11.Connection

    class Counting(http):
        def next_event(self) -> Any:
            taken[-1] += 1
            return super().next_event()

    def look() -> None:
        taken.append(0)
        if not is_over:
            server.loop.call_soon(look)

    is_over = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.h11, "Connection", Counting)
        patch.setattr(connections, "TURN_SECONDS", 0.0)
        server.ask(look)
        try:
            yield taken
        finally:
            is_over = True


def test_connections_without_requests_are_closed_in_time() -> None:
    with Server(head_seconds=0.2, keep_alive_seconds=0.4, linger_seconds=60.0) as server:
        with clients(server, 3) as (silent, slow, answered):
            slow.send(b"GET /health HTTP/1.1\r\nHost:")
            answered.send_head("GET", "/health")
            assert answered.answer()[2] == "/health"
            assert silent.is_closed()
            assert slow.answer()[0] == 408 and slow.is_closed()
            assert answered.is_closed()
        server.wait_for(server.stages, {})
        assert server.closed() == {"head": 2, "keep_alive": 1}


def test_the_head_of_a_later_request_has_the_same_time_limit() -> None:
    with Server(head_seconds=0.2) as server, server.connect() as raw:
        raw.send_head("GET", "/health")
        raw.answer()
        raw.send(b"GET /health HT")
        assert raw.answer()[0] == 408 and raw.is_closed()


def test_an_error_after_a_head_request_has_its_content() -> None:
    with Server(head_seconds=0.2) as server, server.connect() as raw:
        raw.send_head("HEAD", "/health")
        while raw.line() != b"\r\n":
            pass
        raw.send(b"GET /health HT")
        assert error_code(raw, 408) == "invalid_request_error"


def test_a_disconnect_after_a_body_of_exactly_one_read_is_noticed(plain: Server) -> None:
    num_left = plain.num_left
    with plain.connect() as raw:
        raw.send_head("POST", "/wait", f"Content-Length: {READ_BYTES}", "Expect: 100-continue")
        assert raw.line().startswith(b"HTTP/1.1 100") and raw.line() == b"\r\n"
        raw.send(b"x" * READ_BYTES)
        plain.wait_for(plain.stages, {"busy": 1})
    plain.wait_for(lambda: plain.num_left, num_left + 1)


def test_a_client_that_does_not_read_is_cut_and_its_request_ends() -> None:
    """A client that reads at the required minimum rate is not cut off, even if the kernel takes no bytes from asyncio
    for a while.
    """
    with Server(write_seconds=3600.0) as server, clients(server, 2) as both:
        for raw in both:
            raw.send_head("GET", "/long")
            server.wait_for(lambda: len(_writing(server)), both.index(raw) + 1)
        while (held := _held(server)) != (time.sleep(0.3) or _held(server)) or len(held) < 2:
            pass
        stuck, slow = held
        assert max(held.values()) <= 2 * exchange.WRITE_BYTES, "only a part of the answer is in memory"
        for each in held:
            each._num_unsent = each._count_unsent()
        taken = both[1].socket.recv(FEWEST_WRITTEN_BYTES, socket.MSG_WAITALL)
        while slow._num_unsent - slow._count_unsent() < FEWEST_WRITTEN_BYTES:
            taken += both[1].socket.recv(FEWEST_WRITTEN_BYTES)
        server.ask(lambda: [each._check_writing() for each in (stuck, slow)])
        assert server.closed() == {"write": 1} and server.stages() == {"busy": 1}
        while len(taken) < LONG_BYTES:
            taken += both[1].socket.recv(2**20)
        server.wait_for(server.stages, {"idle": 1})
        server.wait_for(lambda: len(server.connections._tasks), 0)


def _writing(server: Server) -> list[Any]:
    """Return the connections with unread answers, the oldest first."""
    return server.ask(lambda: [each for each in server.connections._stages if each._write_deadline is not None])


def _held(server: Server) -> dict[Any, int]:
    """Return the write buffer size of each connection."""
    return {each: each._transport.get_write_buffer_size() for each in _writing(server)}


def test_a_connection_ends_whatever_the_application_raises(plain: Server) -> None:
    with plain.connect() as raw:
        raw.send(b"GET /panic HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.is_closed()
    plain.wait_for(plain.stages, {})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_breaks_off_does_not_look_whole(version: str, plain: Server) -> None:
    """In HTTP/1.0, a normal close would end an answer without a length. The server therefore resets the connection."""
    with plain.connect() as raw:
        raw.send(f"GET /broken HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        with pytest.raises(ConnectionResetError):
            while raw.socket.recv(2**16):
                pass


def test_the_oldest_connection_without_a_request_makes_room() -> None:
    with Server(max_connections=3) as server, ExitStack() as stack:
        answered, held, silent = (stack.enter_context(server.connect()) for _ in range(3))
        held.send_head("GET", "/hold")
        answered.send_head("GET", "/health")
        answered.answer()
        server.wait_for(server.stages, {"new": 1, "idle": 1, "busy": 1})
        new = stack.enter_context(server.connect())
        assert silent.is_closed(), "it never had a request"
        new.send_head("POST", "/read", "Content-Length: 1")
        server.wait_for(server.stages, {"idle": 1, "body": 1, "busy": 1})
        newer = stack.enter_context(server.connect())
        assert answered.is_closed()
        newer.send_head("GET", "/hold")
        server.wait_for(server.stages, {"body": 1, "busy": 2})
        newest = stack.enter_context(server.connect())
        assert error_code(new, 503) == "connections_full"
        newest.send_head("GET", "/health")
        assert newest.answer()[2] == "/health"
        server.flow.set()
        assert held.answer()[2] == newer.answer()[2] == "/hold"


def test_closing_many_connections_with_bodies_keeps_the_limit() -> None:
    with Server(max_connections=3, linger_seconds=60.0) as server, ExitStack() as stack:
        for count in range(1, 13):
            raw = stack.enter_context(server.connect())
            raw.send_head("POST", "/read", "Content-Length: 1")
            server.wait_for(lambda: server.stages().get("body"), min(count, 3))
            assert server.ask(lambda: len(server.connections)) <= 4, (
                "at most the limit, and one that reads why it is closed"
            )


def test_health_is_answered_while_all_connections_are_busy() -> None:
    with Server(max_connections=2) as server, ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for raw in busy:
            raw.send_head("GET", "/hold")
        server.wait_for(server.stages, {"busy": 2})
        with server.connect() as other, server.connect() as health:
            other.send_head("GET", "/other")
            assert error_code(other, 503) == "connections_full"
            health.send_head("GET", "/health?a=b")
            status, headers, _ = health.answer()
            assert (status, headers["connection"]) == (200, "close")
        crowd = [stack.enter_context(server.connect()) for _ in range(3 * connections.HEALTH_RESERVE)]
        with server.connect() as health:
            health.send_head("GET", "/health")
            assert health.answer()[0] == 200
        for raw in crowd[: 2 * connections.HEALTH_RESERVE]:
            assert raw.is_closed()
        server.flow.set()
        assert [raw.answer()[2] for raw in busy] == ["/hold", "/hold"]


def test_connections_are_refused_unread_only_if_the_reserve_is_busy_too() -> None:
    with Server(max_connections=1) as server, ExitStack() as stack:
        most = 1 + connections.HEALTH_RESERVE
        busy = [stack.enter_context(server.connect()) for _ in range(1)]
        busy[0].send_head("GET", "/hold")
        server.wait_for(server.stages, {"busy": 1})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "HEALTH_PATH", b"/hold")
            for count in range(2, most + 1):
                busy.append(stack.enter_context(server.connect()))
                busy[-1].send_head("GET", "/hold")
                server.wait_for(server.stages, {"busy": count})
            with server.connect() as refused:
                status, _, told = refused.answer()
                assert (status, told["error"]["code"]) == (503, "connections_full") and refused.is_closed()
        server.flow.set()
        assert all(raw.answer()[0] == 200 for raw in busy)


@contextmanager
def few_files(server: Server, spare: int) -> Iterator[None]:
    """Use up file descriptors until only `spare` are free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, hard))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_free_files_old_connections_give_way(caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server, ExitStack() as stack:
        # The clients' sockets belong to this process as well, so they are created first.
        sockets = [socket.socket() for _ in range(8)]
        raws = [stack.enter_context(Raw(each)) for each in sockets]
        with few_files(server, spare=2):
            for each in sockets:
                each.settimeout(DEADLINE)
                each.connect(("127.0.0.1", server.port))
            raws[-1].send_head("GET", "/health")
            assert raws[-1].answer()[2] == "/health"
            assert raws[0].is_closed()
            raws[-1].send_head("GET", "/hold")
            server.wait_for(lambda: server.stages().get("busy"), 1)
        server.flow.set()
        assert raws[-1].answer()[2] == "/hold"
    warnings = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert len(warnings) == 1 and "ulimit -n" in warnings[0].getMessage()


def test_without_free_files_and_old_connections_the_new_one_is_refused() -> None:
    with Server() as server, ExitStack() as stack:
        sockets = [socket.socket() for _ in range(3)]
        busy, *raws = (stack.enter_context(Raw(each)) for each in sockets)
        for each in sockets:
            each.settimeout(DEADLINE)
        sockets[0].connect(("127.0.0.1", server.port))
        busy.send_head("GET", "/hold")
        server.wait_for(server.stages, {"busy": 1})
        with few_files(server, spare=0):
            for each in sockets[1:]:
                each.connect(("127.0.0.1", server.port))
            assert all(raw.is_closed() for raw in raws)
        assert server.closed() == {"files": 2}
        server.flow.set()
        assert busy.answer()[2] == "/hold"


def test_a_portion_of_the_waiting_connections_is_accepted_at_a_time() -> None:
    accepted: list[int] = []

    class Listener:
        """A listener that always has one more connection."""

        def accept(self) -> tuple[Any, Any]:
            accepted.append(1)
            return None, ("127.0.0.1", 1)

    class Taking:
        def open(self, *_: Any) -> None:
            pass

    Acceptor(Listener(), Taking())._accept()  # type: ignore[arg-type]
    assert len(accepted) == accepting.ACCEPTS_PER_TURN


def test_half_of_the_descriptors_are_left_to_the_rest_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        assert most_connections(HttpConfig(address="ipc://x")) == 500 - connections.HEALTH_RESERVE
        assert most_connections(HttpConfig(address="ipc://x", max_connections=400)) == 400
        with pytest.raises(ConfigError, match="must be at most 436, .* 1000 file descriptors .got 501"):
            most_connections(HttpConfig(address="ipc://x", max_connections=501))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_are_finished_at_the_end_and_idle_connections_are_not_waited_for() -> None:
    with ExitStack() as stack:
        with Server(linger_seconds=0.1) as server:
            idle, busy = (stack.enter_context(server.connect()) for _ in range(2))
            busy.send_head("GET", "/hold")
            server.wait_for(server.stages, {"new": 1, "busy": 1})
            server.loop.call_soon_threadsafe(server._told.set)
            assert idle.is_closed()
            server.flow.set()
            status, headers, _ = busy.answer()
            assert (status, headers["connection"]) == (200, "close") and busy.is_closed()


def test_requests_that_do_not_finish_are_cut_at_the_end() -> None:
    with Server(drain_seconds=0) as server, server.connect() as busy:
        busy.send_head("POST", "/read", "Content-Length: 1")
        server.wait_for(server.stages, {"body": 1})
        server.loop.call_soon_threadsafe(server._told.set)
        assert busy.is_closed()


def test_a_client_that_disconnects_unnoticed_leaves_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel learns of the disconnect when the server sends the answer, before the connection is closed."""
    with Server() as server:

        def are_read() -> list[bool]:
            transports = [each._transport for each in server.connections._stages]
            return [transport.is_reading() for transport in transports if transport is not None]

        with server.connect() as raw:
            raw.send(b"GET /hold?close HTTP/1.1\r\nHost: x\r\n\r\nGET /next HTTP/1.1\r\n")  # reading pauses
            server.wait_for(server.stages, {"busy": 1})
            raw.send(b"Host: x\r\n\r\n")
            server.wait_for(are_read, [False])
        server.flow.set()
        server.wait_for(server.stages, {})
        server.wait_for(lambda: len(server.connections._tasks), 0)
        assert not server.ask(lambda: server.connections.is_freeing)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
