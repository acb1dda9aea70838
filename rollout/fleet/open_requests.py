"""The in-flight requests of a fleet's client, and the task that finds slow requests (stragglers).

Owns: the ids of requests in flight, and the task that sends slow requests (stragglers) to a second worker. Does not
decide how a request ends (`FleetRequest`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection

from trueroll.errors import InvalidRequestError, TruerollError

from .request import FleetRequest

WATCH_SECONDS = 0.25


class OpenRequests:
    """The requests in flight. `straggler_seconds`: a request is also sent to a second worker if it takes longer than
    `straggler_seconds` and much longer than other requests. None: no request is sent to a second worker.
    `num_asked_twice`: number of requests that were sent to a second worker.
    """

    def __init__(self, straggler_seconds: float | None) -> None:
        self.num_asked_twice = 0
        self._straggler_seconds = straggler_seconds
        self._requests: dict[str, FleetRequest] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def ids(self) -> list[str]:
        """The ids of the requests in flight."""
        return list(self._requests)

    def get(self, id: str) -> FleetRequest | None:
        """Return the request with this id; None if no request with this id is in flight."""
        return self._requests.get(id)

    def check(self, ids: Collection[str]) -> None:
        """Raise InvalidRequestError for an id that is given twice or already in use."""
        for id, count in Counter(ids).items():
            if count > 1 or id in self._requests:
                text = f"request_ids: {id!r} is given twice or already in use; use an id for one request at a time"
                raise InvalidRequestError(text, field="request_ids", value=id)

    def begin(self, id: str, request: FleetRequest) -> asyncio.Task[None]:
        """Run a request in a task, and return the task. The request is in flight until `end` is called."""
        if self._watch is None and self._straggler_seconds is not None:
            self._watch = asyncio.create_task(self._watch_stragglers(self._straggler_seconds))
        self._requests[id] = request
        return asyncio.create_task(request.run())

    def end(self, ids: Collection[str]) -> None:
        """Forget the given requests."""
        for id in ids:
            self._requests.pop(id, None)

    def close(self) -> None:
        """End all requests with an error, and stop looking for stragglers."""
        if self._watch is not None:
            self._watch.cancel()
        for request in [*self._requests.values()]:
            request.finish(TruerollError("client: the client is closed; make a new one"))

    async def _watch_stragglers(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for request in [*self._requests.values()]:
                self.num_asked_twice += request.hasten(now, seconds)
