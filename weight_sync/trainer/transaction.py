"""The transaction of a push with its workers: begin, buckets, verify, commit; or abort.

Owns the order of the phases, and the report of a failure: which worker failed, why, and what each worker serves now.
Does not own the content of the buckets, or their transport. Guarantees: no worker commits before every worker that was
not lost has verified. If a push fails before the commit, it is aborted at every worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trueroll.errors import (
    OtherBaseError,
    PushError,
    TruerollError,
    UnavailableError,
    VersionGapError,
    WorkerLostError,
)

from ...engine.request import InFlight, new_id
from ..payload.manifest import Adapters, Bucket, LentSource, Source
from ..payload.messages import AbortPush, BeginPush, CommitPush, PushStatus, StageBucket, VerifyPush
from .targets import OF_LOST_WORKERS, Lost, PushTargets, WorkerFailure

ABORT_SECONDS = 5.0
"""Maximum time for workers to answer an abort, in seconds."""
SHARE_TO_LOSE = 0.75
"""If a push can continue without lost workers, a worker that does not answer within this share of the timeout is lost.
The share is less than 1, because the other workers wait for their next call only until the timeout.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushSettings:
    """The settings of a publisher's pushes; see `WeightPublisher`."""

    timeout: float
    in_flight: InFlight
    in_place: bool
    reject_nonfinite: bool
    drain_timeout: float

    @property
    def begin_timeout(self) -> float:
        """Time limit in seconds for a worker to begin the push. The limit is longer if a push in place may first drain
        running requests.
        """
        return self.commit_timeout if self.in_place else self.timeout

    @property
    def commit_timeout(self) -> float:
        """Time limit in seconds for a worker to commit the push."""
        return self.timeout + (self.drain_timeout if self.in_flight == "drain" else 0.0)


class Transaction:
    """A push of version `version` to `workers`.

    `adapter`: the name of the adapter that is pushed; None for the base weights. `allow_older`: push even if `version`
    is not later than the version of a worker. `borrowers`: maps the position of each borrower to the position of its
    lender. A borrower gets no buckets; it maps the lender's memory once the lender has verified. `are_independent`:
    whether the transport still reaches the other workers after one worker is lost. If workers may be lost, the push
    then continues without a lost worker. `seconds`: duration of each phase.
    """

    def __init__(
        self,
        workers: PushTargets,
        settings: PushSettings,
        version: int,
        allow_older: bool,
        push_id: str | None = None,
        borrowers: Mapping[int, int] | None = None,
        are_independent: bool = False,
        adapter: str | None = None,
    ) -> None:
        self._adapter = adapter
        self.push_id = push_id or new_id()
        self.version = version
        self.allow_older = allow_older
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._workers = workers
        self._borrowers = dict(borrowers or {})
        self._receiving = [i for i in range(len(workers.addresses)) if i not in self._borrowers]
        self._receivers = workers.at(self._receiving)
        self._lost: Lost | None = {} if are_independent and workers.may_lose_workers and not borrowers else None
        self._settings = settings
        self._num_buckets = 0
        self._dtype = ""

    @property
    def num_receivers(self) -> int:
        """Number of workers that get the buckets."""
        return len(self._receiving)

    @property
    def left_out(self) -> list[str]:
        """The addresses of the workers that were lost during the push."""
        return [*(self._lost or ())]

    def lose(self, receiver: int) -> None:
        """Continue without a worker, if possible. Thread-safe. `receiver`: the worker's index among
        the workers that get buckets.
        """
        if self._lost is not None:
            address = self._receivers.addresses[receiver]
            self._lost.setdefault(address, WorkerLostError("worker: its process or its network connection has ended"))

    @property
    def total_seconds(self) -> float:
        """Seconds since the transaction was created."""
        return time.perf_counter() - self._start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase. If the phase fails, abort the push and raise PushError."""
        start = time.perf_counter()
        try:
            yield
        except WorkerFailure as failure:
            raise self._abort(failure) from None
        except TruerollError as error:
            now = self._describe(self._abort_everywhere())
            raise PushError(f"push of version {self.version}: {error}. Now {now}") from None
        except BaseException:
            self._abort_everywhere()
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def begin(
        self,
        dtype: str,
        source: Callable[[int], Source],
        base: str | None = None,
        adapters: Adapters | None = None,
    ) -> Future[list[PushStatus]]:
        """Announce the push to the workers that get buckets.

        `source`: a function that takes a worker's index among the workers that get buckets, and returns the worker's
        source. `base`, `adapters`: see `BeginPush`.
        """
        self._dtype, lenders = dtype, set(self._borrowers.values())
        calls = [self._begin(dtype, source(i), base, adapters, at in lenders) for i, at in enumerate(self._receiving)]
        return self._receivers.ask("begin", calls, self._settings.begin_timeout, self._lost)

    def _begin(self, dtype: str, source: Source, base: str | None, adapters: Adapters | None, lends: bool) -> BeginPush:
        settings = self._settings
        return BeginPush(
            id=new_id(),
            push_id=self.push_id,
            weight_version=self.version,
            base=base,
            adapters=adapters,
            adapter=self._adapter,
            allow_older=self.allow_older,
            dtype=dtype,
            source=source,
            in_place=settings.in_place,
            in_flight=settings.in_flight,
            drain_timeout=settings.drain_timeout,
            reject_nonfinite=settings.reject_nonfinite,
            lends=lends,
            timeout=settings.timeout,
        )

    def stage(self, bucket: Bucket) -> Future[list[PushStatus]]:
        """Announce a bucket. The future completes when every worker has copied the bucket."""
        self._num_buckets += 1
        call = StageBucket(id=new_id(), push_id=self.push_id, bucket=bucket)
        return self._receivers.ask(f"stage bucket {bucket.index}", call, self._patience, self._lost)

    def verify(self) -> None:
        """Let every worker verify the push: first the workers that get buckets, then the workers that map memory."""
        with self.phase("verify"):
            replies = self._verify(self._receivers, self._num_buckets)
            if self._borrowers:
                self._lend({at: reply.lent for at, reply in zip(self._receiving, replies, strict=True)})
                self._verify(self._receivers, self._num_buckets)  # also checks that no worker has failed since

    def _lend(self, lent: Mapping[int, LentSource | None]) -> None:
        borrowers, calls = self._workers.at(self._borrowers), []
        for lender in self._borrowers.values():
            if (source := lent[lender]) is None:
                raise PushError(f"worker {self._workers.addresses[lender]}: did not lend its weights")
            calls.append(self._begin(self._dtype, source, None, None, lends=False))
        borrowers.ask("begin", calls, self._settings.begin_timeout, None).result()
        self._verify(borrowers, 0)

    def _verify(self, workers: PushTargets, num_buckets: int) -> list[PushStatus]:
        call = VerifyPush(id=new_id(), push_id=self.push_id, num_buckets=num_buckets)
        return workers.ask("verify", call, self._patience, self._lost).result()

    @property
    def _patience(self) -> float:
        return self._settings.timeout * (1.0 if self._lost is None else SHARE_TO_LOSE)

    def commit(self) -> float:
        """Make every worker serve the new weights. Return the longest pause of any engine, in seconds."""
        settings = self._settings
        call = CommitPush(
            id=new_id(), push_id=self.push_id, in_flight=settings.in_flight, timeout=settings.drain_timeout
        )
        start = time.perf_counter()
        addresses = self._workers.addresses
        there = [i for i, address in enumerate(addresses) if address not in (self._lost or ())]
        replies = self._workers.at(there).ask_all(call, settings.commit_timeout)
        committed = [reply for reply in replies if isinstance(reply, PushStatus)]
        errors: dict[str, Any] = {
            addresses[i]: reply for i, reply in zip(there, replies, strict=True) if reply not in committed
        }
        if self._lost is not None and committed and all(isinstance(e, OF_LOST_WORKERS) for e in errors.values()):
            self._lost |= errors
        elif errors:
            raise self._abort(WorkerFailure("commit", errors))
        self._leave_out()
        self.seconds["commit"] = time.perf_counter() - start
        return max((reply.pause_seconds or 0.0 for reply in committed), default=0.0)

    def abort(self) -> None:
        """Abort the push at every worker that answers. Waits at most `ABORT_SECONDS`."""
        self._abort_everywhere()

    def _leave_out(self) -> None:
        """Log the lost workers, and tell them to abort the push, without waiting for replies."""
        for address, error in (self._lost or {}).items():
            log.warning("worker %s was lost during the push of version %d: %s", address, self.version, error)
            worker = self._workers.at([self._workers.addresses.index(address)])
            worker.ask("abort", AbortPush(id=new_id(), push_id=self.push_id), ABORT_SECONDS, None)

    def _abort(self, failure: WorkerFailure) -> PushError:
        """Abort the push at every worker. Return an error that says what each worker serves now."""
        failed = [f"worker {address} failed: {error}" for address, error in failure.errors.items()]
        replies = self._abort_everywhere()
        text = f"push of version {self.version}: at {failure.what}, {'; '.join(failed)}. Now {self._describe(replies)}"
        error = _kind_of(failure.errors.values())(text)
        # A borrower may also fail because its lender is lost.
        found = [*failure.errors.items(), *zip(self._workers.addresses, replies, strict=True)]
        error.lost = tuple(dict.fromkeys(address for address, reply in found if isinstance(reply, OF_LOST_WORKERS)))
        return error

    def _abort_everywhere(self) -> Sequence[PushStatus | TruerollError]:
        call = AbortPush(id=new_id(), push_id=self.push_id)
        return self._workers.ask_all(call, min(ABORT_SECONDS, self._settings.timeout))

    def _describe(self, replies: Sequence[PushStatus | TruerollError]) -> str:
        """Return the text that says what each worker serves now."""
        return "; ".join(map(_describe, self._workers.addresses, replies))


def _kind_of(errors: Iterable[TruerollError]) -> type[PushError]:
    """Return the common type of all errors, if that type tells the trainer what to push instead. Otherwise return
    PushError.
    """
    kinds = {type(error) for error in errors}
    return next((kind for kind in (VersionGapError, OtherBaseError) if kinds == {kind}), PushError)


def _describe(address: str, reply: PushStatus | TruerollError) -> str:
    if isinstance(reply, UnavailableError):
        return f"{address} is shutting down"
    if not isinstance(reply, PushStatus):
        return f"{address} does not answer"
    if reply.state == "dirty":
        return f"{address} has lost its weights (it was at version {reply.weight_version}); it needs a complete push"
    return f"{address} serves version {reply.weight_version}"
