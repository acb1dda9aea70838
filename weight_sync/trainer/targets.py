"""The calls that a push makes to its workers. The package `rollout` implements the calls with its clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from trueroll.errors import TruerollError

from ..payload.messages import PushCall, PushStatus


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
    def addresses(self) -> Sequence[str]: ...

    def at(self, positions: Iterable[int]) -> PushTargets:
        """Return the workers at these positions."""
        ...

    def ask(self, what: str, calls: PushCall | Sequence[PushCall], timeout: float) -> Future[list[PushStatus]]:
        """Send the same call to all workers, or a separate call to each worker.

        The future's result is the list of replies, in the order of the workers. The future raises WorkerFailure as soon
        as one worker fails.
        """
        ...

    def ask_all(self, call: PushCall, timeout: float) -> Sequence[PushStatus | TruerollError]:
        """Send a call to every worker, and wait for all replies. Return each worker's reply or error."""
        ...
