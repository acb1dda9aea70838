"""Assembles the pieces of a push into a complete set of weights. If the assembly fails, the error names the tensor.

Owns the count of the rows and elements that have arrived. Does not own the staging area or the memory of buckets, and
keeps no reference to a bucket's memory. Guarantees: every length, offset and index is checked before use. `finish`
succeeds only if every tensor of the push arrived exactly once, either whole or as all of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from trueroll.errors import PushError

from ..payload.manifest import (
    ALIGNMENT,
    ROW_MULTIPLE,
    Bucket,
    Elements,
    Parameters,
    Piece,
    Rows,
    check_complete,
    describe_unknown,
    list_names,
    spellings_of,
)
from ..payload.tensors import INDEX_DTYPE, BytePass, copy_checked, dtypes_of, is_plain, word_sum

FINITE = "finite values (or reject_nonfinite=False)", "infinities or NaN"
"""Words for an error: the expected values, and the values found instead."""
PART_BYTES = 2**20
"""Number of bytes that are hashed and then copied while they are in a core's cache."""
Guarded: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the staging may be written. Entering the context raises an error if the push is closed."""


class Writable(Protocol):
    """Rows of a weight or of a part, in any storage layout."""

    def copy_(self, source: torch.Tensor, /) -> Any: ...

    def narrow(self, dim: int, start: int, length: int, /) -> Writable: ...


class StagingArea(Protocol):
    """The memory in which the weights of a push are assembled: a second set of weights or, for a push in place, the
    live weights.
    """

    @property
    def num_bytes(self) -> int: ...

    def rows(self, name: str, start: int, length: int) -> Writable: ...

    def put(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Write new values of single elements. `indices`: flat, int64. Copies `indices` and `values` immediately, since
        their memory is reused.
        """
        ...

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        """Make the staging area expect adapters. `weights`: maps each adapted weight to (name of A, name of B, rank,
        scale).

        `alone`: the push has no base weights; the adapters are added to the weights that the worker had before any
        adapter was added.
        """
        ...

    def to_merge(self) -> Sequence[str]:
        """Return the parameters for which `merge` must be called once all rows have arrived."""
        ...

    def merge(self, name: str) -> bool:
        """Merge a parameter with its adapter, if any. Return False if the result is not finite. Raise ValueError for a
        sum that a quantized parameter cannot store.
        """
        ...


class BaseStagingArea(StagingArea, Protocol):
    """A staging area for the base weights."""

    def keep_base(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record that the staged rows have merged adapters. `tensors`: the values of parameters before adapters were
        merged, by name. The tensors must not change afterwards.
        """
        ...


class Kept(Protocol):
    """A tensor, or the codes of a quantized tensor."""

    @property
    def shape(self) -> torch.Size: ...

    def to_dense(self) -> torch.Tensor: ...


class KeptBase(Protocol):
    """The weights that a worker had before any adapter was added. `checksums`: the checksums computed so far, by
    parameter. `kept`: the values of the parameters that adapters changed. The kept values never change.
    """

    @property
    def checksums(self) -> dict[str, int]: ...

    @property
    def kept(self) -> Mapping[str, Kept]: ...


class AdapterDestination(Protocol):
    """Where a worker receives named adapters."""

    def new_staging(self, name: str) -> StagingArea:
        """Return a staging area for the matrices A and B of an adapter."""
        ...


class LendableStagingArea(StagingArea, Protocol):
    """A staging area that other workers can map once it is complete. `has_optional`: whether optional parameters are
    staged.
    """

    @property
    def has_optional(self) -> bool: ...

    def lend(self) -> tuple[int, int, int, int]:
        """Return `pid`, `fd`, `inode` and `num_bytes` for `LentSource`. After this call, the caller writes nothing to
        the staging area.
        """
        ...

    def withdraw(self) -> None:
        """Stop lending the memory. Processes that have mapped the memory keep their mapping."""
        ...


class Destination(Parameters, Protocol):
    """A worker's parameters, and the functions that create staging areas for new parameters. `kin`, `renamed`,
    `respelled`, `left_out`: see `Weights`.

    `commit_note`: why commits take longer than necessary, or an empty string. `optional_note`: which parameters the
    last push lacked, or an empty string. `quantization`: see `Weights`.
    """

    @property
    def quantization(self) -> str: ...

    @property
    def kin(self) -> str | None: ...

    @property
    def renamed(self) -> Mapping[str, str]: ...

    @property
    def respelled(self) -> Mapping[str, str]: ...

    @property
    def left_out(self) -> tuple[str, ...]: ...

    @property
    def commit_note(self) -> str: ...

    @property
    def optional_note(self) -> str: ...

    @property
    def base(self) -> KeptBase: ...

    def served(self, name: str) -> torch.Tensor:
        """Return a served parameter or part as a dense tensor."""
        ...

    def served_rows(self, name: str, start: int, length: int) -> torch.Tensor:
        """Return rows [start, start + length) of a served parameter as a dense tensor. For a matrix, `start` must be a
        multiple of `ROW_MULTIPLE`. `length` must also be a multiple of `ROW_MULTIPLE`, unless the rows include the last
        row.
        """
        ...

    def before_adapters(self, name: str) -> torch.Tensor:
        """Return the value that a parameter had before any adapter was added. The live weights must be complete."""
        ...

    def new_staging(self, in_place: bool) -> BaseStagingArea: ...

    def new_lendable(self) -> LendableStagingArea: ...

    def borrow(self, lent: tuple[int, int, int, int], has_optional: bool) -> StagingArea:
        """Return the weights that another worker of the same `kin` lends. `has_optional`: whether these weights include
        the optional parameters. Raise OSError if the lent memory no longer exists.
        """
        ...


@dataclass
class _Tally:
    """Counts the rows or changed elements of a tensor that have arrived."""

    kind: str
    expected: int
    arrived: int = 0
    last_index: int = -1

    @property
    def is_whole(self) -> bool:
        return self.arrived == self.expected


class Assembly:
    """Writes pieces into `staging`. `is_sparse`: whether pieces may be lists of changed elements instead of rows.
    `in_place`: whether the staging is the live weights; if so, a piece is only written after the whole piece has been
    checked.
    """

    def __init__(
        self, weights: Parameters, staging: StagingArea, is_sparse: bool, reject_nonfinite: bool, in_place: bool
    ) -> None:
        self._weights = weights
        self._spellings = spellings_of(weights)
        self._staging = staging
        self._dtype_of = dtypes_of(weights)
        self._is_sparse = is_sparse
        self._in_place = in_place
        self._reject_nonfinite = reject_nonfinite
        self._tallies: dict[str, _Tally] = {}

    def check(self, bucket: Bucket) -> None:
        """Raise PushError unless every piece is inside the bucket and has the size that the piece's shape requires."""
        for piece in bucket.pieces:
            self._check_extent(piece)
            expected = self._num_bytes(piece)
            if piece.num_bytes != expected:
                raise _wrong(piece, f"{expected} bytes", piece.num_bytes)
            if piece.offset % ALIGNMENT:
                raise _wrong(piece, f"a multiple of {ALIGNMENT} as offset", piece.offset)
            if (end := piece.offset + piece.num_bytes) > bucket.num_bytes:
                raise _wrong(piece, f"its end within the bucket's {bucket.num_bytes} bytes", end)
            if bucket.word_sum is None:
                if piece.checksum is None:
                    raise _wrong(piece, "a checksum of the piece or of its bucket", "none")
                continue
            if not isinstance(piece, Rows):
                raise _wrong(piece, "rows in a bucket with a word sum", piece.kind)
            if piece.checksum is not None:
                raise _wrong(piece, "only the word sum of its bucket", "a checksum of its own too")
        end = max((piece.offset + piece.num_bytes for piece in bucket.pieces), default=0)
        if bucket.num_bytes != end:
            raise PushError(f"bucket {bucket.index}: has {bucket.num_bytes} bytes, but its pieces take {end} bytes")

    def inspect_all(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Check the bytes of a bucket that passed `check` and has a word sum. Raise PushError if the bytes are corrupt.
        Writes nothing.

        The check waits for the GPU once, or twice if values must be finite.
        """
        if bucket.word_sum is None:
            if data.device.type != "cpu":
                raise PushError(
                    f"bucket {bucket.index}: is on {data.device}, where a bucket must have a word sum, but has none"
                )
            return
        found = word_sum(data[: bucket.num_bytes])
        if found != bucket.word_sum:
            names = list_names(sorted({piece.name for piece in bucket.pieces}))
            raise PushError(
                f"bucket {bucket.index} ({names}): expected word sum {bucket.word_sum:016x}, found {found:016x}: the "
                "bytes are corrupt; nothing of this push is served"
            )
        if self._reject_nonfinite and bucket.pieces:
            values = [self._values(piece, content_of(piece, data)) for piece in bucket.pieces]
            finite = torch.stack([each.isfinite().all() for each in values]).tolist()
            for piece, is_finite in zip(bucket.pieces, finite, strict=True):
                if not is_finite:
                    raise _wrong(piece, *FINITE)

    def take(self, piece: Piece, data: torch.Tensor, guarded: Guarded) -> None:
        """Check a piece and write it into the staging. `check` must have passed.

        `data`: the bytes of the piece, in memory that is reused afterwards. `guarded`: entered for each write. Raise
        PushError if `piece` is not the next piece of its tensor, or if the piece has wrong bytes. Unless the
        push is in place, a long piece is written in parts while it is checked. After PushError, the staging may
        therefore contain wrong bytes, and must be dropped. If a piece has no checksum, `inspect_all` must have checked
        the piece's bucket.
        """
        if isinstance(piece, Rows):
            self._take_rows(piece, data, guarded)
        else:
            self._take_elements(piece, data, guarded)

    def has_arrived(self, name: str) -> bool:
        """Return whether all rows or changed elements of a tensor have arrived."""
        return name in self._tallies and self._tallies[name].is_whole

    def finish(self) -> None:
        """Raise PushError unless every parameter has arrived completely."""
        check_complete(self._tallies, self._weights)
        cut = [f"{name} ({t.arrived} of {t.expected} {t.kind})" for name, t in self._tallies.items() if not t.is_whole]
        if cut:
            raise PushError(f"push: tensors are incomplete: {list_names(cut)}; push again")

    def _check_extent(self, piece: Piece) -> None:
        shape = self._spellings.shape(piece.name)
        if shape is None:
            raise PushError(describe_unknown(piece.name, self._weights))
        if piece.shape != shape:
            raise _wrong(piece, f"shape {list(shape)}", list(piece.shape))
        if isinstance(piece, Rows):
            end = piece.start + piece.length
            if end > shape[0] or piece.length <= 0:
                raise _wrong(piece, f"a range of its {shape[0]} rows", f"[{piece.start}, {end})")
            if len(shape) == 2 and piece.start % ROW_MULTIPLE:
                raise _wrong(piece, f"a multiple of {ROW_MULTIPLE} as start", piece.start)
            return
        if not self._is_sparse:
            raise _wrong(piece, "rows, since this push has no base", "elements")
        if piece.count > (most := min(piece.total, math.prod(shape))):
            raise _wrong(piece, f"at most {most} elements", piece.count)
        if piece.count == 0 and piece.total > 0:
            raise _wrong(piece, "at least one element", 0)

    def _num_bytes(self, piece: Piece) -> int:
        itemsize = self._dtype_of(piece.name).itemsize
        if isinstance(piece, Rows):
            return piece.length * math.prod(piece.shape[1:]) * itemsize
        return piece.count * (INDEX_DTYPE.itemsize + itemsize)

    def _tally(self, piece: Piece) -> _Tally:
        expected = piece.shape[0] if isinstance(piece, Rows) else piece.total
        tally = self._tallies.get(piece.name)
        if tally is None:
            return self._tallies.setdefault(piece.name, _Tally(piece.kind, expected))
        if tally.is_whole:
            raise _wrong(piece, "the tensor once", "it twice")
        if tally.kind != piece.kind:
            raise _wrong(piece, f"more {tally.kind}", piece.kind)
        if tally.expected != expected:
            raise _wrong(piece, f"a total of {tally.expected}", expected)
        return tally

    def _values(self, piece: Piece, data: torch.Tensor) -> torch.Tensor:
        return data[_values_start(piece) :].view(self._dtype_of(piece.name))

    def _take_rows(self, piece: Rows, data: torch.Tensor, guarded: Guarded) -> None:
        tally = self._tally(piece)
        if piece.start != tally.arrived:
            raise _wrong(piece, f"rows from {tally.arrived} on", f"rows from {piece.start} on")
        values, expected = self._values(piece, data).view(piece.length, *piece.shape[1:]), piece.checksum
        place, found = None, None
        if expected is not None and not self._in_place and is_plain(values):
            with guarded():
                place = self._staging.rows(piece.name, piece.start, piece.length)
                found = copy_checked(place, values, self._reject_nonfinite)
        if expected is None or found is None:
            self._take_in_parts(piece, values, place, guarded)
        else:
            _expect_right(piece, expected, *found)
        tally.arrived += piece.length

    def _take_in_parts(self, piece: Rows, values: torch.Tensor, place: Writable | None, guarded: Guarded) -> None:
        passed, is_whole = self._new_pass(piece), self._in_place or piece.checksum is None
        step = piece.length if is_whole else _rows_at_once(piece)
        for start in range(0, piece.length, step):
            part = values.narrow(0, start, min(step, piece.length - start))
            if piece.checksum is not None:
                passed.update(part)
                if start + step >= piece.length:
                    _expect_right(piece, piece.checksum, passed.checksum, passed.are_finite)
            with guarded():
                if place is None:
                    place = self._staging.rows(piece.name, piece.start, piece.length)
                _write(piece, place if len(part) == piece.length else place.narrow(0, start, len(part)), part)

    def _take_elements(self, piece: Elements, data: torch.Tensor, guarded: Guarded) -> None:
        tally, passed, split = self._tally(piece), self._new_pass(piece), _values_start(piece)
        passed.update_plain(data[:split])
        passed.update(data[split:])
        _expect_right(piece, piece.checksum, passed.checksum, passed.are_finite)
        self._inspect_elements(piece, tally, data)
        indices = _indices(piece, data)
        with guarded():
            try:
                self._staging.put(piece.name, indices.to(torch.int64), self._values(piece, data))
            except ValueError as error:
                raise PushError(f"{piece.name}: {error}; push again without sparse=True") from None
        tally.arrived += piece.count
        tally.last_index = int(indices[-1]) if piece.count else tally.last_index

    def _new_pass(self, piece: Piece) -> BytePass:
        return BytePass(self._dtype_of(piece.name) if self._reject_nonfinite else None)

    def _inspect_elements(self, piece: Elements, tally: _Tally, data: torch.Tensor) -> None:
        arrived = tally.arrived + piece.count
        if arrived > piece.total:
            raise _wrong(piece, f"{piece.total} elements", arrived)
        if piece.count:
            indices, size = _indices(piece, data).numpy(), math.prod(piece.shape)
            first, last = int(indices[0]), int(indices[-1])
            is_right = first > tally.last_index and last < size and bool((indices[1:] > indices[:-1]).all())
            if not is_right:
                expected = f"strictly ascending indices in [{tally.last_index + 1}, {size})"
                raise _wrong(piece, expected, f"{first} to {last}, or some out of order")


def _write(piece: Rows, place: Any, values: torch.Tensor) -> None:
    """Write rows. Raise PushError for values that a quantized weight cannot store."""
    try:
        place.copy_(values)
    except ValueError as error:
        raise PushError(f"{piece.name}: {error}; nothing of this push is served") from None


def content_of(piece: Piece, data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a piece. `data`: the bytes of the piece's bucket."""
    return data[piece.offset : piece.offset + piece.num_bytes]


def _rows_at_once(piece: Rows) -> int:
    """Return the number of rows that are checked and then written at a time."""
    most = max(1, PART_BYTES * piece.length // piece.num_bytes) if piece.num_bytes else piece.length
    return max(ROW_MULTIPLE, most - most % ROW_MULTIPLE) if len(piece.shape) == 2 else most


def _expect_right(piece: Piece, expected: int, found: int, are_finite: bool) -> None:
    if found != expected:
        raise _wrong(piece, f"checksum {expected:016x}", f"{found:016x}: the bytes are corrupt")
    if not are_finite:
        raise _wrong(piece, *FINITE)


def _values_start(piece: Piece) -> int:
    return 0 if isinstance(piece, Rows) else piece.count * INDEX_DTYPE.itemsize


def _indices(piece: Elements, data: torch.Tensor) -> torch.Tensor:
    return data[: piece.count * INDEX_DTYPE.itemsize].view(INDEX_DTYPE)


def _wrong(piece: Piece, expected: str, found: object) -> PushError:
    return PushError(f"tensor {piece.name}: expected {expected}, found {found}; nothing of this push is served")
