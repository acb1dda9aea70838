"""The bytes of one changed tensor: encode, compress and apply them. Pure functions on flat uint8 arrays.

The format is slime's (github.com/THUDM/slime, `slime/utils/disk_delta.py` and its patch of SGLang):

- `xor`: the bytewise XOR of the old and the new tensor. The XOR must be applied exactly once, to the right base.
- `overwrite`: the number of changed bytes (uint32, little-endian), their positions (uint32 each, ascending), and the
  new bytes.

Each encoding is compressed as one frame of Zstandard (RFC 8878). A tensor's checksum covers the bytes of its new state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import xxhash
import zstandard

from trueroll.errors import PushError

Encoding: TypeAlias = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
COMPRESSION = "zstd"
CHECKSUM = "xxh3-128"
"""The checksum of the deltas that trueroll writes."""
_LEVELS: dict[Encoding, tuple[int, ...]] = {"xor": (1, 9), "overwrite": (1,)}
"""Levels of compression. The shortest frame is written. slime uses level 1. With `xor`, level 9 is shorter for most
tensors, but not for all of them.
"""
_POSITION = np.dtype("<u4")
MOST_OVERWRITTEN = 2**32
"""Limit on the bytes of a tensor with the encoding `overwrite`, since positions are uint32."""
_MOST_WINDOW = 2**27
"""Limit on the memory that the decompression of a frame may require, in bytes."""
_CHUNK = 2**20


class Hash(Protocol):
    """The hash of a tensor's bytes."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _blake3() -> Hash:
    try:
        import blake3
    except ImportError:
        raise PushError(
            "chain: the checksums are blake3, which needs the package blake3; run pip install blake3 on the worker, or "
            "write the chain with xxh3-128"
        ) from None
    return blake3.blake3()


HASHES: dict[str, Callable[[], Hash]] = {CHECKSUM: xxhash.xxh3_128, "blake3": _blake3, "adler32": _Adler32}


def digest(name: str, data: np.ndarray) -> str:
    """Return the checksum of bytes as lower-case hexadecimal digits. `name`: a key of `HASHES`. Raise PushError if the
    package for this checksum is not installed.
    """
    hashed = HASHES[name]()
    hashed.update(data.data)
    return hashed.hexdigest()


def encode(encoding: Encoding, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the delta, uint8 [n], uncompressed. `old`, `new`: uint8 [N]; N < `MOST_OVERWRITTEN` for `overwrite`."""
    if encoding == "xor":
        return old ^ new
    changed = np.flatnonzero(old != new)
    count = np.array([len(changed)], _POSITION)
    return np.concatenate([count.view(np.uint8), changed.astype(_POSITION).view(np.uint8), new[changed]])


def compress(encoding: Encoding, data: np.ndarray, threads: int) -> bytes:
    """Compress data at several levels, and return the shortest frame, which is no longer than slime's frame. `data`:
    the uncompressed delta that `encode` returned. `threads`: the number of threads for levels above 1.
    """
    frames = (
        zstandard.ZstdCompressor(level=level, threads=threads if level > 1 < threads else 0).compress(data.data)
        for level in _LEVELS[encoding]
    )
    return min(frames, key=len)


def apply(encoding: Encoding, state: np.ndarray, frame: memoryview) -> None:
    """Apply a delta to the bytes of a tensor, in place. `state`: uint8 [N]. `frame`: the compressed delta.

    Memory: 1 MiB for `xor`, or at most 5 N bytes for `overwrite`. In addition, the decompression of the frame takes at
    most 128 MiB.
    Raise ValueError if the delta is corrupt or belongs to a tensor of another size; `state` is then undefined.
    """
    unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        with unpacker.stream_reader(frame) as reader:
            (_apply_xor if encoding == "xor" else _apply_overwrite)(state, reader)
            if reader.read(1):
                raise ValueError(f"the delta is longer than a delta of {len(state)} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(f"the delta is corrupt ({error!s:.200})") from None


def _apply_xor(state: np.ndarray, reader: Any) -> None:
    for start in range(0, len(state), _CHUNK):
        part = state[start : start + _CHUNK]
        part ^= _read(reader, len(part))


def _apply_overwrite(state: np.ndarray, reader: Any) -> None:
    count = int(_read(reader, _POSITION.itemsize).view(_POSITION)[0])
    if count > len(state):
        raise ValueError(f"the delta has {count} changed bytes, but the tensor has {len(state)}")
    positions = _read(reader, count * _POSITION.itemsize).view(_POSITION)
    values = _read(reader, count)
    if count and int(positions.max()) >= len(state):
        raise ValueError(f"the delta changes byte {positions.max()}, but the tensor has {len(state)} bytes")
    state[positions] = values


def _read(reader: Any, num_bytes: int) -> np.ndarray:
    data = np.empty(num_bytes, np.uint8)
    left = data.data
    while left:
        count = reader.readinto(left)
        if not count:
            raise ValueError(f"the delta is cut short ({len(left)} bytes are missing)")
        left = left[count:]
    return data
