"""A client's connection to one worker: sends calls, hands their replies to whoever waits, and never leaves one waiting.

Owns: the DEALER socket, the table of calls without a terminal reply, the tasks that read the socket and watch over it.
Does not own: what calls mean. It knows only that some replies end a call.

Promises: every call gets its terminal reply or an exception. After a broken connection, calls are sent again to the
same worker process, which knows them by their ids; if another process answers, or nobody for `timeout` seconds, they
end with WorkerLostError. What answers is the worker that was meant: it has the key that it should have, or runs as this
user or root. Everything happens on the event loop and in the process of the first call: from others calls raise at
once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from ..protocol.error_codes import error_from_code
from .loop_thread import wrong_process
from .received import Received

Reply: TypeAlias = protocol.FromWorker | TruerollError

TICKS_PER_TIMEOUT = 4
WINDOW_BYTES = 2**24
"""A worker cuts off who sends much faster than it takes: after so many bytes its word is waited for."""
LINGER_MS = 200
SETTLE_SECONDS = 0.05
"""The end of a connection is told a moment before its last messages can be read."""
RETRY_MS = 200
HEARTBEAT_MS = 10_000


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


@dataclass
class _Call:
    """`caller`: the name that replies to it bear; None for a call that has none. `replies`: what they may be, beside
    deltas.
    """

    frame: bytes
    inbox: Inbox
    caller: str | None
    replies: tuple[type[protocol.FromWorker], ...]
    has_deltas: bool
    was_sent: bool = False


class Connection:
    """Connects at the first call. `timeout`: seconds without any sign of life, while calls wait, that mean a lost
    worker.
    """

    def __init__(self, address: str, timeout: float, server_public_key: Key | None, client_key: Key | None) -> None:
        check_address(address, has_keys=server_public_key is not None)
        self._address = address
        self._timeout = timeout
        self._keys = client_keys(address, server_public_key, client_key)
        self._calls: dict[str, _Call] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._notices: list[bytes] = []
        self._worker: protocol.Health | None = None
        self._is_connected = False
        self._hello_id = ""
        self._queue: deque[str] = deque()
        self._unconfirmed = 0
        self._confirmation = ""
        self._silent_ticks = 0
        self._end: TruerollError | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    def call(self, message: protocol.Call, inbox: Inbox) -> None:
        """Send a message; its replies, the last of them terminal or an exception, go to `inbox` with the message's
        id.
        """
        self._start()
        replies, has_deltas = protocol.REPLIES[type(message)], getattr(message, "deltas", False)
        call = _Call(protocol.encode(message), inbox, _caller_of(message), replies, has_deltas)
        self._calls[message.id] = call
        if self._is_connected:
            self._queue.append(message.id)
            self._send_queued()

    def knows(self, id: str) -> bool:
        """Whether a call with this id waits for its end."""
        return id in self._calls

    def give_up(self, ids: Iterable[str]) -> set[str]:
        """Expect nothing more for these calls. Returns those that the worker may know of."""
        given_up = {id: self._calls.pop(id, None) for id in ids}
        return {id for id, call in given_up.items() if call is not None and call.was_sent}

    def notify(self, message: protocol.Abort | protocol.Ack) -> None:
        """Send a message whose reply, if any, nobody waits for."""
        if self._worker is None or self._end is not None or self._not_at_home() is not None:
            return
        if self._is_connected:
            self._socket.send(protocol.encode(message))
        else:
            self._notices.append(protocol.encode(message))

    async def close(self) -> None:
        """End what still waits, and disconnect. Harmless if that has happened."""
        self._check_home()
        self._end = TruerollError("client: closed; make a new one")
        self._fail(self._end)
        tasks, self._tasks = self._tasks, {}
        if not tasks:
            return
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def _check_home(self) -> None:
        if error := self._not_at_home():
            raise error

    def _not_at_home(self) -> TruerollError | None:
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

    def _start(self) -> None:
        self._check_home()
        if self._end is not None:
            raise self._end
        if self._tasks:
            return
        self._home = os.getpid(), asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._open()
        self._spawn("watch", self._watch())

    def _open(self) -> None:
        """A socket for one connection: what could not be sent by it shall not go to whoever is there next.

        It does where the event loop stands still for longer than `RETRY_MS` just then: the socket connects by itself.
        """
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RETRY_MS)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.IPV6, "[" in self._address)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._keys is not None:
            use_curve(self._socket, self._keys)
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._connect()
        self._spawn("read", self._read())
        self._spawn("follow", self._follow(monitor))

    def _connect(self) -> None:
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"address: cannot connect to {self._address}: {error.strerror}; correct it") from None

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(coroutine)
        self._tasks[name].add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._end = error if isinstance(error, TruerollError) else TruerollError(f"client: broke down ({error!r})")
            self._fail(self._end)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv(copy=False)
            self._check_worker(frame)
            reply = protocol.from_worker(frame.bytes)
            self._silent_ticks = 0
            if isinstance(reply, protocol.Health) and reply.id == self._hello_id:
                self._meet(reply)
            elif isinstance(reply, protocol.Health) and reply.id == self._confirmation:
                self._unconfirmed = 0
                self._send_queued()
            else:
                self._deliver(reply)

    def _check_worker(self, frame: zmq.Frame) -> None:
        """Raise ForbiddenError if no keys vouch for it, and another user has taken the place of the worker."""
        if self._keys is not None:
            return
        uid = int(str(frame.get("Peer-Address")).split(":")[1])
        if uid not in (os.geteuid(), 0):
            raise ForbiddenError(
                f"worker: expected one of user {os.geteuid()} or of root at {self._address}, found one of user {uid}; "
                "choose an address in a folder of your own, or use keys"
            )

    async def _follow(self, monitor: Any) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self._is_connected = False
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ForbiddenError(
                    f"worker: expected the one at {self._address} to know this client's key, found that it does not; "
                    "add its public key to the worker's clients_file and start the worker anew"
                )
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hello_id = protocol.new_id()
                self._socket.send(protocol.encode(protocol.GetHealth(id=self._hello_id)))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                return await self._open_anew()

    async def _open_anew(self) -> None:
        """The connection has ended: read what came by it, and make another one."""
        reader = self._tasks["read"]
        await asyncio.sleep(SETTLE_SECONDS)
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and not reader.done():
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._open()

    async def _watch(self) -> None:
        """Ask for a sign of life every quarter of the timeout, but only count the quarters that passed in this loop."""
        while True:
            await asyncio.sleep(self._timeout / TICKS_PER_TIMEOUT)
            self._silent_ticks = self._silent_ticks + 1 if self._calls else 0
            if self._silent_ticks > TICKS_PER_TIMEOUT:
                self._silent_ticks = 0
                self._fail(self._silence())
            elif self._calls and self._is_connected:
                self._socket.send(protocol.encode(protocol.GetHealth(id=protocol.new_id())))

    def _silence(self) -> WorkerLostError:
        hint = "it ended or hangs" if self._worker else "check the address, that a worker runs there, and its keys"
        return WorkerLostError(f"worker: no answer from {self._address} for {self._timeout} s; {hint}")

    def _meet(self, worker: protocol.Health) -> None:
        """The worker answered on a new connection: send what waits, unless its process is not the one that had it."""
        if self._worker is not None and worker.instance != self._worker.instance:
            self._fail_sent(
                WorkerLostError(f"worker: the one at {self._address} was started anew; submit the request again")
            )
        elif self._worker is not None:
            for notice in self._notices:
                self._socket.send(notice)
        self._notices.clear()
        self._worker = worker
        self._is_connected = True
        self._queue, self._unconfirmed = deque(self._calls), 0
        self._send_queued()

    def _send_queued(self) -> None:
        """Send the calls that wait, as far as the worker's word is not to be waited for."""
        while self._is_connected and self._queue and self._unconfirmed < WINDOW_BYTES:
            id = self._queue.popleft()
            if (call := self._calls.get(id)) is not None:
                self._transmit(id, call)

    def _transmit(self, id: str, call: _Call) -> None:
        assert self._worker is not None
        limit = self._worker.limits["max_message_bytes"]
        if (found := len(call.frame)) > limit:
            text = f"expected at most max_message_bytes = {limit}, found {found}; send less, or raise the limit"
            self._finish(id, MessageTooLargeError(f"message: {text}", value=found, limit=limit))
            return
        call.was_sent = True
        self._socket.send(call.frame)
        self._unconfirmed += len(call.frame)
        if self._unconfirmed >= WINDOW_BYTES:
            self._confirmation = protocol.new_id()
            self._socket.send(protocol.encode(protocol.GetHealth(id=self._confirmation)))

    def _deliver(self, reply: protocol.FromWorker) -> None:
        if isinstance(reply, protocol.Deltas):
            for delta in reply.samples:
                self._deliver_delta(delta, reply)
            return
        call = self._calls.get(reply.id or "")
        if call is not None and _caller_of(reply) not in (None, call.caller):
            return  # to an earlier asking for the same request, which was given up
        if isinstance(reply, protocol.Error):
            error = error_from_code(reply.code, reply.message, reply.field, reply.value, reply.limit)
            self._fail(error) if reply.id is None else self._finish(reply.id, error)
        elif call is None:
            return
        elif not isinstance(reply, call.replies):
            self._finish(reply.id, _unexpected(reply, call.replies))
        elif isinstance(reply, protocol.FinishedSample):
            call.inbox.put(reply.id, reply)
        else:
            self._finish(reply.id, reply)

    def _deliver_delta(self, delta: protocol.Delta, reply: protocol.Deltas) -> None:
        call = self._calls.get(delta.id)
        if call is None or reply.caller not in (None, call.caller):
            return
        if not call.has_deltas:
            self._finish(delta.id, _unexpected(reply, call.replies))
            return
        try:
            call.inbox.put_delta(delta)
        except ProtocolError as error:
            self._finish(delta.id, error)

    def _finish(self, id: str, reply: Reply) -> None:
        if call := self._calls.pop(id, None):
            call.inbox.put(id, reply)

    def _fail(self, error: TruerollError) -> None:
        for id in list(self._calls):
            self._finish(id, error)

    def _fail_sent(self, error: TruerollError) -> None:
        for id in [id for id, call in self._calls.items() if call.was_sent]:
            self._finish(id, error)


def _caller_of(message: protocol.Call | protocol.FromWorker) -> str | None:
    return getattr(message, "caller", None)


def _unexpected(reply: protocol.FromWorker, expected: tuple[type[protocol.FromWorker], ...]) -> ProtocolError:
    types = " or ".join(kind.model_fields["type"].default for kind in expected)
    return ProtocolError(f"reply: expected {types}, found {reply.type}; use the same release of trueroll on both sides")
