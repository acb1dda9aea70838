"""The attempts to bring a worker to the weights of its fleet.

Owns: how many failed, when the next one is due, and whether they were given up. Does not own how weights travel
(`hand_over`). Promises: each failure is logged and told; attempts for the same weights are bounded in number, and
further apart each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trueroll.errors import (
    ConfigError,
    DeadlineError,
    IllegalStateError,
    PushError,
    TruerollError,
    UnavailableError,
    WorkerFailedError,
    WorkerLostError,
    said,
)

Outcome: TypeAlias = Literal["done", "waiting", "failed"]

MOST_REFUSALS = 3
"""How many attempts may be refused, because of the folder, its space or its content, before none is made any more."""
MOST_FAILURES = 20
"""How many attempts may fail for a cause that may pass, such as a worker that was lost, or sleeps."""
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0
_PASSING = (DeadlineError, IllegalStateError, UnavailableError, WorkerFailedError, WorkerLostError)

log = logging.getLogger(__name__)


@dataclass
class _Failures:
    """Those since attempts began anew: how many were refused, how many had a cause that may pass, and when the next
    attempt is due. `are_final`: no other state of the worker that hands over helps.
    """

    num_refusals: int = 0
    num_passing: int = 0
    are_final: bool = False
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    due: float = 0.0

    def add(self, error: TruerollError) -> None:
        """One more."""
        passes = isinstance(error, _PASSING) or (isinstance(error, PushError) and bool(error.lost))
        self.num_passing += passes
        self.num_refusals += not passes
        self.are_final = isinstance(error, ConfigError) or self.num_refusals >= MOST_REFUSALS
        self.due, self.pause = time.monotonic() + self.pause, min(2 * self.pause, MOST_PAUSE)

    @property
    def are_too_many(self) -> bool:
        """Whether attempts are given up."""
        return self.are_final or self.num_passing >= MOST_FAILURES


class Joining:
    """Attempts for the worker `name`, and for those that take its place.

    `num_failures`: of all of them. `trouble`: why the last one failed, empty if none has since the worker had the
    weights. `error`: why attempts were given up; None while they go on.
    """

    def __init__(self, name: str) -> None:
        self.num_failures = 0
        self.trouble = ""
        self.error: TruerollError | None = None
        self._name = name
        self._target: object = None
        self._state: object = None
        self._failures = _Failures()

    def retry(self) -> None:
        """Begin to count anew, and make the next attempt at once."""
        self.error, self._failures = None, _Failures()

    async def attempt(self, target: object, state: object, hand_over: Callable[[], Awaitable[bool]]) -> Outcome:
        """Make an attempt, if one is due. `target`: what is handed over, and by whom; another one begins anew. `state`:
        of the worker that hands it over; with another one, causes that may pass are counted anew, refusals are not.

        Return whether the worker has the weights (`done`), waits for a push because nothing has them (`waiting`), or
        neither (`failed`).
        """
        if target != self._target:
            self.retry()
        elif state != self._state and not self._failures.are_final:
            self.error, self._failures = None, _Failures(self._failures.num_refusals)
        self._target, self._state = target, state
        if self.error is not None or time.monotonic() < self._failures.due:
            return "failed"
        try:
            is_done = await hand_over()
        except TruerollError as error:
            self._note(error)
            return "failed"
        if is_done:
            self.trouble = ""
            self.retry()
        return "done" if is_done else "waiting"

    def _note(self, error: TruerollError) -> None:
        self.num_failures += 1
        self.trouble = said(error)
        self._failures.add(error)
        if self._failures.are_too_many:
            count = self._failures.num_refusals + self._failures.num_passing
            self.error = error.retold(
                f"{self._name}: the weights of the fleet cannot be handed over, after {count} attempts: {error}. "
                "Correct that and call scale, or push other weights"
            )
            log.error("fleet: %s", self.error)
        else:
            log.warning("fleet: %s: the weights were not handed over, next attempt later: %s", self._name, error)
