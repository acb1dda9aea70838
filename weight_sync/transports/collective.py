"""Send buckets from one trainer to many workers, by broadcast in a separate process group.

The group is not the trainer's default group. Each push creates a new group, so a failed push does not affect later
pushes. Buckets in host memory use a gloo group. Buckets in GPU memory use an NCCL group, in which each member has its
own memory for buckets. The traffic is neither encrypted nor authenticated, so use a private network.

Owns: the store and its port, the group, the buffers. Does not own: the worker's end of a gloo group (`gloo_reader`).
Guarantees: each wait for a bucket ends within the timeout. If a member dies, its peers get an error at once with gloo,
and within the timeout with NCCL. `close` never waits.

A failed push may leave resources behind. The trainer may keep a thread and the group's connections until the current
broadcast times out. A worker that uses NCCL may keep a thread and connections. A worker that uses NCCL may also wait
for a bucket until the timeout, and a thread of the worker may still be joining the group. A joining thread has no time
limit. A joining thread ends when NCCL has connected the members, or when the connection to the store ends. While
`MOST_JOINING` threads are joining groups, pushes through NCCL are refused.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from trueroll.errors import PushError

from ..payload.manifest import MOST_UNDER_WAY, Bucket, CollectiveBackend, CollectiveSource
from . import gloo, nccl
from .gloo import c10d
from .sockets import listen

_JOIN_MARGIN_SECONDS = 1.0
"""Extra time that a join may take beyond its timeout to report its failure."""
_TURN_SECONDS = 0.02
MOST_JOINING = 4
_places_to_join = threading.BoundedSemaphore(MOST_JOINING)


class GroupSlots:
    """The trainer's side: rank 0 and the store. `host`: the address of this machine at which workers can reach the
    store.

    `slots`: uint8 tensors to fill. For nccl, the tensors are on a GPU. `timeout`: seconds for each bucket.
    `join_timeout`: the time limit in seconds for all workers to join. Raise ConfigError if `host` is not an address of
    this machine.
    """

    def __init__(
        self,
        backend: CollectiveBackend,
        slots: list[torch.Tensor],
        host: str,
        num_workers: int,
        push_id: str,
        timeout: float,
        join_timeout: float,
    ) -> None:
        self.slots = slots
        self.has_word_sums = backend == "nccl"
        self._backend: CollectiveBackend = backend
        self._host, self._push_id = host, push_id
        self._timeout, self._join_timeout = timedelta(seconds=timeout), timedelta(seconds=join_timeout)
        self._world_size = num_workers + 1
        listener = listen(host)
        self._port = listener.getsockname()[1]
        self._server: Any = c10d.TCPStore(
            host, self._port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._joining: Future[Any] | None = None
        self._group: Any = None
        self._works: list[Any] = [None] * len(slots)

    def source(self, position: int) -> CollectiveSource:
        return CollectiveSource(
            backend=self._backend, host=self._host, port=self._port, rank=position + 1, world_size=self._world_size
        )

    def open(self) -> None:
        """Start to join the group on a background thread, while the workers join."""
        device = self.slots[0].device
        self._joining = _begin_to_join(self.source(0), 0, self._push_id, self._join_timeout, device)

    def opened(self) -> None:
        """Wait until all members have joined."""
        assert self._joining is not None
        self._group = _finish_joining(self._joining, self._backend, self._join_timeout)

    def send(self, slot: int, num_bytes: int) -> None:
        assert self._group is not None
        with _explained():
            self._works[slot] = self._group.broadcast(self.slots[slot][:num_bytes], 0, self._timeout)

    def wait(self, slot: int) -> None:
        """Wait until the slot may be filled again."""
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            _wait(work, self._timeout)

    def close(self) -> None:
        """Release everything. Members that are still waiting to join get an error as soon as the store closes."""
        self._server = None
        if self._group is None and self._joining is not None:
            _abandon(self._joining)
        self._joining = None
        _drop(self._group, self._works, self.slots)
        self._group, self._works, self.slots = None, [], []


class NcclReader:
    """The worker's side with NCCL: joins the group and receives the buckets.

    `timeout`: seconds for each bucket. `device`: the GPU of the weights and of the buckets. Raise PushError if the join
    fails or takes more than `join_timeout` seconds, or once `is_closed` returns True.
    """

    def __init__(
        self,
        source: CollectiveSource,
        push_id: str,
        timeout: float,
        join_timeout: float,
        device: torch.device,
        is_closed: Callable[[], bool],
    ) -> None:
        self._timeout, limit = timedelta(seconds=timeout), timedelta(seconds=join_timeout)
        nccl.check_available(device)
        joining = _begin_to_join_as_worker(source, push_id, limit, device)
        self._group: Any = _finish_joining(joining, "nccl", limit, is_closed)
        self._device = device
        self._buffers = [self._new_buffer(0) for _ in range(MOST_UNDER_WAY)]
        self._works: dict[int, Any] = {}

    def prepare(self, bucket: Bucket) -> None:
        side, size = bucket.index % len(self._buffers), bucket.num_bytes
        if len(self._buffers[side]) < size:
            self._buffers[side] = self._new_buffer(size)
        if size:
            with _explained():
                self._works[bucket.index] = self._group.broadcast(self._buffers[side][:size], 0, self._timeout)

    def read(self, bucket: Bucket) -> torch.Tensor:
        if bucket.num_bytes:
            if bucket.index not in self._works:
                self.prepare(bucket)
            _wait(self._works.pop(bucket.index), self._timeout)
        return self._buffers[bucket.index % len(self._buffers)]

    def read_unannounced(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        _drop(self._group, self._works, self._buffers)
        self._group, self._works, self._buffers = None, {}, []

    def _new_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def _begin_to_join_as_worker(
    source: CollectiveSource, push_id: str, timeout: timedelta, device: torch.device
) -> Future[Any]:
    if not _places_to_join.acquire(blocking=False):
        raise PushError(
            f"collective: {MOST_JOINING} pushes through NCCL are stuck while they join their groups (limit "
            f"{MOST_JOINING}); end their trainers, or restart the worker"
        )
    try:
        joining = _begin_to_join(source, source.rank, push_id, timeout, device)
    except BaseException:
        _places_to_join.release()
        raise
    joining.add_done_callback(lambda _: _places_to_join.release())
    return joining


def _begin_to_join(
    source: CollectiveSource, rank: int, push_id: str, timeout: timedelta, device: torch.device
) -> Future[Any]:
    """Join on a separate thread, since the store's client may exceed any timeout if the store stops answering."""
    joining: Future[Any] = Future()

    def run() -> None:
        try:
            joining.set_result(_new_group(source, rank, push_id, timeout, device))
        except Exception as error:
            joining.set_exception(error)

    _start_thread(threading.Thread(target=run, name="group-join", daemon=True))
    return joining


def _start_thread(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        raise PushError(
            "collective: cannot start a thread, since the system's limit is reached; raise the limit (ulimit -u), and "
            "push again"
        ) from None


def _finish_joining(
    joining: Future[Any],
    backend: CollectiveBackend,
    timeout: timedelta,
    is_closed: Callable[[], bool] = lambda: False,
) -> Any:
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds + _JOIN_MARGIN_SECONDS
    while not is_closed() and (left := deadline - time.monotonic()) > 0:
        with suppress(TimeoutError):
            return joining.result(min(_TURN_SECONDS, left))
    _abandon(joining)
    raise PushError(
        f"collective: NCCL did not connect the members within {seconds:g} s; check NCCL_SOCKET_IFNAME and firewalls, "
        "or push by shared or disk"
        if backend == "nccl"
        else "collective: the trainer's store did not answer; push again"
    )


def _abandon(joining: Future[Any]) -> None:
    """Release the group if the join succeeds later."""
    joining.add_done_callback(lambda done: None if done.exception() else _drop(done.result()))


def _new_group(source: CollectiveSource, rank: int, push_id: str, timeout: timedelta, device: torch.device) -> Any:
    place = source.host, source.port
    try:
        store = gloo.connect(*place, push_id, timeout)
        if source.backend == "nccl":
            return nccl.new_group(store, rank, source.world_size, timeout, device)
        return gloo.new_group(store, *place, rank, source.world_size, timeout)
    except RuntimeError as error:
        raise PushError(
            f"collective: cannot join the group of push {push_id} with {source.world_size} members at "
            f"{source.host}:{source.port}: {_reason(error)}; push again"
        ) from None


def _wait(work: Any, timeout: timedelta) -> None:
    """Wait for a transfer. The timeout makes NCCL block the caller; without a timeout, only the GPU would wait."""
    with _explained():
        work.wait(timeout)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PushError(f"collective: the transfer of a bucket failed: {_reason(error)}; push again") from None


def _drop(group: Any, *held: object) -> None:
    """Release a group on a new thread, since the release waits until current operations end or time out.

    `held`: operations and their memory, which a GPU may use until NCCL has aborted the operations.
    """
    if group is not None:
        groups, others = [group], [*held]
        del group
        threading.Thread(target=_end, args=[groups, others], name="group-end", daemon=True).start()


def _end(groups: list[Any], others: list[object]) -> None:
    try:
        nccl.abort(groups[0])
    finally:
        others.clear()
        groups.clear()


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text, and the cause that NCCL reports in a later line."""
    last = re.search(r"^Last error:\s?(.+)", str(error), re.MULTILINE)
    return f"{gloo.reason(error)} (Last error: {last[1]})" if last else gloo.reason(error)
