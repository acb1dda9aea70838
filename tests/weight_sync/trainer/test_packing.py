"""The places of pieces in buckets: tables of examples, and properties for any shapes. No row is lost, duplicated or
overlapping.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueroll.weight_sync.payload.manifest import ALIGNMENT, MOST_PIECES, ROW_MULTIPLE
from trueroll.weight_sync.trainer.sender import Packer, row_layout, slot_bytes


def cuts(packer: Packer, count: int, unit_bytes: int, multiple: int = 1) -> list[tuple[int, int, int, int]]:
    return [(c.start, c.length, c.bucket, c.offset) for c in packer.place(count, unit_bytes, multiple)]


@pytest.mark.parametrize(
    ("things", "expected"),
    [
        # (count, unit_bytes, multiple) of each object; (start, length, bucket, offset) of each piece, buckets of 256
        ([(2, 10, 1)], [(0, 2, 0, 0)]),
        ([(2, 10, 1), (3, 10, 1)], [(0, 2, 0, 0), (0, 3, 0, 64)]),  # aligned to 64
        ([(4, 64, 1), (1, 1, 1)], [(0, 4, 0, 0), (0, 1, 1, 0)]),  # the bucket is exactly full
        ([(5, 64, 1)], [(0, 4, 0, 0), (4, 1, 1, 0)]),  # larger than a bucket, so it is cut
        ([(1, 10, 1), (4, 64, 1)], [(0, 1, 0, 0), (0, 3, 0, 64), (3, 1, 1, 0)]),  # cut to fill the bucket
        ([(40, 8, 16)], [(0, 32, 0, 0), (32, 8, 1, 0)]),  # cut only at a multiple
        ([(1, 200, 1), (16, 8, 16)], [(0, 1, 0, 0), (0, 16, 1, 0)]),  # a block that does not fit begins a bucket
        ([(40, 100, 16)], [(0, 16, 0, 0), (16, 16, 1, 0), (32, 8, 2, 0)]),  # a block larger than a bucket
        ([(0, 6, 1), (2, 6, 1)], [(0, 0, 0, 0), (0, 2, 0, 0)]),  # an empty object has a place
    ],
)
def test_places_of_pieces(things: list[tuple[int, int, int]], expected: list[tuple[int, ...]]) -> None:
    packer = Packer(256)
    assert [cut for thing in things for cut in cuts(packer, *thing)] == expected


def test_a_bucket_holds_a_bounded_number_of_pieces() -> None:
    packer = Packer(2**30)
    buckets = Counter(cut.bucket for count in (0, 1) for _ in range(MOST_PIECES) for cut in packer.place(count, 4))
    assert buckets == {0: MOST_PIECES, 1: MOST_PIECES}


def test_a_slot_has_the_size_of_the_largest_bucket() -> None:
    assert slot_bytes([(1000,), (400, 10)], itemsize=2, bucket_bytes=256) == ROW_MULTIPLE * 10 * 2
    assert slot_bytes([(1000,), (40, 10)], itemsize=2, bucket_bytes=256) == 40 * 10 * 2
    assert slot_bytes([(1000,), (400, 1)], itemsize=2, bucket_bytes=256) == 256
    assert slot_bytes([(3, 100)], itemsize=2, bucket_bytes=256) == 3 * 100 * 2
    assert slot_bytes([(8, 64, 10)], itemsize=2, bucket_bytes=256) == 64 * 10 * 2, "a matrix of a stack"
    assert slot_bytes([], itemsize=2, bucket_bytes=256) == 256


shapes = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.sampled_from([2, 4]), st.integers(1, 5000))
def test_every_row_has_exactly_one_place(shapes: list[tuple[int, ...]], itemsize: int, bucket_bytes: int) -> None:
    packer = Packer(bucket_bytes)
    used: dict[int, list[tuple[int, int]]] = defaultdict(list)
    last_bucket = 0
    for shape in shapes:
        rows, row_bytes, multiple = row_layout(shape, itemsize)
        assert multiple == (ROW_MULTIPLE if len(shape) == 2 else 1)
        end = 0
        for cut in packer.place(rows, row_bytes, multiple):
            assert cut.start == end and cut.start % multiple == 0 and cut.length > 0
            assert cut.offset % ALIGNMENT == 0
            assert cut.bucket in (last_bucket, last_bucket + 1)
            end, last_bucket = cut.start + cut.length, cut.bucket
            used[cut.bucket].append((cut.offset, cut.offset + cut.length * row_bytes))
        assert end == rows
    for extents in used.values():
        assert all(a[1] <= b[0] for a, b in zip(extents, extents[1:], strict=False))
        assert extents[-1][1] <= slot_bytes(shapes, itemsize, bucket_bytes)
