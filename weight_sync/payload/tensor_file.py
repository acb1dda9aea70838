"""Reader for a safetensors file that may be invalid or may change while it is read. The header is read first, then each
tensor.

Owns the checks of the header, which is read once. Does not own the file. Guarantees that every length and offset is
checked before it is used, and that a truncated file raises an error. The file is read with system calls, which let
other threads run. The file is never mapped, since access to a missing part of a mapped file would kill the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError

from trueroll.errors import PushError

from .manifest import Count, Name, first_fault
from .tensors import dtype_named

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
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


class TensorFile:
    """The tensors of the safetensors file `file`.

    `dtype`: name of the tensors' dtype, such as bfloat16. `dtypes`: the exceptions to `dtype`, as a map from a tensor's
    name to its required dtype. `entries`: the tensors, in the order of their bytes in the file.

    Raise PushError if the file is not a complete safetensors file with tensors of these dtypes. The error names `path`.
    Also raise PushError if the header has more than `max_header_bytes`.
    """

    def __init__(self, file: FileIO, path: Path, dtype: str, dtypes: Mapping[str, str], max_header_bytes: int) -> None:
        self._file = file
        self._path = path
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(self._read(0, min(size, _LENGTH_BYTES)).data, "little")
        self._start = _LENGTH_BYTES + length
        self._expect(length <= max_header_bytes, f"its header has {length} bytes (limit {max_header_bytes})")
        self._expect(self._start <= size, f"it has {size} bytes, but its header ends at {self._start}")
        self.entries = self._parse(self._read(_LENGTH_BYTES, length).tobytes())
        self._check_layout(dtype, dtypes, size - self._start)

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the bytes of a tensor in new memory: uint8 [num_bytes]. Raise PushError if the bytes cannot be
        read.
        """
        return torch.from_numpy(self._read(self._start + entry.data_offsets[0], entry.num_bytes))

    def _read(self, offset: int, num_bytes: int) -> np.ndarray:
        data = np.empty(num_bytes, np.uint8)
        left = data.data
        while left:
            try:
                count = os.preadv(self._file.fileno(), [left], offset)
            except OSError as error:
                raise PushError(f"disk: cannot read {self._path}: {error.strerror}; push again") from None
            if not count:
                raise PushError(
                    f"disk: {self._path} was cut short while it was read ({len(left)} bytes are missing); "
                    "write the folder again"
                )
            left, offset = left[count:], offset + count
        return data

    def _parse(self, header: bytes) -> list[TensorEntry]:
        try:
            values = json.loads(header.decode(), object_pairs_hook=_without_repeats)
            self._expect(isinstance(values, dict), "its header is not a JSON map")
            values.pop(_METADATA, None)
            entries = [TensorEntry.model_validate(_named(name, value)) for name, value in values.items()]
        except ValidationError as error:
            raise self._wrong(f"the header has an invalid tensor ({first_fault(error)})") from None
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"the header cannot be read ({error!s:.200})") from None
        return sorted(entries, key=lambda entry: entry.data_offsets)

    def _check_layout(self, dtype: str, dtypes: Mapping[str, str], num_bytes: int) -> None:
        end = 0
        for entry in self.entries:
            own = dtypes.get(entry.name, dtype)
            found = f"tensor {entry.name} has {entry.dtype:.20} {list(entry.shape)} at {list(entry.data_offsets)}"
            self._expect(entry.dtype == DTYPE_CODES[own], f"{found}, but its dtype must be {own}")
            self._expect(entry.data_offsets[0] == end, f"{found}, but the tensor before it ends at {end}")
            expected = math.prod(entry.shape) * dtype_named(own).itemsize
            self._expect(entry.num_bytes == expected, f"{found}, but its shape takes {expected} bytes")
            end = entry.data_offsets[1]
        self._expect(end == num_bytes, f"it has {num_bytes} bytes after its header, but its tensors take {end}")

    def _expect(self, holds: bool, found: str) -> None:
        if not holds:
            raise self._wrong(found)

    def _wrong(self, found: str) -> PushError:
        return PushError(f"disk: {self._path} is not a whole safetensors file: {found}; write the folder again")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values


def _named(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(f"tensor {ascii(name[:80])} is not a map of dtype, shape and data_offsets")
    return {"name": name, **value}
