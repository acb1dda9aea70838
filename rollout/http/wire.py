"""Read request bodies as JSON, and write answers as JSON, either as a whole or streamed as server-sent events.

Guarantees: request bodies are bounded and strictly valid JSON. Answers keep every bit of a float. Work on an answer is
cancelled as soon as the client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trueroll.errors import brief

from ..text import strings_in
from .answers import encoded, encoded_in_parts
from .bodies import taken_body
from .elements import check_elements, rough_cost
from .errors import Gone, HttpError, as_http_error, error_body
from .long_strings import Steps, parsed_in_steps
from .turns import Turns

T = TypeVar("T")
Events: TypeAlias = AsyncGenerator[dict[str, Any], None]
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

MAX_ELEMENTS = 2**12
"""Maximum cost of the elements of a body, for paths that accept only a few fields."""
_LONG_BYTES, _LONG_COST = 2**16, 2**12
"""A body is parsed in steps if it has more than `_LONG_BYTES` bytes, or if its elements cost more than `_LONG_COST`."""
_STEP_CHARS, _STEP_STRINGS = 2**18, 2**12
"""Number of characters that are searched for surrogates in one step, and number of strings that are encoded in one
step.
"""
_WHOLE_BYTES = 2**18
"""Maximum length, in bytes, of an answer that is sent as a whole. A longer answer is sent in parts, without
`Content-Length`.
"""

log = logging.getLogger(__name__)


def read_json(request: Request) -> dict[str, Any]:
    """Return the JSON object in a short request body; {} if the body is empty.

    Raise HttpError if the body is not valid.
    """
    with taken_body(request.scope) as body:
        return _result(_parse(body, MAX_ELEMENTS, is_setting=False))


class LongJson:
    """Parses request bodies of any length.

    Long bodies are parsed one at a time, in steps, and the event loop runs other work between steps. `max_elements`:
    the setting `max_body_elements`.
    """

    def __init__(self, max_elements: int) -> None:
        self._max_elements = max_elements
        self._lock = asyncio.Lock()

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in a request body; {} if the body is empty.

        Raise HttpError if the body is not valid, and Gone if the client disconnects before the body is parsed.
        """
        with taken_body(request.scope) as body:
            steps = _parse(body, self._max_elements, is_setting=True)
            if len(body) <= _LONG_BYTES and rough_cost(body, 0, len(body)) <= _LONG_COST:
                return _result(steps)
            return await while_present(request.receive, self._read_in_turn(steps))

    async def _read_in_turn(self, steps: Steps[dict[str, Any]]) -> dict[str, Any]:
        async with self._lock:
            try:
                while True:
                    await asyncio.sleep(0)
                    next(steps)
            except StopIteration as done:
                return done.value


def _result(steps: Steps[dict[str, Any]]) -> dict[str, Any]:
    """Run all steps of a parser without a pause, and return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        return done.value


def _parse(body: bytearray, max_elements: int, is_setting: bool) -> Steps[dict[str, Any]]:
    """Parse a request body, and return its JSON object.

    Yields between steps. The cost of the elements is checked before parsing, which bounds the step that parses them.
    """
    if not body:
        return {}
    yield from check_elements(body, max_elements, is_setting)
    try:
        text = body.decode()
        body.clear()  # so that memory holds only one copy of a long body
        yield
        has_surrogates = yield from _has_surrogates(text)
        content = yield from parsed_in_steps(text, _refuse_constant, object_pairs_hook=_with_each_name_once)
        yield
        if has_surrogates:
            for number, string in enumerate(strings_in(content), 1):
                string.encode()  # raises UnicodeEncodeError for a lone surrogate, which no tokenizer accepts
                if number % _STEP_STRINGS == 0:
                    yield
    except (ValueError, RecursionError) as error:
        cause = "the JSON is nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise HttpError(
            400, f"body: not valid JSON in UTF-8 ({cause}); correct the body", code="invalid_json"
        ) from None
    if not isinstance(content, dict):
        raise HttpError(400, f"body: {brief(content)} is not a JSON object; send an object", code="invalid_json")
    return content


def _has_surrogates(text: str) -> Steps[bool]:
    r"""Return whether a JSON text contains the escape of a surrogate, such as \ud83d. Yields between steps."""
    for start in range(0, len(text), _STEP_CHARS):
        end = start + _STEP_CHARS + len(r"\u")  # so that an escape at the border of two steps is found
        if text.find(r"\ud", start, end) >= 0 or text.find(r"\uD", start, end) >= 0:
            return True
        yield
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _with_each_name_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members.

    Raise ValueError if a name occurs twice in an object, because some parsers would use the first value and others the
    last value.
    """
    found = dict(members)
    if len(found) != len(members):
        name = next(name for name, count in Counter(name for name, _ in members).items() if count > 1)
        raise ValueError(f"the name {brief(name)} occurs twice in one JSON object")
    return found


def answer(content: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(encoded(content), status, media_type="application/json")


async def long_answer(content: Any, turns: Turns) -> Response:
    """Return a JSON response of any length.

    A short response has a `Content-Length`. A long response is sent in parts. Each part is produced only after the
    client has read the previous parts.
    """
    parts = encoded_in_parts(content, turns)
    begun, num_bytes = [], 0
    async for part in parts:
        begun.append(part)
        if (num_bytes := num_bytes + len(part)) > _WHOLE_BYTES:
            return _InParts(begun, parts)
    return Response(b"".join(begun), media_type="application/json")


class _InParts(Response):
    """A response that is sent in parts: `begun`, followed by `parts`."""

    media_type = "application/json"

    def __init__(self, begun: list[bytes], parts: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        del self.headers["Content-Length"]
        self._begun, self._parts = begun, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(Gone):
                await while_present(receive, self._send_parts(send))

    async def _send_parts(self, send: Send) -> None:
        while self._begun:
            await send(_body(self._begun.pop(0)))
        async for part in self._parts:
            await send(_body(part))
        await send({"type": "http.response.body", "body": b""})


def refusing(path: str, why: str) -> Handler:
    """Return a handler that refuses every request to `path`. `why`: the reason and the alternative, as a text."""

    async def refuse(request: Request) -> Response:
        raise HttpError(400, f"{path}: {why}", code="unsupported_path")

    return refuse


def error_answer(error: HttpError) -> Response:
    """Return the JSON response for an error."""
    return Response(encoded(error_body(error)), error.status, error.headers, media_type="application/json")


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects before `work` is done, cancel `work` and raise Gone.

    Call this function only after the request's body has been read.
    """
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


async def event_stream(
    receive: Receive, events: Events, names_events: bool = False, turns: Turns | None = None
) -> Response:
    """Wait for the first event, and return a response that streams all events as server-sent events.

    If an error occurs before the first event, this function raises the error, so that the error response can have the
    right HTTP status. `names_events`: whether each event is named after its field `type`, and the stream ends without
    `[DONE]`, as in Anthropic's Messages API and in OpenAI's Responses API. `turns`: required if events may be long;
    each event is then written in steps.
    """
    try:
        first = await while_present(receive, anext(events))  # type: ignore[arg-type]
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events, names_events, turns)


class _EventStream(Response):
    """A stream of server-sent events.

    If the stream fails, the last event is the error, and the stream has no `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], events: Events, names_events: bool, turns: Turns | None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["Content-Length"]
        self._first, self._events, self._names_events, self._turns = first, events, names_events, turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(Gone):
                await while_present(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        await self._send_event(send, self._first)
        try:
            async for event in self._events:
                await self._send_event(send, event)
            if not self._names_events:
                await send(_event(b"[DONE]"))
        except Exception as error:
            told = as_http_error(error)
            if told.status == 500:
                log.error("a stream failed", exc_info=error)
            await send(self._told(({"type": "error"} if self._names_events else {}) | error_body(told)))
        await send({"type": "http.response.body", "body": b""})

    async def _send_event(self, send: Send, event: dict[str, Any]) -> None:
        if self._turns is None:
            return await send(self._told(event))
        await send(_body(b"data: "))
        async for part in encoded_in_parts(event, self._turns):
            await send(_body(part))
        await send(_body(b"\n\n"))

    def _told(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the ASGI message that sends an event."""
        return _event(encoded(event), f"event: {event['type']}\n".encode() if self._names_events else b"")


def _event(data: bytes, name: bytes = b"") -> dict[str, Any]:
    return _body(name + b"data: " + data + b"\n\n")


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
