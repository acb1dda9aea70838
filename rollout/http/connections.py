"""HTTP/1.1 connections, from accept to close. h11 parses the requests, and asyncio reads and writes the sockets. The
application runs once per request.

Owns: every open connection, its timers, and its limits. Promises that:
- no stage of a connection lasts forever: timeouts close a connection if no complete head arrives, if no request follows
  an answer, or if the client does not read;
- at the connection limit, the server accepts a new connection if it can close an old connection that has no complete
  request;
- `/health` is answered even when all connections are busy;
- a refused request is answered before its connection closes, and the unread part of its body is dropped without
  parsing.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import struct
import termios
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Literal, TypeAlias, cast

import h11
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp

from trueroll.errors import ConfigError

from .bounds import READ_BYTES, Framing, Head, check_framing
from .config import HttpConfig
from .errors import RETRY_AFTER_SECONDS, HttpError
from .exchange import Address, Exchange, refusal

Stage: TypeAlias = Literal["new", "idle", "body", "busy", "closing"]
"""`new`: the client has not sent a complete head yet. `idle`: the last request is answered. `body`: the request's body
is incomplete. `busy`: the request is being answered. `closing`: the connection drops incoming data until it closes, so
that the client can still read the answer.
"""
GIVES_WAY: tuple[Stage, ...] = ("closing", "new", "idle", "body")
"""The stages in which connections may be closed to make room. Connections in the first stage of this list are closed
first. Within a stage, the oldest connection is closed first.
"""

HEALTH_PATH = b"/health"
HEALTH_RESERVE = 64
"""Number of connections that are accepted beyond `max_connections`. These connections may only request `/health`."""
MOST_BY_DEFAULT = 2048
FEWEST_WRITTEN_BYTES = 2**16
"""A connection is cut if the client reads fewer than this number of bytes of a pending answer within `write_seconds`.
"""
EVENTS_PER_TURN = 16
TURN_SECONDS = 0.002
"""Maximum time, in seconds, for which queued callbacks run before the event loop runs other work."""

log = logging.getLogger(__name__)


def most_connections(config: HttpConfig) -> int:
    """Return the maximum number of open connections.

    Connections, including the reserve for `/health`, use at most half of the process's descriptors. The other half of
    the descriptors is for files, child processes, and the connection to the worker. Raise ConfigError if the descriptor
    limit is too low for `max_connections`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MOST_BY_DEFAULT if soft == resource.RLIM_INFINITY else max(1, soft // 2 - HEALTH_RESERVE)
    if config.max_connections is None:
        return min(room, MOST_BY_DEFAULT)
    if soft != resource.RLIM_INFINITY and config.max_connections > room:
        raise ConfigError(
            f"max_connections: must be at most {room}, because this process may open only {soft} file descriptors (got "
            f"{config.max_connections}); lower max_connections, or raise the descriptor limit with `ulimit -n`"
        )
    return config.max_connections


class Connections:
    """All open connections. `app` answers the requests. A `Connections` object needs a running event loop."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self.app, self.config = app, config
        self.most = most_connections(config)
        self.turns = _Turns()
        self.read_buffer = bytearray(READ_BYTES)
        self.closed: Counter[str] = Counter()
        self.is_ending = False
        self._stages: dict[Connection, Stage] = {}
        self._by_stage: dict[Stage, dict[Connection, None]] = {
            stage: {} for stage in ("new", "idle", "body", "busy", "closing")
        }
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._sockets: set[Connection] = set()
        self._num_extra = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._patience: asyncio.Timeout | None = None

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def is_freeing(self) -> bool:
        """Return whether some connections are closed but have not freed their descriptors yet."""
        return len(self._sockets) > len(self._stages)

    def open(self, accepted: socket.socket, client: Address) -> None:
        """Serve a newly accepted socket.

        If there are too many connections, close an old connection. If no old connection may be closed, close the new
        connection.
        """
        # To make room, `make_room` may refuse the request of an old connection. The old connection then stays open
        # while its client reads the refusal. Therefore, the number of connections may exceed the limit by more than
        # one.
        num_over = len(self) - self._num_extra - self.most + 1
        is_extra = not all(self.make_room(is_extra=False) for _ in range(num_over))
        if is_extra and self._num_extra >= HEALTH_RESERVE and not self.make_room(is_extra=True):
            self.closed["limit"] += 1
            with accepted, suppress(OSError):
                accepted.send(_no_room())
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, client, accepted.getsockname()[:2], is_extra)
        self._sockets.add(connection)
        self._num_extra += is_extra
        self.move(connection, "new")
        self.run(self._connect(connection, accepted))

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            accepted.close()
            connection.connection_lost(None)
            raise

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task. `end` cancels the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def make_room(self, is_extra: bool | None = None) -> bool:
        """Close the oldest connection in the first non-empty stage of `GIVES_WAY`. Return whether a connection was
        closed.

        `is_extra`: which connections to consider. True means only the reserve for `/health`, False means only
        connections outside this reserve, and None means all connections.
        """
        for stage in GIVES_WAY:
            for connection in self._by_stage[stage]:
                if is_extra in (None, connection.is_extra):
                    connection.give_way()
                    return True
        return False

    def note_closed(self, connection: Connection) -> None:
        """Record that the descriptor of a connection is free."""
        self._sockets.discard(connection)

    def move(self, connection: Connection, stage: Stage | None) -> None:
        """Record that a connection has entered `stage`. If `stage` is None, the connection has closed."""
        if (before := self._stages.pop(connection, None)) is not None:
            del self._by_stage[before][connection]
            self._num_extra -= stage is None and connection.is_extra
        if stage is not None:
            self._stages[connection] = stage
            self._by_stage[stage][connection] = None
            self._all_closed.clear()
        elif not self._stages:
            self._all_closed.set()

    async def end(self, seconds: float) -> None:
        """Give requests up to `seconds` to finish, or less if `hurry` is called. Then cut the remaining connections."""
        self.is_ending = True
        for stage in ("new", "idle", "closing"):
            for connection in [*self._by_stage[stage]]:
                connection.cut("end")
        try:
            async with asyncio.timeout(seconds) as self._patience:
                await self._all_closed.wait()
        except TimeoutError:
            log.warning("cutting %d connections, because their requests did not finish in time", len(self))
        finally:
            for connection in [*self._stages]:
                connection.cut("end")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def hurry(self) -> None:
        """Make `end` stop waiting."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        opened = GaugeMetricFamily("trueroll_http_connections", "Open connections.", labels=["stage"])
        for stage, connections in self._by_stage.items():
            opened.add_metric([stage], len(connections))
        yield opened
        yield GaugeMetricFamily("trueroll_http_max_connections", "Maximum number of open connections.", value=self.most)
        closed = CounterMetricFamily(
            "trueroll_http_closed_connections", "Connections closed by the server.", labels=["reason"]
        )
        for reason, count in self.closed.items():
            closed.add_metric([reason], count)
        yield closed


class _Turns:
    """A first-in, first-out queue of callbacks. Whenever callbacks have run for `TURN_SECONDS`, the event loop runs
    other work.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._will_run = False

    def wait(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._will_run:
            self._will_run = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._will_run = False
        end = time.monotonic() + TURN_SECONDS
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.monotonic() >= end:
                    break
        finally:
            self._schedule()


class Connection(asyncio.BufferedProtocol):
    """One connection.

    `client`, `server`: addresses of the client and of this server. `is_extra`: whether the connection belongs to the
    reserve for `/health`.
    """

    def __init__(self, connections: Connections, client: Address, server: Address, is_extra: bool) -> None:
        self.client, self.server = client, server
        self.writable = asyncio.Event()
        self.is_extra = is_extra
        self._connections, self._config = connections, connections.config
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._config.max_head_bytes)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._stage: Stage | None = "new"
        self._head = Head(self._config)
        self._framing = Framing(self._config)
        self._has_turn = False
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._num_dropped = 0
        self._is_head = False
        self._set_deadline(self._config.head_seconds, self._end_wait)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With a limit of 0, asyncio calls `pause_writing` as soon as the kernel does not accept all bytes.
        self._transport.set_write_buffer_limits(high=0)
        self.writable.set()
        if self._stage is None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._connections.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._stage == "closing":
            self._num_dropped += nbytes
            if self._num_dropped > self._config.max_body_bytes:
                self.cut("dropped")
            return
        data = bytes(memoryview(self._connections.read_buffer)[:nbytes])
        try:
            self._note_received(data)
            self._http.receive_data(data)
        except HttpError as error:
            return self.refuse(error, "malformed")
        if self._has_turn:
            return
        if self._stage == "body":  # many connections may receive parts of bodies at the same time, so they take turns
            return self._wait_for_turn()
        self._advance()

    def eof_received(self) -> None:
        """If a client closes its sending side, treat the client as disconnected. asyncio then closes the connection."""

    def pause_writing(self) -> None:
        self.writable.clear()
        assert self._transport is not None
        self._num_unsent = self._count_unsent()
        self._write_deadline = asyncio.get_running_loop().call_later(self._config.write_seconds, self._check_writing)

    def resume_writing(self) -> None:
        self.writable.set()
        self._cancel_write_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._connections.note_closed(self)

    # Called by `Connections`

    def give_way(self) -> None:
        """Close this connection to make room for another connection."""
        if self._stage == "body":
            return self.refuse(_busy("this request was the oldest with an incomplete body"), "room")
        self.cut("room")

    def cut(self, reason: str) -> None:
        """Close this connection immediately and discard unsent data."""
        if self._stage is None:
            return
        self._connections.closed[reason] += 1
        self._leave()
        if self._transport is not None:
            if self._http.our_state is h11.SEND_BODY or self._transport.get_write_buffer_size():
                self._let_close_reset()
            self._transport.abort()

    # Called by an `Exchange`

    def send(self, *events: h11.Event) -> None:
        """Write events of the response with a single write."""
        assert self._transport is not None
        data = b"".join(self._http.send(event) or b"" for event in events)
        if data:
            self._transport.write(data)

    @property
    def awaits_continue(self) -> bool:
        """Return whether the client is waiting for `100 Continue` before sending the body."""
        return self._http.they_are_waiting_for_100_continue

    @property
    def is_last(self) -> bool:
        """Return whether the connection closes after this request."""
        return self.is_extra or self._connections.is_ending

    def resume_reading(self) -> None:
        """Resume reading after the exchange has taken the buffered content.

        Does nothing if the next request has already arrived.
        """
        follows = self._http.their_state is h11.DONE and bool(self._http.trailing_data[0])
        if self._transport is not None and not self._has_turn and not follows:
            self._transport.resume_reading()

    def finish(self) -> None:
        """Read the next request, or close the connection. Called when the response to a request is complete."""
        self._exchange = None
        if self._stage in (None, "closing"):
            return
        is_over = self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE
        if is_over or self.is_last:
            return self._linger()
        self._move("idle")
        trailing, _ = self._http.trailing_data
        self._http.start_next_cycle()
        self._is_head = False
        self._head = Head(self._config)
        self._set_deadline(self._config.keep_alive_seconds, self.cut, "keep_alive")
        assert self._transport is not None
        self._transport.resume_reading()
        if trailing:
            self._later(trailing)

    def refuse(self, error: HttpError, reason: str) -> None:
        """Close the connection. Before closing, send `error` to the client, unless an answer has already begun."""
        if self._stage in (None, "closing"):
            return
        self._connections.closed[reason] += 1
        self._answer_refusal(error)
        self._linger()

    # Reading

    def _note_received(self, data: bytes) -> None:
        """Count received data against the limits on the head, or against the limits on the framing of the body.

        Raise HttpError if a limit is exceeded.
        """
        if self._stage in ("new", "idle"):
            if self._stage == "idle" and self._head.num_bytes == 0:
                self._set_deadline(self._config.head_seconds, self._end_wait)
            self._head.add(data)
        elif self._stage == "body":
            self._framing.num_received += len(data)

    def _later(self, trailing: bytes) -> None:
        """Queue the next request, which has already arrived."""

        def take() -> None:
            try:
                self._note_received(trailing)
            except HttpError as error:
                self.refuse(error, "malformed")

        self._wait_for_turn(take)

    def _wait_for_turn(self, first: Callable[[], None] | None = None) -> None:
        assert self._transport is not None
        self._has_turn = True
        self._transport.pause_reading()

        def go_on() -> None:
            self._has_turn = False
            if first is not None:
                first()
            if self._stage not in (None, "closing"):
                assert self._transport is not None
                self._transport.resume_reading()
                self._advance()

        self._connections.turns.wait(go_on)

    def _advance(self) -> None:
        """Handle the events that h11 parses from the received bytes. Each call handles a bounded number of events."""
        try:
            for _ in range(EVENTS_PER_TURN):
                if self._stage in (None, "closing") or not self._take(self._http.next_event()):
                    return
        except h11.RemoteProtocolError as error:
            return self.refuse(_malformed(error), "malformed")
        except HttpError as error:
            return self.refuse(error, "malformed")
        self._wait_for_turn()

    def _take(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> bool:
        """Handle one event. Return whether there may be further events."""
        assert self._transport is not None
        if isinstance(event, h11.Request):
            self._begin(event)
        elif isinstance(event, h11.Data) and self._exchange is not None:
            self._framing.add(event)
            if self._exchange.add(bytes(event.data)):
                self._transport.pause_reading()
        elif isinstance(event, h11.EndOfMessage) and self._exchange is not None:
            self._exchange.complete()
            if self._stage == "body":
                self._move("busy")
            return False  # the next request waits until this request is answered
        else:
            if event is h11.PAUSED:
                self._transport.pause_reading()
            return False
        return True

    def _begin(self, request: h11.Request) -> None:
        self._is_head = request.method == b"HEAD"
        check_framing(request)
        if self.is_extra and request.target.partition(b"?")[0] != HEALTH_PATH:
            raise _busy("all connections have requests in flight")
        self._cancel_deadline()
        self._move("body")
        self._framing = Framing(self._config)
        self._exchange = Exchange(self, request)
        self._connections.run(self._exchange.run(self._connections.app))

    # Closing

    def _answer_refusal(self, error: HttpError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise, an answer has begun
            self.send(*refusal(error, self._is_head))

    def _linger(self) -> None:
        """Half-close the connection, and drop incoming data for `linger_seconds`.

        If the server closed the connection immediately, the client could lose the answer.
        """
        assert self._transport is not None
        self._move("closing")
        if self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection
            return self._transport.abort()
        self._transport.resume_reading()
        self._set_deadline(self._config.linger_seconds, self.cut, "lingered")

    def _let_close_reset(self) -> None:
        """Make `close` reset the connection, so that the client notices the truncated response and the kernel drops
        unsent data.
        """
        assert self._transport is not None
        at_once = struct.pack("ii", 1, 0)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)

    def _leave(self) -> None:
        """Remove the connection, because the client has disconnected or will not be served."""
        self._stage = None
        self._connections.move(self, None)
        self._cancel_deadline()
        self._cancel_write_deadline()
        self.writable.set()
        if self._exchange is not None:
            self._exchange.leave()

    def _move(self, stage: Stage) -> None:
        self._stage = stage
        self._connections.move(self, stage)

    # Time

    def _set_deadline(self, seconds: float, then: Callable[..., None], *arguments: str) -> None:
        self._cancel_deadline()
        self._deadline = asyncio.get_running_loop().call_later(seconds, then, *arguments)

    def _end_wait(self) -> None:
        """Close the connection, because the head did not arrive in time."""
        if self._head.num_bytes == 0:
            return self.cut("head")
        text = f"head: incomplete after {self._config.head_seconds:g} s; send the head faster"
        self.refuse(HttpError(408, text, limit=self._config.head_seconds), "head")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _check_writing(self) -> None:
        unsent = self._count_unsent()
        if self._num_unsent - unsent < FEWEST_WRITTEN_BYTES:
            return self.cut("write")
        self._num_unsent = unsent
        self._write_deadline = asyncio.get_running_loop().call_later(self._config.write_seconds, self._check_writing)

    def _count_unsent(self) -> int:
        """Return the number of bytes of the answer that are still in asyncio's buffer or the kernel's send queue."""
        assert self._transport is not None
        queued = fcntl.ioctl(self._transport.get_extra_info("socket"), termios.TIOCOUTQ, struct.pack("i", 0))
        return self._transport.get_write_buffer_size() + struct.unpack("i", queued)[0]


def _busy(why: str) -> HttpError:
    text = f"server: too many connections ({why}); try again later"
    return HttpError(503, text, code="connections_full", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def _no_room() -> bytes:
    """Return the error response for a connection that is closed before its request is read."""
    http = h11.Connection(h11.SERVER)
    return b"".join(http.send(event) or b"" for event in refusal(_busy("including the reserve for /health"), False))


def _malformed(error: h11.RemoteProtocolError) -> HttpError:
    """Return the error for a request that h11 refuses.

    The text from h11 is truncated, because the text may quote the request.
    """
    return HttpError(error.error_status_hint, f"request: {str(error)[:200]}; correct the request", code="malformed")
