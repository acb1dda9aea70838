"""The worker's side of a relayed push: receives the buckets from another member, and passes the buckets on.

Owns: the memory for the buckets, a thread that receives the buckets, and a server for other workers (see
`relay_server`). Guarantees: bytes are received only for announced buckets, and written only within the bucket's memory.
If another worker closes its connection, sends an invalid frame, or sends nothing of an announced bucket for some
seconds, this worker continues with the next member, from the byte that it needs next. `close` does not wait. The
threads and sockets of a closed reader end within `TURN_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from trueroll.errors import DeadlineError, PushError

from ..payload.manifest import Bucket, RelaySource
from ..payload.tensors import raw_bytes
from .policy import PushPolicy
from .relay import DONE, MOST_IN_CHAIN, WELCOME
from .relay_server import FRAME, HELLO, JOIN, MOST_FRAME_BYTES, STREAM, Server, Store, StoreClosed
from .sockets import TURN_SECONDS, Link, LinkClosed

SILENT_SECONDS = 3.0
"""If a worker sends no bytes of an announced bucket for this many seconds, another member is tried. At least the
trainer has all bytes of an announced bucket.
The time is at most `SILENT_SHARE` of the push's timeout. For each other worker before
this one in the chain, the time is longer by `SILENT_STEP`. If a worker is silent, the worker directly after it
therefore gives up first, and can serve the later workers before they give up.
"""
SILENT_SHARE = 1 / 8
SILENT_STEP = 1 / 16
JOIN_SECONDS = 30.0
"""Time limit for joining. The trainer listens before a push begins."""
_MOST_CONNECTIONS = MOST_IN_CHAIN + 32
_EMPTY = torch.empty(0, dtype=torch.uint8)

log = logging.getLogger(__name__)

Member: TypeAlias = tuple[str, int]


class RelayReader:
    """Reads buckets from another member.

    `timeout`: seconds for each bucket. `policy`: the hosts from which the worker may receive. Raise PushError if the
    worker cannot join within the time limit, or once `is_closed` returns True.
    """

    def __init__(self, source: RelaySource, timeout: float, policy: PushPolicy, is_closed: Callable[[], bool]) -> None:
        self._source, self._timeout, self._policy = source, timeout, policy
        self._is_closed = is_closed
        self._token = bytes.fromhex(source.token)
        self._store = Store()
        self._buffers = [_EMPTY] * source.num_slots
        self._numbers: dict[int, int] = {}
        self._server: Server | None = None
        self._trainer: Link | None = None
        trainer = f"{source.host}:{source.port}"
        try:
            self._join(time.monotonic() + min(timeout, JOIN_SECONDS))
            threading.Thread(target=self._receive, name="relay-receive", daemon=True).start()
        except LinkClosed:
            self.close()
            raise PushError("relay: the push was closed; push again") from None
        except (OSError, RuntimeError) as error:
            self.close()
            raise PushError(
                f"relay: cannot join the push at {trainer}: {error}; check that the worker can reach the trainer's "
                "`host`, and push again"
            ) from None

    def prepare(self, bucket: Bucket) -> None:
        """Provide memory for the bucket. The receiving thread then receives the bucket."""
        if not bucket.num_bytes:
            return
        slot = bucket.index % len(self._buffers)
        if len(self._buffers[slot]) < bucket.num_bytes:
            self._buffers[slot] = torch.from_numpy(np.empty(bucket.num_bytes, np.uint8))
        memory = raw_bytes(self._buffers[slot])[: bucket.num_bytes]
        self._store.remove(self._numbers.pop(bucket.index - len(self._buffers), -1))
        self._numbers[bucket.index] = self._store.put(memory, is_filled=False)

    def read(self, bucket: Bucket) -> torch.Tensor:
        """See `Reader`. Raise DeadlineError if this worker cannot receive the bucket, and PushError for other failures.
        A push may continue without a worker that raises DeadlineError.
        """
        if not bucket.num_bytes:
            return _EMPTY
        if bucket.index not in self._numbers:
            self.prepare(bucket)
        try:
            self._wait(bucket.index, time.monotonic() + self._timeout)
        except TimeoutError:
            text = f"relay: bucket {bucket.index} did not arrive within {self._timeout:g} s; push again"
            raise DeadlineError(text) from None
        except StoreClosed:
            raise self._store.error or PushError("relay: the push was closed; push again") from None
        return self._buffers[bucket.index % len(self._buffers)]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._store.close()
        if self._trainer is not None:
            self._trainer.end(DONE)
        if self._server is not None:
            self._server.close()
        self._buffers = []

    def _wait(self, index: int, deadline: float) -> None:
        while True:
            try:
                self._store.wait_until_whole(self._numbers[index], TURN_SECONDS)
                return
            except TimeoutError:
                if self._is_closed():
                    raise StoreClosed from None
                if time.monotonic() >= deadline:
                    raise

    def _join(self, deadline: float) -> None:
        """Connect to the trainer, and start a server at the address of this connection."""
        source = self._source
        self._trainer = Link(source.host, source.port, deadline, self._is_over)
        host, _, *scope = self._trainer.socket.getsockname()
        listener = socket.socket(self._trainer.socket.family)
        listener.bind((host, 0, *scope))
        listener.listen(_MOST_CONNECTIONS)
        self._server = Server(listener, self._token, self._store, _MOST_CONNECTIONS, self._timeout)
        self._server.start()
        self._trainer.send(HELLO.pack(self._token, JOIN, source.position, self._server.port), deadline)
        if self._trainer.receive(len(WELCOME), deadline) != WELCOME:
            raise ConnectionError("the trainer does not speak this protocol")

    def _receive(self) -> None:
        """Receive the buckets, on the receiving thread."""
        place = _Place()
        try:
            *workers, trainer = self._members()
            silence = min(SILENT_SECONDS, SILENT_SHARE * self._timeout) * (1 + SILENT_STEP * len(workers))
            for member in workers:
                self._try(member, place, silence)
            self._follow(trainer, place, self._timeout)
        except (LinkClosed, StoreClosed):
            pass
        except OSError as error:
            place_of_trainer = f"{self._source.host}:{self._source.port}"
            text = f"relay: cannot receive from the trainer at {place_of_trainer}: {error}; push again"
            self._store.fail(DeadlineError(text))
        except PushError as error:
            self._store.fail(error)
        except Exception as error:
            log.exception("receiving a relayed push failed")
            text = f"relay: receiving failed with {type(error).__name__}: {error}; push again"
            self._store.fail(PushError(text))

    def _members(self) -> list[Member]:
        """Wait for the members that this worker may receive from. The last member is the trainer."""
        assert self._trainer is not None
        length = int.from_bytes(self._trainer.receive(2, math.inf), "big")
        found = json.loads(self._trainer.receive(length, time.monotonic() + self._timeout))
        if not isinstance(found, list) or len(found) > MOST_IN_CHAIN or not all(map(_is_member, found)):
            raise PushError("relay: the trainer sent an invalid list of members; push again")
        for host, _ in found:
            self._policy.check_host(host, "relay")
        return [*map(tuple, found), (self._source.host, self._source.port)]

    def _try(self, member: Member, place: _Place, patience: float) -> None:
        """Receive from another worker until it is lost or silent."""
        try:
            self._follow(member, place, patience)
        except OSError as error:
            log.warning(
                "relay: cannot receive bucket %d from the worker at %s: %s; the push continues from another member",
                place.number,
                member[0],
                error,
            )

    def _follow(self, member: Member, place: _Place, patience: float) -> None:
        """Receive from a member. Raise OSError if the member is lost, sends an invalid frame, or sends nothing of an
        announced bucket for `patience` seconds.
        """
        with closing(Link(*member, time.monotonic() + patience, self._is_over)) as link:
            hello = HELLO.pack(self._token, STREAM, place.number, place.offset)
            link.send(hello, time.monotonic() + patience)
            while True:
                memory = self._store.memory(place.number)  # waits until the bucket is announced
                number, length = FRAME.unpack(link.receive(FRAME.size, time.monotonic() + patience))
                left = len(memory) - place.offset
                if number != place.number or not 0 < length <= min(left, MOST_FRAME_BYTES):
                    raise ConnectionError(f"got a frame of {length} bytes for bucket {number}, which is invalid")
                self._take(link, memory[place.offset : place.offset + length], place, patience)
                if length == left:
                    place.number, place.offset = number + 1, 0

    def _take(self, link: Link, memory: memoryview, place: _Place, patience: float) -> None:
        """Receive the bytes of a frame. The bytes may be passed on as soon as they have arrived."""
        while memory:
            count = link.receive_into(memory, time.monotonic() + patience)
            memory = memory[count:]
            place.offset += count
            self._store.fill(place.number, count)

    def _is_over(self) -> bool:
        return self._store.is_closed or self._is_closed()


@dataclass
class _Place:
    """The next byte to receive: its bucket, and its offset in the bucket."""

    number: int = 0
    offset: int = 0


def _is_member(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 2:
        return False
    host, port = found
    return isinstance(host, str) and type(port) is int and 0 < port < 2**16
