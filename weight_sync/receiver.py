"""The worker's side of a push: one thread that takes it from begin to its end.

Owns: the transport's reading end (group, mapped memory), and the staging until somebody else takes it. Does not own:
the live weights, the commit, the socket. Promises: never blocks who calls it for longer than one piece takes to copy;
publishes one event for each call, or `Broken` and then nothing more; ends by itself when nothing was asked of it for
`begin.timeout` seconds, and when closed writes nothing more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch

from ..rollout import protocol
from ..rollout.errors import DeadlineError, PushError, TruerollError
from .assembly import Assembly, Destination, Staging
from .collective import GroupReader
from .disk import FolderReader
from .events import Begun, Broken, Progress, PushEvent, Staged, Verified
from .manifest import MOST_UNDER_WAY, Bucket, CollectiveSource, DiskSource, Piece, SharedSource
from .shared import SharedReader

log = logging.getLogger(__name__)


class _Reader(Protocol):
    """The end of a transport that buckets come out of."""

    def prepare(self, bucket: Bucket) -> None:
        """Begin to fetch the bucket that is read next, while the one before it is still in use."""
        ...

    def read(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes, valid until the next one is read: uint8 [at least bucket.num_bytes]."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Stage:
    bucket: Bucket
    tag: Any


@dataclass(frozen=True)
class _Verify:
    num_buckets: int
    tag: Any


_Command: TypeAlias = _Stage | _Verify | None


class _Closed(Exception):
    """The receiver was closed while it had something to do."""


class Receiver(threading.Thread):
    """Receives the push that `begin` describes, for `weights`; `publish` is called on this thread with each event.

    A call that is repeated, as after a reconnect, is answered again and done once. `progress` may be read at any time;
    `staging` after `Verified`: whoever is to commit it takes it before `close`.
    """

    def __init__(self, begin: protocol.BeginPush, weights: Destination, publish: Callable[[PushEvent], None]) -> None:
        super().__init__(name=f"push-{begin.push_id[:8]}", daemon=True)
        self.progress = Progress("begun", 0, time.monotonic())
        self.staging: Staging | None = None
        self._begin = begin
        self._weights = weights
        self._publish = publish
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._ahead: _Command = None
        self._writing = threading.Lock()
        self._is_closed = False
        self._tag: Any = None
        self._last_buckets: deque[Bucket] = deque(maxlen=MOST_UNDER_WAY)
        self._num_buckets = 0
        self._is_verified = False

    def stage(self, message: protocol.StageBucket, tag: Any) -> None:
        """Take up a bucket; `Staged` follows."""
        self._commands.put(_Stage(message.bucket, tag))

    def verify(self, message: protocol.VerifyPush, tag: Any) -> None:
        """Find out whether everything is there; `Verified` follows."""
        self._commands.put(_Verify(message.num_buckets, tag))

    def close(self) -> None:
        """End soon, and free what this holds. When it returns nothing more is written, and hardly an event comes."""
        self._is_closed = True
        with self._writing:
            self._commands.put(None)

    def run(self) -> None:
        try:
            self._receive()
        except _Closed:
            pass
        except (PushError, DeadlineError) as error:
            self._break(error)
        except TruerollError as error:
            self._break(PushError(str(error)))
        except MemoryError:
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
            self._publish(Broken(self._begin.push_id, error, self._tag))

    def _receive(self) -> None:
        begin = self._begin
        self._check_begin()
        reader = _open_source(begin)
        try:
            self.staging = self._weights.new_staging(begin.in_place)
            assembly = Assembly(self._weights, self.staging, begin.base is not None, begin.reject_nonfinite)
            self._answer(Begun(begin.push_id))
            while not self._is_closed and (command := self._next_command()) is not None:
                self._tag = command.tag
                if isinstance(command, _Stage):
                    self._stage(command, reader, assembly)
                else:
                    self._verify(command, reader, assembly)
                self._tag = None
        finally:
            reader.close()

    def _check_begin(self) -> None:
        begin, dtype = self._begin, self._weights.dtype
        if begin.dtype != dtype:
            raise PushError(f"dtype: expected {dtype}, as this worker serves, found {begin.dtype!r:.80}; push in that")
        if begin.in_place and begin.base is not None:
            raise PushError("in_place: expected every tensor whole, found a push of changed elements; push in full")

    def _next_command(self) -> _Command:
        if self._ahead is not None:
            command, self._ahead = self._ahead, None
            return command
        try:
            return self._commands.get(timeout=self._begin.timeout)
        except queue.Empty:
            raise DeadlineError(
                f"push {self._begin.push_id}: expected the next call within {self._begin.timeout} s, found none; "
                "the trainer died or hangs, and may push again"
            ) from None

    def _stage(self, command: _Stage, reader: _Reader | FolderReader, assembly: Assembly) -> None:
        bucket = command.bucket
        if bucket not in self._last_buckets:
            self._check_turn(bucket.index)
            if isinstance(reader, FolderReader):
                raise PushError("bucket: expected none in a push by disk; ask to verify")
            assembly.check(bucket)
            data = reader.read(bucket)
            self._look_ahead(reader, assembly)
            for piece in bucket.pieces:
                self._add(assembly, piece, data)
            self._last_buckets.append(bucket)
            self._num_buckets += 1
            self._advance("staged", bucket.num_bytes)
        self._answer(Staged(self._begin.push_id, command.tag))

    def _look_ahead(self, reader: _Reader, assembly: Assembly) -> None:
        """Let the next bucket come while this one is copied, if it is announced; if it is wrong, its turn tells."""
        if self._commands.empty():
            return
        self._ahead = self._commands.get()
        if isinstance(self._ahead, _Stage) and self._ahead.bucket.index == self._num_buckets + 1:
            with suppress(PushError):
                assembly.check(self._ahead.bucket)
                reader.prepare(self._ahead.bucket)

    def _check_turn(self, index: int) -> None:
        if self._is_verified or index != self._num_buckets:
            expected = "no bucket after verify" if self._is_verified else f"bucket {self._num_buckets}"
            raise PushError(f"bucket: expected {expected}, found bucket {index}; push again")

    def _verify(self, command: _Verify, reader: _Reader | FolderReader, assembly: Assembly) -> None:
        if command.num_buckets != self._num_buckets:
            raise PushError(f"verify: expected {self._num_buckets} buckets, as arrived, found {command.num_buckets}")
        if not self._is_verified and isinstance(reader, FolderReader):
            self._read_folder(reader, assembly)
        assembly.finish()
        self._is_verified = True
        self._advance("verified", 0)
        self._answer(Verified(self._begin.push_id, command.tag))

    def _read_folder(self, reader: FolderReader, assembly: Assembly) -> None:
        for bucket, data in reader.tensors():
            assembly.check(bucket)
            self._add(assembly, bucket.pieces[0], data)
            self._advance("staged", bucket.num_bytes)

    def _add(self, assembly: Assembly, piece: Piece, data: torch.Tensor) -> None:
        with self._writing:
            if self._is_closed:
                raise _Closed
            assembly.add(piece, data)

    def _advance(self, phase: protocol.PushPhase, num_bytes: int) -> None:
        self.progress = replace(self.progress, phase=phase, bytes_staged=self.progress.bytes_staged + num_bytes)

    def _answer(self, event: PushEvent) -> None:
        if self._is_closed:
            raise _Closed
        self._publish(event)


def _open_source(begin: protocol.BeginPush) -> _Reader | FolderReader:
    match begin.source:
        case CollectiveSource() as source:
            return GroupReader(source, begin.push_id, begin.timeout)
        case SharedSource() as source:
            return SharedReader(source)
        case DiskSource() as source:
            return FolderReader(source, begin.push_id, begin.weight_version, begin.dtype)
