"""What a push asks of the workers that it goes to; `rollout` has the clients that do it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from trueroll.errors import TruerollError

from ..payload.messages import PushCall, PushStatus


class WorkerFailure(Exception):
    """Some workers could not do what they were asked to: what went wrong, by address."""

    def __init__(self, what: str, errors: dict[str, TruerollError]) -> None:
        super().__init__(what, errors)
        self.what = what
        self.errors = errors


class PushTargets(Protocol):
    """The workers that a push goes to; a position is an index into `addresses`. Every call ends within its timeout."""

    @property
    def addresses(self) -> Sequence[str]: ...

    def at(self, positions: Iterable[int]) -> PushTargets:
        """Those at these positions."""
        ...

    def ask(self, what: str, calls: PushCall | Sequence[PushCall], timeout: float) -> Future[list[PushStatus]]:
        """Send each worker its call, or all the same one. The result: all replies, in order; or WorkerFailure as soon
        as one failed.
        """
        ...

    def ask_all(self, call: PushCall, timeout: float) -> Sequence[PushStatus | TruerollError]:
        """Send every worker a call, and wait for all the replies, or the errors in their place."""
        ...
