"""The open sessions of a front end.

A session is reached by its capability, a secret text that `POST /sessions` returns. The capability gives access to this
session only. Owns: digests of the capabilities (but not the capabilities themselves), and the bounds on the number of
sessions and on the memory of all sessions. Guarantees:

- A wrong capability and the capability of a deleted session give access to nothing. The time of a lookup reveals
  nothing about other capabilities.
- A session is deleted after `session_seconds` without a request.
- Deleting a session ends its running calls.
- No session and no call begins while the sessions together use `max_session_bytes` or more.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ...network.keys import Client
from ...sessions.session import AsyncSession
from ..config import HttpConfig
from ..errors import RETRY_AFTER_SECONDS, HttpError
from .call import AgentCall

CAPABILITY_BYTES = 24
_MOST_PAUSE = 60.0
"""Maximum time, in seconds, between two searches for sessions without requests."""


@dataclass(eq=False)
class OpenSession:
    """A session, and the data that the front end keeps about it.

    `client`: the client that began the session. `sampling`: sampling parameters of all calls, in the form of the fields
    of `/v1/chat/completions`. `template`: arguments of the chat template for all calls. `model`: the served model or
    adapter that answers all calls; None if each call may name an adapter. `created`: seconds since 1970. `used`:
    monotonic time at which the last request ended. `num_open`: number of running requests. `num_bytes`: memory of the
    session after its last request. `is_ended`: whether the session was deleted. `export`: a lock, held while samples
    are exported.
    """

    session: AsyncSession
    client: Client
    sampling: dict[str, Any]
    template: dict[str, Any]
    model: str | None = None
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    num_open: int = 0
    num_bytes: int = 0
    is_ended: bool = False
    export: asyncio.Lock = field(default_factory=asyncio.Lock)

    def template_of(self, call: AgentCall) -> dict[str, Any]:
        """Return the arguments of the chat template for a call. The session's arguments override the arguments of the
        request.
        """
        return call.chat_template_kwargs | self.template


class Registry:
    """The open sessions, limited by `max_sessions`, `max_session_bytes` and `session_seconds` of `config`."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._opened: dict[bytes, OpenSession] = {}
        self._num_bytes = 0
        self._num_begun = 0
        self._num_expired = 0

    def begin(self, opened: OpenSession) -> str:
        """Add a session, and return its capability. Raise HttpError if there are too many sessions."""
        if len(self._opened) >= self._config.max_sessions:
            raise _full("max_sessions", len(self._opened), self._config.max_sessions, "sessions are open")
        self._check_room()
        capability = secrets.token_urlsafe(CAPABILITY_BYTES)
        self._opened[_digest(capability)] = opened
        self._num_begun += 1
        return capability

    def find(self, capability: str) -> OpenSession:
        """Return the session of a capability. Raise HttpError if no session has this capability."""
        opened = self._opened.get(_digest(capability))
        if opened is None:
            text = "session: there is no open session with this id; begin one with POST /sessions"
            raise HttpError(404, text, code="session_not_found")
        return opened

    @contextmanager
    def request(self, opened: OpenSession, adds: bool = False) -> Iterator[None]:
        """Context manager for a request to a session. The session does not expire during the request.

        `adds`: whether the request may add messages to the session. If `adds` is true, raise HttpError while all
        sessions together use `max_session_bytes` or more.
        """
        if adds:
            self._check_room()
        opened.num_open += 1
        try:
            yield
        finally:
            opened.num_open -= 1
            opened.used = time.monotonic()
            self._count(opened)

    async def end(self, capability: str) -> None:
        """Delete the session of a capability. Raise HttpError if no session has this capability."""
        opened = self.find(capability)
        await self._end(_digest(capability), opened)

    async def run(self) -> None:
        """Until this call is cancelled, delete sessions that got no request for `session_seconds`. Then end all
        sessions.
        """
        try:
            while True:
                await asyncio.sleep(min(_MOST_PAUSE, self._config.session_seconds / 4))
                await self._expire()
        finally:
            for digest, opened in [*self._opened.items()]:
                await self._end(digest, opened)

    async def _expire(self) -> None:
        before = time.monotonic() - self._config.session_seconds
        for digest, opened in [*self._opened.items()]:
            if not (opened.is_ended or opened.num_open) and opened.used < before:
                self._num_expired += 1
                await self._end(digest, opened)

    async def _end(self, digest: bytes, opened: OpenSession) -> None:
        if not opened.is_ended:
            opened.is_ended = True
            del self._opened[digest]
            self._num_bytes -= opened.num_bytes
        await opened.session.close()

    def _count(self, opened: OpenSession) -> None:
        """Record how much memory a session uses now. Does nothing if the session was deleted."""
        if not opened.is_ended:
            self._num_bytes += opened.session.num_bytes - opened.num_bytes
            opened.num_bytes = opened.session.num_bytes

    def _check_room(self) -> None:
        if self._num_bytes >= self._config.max_session_bytes:
            limit = self._config.max_session_bytes
            raise _full("max_session_bytes", self._num_bytes, limit, "bytes of sessions are in memory")

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield GaugeMetricFamily("trueroll_http_sessions", "Open sessions.", value=len(self._opened))
        yield GaugeMetricFamily("trueroll_http_session_bytes", "Memory of open sessions.", value=self._num_bytes)
        yield CounterMetricFamily("trueroll_http_begun_sessions", "Begun sessions.", value=self._num_begun)
        expired = "Sessions deleted because they had no requests."
        yield CounterMetricFamily("trueroll_http_expired_sessions", expired, value=self._num_expired)


def _digest(capability: str) -> bytes:
    return hashlib.sha256(capability.encode(errors="surrogateescape")).digest()


def _full(setting: str, found: int, limit: int, what: str) -> HttpError:
    text = f"sessions: {found} {what} (limit {limit}); delete sessions, or raise --{setting.replace('_', '-')}"
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return HttpError(429, text, value=found, limit=limit, code="sessions_full", headers=headers, setting=setting)
