"""The open sessions of the Tinker API, and their promises: requests that run while their clients poll for the outcome.

A session's id is a capability, a secret text that `create_session` returns. The ids of a session's sampling sessions
and promises begin with the session's id. Owns: digests of the capabilities, the running requests, and the outcomes of
requests until the clients have read them. Guarantees:

- An id gives access only to the user of its session. A wrong id gives access to nothing.
- A promise has exactly one outcome: an answer or an error. After the first read, the outcome can be read again for
  `TOLD_SECONDS`, or until the memory is needed.
- If a request is sent again while its promise is kept, the repeated request gets the same promise.
- At most `max_open_requests` promises are running or unread, and no promise begins while promises use
  `max_session_bytes` or more.
- A session that gets no request for `SILENT_SECONDS` (or `session_seconds`, if that is shorter) ends. When a session
  ends, its running requests end. An outcome that is not read within `session_seconds` is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ...network.keys import Client
from ..agents.registry import CAPABILITY_BYTES
from ..config import HttpConfig
from ..errors import RETRY_AFTER_SECONDS, HttpError, as_http_error

SILENT_SECONDS = 120.0
"""Time after which a session without requests ends. The package `tinker` sends a heartbeat every 10 s."""
TOLD_SECONDS = 60.0
"""Time, in seconds, for which an outcome can be read again after the first read."""
POLL_SECONDS = 30.0
"""Maximum time for which a poll waits. The package `tinker` waits for 45 s."""
_MOST_PAUSE = 15.0
_ID = re.compile(r"(.*):(0|[1-9][0-9]{0,18})")
"""The id of a sampling session is the session's id, a colon and a number. The id of a promise is the sampling session's
id, a colon and a number.
"""

Key: TypeAlias = tuple[int, int]
"""The sampling session's number within its session, and the request's number (`seq_id`)."""
Work: TypeAlias = Callable[[], Coroutine[Any, Any, bytes]]
"""Returns the answer to a request."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TinkerSession:
    """An open session. `client`: the client that began the session. `used`: monotonic time of the last request."""

    digest: bytes
    client: Client
    used: float = field(default_factory=time.monotonic)
    promises: dict[Key, Promise] = field(default_factory=dict)


@dataclass(eq=False)
class Promise:
    """A request and its outcome.

    `task`: runs the request. `fingerprint`: a digest of the request. `num_bytes`: estimated memory. `since`: monotonic
    time at which the request ended, or at which its outcome was first read. `is_kept`: whether the promise can still be
    found.
    """

    session: TinkerSession
    key: Key
    task: asyncio.Task[bytes]
    fingerprint: bytes
    num_bytes: int
    since: float | None = None
    is_kept: bool = True

    @property
    def error(self) -> HttpError | None:
        """The error of a request that has ended; None if the request has an answer."""
        if self.task.cancelled():
            return HttpError(499, "the request was cancelled", code="aborted")
        found = self.task.exception()
        return as_http_error(found, "prompt") if isinstance(found, Exception) else None


class Promises:
    """The open sessions and their promises, limited by `max_sessions`, `max_open_requests`, `max_session_bytes` and
    `session_seconds` of `config`.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._silent_seconds = min(SILENT_SECONDS, config.session_seconds)
        self._sessions: dict[bytes, TinkerSession] = {}
        self._told: dict[Promise, None] = {}
        self._num_promises = 0
        self._num_bytes = 0

    def begin_session(self, client: Client) -> str:
        """Open a session, and return its id. Raise HttpError if there are too many sessions."""
        if len(self._sessions) >= self._config.max_sessions:
            raise _full("max_sessions", len(self._sessions), self._config.max_sessions, "sessions are open")
        capability = secrets.token_urlsafe(CAPABILITY_BYTES)
        digest = _digest(capability)
        self._sessions[digest] = TinkerSession(digest, client)
        return capability

    def session(self, capability: str, client: Client, status: int = 404) -> TinkerSession:
        """Return the session with the id `capability`. Raise HttpError with `status` if the client's user has no
        session with this id.
        """
        found = self._sessions.get(_digest(capability))
        if found is None or found.client.user != client.user:
            text = "session: there is no open session with this id; create a new ServiceClient"
            raise HttpError(status, text, code="session_not_found")
        found.used = time.monotonic()
        return found

    def sampling_session(self, id: str, client: Client) -> tuple[TinkerSession, int]:
        """Return the session to which a sampling session belongs, and the number of the sampling session. Raise
        HttpError if no session has the session id that the sampling session's id contains.
        """
        capability, number = _split(id)
        return self.session(capability, client), number

    def begin(
        self, place: tuple[TinkerSession, int], seq_id: int, fingerprint: bytes, num_bytes: int, work: Work
    ) -> None:
        """Start a request, unless the same request has a promise already.

        `place`: the result of `sampling_session`. `num_bytes`: estimated memory of the request while it runs. `work`:
        runs the request, and returns the answer. Raise HttpError if a different request has the same `seq_id`, or if
        there is no room for another promise.
        """
        session, number = place
        if (known := session.promises.get((number, seq_id))) is not None:
            if known.fingerprint != fingerprint:
                text = f"seq_id: {seq_id} names another request of this sampling session; use a new seq_id"
                raise HttpError(409, text, field="seq_id", value=seq_id, code="id_conflict")
            return
        self._check_room()
        promise = Promise(session, (number, seq_id), asyncio.create_task(work()), fingerprint, num_bytes)
        session.promises[promise.key] = promise
        self._num_promises += 1
        self._num_bytes += promise.num_bytes
        promise.task.add_done_callback(lambda _: self._finish(promise))

    def find(self, request_id: str, client: Client) -> Promise:
        """Return a promise. If there is no such promise, raise HttpError with status 410, which makes the client send
        the request again.
        """
        id, seq_id = _split(request_id)
        try:
            session, number = self.sampling_session(id, client)
            found = session.promises.get((number, seq_id))
        except HttpError:
            found = None
        if found is None:
            text = "request_id: there is no promise with this id, or its outcome is no longer kept; sample again"
            raise HttpError(410, text, field="request_id", code="promise_not_found")
        return found

    async def wait(self, promise: Promise) -> bool:
        """Wait until a request ends, for up to `POLL_SECONDS`. Return whether the request has ended."""
        await asyncio.wait({promise.task}, timeout=POLL_SECONDS)
        return promise.task.done()

    def tell(self, promise: Promise) -> None:
        """Record that the outcome of a promise was read."""
        if promise.is_kept and promise not in self._told:
            promise.since = time.monotonic()
            self._told[promise] = None

    async def run(self) -> None:
        """Until this call is cancelled, end sessions that get no requests, and drop old outcomes. Then end all
        sessions.
        """
        try:
            while True:
                await asyncio.sleep(min(_MOST_PAUSE, self._silent_seconds / 4))
                self._collect()
        finally:
            tasks = [promise.task for session in self._sessions.values() for promise in session.promises.values()]
            for session in [*self._sessions.values()]:
                self._end(session)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _collect(self) -> None:
        now = time.monotonic()
        for session in [*self._sessions.values()]:
            if session.used < now - self._silent_seconds:
                self._end(session)
                continue
            for promise in [*session.promises.values()]:
                kept_seconds = TOLD_SECONDS if promise in self._told else self._config.session_seconds
                if promise.since is not None and promise.since < now - kept_seconds:
                    self._drop(promise)

    def _end(self, session: TinkerSession) -> None:
        del self._sessions[session.digest]
        for promise in [*session.promises.values()]:
            self._drop(promise)

    def _drop(self, promise: Promise) -> None:
        """Drop a promise, and end the request of the promise."""
        promise.is_kept = False
        promise.task.cancel()
        del promise.session.promises[promise.key]
        self._told.pop(promise, None)
        self._num_promises -= 1
        self._num_bytes -= promise.num_bytes

    def _finish(self, promise: Promise) -> None:
        """Record that the request of a promise has ended. Log the error if the request failed with status 500."""
        error = promise.error
        if error is not None and error.status == 500:
            log.error("a request failed", exc_info=promise.task.exception())
        if promise.is_kept:
            promise.since = time.monotonic()
            num_bytes = 0 if error is not None else len(promise.task.result())
            self._num_bytes += num_bytes - promise.num_bytes
            promise.num_bytes = num_bytes
            self._make_room()

    def _make_room(self) -> None:
        """Drop outcomes that were read, the oldest first, until the number of such outcomes and the memory of all
        promises are within the limits.
        """
        most, limit = self._config.max_open_requests, self._config.max_session_bytes
        while self._told and (len(self._told) > most or self._num_bytes >= limit):
            self._drop(next(iter(self._told)))

    def _check_room(self) -> None:
        self._make_room()
        if (unread := self._num_promises - len(self._told)) >= (most := self._config.max_open_requests):
            raise _full("max_open_requests", unread, most, "requests are running or unread")
        if self._num_bytes >= (limit := self._config.max_session_bytes):
            raise _full("max_session_bytes", self._num_bytes, limit, "bytes of outcomes are in memory")

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield GaugeMetricFamily("trueroll_http_tinker_sessions", "Open sessions.", value=len(self._sessions))
        yield GaugeMetricFamily("trueroll_http_tinker_promises", "Kept promises.", value=self._num_promises)
        yield GaugeMetricFamily("trueroll_http_tinker_bytes", "Memory of promises.", value=self._num_bytes)


def _split(id: str) -> tuple[str, int]:
    """Split the id of a sampling session or promise into the id before the last colon and the number after this colon.
    Return an empty text and 0 for a malformed id.
    """
    found = _ID.fullmatch(id)
    return (found[1], int(found[2])) if found else ("", 0)


def _digest(capability: str) -> bytes:
    return hashlib.sha256(capability.encode(errors="surrogateescape")).digest()


def _full(setting: str, found: int, limit: int, what: str) -> HttpError:
    text = f"server: {found} {what} (limit {limit}); try again later, or raise --{setting.replace('_', '-')}"
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return HttpError(429, text, value=found, limit=limit, code="queue_full", headers=headers, setting=setting)
