"""The workers that were lost while they ran a request, the workers that refused the request, and the workers that must
not get the request next.

Pure: no clock, no I/O. Methods get the number of health checks of each worker as an argument.
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
    """A worker's refusal of a request. `num_looks`: number of health checks of the worker before the refusal. The
    refusal is valid only until the worker's next health check. Health checks are counted, because the reported state
    does not show whether a refusal is outdated: if a worker was full only briefly, the health checks before and after
    the refusal may report the same state.
    """

    error: TruerollError
    num_looks: int


class Setbacks:
    """The workers that were lost while they ran one request, and the workers that refused the request. `num_losses`:
    number of workers that were lost while they ran the request.

    The argument `looks` of the methods maps the key of each eligible worker to the number of health checks of this
    worker.
    """

    def __init__(self) -> None:
        self.num_losses = 0
        self._refusals: dict[str, _Refusal] = {}
        self._rejecting: set[str] = set()

    def note(self, worker: str, num_looks: int, refusal: TruerollError | None) -> None:
        """Record that an `Ask` to a worker has ended. `refusal`: the error with which the worker refused the request;
        None if the worker accepted the request. If a worker accepts the request, the earlier refusals of all workers
        are forgotten.
        """
        if refusal is None:
            self._refusals.clear()
            self._rejecting.clear()
        elif isinstance(refusal, UnavailableError):
            self._rejecting.add(worker)
        else:
            self._refusals[worker] = _Refusal(refusal, num_looks)

    def avoided(self, looks: Mapping[str, int], is_late: bool) -> set[str]:
        """Return the keys of the workers that must not get the request now. `is_late`: whether the
        request has waited for a worker for `patience` seconds (see `FleetRequest`). If `is_late` is True, the result
        also includes workers that refused the request because of their state.
        """
        return self._refusing(looks) | (self._rejecting if is_late else set())

    def final(self, looks: Mapping[str, int]) -> TruerollError | None:
        """If all workers refuse the request, return the error of the first refusal; else return None. If a worker was
        lost while it ran the request, and some worker refuses the request because it is full, also return None. The
        request then waits for room.
        """
        refusing = self._refusing(looks)
        if not refusing or not looks.keys() <= refusing:
            return None
        errors = [refusal.error for refusal in self._refusals.values()]
        is_waiting = self.num_losses and any(isinstance(error, QueueFullError) for error in errors)
        return None if is_waiting else errors[0]

    def too_many_losses(self, request_id: str) -> WorkerLostError | None:
        """Return an error if too many workers were lost while they ran the request, else None."""
        if self.num_losses <= MOST_LOSSES:
            return None
        return WorkerLostError(
            f"request {request_id!r} was lost with {self.num_losses} workers, one after the other, and may be the "
            "cause; see the workers' logs"
        )

    @property
    def first_refusal(self) -> TruerollError | None:
        """The error of the earliest valid refusal; None if no refusal is valid."""
        return next((refusal.error for refusal in self._refusals.values()), None)

    def _refusing(self, looks: Mapping[str, int]) -> set[str]:
        """Drop the refusal of a worker that is no longer eligible, or had another health check after the refusal.
        Return the keys of the workers with a remaining refusal.
        """
        self._refusals = {key: it for key, it in self._refusals.items() if looks.get(key) == it.num_looks}
        return {*self._refusals}
