"""One request and its response: translate between HTTP/1.1 events and ASGI messages."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol, TypeAlias
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from .bounds import READ_BYTES
from .errors import HttpError, error_body
from .paths import without_capability
from .wire import encoded

Address: TypeAlias = tuple[str, int]

WRITE_BYTES = 2**18
"""Maximum number of bytes written to a connection at a time."""

log = logging.getLogger(__name__)


class Line(Protocol):
    """The interface that an exchange needs from its connection.

    `client`, `server`: addresses of the client and of this server. `writable`: set while the write buffer is empty.
    """

    client: Address
    server: Address
    writable: asyncio.Event

    @property
    def awaits_continue(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def send(self, *events: h11.Event) -> None: ...

    def resume_reading(self) -> None: ...

    def cut(self, reason: str) -> None: ...

    def finish(self) -> None: ...


@dataclass
class _Body:
    """The body of a request.

    `content`: bytes that the application has not received yet. `is_whole`: whether the last byte of the body has
    arrived. `was_told_whole`: whether the application has received the message that completes the body.
    """

    content: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    was_told_whole: bool = False

    @property
    def has_news(self) -> bool:
        """Return whether there is something that the application has not received yet: content that has arrived, or
        the message that completes the body.
        """
        return bool(self.content) or (self.is_whole and not self.was_told_whole)

    def take(self) -> bytes:
        """Return and clear the buffered content of the body."""
        content = bytes(self.content)
        self.content.clear()
        self.was_told_whole = self.is_whole
        return content


class Exchange:
    """One request and its response, translated to ASGI messages."""

    def __init__(self, connection: Line, request: h11.Request) -> None:
        self._connection = connection
        self._scope = _scope(connection, request)
        self._is_head = request.method == b"HEAD"
        self._body = _Body()
        self._has_left = False
        self._head: h11.Response | None = None
        self._has_ended = False
        self._changed = asyncio.Event()

    async def run(self, app: ASGIApp) -> None:
        """Run the application until it returns. After the application has returned, finish the request on the
        connection.
        """
        try:
            await app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            raise
        except BaseException:  # a panic of a Rust library is not an Exception
            path = without_capability(self._scope["path"])
            log.exception("%s %s: the application failed", self._scope["method"], path[:200])
        if not self._has_ended and not self._has_left:  # so that the client notices the incomplete response
            self._connection.cut("broken")
        self._connection.finish()

    def add(self, content: bytes) -> bool:
        """Add received content of the body. Return whether the connection should pause reading."""
        self._body.content += content
        self._changed.set()
        return len(self._body.content) >= READ_BYTES

    def complete(self) -> None:
        """Mark the body as complete."""
        self._body.is_whole = True
        self._changed.set()

    def leave(self) -> None:
        """End the exchange, because the client has disconnected or the connection has sent an error response."""
        self._has_left = True
        self._changed.set()

    async def _receive(self) -> Message:
        if not self._body.is_whole and self._connection.awaits_continue and not self._has_left:
            self._connection.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        while not (self._has_left or self._has_ended):
            if self._body.has_news:
                content = self._body.take()
                self._connection.resume_reading()
                return {"type": "http.request", "body": content, "more_body": not self._body.is_whole}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._has_left:
            return
        if message["type"] == "http.response.start":
            headers = [(b"date", _date(int(time.time()))), *message.get("headers", ())]
            has_more = not self._body.is_whole  # the rest of the body will not be read, so close after the answer
            if (has_more or self._connection.is_last) and (b"connection", b"close") not in headers:
                headers.append((b"connection", b"close"))
            self._head = _response(message["status"], headers)
            return
        body = memoryview(b"" if self._is_head else message.get("body", b""))
        for start in range(0, len(body), WRITE_BYTES):
            await self._write(h11.Data(data=bytes(body[start : start + WRITE_BYTES])))
        if not message.get("more_body", False):
            await self._write(h11.EndOfMessage())
            self._has_ended = True
            self._changed.set()
        elif not body:
            await self._write()

    async def _write(self, *events: h11.Event) -> None:
        """Write `events`, preceded by the head of the response if the head is still unsent.

        Return once the write buffer is empty.
        """
        if not self._has_left:
            head, self._head = self._head, None
            self._connection.send(*([] if head is None else [head]), *events)
        await self._connection.writable.wait()


def _scope(connection: Line, request: h11.Request) -> Scope:
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode(),
        "server": connection.server,
        "client": connection.client,
        "scheme": "http",
        "method": request.method.decode(),
        "root_path": "",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "headers": list(request.headers),
    }


def refusal(error: HttpError, is_head: bool) -> tuple[h11.Event, ...]:
    """Return the events of an error response that closes the connection.

    `is_head`: whether the request is a HEAD request, in which case the response has no content.
    """
    content = encoded(error_body(error))
    headers = {**error.headers, "Content-Type": "application/json", "Content-Length": str(len(content))}
    headers |= {"Connection": "close", "Date": _date(int(time.time())).decode()}
    response = _response(error.status, [(name.encode(), value.encode()) for name, value in headers.items()])
    return response, h11.Data(data=b"" if is_head else content), h11.EndOfMessage()


def _response(status: int, headers: list[tuple[bytes, bytes]]) -> h11.Response:
    return h11.Response(status_code=status, headers=headers, reason=_reason(status))


@lru_cache
def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


@lru_cache(maxsize=2)
def _date(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()
