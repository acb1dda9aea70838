"""A child process that runs a model's tokenizer and renders its chat template, with limits on time and memory.

Owns the child process. Guarantees that a call returns or raises within the limits, even if a malicious chat template
controls the child. Replies are bytes of bounded length, and this process never executes anything from a reply. A child
stays in use after it refuses a text. A child that died, hung, was abandoned or used up its limits is replaced on the
next call.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import partial
from typing import Any, TypeAlias

import msgpack
import numpy as np

from trueroll.errors import said

from ..engine.models.child_process import ChildProcess, IsAbandoned, answer_calls, never
from ..engine.models.trials import Limits, limit_cpu, limit_memory

LIMITS = Limits(cpu_seconds=10, seconds=60, more_bytes=2**30)
"""`cpu_seconds` and `seconds` limit one call. `more_bytes` limits the memory of the child beyond the memory of this
process.
"""
MAX_CHARS = 2**22
"""Maximum length of a rendered conversation, in characters."""

Call: TypeAlias = tuple[str, tuple[Any, ...]]


class ChildError(Exception):
    """The child returned no result.

    The text of the error names the cause. The error text is empty if the child was killed, hung or was abandoned.
    """


class EncodingError(ChildError):
    """Raised when the tokenizer, not the chat template, has failed."""


class _Unencodable(Exception):
    """The tokenizer failed. Raised in the child; the parent raises EncodingError."""


class TooMany(Exception):
    """The text exceeds the caller's limit.

    `what`: the unit, "tokens" or "characters". `count`: size of the text in tokens or characters.
    """

    def __init__(self, what: str, count: int) -> None:
        super().__init__(f"{count} {what}")
        self.what, self.count = what, count


def image_mark(tokenizer: Any) -> tuple[str, str] | None:
    """Return the text that a chat template writes for an image, and the text that must replace it, which contains the
    placeholder. Return None if the template itself writes the placeholder.

    Gemma 3's template, for example, writes only the token that begins an image, and no placeholder.
    """
    begin, placeholder, end = (getattr(tokenizer, name, None) for name in ("boi_token", "image_token", "eoi_token"))
    if not (begin and placeholder and end) or begin == placeholder:
        return None
    return begin, f"\n\n{begin}{placeholder}{end}\n\n"


class TextChild:
    """Runs calls in one child process, one call at a time. Starts the process on first use. Thread-safe.

    `niceness`: increment of the child's niceness relative to this process, 0 to 19.
    """

    def __init__(self, tokenizer: Any, limits: Limits | None = None, niceness: int = 0) -> None:
        self._tokenizer, self._limits, self._niceness = tokenizer, limits, niceness
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def encode(self, text: str, add_special_tokens: bool, most: int, is_abandoned: IsAbandoned = never) -> np.ndarray:
        """Return the tokens of a text: int32 [num_tokens]. Raise TooMany if there are more than `most` tokens,
        ChildError if the child returns no result, and UnavailableError if no child can be started.
        """
        return self._ask_for_tokens(("encode", (add_special_tokens, most, text)), is_abandoned)

    def encode_conversation(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        most_chars: int,
        most: int,
        is_abandoned: IsAbandoned = never,
    ) -> np.ndarray:
        """Render a conversation with the chat template, and return its tokens: int32 [num_tokens].

        Raise TooMany if the text exceeds a limit, ChildError if the child returns no result, and UnavailableError if no
        child can be started.
        """
        return self._ask_for_tokens(("conversation", (messages, arguments, most_chars, most)), is_abandoned)

    def render(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        most_chars: int,
        at: float,
        is_abandoned: IsAbandoned = never,
    ) -> str:
        """Render a conversation with the chat template, and return its text. Raise the same errors as
        `encode_conversation`.

        `at`: the time that the template gets as the current time, in seconds since 1970.
        """
        return self._ask(("render", (messages, arguments, most_chars, at)), is_abandoned).decode(errors="replace")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, is_abandoned: IsAbandoned = never) -> str:
        """Return the text of tokens. Raise ChildError or UnavailableError."""
        tokens = np.asarray(token_ids, np.int64).tobytes()
        return self._ask(("decode", (tokens, skip_special_tokens)), is_abandoned).decode(errors="replace")

    def close(self) -> None:
        """Stop the process."""
        if (process := self._process) is not None:
            process.end()

    def _ask_for_tokens(self, call: Call, is_abandoned: IsAbandoned) -> np.ndarray:
        reply = self._ask(call, is_abandoned)
        return np.frombuffer(reply[: len(reply) // 4 * 4], np.int32)

    def _ask(self, call: Call, is_abandoned: IsAbandoned) -> bytes:
        try:  # MessagePack, because encoding a long text as JSON blocks all threads ten times as long
            message: bytes = msgpack.Packer(default=_large_integer).pack(call)
        except UnicodeEncodeError as error:
            raise ChildError(f"{error.object[error.start]!r} is not a valid character") from None
        except ValueError:
            raise ChildError("the conversation is nested too deeply") from None
        with self._lock:
            limits = self._limits or LIMITS
            if self._process is None:
                self._process = ChildProcess(partial(_run, self._tokenizer, limits, self._niceness))
            reply = self._process.ask(message, limits.seconds, is_abandoned)
            if reply[:1] not in (b"+", b"-", b"!", b">"):
                self._process.end()
                self._process = None
        return _read_reply(reply)


def _large_integer(value: Any) -> msgpack.ExtType:
    """Pack an integer of more than 64 bits as an extension type, because MessagePack has no type for these integers.

    Raise TypeError if the value is not an integer.
    """
    if not isinstance(value, int):
        raise TypeError(f"a conversation may contain only JSON values (got {type(value).__name__})")
    return msgpack.ExtType(0, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _read_large_integer(code: int, value: bytes) -> int:
    return int.from_bytes(value, "little", signed=True)


def _read_reply(reply: bytes) -> bytes:
    kind, rest = reply[:1], reply[1:]
    if kind == b"+":
        return rest
    if kind == b">":
        what, _, count = rest[:64].decode(errors="replace").partition(" ")
        raise TooMany(what, int(count) if count.isdecimal() else 0)
    raise (EncodingError if kind == b"!" else ChildError)(said(rest.decode(errors="replace")))


def _run(tokenizer: Any, limits: Limits, niceness: int, pipes: Sequence[socket.socket]) -> None:
    """Answer calls in the child."""
    os.nice(niceness)
    limit_memory(limits.more_bytes)

    def answer(message: bytes) -> bytes:
        limit_cpu(limits.cpu_seconds)
        return _answer(tokenizer, message)

    answer_calls(pipes[0], answer)


def _answer(tokenizer: Any, message: bytes) -> bytes:
    """Return the reply to a call. The first byte of a reply is its kind:

    - `+`: the result
    - `-`: an error text
    - `!`: an error text of the tokenizer
    - `>`: the unit and the size of a result that exceeds the caller's limit
    - `x`: an error text; the child ran out of memory
    """
    try:
        kind, arguments = msgpack.unpackb(message, ext_hook=_read_large_integer)
        return b"+" + _ANSWERS[kind](tokenizer, *arguments)
    except TooMany as error:
        return f">{error.what} {error.count}".encode()
    except _Unencodable as error:
        return f"!{error}".encode()
    except BaseException as error:  # a template may raise any exception, and a Rust panic is not an Exception
        return (b"x" if isinstance(error, MemoryError) else b"-") + _said(error).encode()


def _said(error: BaseException) -> str:
    return said(f"{type(error).__name__}: {error}")


def _encode(tokenizer: Any, add_special_tokens: bool, most: int, text: str) -> bytes:
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except MemoryError:
        raise
    except BaseException as error:
        raise _Unencodable(_said(error)) from None
    if len(token_ids) > most:
        raise TooMany("tokens", len(token_ids))
    return np.array(token_ids, np.int32).tobytes()


def _encode_conversation(
    tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any], most_chars: int, most: int
) -> bytes:
    return _encode(tokenizer, False, most, _rendered(tokenizer, messages, arguments, most_chars))


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any], most_chars: int) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    if _have_images(messages) and (mark := image_mark(tokenizer)) is not None:
        text = text.replace(*mark)
    if len(text) > MAX_CHARS:
        raise ValueError(f"the conversation has {len(text)} characters (limit {MAX_CHARS})")
    if len(text) > most_chars:
        raise TooMany("characters", len(text))
    return text


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any], most_chars: int, at: float
) -> bytes:
    with _clock_at(at):
        return _rendered(tokenizer, messages, arguments, most_chars).encode()


@contextmanager
def _clock_at(at: float) -> Iterator[None]:
    """Context manager in which templates get `at` as the current time. transformers has no argument for this time."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(at, tz)

    names = chat_template_utils.__dict__
    names["datetime"] = Clock
    try:
        yield
    finally:
        names["datetime"] = datetime


def _have_images(messages: list[dict[str, Any]]) -> bool:
    """Return whether a message has a part `{"type": "image"}`. The content of a message without images is a text, not a
    list.
    """
    contents = [message.get("content") for message in messages]
    return any({"type": "image"} in content for content in contents if isinstance(content, list))


def _decode(tokenizer: Any, tokens: bytes, skip_special_tokens: bool) -> bytes:
    token_ids = np.frombuffer(tokens, np.int64).tolist()
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text.encode()


_ANSWERS: dict[str, Callable[..., bytes]] = {
    "encode": _encode,
    "conversation": _encode_conversation,
    "render": _render,
    "decode": _decode,
}
