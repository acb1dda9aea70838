"""A client's connection to one worker: sends calls, hands their replies to whoever waits, and never leaves one waiting.

Owns: when calls are sent, and which process is at the other end. Does not own: the socket (`line`), the calls that wait
(`pending`), nor what calls mean.

Promises: every call gets its terminal reply or an exception. After a broken connection, calls are sent again to the
same worker process, which knows them by their ids; if another process answers, or nobody for `timeout` seconds, they
end with WorkerLostError. Everything happens on the event loop and in the process of the first call: from others calls
raise at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trueroll.errors import MessageTooLargeError, TruerollError, WorkerLostError

from .. import protocol
from ..network.keys import Key
from .inbox import Inbox
from .line import Line
from .pending import Call, PendingCalls

TICKS_PER_TIMEOUT = 4
WINDOW_BYTES = 2**24
"""A worker cuts off who sends much faster than it takes: after so many bytes its word is waited for."""


@dataclass
class _Window:
    """`queue`: the ids of calls that are to be sent. `unconfirmed`: bytes that were sent since the worker gave its word
    that it has taken what came before. `is_open`: whether the worker has answered on this connection. `notices`: what
    is told the same worker once it has answered on the next one.
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
        # What follows the answers to the own calls for health, which nobody else waits for.
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
        """Send a message whose reply, if any, nobody waits for."""
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
        """Send the calls that wait, as far as the worker's word is not to be waited for."""
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
