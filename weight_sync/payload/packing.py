"""Where the pieces of tensors lie in buckets. Pure arithmetic: sees no tensor, only counts and sizes.

Pieces are packed in the order they come, each at a multiple of `ALIGNMENT` bytes. What does not fit in the rest of a
bucket is cut where it may be; a bucket is larger than `bucket_bytes` only if a single block that may not be cut is. No
bucket has more than `MOST_PIECES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .manifest import ALIGNMENT, MOST_PIECES, ROW_MULTIPLE, Shape


@dataclass(frozen=True)
class Cut:
    """Units [start, start + length) of something lie in bucket `bucket`, from byte `offset` on."""

    start: int
    length: int
    bucket: int
    offset: int


class Packer:
    """Packs one thing after the other. Remembers only where the last one ended."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._bucket = 0
        self._end = 0
        self._num_pieces = 0

    def place(self, count: int, unit_bytes: int, multiple: int = 1) -> Iterator[Cut]:
        """Places for `count` units, cut at multiples of `multiple`. One empty place if there are none."""
        start = 0
        while True:
            if self._num_pieces == MOST_PIECES:
                self._begin_bucket()
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            length = self._fitting(count - start, unit_bytes, multiple, offset)
            if length or not count:
                self._end = offset + length * unit_bytes
                self._num_pieces += 1
                yield Cut(start, length, self._bucket, offset)
                start += length
            if start == count:
                return
            if not length or self._end >= self._bucket_bytes:
                self._begin_bucket()

    def _begin_bucket(self) -> None:
        self._bucket, self._end, self._num_pieces = self._bucket + 1, 0, 0

    def _fitting(self, count: int, unit_bytes: int, multiple: int, offset: int) -> int:
        room = max(0, self._bucket_bytes - offset) // unit_bytes
        if room >= count:
            return count
        if offset == 0 and room < multiple:
            return min(multiple, count)
        return room - room % multiple


def row_layout(shape: Shape, itemsize: int) -> tuple[int, int, int]:
    """Of a tensor: how many rows, how many bytes in each, and at which multiples it may be cut. A row of a stack of
    matrices is one of these.
    """
    return shape[0], math.prod(shape[1:]) * itemsize, ROW_MULTIPLE if len(shape) == 2 else 1


def slot_bytes(shapes: Iterable[Shape], itemsize: int, bucket_bytes: int) -> int:
    """The size of the largest bucket that tensors of these shapes can need."""
    blocks = [
        min(rows, multiple) * num_bytes for rows, num_bytes, multiple in (row_layout(s, itemsize) for s in shapes)
    ]
    return max(bucket_bytes, *blocks, 0)
