"""Encoding of messages into the frames that carry them."""

from __future__ import annotations

import msgpack


def pack(message: object) -> bytes:
    frame = msgpack.packb(message)
    assert frame is not None
    return frame
