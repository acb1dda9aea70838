"""Send buckets from one trainer to many workers, which pass the bytes on: each worker receives from one other member,
and sends to one other member. The trainer's network link carries the bytes once for all workers.

The workers form chains of at most `MOST_IN_CHAIN` workers. The trainer is the source of the first worker of each chain.
A worker forwards bytes as they arrive, before the bucket is whole. If the source of a worker is lost, the worker
continues with the member before that source in the chain, and in the end with the trainer. The trainer holds every
bucket until all workers have acknowledged the bucket, so no worker depends on another worker. See `relay_server` for
the wire format.

Owns: the trainer's listener, the buffers, the order of the workers. Does not own: the worker's end (`relay_reader`).
Guarantees: every wait has a time limit. `close` does not wait.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from trueroll.errors import PushError

from ..payload.manifest import RelaySource
from ..payload.tensors import raw_bytes
from .relay_server import Server, Store
from .sockets import listen

MOST_IN_CHAIN = 32
"""Limit on the workers in a chain. Every worker of a chain delays the bytes for the workers after it."""
NUM_SLOTS = 4
"""Number of buckets in flight. The first worker of a chain receives a bucket while the last worker stages an earlier
bucket.
"""
WELCOME = b"W"
"""The trainer's answer to a worker that joins."""
DONE = b"D"
"""A worker sends this byte before it closes its connection. A worker that ends without sending this byte counts as
lost.
"""
WATCH_SECONDS = 0.2
_SPARE_CONNECTIONS = 32


class RelaySlots:
    """The trainer's side. `host`: the address of this machine at which workers can reach the trainer.

    `slot_bytes`: size of a bucket. `lost`: called with the position of each worker that ends during the push.
    Raise ConfigError if `host` is not an address of this machine.
    """

    has_word_sums = False

    def __init__(
        self, slot_bytes: int, host: str, num_workers: int, timeout: float, lost: Callable[[int], None]
    ) -> None:
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        self._numbers: list[int | None] = [None] * NUM_SLOTS
        self._host, self._num_workers, self._lost = host, num_workers, lost
        self._token = secrets.token_bytes(16)
        self._store = Store()
        self._lock = threading.Lock()
        self._joined: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
        self._is_open = True
        most = 2 * num_workers + _SPARE_CONNECTIONS
        self._server = Server(listen(host), self._token, self._store, most, timeout, self._join)

    def source(self, position: int) -> RelaySource:
        return RelaySource(
            host=self._host,
            port=self._server.port,
            token=self._token.hex(),
            position=position,
            num_slots=len(self.slots),
        )

    def open(self) -> None:
        """Listen for the workers."""
        _start(self._server.start)

    def opened(self) -> None:
        """Tell each worker that has joined which members it may receive from, and watch the workers."""
        with self._lock:
            self._is_open = False
            # Workers of one machine are neighbours, so that each machine's link carries the bytes once.
            order = sorted(self._joined, key=lambda position: (self._joined[position][1][0], position))
            addresses = [self._joined[position][1] for position in order]
            connections = [self._joined[position][0] for position in order]
        for number, connection in enumerate(connections):
            first = number - number % MOST_IN_CHAIN
            with suppress(OSError):  # the worker is lost
                connection.sendall(packed_members(addresses[first:number][::-1]))
        # The descriptors are read here, because `close` may come before the thread runs, and a closed socket has no
        # descriptor.
        watched = {each.fileno(): (each, position) for each, position in zip(connections, order, strict=True)}
        _start(threading.Thread(target=self._watch, args=[watched], name="relay-watch", daemon=True).start)

    def send(self, slot: int, num_bytes: int) -> None:
        """Offer the bytes of the slot to the workers. The bytes are sent by other threads."""
        self._numbers[slot] = self._store.put(raw_bytes(self.slots[slot])[:num_bytes], is_filled=True)

    def wait(self, slot: int) -> None:
        """Withdraw the slot's bucket. All workers must have acknowledged the bucket before this call."""
        number, self._numbers[slot] = self._numbers[slot], None
        if number is not None:
            self._store.remove(number)

    def close(self) -> None:
        self._store.close()
        self._server.close()
        with self._lock:
            self._is_open = False
            for connection, _ in self._joined.values():
                connection.close()
            self._joined.clear()
        self.slots = []

    def _join(self, connection: socket.socket, position: int, port: int) -> bool:
        with self._lock:
            if not self._is_open or position >= self._num_workers or position in self._joined or not 0 < port < 2**16:
                return False
            self._joined[position] = connection, (connection.getpeername()[0], port)
        connection.sendall(WELCOME)
        return True

    def _watch(self, watched: dict[int, tuple[socket.socket, int]]) -> None:
        """Report each worker with a connection that ends without `DONE`. `watched`: the connection and the position of
        each worker, by the connection's descriptor.
        """
        poll = select.poll()
        for number in watched:
            poll.register(number, select.POLLIN)
        while watched and not self._store.is_closed:
            for number, _ in poll.poll(WATCH_SECONDS * 1000):
                poll.unregister(number)
                connection, position = watched.pop(number)
                if _is_lost(connection) and not self._store.is_closed:  # `close` also ends the connections
                    self._lost(position)


def packed_members(members: list[tuple[str, int]]) -> bytes:
    """Return the message that lists the addresses of the members that a worker may receive from, the best one first.
    The trainer is always the last member, and is not listed. The list is sent as JSON, after the length of the JSON
    text in 2 bytes.
    """
    text = json.dumps(members).encode()
    return len(text).to_bytes(2, "big") + text


def _is_lost(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != DONE
    except OSError:
        return True


def _start(start: Callable[[], None]) -> None:
    try:
        start()
    except RuntimeError:
        raise PushError(
            "relay: cannot start a thread, since the system's limit is reached; raise the limit (ulimit -u), and push "
            "again"
        ) from None
