"""The exception hierarchy. Every error that trueroll raises to users is a `TruerollError`.

Every class has a `code`, which identifies the class in messages (`docs/protocol.md`). Every error text says what is
wrong, quotes the value, and says what to do. `brief` and `said` shorten quoted text. `printable` escapes external text
before it is shown to people.

This module imports only the standard library, because all packages import it, even a client without torch. The module
is installed as `trueroll.errors`, outside the package `trueroll.rollout`, although the file is in the folder `rollout`.
"""

from __future__ import annotations

import math
import reprlib
import unicodedata
from typing import Any, Self, TypeAlias

Value: TypeAlias = bool | int | float | str
MAX_FIELD_CHARS = 128
MAX_VALUE_CHARS = 80


class TruerollError(Exception):
    """Base class of every error that trueroll raises to users.

    Besides the text, an error has attributes for programs. An attribute is None if it does not apply.

    - `field`: the invalid parameter, named as in the caller's code, such as `max_tokens` or `prompts[3]`
    - `value`: the invalid value, if it is a number, a boolean, or a text of at most `MAX_VALUE_CHARS` characters. For
      any other value, `value` is the text that `brief` returns.
    - `limit`: the numeric limit on the value
    """

    code = "internal"

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, limit: int | float | None = None
    ) -> None:
        super().__init__(message)
        self.field = None if field is None else printable(field)[:MAX_FIELD_CHARS]
        self.value = None if value is None else _plain(value)
        self.limit = limit if limit is None or _is_small(limit) else None

    def retold(self, message: str, field: str | None = None) -> Self:
        """Return a copy of the error with another text. If `field` is given, the copy has this field instead of the
        original field.
        """
        return type(self)(message, field=field or self.field, value=self.value, limit=self.limit)


class ConfigError(TruerollError):
    """A configuration value, or a combination of values, is invalid."""

    code = "invalid_config"


class ModelError(TruerollError):
    """A model folder is missing, incomplete or inconsistent, or its architecture is not supported."""

    code = "invalid_model"


class InvalidRequestError(TruerollError):
    """A request is invalid and can never be served. No part of the request was started, with two exceptions: the
    request failed because its records exceeded `max_record_bytes`, or the request was a score and the masks of its
    grammar could not be computed.
    """

    code = "invalid_request"


class UnknownRequestError(TruerollError):
    """No running request has this id, or the request has no running sample with this index."""

    code = "unknown_request"


class ProtocolError(TruerollError):
    """A message violates the protocol: its frames, MessagePack, type, version or fields are invalid."""

    code = "invalid_message"


class MessageTooLargeError(TruerollError):
    """A message is longer than the worker's limit."""

    code = "message_too_large"


class IdConflictError(TruerollError):
    """A request id is already in use for a request with different content."""

    code = "id_conflict"


class QueueFullError(TruerollError):
    """A limit on the worker's unfinished work is reached: requests, samples, bytes, calls or waiting clients."""

    code = "queue_full"


class UnreadError(TruerollError):
    """The client did not read its replies, so the worker dropped the replies. Send the request again."""

    code = "unread"


class ForbiddenError(TruerollError):
    """The client's role or connection does not allow this call. Also raised if the client's key is unknown, or if the
    worker belongs to another user.
    """

    code = "forbidden"


class UnavailableError(TruerollError):
    """The worker does not accept new requests in its current state, or its machine has run out of a resource."""

    code = "unavailable"


class WorkerFailedError(TruerollError):
    """The worker's engine failed. The request did not finish, and the worker's process is exiting."""

    code = "worker_failed"


class IllegalStateError(TruerollError):
    """The call is not valid in the worker's current state. The error text names the state."""

    code = "illegal_state"


class DeadlineError(TruerollError):
    """An operation did not complete before its deadline."""

    code = "deadline_exceeded"


class PushError(TruerollError):
    """A push of weights was refused or aborted. The error text names the cause; if a tensor is the cause, the text
    names the tensor.

    `lost`: addresses of the lost workers, if lost workers are the cause.
    """

    code = "push_failed"
    lost: tuple[str, ...] = ()


class StaleWeightsError(TruerollError):
    """The worker serves older weights than the request requires, for example after a restart. Push again."""

    code = "stale_weights"


class VersionGapError(PushError):
    """A sparse push contains only changes, but the worker does not serve the weights to which the changes apply. Push
    every tensor whole.
    """

    code = "version_gap"


class OtherBaseError(PushError):
    """A push contains only adapters, and the worker does not have the base weights of the adapters. Push the whole
    model.
    """

    code = "other_base"


class WorkerLostError(TruerollError):
    """No process, or a different process, answers at the worker's address. Only the client raises this error."""

    code = "worker_lost"


class AlignmentError(TruerollError):
    """A trainer's model cannot be aligned or is not aligned. Also raised if an aligned model gets unsupported input, or
    if the log-probs of trainer and rollout differ.
    """

    code = "not_aligned"


class RequestAbortedError(TruerollError):
    """A score request was aborted before its result was ready. Only the client raises this error."""

    code = "aborted"


_MAX_SAID_CHARS = 300
LINES = "\n\t"
"""The argument `kept` of `printable` for multi-line text."""


class _Brief(reprlib.Repr):
    """A bounded `repr`. Python's own `repr` visits the whole value, however long, and raises an error for deeply nested
    values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 80

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        return f"a map of {len(value)}"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[: self.maxother])

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"


_BRIEF = _Brief()


def brief(value: object) -> str:
    """Describe any value in at most 80 characters, for use in an error text."""
    return _BRIEF.repr(value)[:80]


def _plain(value: object) -> Value:
    """Return the value if it is a number or a short printable text, otherwise the description that `brief` returns."""
    if isinstance(value, int | float):
        return value if _is_small(value) else brief(value)
    if isinstance(value, str) and len(value) <= MAX_VALUE_CHARS and value.isprintable():
        return value
    return brief(value)


def _is_small(number: int | float) -> bool:
    """For a float, return whether it is finite. For an integer, return whether it fits in 64 bits."""
    return math.isfinite(number) if isinstance(number, float) else -(2**63) <= number < 2**64


def said(cause: object) -> str:
    """Return an error message of another package as one line, shortened and escaped. The error message of another
    package may quote the content of a file.
    """
    return printable(" ".join(str(cause).split())[:_MAX_SAID_CHARS])


def printable(text: str, kept: str = "") -> str:
    """Escape external text, so that it is safe to show in a terminal or a log.

    Invisible characters, and characters that move the cursor or change the writing direction, become Python escapes
    such as `\\x1b`. Backslashes and the characters in `kept` stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in kept or _is_seen(character) else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
