"""What the receiver of a push tells the worker. Imports no torch, for a worker answers before that is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ..rollout.errors import DeadlineError, PushError
from ..rollout.protocol import PushPhase


@dataclass(frozen=True)
class Begun:
    """The transport is up, and the staging is there."""

    push_id: str
    tag: Any = None


@dataclass(frozen=True)
class Staged:
    """The bucket's bytes were right and have been copied."""

    push_id: str
    tag: Any


@dataclass(frozen=True)
class Verified:
    """Every parameter is in the staging."""

    push_id: str
    tag: Any


@dataclass(frozen=True)
class Broken:
    """The push is over without a result. `tag`: of the call that met the error; None if no call did."""

    push_id: str
    error: PushError | DeadlineError
    tag: Any = None


PushEvent: TypeAlias = Begun | Staged | Verified | Broken


@dataclass(frozen=True)
class Progress:
    """How far a push has come. `started`: on the clock of `time.monotonic`."""

    phase: PushPhase
    bytes_staged: int
    started: float
