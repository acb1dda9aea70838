"""The calls that a push waits for, in order."""

from __future__ import annotations

import queue
from typing import TypeAlias

from trueroll.errors import DeadlineError

from ..payload.messages import BeginPush, StageBucket, VerifyPush

Call: TypeAlias = StageBucket | VerifyPush


def begin_seconds(begin: BeginPush) -> float:
    """How long the other workers may take to begin: in place they let running requests end first, if they drain."""
    return begin.timeout + (begin.drain_timeout if begin.in_place and begin.in_flight == "drain" else 0.0)


class CallQueue:
    """Calls of the push that `begin` describes. `put` may be called from any thread."""

    def __init__(self, begin: BeginPush) -> None:
        self._begin = begin
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._ahead: Call | None = None
        self._patience = begin_seconds(begin)

    def put(self, call: Call | None) -> None:
        """One more call; None: there are no more."""
        self._queue.put(call)

    def next(self) -> Call | None:
        """Wait for the next call. Raise DeadlineError if none comes in time."""
        if self._ahead is not None:
            call, self._ahead = self._ahead, None
            return call
        try:
            call = self._queue.get(timeout=self._patience)
        except queue.Empty:
            raise DeadlineError(
                f"push {self._begin.push_id}: expected the next call within {self._patience} s, found none; "
                "the trainer died or hangs, and may push again"
            ) from None
        self._patience = self._begin.timeout
        return call

    def look_ahead(self) -> Call | None:
        """The call that `next` gives after this one, if it has come."""
        if self._ahead is None and not self._queue.empty():
            self._ahead = self._queue.get()
        return self._ahead
