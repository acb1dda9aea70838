"""The requests of a fleet's client that are under way, and the watch over those that are far behind.

Owns: which ids are in use, and the task that has a second worker asked. Does not own how a request ends
(`FleetRequest`).
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
    """`straggler_seconds`: a request that takes longer than that, and much longer than others, is asked of a second
    worker too; None: never. `num_asked_twice`: how many were.
    """

    def __init__(self, straggler_seconds: float | None) -> None:
        self.num_asked_twice = 0
        self._straggler_seconds = straggler_seconds
        self._requests: dict[str, FleetRequest] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def ids(self) -> list[str]:
        """Those in use."""
        return list(self._requests)

    def get(self, id: str) -> FleetRequest | None:
        """The request with this id, if it is under way."""
        return self._requests.get(id)

    def check(self, ids: Collection[str]) -> None:
        """Raise InvalidRequestError unless requests may be begun with these ids."""
        for id, count in Counter(ids).items():
            if count > 1 or id in self._requests:
                text = f"request_ids: expected ids that are not in use, found {id!r} twice"
                raise InvalidRequestError(text, field="request_ids", value=id)

    def begin(self, id: str, request: FleetRequest) -> asyncio.Task[None]:
        """Have a request answered, in a task, until `end`."""
        if self._watch is None and self._straggler_seconds is not None:
            self._watch = asyncio.create_task(self._watch_stragglers(self._straggler_seconds))
        self._requests[id] = request
        return asyncio.create_task(request.run())

    def end(self, ids: Collection[str]) -> None:
        """Forget these."""
        for id in ids:
            self._requests.pop(id, None)

    def close(self) -> None:
        """End all, and the watch."""
        if self._watch is not None:
            self._watch.cancel()
        for request in [*self._requests.values()]:
            request.finish(TruerollError("client: closed; make a new one"))

    async def _watch_stragglers(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for request in [*self._requests.values()]:
                self.num_asked_twice += request.hasten(now, seconds)
