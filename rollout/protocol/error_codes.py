"""The table between the codes of errors on the wire and their classes.

A worker sends an error as its `code` and its text; a client raises the class that the code stands for, so that the same
`except` works whether the engine runs in this process or behind a socket.
"""

from __future__ import annotations

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


def error_from_code(code: str, message: str) -> TruerollError:
    """The exception that stands for `code`; a code that this version does not know gives a plain TruerollError. The
    text comes from another process: what cannot be printed is escaped, so that it can be logged and shown.
    """
    return _BY_CODE.get(code, TruerollError)(printable(message, kept=LINES))
