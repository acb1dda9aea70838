"""The calls that a push makes to its workers. The package `rollout` implements the calls with its clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from trueroll.errors import (
    DeadlineError,
    IllegalStateError,
    TruerollError,
    UnavailableError,
    WorkerFailedError,
    WorkerLostError,
)

from ..payload.messages import PushCall, PushStatus

OF_LOST_WORKERS = (DeadlineError, IllegalStateError, UnavailableError, WorkerFailedError, WorkerLostError)
"""Errors that concern a worker, not the content of a push."""
Lost: TypeAlias = dict[str, TruerollError]
"""The workers that were lost during a push: the error of each worker, by the worker's address."""


class WorkerFailure(Exception):
    """A call failed at one or more workers. `what`: the call. `errors`: the error of each failed worker, by the
    worker's address.
    """

    def __init__(self, what: str, errors: dict[str, TruerollError]) -> None:
        super().__init__(what, errors)
        self.what = what
        self.errors = errors


class PushTargets(Protocol):
    """The workers of a push. A position is an index into `addresses`. Every call ends within its timeout."""

    @property
    def may_lose_workers(self) -> bool:
        """Return whether a push may continue without a worker that is lost during the push."""
        ...

    @property
    def addresses(self) -> Sequence[str]: ...

    def at(self, positions: Iterable[int]) -> PushTargets:
        """Return the workers at these positions."""
        ...

    def ask(
        self, what: str, calls: PushCall | Sequence[PushCall], timeout: float, lost: Lost | None
    ) -> Future[list[PushStatus]]:
        """Send the same call to all workers, or a separate call to each worker.

        The future's result is the list of replies, in the order of the workers. The future raises WorkerFailure as soon
        as one worker fails. If `lost` is given, workers in `lost` are not asked. If a worker fails with an error of one
        of the types in `OF_LOST_WORKERS`, the worker is added to `lost` instead, and the future raises WorkerFailure
        only if no worker is left. Another thread may add workers to `lost` during the call; the call then does not wait
        for these workers.
        """
        ...

    def ask_all(self, call: PushCall, timeout: float) -> Sequence[PushStatus | TruerollError]:
        """Send a call to every worker, and wait for all replies. Return each worker's reply or error."""
        ...
