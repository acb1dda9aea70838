"""What has kept workers from a request, and which of them are therefore not asked next.

Pure: it is told how often each worker was looked at, and looks at none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trueroll.errors import QueueFullError, TruerollError, UnavailableError, WorkerLostError

MOST_LOSSES = 5
"""A request whose workers were lost more often is given up: it may be what ends them."""


@dataclass(frozen=True)
class _Refusal:
    """Why a worker refused a request. `num_looks`: how often it had been looked at; the next look voids the refusal,
    even if it finds what the one before found: the worker may have filled up and emptied in between.
    """

    error: TruerollError
    num_looks: int


class Setbacks:
    """The losses and refusals of one request. `num_losses`: how many workers were lost with it.

    `looks`, wherever it is given: the workers that may be asked now, and how often each was looked at.
    """

    def __init__(self) -> None:
        self.num_losses = 0
        self._refusals: dict[str, _Refusal] = {}
        self._rejecting: set[str] = set()

    def note(self, worker: str, num_looks: int, refusal: TruerollError | None) -> None:
        """A worker has ended with the request: it refused it, or, without a refusal, had it. Then earlier refusals, of
        whichever worker, count no more.
        """
        if refusal is None:
            self._refusals.clear()
            self._rejecting.clear()
        elif isinstance(refusal, UnavailableError):
            self._rejecting.add(worker)
        else:
            self._refusals[worker] = _Refusal(refusal, num_looks)

    def avoided(self, looks: Mapping[str, int], is_late: bool) -> set[str]:
        """The workers not to be asked now. `is_late`: patience has ended, so also those that rejected it in their
        state.
        """
        return self._refusing(looks) | (self._rejecting if is_late else set())

    def final(self, looks: Mapping[str, int]) -> TruerollError | None:
        """Why all workers refuse the request; None if some do not. One that was lost with a worker waits for room at
        another.
        """
        refusing = self._refusing(looks)
        if not refusing or not looks.keys() <= refusing:
            return None
        errors = [refusal.error for refusal in self._refusals.values()]
        is_waiting = self.num_losses and any(isinstance(error, QueueFullError) for error in errors)
        return None if is_waiting else errors[0]

    def too_many_losses(self, request_id: str) -> WorkerLostError | None:
        """Why the request is given up, if it was lost too often."""
        if self.num_losses <= MOST_LOSSES:
            return None
        return WorkerLostError(
            f"request {request_id!r}: lost with {self.num_losses} workers, one after the other; it may be what ends "
            "them: see their logs"
        )

    @property
    def first_refusal(self) -> TruerollError | None:
        """Why the first of the workers refused it that still do; None if none does."""
        return next((refusal.error for refusal in self._refusals.values()), None)

    def _refusing(self, looks: Mapping[str, int]) -> set[str]:
        """Drop the refusals of workers that were looked at since, or may not be asked. Return whose are left."""
        self._refusals = {key: it for key, it in self._refusals.items() if looks.get(key) == it.num_looks}
        return {*self._refusals}
