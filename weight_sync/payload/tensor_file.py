"""Reader for a safetensors file that may be invalid or may change while it is read. The header is read first, then each
tensor.

Owns the checks of the header, which is read once. Does not own the file. Guarantees that every length and offset is
checked before it is used, and that a truncated file raises an error. A local file is read with system calls, which let
other threads run. The file is never mapped, since access to a missing part of a mapped file would kill the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError

from trueroll.errors import PushError

from .manifest import Count, Name, first_fault

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

_Count = Annotated[Count, Strict()]


class TensorEntry(BaseModel):
    """Location of a tensor: the bytes [begin, end) after the header, given by `data_offsets`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    dtype: str
    shape: Annotated[tuple[_Count, ...], FailFast(), Field(min_length=1, max_length=8)]
    data_offsets: tuple[_Count, _Count]

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class ReadableFile(Protocol):
    """An open file. `path`: name of the file in errors."""

    @property
    def path(self) -> str: ...

    def num_bytes(self) -> int:
        """Return the current size of the file."""
        ...

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read bytes from `offset` on. Return the number of bytes read: at least 1, or 0 at the end of the file. Raise
        OSError if the file cannot be read.
        """
        ...

    def close(self) -> None: ...


class LocalFile:
    """A `ReadableFile` in a file system of this machine."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self.path = str(path)
        self._file = file

    def num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, memory: memoryview, offset: int) -> int:
        return os.preadv(self._file.fileno(), [memory], offset)

    def close(self) -> None:
        self._file.close()


class TensorFile:
    """The tensors of the safetensors file `file`.

    `dtype_of`: takes a tensor's name, and returns the dtype that the tensor must have, such as bfloat16. `dtype_of`
    returns None for a tensor that is not read; such a tensor may have any dtype.
    `entries`: the tensors, in the order of their bytes in the file. `metadata`: the
    texts in the header, by key.

    Raise PushError if the file is not a complete safetensors file with tensors of these dtypes. The error names the
    file. Also raise PushError if the header has more than `max_header_bytes`.
    """

    def __init__(self, file: ReadableFile, dtype_of: Callable[[str], str | None], max_header_bytes: int) -> None:
        self._file = file
        size = file.num_bytes()
        length = int.from_bytes(read_bytes(self._file, 0, min(size, _LENGTH_BYTES)).data, "little")
        self._start = _LENGTH_BYTES + length
        self._expect(length <= max_header_bytes, f"its header has {length} bytes (limit {max_header_bytes})")
        self._expect(self._start <= size, f"it has {size} bytes, but its header ends at {self._start}")
        self.metadata: dict[str, str] = {}
        self.entries = self._parse(read_bytes(self._file, _LENGTH_BYTES, length).tobytes())
        self._check_layout(dtype_of, size - self._start)

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the bytes of a tensor in new memory: uint8 [num_bytes]. Raise PushError if the bytes cannot be
        read.
        """
        return torch.from_numpy(read_bytes(self._file, self._start + entry.data_offsets[0], entry.num_bytes))

    def _parse(self, header: bytes) -> list[TensorEntry]:
        try:
            values = json.loads(header.decode(), object_pairs_hook=_without_repeats)
            self._expect(isinstance(values, dict), "its header is not a JSON map")
            self.metadata = _texts(values.pop(_METADATA, {}))
            entries = [TensorEntry.model_validate(_named(name, value)) for name, value in values.items()]
        except ValidationError as error:
            raise self._wrong(f"the header has an invalid tensor ({first_fault(error)})") from None
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"the header cannot be read ({error!s:.200})") from None
        return sorted(entries, key=lambda entry: entry.data_offsets)

    def _check_layout(self, dtype_of: Callable[[str], str | None], num_bytes: int) -> None:
        end = 0
        for entry in self.entries:
            dtype = dtype_of(entry.name)
            found = f"tensor {entry.name} has {entry.dtype:.20} {list(entry.shape)} at {list(entry.data_offsets)}"
            is_right = dtype is None or entry.dtype == DTYPE_CODES[dtype]
            self._expect(is_right, f"{found}, but its dtype must be {dtype}")
            self._expect(entry.data_offsets[0] == end, f"{found}, but the tensor before it ends at {end}")
            if dtype is not None:
                expected = math.prod(entry.shape) * _ITEM_BYTES[dtype]
                self._expect(entry.num_bytes == expected, f"{found}, but its shape takes {expected} bytes")
            self._expect(entry.num_bytes >= 0, f"{found}, which ends before it begins")
            end = entry.data_offsets[1]
        self._expect(end == num_bytes, f"it has {num_bytes} bytes after its header, but its tensors take {end}")

    def _expect(self, holds: bool, found: str) -> None:
        if not holds:
            raise self._wrong(found)

    def _wrong(self, found: str) -> PushError:
        return PushError(f"disk: {self._file.path} is not a whole safetensors file: {found}; write the folder again")


def read_bytes(file: ReadableFile, offset: int, num_bytes: int) -> np.ndarray:
    """Return bytes of a file in new memory: uint8 [num_bytes]. Raise PushError if the file cannot be read, or ends
    before `num_bytes` bytes are read.
    """
    data = np.empty(num_bytes, np.uint8)
    left = data.data
    while left:
        try:
            count = file.read_into(left, offset)
        except OSError as error:
            raise PushError(f"disk: cannot read {file.path}: {error.strerror}; push again") from None
        if not count:
            raise PushError(
                f"disk: {file.path} was cut short while it was read ({len(left)} bytes are missing); "
                "write the folder again"
            )
        left, offset = left[count:], offset + count
    return data


def max_header_bytes(num_tensors: int) -> int:
    """Return the limit on the size of a description of tensors, such as a header or a manifest, in bytes. A limit is
    needed because parsing blocks other threads.

    An entry of a tensor takes less than 1 KiB, even with the longest name and the largest numbers. Most entries take
    150 bytes.
    """
    return 2**16 + 2**10 * num_tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values


def _texts(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"{_METADATA} is not a map of texts")
    return values


def _named(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(f"tensor {ascii(name[:80])} is not a map of dtype, shape and data_offsets")
    return {"name": name, **value}
