"""Mutations: of the tree of a message, and of the bytes of its frame.

All randomness comes from the given `random.Random`, so a seed gives the same messages. Sizes stay below
`MAX_FRAME_BYTES`, because ZMQ closes the connection of a client that sends a larger frame.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fuzz.trees import Pairs, Place, Raw, pack, places, tree

MAX_MESSAGE_BYTES = 2**20
MAX_FRAME_BYTES = 2 * MAX_MESSAGE_BYTES
"""A frame below this size that exceeds the worker's `max_message_bytes` (`MAX_MESSAGE_BYTES` in the fuzzer) is answered
with an error.
"""
NAN, INF = float("nan"), float("inf")
NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, -1, -2, 3, 16, 17, 64, 127, 128, 129, 500, 511, 512, 65535, 65536, 10**9),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-3, 1e-38, 1e-46, 5e-324, 2.5e-308, 3.5e38, 1e39, 1e300, 1e308, -1e308),
    *(NAN, INF, -INF, Raw(b"\xca\x7f\x7f\xff\xff"), Raw(b"\xca\x00\x00\x00\x01"), Raw(b"\xca\x7f\xc0\x00\x00")),
    *(Raw(b"\xcf" + bytes(8)), Raw(b"\xd3\xff\xff\xff\xff\xff\xff\xff\xff")),
)
STRINGS: tuple[Any, ...] = (
    *("", " ", "\0", "x", "a\0b", "x" * 128, "x" * 129, "x" * 513, "x" * 1025, "x" * 5000, "\ud800", "\u202e"),
    *("é" * 128, "é" * 129, "\U0001f600" * 128, "%s%n{0}{x!r}", "../x", "x-0", "0" * 32, "0" * 32 + "\n", "f" * 31),
    *("generate", "drain", "recompute", "weights", "kv_cache", "rows", "elements", "processed", "raw", "float32"),
    *(Raw(b"\xa2\xff\xfe"), Raw(b"\xd9\x05abc"), Raw(b"\xdb\xff\xff\xff\xff")),
)
BYTES: tuple[Any, ...] = (
    *(b"", b"\0", b"abc", b"12345", bytes(4), bytes(8), bytes(31), bytes(32), bytes(33), bytes(512)),
    *(b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80" * 2, *(b"\x01\0\0\0" * count for count in (127, 128, 129))),
    *(Raw(b"\xc6\xff\xff\xff\xff"), Raw(b"\xc4\x05abc")),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False),
    *(Raw(pack(tree(value))) for value in ([], {}, [[]], [None], {"": None}, {1: 2}, {b"n": 1}, [{}], {"id": {}})),
    *(Raw(b"\xc1"), Raw(b"\xd4\x05x"), Raw(b"\xd6\xff\0\0\0\0"), Raw(b"\xc7\0\x01"), Raw(b"\xc9\xff\xff\xff\xff\x01")),
    *(Raw(b"\xdd\xff\xff\xff\xff"), Raw(b"\xdf\xff\xff\xff\xff"), Raw(b"\xdc\x00"), Raw(b"")),
)
KEYS: tuple[Any, ...] = (
    *("type", "id", "version", "params", "n", "stop", "source", "kind", "caller", "self", "cls", "model_config"),
    *("", "x", "__class__", "é" * 300, "x" * 5000, "\0", "\ud800", 0, 1, -1, None, True, 1.5, b"id", b""),
    *(Raw(b"\xa1\xff"), Raw(b"\xd4\x05x"), Raw(b"\x90"), Raw(b"\x80"), Raw(b"\xca\x7f\xc0\x00\x00")),
)
PREFIXES = (b"\x91", b"\x81\xa1a", b"\x81\xa2id", b"\x92\xc0", b"\x81\xa6params")
"""Headers that open a list or a map. The last value of the list or map follows the header."""


def mutated(rng: random.Random, message: dict[str, Any], others: Sequence[dict[str, Any]]) -> bytes:
    """Return the frame of `message` after one to four mutations of its tree. `others`: messages to take parts from."""
    root = [tree(message)]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if found := places(root):
            rng.choice(_OPERATIONS)(rng, rng.choice(found), others)
    return b"".join(map(pack, root))[:MAX_FRAME_BYTES]


def _drop(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    del place.box[place.at]


def _double(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    place.box.insert(rng.randrange(len(place.box) + 1), place.box[place.at])


def _rename(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    if isinstance(place.box, Pairs):
        place.box[place.at] = [rng.choice(KEYS), place.value]


def _add(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    value = _odd(rng)
    place.box.append([rng.choice(KEYS), value] if isinstance(place.box, Pairs) else value)


def _replace(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    place.put(_odd(rng))


def _replace_alike(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    """Replace a value with an extreme value of the same type.

    Such values pass more checks than values of other types.
    """
    match place.value:
        case bool():
            place.put(not place.value)
        case int() | float():
            place.put(rng.choice(NUMBERS))
        case str():
            place.put(rng.choice(STRINGS))
        case bytes():
            place.put(rng.choice(BYTES))
        case _:
            place.put(rng.choice(OTHERS))


def _nest(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    depth = rng.choice((1, 2, 10, 100, 200, 500, 900, rng.randrange(1, 1024), 1021, 1022, 1023, 1024, 1025, 5000))
    place.put(Raw(_prefix(rng, depth) + pack(place.value)))


def _prefix(rng: random.Random, depth: int) -> bytes:
    if rng.random() < 0.7:
        return rng.choice(PREFIXES) * depth
    return b"".join(rng.choices(PREFIXES, k=depth))


def _grow(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    """Repeat the value many times."""
    count = _many(rng)
    match place.value:
        case str() | bytes() as text if text:
            place.put(text * min(count, MAX_MESSAGE_BYTES // len(text)))
        case Pairs():
            place.put(Raw(_fields(min(count, 100_000))))
        case list() as values if values:
            place.put(_repeated(pack(rng.choice(values)), count))
        case _:
            place.put(_repeated(rng.choice((b"\x80", b"\x90", b"\xa1a", b"\x01", b"\xc0", b"\x81\xa1a\x80")), count))


def _many(rng: random.Random) -> int:
    return int(10 ** rng.uniform(0, 6.5 if rng.random() < 0.03 else 3))


def _repeated(element: bytes, count: int) -> Raw:
    count = min(count, MAX_MESSAGE_BYTES // len(element))
    return Raw(b"\xdd" + count.to_bytes(4, "big") + element * count)


@lru_cache(maxsize=64)
def _rounded_fields(count: int) -> bytes:
    return b"".join(pack(f"k{number}") + b"\xc0" for number in range(count))


def _fields(count: int) -> bytes:
    """Return the bytes of a map with about `count` keys."""
    rounded = 2 ** count.bit_length()
    return b"\xdf" + rounded.to_bytes(4, "big") + _rounded_fields(rounded)


def _widen(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    """Add many unknown fields to the existing ones."""
    if isinstance(place.box, Pairs):
        count = min(_many(rng), 5000)
        place.box.extend([f"k{number}", None] for number in range(count))


def _cut(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    if isinstance(place.value, str | bytes):
        place.put(place.value[: -rng.randrange(1, 5)])
    elif isinstance(place.value, list):
        place.put(type(place.value)(place.value[: len(place.value) // 2]))


def _swap(rng: random.Random, place: Place, others: Sequence[dict[str, Any]]) -> None:
    """Replace a value with a part of another message."""
    if found := places([tree(rng.choice(others))]):
        place.put(rng.choice(found).value)


def _odd(rng: random.Random) -> Any:
    return rng.choice(rng.choice((NUMBERS, STRINGS, BYTES, OTHERS)))


_OPERATIONS: tuple[Callable[[random.Random, Place, Sequence[dict[str, Any]]], None], ...] = (
    *(_replace_alike,) * 6,
    *(_replace,) * 3,
    *(_drop, _double, _rename, _add, _nest, _grow, _widen, _cut, _swap),
)


def corrupted(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """Return a frame after one to three mutations of its bytes. `other`: a frame to splice in."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        frame = rng.choice(_CORRUPTIONS)(rng, frame or b"\0", other)
    return frame[:MAX_FRAME_BYTES]


def _flip(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(frame))
    return frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]


def _truncate(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _insert(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(frame) + 1)
    return frame[:at] + rng.randbytes(rng.randrange(1, 9)) + frame[at:]


def _repeat(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(frame))
    end = start + rng.randrange(1, 40)
    return frame[:end] + frame[start:end] * rng.choice((1, 2, 100)) + frame[end:]


def _splice(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame[: rng.randrange(len(frame) + 1)] + other[rng.randrange(len(other) + 1) :]


def _overwrite(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """Overwrite a byte with the first byte of another MessagePack type."""
    at = rng.randrange(len(frame))
    return frame[:at] + rng.choice(_MARKS) + frame[at + 1 :]


_MARKS = [bytes([mark]) for mark in (*range(0xC0, 0xE0), 0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xFF)]
_CORRUPTIONS = (_flip, _flip, _truncate, _insert, _repeat, _splice, _overwrite)
