"""The table between the codes of errors on the wire and their classes.

A worker sends an error as its `code`, its text and what it is about; a client raises the class that the code stands
for, so that the same `except` works whether the engine runs in this process or behind a socket.
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
    """What another process is told of an error: the arguments of `error_from_code`."""
    text = str(error)[:MAX_ERROR_CHARS]
    return dict(code=error.code, message=text, field=error.field, value=error.value, limit=error.limit)


def error_from_code(
    code: str,
    message: str,
    field: str | None = None,
    value: Value | None = None,
    limit: int | float | None = None,
) -> TruerollError:
    """The exception that stands for `code`; a code that this version does not know gives a plain TruerollError. The
    texts come from another process: what cannot be printed is escaped, so that it can be logged and shown.
    """
    kind = _BY_CODE.get(code, TruerollError)
    return kind(printable(message, kept=LINES), field=field, value=value, limit=limit)
