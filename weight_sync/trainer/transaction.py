"""One push as the workers see it: begin, buckets, verify, commit; or abort.

Owns the order of the phases, and the account of a failure: which worker failed, why, and what each of the others serves
now. Does not own what is in the buckets, nor how they travel. Promises that nothing is committed anywhere before every
worker has verified, and that a push that fails before that is aborted everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trueroll.errors import (
    DeadlineError,
    IllegalStateError,
    OtherBaseError,
    PushError,
    TruerollError,
    UnavailableError,
    VersionGapError,
    WorkerFailedError,
    WorkerLostError,
)

from ...engine.request import InFlight, new_id
from ..payload.manifest import Adapters, Bucket, LentSource, Source
from ..payload.messages import AbortPush, BeginPush, CommitPush, PushStatus, StageBucket, VerifyPush
from .targets import PushTargets, WorkerFailure

ABORT_SECONDS = 5.0
"""How long the workers may take to answer an abort."""
_OF_LOST_WORKERS = (DeadlineError, IllegalStateError, UnavailableError, WorkerFailedError, WorkerLostError)
"""Errors that are about a worker, not about what is pushed."""


@dataclass(frozen=True)
class PushSettings:
    """How a publisher's pushes go; see `WeightPublisher`."""

    timeout: float
    in_flight: InFlight
    in_place: bool
    reject_nonfinite: bool
    drain_timeout: float

    @property
    def begin_timeout(self) -> float:
        """How long a worker may take to begin: in place it lets running requests end first, if it is to drain."""
        return self.commit_timeout if self.in_place else self.timeout

    @property
    def commit_timeout(self) -> float:
        """How long a worker may take to commit."""
        return self.timeout + (self.drain_timeout if self.in_flight == "drain" else 0.0)


class Transaction:
    """A push of version `version` to `workers`, also if it is not later than theirs and `allow_older`.

    `borrowers`: positions of workers that get no buckets, each with that of the worker whose memory it maps once that
    has verified. `seconds`: how long each phase took.
    """

    def __init__(
        self,
        workers: PushTargets,
        settings: PushSettings,
        version: int,
        allow_older: bool,
        push_id: str | None = None,
        borrowers: Mapping[int, int] | None = None,
    ) -> None:
        self.push_id = push_id or new_id()
        self.version = version
        self.allow_older = allow_older
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._workers = workers
        self._borrowers = dict(borrowers or {})
        self._receiving = [i for i in range(len(workers.addresses)) if i not in self._borrowers]
        self._receivers = workers.at(self._receiving)
        self._settings = settings
        self._num_buckets = 0
        self._dtype = ""

    @property
    def num_receivers(self) -> int:
        """How many workers get the buckets."""
        return len(self._receiving)

    @property
    def total_seconds(self) -> float:
        """Since this was made."""
        return time.perf_counter() - self._start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what happens inside it; a failure there aborts the push and becomes PushError."""
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
        """Announce the push to those that get buckets. `source`: of each of them, by its number. `base`, `adapters`:
        see `BeginPush`.
        """
        self._dtype, lenders = dtype, set(self._borrowers.values())
        calls = [self._begin(dtype, source(i), base, adapters, at in lenders) for i, at in enumerate(self._receiving)]
        return self._receivers.ask("begin", calls, self._settings.begin_timeout)

    def _begin(self, dtype: str, source: Source, base: str | None, adapters: Adapters | None, lends: bool) -> BeginPush:
        settings = self._settings
        return BeginPush(
            id=new_id(),
            push_id=self.push_id,
            weight_version=self.version,
            base=base,
            adapters=adapters,
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
        """Announce a bucket. The future ends when every worker has copied it."""
        self._num_buckets += 1
        call = StageBucket(id=new_id(), push_id=self.push_id, bucket=bucket)
        return self._receivers.ask(f"stage bucket {bucket.index}", call, self._settings.timeout)

    def verify(self) -> None:
        """Let every worker say that all is there: first those that got the buckets, then those that map it there."""
        with self.phase("verify"):
            replies = self._verify(self._receivers, self._num_buckets)
            if self._borrowers:
                self._lend({at: reply.lent for at, reply in zip(self._receiving, replies, strict=True)})
                self._verify(self._receivers, self._num_buckets)  # none has given up meanwhile

    def _lend(self, lent: Mapping[int, LentSource | None]) -> None:
        borrowers, calls = self._workers.at(self._borrowers), []
        for lender in self._borrowers.values():
            if (source := lent[lender]) is None:
                raise PushError(
                    f"worker {self._workers.addresses[lender]}: expected it to lend its weights, found none"
                )
            calls.append(self._begin(self._dtype, source, None, None, lends=False))
        borrowers.ask("begin", calls, self._settings.begin_timeout).result()
        self._verify(borrowers, 0)

    def _verify(self, workers: PushTargets, num_buckets: int) -> list[PushStatus]:
        call = VerifyPush(id=new_id(), push_id=self.push_id, num_buckets=num_buckets)
        return workers.ask("verify", call, self._settings.timeout).result()

    def commit(self) -> float:
        """Let every worker serve the new weights. Returns the longest pause that this meant for one of them."""
        settings = self._settings
        call = CommitPush(
            id=new_id(), push_id=self.push_id, in_flight=settings.in_flight, timeout=settings.drain_timeout
        )
        start = time.perf_counter()
        replies = self._workers.ask_all(call, settings.commit_timeout)
        committed = [reply for reply in replies if isinstance(reply, PushStatus)]
        errors: dict[str, Any] = {
            address: reply
            for address, reply in zip(self._workers.addresses, replies, strict=True)
            if reply not in committed
        }
        if errors:
            raise self._abort(WorkerFailure("commit", errors))
        self.seconds["commit"] = time.perf_counter() - start
        return max(reply.pause_seconds or 0.0 for reply in committed)

    def _abort(self, failure: WorkerFailure) -> PushError:
        """Abort everywhere, and tell what became of every worker."""
        failed = [f"worker {address} failed: {error}" for address, error in failure.errors.items()]
        replies = self._abort_everywhere()
        text = f"push of version {self.version}: at {failure.what}, {'; '.join(failed)}. Now {self._describe(replies)}"
        error = _kind_of(failure.errors.values())(text)
        # A worker may fail since another one is lost, whose memory it was to map.
        found = [*failure.errors.items(), *zip(self._workers.addresses, replies, strict=True)]
        error.lost = tuple(dict.fromkeys(address for address, reply in found if isinstance(reply, _OF_LOST_WORKERS)))
        return error

    def _abort_everywhere(self) -> Sequence[PushStatus | TruerollError]:
        call = AbortPush(id=new_id(), push_id=self.push_id)
        return self._workers.ask_all(call, min(ABORT_SECONDS, self._settings.timeout))

    def _describe(self, replies: Sequence[PushStatus | TruerollError]) -> str:
        """What each worker serves now."""
        return "; ".join(map(_describe, self._workers.addresses, replies))


def _kind_of(errors: Iterable[TruerollError]) -> type[PushError]:
    """What all of them are, if that tells a trainer what else to push."""
    kinds = {type(error) for error in errors}
    return next((kind for kind in (VersionGapError, OtherBaseError) if kinds == {kind}), PushError)


def _describe(address: str, reply: PushStatus | TruerollError) -> str:
    if isinstance(reply, UnavailableError):
        return f"{address} ends"
    if not isinstance(reply, PushStatus):
        return f"{address} does not answer"
    if reply.state == "dirty":
        return f"{address} was at version {reply.weight_version}, whose weights are lost; it needs a complete push"
    return f"{address} serves version {reply.weight_version}"
