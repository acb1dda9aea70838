"""The one tree of exceptions: every error that a user can meet, whichever folder raises it, is a `TruerollError`.

Every class carries a `code`, the word that stands for it on the wire (`docs/protocol.md`). Every message says what is
wrong, with the value, and what to do, and what it quotes is short: `brief`, `said`. `printable` escapes names and texts
from outside for people.

The lowest floor: it imports the standard library alone, and every folder, and a client without torch, imports it. It is
installed as `trueroll.errors`, apart from the package `trueroll.rollout`, although its file lies in that one's folder.
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
    """Root of every error that a user of trueroll can meet.

    Beside the text an error tells programs what it is about, None where there is nothing to tell. `field`: the
    parameter that is wrong, as the caller wrote it: `max_tokens`, `prompts[3]`. `value`: what was found: a number, a
    truth value or a text of at most `MAX_VALUE_CHARS` characters, by `brief` if it is anything else. `limit`: the
    number that the value has to keep to.
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
        """The same error with another text and, if it is given, another field."""
        return type(self)(message, field=field or self.field, value=self.value, limit=self.limit)


class ConfigError(TruerollError):
    """A configuration value, or a combination of them, cannot work."""

    code = "invalid_config"


class ModelError(TruerollError):
    """A model folder is missing, incomplete, inconsistent or of an unsupported architecture."""

    code = "invalid_model"


class InvalidRequestError(TruerollError):
    """A request can never be served as it stands; nothing was started for it."""

    code = "invalid_request"


class UnknownRequestError(TruerollError):
    """A request id, or a sample index of it, names nothing that is running."""

    code = "unknown_request"


class ProtocolError(TruerollError):
    """A message is not what the protocol prescribes: frames, MessagePack, type, version or fields."""

    code = "invalid_message"


class MessageTooLargeError(TruerollError):
    """A message is longer than the worker accepts."""

    code = "message_too_large"


class IdConflictError(TruerollError):
    """A request id is in use for a request with other content."""

    code = "id_conflict"


class QueueFullError(TruerollError):
    """The worker holds as much unfinished work as it accepts: requests, their samples or bytes, calls, or waiters."""

    code = "queue_full"


class UnreadError(TruerollError):
    """The client did not read its replies, and the worker gave them up; ask again."""

    code = "unread"


class ForbiddenError(TruerollError):
    """The client's role or its connection does not allow this call, its key is unknown, or the worker is another
    user's.
    """

    code = "forbidden"


class UnavailableError(TruerollError):
    """The worker, or the machine, is in a state in which no new request is taken."""

    code = "unavailable"


class WorkerFailedError(TruerollError):
    """The worker's engine failed; the request was not finished, and the process is ending."""

    code = "worker_failed"


class IllegalStateError(TruerollError):
    """The worker is in a state in which this call makes no sense; the text names it."""

    code = "illegal_state"


class DeadlineError(TruerollError):
    """Something did not happen within the time it was given."""

    code = "deadline_exceeded"


class PushError(TruerollError):
    """A push of weights was refused or broke off; the text says what was wrong, and with which tensor. `lost`: the
    addresses of the workers that were lost, if that is why.
    """

    code = "push_failed"
    lost: tuple[str, ...] = ()


class StaleWeightsError(TruerollError):
    """The worker serves older weights than the request demands, as one does that was started anew; push again."""

    code = "stale_weights"


class VersionGapError(PushError):
    """A push of changed elements refers to weights that the worker does not serve; push every tensor whole."""

    code = "version_gap"


class OtherBaseError(PushError):
    """A push of adapters alone is to be added to weights that the worker does not have; push the model whole."""

    code = "other_base"


class WorkerLostError(TruerollError):
    """Nothing answers at the worker's address, or another process does. Raised by the client, never sent."""

    code = "worker_lost"


class AlignmentError(TruerollError):
    """A trainer's model cannot be aligned, is not aligned, or was given what an aligned one cannot take, or log-probs
    of trainer and rollout do not fit together.
    """

    code = "not_aligned"


class RequestAbortedError(TruerollError):
    """A score request was aborted before it had a result. Raised by the client, never sent."""

    code = "aborted"


_MAX_SAID_CHARS = 300
LINES = "\n\t"
"""What `printable` is to keep in a text of several lines."""


class _Brief(reprlib.Repr):
    """Python's own `repr` walks through all of a value, however long, and raises where it is deep."""

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
    """What was found, for the text of an error: at most 80 characters of any value."""
    return _BRIEF.repr(value)[:80]


def _plain(value: object) -> Value:
    """The value, if it is a number or a short text that can be shown and sent; otherwise what `brief` says of it."""
    if isinstance(value, int | float):
        return value if _is_small(value) else brief(value)
    if isinstance(value, str) and len(value) <= MAX_VALUE_CHARS and value.isprintable():
        return value
    return brief(value)


def _is_small(number: int | float) -> bool:
    """Whether the number is finite and, if it is an integer, fits in 64 bits."""
    return math.isfinite(number) if isinstance(number, float) else -(2**63) <= number < 2**64


def said(cause: object) -> str:
    """What another package says of a file, which it may quote: in one line, cut, and escaped as by `printable`."""
    return printable(" ".join(str(cause).split())[:_MAX_SAID_CHARS])


def printable(text: str, kept: str = "") -> str:
    """Escape a text from outside so that a terminal or a log may show it: characters that are invisible, move the
    cursor or turn the direction of writing are written as in a literal of Python, such as `\\x1b`. Characters in `kept`
    and backslashes stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in kept or _is_seen(character) else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
