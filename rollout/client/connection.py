"""A client's connection to one worker: sends calls, and passes replies to the callers. No caller waits forever.

Owns:

- the socket (`Line`)
- the pending calls (`PendingCalls`)
- the replies that callers have not read yet (`Inbox`), and partial samples (`Received`)
- the decision about when to send each call, and the record of the connected worker process (`Connection`)

Does not own: what each call does (`client`).

Guarantees:

- Every call gets its terminal reply or an exception.
- After a lost connection, pending calls are sent again to the same worker process, which recognizes them by their ids.
  If a different process answers, or no process answers for `timeout` seconds, pending calls raise WorkerLostError.
- Replies are accepted only from a process that has the expected key. Without keys, the process at the
  other end must run as the same user as this process, or as root.
- Everything runs in the event loop and the process of the first call. Calls from another event loop or process raise
  immediately.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from trueroll.errors import (
    ConfigError,
    ForbiddenError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    TruerollError,
    WorkerLostError,
)

from ...engine.media import ImageInput
from ...engine.request import SampleDelta
from .. import protocol
from ..config import check_address
from ..network.keys import Key, client_keys, use_curve
from ..protocol import Delta, FinishedSample, Growth, delta_of, sample_delta
from ..protocol.error_codes import error_from_code


def wrong_process(pid: int) -> TruerollError | None:
    """Return an error if the current process is not process `pid`, else None."""
    if os.getpid() == pid:
        return None
    return TruerollError(
        f"client: it was made in process {pid} and cannot be used in process {os.getpid()}, which was forked later; "
        "make a new client here"
    )


class Received:
    """A sample that is still arriving. `put` and `finish` add messages from the worker; `take` returns the new tokens.

    Guarantees: the concatenated deltas equal the sample bit for bit. Each delta begins where the previous delta ended,
    or at token 0. A later delta that begins at token 0 replaces all earlier deltas. A sample restarts at token 0 if its
    request was sent again after a lost connection, and the worker no longer had the request. Even if the caller reads
    deltas late, the object stores each token of the sample only once.
    """

    def __init__(self) -> None:
        self._growth: Growth | None = None
        self._num_taken = 0
        self._is_anew = False
        self._is_announced = False

    def put(self, delta: Delta) -> bool:
        """Add a delta. Return True if the delta is the first new delta since the last call to `take`.

        Raise ProtocolError if tokens before the delta are missing.
        """
        if self._growth is None or not self._growth.put(delta):
            self._begin(delta)
        was_announced, self._is_announced = self._is_announced, True
        return not was_announced

    def finish(self, sample: FinishedSample) -> SampleDelta | None:
        """Return the last delta of a finished sample; None if the caller has already taken all tokens."""
        whole, growth = delta_of(sample), self._growth
        if growth is None or growth.num_tokens > whole.num_tokens or not growth.put(whole):
            self._begin(whole)
        return self.take()

    def take(self) -> SampleDelta | None:
        """Return a delta with all tokens that the caller has not taken yet; None if the caller has taken all tokens."""
        self._is_announced = False
        growth, start = self._growth, self._num_taken
        if growth is None or (growth.num_tokens == start and not self._is_anew):
            return None
        self._num_taken, self._is_anew = growth.num_tokens, False
        return sample_delta(growth.part(start))

    def _begin(self, delta: Delta) -> None:
        if delta.start:
            raise ProtocolError(
                f"deltas: request {delta.id!r}, sample {delta.index}: a delta begins at token {delta.start}, but "
                "earlier tokens are missing; use the same release of trueroll on both sides"
            )
        self._growth = Growth(delta)
        self._is_anew, self._num_taken = self._num_taken > 0, 0


Reply: TypeAlias = protocol.FromWorker | TruerollError


class Inbox:
    """A queue of replies, each with the id of its call. Deltas of a sample are merged into one delta until the caller
    takes this delta.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Reply | Received]] = asyncio.Queue()
        self._received: dict[tuple[str, int], Received] = {}

    def put(self, id: str, reply: Reply) -> None:
        self._queue.put_nowait((id, reply))

    def put_delta(self, delta: protocol.Delta) -> None:
        """Add a delta. Raise ProtocolError if tokens before the delta are missing."""
        received = self._received.setdefault((delta.id, delta.index), Received())
        if received.put(delta):
            self._queue.put_nowait((delta.id, received))

    def finish(self, sample: protocol.FinishedSample) -> SampleDelta | None:
        """Return the last delta of a finished sample; None if the caller has already taken all tokens."""
        return self._received.pop((sample.id, sample.index), Received()).finish(sample)

    async def get(self) -> tuple[str, Reply | Received]:
        """Wait for the next reply. Return the id of the reply's call, and the reply. A reply of the type `Received`
        means that a sample has new tokens.
        """
        return await self._queue.get()

    def rest(self) -> Iterator[tuple[str, Reply | Received]]:
        """Yield the replies that have arrived but that the caller has not taken."""
        while not self._queue.empty():
            yield self._queue.get_nowait()


LINGER_MS = 200
SETTLE_SECONDS = 0.05
"""Pause after a connection ends. ZMQ reports the disconnect shortly before the last messages can be read."""
RETRY_MS = 200
HEARTBEAT_MS = 10_000


class Listener(Protocol):
    """Handler for the events of a `Line`. If a method raises an exception, the line fails."""

    def heard(self, frame: bytes | memoryview) -> None:
        """Handle a frame from the worker."""
        ...

    def connected(self) -> None:
        """Handle a new connection. Nothing has been sent on the connection yet."""
        ...

    def disconnected(self) -> None:
        """Handle the loss of the connection, or its replacement by another connection."""
        ...

    def failed(self, error: TruerollError) -> None:
        """Handle the failure of one of the line's tasks. No more frames will arrive."""
        ...


class Line:
    """A socket connection to `address` that reconnects after a disconnect. `server_public_key`, `client_key`: see
    `AsyncRolloutClient`.
    """

    def __init__(self, address: str, server_public_key: Key | None, client_key: Key | None, listener: Listener) -> None:
        check_address(address, has_keys=server_public_key is not None)
        self.address = address
        self._keys = client_keys(address, server_public_key, client_key)
        self._listener = listener
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the line has been opened and not yet closed."""
        return bool(self._tasks)

    def open(self) -> None:
        """Connect, in the running event loop. Raise ConfigError if the socket cannot connect to the address."""
        self._home = os.getpid(), asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._connect()

    def send(self, frame: bytes) -> None:
        """Send a frame on the current connection."""
        self._socket.send(frame)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, which is cancelled when the line is closed."""
        self._tasks[name] = asyncio.create_task(coroutine)
        self._tasks[name].add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Disconnect. No-op if the line is not open."""
        tasks, self._tasks = self._tasks, {}
        if not tasks:
            return
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def not_at_home(self) -> TruerollError | None:
        """Return an error if the current process or event loop differs from the process or event loop of the first
        call, else None.
        """
        if self._home is None:
            return None
        pid, loop = self._home
        if error := wrong_process(pid):
            return error
        with suppress(RuntimeError):  # no loop is running if the garbage collector closes a stream
            if asyncio.get_running_loop() is loop:
                return None
        return TruerollError(
            "client: this call runs in another event loop than the first call; make a client in each event loop, or "
            "use RolloutClient"
        )

    def _connect(self) -> None:
        """Make a socket for a single connection. After a disconnect, this object closes the socket and makes a new one.
        Closing the socket drops its unsent messages, because another process at the address must not get these
        messages.

        ZMQ itself would reconnect the old socket `RETRY_MS` after a disconnect. So if the event loop is blocked for
        longer than `RETRY_MS`, the old socket may reconnect before it is closed, and unsent messages may still reach
        another process.
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
            raise ConfigError(
                f"address: cannot connect to {self.address} ({error.strerror}); correct the address"
            ) from None
        self.spawn("read", self._read())
        self.spawn("follow", self._follow(monitor))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            known = error if isinstance(error, TruerollError) else TruerollError(f"client: internal error ({error!r})")
            self._listener.failed(known)

    async def _read(self) -> None:
        while True:
            self._hear(await self._socket.recv(copy=False))
            with suppress(zmq.Again):  # read all waiting frames, without a future for each frame
                while True:
                    self._hear(zmq.Socket.recv(self._socket, zmq.NOBLOCK, copy=False))

    def _hear(self, frame: zmq.Frame) -> None:
        self._check_worker(frame)
        self._listener.heard(frame.buffer)  # without a copy of the frame, which may be long

    def _check_worker(self, frame: zmq.Frame) -> None:
        """If the client has no keys, raise ForbiddenError unless the sender of the frame runs as this user or root."""
        if self._keys is not None:
            return
        uid = int(str(frame.get("Peer-Address")).split(":")[1])
        if uid not in (os.geteuid(), 0):
            raise ForbiddenError(
                f"worker: the process at {self.address} runs as user {uid}, not as user {os.geteuid()} or root; choose "
                "an address in a folder of your own, or use keys"
            )

    async def _follow(self, monitor: Any) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self._listener.disconnected()
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ForbiddenError(
                    f"worker: the worker at {self.address} does not know this client's key; add the client's public "
                    "key to the worker's clients_file and restart the worker"
                )
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._listener.connected()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                return await self._connect_anew(monitor)

    async def _connect_anew(self, monitor: Any) -> None:
        """Read the last messages of the closed connection, then connect again."""
        reader = self._tasks["read"]
        await asyncio.sleep(SETTLE_SECONDS)
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and not reader.done():
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._socket.disable_monitor()
        monitor.close(linger=0)  # is not garbage-collected, because the event loop still refers to the monitor
        self._socket.close(linger=0)
        self._connect()


NO_IMAGES: Mapping[bytes, ImageInput] = MappingProxyType({})


@dataclass
class Call:
    """A pending call. `caller`: the caller id of the call and of its replies; None if the call has none. `replies`: the
    accepted types of replies, besides deltas. `images`: the images that the worker may ask for, by content hash.
    """

    frame: bytes
    inbox: Inbox
    caller: str | None
    replies: tuple[type[protocol.FromWorker], ...]
    has_deltas: bool
    images: Mapping[bytes, ImageInput]
    was_sent: bool = False

    @classmethod
    def of(cls, message: protocol.Call, inbox: Inbox, images: Mapping[bytes, ImageInput]) -> Call:
        """Make a pending call from a message."""
        replies, has_deltas = protocol.REPLIES[type(message)], getattr(message, "deltas", False)
        return cls(protocol.encode(message), inbox, _caller_of(message), replies, has_deltas, images)

    def part(self, need: protocol.NeedImage) -> bytes:
        """Return the part of an image that the worker asks for. Raise ProtocolError if the call has no such image, and
        InvalidRequestError if the image has no such part.
        """
        if (image := self.images.get(need.content_hash)) is None:
            raise ProtocolError(
                f"need_image: the worker asks for image {need.content_hash.hex()}, but the request has no such image; "
                "use the same release of trueroll on both sides"
            )
        part = protocol.part_of(image, need.start, need.num_bytes)
        if len(part) < need.num_bytes:
            needed, found = need.start + need.num_bytes, image.table.nbytes + image.levels.nbytes
            raise InvalidRequestError(
                f"images: the worker's model needs at least {needed} bytes for an image of {image.rows} x "
                f"{image.columns} patches (got {found}); preprocess the image with this model's image processor",
                field="images",
                value=found,
                limit=needed,
            )
        return part


class PendingCalls:
    """Pending calls by id, the oldest first."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: str) -> bool:
        return id in self._calls

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the pending calls."""
        return iter(self._calls)

    def add(self, id: str, call: Call) -> None:
        """Add a pending call."""
        self._calls[id] = call

    def get(self, id: str) -> Call | None:
        """Return the pending call with this id, else None."""
        return self._calls.get(id)

    def needing(self, need: protocol.NeedImage) -> Call | None:
        """Return the pending call for which the worker asks for an image, else None."""
        call = self._calls.get(need.id)
        return call if call is not None and _is_for(call, need) else None

    def give_up(self, ids: Iterable[str]) -> set[str]:
        """Drop calls. Return the ids of the dropped calls that were already sent to the worker."""
        given_up = {id: self._calls.pop(id, None) for id in ids}
        return {id for id, call in given_up.items() if call is not None and call.was_sent}

    def deliver(self, reply: protocol.FromWorker) -> None:
        """Pass a reply to the call that the reply answers."""
        if isinstance(reply, protocol.Deltas):
            for delta in reply.samples:
                self._deliver_delta(delta, reply)
            return
        call = self._calls.get(reply.id or "")
        if call is not None and not _is_for(call, reply):
            return
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
        """End a call with its terminal reply."""
        if call := self._calls.pop(id, None):
            call.inbox.put(id, reply)

    def fail(self, error: TruerollError) -> None:
        """End all calls with an error."""
        for id in list(self._calls):
            self.finish(id, error)

    def fail_sent(self, error: TruerollError) -> None:
        """End all sent calls with an error."""
        for id in [id for id, call in self._calls.items() if call.was_sent]:
            self.finish(id, error)

    def _deliver_delta(self, delta: protocol.Delta, reply: protocol.Deltas) -> None:
        call = self._calls.get(delta.id)
        if call is None or not _is_for(call, reply):
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


def _is_for(call: Call, reply: protocol.FromWorker) -> bool:
    """Return whether a reply is for this call. A request may be submitted again with the same id after an earlier
    submission was abandoned. Replies for the earlier submission have another caller id.
    """
    return _caller_of(reply) in (None, call.caller)


def _unexpected(reply: protocol.FromWorker, expected: tuple[type[protocol.FromWorker], ...]) -> ProtocolError:
    types = " or ".join(kind.model_fields["type"].default for kind in expected)
    return ProtocolError(
        f"reply: the worker sent {reply.type} instead of {types}; use the same release of trueroll on both sides"
    )


TICKS_PER_TIMEOUT = 4
WINDOW_BYTES = 2**24
"""Limit on sent bytes that the worker has not confirmed. At the limit, sending stops until the worker confirms receipt.
The worker disconnects a client that sends much faster than the worker reads.
"""


@dataclass
class _Window:
    """State for sending messages on a connection.

    `queue`: ids of calls to send. `unconfirmed`: number of bytes that were sent since the worker last confirmed
    receipt. `is_open`: True once the worker has answered on this connection. `notices`: messages to send when the same
    worker answers on the next connection.
    """

    queue: deque[str] = field(default_factory=deque)
    unconfirmed: int = 0
    is_open: bool = False
    notices: list[bytes] = field(default_factory=list)

    @property
    def has_next(self) -> bool:
        """Return whether a call can be sent now."""
        return self.is_open and bool(self.queue) and self.unconfirmed < WINDOW_BYTES


class Connection:
    """A connection to a worker, opened by the first call.

    `timeout`: if a worker sends nothing for this many seconds, its pending calls raise WorkerLostError. `calls`: the
    pending calls.
    """

    def __init__(self, address: str, timeout: float, server_public_key: Key | None, client_key: Key | None) -> None:
        self._line = Line(address, server_public_key, client_key, self)
        self._timeout = timeout
        self.calls = PendingCalls()
        self._window = _Window()
        self._worker: protocol.Health | None = None
        # Callbacks for the replies to this connection's own health checks, by call id.
        self._awaited: dict[str, Callable[[protocol.Health], None]] = {}
        self._silent_ticks = 0
        self._end: TruerollError | None = None

    def call(self, message: protocol.Call, inbox: Inbox, images: Mapping[bytes, ImageInput] = NO_IMAGES) -> None:
        """Send a message, and put each reply into `inbox`, together with the message's id. The last reply is terminal
        or an exception. `images`: the images of the message, by content hash. The images are not sent with the message.
        If the worker lacks an image, the worker asks for parts of the image, and each part is then sent.
        """
        if error := self._line.not_at_home() or self._end:
            raise error
        if not self._line.is_open:
            self._line.open()
            self._line.spawn("watch", self._watch())
        self.calls.add(message.id, Call.of(message, inbox, images))
        if self._window.is_open:
            self._window.queue.append(message.id)
            self._send_queued()

    def notify(self, message: protocol.Abort | protocol.Ack) -> None:
        """Send a message that has no reply."""
        if self._worker is None or self._end is not None or self._line.not_at_home() is not None:
            return
        if self._window.is_open:
            self._line.send(protocol.encode(message))
        else:
            self._window.notices.append(protocol.encode(message))

    async def close(self) -> None:
        """End pending calls and disconnect. Idempotent."""
        if error := self._line.not_at_home():
            raise error
        self.failed(TruerollError("client: the client is closed; make a new one"))
        await self._line.close()

    # Events of the line.

    def connected(self) -> None:
        self._ask_for_health(self._meet)

    def disconnected(self) -> None:
        self._window.is_open = False
        self._awaited.clear()

    def heard(self, frame: bytes | memoryview) -> None:
        reply = protocol.from_worker(frame)
        self._silent_ticks = 0
        if isinstance(reply, protocol.Health) and (follow := self._awaited.pop(reply.id, None)) is not None:
            follow(reply)
        elif isinstance(reply, protocol.NeedImage):
            self._put_image(reply)
        else:
            self.calls.deliver(reply)

    def failed(self, error: TruerollError) -> None:
        self._end = error
        self.calls.fail(error)

    def _put_image(self, need: protocol.NeedImage) -> None:
        """Send the part of an image that the worker asks for. If the part cannot be sent, end the call, and tell the
        worker not to wait for the part.
        """
        if not self._window.is_open:  # the worker asks again on the next connection
            return
        if (call := self.calls.needing(need)) is None:
            self._give_up(need)  # otherwise the worker would wait for the part
            return
        try:
            data = call.part(need)
        except TruerollError as error:
            self.calls.finish(need.id, error)
            self._give_up(need)
            return
        part = protocol.PutImage(id=need.id, content_hash=need.content_hash, start=need.start, data=data)
        self._line.send(protocol.encode(part))

    def _give_up(self, need: protocol.NeedImage) -> None:
        """Tell the worker that the caller has given up the request."""
        if need.caller is not None:
            self.notify(protocol.Abort(id=protocol.new_id(), request_id=need.id, caller=need.caller))

    def _ask_for_health(self, follow: Callable[[protocol.Health], None] | None = None) -> None:
        id = protocol.new_id()
        if follow is not None:
            self._awaited[id] = follow
        self._line.send(protocol.encode(protocol.GetHealth(id=id)))

    async def _watch(self) -> None:
        """Check the worker's health four times per timeout. Time in which this event loop was blocked does not count
        towards the timeout.
        """
        while True:
            await asyncio.sleep(self._timeout / TICKS_PER_TIMEOUT)
            self._silent_ticks = self._silent_ticks + 1 if self.calls else 0
            if self._silent_ticks > TICKS_PER_TIMEOUT:
                self._silent_ticks = 0
                hint = (
                    "the worker has exited or hangs"
                    if self._worker
                    else "check that a worker runs at this address, and check the keys"
                )
                found = f"no answer from {self._line.address} for {self._timeout} s"
                self.calls.fail(WorkerLostError(f"worker: {found}; {hint}"))
            elif self.calls and self._window.is_open:
                self._ask_for_health()

    def _meet(self, worker: protocol.Health) -> None:
        """Send the pending calls when the worker first answers on a new connection. If the worker was
        restarted, calls that were sent to the old process fail.
        """
        if self._worker is not None and worker.instance != self._worker.instance:
            self.calls.fail_sent(
                WorkerLostError(f"worker: the worker at {self._line.address} was restarted; submit the request again")
            )
        elif self._worker is not None:
            for notice in self._window.notices:
                self._line.send(notice)
        self._worker = worker
        self._window = _Window(deque(self.calls), is_open=True)
        self._send_queued()

    def _confirm(self, worker: protocol.Health) -> None:
        """Reset the count of unconfirmed bytes. A reply to a health check confirms that all earlier messages were
        received.
        """
        self._window.unconfirmed = 0
        self._send_queued()

    def _send_queued(self) -> None:
        """Send queued calls, up to the limit on unconfirmed bytes."""
        while self._window.has_next:
            id = self._window.queue.popleft()
            if (call := self.calls.get(id)) is not None:
                self._transmit(id, call)

    def _transmit(self, id: str, call: Call) -> None:
        assert self._worker is not None
        limit = self._worker.limits["max_message_bytes"]
        if (found := len(call.frame)) > limit:
            text = f"it has {found} bytes (limit {limit}, max_message_bytes); send less, or raise the worker's limit"
            self.calls.finish(id, MessageTooLargeError(f"message: {text}", value=found, limit=limit))
            return
        call.was_sent = True
        self._line.send(call.frame)
        self._window.unconfirmed += found
        if self._window.unconfirmed >= WINDOW_BYTES:
            self._ask_for_health(self._confirm)
