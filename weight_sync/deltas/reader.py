"""The worker's reader of a chain: yields the whole tensors of a version.

The initial value of each tensor comes from the served weights or from a full checkpoint. Deltas are applied to this
value in order, and the checksum of the result is compared before the tensor is yielded. Owns the open files of the
chain, which stay readable if the trainer removes their folders. Does not own the served weights, or the rules about
which places may be read.

Memory: the bytes of one tensor, and its compressed delta. With the encoding `overwrite`, a delta takes up to five times
the bytes of its tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from trueroll.errors import PushError

from ...kernels.spellings import Names, own_name
from ..payload.manifest import (
    Bucket,
    Parameters,
    Rows,
    Shape,
    checksum,
    describe_tie,
    describe_unknown,
    own_dtypes,
    spellings_of,
)
from ..payload.tensor_file import TensorEntry, TensorFile, max_header_bytes
from ..payload.tensors import dtype_named
from .chain import Served, find_way
from .encoding import apply, digest
from .index import Index
from .places import Place, read_index

MOST_FILES = 512
"""Limit on the files that are open at a time."""
_MOST_GROWTH, _FRAME_BYTES = 6, 2**10
"""A compressed delta has at most `_MOST_GROWTH` times the bytes of its tensor, plus `_FRAME_BYTES`."""


class Wanted(Parameters, Names, Protocol):
    """The parameters of a worker, and how other names are mapped to the names of these parameters."""


@dataclass(frozen=True)
class _Step:
    """What one folder says about a tensor: the whole tensor, or a delta. `digest`: the checksum of the result; None if
    the folder has no checksums.
    """

    index: Index
    tensors: TensorFile
    entry: TensorEntry
    digest: str | None


class ChainReader:
    """Reads version `version` of the chain in `place`.

    `served`: the weights that the worker serves; None if they are not complete. `base`: returns a copy of the bytes of
    a served parameter, or of a part of a served parameter: uint8 [n]. `push_id`: see `find_way`. Raise PushError if the
    chain does not lead to `version`, if one of its files is missing, incomplete or of another model, or if a folder was
    replaced.
    """

    def __init__(
        self,
        place: Place,
        version: int,
        wanted: Wanted,
        served: Served | None,
        base: Callable[[str], np.ndarray],
        push_id: str | None = None,
    ) -> None:
        self._place, self._wanted, self._base = place, wanted, base
        self._spellings, self._dtypes = spellings_of(wanted), own_dtypes(wanted)
        num_names = self._spellings.most + len(wanted.tied) + len(wanted.ignored)
        self._most_bytes = max_header_bytes(num_names)
        self._steps: dict[str, list[_Step]] = {}
        self._num_files = 0
        with ExitStack() as opened:
            way = find_way(self._read_index, version, served, push_id)
            for index in way:
                self._open_folder(index, opened)
            self._starts_from_served = way[0].delta is not None
            self._names = self._served_names() if self._starts_from_served else self._checkpoint_names()
            self._opened = opened.pop_all()

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing. A chain has no buckets, and `read` refuses any bucket."""

    def read(self, bucket: Bucket) -> torch.Tensor:
        raise PushError(f"bucket {bucket.index}: a push from a chain has no buckets; send verify_push instead")

    def read_unannounced(self) -> Iterator[tuple[Bucket, Callable[[], torch.Tensor]]]:
        """Yield each whole tensor as a bucket of one piece, together with a function that returns the tensor's bytes.
        The function may be called once.

        The iterator raises PushError if a tensor does not have the checksum that the chain states.
        """
        tied, ties = self._wanted.tied, dict[str, int]()
        for name in self._names:
            data = self._state(name)
            found = checksum(data)
            ready = [torch.from_numpy(data)]
            del data  # only the caller keeps the tensor
            if name in tied or name in tied.values():
                ties[name] = found
            if name not in tied:
                yield self._bucket(name, found), ready.pop
        for name, other in tied.items():
            if name in ties and ties[name] != ties.get(other):
                raise PushError(describe_tie(name, other))

    def close(self) -> None:
        self._opened.close()

    def _read_index(self, version: int) -> Index:
        return read_index(self._place, version, self._most_bytes)

    def _open_folder(self, index: Index, opened: ExitStack) -> None:
        seen: set[str] = set()
        for file_name in index.file_names:
            self._num_files += 1
            if self._num_files > MOST_FILES:
                raise PushError(
                    f"chain: more than {MOST_FILES} files lead to this version; write full checkpoints more often "
                    "(full_every)"
                )
            file = opened.enter_context(closing(self._place.open(index.folder, file_name)))
            tensors = TensorFile(file, partial(self._dtype_in, index), self._most_bytes)
            for entry in tensors.entries:
                if index.files is not None and index.files.get(entry.name) != file_name:
                    raise PushError(f"chain: {index.source} does not list the tensor {entry.name:.80} of {file.path}")
                seen.add(entry.name)
                self._add(_Step(index, tensors, entry, index.digest_of(entry.name, tensors.metadata)))
        if missing := sorted((index.files or {}).keys() - seen):
            raise PushError(f"chain: {index.folder} lacks {missing[0]:.80}, which {index.source} lists")
        if self._read_index(index.version) != index:
            raise PushError(f"chain: {index.folder} was replaced while it was opened; push again")

    def _own_name(self, name: str) -> str | None:
        """Return the worker's name for a tensor of the chain; None if the worker does not use the tensor."""
        own = own_name(name, self._wanted)
        return None if own is None or own in self._wanted.ignored else own

    def _stored(self, own: str) -> str:
        """Return the name of the parameter that has the value of the tensor `own`."""
        return self._wanted.tied.get(own, own)

    def _dtype_in(self, index: Index, name: str) -> str | None:
        own = self._own_name(name)
        if index.delta is not None:
            return "uint8"
        return None if own is None else self._dtype(self._stored(own))

    def _dtype(self, name: str) -> str:
        return self._dtypes.get(name, self._wanted.dtype)

    def _shape(self, own: str) -> Shape:
        shape = self._spellings.shape(self._stored(own))
        if shape is None:
            raise PushError(describe_unknown(own, self._wanted))
        return shape

    def _num_bytes(self, own: str) -> int:
        return math.prod(self._shape(own)) * dtype_named(self._dtype(self._stored(own))).itemsize

    def _add(self, step: _Step) -> None:
        """Record a tensor of a folder, after a check of its size."""
        index, entry = step.index, step.entry
        if (own := self._own_name(entry.name)) is None:
            return
        shape, most = self._shape(own), self._num_bytes(own) * _MOST_GROWTH + _FRAME_BYTES
        if index.delta is None and entry.shape != shape:
            raise PushError(
                f"tensor {own}: has shape {list(entry.shape)} in {index.folder}, expected {list(shape)}; "
                "check that trainer and worker have the same model"
            )
        if entry.num_bytes > most:
            raise PushError(
                f"tensor {own}: its delta in {index.folder} has {entry.num_bytes} bytes (limit {most}); "
                "check that trainer and worker have the same model"
            )
        if index.checksum_format is not None and step.digest is None:
            raise PushError(f"tensor {own}: {index.folder} has no checksum for it; write the folder again")
        steps = self._steps.setdefault(own, [])
        if steps and steps[-1].index is index:
            raise PushError(f"tensor {own}: {index.folder} has it twice; write the folder again")
        steps.append(step)

    def _checkpoint_names(self) -> list[str]:
        """Return the names of the tensors in the full checkpoint that begins the chain. Raise PushError if a delta
        changes a tensor that the full checkpoint lacks.
        """
        if late := [name for name, [first, *_] in self._steps.items() if first.index.delta is not None]:
            raise PushError(
                f"tensor {late[0]}: the chain has a delta to it, but its full checkpoint lacks it; write a full "
                "checkpoint again"
            )
        return list(self._steps)

    def _served_names(self) -> list[str]:
        """Return the names of the tensors that the deltas change, and of all other served parameters. If the deltas
        change parts of a parameter, return the names of all its parts instead of the parameter's name.
        """
        names = dict.fromkeys(self._steps)
        parts = self._spellings.parts_among(names)
        for name in self._wanted.shapes:
            if name in parts and name in names:
                raise PushError(
                    f"tensor {name}: the chain has deltas to it and to its parts; write a full checkpoint, and name "
                    "the tensors of later deltas in the same way"
                )
            names |= dict.fromkeys(self._spellings.parts(name) if name in parts else [name])
        names |= dict.fromkeys(self._stored(name) for name in self._steps)
        return list(names)

    def _state(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor in the version that is read: uint8 [n]. Raise PushError if a delta is corrupt,
        or if the bytes do not match the chain's checksum.
        """
        steps = self._steps.get(name, [])
        if self._starts_from_served:
            data = self._base(self._stored(name))
        else:
            data, steps = steps[0].tensors.read(steps[0].entry).numpy(), steps[1:]
        for step in steps:
            assert step.index.delta is not None
            frame = step.tensors.read(step.entry).numpy().data
            try:
                apply(step.index.delta.encoding, data, frame)
            except ValueError as error:
                raise PushError(f"tensor {name}: {step.index.folder}: {error}; {self._advice}") from None
        if (last := self._steps.get(name)) is not None:
            self._check(name, last[-1], data)
        return data

    def _check(self, name: str, step: _Step, data: np.ndarray) -> None:
        if step.index.checksum_format is None:
            return
        found = digest(step.index.checksum_format, data)
        if found != step.digest:
            raise PushError(
                f"tensor {name}: in version {step.index.version}, expected checksum {step.digest!s:.64}, found "
                f"{found}; nothing of this push is served; {self._advice}"
            )

    @property
    def _advice(self) -> str:
        if self._starts_from_served:
            return (
                "the served weights are not the base of this chain, or a file is corrupt; write a full checkpoint, or "
                "push the whole weights once"
            )
        return "a file of the chain is corrupt; write a full checkpoint"

    def _bucket(self, name: str, found: int) -> Bucket:
        shape, num_bytes = self._shape(name), self._num_bytes(name)
        rows = dict[str, Any](start=0, length=shape[0], offset=0, num_bytes=num_bytes)
        piece = Rows(name=name, shape=shape, checksum=found, **rows)
        return Bucket(index=0, num_bytes=num_bytes, pieces=(piece,))
