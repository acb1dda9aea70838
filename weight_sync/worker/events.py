"""The events that a push's receiver sends to the worker. This module does not import torch, since a worker answers
calls before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from trueroll.errors import DeadlineError, PushError

from ..payload.manifest import LentSource
from ..payload.messages import PushPhase


@dataclass(frozen=True)
class Reached:
    """The call `id` is done, and the push has reached `phase`: begun, staged or verified.

    `lent`: where other workers find the verified weights, if the worker lends them.
    """

    id: str
    phase: PushPhase
    lent: LentSource | None = None


@dataclass(frozen=True)
class Opened:
    """The receiver has opened the source of a push with `in_place`. The receiver writes nothing before
    `Receiver.proceed` is called.
    """


@dataclass(frozen=True)
class Broken:
    """The push has failed. `error`: the error with which all pending calls of the push fail."""

    error: PushError | DeadlineError


PushEvent: TypeAlias = Opened | Reached | Broken


@dataclass(frozen=True)
class Progress:
    """Progress of a push. `started`: start time by `time.monotonic`."""

    phase: PushPhase
    bytes_staged: int
    started: float
