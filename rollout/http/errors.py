"""Errors as HTTP tells them: a status, and OpenAI's body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

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
_OF_PROMPT = ("prompts[", "sequences[")
"""How the fields begin that a client of the worker has prompts in."""


class Gone(Exception):
    """The client has disconnected: nobody is there to be answered."""


class HttpError(TruerollError):
    """A request that is answered by `status`. `code`: a word for programs. `setting`: whose limit it exceeds, by which
    refusals are counted. `field`, `value`, `limit`: see `TruerollError`; the body calls the field `param`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        limit: int | float | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        setting: str | None = None,
    ) -> None:
        super().__init__(message, field=field, value=value, limit=limit)
        self.status, self.headers, self.setting = status, dict(headers or {}), setting
        self.code = code or _type_of(status)


def given_twice(name: str) -> HttpError:
    """The error for a name that a query gives twice: parsers differ in which value they take."""
    return HttpError(400, f"{name}: given twice in the query; give it once", field=name, code="invalid_request")


def as_http_error(error: Exception, prompt_field: str | None = None) -> HttpError:
    """What a client is told of an error; nothing of one that no user should meet. `prompt_field`: the field of the
    request that has the prompts.
    """
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, TruerollError):
        return HttpError(500, "server: broke down; its log says how", code="internal")
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    is_of_prompt = error.field is not None and error.field.startswith(_OF_PROMPT)
    field = (prompt_field if is_of_prompt else error.field) if status == 400 else None
    about: dict[str, Any] = dict(field=field, value=error.value, limit=error.limit)
    return HttpError(status, str(error), code=error.code, headers=headers, **about)


def error_body(error: HttpError) -> dict[str, Any]:
    """The body that tells of it."""
    told = dict(message=str(error), type=_type_of(error.status), param=error.field, code=error.code)
    return {"error": told}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
