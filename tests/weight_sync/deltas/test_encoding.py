"""The bytes of a delta: both encodings restore the new bytes, no frame is longer than slime's, and bad frames raise."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from weight_sync.deltas.slime import CHECKSUMS, encoded

from trueroll.weight_sync.deltas.encoding import ENCODINGS, HASHES, Encoding, apply, compress, digest, encode

BYTES = arrays(np.uint8, st.integers(0, 400))


def changed(old: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Return a copy of `old` in which about this share of the bytes differs."""
    random = np.random.default_rng(seed)
    return np.where(random.random(len(old)) < share, random.integers(0, 256, len(old), np.uint8), old)


def frame_of(data: bytes) -> memoryview:
    return memoryview(zstandard.ZstdCompressor(level=1).compress(data))


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=25, deadline=None)
@given(pair=st.tuples(BYTES, BYTES))
def test_a_delta_restores_every_byte(encoding: Encoding, pair: tuple[np.ndarray, np.ndarray]) -> None:
    length = min(map(len, pair))
    old, new = pair[0][:length], pair[1][:length]
    state = old.copy()
    apply(encoding, state, memoryview(compress(encoding, encode(encoding, old, new), threads=1)))
    assert np.array_equal(state, new)
    assert np.array_equal(encode(encoding, old, new), encoded(encoding, old, new))  # slime's bytes


@pytest.mark.parametrize(
    ("share", "threads"), [(0.0, 1), (1e-5, 1), (1e-3, 1), (0.02, 1), (0.02, 2), (0.5, 1), (1.0, 1)]
)
def test_no_frame_is_longer_than_that_of_slime(share: float, threads: int) -> None:
    old = np.random.default_rng(1).integers(0, 256, 2**20, np.uint8)
    new = changed(old, share)
    for encoding in ENCODINGS:
        data = encode(encoding, old, new)
        ours, theirs = compress(encoding, data, threads), frame_of(data.tobytes())
        assert len(ours) <= len(theirs)
        state = old.copy()
        apply(encoding, state, memoryview(ours))
        assert np.array_equal(state, new)


def test_a_large_tensor_is_applied_in_chunks() -> None:
    old = np.zeros(2 * 2**20 + 17, np.uint8)
    new = changed(old, 0.01)
    state = old.copy()
    apply("xor", state, frame_of((old ^ new).tobytes()))
    assert np.array_equal(state, new)


@pytest.mark.parametrize("name", HASHES)
def test_checksums_are_those_of_slime(name: str) -> None:
    data = np.arange(1000, dtype=np.uint8)
    assert digest(name, data) == CHECKSUMS[name](data.tobytes())


def overwriting(count: int, positions: list[int], values: bytes) -> memoryview:
    return frame_of(np.array([count, *positions], "<u4").tobytes() + values)


BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(2**26))
LARGE_WINDOW = b"\x28\xb5\x2f\xfd" + b"\x00\x90" + b"\x09\x00\x00x"
"""A frame (RFC 8878) that requires a window of 256 MiB, with one byte of content."""
BAD: dict[str, tuple[Encoding, memoryview, str]] = {
    "no frame": ("xor", memoryview(b"model"), "the delta is corrupt"),
    "an empty frame": ("xor", memoryview(b""), "cut short"),
    "a cut frame": ("xor", frame_of(bytes(range(100)))[:-20], "cut short"),
    "too few bytes": ("xor", frame_of(bytes(99)), "cut short"),
    "too many bytes": ("xor", frame_of(bytes(101)), "longer than a delta of 100 bytes"),
    "a bomb": ("xor", memoryview(BOMB), "longer than a delta of 100 bytes"),
    "a bomb of positions": ("overwrite", memoryview(BOMB), "longer than a delta of 100 bytes"),
    "a large window": ("xor", memoryview(LARGE_WINDOW), "the delta is corrupt .*requires too much memory"),
    "more positions than bytes": ("overwrite", overwriting(101, [0] * 101, bytes(101)), "has 101 changed bytes"),
    "a position outside": ("overwrite", overwriting(1, [100], b"x"), "changes byte 100"),
    "no values": ("overwrite", overwriting(2, [0, 1], b""), "cut short"),
    "no count": ("overwrite", frame_of(b"\0\0"), "cut short"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_delta_is_refused(name: str) -> None:
    encoding, frame, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        apply(encoding, np.zeros(100, np.uint8), frame)
