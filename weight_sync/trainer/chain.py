"""The trainer's end of a chain: writes the folder of each push, as a full checkpoint or as the delta to the last push.

Owns the copy of the last pushed weights, with which the new weights are compared, and the folders of the chain. Does
not own the transaction with the workers. The base of a delta is always a committed push. After a failed push, the next
folder is therefore a full checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from trueroll.errors import PushError

from ..deltas.writer import CheckpointWriter, DeltaWriter, remove_old, take_back
from ..payload.manifest import Parameters
from ..payload.tensors import dtypes_of, host_chunks, raw_bytes
from .served_copy import ServedCopy

PutAll: TypeAlias = Callable[[Callable[[str, torch.Tensor], None]], None]
"""Calls a function with the name and the value of each tensor of a push."""


@dataclass(frozen=True)
class Link:
    """A folder of the chain. `is_full`: whether the folder is a full checkpoint."""

    version: int
    push_id: str
    path: Path
    is_full: bool


class FolderChain:
    """Writes the chain in `parent`. One of every `full_every` consecutive pushes is a full checkpoint."""

    def __init__(self, parent: Path, full_every: int) -> None:
        self.parent = parent.absolute()
        self._full_every = full_every
        self._copy: ServedCopy | None = None
        self._names: set[str] = set()
        """Names of the tensors in the last full checkpoint."""
        self._last: Link | None = None
        self._num_deltas = 0
        """Number of deltas since the last full checkpoint."""

    def write(self, push_id: str, version: int, wanted: Parameters, put_all: PutAll) -> Link:
        """Write the folder of a push. Raise PushError if the folder cannot be written."""
        last, self._last = self._last, None  # None until `commit`
        fits = self._copy is not None and self._copy.fits(wanted)
        if last is None or not fits or version <= last.version or self._num_deltas + 1 >= self._full_every:
            return Link(version, push_id, self._write_full(push_id, version, wanted, put_all), is_full=True)
        return Link(version, push_id, self._write_delta(push_id, version, last, wanted, put_all), is_full=False)

    def commit(self, link: Link) -> None:
        """Make a folder the base of the next delta, and remove the folders that no worker needs any more."""
        self._last, self._num_deltas = link, 0 if link.is_full else self._num_deltas + 1
        remove_old(self.parent, link.version)

    def take_back(self, link: Link) -> None:
        """Remove a folder that no worker has committed, and restore the folder that the removed folder had replaced."""
        take_back(link.path, link.push_id)

    def forget(self) -> None:
        """Free the copy of the weights. The next push writes a full checkpoint."""
        self._copy = self._last = None

    def _write_full(self, push_id: str, version: int, wanted: Parameters, put_all: PutAll) -> Path:
        copy = self._copy = self._copy if self._copy is not None and self._copy.fits(wanted) else ServedCopy(wanted)
        self._names = set()
        with closing(CheckpointWriter(self.parent, push_id, version, wanted)) as writer:

            def put(name: str, tensor: torch.Tensor) -> None:
                kept = copy.replace(name, tensor)
                for _, chunk in host_chunks(kept, kept.dtype):
                    writer.append(name, raw_bytes(chunk))
                self._names.add(name)

            put_all(put)
            return writer.finish()

    def _write_delta(self, push_id: str, version: int, base: Link, wanted: Parameters, put_all: PutAll) -> Path:
        copy, dtype_of = self._copy, dtypes_of(wanted)
        assert copy is not None
        with closing(DeltaWriter(self.parent, push_id, version, base.version, base.push_id)) as writer:

            def put(name: str, tensor: torch.Tensor) -> None:
                if name not in self._names:
                    raise PushError(
                        f"tensor {name}: the last full checkpoint of the chain lacks this name; push the same names "
                        "each time, or push again, which writes a full checkpoint"
                    )
                new = tensor.to("cpu", dtype_of(name)).contiguous()
                writer.add(name, np.asarray(raw_bytes(copy.tensor(name))), np.asarray(raw_bytes(new)))
                copy.replace(name, new)

            put_all(put)
            return writer.finish()
