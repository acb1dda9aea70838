"""Buckets by broadcast in a process group of their own, from one trainer to many workers.

The group stands beside the trainer's default group and is made anew for each push, so that whatever broke an earlier
one is gone. Traffic is not encrypted and not authenticated: use it on a private network. Owns: the store and its port,
the group, the buffers. Promises: each wait ends within the timeout; where a peer dies its peers learn it at once, and
`close` never waits.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from ..rollout.errors import ConfigError, PushError
from .manifest import MOST_UNDER_WAY, Bucket, CollectiveSource

_BACKLOG = 512
_JOIN_MARGIN_SECONDS = 1.0
"""How much longer than its timeout a join may take to say that it failed."""
c10d: Any = torch.distributed  # its stores and groups are documented, but not in its list of exports


class GroupSlots:
    """The trainer's side: rank 0, and the store at `host`, an address of this machine that the workers can reach.

    `slots`: uint8 tensors to fill. `timeout`: seconds for each bucket, `join_timeout`: until all workers have joined.
    Raise ConfigError if nothing can listen at `host`.
    """

    def __init__(
        self,
        slots: list[torch.Tensor],
        host: str,
        num_workers: int,
        push_id: str,
        timeout: float,
        join_timeout: float,
    ) -> None:
        self.slots = slots
        self._host, self._push_id = host, push_id
        self._timeout, self._join_timeout = timedelta(seconds=timeout), timedelta(seconds=join_timeout)
        self._world_size = num_workers + 1
        listener = _listen(host)
        self._port = listener.getsockname()[1]
        self._server: Any = c10d.TCPStore(
            host, self._port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._group: Any = None
        self._works: list[Any] = [None] * len(slots)

    def source(self, position: int) -> CollectiveSource:
        return CollectiveSource(host=self._host, port=self._port, rank=position + 1, world_size=self._world_size)

    def open(self) -> None:
        """Begin to join the group, while the workers do."""
        self._joining = _begin_to_join(self.source(0), 0, self._push_id, self._join_timeout)

    def opened(self) -> None:
        """Wait until everybody has joined."""
        self._group = _finish_joining(self._joining, self._join_timeout)

    def send(self, slot: int, num_bytes: int) -> None:
        assert self._group is not None
        self._works[slot] = self._group.broadcast(self.slots[slot][:num_bytes], 0, self._timeout)

    def wait(self, slot: int) -> None:
        """Wait until the slot may be filled anew."""
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            _wait(work)

    def close(self) -> None:
        """Let go of everything. Without the store, whoever still waits to join gets an error at once."""
        self._server = None
        _drop(self._group)
        self._group = None


class GroupReader:
    """The worker's side: joins the group. Raise PushError if that fails within `join_timeout` seconds.

    `timeout`: seconds for each bucket.
    """

    def __init__(self, source: CollectiveSource, push_id: str, timeout: float, join_timeout: float) -> None:
        self._timeout, limit = timedelta(seconds=timeout), timedelta(seconds=join_timeout)
        self._group = _finish_joining(_begin_to_join(source, source.rank, push_id, limit), limit)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(MOST_UNDER_WAY)]
        self._works: dict[int, Any] = {}

    def prepare(self, bucket: Bucket) -> None:
        side, size = bucket.index % len(self._buffers), bucket.num_bytes
        if len(self._buffers[side]) < size:
            self._buffers[side] = torch.empty(size, dtype=torch.uint8)
        if size:
            self._works[bucket.index] = self._group.broadcast(self._buffers[side][:size], 0, self._timeout)

    def read(self, bucket: Bucket) -> torch.Tensor:
        if bucket.num_bytes:
            if bucket.index not in self._works:
                self.prepare(bucket)
            _wait(self._works.pop(bucket.index))
        return self._buffers[bucket.index % len(self._buffers)]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._works.clear()
        _drop(self._group)
        del self._group


def _listen(host: str) -> socket.socket:
    """A socket bound to `host` alone: left to itself, the store listens on every address."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"host: expected an address of this machine, found {host!r}: {error.strerror}; correct it"
        ) from None
    return listener


def _begin_to_join(source: CollectiveSource, rank: int, push_id: str, timeout: timedelta) -> Future[Any]:
    """Joins on a thread of its own: where a store falls silent, its client may wait beyond every timeout."""
    joining: Future[Any] = Future()

    def run() -> None:
        try:
            joining.set_result(_new_group(source, rank, push_id, timeout))
        except Exception as error:
            joining.set_exception(error)

    threading.Thread(target=run, name="group-join", daemon=True).start()
    return joining


def _finish_joining(joining: Future[Any], timeout: timedelta) -> Any:
    try:
        return joining.result(timeout.total_seconds() + _JOIN_MARGIN_SECONDS)
    except TimeoutError:
        raise PushError("collective: expected the store of the trainer to answer, found silence; push again") from None


def _new_group(source: CollectiveSource, rank: int, push_id: str, timeout: timedelta) -> Any:
    gloo = c10d.ProcessGroupGloo
    try:
        store = c10d.TCPStore(source.host, source.port, None, False, timeout, wait_for_workers=False)
        options = gloo._Options()  # the one way to say which address gloo listens on
        options._devices = [gloo.create_device(hostname=_own_address(source.host, source.port))]
        options._timeout = timeout
        return gloo(c10d.PrefixStore(push_id, store), rank, source.world_size, options)
    except RuntimeError as error:
        raise PushError(
            f"collective: expected the store at {source.host}:{source.port}, and {source.world_size} members in the "
            f"group of push {push_id}, found {_first_line(error)}; push again"
        ) from None


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PushError(f"collective: expected a bucket to pass, found {_first_line(error)}; push again") from None


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached. Sends nothing."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _drop(group: Any) -> None:
    """Let go of a group. Its end waits for what is under way, at most its timeout, and takes a while in any case."""
    if group is not None:
        references = [group]
        del group
        threading.Thread(target=references.clear, name="group-end", daemon=True).start()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
