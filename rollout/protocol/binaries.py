"""Decode a frame without copying its long binaries, which then share the frame's memory.

msgpack copies every binary that it decodes. If a sample has large arrays, such as top log-probs, the arrays fill nearly
the whole frame, so frame and copies together would take twice the memory. `without_binaries` replaces each long binary
by a short extension, which `msgpack.unpackb` decodes with `Binaries.find`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONG_BYTES = 2**14
MOST_PARTS = 4
"""A binary is long if it has at least `LONG_BYTES` bytes, and at least 1 / `MOST_PARTS` of the frame. A long binary
therefore keeps at most `MOST_PARTS` times its own size in memory.
"""
MOST_VALUES = 2**10
"""Maximum number of values in a frame that is searched for long binaries. The search is slow because it runs in Python,
so all binaries of a frame with more values are copied instead.
"""

_CODE = 1
_FIXEXT_1 = 0xD4
_BINARIES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LENGTHS = _BINARIES | {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""For each kind of value with an explicit length, identified by its first byte: the number of bytes of the length,
which follows the first byte.
"""
_ARRAYS, _MAPS = (0xDC, 0xDD), (0xDE, 0xDF)
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SINGLE_BYTES = frozenset((*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)))


class Binaries(NamedTuple):
    """A frame without its long binaries. `rest`: the frame, with an extension in place of each long binary. `found`:
    the long binaries, read-only.
    """

    rest: bytes
    found: Sequence[memoryview]

    def find(self, code: int, index: bytes) -> memoryview:
        """Return the binary that an extension replaces. Pass this method as `ext_hook` to `msgpack.unpackb`."""
        return self.found[index[0]]


def without_binaries(frame: memoryview) -> Binaries | None:
    """Return the frame without its long binaries.

    Return None if the frame has no long binary, has more than `MOST_VALUES` values, contains an extension, or is not
    exactly one value in MessagePack.
    """
    places = _find(frame) if len(frame) > LONG_BYTES else []
    if not places:
        return None
    parts, found, before = list[bytes | memoryview](), list[memoryview](), 0
    for header, start, end in places:
        parts += [frame[before:header], bytes((_FIXEXT_1, _CODE, len(found)))]
        found.append(frame[start:end].toreadonly())
        before = end
    return Binaries(b"".join([*parts, frame[before:]]), found)


def _find(frame: memoryview) -> list[tuple[int, int, int]]:
    """Return three positions for each long binary: the beginnings of its header, of its content, and of the next
    value.
    """
    places, at, num_left = list[tuple[int, int, int]](), 0, 1
    least = max(LONG_BYTES, len(frame) // MOST_PARTS)
    for _ in range(MOST_VALUES):
        if not num_left or at >= len(frame):
            break
        kind, header = frame[at], at
        at, num_left = at + 1, num_left - 1
        if kind in _LENGTHS:
            at += _LENGTHS[kind]
            length = int.from_bytes(frame[header + 1 : at], "big")
            if kind in _ARRAYS or kind in _MAPS:
                num_left += length * (1 + (kind in _MAPS))
                continue
            if kind in _BINARIES and length >= least:
                places.append((header, at, at + length))
            at += length
        elif kind >> 4 == 0x8:  # a short map
            num_left += 2 * (kind & 0xF)
        elif kind >> 4 == 0x9:  # a short array
            num_left += kind & 0xF
        elif kind >> 5 == 0x5:  # a short string
            at += kind & 0x1F
        elif kind in _NUMBERS:
            at += _NUMBERS[kind]
        elif kind not in _SINGLE_BYTES:
            return []
    return places if not num_left and at == len(frame) else []
