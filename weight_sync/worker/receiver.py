"""The worker's side of a push: one thread that takes it from begin to its end.

Owns: the transport's reading end (group, mapped memory), and the staging until somebody else takes it. Does not own:
the live weights, the commit, the socket. Promises: writes into live weights only once its source is open and it was
told to proceed; never blocks who calls it for longer than it takes to write one piece, or to merge one weight with its
adapter; publishes `Reached` for each call, or `Broken` and then nothing more; ends by itself when nothing was asked of
it for `begin.timeout` seconds (while other workers drain, for so much longer), and when closed writes nothing more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

import torch

from trueroll.errors import DeadlineError, PushError, TruerollError

from ..payload.adapted import with_adapters
from ..payload.manifest import Bucket, CollectiveSource, CudaIpcSource, DiskSource, LentSource, SharedSource
from ..payload.messages import BeginPush, PushPhase, StageBucket, VerifyPush
from ..payload.parameters import Parameters, own_dtypes, spellings_of
from ..transports.collective import NcclReader
from ..transports.cuda_ipc import CudaIpcReader
from ..transports.disk import FolderReader
from ..transports.ends import Reader
from ..transports.gloo_reader import GlooReader
from ..transports.gpu import stream_beside, wait_for_stream
from ..transports.policy import PushPolicy
from ..transports.shared import SharedReader
from .adapting import begin_adapters, merge_adapters
from .assembly import Assembly, Destination, LendableArea, StagingArea, content_of
from .events import Broken, Opened, Progress, PushEvent, Reached

log = logging.getLogger(__name__)


Call: TypeAlias = StageBucket | VerifyPush
_ReadSource: TypeAlias = CollectiveSource | SharedSource | CudaIpcSource | DiskSource


TRAINER_FIRST = 1.0
"""Seconds. A worker waits so much longer for the group to form than the trainer does: if one worker is silent, the
trainer gives up first, and its error names that worker. The others cannot tell which one it is.
"""


class _Closed(Exception):
    """The receiver was closed while it had something to do."""


class Receiver(threading.Thread):
    """Receives the push that `begin` describes, for `weights` on `device`; `publish` is called on this thread with each
    event.

    `progress` may be read at any time; `staging` once the push is verified, after which nothing more may be asked:
    whoever is to commit it takes it before `close`.
    """

    def __init__(
        self,
        begin: BeginPush,
        weights: Destination,
        publish: Callable[[PushEvent], None],
        device: str,
        policy: PushPolicy,
    ) -> None:
        super().__init__(name=f"push-{begin.push_id[:8]}", daemon=True)
        self.progress = Progress("begun", 0, time.monotonic())
        self.staging: StagingArea | None = None
        self._begin = begin
        self._weights = weights
        self._publish = publish
        self._device = torch.device(device)
        self._policy = policy
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._ahead: Call | None = None
        self._early: StageBucket | None = None
        self._patience = begin_seconds(begin)
        self._writing = threading.Lock()
        self._may_overwrite = threading.Event()
        self._is_closed = False
        self._num_buckets = 0
        self._is_verified = False

    def take(self, call: Call) -> None:
        """Do this after what was taken before; `Reached` follows."""
        self._calls.put(call)

    def proceed(self) -> None:
        """Write into the live weights from now on, as nothing reads them any more. Follows `Opened`, in place alone."""
        self._may_overwrite.set()

    def close(self) -> None:
        """End soon, and free what this holds. Waits while a piece is being written, or a weight merged, and for nothing
        else; when it returns nothing more is written. An event that is on its way may still come.
        """
        self._is_closed = True
        self._may_overwrite.set()
        with self._writing:
            self._calls.put(None)

    def run(self) -> None:
        try:
            with stream_beside(self._device):
                source = self._begin.source
                self._borrow(source) if isinstance(source, LentSource) else self._receive(source)
        except _Closed:
            pass
        except (PushError, DeadlineError) as error:
            self._break(error)
        except TruerollError as error:
            self._break(PushError(str(error)))
        except (MemoryError, torch.OutOfMemoryError):
            self._break(
                PushError("staging: expected memory for a second set of weights, found too little; push in_place")
            )
        except Exception as error:
            log.exception("a push failed")
            self._break(PushError(f"push: expected to receive it, found {type(error).__name__}: {error}; push again"))
        finally:
            self.staging = None

    def _break(self, error: PushError | DeadlineError) -> None:
        if not self._is_closed:
            self._publish(Broken(error))

    def _receive(self, source: _ReadSource) -> None:
        begin = self._begin
        wanted = self._weights if begin.adapters is None else with_adapters(self._weights, begin.adapters)
        reader = _open_source(begin, source, wanted, self._device, self._policy, lambda: self._is_closed)
        lendable: LendableArea | None = None
        try:
            lendable = self._new_lendable() if begin.lends else None
            if begin.in_place:
                self._wait_to_overwrite()
            self.staging = lendable or self._weights.new_staging(begin.in_place)
            if begin.adapters is not None:
                begin_adapters(begin.adapters, self._weights, self.staging, self._guarded)
            assembly = Assembly(wanted, self.staging, begin.base is not None, begin.reject_nonfinite)
            self._answer(begin.id, "begun")
            while not self._is_closed and (call := self._next_call()) is not None:
                if self._is_verified and isinstance(call, VerifyPush) and call.num_buckets == self._num_buckets:
                    self._answer(call.id, "verified")
                elif self._is_verified:
                    raise PushError(f"{call.type}: expected nothing more after verify_push, found it; push again")
                elif isinstance(call, StageBucket):
                    self._stage(call, reader, assembly)
                else:
                    self._verify(call.num_buckets, reader, assembly)
                    reader.close()  # before the trainer frees what it reads
                    self._answer(call.id, "verified", None if lendable is None else self._lend(lendable))
        finally:
            if lendable is not None:
                lendable.withdraw()  # who gives up must not be borrowed from
            reader.close()

    def _wait_to_overwrite(self) -> None:
        """Publish `Opened`, and wait for `proceed` or `close`."""
        self._publish(Opened())
        self._may_overwrite.wait()
        if self._is_closed:
            raise _Closed
        self.progress = replace(self.progress, started=time.monotonic())

    def _new_lendable(self) -> LendableArea:
        begin = self._begin
        is_whole = begin.base is None and begin.adapters is None
        if self._weights.kin is None or begin.in_place or not is_whole:
            raise PushError(
                "begin_push: expected lends for whole tensors beside the live ones, of a worker that has a kin, found "
                "another push; push without lends"
            )
        return self._weights.new_lendable()

    def _lend(self, staging: LendableArea) -> LentSource:
        assert self._weights.kin is not None
        pid, fd, inode, num_bytes = staging.lend()
        return LentSource(kin=self._weights.kin, pid=pid, fd=fd, inode=inode, num_bytes=num_bytes)

    def _borrow(self, source: LentSource) -> None:
        """Take what another worker has verified: that it lies where it should is all that is left to check."""
        begin = self._begin
        is_whole = begin.base is None and begin.adapters is None
        if source.kin != self._weights.kin or begin.in_place or begin.lends or not is_whole:
            raise PushError(
                "lent: expected whole weights of a worker of the same kin, beside the live ones, found another push; "
                "push without lent memory"
            )
        try:
            self.staging = self._weights.borrow((source.pid, source.fd, source.inode, source.num_bytes))
        except (OSError, OverflowError) as error:
            log.warning("weights that process %d lends: not taken, for %s", source.pid, error)
            raise PushError(
                f"lent: expected weights that process {source.pid} lends, found none; see whether that worker still "
                "runs, and push again; this worker's log says more"
            ) from None
        self._answer(begin.id, "begun")
        while not self._is_closed and (call := self._next_call()) is not None:
            if not isinstance(call, VerifyPush) or call.num_buckets or self._is_verified:
                raise PushError(f"{call.type}: expected one verify_push of no buckets for lent weights, found another")
            self._is_verified = True
            self._advance("verified", 0)
            self._answer(call.id, "verified")

    def _next_call(self) -> Call | None:
        if self._ahead is not None:
            call, self._ahead = self._ahead, None
            return call
        try:
            call = self._calls.get(timeout=self._patience)
        except queue.Empty:
            raise DeadlineError(
                f"push {self._begin.push_id}: expected the next call within {self._patience} s, found none; "
                "the trainer died or hangs, and may push again"
            ) from None
        self._patience = self._begin.timeout
        return call

    def _stage(self, call: StageBucket, reader: Reader, assembly: Assembly) -> None:
        if self._early is None and call.bucket.index == self._num_buckets + 1:
            self._early = call  # the one before it was lost with a connection, and is sent again
            return
        self._copy(call.bucket, reader, assembly)
        self._answer(call.id, "staged")
        if self._early is not None:
            early, self._early = self._early, None
            self._stage(early, reader, assembly)

    def _copy(self, bucket: Bucket, reader: Reader, assembly: Assembly) -> None:
        self._check_turn(bucket.index)
        assembly.check(bucket)
        data = reader.read(bucket)
        self._look_ahead(reader, assembly)
        self._add(bucket, data, assembly)
        self._num_buckets += 1

    def _look_ahead(self, reader: Reader, assembly: Assembly) -> None:
        """Let the next bucket come while this one is copied, if it is announced; if it is wrong, its turn tells."""
        if self._calls.empty():
            return
        self._ahead = self._calls.get()
        if isinstance(self._ahead, StageBucket) and self._ahead.bucket.index == self._num_buckets + 1:
            with suppress(PushError):
                assembly.check(self._ahead.bucket)
                reader.prepare(self._ahead.bucket)

    def _check_turn(self, index: int) -> None:
        if index != self._num_buckets:
            raise PushError(f"bucket: expected bucket {self._num_buckets}, found bucket {index}; push again")

    def _verify(self, num_buckets: int, reader: Reader, assembly: Assembly) -> None:
        if num_buckets != self._num_buckets:
            raise PushError(f"verify: expected {self._num_buckets} buckets, as arrived, found {num_buckets}")
        for bucket, read in reader.read_unannounced():
            assembly.check(bucket)  # before memory is taken for it
            self._add(bucket, read(), assembly)
        assembly.finish()
        if self._begin.adapters is not None and self.staging is not None:
            merge_adapters(self.staging, self._begin.reject_nonfinite, self._guarded)
        self._is_verified = True
        self._advance("verified", 0)

    def _add(self, bucket: Bucket, data: torch.Tensor, assembly: Assembly) -> None:
        assembly.inspect_all(bucket, data)
        for piece in bucket.pieces:
            content = content_of(piece, data)
            assembly.inspect(piece, content)
            with self._guarded():
                assembly.add(piece, content)
        self._advance("staged", bucket.num_bytes)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whoever closes this waits until what is done inside is over, on the device too."""
        with self._writing:
            if self._is_closed:
                raise _Closed
            yield
            wait_for_stream(self._device)

    def _advance(self, phase: PushPhase, num_bytes: int) -> None:
        self.progress = replace(self.progress, phase=phase, bytes_staged=self.progress.bytes_staged + num_bytes)

    def _answer(self, id: str, phase: PushPhase, lent: LentSource | None = None) -> None:
        if self._is_closed:
            raise _Closed
        self._publish(Reached(id, phase, lent))


def begin_seconds(begin: BeginPush) -> float:
    """How long the other workers may take to begin: in place they let running requests end first, if they drain."""
    return begin.timeout + (begin.drain_timeout if begin.in_place and begin.in_flight == "drain" else 0.0)


def _open_source(
    begin: BeginPush,
    source: _ReadSource,
    wanted: Parameters,
    device: torch.device,
    policy: PushPolicy,
    is_closed: Callable[[], bool],
) -> Reader:
    """Raise PushError if there is no such source, or `policy` forbids it. Waits no longer once `is_closed`."""
    match source:
        case CollectiveSource():
            policy.check_host(source.host)
            limits = begin.timeout, begin_seconds(begin) + TRAINER_FIRST
            if source.backend == "gloo":
                return GlooReader(source, begin.push_id, *limits, is_closed)
            return NcclReader(source, begin.push_id, *limits, device, is_closed)
        case SharedSource():
            return SharedReader(source)
        case CudaIpcSource():
            return CudaIpcReader(source, device)
        case DiskSource():
            told = begin.push_id, begin.weight_version, begin.dtype
            return FolderReader(source, *told, spellings_of(wanted).most, policy, own_dtypes(wanted))
