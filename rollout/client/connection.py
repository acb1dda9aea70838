"""A client's connection to one worker: sends calls, hands their replies to the callers, and leaves no caller waiting.

Owns: the socket (`Line`), the calls that wait for their end (`PendingCalls`), what has come for their callers (`Inbox`,
and `Received` for samples that grow), when calls are sent, and which process is at the other end (`Connection`). Does
not own: what calls mean.

Promises: every call gets its terminal reply or an exception. After a broken connection, calls are sent again to the
same worker process, which knows them by their ids; if another process answers, or none for `timeout` seconds, they
end with WorkerLostError. What answers is the worker that was meant: it has the key that it should have, or runs as this
user or root. Everything happens on the event loop and in the process of the first call: from others calls raise at
once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from trueroll.errors import (
    ConfigError,
    ForbiddenError,
    MessageTooLargeError,
    ProtocolError,
    TruerollError,
    WorkerLostError,
)

from ...engine.request import SampleDelta
from .. import protocol
from ..config import check_address
from ..network.keys import Key, client_keys, use_curve
from ..protocol import Delta, FinishedSample, Growth, delta_of, sample_delta
from ..protocol.error_codes import error_from_code


def wrong_process(pid: int) -> TruerollError | None:
    """The error that this is another process than the one that something works in; None if it is not."""
    if os.getpid() == pid:
        return None
    return TruerollError(
        f"client: expected a call from process {pid}, which made it, found one from process {os.getpid()}, which was "
        "forked from that; make a new one here"
    )


class Received:
    """One sample. `put` and `finish` tell what the worker says, `take` gives what is new in it.

    Promises: the pieces that are taken make the sample, to the bit. A piece begins where the one before ended; or at 0,
    where what came before is void, since the worker had forgotten the request when it was asked for again after a lost
    connection, and computed it anew. However late a piece is taken, no more than the sample is kept.
    """

    def __init__(self) -> None:
        self._growth: Growth | None = None
        self._num_taken = 0
        self._is_anew = False
        self._is_announced = False

    def put(self, delta: Delta) -> bool:
        """Adds a delta. Returns whether there is something to take that was not announced so yet. Raise ProtocolError
        if tokens before it are missing.
        """
        if self._growth is None or not self._growth.put(delta):
            self._begin(delta)
        was_announced, self._is_announced = self._is_announced, True
        return not was_announced

    def finish(self, sample: FinishedSample) -> SampleDelta | None:
        """The last piece of a sample that has ended; None if all was taken."""
        whole, growth = delta_of(sample), self._growth
        if growth is None or growth.num_tokens > whole.num_tokens or not growth.put(whole):
            self._begin(whole)
        return self.take()

    def take(self) -> SampleDelta | None:
        """What was not taken yet; None if there is nothing."""
        self._is_announced = False
        growth, start = self._growth, self._num_taken
        if growth is None or (growth.num_tokens == start and not self._is_anew):
            return None
        self._num_taken, self._is_anew = growth.num_tokens, False
        return sample_delta(growth.part(start))

    def _begin(self, delta: Delta) -> None:
        if delta.start:
            raise ProtocolError(
                f"deltas: expected the tokens of {delta.id!r}, sample {delta.index}, in order, found those from "
                f"{delta.start} on out of it; use the same release of trueroll on both sides"
            )
        self._growth = Growth(delta)
        self._is_anew, self._num_taken = self._num_taken > 0, 0


Reply: TypeAlias = protocol.FromWorker | TruerollError


class Inbox:
    """Replies to some calls, in order, with the id of each.

    What a sample has got grows here until it is taken.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Reply | Received]] = asyncio.Queue()
        self._received: dict[tuple[str, int], Received] = {}

    def put(self, id: str, reply: Reply) -> None:
        self._queue.put_nowait((id, reply))

    def put_delta(self, delta: protocol.Delta) -> None:
        """Raise ProtocolError if tokens before it are missing."""
        received = self._received.setdefault((delta.id, delta.index), Received())
        if received.put(delta):
            self._queue.put_nowait((delta.id, received))

    def finish(self, sample: protocol.FinishedSample) -> SampleDelta | None:
        """What was not taken of a sample that has ended."""
        return self._received.pop((sample.id, sample.index), Received()).finish(sample)

    async def get(self) -> tuple[str, Reply | Received]:
        """The next reply; `Received` where a sample has got something."""
        return await self._queue.get()

    def rest(self) -> Iterator[tuple[str, Reply | Received]]:
        """What has come and was not taken."""
        while not self._queue.empty():
            yield self._queue.get_nowait()


LINGER_MS = 200
SETTLE_SECONDS = 0.05
"""The end of a connection is told a moment before its last messages can be read."""
RETRY_MS = 200
HEARTBEAT_MS = 10_000


class Listener(Protocol):
    """Is told what happens to a line. What it raises ends the line."""

    def heard(self, frame: bytes) -> None:
        """The worker has sent a frame."""
        ...

    def connected(self) -> None:
        """There is a connection, by which nothing was sent yet."""
        ...

    def disconnected(self) -> None:
        """There is no connection, or not the one that was."""
        ...

    def failed(self, error: TruerollError) -> None:
        """A task of the line has failed: nothing is heard any more."""
        ...


class Line:
    """A line to `address`, for which `server_public_key` and `client_key` are those of a client."""

    def __init__(self, address: str, server_public_key: Key | None, client_key: Key | None, listener: Listener) -> None:
        check_address(address, has_keys=server_public_key is not None)
        self.address = address
        self._keys = client_keys(address, server_public_key, client_key)
        self._listener = listener
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since."""
        return bool(self._tasks)

    def open(self) -> None:
        """Connect, from the running event loop. Raise ConfigError for an address that cannot be connected to."""
        self._home = os.getpid(), asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._connect()

    def send(self, frame: bytes) -> None:
        """Send a frame by the connection that there is."""
        self._socket.send(frame)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task as long as the line is open."""
        self._tasks[name] = asyncio.create_task(coroutine)
        self._tasks[name].add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Disconnect, if the line is open."""
        tasks, self._tasks = self._tasks, {}
        if not tasks:
            return
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def not_at_home(self) -> TruerollError | None:
        """What is wrong with a call from here: another process, or another event loop, than those that opened it."""
        if self._home is None:
            return None
        pid, loop = self._home
        if error := wrong_process(pid):
            return error
        with suppress(RuntimeError):  # none runs: the garbage collector closes a stream
            if asyncio.get_running_loop() is loop:
                return None
        return TruerollError(
            "client: expected a call in the event loop of its first one, found another loop; make a client in each, or "
            "use RolloutClient"
        )

    def _connect(self) -> None:
        """Make a socket for one connection alone: what could not be sent by it must not go to the process that is
        there next. It does where the event loop stands still for longer than `RETRY_MS` just then, as the socket
        reconnects by itself.
        """
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RETRY_MS)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.IPV6, "[" in self.address)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._keys is not None:
            use_curve(self._socket, self._keys)
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"address: cannot connect to {self.address}: {error.strerror}; correct it") from None
        self.spawn("read", self._read())
        self.spawn("follow", self._follow(monitor))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            known = error if isinstance(error, TruerollError) else TruerollError(f"client: broke down ({error!r})")
            self._listener.failed(known)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv(copy=False)
            self._check_worker(frame)
            self._listener.heard(frame.bytes)

    def _check_worker(self, frame: zmq.Frame) -> None:
        """Raise ForbiddenError if no keys vouch for it, and another user has taken the place of the worker."""
        if self._keys is not None:
            return
        uid = int(str(frame.get("Peer-Address")).split(":")[1])
        if uid not in (os.geteuid(), 0):
            raise ForbiddenError(
                f"worker: expected one of user {os.geteuid()} or of root at {self.address}, found one of user {uid}; "
                "choose an address in a folder of your own, or use keys"
            )

    async def _follow(self, monitor: Any) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self._listener.disconnected()
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ForbiddenError(
                    f"worker: expected the one at {self.address} to know this client's key, found that it does not; "
                    "add its public key to the worker's clients_file and start the worker anew"
                )
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._listener.connected()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                return await self._connect_anew()

    async def _connect_anew(self) -> None:
        """The connection has ended: read what came by it, and make another one."""
        reader = self._tasks["read"]
        await asyncio.sleep(SETTLE_SECONDS)
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and not reader.done():
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._connect()


@dataclass
class Call:
    """`caller`: the name that replies to it bear; None for a call that has none. `replies`: what they may be, beside
    deltas.
    """

    frame: bytes
    inbox: Inbox
    caller: str | None
    replies: tuple[type[protocol.FromWorker], ...]
    has_deltas: bool
    was_sent: bool = False

    @classmethod
    def of(cls, message: protocol.Call, inbox: Inbox) -> Call:
        """The call that a message makes."""
        has_deltas = getattr(message, "deltas", False)
        return cls(protocol.encode(message), inbox, _caller_of(message), protocol.REPLIES[type(message)], has_deltas)


class PendingCalls:
    """Calls by their ids, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: str) -> bool:
        return id in self._calls

    def __iter__(self) -> Iterator[str]:
        """The ids."""
        return iter(self._calls)

    def add(self, id: str, call: Call) -> None:
        """One more call waits for its end."""
        self._calls[id] = call

    def get(self, id: str) -> Call | None:
        """The call of an id, if it waits."""
        return self._calls.get(id)

    def give_up(self, ids: Iterable[str]) -> set[str]:
        """Expect nothing more for these calls. Return those that the worker may know of."""
        given_up = {id: self._calls.pop(id, None) for id in ids}
        return {id for id, call in given_up.items() if call is not None and call.was_sent}

    def deliver(self, reply: protocol.FromWorker) -> None:
        """Hand a reply to the call that it is for."""
        if isinstance(reply, protocol.Deltas):
            for delta in reply.samples:
                self._deliver_delta(delta, reply)
            return
        call = self._calls.get(reply.id or "")
        if call is not None and _caller_of(reply) not in (None, call.caller):
            return  # to an earlier asking for the same request, which was given up
        if isinstance(reply, protocol.Error):
            error = error_from_code(reply.code, reply.message, reply.field, reply.value, reply.limit)
            self.fail(error) if reply.id is None else self.finish(reply.id, error)
        elif call is None:
            return
        elif not isinstance(reply, call.replies):
            self.finish(reply.id, _unexpected(reply, call.replies))
        elif isinstance(reply, protocol.FinishedSample):
            call.inbox.put(reply.id, reply)
        else:
            self.finish(reply.id, reply)

    def finish(self, id: str, reply: Reply) -> None:
        """End a call with its last reply."""
        if call := self._calls.pop(id, None):
            call.inbox.put(id, reply)

    def fail(self, error: TruerollError) -> None:
        """End all calls."""
        for id in list(self._calls):
            self.finish(id, error)

    def fail_sent(self, error: TruerollError) -> None:
        """End all calls that were sent."""
        for id in [id for id, call in self._calls.items() if call.was_sent]:
            self.finish(id, error)

    def _deliver_delta(self, delta: protocol.Delta, reply: protocol.Deltas) -> None:
        call = self._calls.get(delta.id)
        if call is None or reply.caller not in (None, call.caller):
            return
        if not call.has_deltas:
            self.finish(delta.id, _unexpected(reply, call.replies))
            return
        try:
            call.inbox.put_delta(delta)
        except ProtocolError as error:
            self.finish(delta.id, error)


def _caller_of(message: protocol.Call | protocol.FromWorker) -> str | None:
    return getattr(message, "caller", None)


def _unexpected(reply: protocol.FromWorker, expected: tuple[type[protocol.FromWorker], ...]) -> ProtocolError:
    types = " or ".join(kind.model_fields["type"].default for kind in expected)
    return ProtocolError(f"reply: expected {types}, found {reply.type}; use the same release of trueroll on both sides")


TICKS_PER_TIMEOUT = 4
WINDOW_BYTES = 2**24
"""How many bytes are sent before the worker has to confirm them: it cuts off a client that sends much faster than it
reads.
"""


@dataclass
class _Window:
    """`queue`: the ids of calls that are to be sent. `unconfirmed`: bytes that were sent since the worker last
    confirmed what it had taken. `is_open`: whether the worker has answered on this connection. `notices`: messages for
    the same worker, to be sent once it has answered on the next connection.
    """

    queue: deque[str] = field(default_factory=deque)
    unconfirmed: int = 0
    is_open: bool = False
    notices: list[bytes] = field(default_factory=list)

    @property
    def has_next(self) -> bool:
        """Whether a call is to be sent now."""
        return self.is_open and bool(self.queue) and self.unconfirmed < WINDOW_BYTES


class Connection:
    """Connects at the first call. `timeout`: seconds without any sign of life, while calls wait, that mean a lost
    worker. `calls`: those that wait for their end.
    """

    def __init__(self, address: str, timeout: float, server_public_key: Key | None, client_key: Key | None) -> None:
        self._line = Line(address, server_public_key, client_key, self)
        self._timeout = timeout
        self.calls = PendingCalls()
        self._window = _Window()
        self._worker: protocol.Health | None = None
        # By id, what to do with the answers to this connection's own calls for health.
        self._awaited: dict[str, Callable[[protocol.Health], None]] = {}
        self._silent_ticks = 0
        self._end: TruerollError | None = None

    def call(self, message: protocol.Call, inbox: Inbox) -> None:
        """Send a message; its replies, the last of them terminal or an exception, go to `inbox` with the message's
        id.
        """
        if error := self._line.not_at_home() or self._end:
            raise error
        if not self._line.is_open:
            self._line.open()
            self._line.spawn("watch", self._watch())
        self.calls.add(message.id, Call.of(message, inbox))
        if self._window.is_open:
            self._window.queue.append(message.id)
            self._send_queued()

    def notify(self, message: protocol.Abort | protocol.Ack) -> None:
        """Send a message without waiting for a reply."""
        if self._worker is None or self._end is not None or self._line.not_at_home() is not None:
            return
        if self._window.is_open:
            self._line.send(protocol.encode(message))
        else:
            self._window.notices.append(protocol.encode(message))

    async def close(self) -> None:
        """End what still waits, and disconnect. Harmless if that has happened."""
        if error := self._line.not_at_home():
            raise error
        self.failed(TruerollError("client: closed; make a new one"))
        await self._line.close()

    # What the line tells.

    def connected(self) -> None:
        self._ask_for_health(self._meet)

    def disconnected(self) -> None:
        self._window.is_open = False
        self._awaited.clear()

    def heard(self, frame: bytes) -> None:
        reply = protocol.from_worker(frame)
        self._silent_ticks = 0
        if isinstance(reply, protocol.Health) and (follow := self._awaited.pop(reply.id, None)) is not None:
            follow(reply)
        else:
            self.calls.deliver(reply)

    def failed(self, error: TruerollError) -> None:
        self._end = error
        self.calls.fail(error)

    def _ask_for_health(self, follow: Callable[[protocol.Health], None] | None = None) -> None:
        id = protocol.new_id()
        if follow is not None:
            self._awaited[id] = follow
        self._line.send(protocol.encode(protocol.GetHealth(id=id)))

    async def _watch(self) -> None:
        """Ask for a sign of life every quarter of the timeout, but only count the quarters that passed in this loop."""
        while True:
            await asyncio.sleep(self._timeout / TICKS_PER_TIMEOUT)
            self._silent_ticks = self._silent_ticks + 1 if self.calls else 0
            if self._silent_ticks > TICKS_PER_TIMEOUT:
                self._silent_ticks = 0
                hint = (
                    "it ended or hangs" if self._worker else "check the address, that a worker runs there, and its keys"
                )
                found = f"no answer from {self._line.address} for {self._timeout} s"
                self.calls.fail(WorkerLostError(f"worker: {found}; {hint}"))
            elif self.calls and self._window.is_open:
                self._ask_for_health()

    def _meet(self, worker: protocol.Health) -> None:
        """The worker answered on a new connection: send what waits, unless its process is not the one that had it."""
        if self._worker is not None and worker.instance != self._worker.instance:
            self.calls.fail_sent(
                WorkerLostError(f"worker: the one at {self._line.address} was started anew; submit the request again")
            )
        elif self._worker is not None:
            for notice in self._window.notices:
                self._line.send(notice)
        self._worker = worker
        self._window = _Window(deque(self.calls), is_open=True)
        self._send_queued()

    def _confirm(self, worker: protocol.Health) -> None:
        """The worker has taken what was sent before it was asked."""
        self._window.unconfirmed = 0
        self._send_queued()

    def _send_queued(self) -> None:
        """Send queued calls, until the worker has to confirm what was sent."""
        while self._window.has_next:
            id = self._window.queue.popleft()
            if (call := self.calls.get(id)) is not None:
                self._transmit(id, call)

    def _transmit(self, id: str, call: Call) -> None:
        assert self._worker is not None
        limit = self._worker.limits["max_message_bytes"]
        if (found := len(call.frame)) > limit:
            text = f"expected at most max_message_bytes = {limit}, found {found}; send less, or raise the limit"
            self.calls.finish(id, MessageTooLargeError(f"message: {text}", value=found, limit=limit))
            return
        call.was_sent = True
        self._line.send(call.frame)
        self._window.unconfirmed += found
        if self._window.unconfirmed >= WINDOW_BYTES:
            self._ask_for_health(self._confirm)
