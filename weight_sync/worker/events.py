"""What the receiver of a push tells the worker. Imports no torch, for a worker answers before that is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from trueroll.errors import DeadlineError, PushError

from ..payload.manifest import LentSource
from ..payload.messages import PushPhase


@dataclass(frozen=True)
class Reached:
    """The call `id` was done, and with it the push has come to `phase`: begun, staged or verified. `lent`: where others
    find the weights, once they are verified, if they are lent.
    """

    id: str
    phase: PushPhase
    lent: LentSource | None = None


@dataclass(frozen=True)
class Opened:
    """The source of a push in place is open. Nothing was written, and nothing will be before `Receiver.proceed`."""


@dataclass(frozen=True)
class Broken:
    """The push is over without a result; `error` is the answer to every call that waits."""

    error: PushError | DeadlineError


PushEvent: TypeAlias = Opened | Reached | Broken


@dataclass(frozen=True)
class Progress:
    """How far a push has come. `started`: on the clock of `time.monotonic`."""

    phase: PushPhase
    bytes_staged: int
    started: float
