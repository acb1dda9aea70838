"""The worker's side of a push: one thread that runs the push from beginning to end.

- `CallQueue` owns the pending calls of the push.
- `Writing` owns the permission to write, which is shared by the push's thread and the thread that closes the push.
- `Intake` owns the order of the buckets.
- `Receiver`, the thread, owns the transport's reader (group, mapped memory), and owns the staging until the commit.

Does not own: where pieces are written (`assembly`), the live weights, the commit, the socket.

Guarantees:

- The receiver writes into live weights only after it has opened the push's source and `proceed` was called.
- A method call waits for the push's thread at most until one piece is written, or until one weight is merged with its
  adapter.
- The receiver publishes `Reached` for each call that succeeds. After `Broken`, the receiver publishes no more events.
- The receiver ends by itself if no call comes for `begin.timeout` seconds (plus `begin.drain_timeout` while other
  workers drain).
- A closed receiver does not write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from trueroll.errors import DeadlineError, PushError, TruerollError

from ...kernels.transfer import stream_beside, wait_for_stream
from ..deltas.chain import Served
from ..deltas.places import place_for_worker
from ..deltas.reader import ChainReader
from ..payload.adapters import check_named, with_adapters
from ..payload.manifest import (
    MOST_UNDER_WAY,
    Adapters,
    Bucket,
    ChainSource,
    CollectiveSource,
    CudaIpcSource,
    DiskSource,
    LentSource,
    Parameters,
    PeftSource,
    RelaySource,
    SharedSource,
    own_dtypes,
    spellings_of,
)
from ..payload.messages import BeginPush, PushPhase, StageBucket, VerifyPush
from ..payload.tensors import dtypes_of, raw_bytes
from ..transports.collective import NcclReader
from ..transports.cuda_ipc import CudaIpcReader
from ..transports.disk import FolderReader
from ..transports.ends import Reader
from ..transports.gloo_reader import GlooReader
from ..transports.peft_folder import PeftFolder
from ..transports.policy import PushPolicy
from ..transports.relay_reader import RelayReader
from ..transports.shared import SharedReader
from .adapters import Merging, begin_adapters
from .assembly import AdapterDestination, Assembly, Destination, LendableStagingArea, StagingArea, content_of
from .events import Broken, Opened, Progress, PushEvent, Reached

log = logging.getLogger(__name__)

Call: TypeAlias = StageBucket | VerifyPush
_ReadSource: TypeAlias = (
    CollectiveSource | RelaySource | SharedSource | CudaIpcSource | DiskSource | PeftSource | ChainSource
)


def begin_seconds(begin: BeginPush) -> float:
    """Return the time limit in seconds for the other workers to begin the push. The limit is longer if a push
    in place may first drain running requests.
    """
    return begin.timeout + (begin.drain_timeout if begin.in_place and begin.in_flight == "drain" else 0.0)


class CallQueue:
    """The calls of the push that `begin` describes. `put` may be called from any thread."""

    def __init__(self, begin: BeginPush) -> None:
        self._begin = begin
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._ahead: Call | None = None
        self._patience = begin_seconds(begin)

    def put(self, call: Call | None) -> None:
        """Add a call. `call`: None means that no more calls come."""
        self._queue.put(call)

    def next(self) -> Call | None:
        """Wait for the next call. Raise DeadlineError if no call comes before the timeout."""
        if self._ahead is not None:
            call, self._ahead = self._ahead, None
            return call
        try:
            call = self._queue.get(timeout=self._patience)
        except queue.Empty:
            raise DeadlineError(
                f"push {self._begin.push_id}: no call came within {self._patience} s; the trainer has died or "
                "hangs; push again"
            ) from None
        self._patience = self._begin.timeout
        return call

    def look_ahead(self) -> Call | None:
        """Return the call that `next` would return, or None if `next` would have to wait."""
        if self._ahead is None and not self._queue.empty():
            self._ahead = self._queue.get()
        return self._ahead


class Closed(Exception):
    """The push was closed before an operation could begin."""


class Writing:
    """Permission to write. `close` ends the permission to write. Live weights may be written only after
    `allow_overwriting`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._may_overwrite = threading.Event()
        self.is_closed = False

    def allow_overwriting(self) -> None:
        """Let `wait_to_overwrite` return."""
        self._may_overwrite.set()

    def close(self) -> None:
        """Forbid writing from now on. Waits until the current write is done."""
        self.is_closed = True
        self._may_overwrite.set()
        with self._lock:
            pass

    def check(self) -> None:
        """Raise Closed if the permission has ended."""
        if self.is_closed:
            raise Closed

    def wait_to_overwrite(self) -> None:
        """Wait for `allow_overwriting`. Raise Closed if `close` is called first."""
        self._may_overwrite.wait()
        self.check()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Delay `close` until the writes in this context are done, including work on the device. Raise Closed if
        closed.
        """
        with self._lock:
            self.check()
            yield
            wait_for_stream(self.device)


class Intake:
    """Reads buckets with `reader`, and adds the buckets' pieces to `assembly`. Each piece is written only while
    `writing` permits writes.

    `most_under_way`: limit on buckets in flight. `staged`: called with the size of each bucket that was staged.
    `num_buckets`: number of staged buckets.
    """

    def __init__(
        self,
        reader: Reader,
        assembly: Assembly,
        calls: CallQueue,
        writing: Writing,
        most_under_way: int,
        staged: Callable[[int], None],
    ) -> None:
        self.num_buckets = 0
        self._most_early = most_under_way - 1
        self._reader, self._assembly = reader, assembly
        self._calls, self._writing, self._staged = calls, writing, staged
        self._early: dict[int, StageBucket] = {}

    def stage(self, call: StageBucket) -> Iterator[str]:
        """Stage the bucket of a call. If the calls for the next buckets have come early, stage these buckets too. Yield
        the id of each finished call.

        Raise PushError if buckets come out of order.
        """
        index = call.bucket.index
        if len(self._early) < self._most_early and 0 < index - self.num_buckets <= self._most_early:
            self._early[index] = call  # the call for an earlier bucket was lost with a connection, and will come again
            return
        self._take(call.bucket)
        yield call.id
        while (early := self._early.pop(self.num_buckets, None)) is not None:
            self._take(early.bucket)
            yield early.id

    def finish(self, num_buckets: int) -> None:
        """Add the buckets that the reader yields without calls from the trainer, such as the tensors of a folder. Raise
        PushError if the push is still incomplete.

        `num_buckets`: number of buckets that the trainer has announced.
        """
        if num_buckets != self.num_buckets:
            raise PushError(f"verify_push: {num_buckets} buckets were sent, but {self.num_buckets} arrived; push again")
        for bucket, read in self._reader.read_unannounced():
            self._assembly.check(bucket)  # before memory is allocated for the bucket
            self._add(bucket, read())
        self._assembly.finish()

    def _take(self, bucket: Bucket) -> None:
        if bucket.index != self.num_buckets:
            raise PushError(f"bucket: expected bucket {self.num_buckets}, got bucket {bucket.index}; push again")
        self._assembly.check(bucket)
        data = self._reader.read(bucket)
        self._prepare_next()
        self._add(bucket, data)
        self.num_buckets += 1

    def _prepare_next(self) -> None:
        """If the next bucket is announced, fetch it while the current bucket is copied. An error of the next bucket is
        reported only when that bucket is read.
        """
        ahead = self._calls.look_ahead()
        if isinstance(ahead, StageBucket) and ahead.bucket.index == self.num_buckets + 1:
            with suppress(PushError):
                self._assembly.check(ahead.bucket)
                self._reader.prepare(ahead.bucket)

    def _add(self, bucket: Bucket, data: torch.Tensor) -> None:
        self._assembly.inspect_all(bucket, data)
        for piece in bucket.pieces:
            self._assembly.take(piece, content_of(piece, data), self._writing.guarded)
        self._staged(bucket.num_bytes)


TRAINER_FIRST = 1.0
"""Seconds that a worker waits for the group beyond the trainer's limit. If a worker is silent, the trainer gives up
first, and the trainer's error names the silent worker. The other workers cannot tell which worker is silent.
"""


class Receiver(threading.Thread):
    """Receives the push that `begin` describes, for `weights` on `device`.

    `served`: the weights that a chain of deltas may begin with; None if the worker serves no complete weights. `named`:
    where named adapters are received; None if the worker serves no named adapters. `publish`: the function that the
    receiver calls with each event, on the receiver's thread. `progress` may be read at any time. `staging` may be read
    once the push is verified. When the worker begins the commit, it uses the staging and calls `close`. From then on,
    do not call `take` again.
    """

    def __init__(
        self,
        begin: BeginPush,
        weights: Destination,
        publish: Callable[[PushEvent], None],
        device: str,
        policy: PushPolicy,
        served: Served | None = None,
        named: AdapterDestination | None = None,
    ) -> None:
        super().__init__(name=f"push-{begin.push_id[:8]}", daemon=True)
        self.progress = Progress("begun", 0, time.monotonic())
        self.staging: StagingArea | None = None
        self._begin, self._weights, self._policy, self._served = begin, weights, policy, served
        self._publish, self._named = publish, named
        self._calls = CallQueue(begin)
        self._writing = Writing(torch.device(device))

    def take(self, call: Call) -> None:
        """Append a call to the queue of calls. `Reached` is published when the call is done."""
        self._calls.put(call)

    def proceed(self) -> None:
        """Allow writes into the live weights. After a call to `proceed`, no code may read the live weights. Call
        `proceed` only for a push in place, after `Opened`.
        """
        self._writing.allow_overwriting()

    def close(self) -> None:
        """Tell the thread to end soon and to free all resources. Waits at most until the current piece or weight is
        written.

        The receiver does not write after `close` has returned. An event in flight may still arrive after `close`.
        """
        self._writing.close()
        self._calls.put(None)

    def run(self) -> None:
        try:
            with stream_beside(self._writing.device):
                source = self._begin.source
                self._borrow(source) if isinstance(source, LentSource) else self._receive(source)
        except Closed:
            pass
        except (PushError, DeadlineError) as error:
            self._break(error)
        except TruerollError as error:
            self._break(PushError(str(error)))
        except (MemoryError, torch.OutOfMemoryError):
            self._break(PushError("staging: too little memory for a second set of weights; push with in_place"))
        except Exception as error:
            log.exception("a push failed")
            self._break(PushError(f"push: receiving failed with {type(error).__name__}: {error}; push again"))
        finally:
            self.staging = None

    def _break(self, error: PushError | DeadlineError) -> None:
        if not self._writing.is_closed:
            self._publish(Broken(error))

    def _receive(self, source: _ReadSource) -> None:
        begin, writing = self._begin, self._writing
        reader, adapters, wanted = self._open(source)
        lendable: LendableStagingArea | None = None
        try:
            lendable = self._new_lendable() if begin.lends else None
            if begin.in_place:
                self._wait_to_overwrite()
            staging = self.staging = lendable or self._new_staging()
            if adapters is not None:
                begin_adapters(adapters, self._weights, staging, writing.guarded)
            assembly = Assembly(wanted, staging, begin.base is not None, begin.reject_nonfinite, begin.in_place)
            self._answer(begin.id, "begun")
            most = source.num_slots if isinstance(source, RelaySource) else MOST_UNDER_WAY
            intake = Intake(reader, assembly, self._calls, writing, most, lambda size: self._advance("staged", size))
            merging: Merging | None = None
            if adapters is not None:
                merging = Merging(adapters, staging, assembly.has_arrived, begin.reject_nonfinite, writing.guarded)
            verify = self._take_buckets(intake, merging)
            if verify is None:
                return
            intake.finish(verify.num_buckets)
            if merging is not None:
                merging.merge_rest()
            self._advance("verified", 0)
            reader.close()  # must happen before the trainer frees the source
            self._answer(verify.id, "verified", None if lendable is None else self._lend(lendable))
            self._repeat(verify)
        finally:
            if lendable is not None:
                lendable.withdraw()  # no worker may borrow from a push that is over
            reader.close()

    def _open(self, source: _ReadSource) -> tuple[Reader, Adapters | None, Parameters]:
        """Open the source. Return the source's reader, the adapters of the push, and the tensors that the push must
        contain.
        """
        begin, weights, policy, writing = self._begin, self._weights, self._policy, self._writing
        match source:
            case PeftSource():
                folder = PeftFolder(source.folder, weights, policy)
                return folder, folder.adapters, folder.wanted
            case ChainSource():
                place = place_for_worker(source.place, policy)
                told = begin.weight_version, weights, self._served, self._served_bytes, begin.push_id
                return ChainReader(place, *told), None, weights
            case _:
                wanted: Parameters = weights
                if begin.adapters is not None:
                    wanted = found = with_adapters(weights, begin.adapters)
                    if begin.adapter is not None:
                        check_named(begin.adapter, found, begin.adapters)
                reader = _open_source(begin, source, wanted, writing.device, policy, lambda: writing.is_closed)
                return reader, begin.adapters, wanted

    def _new_staging(self) -> StagingArea:
        if (name := self._begin.adapter) is None:
            return self._weights.new_staging(self._begin.in_place)
        assert self._named is not None, "`begin_push` is refused if the worker serves no named adapters"
        return self._named.new_staging(name)

    def _served_bytes(self, name: str) -> np.ndarray:
        """Return a copy of the bytes of a served parameter or part."""
        with self._writing.guarded():
            copy = self._weights.served(name).to("cpu", dtypes_of(self._weights)(name), copy=True)
        return np.asarray(raw_bytes(copy.contiguous()))

    def _take_buckets(self, intake: Intake, merging: Merging | None) -> VerifyPush | None:
        """Stage buckets until verify_push comes. Return the verify_push call, or None if the push is closed first.

        Adapters are merged after the reply to their last bucket, while the trainer fills the next bucket.
        """
        while not self._writing.is_closed and (call := self._calls.next()) is not None:
            if merging is not None:
                merging.check()
            if isinstance(call, VerifyPush):
                return call
            for id in intake.stage(call):
                self._answer(id, "staged")
            if merging is not None:
                merging.merge_arrived()
        return None

    def _repeat(self, verify: VerifyPush) -> None:
        """Reply to repeated verify_push calls until the push ends, since the first reply may have been lost."""
        while not self._writing.is_closed and (call := self._calls.next()) is not None:
            if not isinstance(call, VerifyPush) or call.num_buckets != verify.num_buckets:
                raise PushError(f"{call.type}: arrived after verify_push; push again")
            self._answer(call.id, "verified")

    def _wait_to_overwrite(self) -> None:
        """Publish `Opened`, and wait for `proceed` or `close`."""
        self._publish(Opened())
        self._writing.wait_to_overwrite()
        self.progress = replace(self.progress, started=time.monotonic())

    def _new_lendable(self) -> LendableStagingArea:
        begin = self._begin
        if self._weights.kin is None or begin.in_place or not begin.is_whole:
            raise PushError(
                "begin_push: `lends` requires whole tensors, no `in_place`, and a worker that can share memory; push "
                "without lends"
            )
        return self._weights.new_lendable()

    def _lend(self, staging: LendableStagingArea) -> LentSource:
        assert self._weights.kin is not None
        pid, fd, inode, num_bytes = staging.lend()
        place: dict[str, Any] = dict(pid=pid, fd=fd, inode=inode, num_bytes=num_bytes)
        return LentSource(kin=self._weights.kin, **place, has_optional=staging.has_optional)

    def _borrow(self, source: LentSource) -> None:
        """Map the weights that another worker has verified. This worker checks only the location of the weights,
        because the lender has verified the content of the weights.
        """
        begin = self._begin
        if source.kin != self._weights.kin or begin.in_place or begin.lends or not begin.is_whole:
            raise PushError(
                "lent: lent memory requires whole tensors, no `in_place`, no `lends`, and a lender with the same "
                "`kin`; push without lent memory"
            )
        try:
            self.staging = self._weights.borrow(
                (source.pid, source.fd, source.inode, source.num_bytes), source.has_optional
            )
        except (OSError, OverflowError) as error:
            log.warning("cannot map the weights that process %d lends: %s", source.pid, error)
            raise PushError(
                f"lent: cannot map the weights that process {source.pid} lends; check that the process still runs, "
                "and push again; the log of the worker that raised this error has the cause"
            ) from None
        self._answer(begin.id, "begun")
        if not self._writing.is_closed and (call := self._calls.next()) is not None:
            if not isinstance(call, VerifyPush) or call.num_buckets:
                raise PushError(
                    f"{call.type}: for lent weights, the next call must be verify_push with num_buckets 0; push again"
                )
            self._advance("verified", 0)
            self._answer(call.id, "verified")
            self._repeat(call)

    def _advance(self, phase: PushPhase, num_bytes: int) -> None:
        self.progress = replace(self.progress, phase=phase, bytes_staged=self.progress.bytes_staged + num_bytes)

    def _answer(self, id: str, phase: PushPhase, lent: LentSource | None = None) -> None:
        self._writing.check()
        self._publish(Reached(id, phase, lent))


def _open_source(
    begin: BeginPush,
    source: CollectiveSource | RelaySource | SharedSource | CudaIpcSource | DiskSource,
    wanted: Parameters,
    device: torch.device,
    policy: PushPolicy,
    is_closed: Callable[[], bool],
) -> Reader:
    """Open the source. Raise PushError if the source is missing, or if `policy` forbids the source. Stop waiting once
    `is_closed()`.
    """
    match source:
        case CollectiveSource():
            policy.check_host(source.host, "collective")
            limits = begin.timeout, begin_seconds(begin) + TRAINER_FIRST
            if source.backend == "gloo":
                return GlooReader(source, begin.push_id, *limits, is_closed)
            return NcclReader(source, begin.push_id, *limits, device, is_closed)
        case RelaySource():
            policy.check_host(source.host, "relay")
            return RelayReader(source, begin.timeout, policy, is_closed)
        case SharedSource():
            return SharedReader(source)
        case CudaIpcSource():
            return CudaIpcReader(source, device)
        case DiskSource():
            told = begin.push_id, begin.weight_version, begin.dtype
            return FolderReader(source, *told, spellings_of(wanted).most, policy, own_dtypes(wanted))
