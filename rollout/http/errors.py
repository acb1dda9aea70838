"""Errors as HTTP tells them: a status, and OpenAI's body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trueroll.errors import (
    ConfigError,
    DeadlineError,
    ForbiddenError,
    IdConflictError,
    IllegalStateError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelError,
    PushError,
    QueueFullError,
    RequestAbortedError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
    UnreadError,
    WorkerFailedError,
    WorkerLostError,
)

RETRY_AFTER_SECONDS = 1
STATUSES: dict[type[TruerollError], int] = {
    InvalidRequestError: 400,
    IdConflictError: 400,
    ConfigError: 400,
    ModelError: 400,
    ForbiddenError: 403,
    UnknownRequestError: 404,
    IllegalStateError: 409,
    PushError: 409,
    MessageTooLargeError: 413,
    QueueFullError: 429,
    RequestAbortedError: 503,
    UnavailableError: 503,
    UnreadError: 503,
    WorkerFailedError: 503,
    WorkerLostError: 503,
    DeadlineError: 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PARAM = re.compile(r"(?:prompts\[\d+\]: )?(?!prompts\[)([a-z_]\w*(?:[.\[]\w+\]?)*): ")

_ABOUT_TOKENS = re.compile(r"(?:(?:prompts|sequences)\[\d+\]: )?token ids: ")


class Gone(Exception):
    """The client has disconnected: nobody is there to be answered."""


class HttpError(TruerollError):
    """A request that is answered by `status`. `param`: the field that is wrong. `code`: a word for programs. `limit`:
    the setting that it exceeds, by which refusals are counted.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.headers, self.limit = status, param, dict(headers or {}), limit
        self.code = code or _type_of(status)


def given_twice(name: str) -> HttpError:
    """The error for a name that a query gives twice: parsers differ in which value they take."""
    return HttpError(400, f"{name}: given twice in the query; give it once", param=name[:80], code="invalid_request")


def as_http_error(error: Exception, prompt_field: str | None = None) -> HttpError:
    """What a client is told of an error; nothing of one that no user should meet. `prompt_field`: the field of the
    request that the worker's errors about token ids refer to.
    """
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, TruerollError):
        return HttpError(500, "server: broke down; its log says how", code="internal")
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    param = _param_of(str(error), prompt_field) if status == 400 else None
    return HttpError(status, str(error), param=param, code=error.code, headers=headers)


def _param_of(message: str, prompt_field: str | None) -> str | None:
    if _ABOUT_TOKENS.match(message):
        return prompt_field
    found = _PARAM.match(message)
    return found and found[1]


def error_body(error: HttpError) -> dict[str, Any]:
    """The body that tells of it."""
    told = dict(message=str(error), type=_type_of(error.status), param=error.param, code=error.code)
    return {"error": told}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
