"""The bodies of requests while they arrive.

Owns: all bytes of unfinished bodies. Promises that a body is bounded in bytes and time, that all unfinished bodies
together stay within a budget, and that a small body gets through while large slow ones hold that budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import Receive, Scope

from .config import HttpConfig
from .errors import RETRY_AFTER_SECONDS, Gone, HttpError

MAX_OTHER_BYTES = 2**16
"""Longest body for a path that takes only a few fields."""
UNFINISHED_BODIES = 8
"""The default of `max_unfinished_bytes`, in bodies of the greatest length."""
_BODY = "trueroll.body"


class Bodies:
    """Reads bodies. `config`: `max_body_bytes`, `max_unfinished_bytes` and `body_seconds`."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._most = config.max_unfinished_bytes or UNFINISHED_BODIES * config.max_body_bytes
        self._unfinished: set[_Body] = set()
        self._num_bytes = 0
        self._refused: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive, may_be_long: bool) -> None:
        """Read the whole body of a request, which `take_body` then returns. `may_be_long`: whether the limit is
        `max_body_bytes`, not `MAX_OTHER_BYTES`.

        Raise HttpError: 413 for a body that is too long, 408 for one that takes too long, 503 if others need its room
        in the budget. Raise Gone if the client leaves.
        """
        most = self._config.max_body_bytes if may_be_long else min(MAX_OTHER_BYTES, self._config.max_body_bytes)
        if _declared(scope) > most:
            raise self._refusal("length", _too_long(most))
        body = _Body(asyncio.get_running_loop().time())
        self._unfinished.add(body)
        try:
            async with asyncio.timeout(self._config.body_seconds) as body.limit:
                while (message := await receive())["type"] == "http.request":
                    if body.gives_way:
                        raise TimeoutError  # as its limit will, which has not fired yet
                    self._add(body, message.get("body", b""), most)
                    if not message.get("more_body", False):
                        scope[_BODY] = body.content
                        return
            raise Gone
        except TimeoutError:
            if body.gives_way:
                raise self._refusal("budget", self._no_room()) from None
            raise self._refusal("time", _too_slow(self._config.body_seconds)) from None
        finally:
            self._unfinished.discard(body)
            self._num_bytes -= len(body.content)

    def collect(self) -> Iterator[Metric]:
        """The metrics, as they are now."""
        yield GaugeMetricFamily("trueroll_http_unfinished_body_bytes", "Of all connections.", value=self._num_bytes)
        refused = CounterMetricFamily("trueroll_http_refused_bodies", "Not read to the end.", labels=["reason"])
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        yield refused

    def _add(self, body: _Body, part: bytes, most: int) -> None:
        if len(body.content) + len(part) > most:
            raise self._refusal("length", _too_long(most))
        body.content += part
        self._num_bytes += len(part)
        now = asyncio.get_running_loop().time()
        while self._num_bytes > self._most:
            victim = max(self._unfinished, key=lambda each: each.cost(now))
            if victim is body:
                raise self._refusal("budget", self._no_room())
            self._num_bytes -= len(victim.content)
            victim.give_way()

    def _refusal(self, reason: str, error: HttpError) -> HttpError:
        self._refused[reason] += 1
        return error

    def _no_room(self) -> HttpError:
        text = (
            f"body: all unfinished bodies exceed {self._most} bytes, and this one holds the most for the longest time"
        )
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return HttpError(503, f"{text}; try again later, or send it faster", code="bodies_full", headers=headers)


class _Body:
    """An unfinished body. `content`: what has arrived. `limit`: the timeout of its read."""

    limit: asyncio.Timeout

    def __init__(self, began: float) -> None:
        self._began = began
        self.content = bytearray()
        self.gives_way = False

    def cost(self, now: float) -> float:
        """Byte-seconds: how much of the budget it has held for how long."""
        return len(self.content) * (now - self._began + 0.001)

    def give_way(self) -> None:
        """Drop what has arrived, and end the wait for the rest."""
        self.gives_way = True
        self.content.clear()
        if not self.limit.expired():
            self.limit.reschedule(self._began)


def take_body(scope: MutableMapping[str, Any]) -> bytearray:
    """The body that `Bodies.read` read for this request. It is handed over once, so that nothing keeps it longer."""
    return scope.pop(_BODY)


def _declared(scope: Scope) -> int:
    """The length that the head of a request names; 0 if it names none."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


def _too_long(most: int) -> HttpError:
    return HttpError(413, f"body: longer than {most} bytes; send less", code="body_too_large")


def _too_slow(seconds: float) -> HttpError:
    return HttpError(408, f"body: incomplete after {seconds:g} s; send it faster")
