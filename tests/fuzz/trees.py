"""Messages as trees, and the encoding of trees to bytes. A tree may break the rules of messages.

A map is a `Pairs`, so that keys can be repeated and need not be strings. A `Raw` holds bytes that go into the frame
unchanged. Does not own: the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

_PACKER = msgpack.Packer(unicode_errors="surrogatepass")


class Pairs(list[list[Any]]):
    """A map: a list of [key, value]."""


@dataclass(frozen=True)
class Raw:
    """Bytes of a frame. The bytes need not be MessagePack."""

    data: bytes


class Place(NamedTuple):
    """The place of a value: `box[at]`, or the second half of `box[at]` if `box` is a map."""

    box: list[Any]
    at: int

    @property
    def value(self) -> Any:
        return self.box[self.at][1] if isinstance(self.box, Pairs) else self.box[self.at]

    def put(self, value: Any) -> None:
        if isinstance(self.box, Pairs):
            self.box[self.at] = [self.box[self.at][0], value]
        else:
            self.box[self.at] = value


def tree(value: Any) -> Any:
    """Return the tree of a plain value."""
    if isinstance(value, dict):
        return Pairs([key, tree(part)] for key, part in value.items())
    if isinstance(value, list | tuple):
        return [tree(part) for part in value]
    return value


def places(box: list[Any]) -> list[Place]:
    """Return the places of all values in `box`, at any depth."""
    return list(_places(box))


def _places(box: list[Any]) -> Iterator[Place]:
    for at in range(len(box)):
        place = Place(box, at)
        yield place
        if isinstance(place.value, list):
            yield from _places(place.value)


def pack(node: Any) -> bytes:
    """Return the bytes of a tree."""
    if isinstance(node, Raw):
        return node.data
    if isinstance(node, Pairs):
        return _PACKER.pack_map_header(len(node)) + b"".join(pack(key) + pack(value) for key, value in node)
    if isinstance(node, list):
        return _PACKER.pack_array_header(len(node)) + b"".join(map(pack, node))
    return _PACKER.pack(node)


def unpack(frame: bytes) -> dict[str, Any] | None:
    """Return the map in a frame, or None if it has no map with string keys. Nested maps may have other keys."""
    try:
        fields = msgpack.unpackb(frame, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    return fields if isinstance(fields, dict) and all(isinstance(key, str) for key in fields) else None


def num_fields(frame: bytes) -> int:
    """Return the number of fields that the map in a frame declares, repeated fields included."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame)
    return unpacker.read_map_header()
