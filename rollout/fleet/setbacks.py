"""The losses and refusals of a request, and the workers that must not get the request next.

Pure: no clock, no I/O. Callers pass the number of health checks of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trueroll.errors import QueueFullError, TruerollError, UnavailableError, WorkerLostError

MOST_LOSSES = 5
"""Maximum number of workers that may be lost while they run the same request. After more losses the request fails,
because the request may be the cause.
"""


@dataclass(frozen=True)
class _Refusal:
    """A worker's refusal of a request. `num_looks`: number of health checks of the worker at the time of the refusal.
    The next health check voids the refusal, even if the report has not changed. The worker may have been full only
    between the two checks.
    """

    error: TruerollError
    num_looks: int


class Setbacks:
    """The losses and refusals of one request. `num_losses`: number of workers that were lost while they ran the
    request.

    The argument `looks` of methods: number of health checks of each eligible worker, by key.
    """

    def __init__(self) -> None:
        self.num_losses = 0
        self._refusals: dict[str, _Refusal] = {}
        self._rejecting: set[str] = set()

    def note(self, worker: str, num_looks: int, refusal: TruerollError | None) -> None:
        """Record that an ask to a worker has ended. `refusal`: why the worker refused the request. None means that the
        worker accepted the request. An accepted request clears the earlier refusals of all workers.
        """
        if refusal is None:
            self._refusals.clear()
            self._rejecting.clear()
        elif isinstance(refusal, UnavailableError):
            self._rejecting.add(worker)
        else:
            self._refusals[worker] = _Refusal(refusal, num_looks)

    def avoided(self, looks: Mapping[str, int], is_late: bool) -> set[str]:
        """Return the keys of the workers that must not be asked now. `is_late`: the client's patience has ended, so
        include workers that rejected the request because of their state.
        """
        return self._refusing(looks) | (self._rejecting if is_late else set())

    def final(self, looks: Mapping[str, int]) -> TruerollError | None:
        """If all workers refuse the request, return the first refusal, else None. A request that was lost with a worker
        does not fail while other workers are full. The request waits for room instead.
        """
        refusing = self._refusing(looks)
        if not refusing or not looks.keys() <= refusing:
            return None
        errors = [refusal.error for refusal in self._refusals.values()]
        is_waiting = self.num_losses and any(isinstance(error, QueueFullError) for error in errors)
        return None if is_waiting else errors[0]

    def too_many_losses(self, request_id: str) -> WorkerLostError | None:
        """Return an error if the request was lost with too many workers, else None."""
        if self.num_losses <= MOST_LOSSES:
            return None
        return WorkerLostError(
            f"request {request_id!r} was lost with {self.num_losses} workers, one after the other, and may be the "
            "cause; see the workers' logs"
        )

    @property
    def first_refusal(self) -> TruerollError | None:
        """The earliest refusal that is still valid; None if there is none."""
        return next((refusal.error for refusal in self._refusals.values()), None)

    def _refusing(self, looks: Mapping[str, int]) -> set[str]:
        """Drop a refusal if its worker is not eligible or has had a later health check. Return the keys of the workers
        that still refuse.
        """
        self._refusals = {key: it for key, it in self._refusals.items() if looks.get(key) == it.num_looks}
        return {*self._refusals}
