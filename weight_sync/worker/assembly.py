"""The pieces of a push become a complete set of weights, or an error that names the tensor.

Owns the count of what has arrived. Does not own the staging that it writes into, nor the memory it reads from, of which
it keeps nothing. Promises that no length, offset or index is believed before it is checked, and that `finish` succeeds
only if every tensor that the push has to bring arrived exactly once, whole or in all its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    checksum,
    describe_unknown,
    list_names,
    spellings_of,
)
from ..payload.tensors import INDEX_DTYPE, checksum_and_finiteness, dtypes_of, word_sum

FINITE = "finite values, or a push with reject_nonfinite=False", "infinite ones or NaN"
"""What was expected, and what was found."""


class Writable(Protocol):
    """Rows of a weight, or of a part of one, in whatever layout they are stored."""

    def copy_(self, source: torch.Tensor, /) -> Any: ...


class StagingArea(Protocol):
    """Where the weights of a push are put together, beside the live ones or, in place, in them."""

    @property
    def num_bytes(self) -> int: ...

    def rows(self, name: str, start: int, length: int) -> Writable: ...

    def put(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Flat int64 indices and the values that belong there. Copies both at once: their memory is used again."""
        ...

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        """Expect the adapters of these weights: name of A, name of B, rank and scale of each. `alone`: without the
        weights, which are those that the worker had before adapters.
        """
        ...

    def to_merge(self) -> Sequence[str]:
        """The parameters that `merge` is to be called for once all rows are there."""
        ...

    def merge(self, name: str) -> bool:
        """Puts a parameter together with its adapter, if it has one. False if that made values that are not finite."""
        ...


class KeptBase(Protocol):
    """What a worker's weights were before adapters. `checksums`: of its parameters, as far as they are known."""

    @property
    def checksums(self) -> dict[str, int]: ...


class LendableStagingArea(StagingArea, Protocol):
    """One that others can use as well, once all is there."""

    def lend(self) -> tuple[int, int, int, int]:
        """Where: `pid`, `fd`, `inode` and `num_bytes` of `LentSource`. Nothing more is written to it."""
        ...

    def withdraw(self) -> None:
        """Lend it no more from now on; a process that has it keeps it."""
        ...


class Destination(Parameters, Protocol):
    """The parameters of a worker, and how to make a place for new ones. `kin`: see `Weights`.

    `commit_note`: why commits take longer than they could, or empty.
    """

    @property
    def kin(self) -> str | None: ...

    @property
    def commit_note(self) -> str: ...

    @property
    def base(self) -> KeptBase: ...

    def served(self, name: str) -> torch.Tensor:
        """A parameter as it is served, dense."""
        ...

    def before_adapters(self, name: str) -> torch.Tensor:
        """A parameter as it was before adapters. The live weights must be whole."""
        ...

    def new_staging(self, in_place: bool) -> StagingArea: ...

    def new_lendable(self) -> LendableStagingArea: ...

    def borrow(self, lent: tuple[int, int, int, int]) -> StagingArea:
        """What another worker of this kin lends, all of it. Raise OSError if it is not there."""
        ...


@dataclass
class _Tally:
    """How many of a tensor's rows, or of its changed elements, have arrived."""

    kind: str
    expected: int
    arrived: int = 0
    last_index: int = -1

    @property
    def is_whole(self) -> bool:
        return self.arrived == self.expected


class Assembly:
    """Writes pieces into `staging`. `is_sparse`: lists of changed elements may come instead of rows."""

    def __init__(self, weights: Parameters, staging: StagingArea, is_sparse: bool, reject_nonfinite: bool) -> None:
        self._weights = weights
        self._spellings = spellings_of(weights)
        self._staging = staging
        self._dtype_of = dtypes_of(weights)
        self._is_sparse = is_sparse
        self._reject_nonfinite = reject_nonfinite
        self._tallies: dict[str, _Tally] = {}

    def check(self, bucket: Bucket) -> None:
        """Raise PushError unless every piece lies inside the bucket and has the bytes that it should have."""
        for piece in bucket.pieces:
            self._check_extent(piece)
            expected = self._num_bytes(piece)
            _expect(piece.num_bytes == expected, piece, f"{expected} bytes", piece.num_bytes)
            _expect(piece.offset % ALIGNMENT == 0, piece, f"an offset that {ALIGNMENT} divides", piece.offset)
            end = piece.offset + piece.num_bytes
            _expect(end <= bucket.num_bytes, piece, f"an end within the bucket's {bucket.num_bytes} bytes", end)
            if bucket.word_sum is None:
                _expect(piece.checksum is not None, piece, "a checksum of it or of its bucket", "none")
            else:
                _expect(isinstance(piece, Rows), piece, "rows in a bucket with a word sum", piece.kind)
                _expect(piece.checksum is None, piece, "one checksum, of its bucket", "a second one")
        end = max((piece.offset + piece.num_bytes for piece in bucket.pieces), default=0)
        if bucket.num_bytes != end:
            raise PushError(
                f"bucket {bucket.index}: expected {end} bytes, as its pieces need, found {bucket.num_bytes}"
            )

    def inspect_all(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Raise PushError unless the bytes of a checked bucket with a word sum are right. Writes nothing.

        Waits once for the GPU that they are on, and once more to look for values that are not finite.
        """
        if bucket.word_sum is None:
            if data.device.type != "cpu":
                raise PushError(f"bucket {bucket.index}: expected a word sum, for it is on {data.device}, found none")
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
                _expect(is_finite, piece, *FINITE)

    def inspect(self, piece: Piece, data: torch.Tensor) -> None:
        """Raise PushError unless a checked piece comes in its order, with the right bytes. Writes nothing.

        A piece without a checksum is one of a bucket that `inspect_all` has looked at.
        """
        if piece.checksum is not None:
            self._inspect_bytes(piece, piece.checksum, data)
        tally = self._tally(piece)
        if isinstance(piece, Rows):
            _expect(piece.start == tally.arrived, piece, f"rows from {tally.arrived} on", f"rows from {piece.start} on")
        else:
            self._inspect_elements(piece, tally, data)

    def add(self, piece: Piece, data: torch.Tensor) -> None:
        """Write an inspected piece into the staging. `data`: its bytes, in memory that is used again afterwards."""
        tally, values = self._tallies[piece.name], self._values(piece, data)
        if isinstance(piece, Rows):
            self._staging.rows(piece.name, piece.start, piece.length).copy_(values.view(piece.length, *piece.shape[1:]))
            tally.arrived += piece.length
        elif piece.count:
            indices = _indices(piece, data)
            self._staging.put(piece.name, indices.to(torch.int64), values)
            tally.arrived += piece.count
            tally.last_index = int(indices[-1])

    def finish(self) -> None:
        """Raise PushError unless every parameter has arrived completely."""
        check_complete(self._tallies, self._weights)
        cut = [f"{name} ({t.arrived} of {t.expected} {t.kind})" for name, t in self._tallies.items() if not t.is_whole]
        if cut:
            raise PushError(f"push: expected whole tensors, but incomplete are {list_names(cut)}; push again")

    def _check_extent(self, piece: Piece) -> None:
        shape = self._spellings.shape(piece.name)
        if shape is None:
            raise PushError(describe_unknown(piece.name, self._weights))
        _expect(piece.shape == shape, piece, f"shape {list(shape)}", list(piece.shape))
        if isinstance(piece, Rows):
            end = piece.start + piece.length
            _expect(end <= shape[0] and piece.length > 0, piece, f"some of {shape[0]} rows", f"[{piece.start}, {end})")
            if len(shape) == 2:
                _expect(piece.start % ROW_MULTIPLE == 0, piece, f"a start that {ROW_MULTIPLE} divides", piece.start)
        else:
            _expect(self._is_sparse, piece, "rows, for this push has no base", "elements")
            most = min(piece.total, math.prod(shape))
            _expect(piece.count <= most, piece, f"at most {most} elements", piece.count)
            _expect(piece.count > 0 or piece.total == 0, piece, "some elements", 0)

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
        _expect(not tally.is_whole, piece, "each tensor once", "it twice")
        _expect(tally.kind == piece.kind, piece, f"more {tally.kind}", piece.kind)
        _expect(tally.expected == expected, piece, f"a total of {tally.expected}", expected)
        return tally

    def _values(self, piece: Piece, data: torch.Tensor) -> torch.Tensor:
        return data[_values_start(piece) :].view(self._dtype_of(piece.name))

    def _inspect_bytes(self, piece: Piece, expected: int, data: torch.Tensor) -> None:
        if self._reject_nonfinite:
            dtype = self._dtype_of(piece.name)
            found, are_finite = checksum_and_finiteness(data, _values_start(piece), dtype)
        else:
            found, are_finite = checksum(data.numpy()), True
        _expect(found == expected, piece, f"checksum {expected:016x}", f"{found:016x}: the bytes are corrupt")
        _expect(are_finite, piece, *FINITE)

    def _inspect_elements(self, piece: Elements, tally: _Tally, data: torch.Tensor) -> None:
        arrived = tally.arrived + piece.count
        _expect(arrived <= piece.total, piece, f"{piece.total} elements", arrived)
        if piece.count:
            indices, size = _indices(piece, data).numpy(), math.prod(piece.shape)
            first, last = int(indices[0]), int(indices[-1])
            is_right = first > tally.last_index and last < size and bool((indices[1:] > indices[:-1]).all())
            expected = f"strictly ascending indices in [{tally.last_index + 1}, {size})"
            _expect(is_right, piece, expected, f"{first} to {last}, or some out of order")


def content_of(piece: Piece, data: torch.Tensor) -> torch.Tensor:
    """The bytes of a piece in those of its bucket."""
    return data[piece.offset : piece.offset + piece.num_bytes]


def _values_start(piece: Piece) -> int:
    return 0 if isinstance(piece, Rows) else piece.count * INDEX_DTYPE.itemsize


def _indices(piece: Elements, data: torch.Tensor) -> torch.Tensor:
    return data[: piece.count * INDEX_DTYPE.itemsize].view(INDEX_DTYPE)


def _expect(holds: bool, piece: Piece, expected: str, found: object) -> None:
    if not holds:
        raise PushError(f"tensor {piece.name}: expected {expected}, found {found}; nothing of this push is served")
