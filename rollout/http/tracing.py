"""ASGI middleware that makes an OpenTelemetry span for each request.

The span of a request is a child of the caller's span, which the headers `traceparent` and `tracestate` name (W3C Trace
Context). The spans of the request's generations (`rollout.tracing`) are children of the request's span. The middleware
is behind the guard, so a client without a key makes no spans. Promises: a span contains the route of a path, such as
`/v1/models/{name}`, instead of the path, which may contain the id of a session.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..tracing import note_error
from .pages import FILES
from .paths import TINKER

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

UNTRACED = {
    *("/", "/health", "/health_generate", "/metrics", "/ui/live", *FILES),
    *(f"{TINKER}/{name}" for name in ("session_heartbeat", "retrieve_future", "telemetry")),
}
"""Paths that clients poll, and the files of the page."""
ROUTE = "trueroll.route"
"""The key under which `ExactRoute` puts the path of the route into the scope."""
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
MAX_CHARS = 512
"""Maximum length of a `traceparent` or `tracestate`. Longer values are dropped."""
MAX_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
"""A valid member of `tracestate` (https://www.w3.org/TR/trace-context-1/#list). opentelemetry would log each invalid
member.
"""


class Traced:
    """ASGI middleware that makes a span for each request to `app`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._tracer = app, tracer
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._caller_of = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in UNTRACED:
            return await self._app(scope, receive, send)
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        with self._tracer.start_as_current_span(
            method,
            context=self._caller_of(_trace_headers(scope)),
            kind=self._kind,
            attributes={"http.request.method": method, "url.scheme": scope["scheme"]},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_attribute("error.type", str(message["status"]))
                        span.set_status(self._error)
                await send(message)

            try:
                await self._app(scope, receive, noting)
            except BaseException as error:
                note_error(span, error)
                raise
            finally:
                if route := scope.get(ROUTE):
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


def _trace_headers(scope: Scope) -> dict[str, str]:
    """Return the headers of a trace context. A request with several `traceparent` headers has no trace context. An
    invalid `tracestate` is left out.
    """
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in scope["headers"]:
        if (text := name.decode("latin-1")) in found:
            found[text].append(value.decode("latin-1"))
    if len(found["traceparent"]) != 1 or len(found["traceparent"][0]) > MAX_CHARS:
        return {}
    state = ",".join(found["tracestate"])
    return {"traceparent": found["traceparent"][0]} | ({"tracestate": state} if _is_state(state) else {})


def _is_state(state: str) -> bool:
    members = [member for each in state.split(",") if (member := each.strip(" \t"))]
    return len(state) <= MAX_CHARS and len(members) <= MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
