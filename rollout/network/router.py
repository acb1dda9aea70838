"""The worker's ROUTER socket: bound where the settings say, to clients who may come in, within limits.

Owns: the socket, the private folder made for it if any, the check of keys, the gate, and the replies that wait for
clients that do not read. Does not own what messages mean. Promises: `receive` says of each message who sent it; what
bytes, connections and slow readers take is bounded; `close` leaves nothing behind.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from trueroll.errors import ConfigError

from ..config import WorkerConfig
from .gate import Gate
from .keys import OWNER, Client, ServerKeys, serve_curve, server_keys
from .outboxes import Outboxes

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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """Who sent a message: its connection, by the identity to reply to, and the client behind it. `is_gone`: the
    connection has ended, and another one may get the identity; see `gate`.
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
