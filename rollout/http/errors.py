"""Errors over HTTP: a status, and OpenAI's error body `{"error": {"message", "type", "param", "code"}}`."""

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
    brief,
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
_OF_PROMPT = ("prompts[", "sequences[", "media[")
"""Prefixes of `TruerollError.field` in the errors about a prompt that `AsyncRolloutClient` raises."""


class Gone(Exception):
    """Raised when the client has disconnected and needs no answer."""


class HttpError(TruerollError):
    """An error with an HTTP status.

    `status`: status of the response. `code`: machine-readable name of the error. `setting`: name of the setting that
    limits the request; the metrics count refusals by setting. `details`: the object `error.details`, which the package
    `anthropic` reads. `field`, `value`, `limit`: see `TruerollError`. In the response body, `field` is called `param`.
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
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field, value=value, limit=limit)
        self.status, self.headers, self.setting = status, dict(headers or {}), setting
        self.details = dict(details or {})
        self.code = code or _type_of(status)


def given_twice(name: str) -> HttpError:
    """Return the error for a query parameter that is given twice.

    A repeated parameter is ambiguous, because some parsers use the first value and others the last value.
    """
    return HttpError(400, f"{name}: given twice in the query; give only one value", field=name, code="invalid_request")


def model_not_found(name: object, note: str) -> HttpError:
    """Return the error for a request that names a model that is not served. `note`: text that says which models are
    served.
    """
    text = f"model: {brief(name)} is not served; {note}"
    return HttpError(404, text, field="model", value=name, code="model_not_found")


def as_http_error(error: Exception, prompt_field: str | None = None) -> HttpError:
    """Return the HTTP error for any exception. An unexpected exception becomes an error with status 500 that reveals no
    details.

    `prompt_field`: name of the request field that contains the prompts.
    """
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, TruerollError):
        return HttpError(500, "server: internal error; see the server's log", code="internal")
    if isinstance(error, InvalidRequestError) and error.field == "adapter":
        return model_not_found(error.value, "its adapter is not loaded")
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    is_of_prompt = error.field is not None and error.field.startswith(_OF_PROMPT)
    field = (prompt_field if is_of_prompt else error.field) if status == 400 else None
    about: dict[str, Any] = dict(field=field, value=error.value, limit=error.limit)
    return HttpError(status, str(error), code=error.code, headers=headers, **about)


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the response body for an error."""
    told = dict(message=str(error), type=_type_of(error.status), param=error.field, code=error.code)
    return {"error": told | ({"details": error.details} if error.details else {})}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
