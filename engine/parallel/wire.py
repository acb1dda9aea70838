"""Messages between the leader and the followers: MessagePack, with arrays as bytes. A follower sends a single message,
`failed`, if it fails.

A message is a pair: the name of a command, and its content. `Channel` sends messages through a socket.
"""

from __future__ import annotations

import select
import socket
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import msgpack
import numpy as np

from ...kernels.edits import EditedText, RowEdits, Rules
from ..grammars.source import Grammar
from ..media import ImageInput
from ..outputs.open_requests import DRAW
from ..request import Distribution
from ..running.mtp import DraftStep
from ..running.step import Draws, JournalRows, ScoredRows, Step
from ..scheduling.encodings import EncodeTask
from ..scheduling.media import ImageRows

_ARRAY, _OBJECT = 1, 2
_SENT = (
    *(Step, Draws, RowEdits, Rules, EditedText, ScoredRows, JournalRows, DraftStep, ImageRows, EncodeTask),
    *(ImageInput, Grammar),
)
_CLASSES: dict[str, Any] = {each.__name__: each for each in _SENT}
_PLAIN = "int64", "int32", "uint8", "float32", "bool"
_DTYPES = {"draw": DRAW} | {name: np.dtype(name) for name in _PLAIN}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


class Channel:
    """Sends and receives messages through one end of a socket pair. `most_seconds`: how long a call of `send` may wait
    for the other process to receive.
    """

    def __init__(self, end: socket.socket, most_seconds: float) -> None:
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(most_seconds), 0))

    def send(self, name: str, content: object = None) -> None:
        """Send a message. Raise OSError if the other process has ended or does not receive the message in time."""
        self.send_packed(packed(name, content))

    def send_packed(self, message: bytes) -> None:
        """Send a message that `packed` has encoded. Raise the errors of `send`."""
        self._socket.sendall(message)

    def receive(self) -> tuple[str, Any]:
        """Wait for the next message. Raise EOFError if the other process has ended."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return unpacked(self._read(length))

    def send_files(self, files: Sequence[int]) -> None:
        """Send file descriptors. Raise the errors of `send`."""
        socket.send_fds(self._socket, [b"\0"], files)

    def receive_files(self, count: int) -> list[int]:
        """Wait for descriptors from `send_files`, and return them. Raise EOFError if the other process has ended."""
        message, files, _, _ = socket.recv_fds(self._socket, 1, count)
        if not message:
            raise EOFError
        if len(files) != count:
            raise OSError(
                f"received only {len(files)} of {count} file descriptors; raise the limit on open files (ulimit -n)"
            )
        return list(files)

    def has_news(self, seconds: float = 0.0) -> bool:
        """Return whether a message has arrived or the other process has ended. Wait up to `seconds` seconds for a
        message or for the end of the other process.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def is_closed(self) -> bool:
        """Return whether the other process has closed its end or has ended, even if messages have not been received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket. A `receive` in the other process then raises EOFError."""
        self._socket.close()

    def _read(self, length: int) -> memoryview:
        found, done = memoryview(bytearray(length)), 0
        while done < length:
            if not (count := self._socket.recv_into(found[done:])):
                raise EOFError
            done += count
        return found


def packed(name: str, content: object) -> bytes:
    """Return a message as bytes, preceded by its length."""
    message = cast(bytes, msgpack.packb((name, content), default=_packed))
    return _LENGTH.pack(len(message)) + message


def unpacked(message: bytes | memoryview) -> tuple[str, Any]:
    """Return the name and the content of a message. `message`: the bytes of a message, without the length."""
    length = len(message)
    name, content = msgpack.unpackb(
        message, ext_hook=_unpacked, strict_map_key=False, max_ext_len=length, max_bin_len=length
    )
    return name, content


def _packed(value: Any) -> Any:
    if isinstance(value, array):
        value = np.array(value, np.int64)
    if isinstance(value, np.ndarray):
        content = _NAMES[value.dtype], value.shape, np.ascontiguousarray(value).tobytes()
        return msgpack.ExtType(_ARRAY, msgpack.packb(content))
    if isinstance(value, Distribution):
        content = {name: getattr(value, name) for name in Distribution.model_fields}  # a subclass may have more fields
        return msgpack.ExtType(_OBJECT, msgpack.packb(("Distribution", content), default=_packed))
    if isinstance(value, RowEdits):
        value = value.know()
    if type(value).__name__ in _CLASSES:
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        return msgpack.ExtType(_OBJECT, msgpack.packb((type(value).__name__, content), default=_packed))
    if isinstance(value, Mapping):
        return dict(value)
    return list(value)


def _unpacked(code: int, content: bytes) -> Any:
    if code == _ARRAY:
        name, shape, values = msgpack.unpackb(content, max_bin_len=len(content))
        return np.frombuffer(bytearray(values), _DTYPES[name]).reshape(shape)  # torch needs writable memory
    name, values = msgpack.unpackb(
        content, ext_hook=_unpacked, strict_map_key=False, max_ext_len=len(content), max_bin_len=len(content)
    )
    make: Callable[..., Any] = Distribution if name == "Distribution" else _CLASSES[name]
    return make(**values)
