"""The mapping between error codes on the wire and exception classes.

A worker sends the `code`, text, field, value and limit of an error. The client raises the exception class that belongs
to the received code. So the same `except` clause works for an engine in the caller's process and for a remote worker.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import (
    LINES,
    ConfigError,
    DeadlineError,
    ForbiddenError,
    IdConflictError,
    IllegalStateError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelError,
    OtherBaseError,
    ProtocolError,
    PushError,
    QueueFullError,
    StaleWeightsError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
    UnreadError,
    Value,
    VersionGapError,
    WorkerFailedError,
    printable,
)

SENT_ERRORS: tuple[type[TruerollError], ...] = (
    ProtocolError,
    MessageTooLargeError,
    InvalidRequestError,
    IdConflictError,
    QueueFullError,
    UnreadError,
    ForbiddenError,
    UnavailableError,
    UnknownRequestError,
    WorkerFailedError,
    IllegalStateError,
    DeadlineError,
    StaleWeightsError,
    PushError,
    VersionGapError,
    OtherBaseError,
)

_BY_CODE = {kind.code: kind for kind in (*SENT_ERRORS, ConfigError, ModelError)}


MAX_ERROR_CHARS = 2000


def told(error: TruerollError) -> dict[str, Any]:
    """Return the arguments with which `error_from_code` recreates an error in another process."""
    text = str(error)[:MAX_ERROR_CHARS]
    return dict(code=error.code, message=text, field=error.field, value=error.value, limit=error.limit)


def error_from_code(
    code: str,
    message: str,
    field: str | None = None,
    value: Value | None = None,
    limit: int | float | None = None,
) -> TruerollError:
    """Return the exception for `code`, or a plain TruerollError if this version of trueroll does not know the code.

    The text of the error comes from another process, so unprintable characters are escaped for logs and terminals.
    """
    kind = _BY_CODE.get(code, TruerollError)
    return kind(printable(message, kept=LINES), field=field, value=value, limit=limit)
