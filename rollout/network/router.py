"""The worker's ROUTER socket: bound where the settings say, to clients who may come in, within limits.

Owns: the socket, the private folder made for it if any, the check of keys, how many connections there are (`Gate`), and
the replies that wait for clients that do not read (`Outboxes`). Does not own what messages mean. Promises: `receive`
says of each message who sent it; what bytes, connections and slow readers take is bounded; `close` leaves nothing
behind.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import struct
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from trueroll.errors import ConfigError, UnreadError

from .. import protocol
from ..config import WorkerConfig
from .keys import OWNER, Client, ServerKeys, serve_curve, server_keys

MAX_SILENT = 64
"""Each may have sent a part of a message of the greatest length."""
MAX_AHEAD_BYTES = 2**26
LOOK_SECONDS = 0.5
_MESSAGE_BYTES = 42
"""What CURVE and ZMTP add to a message (RFC 26 and 23 of ZMQ): `MESSAGE`, nonce, authenticator, flags, frame header."""
_RECEIVED_AT = 128
"""Where Linux's `struct tcp_info` has `tcpi_bytes_received`, 8 bytes."""


log = logging.getLogger(__name__)


class Gate:
    """To be made before the socket is bound, so that no connection escapes it. `on_gone` is called with the identity of
    each connection that was `heard` and has ended, again where it is heard once more.

    Owns: a monitor of the ROUTER socket. Promises: no more than `max_connections` at a time, and of these no more than
    `MAX_SILENT` that have sent nothing yet, of which the oldest gives way to a new one; so whoever opens connections
    without being let in neither uses up the descriptors of the process nor keeps others from coming in. A TCP
    connection that has sent more than `MAX_AHEAD_BYTES` which no message has brought yet is ended, within about
    `LOOK_SECONDS`: its messages come faster than they are taken, or are endless.

    What can be known of a connection, and when. Of a message ZMQ tells its descriptor, and with keys the number of its
    connection, counted up as the authenticator lets them in; of a connection that comes or ends the monitor tells the
    descriptor alone. A connection's coming is told before its first message can be received, and its end before its
    descriptor is another one's. But messages of a connection that has ended may wait for long, they come in any order
    among those of other connections, and its descriptor is taken again meanwhile. So of two connections by one
    descriptor the one with the greater number came later, and only the last can be there. Hence:

    - `heard` never says of a connection that is there that it is not.
    - It may say of one that has ended that it is there: of one that was heard before, until its end is followed; of one
      that was not, while the connection that has its descriptor now is there and silent. `on_gone` then follows, with
      that end, or once its successor is heard or ends.
    - Connections without keys have no numbers: all that are heard by a descriptor count as there until its last one
      ends.
    """

    def __init__(self, router: zmq.Socket[bytes], max_connections: int, on_gone: Callable[[bytes], None]) -> None:
        self._router = router
        self._max_connections = max_connections
        self._on_gone = on_gone
        self._heard: dict[int, set[bytes]] = {}
        self._newest: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # of all connections, in the order in which they came
        self._looked = time.monotonic()
        self._monitor: Any = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    @property
    def monitor(self) -> Any:
        """The socket to poll: `follow` is due when it can be read."""
        return self._monitor

    def follow(self) -> None:
        """Note which connections came and went, and end those beyond the limits, of the ones that were never heard."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._enter(event["value"])
                else:
                    self._leave(event["value"])
        num_silent = len(self._taken) - len(self._heard)
        too_many = max(num_silent - MAX_SILENT, len(self._taken) - self._max_connections, 0)
        if too_many:
            for fd in list(islice((fd for fd in self._taken if fd not in self._heard), too_many)):
                self._end(fd)

    @property
    def seconds_to_look(self) -> float:
        """Until `look` is due; it never is where no connection is by TCP."""
        if not self._taken or not self._router.get_string(zmq.LAST_ENDPOINT).startswith("tcp:"):
            return float("inf")
        return max(0.0, self._looked + LOOK_SECONDS - time.monotonic())

    def look(self) -> None:
        """End the connections that are too far ahead."""
        self._looked = time.monotonic()
        for fd, taken in list(self._taken.items()):
            with suppress(OSError), _socket_at(fd) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
                if received - taken > MAX_AHEAD_BYTES:
                    log.warning("a client was cut off: it had sent %d bytes more than were taken", received - taken)
                    self._end(fd)

    def heard(self, fd: int, identity: bytes, number: int | None, num_bytes: int) -> bool:
        """The connection with this identity and number has sent a message of so many bytes. Returns whether it is still
        there, as far as can be known.
        """
        if identity not in self._heard.get(fd, ()) or not identity.startswith(b"\0"):
            self.follow()  # it may have come, or gone, or gone and come again under an identity of its own
            if fd not in self._taken or not self._is_last(fd, number):
                return False
            self._heard.setdefault(fd, set()).add(identity)
        self._taken[fd] += num_bytes + _MESSAGE_BYTES
        return True

    def _is_last(self, fd: int, number: int | None) -> bool:
        newest = self._newest.get(fd, -1)
        if number is None or (number == newest and fd in self._heard):
            return True
        if number > newest:
            self._lose(fd)  # whoever was heard by it so far had ended before
            self._newest[fd], self._taken[fd] = number, 0
        return number > newest

    def close(self) -> None:
        """End the monitor, before the socket is closed."""
        self.follow()
        self._router.disable_monitor()
        self._monitor.close(linger=0)

    def _enter(self, fd: int) -> None:
        self._leave(fd)
        self._taken[fd] = 0

    def _leave(self, fd: int) -> None:
        self._taken.pop(fd, None)
        self._lose(fd)

    def _lose(self, fd: int) -> None:
        for identity in self._heard.pop(fd, ()):
            self._on_gone(identity)

    def _end(self, fd: int) -> None:
        """It leaves once the monitor tells so."""
        # The number may be another file's by now: anything but a connection of this socket is left alone.
        with suppress(OSError), _socket_at(fd) as connection:
            if _is_at(connection.getsockname(), self._router.get_string(zmq.LAST_ENDPOINT)):
                connection.shutdown(socket.SHUT_RDWR)


def _socket_at(fd: int) -> socket.socket:
    """The socket behind a descriptor, under a new one. Raise OSError if it is closed, or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_at(name: Any, endpoint: str) -> bool:
    return endpoint == f"ipc://{name}" if isinstance(name, str) else endpoint.endswith(f":{name[1]}")


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

    Owns: the replies that the ROUTER socket does not take yet. Promises: a client gets its replies in order; what waits
    for all clients together stays within `max_bytes`. Beyond that, of the user with most, the connection with most is
    dropped: its replies are given up, and nothing is taken from it until it reads again and has got one error without
    an id, which ends all its calls.
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


OVERSIZE_FACTOR = 2
"""ZMQ cuts the connection of a client that sends more than this many times `max_message_bytes`; below it, an error
replies.
"""
HANDSHAKE_MS = 5000
SEND_HWM = 128
KEEPALIVE_SECONDS = 30
LINGER_SECONDS = 2.0
FLUSH_MS = 2
"""How long a reply may wait for a look whether its slow reader has read."""
DOMAIN = "trueroll"


@dataclass(frozen=True)
class Peer:
    """Who sent a message: its connection, by the identity to reply to, and the client behind it. `is_gone`: the
    connection has ended, and another one may get the identity; see `Gate`.
    """

    identity: bytes
    client: Client
    is_gone: bool = False


class Router:
    """Listens at once; `address` is where. `on_lost` is called with each identity that gets no more replies.

    Raise ConfigError if nothing can listen at the configured address, or if keys cannot be read.
    """

    def __init__(self, config: WorkerConfig, on_lost: Callable[[bytes], None]) -> None:
        self._keys = server_keys(config)
        self._resources = ExitStack()  # closed the last one first
        address = config.address or self._new_address()
        context = zmq.Context()
        self._resources.callback(context.term)
        if self._keys is not None:
            self._resources.callback(_authenticate(context, self._keys).stop)
        self._socket = context.socket(zmq.ROUTER)
        self._on_lost = on_lost
        self._users: dict[bytes, str] = {}
        self._gate = Gate(self._socket, _most_connections(config.max_connections), self._leave)
        self._outboxes = Outboxes(self._socket, config.max_unread_bytes, on_lost, self._user_of)
        try:
            self.address = self._bind(config, address)
        except BaseException:
            self.close()
            raise

    def _new_address(self) -> str:
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="trueroll-"))
        return f"ipc://{folder}/worker.sock"

    def _bind(self, config: WorkerConfig, address: str) -> str:
        _set_options(self._socket, config, address, self._keys)
        try:
            _check_ipc_is_free(address)
            with _private_files():
                self._socket.bind(address)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"address: cannot listen at {address}: {error.strerror}; choose another address"
            ) from None
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def register(self, poller: zmq.Poller) -> None:
        """Let `poller` wake up when there is something to `receive`."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gate.monitor, zmq.POLLIN)

    @property
    def poll_ms(self) -> float:
        """After how long `maintain` has something to do."""
        to_look = 1000 * self._gate.seconds_to_look
        return to_look if self._outboxes.is_empty else min(FLUSH_MS, to_look)

    def maintain(self) -> None:
        """See who came and went, who is too far ahead, and who reads again."""
        self._gate.follow()
        if self._gate.seconds_to_look == 0.0:
            self._gate.look()
        self._outboxes.flush()

    def _user_of(self, identity: bytes) -> object:
        """Whose a connection is; where clients have no names, each is its own."""
        return self._users.get(identity, identity)

    def _leave(self, identity: bytes) -> None:
        self._users.pop(identity, None)
        self._outboxes.forget(identity)
        self._on_lost(identity)

    def receive(self) -> tuple[Peer, list[bytes]] | None:
        """The next message's sender and frames, no frames if it is to be passed over; None if there is none now."""
        try:
            first, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        identity = first.bytes
        fd = _descriptor_of(first)
        client, number = self._sender(first)
        is_there = fd is None or self._gate.heard(fd, identity, number, sum(map(len, frames)))
        if is_there and client.user is not None:
            self._users[identity] = client.user
        return Peer(identity, client, not is_there), [] if self._outboxes.is_dropped(identity) else _ends(frames)

    def _sender(self, frame: zmq.Frame) -> tuple[Client, int | None]:
        """Whose message it is, and the number of the connection, which only those with keys have."""
        if self._keys is None:
            return OWNER, None
        key, number = str(frame.get("User-Id")).split()
        return self._keys.clients[key], int(number)

    def takes(self, identity: bytes) -> bool:
        """Whether a client reads as fast as it is sent to: no reply for it waits here."""
        return self._outboxes.takes(identity)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send to a client; False if it is gone, or was dropped since it does not read."""
        return self._outboxes.send(identity, frame)

    def close(self) -> None:
        """Stop listening, and give what was sent up to `LINGER_SECONDS` to reach clients that read."""
        self._outboxes.finish(LINGER_SECONDS)
        self._gate.close()
        self._socket.close(linger=int(1000 * LINGER_SECONDS))
        self._resources.close()


def _ends(frames: list[zmq.Frame]) -> list[bytes]:
    """A message's frames, empty ones in the place of those between the first and the last: more than one are an error
    in any case, and may be many.
    """
    return [frame.bytes if index in (0, len(frames) - 1) else b"" for index, frame in enumerate(frames)]


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """Of the connection that it came by; None for a peer that speaks ZMTP 1 or 2, which can have no keys."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _most_connections(wanted: int) -> int:
    """As many as wanted, or as leave half of the descriptors that the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft // 2:
        return wanted
    log.warning("max_connections: %d instead of %d, as this process may open %d descriptors", soft // 2, wanted, soft)
    return soft // 2


def _set_options(router: zmq.Socket[bytes], config: WorkerConfig, address: str, keys: ServerKeys | None) -> None:
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.MAXMSGSIZE, OVERSIZE_FACTOR * config.max_message_bytes)
    router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # libzmq 4.3.5 aborts the process when a heartbeat, of either side, is due of a connection that ended while its
    # receive queue was full, and of one whose identity another connection took over (ROUTER_HANDOVER). So no queue is
    # ever full, and the worker sends no heartbeats: the system finds out about hosts that are gone.
    router.set(zmq.RCVHWM, 0)
    router.set(zmq.SNDHWM, SEND_HWM)
    router.set(zmq.TCP_KEEPALIVE, 1)
    router.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    router.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS // 3)
    router.set(zmq.TCP_KEEPALIVE_CNT, 3)
    router.set(zmq.IPV6, "[" in address)
    if keys is not None:
        serve_curve(router, keys)
        router.set_string(zmq.ZAP_DOMAIN, DOMAIN)
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of the authenticator nobody comes in


class _KnownKeys:
    """What the authenticator asks whether it is to let a key in."""

    def __init__(self, keys: ServerKeys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in self._keys.clients


class _Authenticator(ThreadAuthenticator):
    """With each message comes, as `User-Id`, its client's public key and the number of its connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self._numbers = count()

    def curve_user_id(self, client_public_key: bytes) -> str:
        return f"{super().curve_user_id(client_public_key)} {next(self._numbers)}"


def _authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> ThreadAuthenticator:
    """Lets in who has one of the keys, and no others."""
    authenticator = _Authenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, credentials_provider=_KnownKeys(keys))
    return authenticator


def _check_ipc_is_free(address: str) -> None:
    """Raise OSError if there is anything at an ipc address but the socket of a worker that is gone: ZMQ would quietly
    remove it.
    """
    path = address.removeprefix("ipc://")
    if path == address or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        raise OSError(0, "there is something else than a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):
            raise OSError(0, "another process listens there")


@contextmanager
def _private_files() -> Iterator[None]:
    """What is made meanwhile, by this process, is for this user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
