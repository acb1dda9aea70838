"""Retries of weight hand-overs. A hand-over gives a joining worker the weights of its fleet.

Owns: the number of failed hand-overs, the time of the next attempt, and the decision to give up. Does not own: how
weights are transferred (`hand_over`). Guarantees: each failed hand-over is logged and reported. The number of hand-over
attempts for the same weights is bounded, and the pauses between attempts grow.
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
"""Number of refused attempts after which the fleet gives up. A refused attempt is a hand-over that fails for a cause
that is not transient. The usual cause is a weights folder without free space or with invalid content.
"""
MOST_FAILURES = 20
"""Number of transient failures after which the fleet gives up. A lost or sleeping peer causes a transient failure."""
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0
_PASSING = (DeadlineError, IllegalStateError, UnavailableError, WorkerFailedError, WorkerLostError)

log = logging.getLogger(__name__)


@dataclass
class _Failures:
    """The failed hand-overs since the last reset.

    `num_refusals`: number of refused attempts, which are hand-overs that failed for a cause that is not transient.
    `num_passing`: number of hand-overs that failed for a transient cause. `are_final`: True if the fleet must not try
    again, even if the peer's state changes. `pause`: seconds to wait after the next failure. `due`: time of the next
    attempt, in monotonic seconds.
    """

    num_refusals: int = 0
    num_passing: int = 0
    are_final: bool = False
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    due: float = 0.0

    def add(self, error: TruerollError) -> None:
        """Add a failed attempt."""
        passes = isinstance(error, _PASSING) or (isinstance(error, PushError) and bool(error.lost))
        self.num_passing += passes
        self.num_refusals += not passes
        self.are_final = isinstance(error, ConfigError) or self.num_refusals >= MOST_REFUSALS
        self.due, self.pause = time.monotonic() + self.pause, min(2 * self.pause, MOST_PAUSE)

    @property
    def are_too_many(self) -> bool:
        """Return whether the fleet must stop trying to hand over the weights."""
        return self.are_final or self.num_passing >= MOST_FAILURES


class Joining:
    """The attempts to give the fleet's weights to the worker `name`, or to a replacement of this worker.

    `num_failures`: number of failed hand-overs to the worker and its replacements. `trouble`: error text of the last
    hand-over; empty if the last hand-over succeeded. `error`: the error after which the fleet stopped trying; None
    while the fleet keeps trying.
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
        """Reset the counts of failures, so that the next hand-over is due at once."""
        self.error, self._failures = None, _Failures()

    async def attempt(self, target: object, state: object, hand_over: Callable[[], Awaitable[bool]]) -> Outcome:
        """Try to hand over the weights if an attempt is due. Return `done` if the worker has the weights. Return
        `waiting` if no copy of the weights is left and the worker must wait for a push. In all other cases, return
        `failed`.

        `target`: identifies the weights and the peer; a new target resets all counts of failures. `state`: state of the
        peer; a new state resets the count of transient failures, but not the count of refused attempts.
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
                f"{self._name}: could not get the weights of the fleet in {count} attempts: {error}. Fix the cause and "
                "call scale, or push other weights"
            )
            log.error("fleet: %s", self.error)
        else:
            log.warning("fleet: %s: could not get the weights of the fleet, trying again: %s", self._name, error)
