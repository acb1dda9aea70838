"""The guard in front of the application. The guard counts requests, and limits the number of open requests. For each
request, the guard checks the origin. The guard also checks the client's key and role or, on a path of a session, the
session's capability: a secret in the path that gives access to the session.

A front end without a key listens only on loopback, but any web page in a local browser can send requests to loopback.
Browsers send the origin of the page in `Origin` and the name of the server in `Host`. The guard checks `Origin` and
`Host`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import is_loopback
from .agents.registry import Registry
from .bodies import Bodies, drop_body
from .clients import Clients, check_role, note_client
from .errors import RETRY_AFTER_SECONDS, Gone, HttpError
from .pages import FILES
from .paths import SESSION, TINKER, capability_in, without_capability
from .wire import error_answer

OPEN_PATHS = {"/", "/health", "/health_generate", *FILES}
"""Paths that need no key."""
LONG_PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"),
    *(f"{SESSION}/v1/chat/completions", f"{SESSION}/v1/messages", f"{SESSION}/v1/messages/count_tokens"),
    *(f"{SESSION}/v1/responses", "/generate", f"{TINKER}/asample", f"{TINKER}/telemetry"),
}
"""Paths that accept bodies of up to `max_body_bytes`, because the bodies contain tokens or text."""
WORK_PATHS = {*LONG_PATHS, "/ui/score", f"{SESSION}/samples"}
"""Paths with the limit `max_open_requests` on the number of open requests."""
_HOST = re.compile(r"(localhost|[0-9.]{7,15}|\[[0-9a-f:]{2,39}\])(?::[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
CLIENT_LEFT = 499
"""Status in the metrics for a client that disconnects before the answer has begun."""


class Counters:
    """Metrics of requests.

    `requests`: for each path and status, the number of requests. Unknown paths are counted under the path `other`, and
    disconnected clients under the status 499. `open`: number of requests in flight that generate, score, tokenize,
    detokenize or export samples. `over_limit`: for each setting that defines a limit, the number of requests that were
    refused because of this limit.
    """

    def __init__(self) -> None:
        self._others: list[Callable[[], Iterator[Metric]]] = []
        self.requests: Counter[tuple[str, int]] = Counter()
        self.open = 0
        self.over_limit: Counter[str] = Counter()

    def include(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Make `self.collect` also yield the metrics that the function `collect` yields."""
        self._others.append(collect)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        family = CounterMetricFamily("trueroll_http_requests", "Answered requests.", labels=["path", "status"])
        for (path, status), count in self.requests.items():
            family.add_metric([path, str(status)], count)
        yield family
        yield GaugeMetricFamily("trueroll_http_open_requests", "Open requests for tokens or text.", value=self.open)
        refused = CounterMetricFamily(
            "trueroll_http_over_limit", "Requests refused because they exceed a limit.", labels=["limit"]
        )
        for limit, count in self.over_limit.items():
            refused.add_metric([limit], count)
        yield refused
        for collect in self._others:
            yield from collect()


class Guard:
    """ASGI middleware that passes permitted requests to `app` and refuses all other requests.

    `registry`: the open sessions; a path with a session's capability needs no key. `paths`: the served paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        clients: Clients,
        max_open_requests: int,
        counters: Counters,
        bodies: Bodies,
        registry: Registry,
        paths: set[str],
    ) -> None:
        self._app = app
        self._clients, self._registry = clients, registry
        self._max_open = max_open_requests
        self._counters, self._bodies, self._paths = counters, bodies, paths
        self._long_paths, self._work_paths = LONG_PATHS & paths, WORK_PATHS & paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets and lifespan events are not supported
        status = CLIENT_LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = without_capability(scope["path"])
        try:
            await self._pass(Request(scope), path, receive, noting)
        finally:
            drop_body(scope)
            self._counters.requests[path if path in self._paths else "other", status] += 1

    async def _pass(self, request: Request, path: str, receive: Receive, send: Send) -> None:
        is_work = path in self._work_paths
        try:
            self._check_origin(request, path)
            self._check_key(request, path)
            self._check_slots(is_work)
            if path not in OPEN_PATHS:
                await self._bodies.read(request.scope, receive, path in self._long_paths)
                self._check_slots(is_work)
        except HttpError as error:
            error.headers["Connection"] = "close"  # because the rest of the body will not be read
            return await error_answer(error)(request.scope, receive, send)
        except Gone:
            return
        self._counters.open += is_work
        try:
            await self._app(request.scope, receive, send)
        finally:
            self._counters.open -= is_work

    def _check_slots(self, is_work: bool) -> None:
        if is_work and self._counters.open >= self._max_open:
            raise _too_many(self._max_open)

    def _check_key(self, request: Request, path: str) -> None:
        if path in OPEN_PATHS:
            return
        if (capability := capability_in(request.scope["path"])) is not None:
            return note_client(request.scope, self._registry.find(capability).client)
        client = self._clients.find(_authorization(request, path))
        if client is None:
            raise HttpError(
                401,
                "Authorization: the API key is missing or wrong; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if path in self._paths:
            check_role(client, path)
        note_client(request.scope, client)

    def _check_origin(self, request: Request, path: str) -> None:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        # A web page can name a URL as an image, and a browser sends no `Origin` with the GET for an image. Therefore,
        # `Sec-Fetch-Site` is checked, too: SGLang's /flush_cache, for example, is a GET.
        is_foreign = path not in OPEN_PATHS and request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        if is_foreign or (origin is not None and origin.partition("://")[2] != host):
            raise HttpError(
                403, "Origin: requests from web pages of other origins are refused; send the request from a program"
            )
        if not self._clients.need_key and not _is_local(host):
            raise HttpError(403, "Host: must be localhost or a loopback IP, because the server has no API keys")


def _authorization(request: Request, path: str) -> str:
    """Return the `Authorization` header of a request. The package `tinker` sends its key in `X-API-Key`. On
    paths of the Tinker API, return this key in the form of an `Authorization` header.
    """
    if path.startswith(f"{TINKER}/") and (key := request.headers.get("X-API-Key")) is not None:
        return f"Bearer {key}"
    return request.headers.get("Authorization", "")


def _is_local(host: str) -> bool:
    """Return whether a `Host` header is localhost or a loopback IP, with or without a port."""
    found = _HOST.fullmatch(host)
    name = "" if found is None else found[1].lower()
    return name == "localhost" or is_loopback(name.strip("[]"))


def _too_many(most: int) -> HttpError:
    text = f"server: too many open requests (limit {most}); try again later"
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return HttpError(429, text, limit=most, code="queue_full", headers=headers)
