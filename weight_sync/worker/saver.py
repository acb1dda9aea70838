"""Save the served weights in the background, and load them when the worker starts again.

`Saver`, a thread, owns the writing of the weights and the state that `health` reports. Does not own: the names in the
folder (`saved_folder`), the live weights, the decision of when to save weights.

Guarantees:

- The weights that were committed last are saved, unless they are replaced or released while they are read. Of several
  commits during one write, only the last is saved.
- Each saved set of weights has the bits of one commit. The thread reads the live weights in chunks of a few MB, and
  only until `interrupt` is called. `interrupt` waits for one chunk at most, never for the disk.
- The thread delays nothing but the calls of `save` and `interrupt`. Errors, such as a full disk, are logged, reported
  in `state`, and retried; the folder keeps the weights that it had.
- `restore` checks every byte against its checksum, and commits everything or raises an error.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from trueroll.errors import ConfigError, PushError

from ...engine.request import InFlight
from ...kernels.transfer import stream_beside
from ..payload.manifest import ROW_MULTIPLE, DiskSource, own_dtypes, spellings_of
from ..payload.tensors import dtypes_of, host_chunks, raw_bytes
from ..transports.disk import FolderReader, FolderWriter
from ..transports.policy import PushPolicy
from .assembly import Assembly, Destination, Kept, StagingArea, content_of
from .saved_folder import SavedFolder, SavedPush, SavedRecord

CHUNK_BYTES = 4 * 2**20
"""Size of a chunk, unless 128 rows of a matrix or one matrix of a stack are larger."""
RETRY_SECONDS = 60.0
"""Time after a failed write until the same weights are written again."""
NICENESS = 10
"""Niceness of the saver's thread, so that the engine's threads get the cores first."""

log = logging.getLogger(__name__)


class RestorableEngine(Protocol):
    """The interface that `Saver.restore` needs from the engine."""

    @property
    def weights(self) -> Destination: ...

    def interrupt(self, in_flight: InFlight) -> Sequence[Any]: ...

    def commit_weights(self, staging: Any, version: int, in_flight: InFlight) -> Sequence[Any]: ...


class _HostCopies:
    """Tensors in host memory, to which an `Assembly` writes rows. `tensors`: the tensors by name; `rows` adds a tensor
    when its first rows are requested.
    """

    def __init__(self, dtype_of: Callable[[str], torch.dtype], shapes: Mapping[str, Sequence[int]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._dtype_of, self._shapes = dtype_of, shapes

    def rows(self, name: str, start: int, length: int) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.empty(tuple(self._shapes[name]), dtype=self._dtype_of(name))
        return self.tensors[name].narrow(0, start, length)


@dataclass(frozen=True)
class SaverState:
    """`push`: the saved push; None if nothing is saved. `is_writing`: whether weights are being written, or are about
    to be. `num_saved`, `num_interrupted`, `num_failed`: numbers of writes since the start, by outcome. `error`: why the
    last write failed; an empty string if the last write did not fail.
    """

    push: SavedPush | None
    is_writing: bool = False
    num_saved: int = 0
    num_interrupted: int = 0
    num_failed: int = 0
    error: str = ""


@dataclass(frozen=True, eq=False)
class _Order:
    """Weights to be saved. `base`: the weights before adapters were added, by name."""

    push: SavedPush
    base: Mapping[str, Kept]


class _Interrupted(Exception):
    """The live weights may no longer be read."""


class _SavedBase:
    """A note of the weights from before adapters were added that are saved in the folder. An adapters-only push
    does not change these weights, so most
    pushes of adapters need not write the weights again. Keeps no tensor alive.
    """

    def __init__(self, push: SavedPush, weights: Mapping[str, Kept]) -> None:
        self.push = push
        self._weights = {name: weakref.ref(weight) for name, weight in weights.items()}

    def has(self, weights: Mapping[str, Kept]) -> bool:
        """Return whether these are the very weights that were written. Committed weights never change."""
        same = self._weights
        return weights.keys() == same.keys() and all(same[name]() is weight for name, weight in weights.items())


class Saver(threading.Thread):
    """Saves `weights` of the model `model`, which the engine computes on `device`, into `folder`. `changed`: called on
    the saver's thread after each change of `state`.
    """

    def __init__(
        self, folder: SavedFolder, weights: Destination, model: str, device: str, changed: Callable[[], None]
    ) -> None:
        super().__init__(name="saver", daemon=True)
        self.state = SaverState(None if folder.record is None else folder.record.push)
        self._folder, self._weights, self._model = folder, weights, model
        self._device, self._changed = torch.device(device), changed
        self._turn = threading.Condition()
        """Held while a chunk of the live weights is read, and while an order is given or taken back."""
        self._order: _Order | None = None
        self._is_at_work = self._is_closed = False
        self._base: _SavedBase | None = None
        self._buffer = np.empty(CHUNK_BYTES, np.uint8)

    # Methods of other threads.

    def save(self, push_id: str, version: int) -> None:
        """Save the live weights, which came from the push `push_id` of this version. The live weights must be complete,
        and must not change before `interrupt` is called.
        """
        order = _Order(SavedPush(push_id=push_id, weight_version=version), dict(self._weights.base.kept))
        with self._turn:
            self._order = order
            self._note(is_writing=True)
            self._turn.notify()

    def interrupt(self) -> None:
        """Stop reading the live weights, before they change. Weights that were read completely are still saved."""
        with self._turn:
            self._order = None
            self._note(is_writing=self._is_at_work)
            self._turn.notify()

    def close(self) -> None:
        """End the thread. The current write is dropped at its next chunk."""
        with self._turn:
            self._is_closed, self._order = True, None
            self._turn.notify()

    def restore(self, engine: RestorableEngine) -> None:
        """Make the engine serve the saved weights, if there are any. Call `restore` on the engine's thread, before the
        engine gets requests.

        Raise ConfigError if the weights belong to another model or dtype, or are incomplete or corrupt.
        """
        record = self._folder.record
        if record is None:
            return
        self._check_owner(record)
        try:
            self._load(engine, record)
        except PushError as error:
            raise ConfigError(
                f"save_folder: cannot serve the saved version {record.push.weight_version}: {error}; to start with the "
                f"checkpoint instead, remove {self._folder}"
            ) from None
        log.info("serving version %d of push %s from %s", record.push.weight_version, record.push.push_id, self._folder)

    def _check_owner(self, record: SavedRecord) -> None:
        own = self._model, self._weights.dtype, self._weights.quantization
        if (record.model, record.dtype, record.quantization) == own:
            return
        raise ConfigError(
            f"save_folder: {self._folder} has weights of {record.model!r:.200} in {record.dtype:.80} with quantization "
            f"{record.quantization:.80}, but this worker serves {own[0]!r:.200} in {own[1]} with quantization "
            f"{own[2]}; give another folder, or remove this one. If only the path of the model has changed, correct it "
            f"in {self._folder.record_path}",
            field="save_folder",
        )

    def _load(self, engine: RestorableEngine, record: SavedRecord) -> None:
        # The weights are written on the stream of the engine's steps, so that later steps wait for the writes.
        engine.interrupt("recompute")
        staging = self._weights.new_staging(in_place=True)
        assembly = Assembly(self._weights, staging, is_sparse=False, reject_nonfinite=False, in_place=True)
        for bucket, read in self._read(self._folder.weights, record.push):
            assembly.check(bucket)
            data = read()
            for piece in bucket.pieces:
                assembly.take(piece, content_of(piece, data), nullcontext)
        assembly.finish()
        if record.base is not None:
            staging.keep_base(self._load_base(record.base))
        engine.commit_weights(staging, record.push.weight_version, "recompute")
        if record.base is not None:
            self._base = _SavedBase(record.base, self._weights.base.kept)

    def _load_base(self, push: SavedPush) -> dict[str, torch.Tensor]:
        """Return the saved weights from before adapters were added, in host memory."""
        base = _HostCopies(dtypes_of(self._weights), self._weights.shapes)
        assembly = Assembly(
            self._weights, cast(StagingArea, base), is_sparse=False, reject_nonfinite=False, in_place=True
        )
        for bucket, read in self._read(self._folder.base, push):
            assembly.check(bucket)
            data = read()
            for piece in bucket.pieces:
                assembly.take(piece, content_of(piece, data), nullcontext)
        return base.tensors

    def _read(self, parent: Path, push: SavedPush) -> Iterator[tuple[Any, Callable[[], torch.Tensor]]]:
        weights, source = self._weights, DiskSource(folder=str(parent / push.name))
        told = push.push_id, push.weight_version, weights.dtype, spellings_of(weights).most
        with closing(FolderReader(source, *told, PushPolicy(), own_dtypes(weights))) as reader:
            yield from reader.read_unannounced()

    # Methods of the saver's thread.

    def run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (order := self._next()) is not None:
            with stream_beside(self._device):
                self._carry_out(order)
            self._changed()

    def _next(self) -> _Order | None:
        """Wait for an order, and return it. Return None once closed."""
        with self._turn:
            self._turn.wait_for(lambda: self._order is not None or self._is_closed)
            self._is_at_work = True
            return self._order

    def _carry_out(self, order: _Order) -> None:
        try:
            self._write(order)
        except _Interrupted:
            self._conclude(order, num_interrupted=self.state.num_interrupted + 1)
            log.warning(
                "version %d is not saved, because the weights changed while they were read (%d times so far); saved is "
                "version %s",
                order.push.weight_version,
                self.state.num_interrupted,
                "none" if self.state.push is None else self.state.push.weight_version,
            )
        except Exception as error:
            text = str(error) if isinstance(error, PushError) else f"{type(error).__name__}: {error}"
            failed = dict(num_failed=self.state.num_failed + 1, error=text)
            log.error("version %d cannot be saved: %s", order.push.weight_version, text)
            self._wait_to_retry(order, failed)
        else:
            log.info("version %d is saved in %s", order.push.weight_version, self._folder)
            self._conclude(order, push=order.push, num_saved=self.state.num_saved + 1, error="")

    def _conclude(self, order: _Order, **outcome: Any) -> None:
        """Record the outcome of a write. The order is done, unless another order has replaced it."""
        with self._turn:
            self._is_at_work = False
            if self._order is order:
                self._order = None
            self._note(is_writing=self._order is not None, **outcome)

    def _wait_to_retry(self, order: _Order, failed: Mapping[str, Any]) -> None:
        """Record a failure, and wait until the order is to be tried again, or is replaced or taken back."""
        with self._turn:
            self._is_at_work = False
            self._note(is_writing=self._order not in (None, order), **failed)
        self._changed()
        with self._turn:
            self._turn.wait_for(lambda: self._order is not order, RETRY_SECONDS)
            self._note(is_writing=self._order is not None)

    def _note(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _write(self, order: _Order) -> None:
        if order.push == self.state.push:
            return
        self._folder.remove_others()  # such as a folder of a write that failed after the folder was complete
        base = self._write_base(order)
        weights = self._weights
        shapes = {name: tuple(shape) for name, shape in weights.shapes.items()}
        with closing(self._new_folder(self._folder.weights, order.push, shapes)) as writer:
            for name, chunk in self._live_chunks(order):
                writer.append(name, chunk)
            writer.finish()
        saved = None if base is None else base.push
        record = SavedRecord(
            model=self._model, dtype=weights.dtype, quantization=weights.quantization, push=order.push, base=saved
        )
        self._folder.replace_record(record)
        self._base = base

    def _write_base(self, order: _Order) -> _SavedBase | None:
        """Write the weights from before adapters were added, unless the folder has them. Return None if no adapters
        were added.
        """
        if not order.base:
            return None
        if self._base is not None and self._base.has(order.base):
            return self._base
        dtype_of = dtypes_of(self._weights)
        shapes = {name: tuple(weight.shape) for name, weight in order.base.items()}
        with closing(self._new_folder(self._folder.base, order.push, shapes)) as writer:
            for name, weight in order.base.items():
                for _, chunk in host_chunks(weight.to_dense(), dtype_of(name)):
                    self._check(order)
                    writer.append(name, raw_bytes(chunk))
            writer.finish()
        return _SavedBase(order.push, order.base)

    def _new_folder(self, parent: Path, push: SavedPush, shapes: Mapping[str, tuple[int, ...]]) -> FolderWriter:
        weights = self._weights
        return FolderWriter(parent, push.push_id, push.weight_version, weights.dtype, shapes, own_dtypes(weights))

    def _live_chunks(self, order: _Order) -> Iterator[tuple[str, memoryview]]:
        """Yield the name and the bytes of each chunk of the live weights. A chunk is valid until the next chunk is
        read. Raise _Interrupted if `interrupt` was called.
        """
        dtype_of = dtypes_of(self._weights)
        for name, shape in self._weights.shapes.items():
            for start, length in _ranges(shape, dtype_of(name).itemsize):
                with self._turn:
                    self._check(order)
                    rows = self._weights.served_rows(name, start, length)
                    chunk = self._copy(raw_bytes(rows.to("cpu", dtype_of(name)).contiguous()))
                yield name, chunk

    def _check(self, order: _Order) -> None:
        if self._order is not order:
            raise _Interrupted

    def _copy(self, data: memoryview) -> memoryview:
        if len(self._buffer) < len(data):
            self._buffer = np.empty(len(data), np.uint8)
        chunk = self._buffer[: len(data)]
        np.copyto(chunk, np.frombuffer(data, np.uint8))
        return chunk.data


def _ranges(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the chunks of a tensor, in rows."""
    length = max(1, CHUNK_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    if len(shape) == 2:
        length = max(ROW_MULTIPLE, length // ROW_MULTIPLE * ROW_MULTIPLE)
    for start in range(0, shape[0], length):
        yield start, min(length, shape[0] - start)
