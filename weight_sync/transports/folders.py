"""Write safetensors files, which are complete on the disk once they have a header.

Owns the layout of the file and the order of the writes. Does not own the names or the content of the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..payload.manifest import Shape
from ..payload.tensor_file import DTYPE_CODES
from ..payload.tensors import dtype_named
from .durable import create_file, explained

_PADDING = 8
"""The header of a safetensors file ends at a multiple of this many bytes."""


@dataclass
class _Written:
    """A tensor that is being written. `extent`: the range [begin, end) of the tensor's bytes after the header.
    `offset`: the file position at which the next byte is written. `hash`: the hash of all bytes of the tensor that have
    been written so far.
    """

    extent: tuple[int, int]
    offset: int
    hash: Any


class TensorFileWriter:
    """Writes the safetensors file `path`. Raise PushError if the file cannot be written.

    `shapes`, `dtypes`: the shape and the dtype of each tensor that may be written, by name. Tensors may be written in
    any order and in pieces, and some tensors may be missing. `new_hash`: makes the hash of one tensor's bytes.
    `most_metadata`: metadata at least as long as the metadata that `finish` gets.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, str],
        new_hash: Callable[[], Any],
        most_metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path, self._shapes, self._dtypes, self._new_hash = path, shapes, dtypes, new_hash
        self._written: dict[str, _Written] = {}
        total = sum(map(self._num_bytes, shapes))
        # Reserve the longest possible header, since the header is written last.
        self._start = len(self._header(dict.fromkeys(shapes, (total, total)), most_metadata or {}, 0))
        self._end = 0
        self._file: int | None = None
        with explained(path.parent):
            self._file = create_file(path)

    def append(self, name: str, left: memoryview) -> None:
        """Write the next bytes of a tensor. `left`: the bytes."""
        assert self._file is not None
        if (tensor := self._written.get(name)) is None:
            extent = self._end, self._end + self._num_bytes(name)
            tensor = self._written[name] = _Written(extent, self._start + self._end, self._new_hash())
            self._end = extent[1]
        tensor.hash.update(left)
        with explained(self._path.parent):
            while left:
                count = os.pwrite(self._file, left, tensor.offset)
                left, tensor.offset = left[count:], tensor.offset + count

    def hashes(self) -> dict[str, Any]:
        """Return the hash of each written tensor, by name."""
        return {name: tensor.hash for name, tensor in self._written.items()}

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header, and sync the file to the disk. `metadata`: further texts of the header, by key."""
        assert self._file is not None
        extents = {name: tensor.extent for name, tensor in self._written.items()}
        with explained(self._path.parent):
            os.pwrite(self._file, self._header(extents, metadata, self._start), 0)
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _num_bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * dtype_named(self._dtypes[name]).itemsize

    def _header(self, extents: Mapping[str, tuple[int, int]], metadata: Mapping[str, str], num_bytes: int) -> bytes:
        """Return the header of a file with these tensors, padded to at least `num_bytes` bytes."""
        entries = {
            name: {
                "dtype": DTYPE_CODES[self._dtypes[name]],
                "shape": list(self._shapes[name]),
                "data_offsets": list(extent),
            }
            for name, extent in extents.items()
        }
        return header_of(entries, {"format": "pt", **metadata}, num_bytes)


def header_of(entries: Mapping[str, Any], metadata: Mapping[str, str], num_bytes: int = 0) -> bytes:
    """Return the length field and the header of a safetensors file. The result is padded to at least `num_bytes` bytes.

    `entries`: dtype, shape and data_offsets of each tensor, by name.
    """
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    length = max(-(-len(text) // _PADDING) * _PADDING, num_bytes - _PADDING)
    return length.to_bytes(8, "little") + text.ljust(length)
