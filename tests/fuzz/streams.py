"""Connections without a ZMQ library. A connection sends the bytes of a conversation that is complete, cut off anywhere,
or invalid.

ZMTP 3.1 (https://rfc.zeromq.org/spec/37): a greeting, a READY command, then frames. The first byte of a frame has
flags: the frame is a command (4), the frame's size takes eight bytes (2), more frames of the message follow (1).
"""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress

from fuzz.trees import pack, tree

READY_SECONDS = 0.1
HEALTH = {"version": 1, "type": "health", "id": "x-stream"}


def greeting(mechanism: bytes = b"NULL") -> bytes:
    signature = b"\xff" + bytes(7) + b"\x01\x7f"
    return signature + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    return frame(bytes([len(name)]) + name + body, 4)


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    return command(b"READY", _property(b"Socket-Type", kind) + _property(b"Identity", identity))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def frame(data: bytes, flags: int = 0) -> bytes:
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data


OPENING = greeting() + ready()
LAST = frame(pack(tree(HEALTH)))
WHOLE = OPENING + LAST
"""The bytes of a DEALER socket that asks for `HEALTH`. The socket sends `LAST` only after the worker has announced that
it is ready.
"""


def broken_off(at: int) -> list[bytes]:
    """Return the parts of `WHOLE` up to byte `at`."""
    return [WHOLE[: min(at, len(OPENING))], WHOLE[len(OPENING) : at]]


def wrong(rng: random.Random, message: bytes) -> list[bytes]:
    """Return invalid parts, which no real client sends."""
    match rng.randrange(8):
        case 0:
            return [rng.randbytes(rng.randrange(200))]
        case 1:
            return [b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"]
        case 2:
            return [greeting(rng.choice((b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20))) + ready()]
        case 3:
            return [greeting() + ready(rng.choice((b"REQ", b"ROUTER", b"PUB", b"", b"x" * 300)), rng.randbytes(3))]
        case 4:
            identity = rng.randbytes(rng.choice((1, 5, 255, 256, 1000)))
            return [greeting() + ready(identity=identity), frame(message)]
        case 5:
            size = rng.choice((2**22, 2**22 + 1, 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "big")
            return [OPENING, bytes([rng.choice((2, 3, 6))]) + size + message]
        case 6:
            return [OPENING, _odd_frame(rng) + frame(message)]
        case _:
            return [_flipped(rng, OPENING), _flipped(rng, frame(message))]


def _odd_frame(rng: random.Random) -> bytes:
    """Return a command that the worker does not use, or a part of a message that never ends."""
    match rng.randrange(4):
        case 0:
            return command(b"PING", rng.choice((b"", b"\0\x01", b"\0\x64" + bytes(16), b"\xff\xff" + bytes(200))))
        case 1:
            return command(rng.choice((b"PONG", b"ERROR", b"SUBSCRIBE", b"READY", b"", b"x" * 200)), rng.randbytes(9))
        case 2:
            return frame(rng.choice((b"", b"\xff", b"\x04PIN")), 4)
        case _:
            return frame(rng.randbytes(rng.choice((0, 1, 300))), 1)


def _flipped(rng: random.Random, stream: bytes) -> bytes:
    changed = bytearray(stream)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


class Stream:
    """A connection that sends only `opening` and, once the worker has announced that it is ready, `rest`."""

    def __init__(self, path: str, opening: bytes, rest: bytes = b"") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(5.0)
        self._socket.connect(path)
        self._send(opening)
        if rest and self.hears(b"\x05READY", READY_SECONDS):
            self._send(rest)

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # the worker has closed the connection
            self._socket.sendall(data)

    def hears(self, mark: bytes, patience: float) -> bool:
        """Return whether `mark` arrives before the worker closes the connection."""
        received, deadline = b"", time.monotonic() + patience
        self._socket.settimeout(0.02)
        while mark not in received and time.monotonic() < deadline:
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not part:
                break
            received += part
        return mark in received

    def close(self) -> None:
        self._socket.close()
