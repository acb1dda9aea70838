"""How a worker ends: how often it was asked to, and until when what is under way may go on."""

from __future__ import annotations

import time

ABORT_SECONDS = 5.0
"""How long the engine may take to abort what is left after the drain deadline."""
FAILED_SECONDS = 0.5
"""How long a failed worker still answers, so that a health check can see the state."""


class Ending:
    """`deadline`, in monotonic seconds: when the worker has to act at the latest. `is_aborting`: the engine was told to
    end what is left.
    """

    def __init__(self, drain_seconds: float) -> None:
        self.deadline = float("inf")
        self.is_aborting = False
        self._drain_seconds = drain_seconds
        self._num_asked = 0

    def ask(self) -> None:
        """The worker is to end; asked again, at once. Callable from any thread, and from signal handlers."""
        self._num_asked += 1

    @property
    def is_asked(self) -> bool:
        """Whether the worker is to end."""
        return self._num_asked > 0

    @property
    def is_urgent(self) -> bool:
        """Whether it was asked again."""
        return self._num_asked > 1

    @property
    def is_due(self) -> bool:
        """Whether the deadline is over."""
        return time.monotonic() >= self.deadline

    def start(self) -> None:
        """What is under way may go on for the drain's time."""
        self.deadline = time.monotonic() + self._drain_seconds

    def hurry(self) -> None:
        """What is under way may go on no longer, unless it is being aborted already."""
        if not self.is_aborting:
            self.deadline = time.monotonic()

    def start_aborting(self) -> None:
        """The engine was told to end what is left."""
        self.is_aborting = True
        self.deadline = time.monotonic() + ABORT_SECONDS

    def fail(self) -> None:
        """The worker has failed, and answers a little longer."""
        self.deadline = time.monotonic() + FAILED_SECONDS
