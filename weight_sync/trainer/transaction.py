"""One push as the workers see it: begin, buckets, verify, commit; or abort.

Owns the order of the phases, and the account of a failure: which worker failed, why, and what each of the others serves
now. Does not own what is in the buckets, nor how they travel. Promises that nothing is committed anywhere before every
worker has verified, and that a push that fails before that is aborted everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trueroll.errors import PushError, TruerollError, VersionGapError

from ...engine.request import InFlight
from ..payload.manifest import Adapters, Bucket, Source
from ..payload.messages import AbortPush, BeginPush, CommitPush, PushStatus, StageBucket, VerifyPush, new_id
from .workers import WorkerFailure, Workers

ABORT_SECONDS = 5.0
"""How long the workers may take to answer an abort."""


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

    `seconds`: how long each phase took.
    """

    def __init__(
        self, workers: Workers, settings: PushSettings, version: int, allow_older: bool, push_id: str | None = None
    ) -> None:
        self.push_id = push_id or new_id()
        self.version = version
        self.allow_older = allow_older
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._workers = workers
        self._settings = settings
        self._num_buckets = 0

    @property
    def num_workers(self) -> int:
        return len(self._workers.addresses)

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
            raise PushError(f"push of version {self.version}: {error}. Now {self._abort_everywhere()}") from None
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
        """Announce the push. `source`: of the worker at each position. `base`, `adapters`: see `BeginPush`."""
        settings = self._settings
        fields: dict[str, Any] = dict(
            push_id=self.push_id,
            weight_version=self.version,
            base=base,
            adapters=adapters,
            allow_older=self.allow_older,
            dtype=dtype,
            in_place=settings.in_place,
            in_flight=settings.in_flight,
            drain_timeout=settings.drain_timeout,
            reject_nonfinite=settings.reject_nonfinite,
            timeout=settings.timeout,
        )
        positions = range(len(self._workers.addresses))
        calls = [BeginPush(id=new_id(), source=source(position), **fields) for position in positions]
        return self._workers.ask("begin", calls, settings.begin_timeout)

    def stage(self, bucket: Bucket) -> Future[list[PushStatus]]:
        """Announce a bucket. The future ends when every worker has copied it."""
        self._num_buckets += 1
        call = StageBucket(id=new_id(), push_id=self.push_id, bucket=bucket)
        return self._workers.ask(f"stage bucket {bucket.index}", call, self._settings.timeout)

    def verify(self) -> None:
        """Let every worker say that all is there."""
        call = VerifyPush(id=new_id(), push_id=self.push_id, num_buckets=self._num_buckets)
        with self.phase("verify"):
            self._workers.ask("verify", call, self._settings.timeout).result()

    def commit(self) -> float:
        """Let every worker serve the new weights. Returns the longest pause that this meant for one of them."""
        settings = self._settings
        call = CommitPush(
            id=new_id(), push_id=self.push_id, in_flight=settings.in_flight, timeout=settings.drain_timeout
        )
        start = time.perf_counter()
        replies = self._workers.ask_all(call, settings.commit_timeout)
        committed = [reply for reply in replies if isinstance(reply, PushStatus)]
        errors: dict[int, Any] = {i: reply for i, reply in enumerate(replies) if reply not in committed}
        if errors:
            raise self._abort(WorkerFailure("commit", errors))
        self.seconds["commit"] = time.perf_counter() - start
        return max(reply.pause_seconds or 0.0 for reply in committed)

    def _abort(self, failure: WorkerFailure) -> PushError:
        """Abort everywhere, and tell what became of every worker."""
        failed = [f"worker {self._workers.addresses[i]} failed: {error}" for i, error in failure.errors.items()]
        now = self._abort_everywhere()
        is_gap = all(isinstance(error, VersionGapError) for error in failure.errors.values())
        text = f"push of version {self.version}: at {failure.what}, {'; '.join(failed)}. Now {now}"
        return (VersionGapError if is_gap else PushError)(text)

    def _abort_everywhere(self) -> str:
        """What each worker serves then."""
        call = AbortPush(id=new_id(), push_id=self.push_id)
        replies = self._workers.ask_all(call, min(ABORT_SECONDS, self._settings.timeout))
        return "; ".join(map(_describe, self._workers.addresses, replies))


def _describe(address: str, reply: PushStatus | TruerollError) -> str:
    if not isinstance(reply, PushStatus):
        return f"{address} does not answer"
    if reply.state == "dirty":
        return f"{address} was at version {reply.weight_version}, whose weights are lost; it needs a complete push"
    return f"{address} serves version {reply.weight_version}"
