"""Replies to clients that do not read them as fast as they come.

Owns: the replies that the ROUTER socket does not take yet. Promises: a client gets its replies in order; what waits
for all clients together stays within `max_bytes`. Beyond that, of the user with most, the connection with most is
dropped: its replies are given up, and nothing is taken from it until it reads again and has got one error without an
id, which ends all its calls.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from trueroll.errors import UnreadError

from .. import protocol

FINISH_SECONDS = 0.001
"""Between two looks whether clients have read, at the end."""
FRAME_BYTES = 100
"""Of a frame beside its content."""


@dataclass
class _Box:
    """Replies to one client. `is_dropped`: all that is left is the error that says so."""

    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    is_dropped: bool = False


class Outboxes:
    """Sends by `router`. `on_lost` is called with the identity of a client that is gone or was dropped. `user_of` tells
    whose a connection is.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        max_bytes: int,
        on_lost: Callable[[bytes], None],
        user_of: Callable[[bytes], object],
    ) -> None:
        self._router = router
        self._max_bytes = max_bytes
        self._on_lost = on_lost
        self._user_of = user_of
        self._boxes: dict[bytes, _Box] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no client has replies waiting, nor waits to be told that it has none."""
        return not self._boxes

    def takes(self, identity: bytes) -> bool:
        """Whether a reply for this client would not have to wait behind others here."""
        return identity not in self._boxes

    def is_dropped(self, identity: bytes) -> bool:
        """Whether nothing is to be taken from this client."""
        box = self._boxes.get(identity)
        return box is not None and box.is_dropped

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send now, or as soon as the client reads; False if it is gone or dropped."""
        box = self._boxes.get(identity)
        if box is None:
            if (was_sent := self._try(identity, frame)) is not None:
                return was_sent
            box = self._boxes[identity] = _Box()
        if box.is_dropped:
            return False
        self._put(box, frame)
        if self._num_bytes > self._max_bytes:
            self.flush()
        while self._num_bytes > self._max_bytes:
            self._drop(self._largest())
        return not box.is_dropped

    def _largest(self) -> bytes:
        """The largest box of the user who has most in all of theirs."""
        totals: Counter[object] = Counter()
        for identity, box in self._boxes.items():
            totals[self._user_of(identity)] += box.num_bytes
        return max(self._boxes, key=lambda each: (totals[self._user_of(each)], self._boxes[each].num_bytes))

    def flush(self) -> None:
        """Send what can be sent by now."""
        for identity, box in list(self._boxes.items()):
            was_sent: bool | None = True
            while box.frames and was_sent:
                if was_sent := self._try(identity, box.frames[0]):
                    self._take(box)
            if was_sent is False:
                self._on_lost(identity)
            if was_sent is False or not box.frames:
                self.forget(identity)

    def forget(self, identity: bytes) -> None:
        """Keep nothing for a client that is gone."""
        if (box := self._boxes.pop(identity, None)) is not None:
            self._empty(box)

    def finish(self, seconds: float) -> None:
        """Send what waits for clients that read, for at most so long."""
        deadline = time.monotonic() + seconds
        while self._num_bytes and time.monotonic() < deadline:
            self.flush()
            time.sleep(FINISH_SECONDS)

    def _try(self, identity: bytes, frame: bytes) -> bool | None:
        """Whether it was sent; None if the client has to read first."""
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _drop(self, identity: bytes) -> None:
        box = self._boxes[identity]
        error = UnreadError(
            f"connection: expected a client that reads its replies, found {box.num_bytes} bytes unread, with "
            "max_unread_bytes in all exceeded; read, and ask again: results are kept"
        )
        self._empty(box)
        box.is_dropped = True
        box.frames.append(protocol.encode(protocol.error_message(None, error)))
        self._on_lost(identity)

    def _put(self, box: _Box, frame: bytes) -> None:
        box.frames.append(frame)
        box.num_bytes += len(frame) + FRAME_BYTES
        self._num_bytes += len(frame) + FRAME_BYTES

    def _take(self, box: _Box) -> None:
        frame = box.frames.popleft()
        if not box.is_dropped:  # the error that says so is not counted, so that dropping always makes room
            box.num_bytes -= len(frame) + FRAME_BYTES
            self._num_bytes -= len(frame) + FRAME_BYTES

    def _empty(self, box: _Box) -> None:
        self._num_bytes -= box.num_bytes
        box.frames.clear()
        box.num_bytes = 0
