"""Request bodies, from the first received byte until the body is parsed.

Owns: all bytes of bodies that are incomplete or not parsed yet. Guarantees: the length and the transfer time of each
body are bounded. All unparsed bodies together stay within a budget. A small body is read even while large slow bodies
use up the budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import Receive, Scope

from .config import HttpConfig
from .errors import RETRY_AFTER_SECONDS, Gone, HttpError

MAX_OTHER_BYTES = 2**16
"""Maximum length of a body in bytes, for paths that accept only a few fields."""
UNFINISHED_BODIES = 8
"""The default of `max_unfinished_bytes`, as a multiple of `max_body_bytes`."""
_BODY = "trueroll.body"


class Bodies:
    """Reads bodies within the limits `max_body_bytes`, `max_unfinished_bytes` and `body_seconds` of `config`."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._most = config.max_unfinished_bytes or UNFINISHED_BODIES * config.max_body_bytes
        self._unfinished: set[_Body] = set()
        self._num_bytes = 0
        self._refused: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive, may_be_long: bool) -> None:
        """Read the whole body of a request, and store the body until `taken_body` takes it.

        `may_be_long`: whether the maximum length is `max_body_bytes` instead of `MAX_OTHER_BYTES`. Raise HttpError with
        status 413 for a body that is too long, and 408 for a body that does not arrive in time. Raise HttpError with
        status 503 for a body that was evicted, because the unparsed bodies exceeded their budget. Raise Gone if the
        client disconnects.
        """
        most = self._config.max_body_bytes if may_be_long else min(MAX_OTHER_BYTES, self._config.max_body_bytes)
        if _declared(scope) > most:
            raise self._refusal("length", _too_long(most))
        body = _Body(asyncio.get_running_loop().time(), self._let_go)
        self._unfinished.add(body)
        try:
            async with asyncio.timeout(self._config.body_seconds) as body.limit:
                while (message := await receive())["type"] == "http.request":
                    if body.gives_way:
                        raise TimeoutError  # the body was evicted, but its timeout has not fired yet
                    self._add(body, message.get("body", b""), most)
                    if not message.get("more_body", False):
                        scope[_BODY] = body
                        return
            raise Gone
        except TimeoutError:
            if body.gives_way:
                raise self._refusal("budget", self._no_room()) from None
            raise self._refusal("time", _too_slow(self._config.body_seconds)) from None
        finally:
            self._unfinished.discard(body)
            if scope.get(_BODY) is not body:
                body.let_go()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield GaugeMetricFamily(
            "trueroll_http_unfinished_body_bytes", "Bytes of request bodies not parsed yet.", value=self._num_bytes
        )
        refused = CounterMetricFamily(
            "trueroll_http_refused_bodies", "Request bodies not read to the end.", labels=["reason"]
        )
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        yield refused

    def _add(self, body: _Body, part: bytes, most: int) -> None:
        if len(body.content) + len(part) > most:
            raise self._refusal("length", _too_long(most))
        body.content += part
        body.num_bytes += len(part)
        self._num_bytes += len(part)
        now = asyncio.get_running_loop().time()
        while self._num_bytes > self._most:
            victim = max(self._unfinished, key=lambda each: each.cost(now))
            if victim is body:
                raise self._refusal("budget", self._no_room())
            victim.give_way()

    def _let_go(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    def _refusal(self, reason: str, error: HttpError) -> HttpError:
        self._refused[reason] += 1
        return error

    def _no_room(self) -> HttpError:
        text = (
            f"body: dropped, because the unparsed bodies of all requests exceed {self._most} bytes and this incomplete "
            "body was the largest and slowest; try again later, or send the body faster"
        )
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return HttpError(503, text, limit=self._most, code="bodies_full", headers=headers)


class _Body:
    """A body that has not been parsed yet.

    `content`: the bytes received so far. `num_bytes`: how many bytes of the budget the body uses. `limit`: timeout for
    the arrival of the whole body. `gives_way`: whether the body was evicted. `let_go`: called with the number of bytes
    that the body returns to the budget.
    """

    limit: asyncio.Timeout

    def __init__(self, began: float, let_go: Callable[[int], None]) -> None:
        self._began, self._let_go = began, let_go
        self.content = bytearray()
        self.num_bytes = 0
        self.gives_way = False

    def let_go(self) -> None:
        """Release the part of the budget that this body uses."""
        self._let_go(self.num_bytes)
        self.num_bytes = 0

    def cost(self, now: float) -> float:
        """Return the cost of this body in byte-seconds: the received bytes times the time since the body began to
        arrive.
        """
        return len(self.content) * (now - self._began + 0.001)

    def give_way(self) -> None:
        """Evict this body: drop the bytes received so far, and stop waiting for more."""
        self.gives_way = True
        self.content.clear()
        self.let_go()
        if not self.limit.expired():
            self.limit.reschedule(self._began)


@contextmanager
def taken_body(scope: MutableMapping[str, Any]) -> Iterator[bytearray]:
    """Context manager that provides a request's body after `Bodies.read` has read the body.

    The body uses the budget until the context exits. A body can be taken only once, so that the memory of the body is
    freed when the context exits.
    """
    body: _Body = scope.pop(_BODY)
    try:
        yield body.content
    finally:
        body.let_go()


def drop_body(scope: MutableMapping[str, Any]) -> None:
    """Release the part of the budget that a request's body uses, if no handler has taken the body."""
    if _BODY in scope:
        with taken_body(scope):
            pass


def _declared(scope: Scope) -> int:
    """Return the `Content-Length` of a request; 0 if the header is missing."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


def _too_long(most: int) -> HttpError:
    return HttpError(413, f"body: longer than {most} bytes; send a shorter body", limit=most, code="body_too_large")


def _too_slow(seconds: float) -> HttpError:
    return HttpError(408, f"body: incomplete after {seconds:g} s; send the body faster", limit=seconds)
