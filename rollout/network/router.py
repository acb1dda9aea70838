"""The worker's ROUTER socket: listens at the configured address, authenticates clients and enforces limits.

Owns: the socket, the private folder of an ipc socket, the check of keys, the limit on connections (`Gate`), and the
replies that are queued for slow clients (`Outboxes`). Does not own: the content of messages.

Guarantees: `receive` returns the authenticated sender of each message. The memory for received bytes, for connections
and for replies to slow clients is bounded. `close` releases all resources.
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
"""Maximum number of connections that have not sent a complete message. Each of these connections may hold a partial
message, up to the maximum length.
"""
MAX_AHEAD_BYTES = 2**26
"""Maximum number of bytes that a client may send on a TCP connection beyond the messages that the worker has received.
"""
LOOK_SECONDS = 0.5
"""Interval between checks of TCP connections."""
_MESSAGE_BYTES = 42
"""Bytes that CURVE and ZMTP add to a message (RFC 26 and 23 of ZMQ): `MESSAGE`, nonce, authenticator, flags, header."""
_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received`, 8 bytes, in Linux's `struct tcp_info`."""


log = logging.getLogger(__name__)


class Gate:
    """Limits the connections of a ROUTER socket and reports when connections end.

    Create the gate before the socket is bound, so that the gate sees every connection. When a connection that was
    passed to `heard` ends, the gate calls `on_gone` with the identity of the connection. If `heard` later gets a queued
    message of the ended connection, the gate calls `on_gone` again.

    Owns a monitor of the ROUTER socket. Guarantees:

    - There are at most `max_connections` connections. At most `MAX_SILENT` connections are silent: they have not sent a
      message yet. If a limit is exceeded, the oldest silent connection is closed. So a peer that opens connections
      without authentication cannot exhaust the file descriptors of the process, and cannot lock out other clients.
    - If a client has sent more than `MAX_AHEAD_BYTES` bytes that are not part of a received message, its TCP connection
      is closed within about `LOOK_SECONDS`. A connection exceeds `MAX_AHEAD_BYTES` if its client sends faster than the
      worker receives, or sends an endless message.

    ZMQ provides incomplete information about connections. With each message, ZMQ reports the file descriptor of the
    connection and, if keys are used, the number of the connection. The authenticator gives each new connection a larger
    number than all earlier connections. When a connection begins or ends, ZMQ's monitor reports only the descriptor.
    The monitor reports a new connection before the connection's first message can be received. The monitor reports an
    ended connection before the connection's descriptor is reused. But messages of an ended connection may stay queued
    for a long time. Queued messages of an ended connection arrive interleaved with messages of other connections,
    possibly after the descriptor was reused. Of two connections with the same descriptor, the connection with the
    larger number is newer. Of all connections with the same descriptor, only the newest can be open. Hence:

    - `heard` never returns False for an open connection.
    - `heard` may return True for an ended connection. If `heard` already got a message of the ended connection, `heard`
      may return True until `follow` learns that the connection has ended and calls `on_gone`. If `heard` never got a
      message of the ended connection, `heard` may return True while a newer connection with the same descriptor is open
      and silent. `on_gone` is then called for the ended connection as soon as `heard` gets a message of the newer
      connection, or the newer connection ends.
    - Connections without keys have no numbers. So if `heard` got messages of several connections without keys on one
      descriptor, the gate treats all these connections as open until the last one ends.
    """

    def __init__(self, router: zmq.Socket[bytes], max_connections: int, on_gone: Callable[[bytes], None]) -> None:
        self._router = router
        self._max_connections = max_connections
        self._on_gone = on_gone
        self._heard: dict[int, set[bytes]] = {}
        self._newest: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # received bytes of all connections, oldest connection first
        self._looked = time.monotonic()
        self._monitor: Any = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    @property
    def monitor(self) -> Any:
        """The socket to poll. Call `follow` when the monitor's socket is readable."""
        return self._monitor

    def follow(self) -> None:
        """Process new and ended connections, and close silent connections if there are too many."""
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
        """Seconds until `look` is due; infinity if there is no TCP connection."""
        if not self._taken or not self._router.get_string(zmq.LAST_ENDPOINT).startswith("tcp:"):
            return float("inf")
        return max(0.0, self._looked + LOOK_SECONDS - time.monotonic())

    def look(self) -> None:
        """Close the TCP connection of each client that has sent more than `MAX_AHEAD_BYTES` bytes that are not part of
        a received message.
        """
        self._looked = time.monotonic()
        for fd, taken in list(self._taken.items()):
            with suppress(OSError), _socket_at(fd) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
                if received - taken > MAX_AHEAD_BYTES:
                    log.warning(
                        "disconnected a client: %d of its bytes are not part of a received message", received - taken
                    )
                    self._end(fd)

    def heard(self, fd: int, identity: bytes, number: int | None, num_bytes: int) -> bool:
        """Record a message of `num_bytes` from the connection with this identity and number.

        Return whether the connection is still open. The docstring of `Gate` says when the result may be wrong.
        """
        if identity not in self._heard.get(fd, ()) or not identity.startswith(b"\0"):
            self.follow()  # the connection may be new, may have ended, or may have chosen this identity
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
            self._lose(fd)  # older connections with this descriptor have ended
            self._newest[fd], self._taken[fd] = number, 0
        return number > newest

    def close(self) -> None:
        """Stop the monitor. Call this method before closing the socket."""
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
        """Shut down a connection. `follow` removes the connection once the monitor reports the connection's end."""
        # The descriptor may belong to another file by now. Only a connection of this socket is shut down.
        with suppress(OSError), _socket_at(fd) as connection:
            if _is_at(connection.getsockname(), self._router.get_string(zmq.LAST_ENDPOINT)):
                connection.shutdown(socket.SHUT_RDWR)


def _socket_at(fd: int) -> socket.socket:
    """Return a duplicate of the socket with descriptor `fd`. Raise OSError if `fd` is closed or not a socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_at(name: Any, endpoint: str) -> bool:
    return endpoint == f"ipc://{name}" if isinstance(name, str) else endpoint.endswith(f":{name[1]}")


FINISH_SECONDS = 0.001
"""Interval between attempts to send in `Outboxes.finish`."""
FRAME_BYTES = 100
"""Memory of a frame in addition to its content."""


@dataclass
class _Box:
    """Queued replies to one client. `is_dropped`: whether the client was dropped. The replies to a dropped client were
    discarded, and only an error that reports the loss is queued.
    """

    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    is_dropped: bool = False


class Outboxes:
    """Sends replies through `router`, and queues replies that the socket does not accept yet.

    `on_lost`: called by `report_lost` with the identity of each client that has disconnected or was dropped. `send`
    does not call `on_lost`, because the caller of `send` may be processing a request that `on_lost` would end.
    `user_of`: returns the user of a connection.

    Owns: the queued replies. Guarantees: each client gets its replies in order, and the queued replies of all clients
    stay within `max_bytes`.

    If the queued replies exceed `max_bytes`, a connection is dropped: of all connections of the user with the most
    queued bytes, the connection with the most queued bytes. The replies to a dropped connection are discarded, and its
    messages are ignored. Messages of a dropped connection are accepted again once the client has read an error reply
    without an id. An error reply without an id ends all calls of the client.
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
        self._lost: dict[bytes, None] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Return True if there is nothing to send and no lost client to report."""
        return not self._boxes and not self._lost

    def takes(self, identity: bytes) -> bool:
        """Return True if no replies are queued for this client."""
        return identity not in self._boxes

    def is_dropped(self, identity: bytes) -> bool:
        """Return whether this client was dropped. Messages of a dropped client must be ignored."""
        box = self._boxes.get(identity)
        return box is not None and box.is_dropped

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame now, or queue the frame until the client reads. Return False if the client has disconnected or
        was dropped.
        """
        box = self._boxes.get(identity)
        if box is None:
            if (was_sent := self._try(identity, frame)) is not None:
                if not was_sent:
                    self._lost[identity] = None
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
        """Find the user with the most queued bytes, and return the identity of this user's connection with the most
        queued bytes.
        """
        totals: Counter[object] = Counter()
        for identity, box in self._boxes.items():
            totals[self._user_of(identity)] += box.num_bytes
        return max(self._boxes, key=lambda each: (totals[self._user_of(each)], self._boxes[each].num_bytes))

    def flush(self) -> None:
        """Send the queued replies that the socket accepts now."""
        for identity, box in list(self._boxes.items()):
            was_sent: bool | None = True
            while box.frames and was_sent:
                if was_sent := self._try(identity, box.frames[0]):
                    self._take(box)
            if was_sent is False:
                self._lost[identity] = None
            if was_sent is False or not box.frames:
                self.forget(identity)

    def report_lost(self) -> None:
        """Call `on_lost` for each client that was lost since the last call. `on_lost` may end requests and send
        replies.
        """
        while self._lost:
            identity, _ = self._lost.popitem()
            self._on_lost(identity)

    def forget(self, identity: bytes) -> None:
        """Discard the queued replies to a client that has disconnected."""
        if (box := self._boxes.pop(identity, None)) is not None:
            self._empty(box)

    def finish(self, seconds: float) -> None:
        """For at most `seconds`, keep sending queued replies to the clients that read them."""
        deadline = time.monotonic() + seconds
        while self._num_bytes and time.monotonic() < deadline:
            self.flush()
            time.sleep(FINISH_SECONDS)

    def _try(self, identity: bytes, frame: bytes) -> bool | None:
        """Return True if the frame was sent, False if the client has disconnected, and None if the socket cannot accept
        the frame yet.
        """
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
            f"connection: replies were dropped, because the client left {box.num_bytes} bytes unread and all clients "
            "together exceeded max_unread_bytes; read replies, and send the requests again: results are kept"
        )
        self._empty(box)
        box.is_dropped = True
        box.frames.append(protocol.encode(protocol.error_message(None, error)))
        self._lost[identity] = None

    def _put(self, box: _Box, frame: bytes) -> None:
        box.frames.append(frame)
        box.num_bytes += len(frame) + FRAME_BYTES
        self._num_bytes += len(frame) + FRAME_BYTES

    def _take(self, box: _Box) -> None:
        frame = box.frames.popleft()
        if not box.is_dropped:  # the error of a dropped client is not counted, so that dropping always frees bytes
            box.num_bytes -= len(frame) + FRAME_BYTES
            self._num_bytes -= len(frame) + FRAME_BYTES

    def _empty(self, box: _Box) -> None:
        self._num_bytes -= box.num_bytes
        box.frames.clear()
        box.num_bytes = 0


OVERSIZE_FACTOR = 2
"""ZMQ closes a connection that sends a message larger than this factor times `max_message_bytes`. Smaller messages that
exceed `max_message_bytes` are answered with an error.
"""
HANDSHAKE_MS = 5000
SEND_HWM = 128
KEEPALIVE_SECONDS = 30
LINGER_SECONDS = 2.0
FLUSH_MS = 2
"""Interval between attempts to send queued replies."""
DOMAIN = "trueroll"


@dataclass(frozen=True)
class Peer:
    """The sender of a message.

    - `identity`: identity of the connection, to which replies are addressed
    - `client`: the authenticated client
    - `is_gone`: the connection has ended, so another connection may get its identity; see `Gate`
    """

    identity: bytes
    client: Client
    is_gone: bool = False


class Router:
    """A bound ROUTER socket. The constructor binds the socket.

    `address`: the address at which the socket listens. `on_lost`: called with each identity that can get no more
    replies. Raise ConfigError if the socket cannot listen at the configured address, or if the keys cannot be read.
    """

    def __init__(self, config: WorkerConfig, on_lost: Callable[[bytes], None]) -> None:
        self._keys = server_keys(config)
        self._resources = ExitStack()  # resources are closed in reverse order
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
        """Register the sockets with `poller`, so that the poller wakes up when `receive` or `maintain` has work."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gate.monitor, zmq.POLLIN)

    @property
    def poll_ms(self) -> float:
        """Milliseconds until `maintain` must be called; infinity if no work is scheduled."""
        to_look = 1000 * self._gate.seconds_to_look
        return to_look if self._outboxes.is_empty else min(FLUSH_MS, to_look)

    def maintain(self) -> None:
        """Process new and ended connections, close connections beyond the limits, send queued replies, and report lost
        clients.
        """
        self._gate.follow()
        if self._gate.seconds_to_look == 0.0:
            self._gate.look()
        self._outboxes.flush()
        self._outboxes.report_lost()

    def _user_of(self, identity: bytes) -> object:
        """Return the user of a connection. Without named clients, each connection is its own user."""
        return self._users.get(identity, identity)

    def _leave(self, identity: bytes) -> None:
        self._users.pop(identity, None)
        self._outboxes.forget(identity)
        self._on_lost(identity)

    def receive(self) -> tuple[Peer, list[bytes]] | None:
        """Return the sender and the frames of the next message, or None if there is no message now.

        If the message must be ignored, the list of frames is empty.
        """
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
        """Return the sender of a message and, if there are keys, the number of the sender's connection."""
        if self._keys is None:
            return OWNER, None
        key, number = str(frame.get("User-Id")).split()
        return self._keys.clients[key], int(number)

    def takes(self, identity: bytes) -> bool:
        """Return True if no replies are queued for this client."""
        return self._outboxes.takes(identity)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame to a client. Return False if the client has disconnected, or was dropped because it does not
        read its replies.
        """
        return self._outboxes.send(identity, frame)

    def close(self) -> None:
        """Stop listening. Wait up to `LINGER_SECONDS` until clients have received their replies."""
        self._outboxes.finish(LINGER_SECONDS)
        self._gate.close()
        self._socket.close(linger=int(1000 * LINGER_SECONDS))
        self._resources.close()


def _ends(frames: list[zmq.Frame]) -> list[bytes]:
    """Return a message's frames. The first and the last frame of the message are copied. All frames between the first
    and the last are replaced with empty bytes, because a message of more than one frame is invalid and may have many
    frames.
    """
    return [frame.bytes if index in (0, len(frames) - 1) else b"" for index, frame in enumerate(frames)]


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """Return the descriptor of the connection that a frame came from; None if the peer uses ZMTP 1 or 2, which do not
    support keys.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _most_connections(wanted: int) -> int:
    """Return the maximum number of connections: the smaller of `wanted` and half of the limit on descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft // 2:
        return wanted
    log.warning(
        "max_connections: using %d instead of %d, because this process may open only %d descriptors",
        soft // 2,
        wanted,
        soft,
    )
    return soft // 2


def _set_options(router: zmq.Socket[bytes], config: WorkerConfig, address: str, keys: ServerKeys | None) -> None:
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.MAXMSGSIZE, OVERSIZE_FACTOR * config.max_message_bytes)
    router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # libzmq 4.3.5 aborts the process if a heartbeat of either side is due on a broken connection. A connection is
    # broken if it ended with a full receive queue, or if another connection took over its identity (ROUTER_HANDOVER).
    # So receive queues are unbounded, and the worker sends no heartbeats. TCP keepalive detects dead hosts.
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
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # admit clients only if the authenticator answers


class _KnownKeys:
    """The authenticator's credentials provider, which admits the keys of known clients."""

    def __init__(self, keys: ServerKeys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in self._keys.clients


class _Authenticator(ThreadAuthenticator):
    """An authenticator that sets the `User-Id` of a message to the client's public key and the connection's number."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self._numbers = count()

    def curve_user_id(self, client_public_key: bytes) -> str:
        return f"{super().curve_user_id(client_public_key)} {next(self._numbers)}"


def _authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> ThreadAuthenticator:
    """Start an authenticator that admits only clients with a public key in `keys.clients`."""
    authenticator = _Authenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, credentials_provider=_KnownKeys(keys))
    return authenticator


def _check_ipc_is_free(address: str) -> None:
    """Raise OSError if the path of an ipc address exists and is not a socket that a dead worker left behind. Without
    this check, ZMQ would silently remove any file at the path.
    """
    path = address.removeprefix("ipc://")
    if path == address or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        raise OSError(0, "the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):
            raise OSError(0, "another process already listens there")


@contextmanager
def _private_files() -> Iterator[None]:
    """Context manager in which new files of this process are accessible to this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
