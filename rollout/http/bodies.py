"""JSON in and out: what is read is bounded and strictly JSON, and what is written keeps every bit of a float."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trueroll.errors import brief

from .errors import HttpError, error_body

BODY_SECONDS = 60.0
"""How long a client may take to send a body."""


class Gone(Exception):
    """The client has disconnected: nobody is there to be answered."""


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a request's body; {} for an empty one. Raise HttpError."""
    body = await _read(request, max_bytes)
    if not body:
        return {}
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half a character, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        cause = "it nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise HttpError(400, f"body: expected JSON in UTF-8, found {cause}; correct it", code="invalid_json") from None
    if not isinstance(content, dict):
        raise HttpError(400, f"body: expected a JSON object, found {brief(content)}; correct it", code="invalid_json")
    return content


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise HttpError(
                        413, f"body: expected at most {max_bytes} bytes, found more; send less", code="body_too_large"
                    )
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"body: expected all of it within {BODY_SECONDS} s, found less; send it faster") from None
    except ClientDisconnect:
        raise Gone from None
    return b"".join(parts)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is no JSON")


def encoded(content: Any) -> bytes:
    """A value as JSON in UTF-8. A float is written by the shortest digits that give it again."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")  # of half a character, which JSON writes in just this way


def answer(content: Any, status: int = 200) -> Response:
    """A response with JSON."""
    return Response(encoded(content), status, media_type="application/json")


def error_answer(error: HttpError) -> Response:
    """A response that tells of an error."""
    return Response(encoded(error_body(error)), error.status, error.headers, media_type="application/json")
