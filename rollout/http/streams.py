"""Answers that take long: given up as soon as their client has gone, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .bodies import Gone, encoded
from .errors import as_http_error, error_body

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any], None]

log = logging.getLogger(__name__)


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Cancels it and raises Gone if the client disconnects before. The body has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def event_stream(receive: Receive, events: Events) -> Response:
    """A response of server-sent events, once the first is there. Raises what kept it from coming, so that an error at
    the beginning has its status.
    """
    try:
        first = await while_present(receive, anext(events))  # type: ignore[arg-type]
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events)


class _EventStream(Response):
    """An error ends it with an event that says so, and without `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["Content-Length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_present(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        await send(_body(encoded(self._first)))
        try:
            async for event in self._events:
                await send(_body(encoded(event)))
            await send(_body(b"[DONE]"))
        except Exception as error:
            told = as_http_error(error)
            if told.status == 500:
                log.error("a stream broke off", exc_info=error)
            await send(_body(encoded(error_body(told))))
        await send({"type": "http.response.body", "body": b""})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
