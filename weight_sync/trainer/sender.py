"""Send a push: fill buckets or a folder, announce each bucket or the folder to the workers, and wait until all workers
have committed the weights.

- `Packer` owns the placement of pieces in buckets. Pieces are packed in the order in which the trainer yields tensors,
  each piece at a multiple of `ALIGNMENT` bytes. A tensor that does not fit into the remaining space of a bucket is cut
  at a row where a cut is allowed. A bucket exceeds `bucket_bytes` only if it holds a single, larger block that must not
  be cut. No bucket has more than `MOST_PIECES` pieces.
- `Outbox` fills one slot (memory for one bucket) while the other slots are in flight. `Outbox` copies each tensor
  once, directly into a slot. The copy into the slot also
  converts the tensor to the workers' dtype and moves the tensor to the slot's device.
- `WeightSender` owns the buffers, the copy of the served weights (for sparse pushes), and the checksums of base weights
  (for pushes of adapters).

Does not own: the workers, the transaction that announces the buckets, or the trainer's tensors. The objects of this
module keep no reference to a tensor. Memory: one gathered tensor, a few buckets, and (with `sparse`) the copy of the
served weights. The tensor, the buckets and the copy are in the workers' dtypes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from trueroll.errors import ConfigError, PushError

from ...kernels.spellings import own_name
from ..deltas.writer import folder_bytes
from ..payload.adapters import with_adapters
from ..payload.manifest import (
    ALIGNMENT,
    MODEL_FILE,
    MOST_PIECES,
    MOST_UNDER_WAY,
    ROW_MULTIPLE,
    Adapters,
    Bucket,
    ChainSource,
    DiskSource,
    Elements,
    FolderManifest,
    Parameters,
    Piece,
    Rows,
    Shape,
    Source,
    checksum,
    own_dtypes,
    spellings_of,
)
from ..payload.messages import Weights
from ..payload.tensors import INDEX_DTYPE, copy_and_checksum, dtype_named, dtypes_of, host_chunks, raw_bytes, word_sum
from ..transports.collective import GroupSlots
from ..transports.cuda_ipc import CudaIpcSlots
from ..transports.disk import FolderWriter, remove_others
from ..transports.ends import Slots
from ..transports.gpu import broadcasts_between_gpus, gpu_of, shares_gpu
from ..transports.relay import RelaySlots
from ..transports.shared import SharedSlots
from .adapters import Checksums, TrainerAdapters
from .chain import FolderChain
from .served_copy import ServedCopy
from .targets import PushTargets
from .trainer_tensors import Checklist, PushResult, TrainerTensors, check_is_tensor
from .transaction import PushSettings, Transaction

Transport: TypeAlias = Literal["shared", "collective", "relay", "disk", "delta"]
Put: TypeAlias = Callable[[str, torch.Tensor], None]
FAIL_TOGETHER = ("collective",)
"""Transports in which the loss of a worker ends the push for all workers."""
BUCKET_BYTES = {"shared": 16 * 2**20, "collective": 16 * 2**20, "relay": 4 * 2**20}
"""Sizes of buckets in host memory, the fastest in measurements. For shared memory, each bucket costs a round of
messages, but two larger buckets would not fit into a CPU's caches. For a broadcast, larger buckets cost less time per
byte.
"""
GPU_BUCKET_BYTES = 64 * 2**20
"""Size of buckets in GPU memory. Two buckets exist at a time, and each bucket costs a round of messages."""
ADAPTER_BUCKET_BYTES = 2**20
"""Size of buckets in an adapters-only push. With larger buckets, all adapters would fit into one bucket, and no
transfers would overlap.
"""


@dataclass(slots=True)
class Cut:
    """A piece: units [start, start + length) of a packed object, stored in bucket `bucket` from byte `offset` on. A
    unit is a row, or a changed element with its index.
    """

    start: int
    length: int
    bucket: int
    offset: int


class Packer:
    """Packs objects into buckets, one after the other. The packer's only state is the current bucket, the end of the
    last object in this bucket, and the number of pieces in this bucket.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._bucket = 0
        self._end = 0
        self._num_pieces = 0

    def place(self, count: int, unit_bytes: int, multiple: int = 1) -> Iterator[Cut]:
        """Yield the pieces for `count` units, with cuts at multiples of `multiple` units. Yield one empty piece if
        `count` is 0.
        """
        start = 0
        while True:
            if self._num_pieces == MOST_PIECES:
                self._begin_bucket()
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            length = self._fitting(count - start, unit_bytes, multiple, offset)
            if length or not count:
                self._end = offset + length * unit_bytes
                self._num_pieces += 1
                yield Cut(start, length, self._bucket, offset)
                start += length
            if start == count:
                return
            if not length or self._end >= self._bucket_bytes:
                self._begin_bucket()

    def _begin_bucket(self) -> None:
        self._bucket, self._end, self._num_pieces = self._bucket + 1, 0, 0

    def _fitting(self, count: int, unit_bytes: int, multiple: int, offset: int) -> int:
        room = max(0, self._bucket_bytes - offset) // unit_bytes
        if room >= count:
            return count
        if offset == 0 and room < multiple:
            return min(multiple, count)
        return room - room % multiple


def row_layout(shape: Shape, itemsize: int) -> tuple[int, int, int]:
    """Return the layout of a tensor: (number of rows, bytes per row, cut length). The tensor may be cut only at
    multiples of the cut length, which is a number of rows.

    In a stack of matrices, each matrix counts as one row.
    """
    return shape[0], math.prod(shape[1:]) * itemsize, ROW_MULTIPLE if len(shape) == 2 else 1


def slot_bytes(shapes: Iterable[Shape], itemsize: int, bucket_bytes: int) -> int:
    """Return the size in bytes of the largest bucket that tensors of these shapes can need."""
    blocks = [
        min(rows, multiple) * num_bytes for rows, num_bytes, multiple in (row_layout(s, itemsize) for s in shapes)
    ]
    return max(bucket_bytes, *blocks, 0)


@dataclass
class _Filling:
    """The bucket that is being filled: its index, the end of its content in bytes, and its pieces."""

    index: int = 0
    end: int = 0
    pieces: list[Piece] = field(default_factory=list)


class Outbox:
    """Sends tensors through `slots`, in buckets that `transaction` announces. Each tensor is sent in the dtype
    `dtype_of(name)`.

    `begun`: completes when the workers have opened the source of the slots. The first bucket may be filled earlier, but
    is sent only when the source is open.
    """

    def __init__(
        self,
        slots: Slots,
        transaction: Transaction,
        begun: Future[Any],
        dtype_of: Callable[[str], torch.dtype],
        bucket_bytes: int,
    ) -> None:
        self.num_bytes = 0
        self._slots = slots
        self._transaction = transaction
        self._begun = begun
        self._dtype_of = dtype_of
        self._packer = Packer(bucket_bytes)
        self._filling = _Filling()
        self._staged: list[Future[list[Any]] | None] = [None] * len(slots.slots)

    def put_rows(self, name: str, tensor: torch.Tensor) -> None:
        """Send a whole tensor."""
        shape, dtype = tuple(tensor.shape), self._dtype_of(name)
        rows, row_bytes, multiple = row_layout(shape, dtype.itemsize)
        for cut in self._packer.place(rows, row_bytes, multiple):
            num_bytes = cut.length * row_bytes
            place = self._place(cut, num_bytes)
            part = tensor if cut.length == rows else tensor[cut.start : cut.start + cut.length]
            found = self._fill(place, part, dtype)
            self._filling.pieces.append(
                Rows(
                    name=name,
                    shape=shape,
                    start=cut.start,
                    length=cut.length,
                    offset=cut.offset,
                    num_bytes=num_bytes,
                    checksum=found,
                )
            )

    def put_elements(self, name: str, shape: Shape, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Send the changed elements of a tensor. The list of changed elements may be empty."""
        total, dtype = len(indices), self._dtype_of(name)
        for cut in self._packer.place(total, INDEX_DTYPE.itemsize + dtype.itemsize):
            chosen = slice(cut.start, cut.start + cut.length)
            split = cut.length * INDEX_DTYPE.itemsize
            place = self._place(cut, split + cut.length * dtype.itemsize)
            place[:split].view(INDEX_DTYPE).copy_(indices[chosen])
            place[split:].view(dtype).copy_(values[chosen])
            extent: Any = dict(count=cut.length, total=total, offset=cut.offset, num_bytes=len(place))
            found = checksum(place.numpy())
            self._filling.pieces.append(Elements(name=name, shape=shape, checksum=found, **extent))

    def finish(self) -> None:
        """Send the last bucket, and wait until all buckets have arrived."""
        self._begun.result()
        if self._filling.pieces:
            self._send()
        for later in range(1, len(self._staged) + 1):  # the oldest bucket first, since its error came first
            self._free((self._filling.index + later) % len(self._staged))

    def _place(self, cut: Cut, num_bytes: int) -> torch.Tensor:
        if cut.bucket != self._filling.index:
            self._send()
            self._filling = _Filling(cut.bucket)
            self._free(self._slot)
        self._filling.end = cut.offset + num_bytes
        return self._slots.slots[self._slot].narrow(0, cut.offset, num_bytes)

    @property
    def _slot(self) -> int:
        return self._filling.index % len(self._slots.slots)

    def _fill(self, place: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> int | None:
        """Copy rows to `place`. Return the checksum of the piece, if pieces have checksums."""
        if not self._slots.has_word_sums:
            return copy_and_checksum(place, rows, dtype)
        place.view(dtype).view(rows.shape).copy_(rows)
        return None

    def _send(self) -> None:
        self._begun.result()
        slot, filling = self._slot, self._filling
        content = self._slots.slots[slot][: filling.end]
        # `word_sum` synchronizes the device, so the slot is completely filled before it is sent.
        total = word_sum(content) if self._slots.has_word_sums else None
        bucket = Bucket(index=filling.index, num_bytes=filling.end, pieces=tuple(filling.pieces), word_sum=total)
        self._staged[slot] = self._transaction.stage(bucket)
        if filling.end:
            self._slots.send(slot, filling.end)
        self.num_bytes += filling.end

    def _free(self, slot: int) -> None:
        staged, self._staged[slot] = self._staged[slot], None
        if staged is not None:
            staged.result()
            self._slots.wait(slot)


@dataclass
class _Sent:
    """State kept between pushes.

    `copy`: the served weights, with which sparse pushes compare the new weights. `committed`: id of the push that sent
    the weights in `copy`; None if that push was not committed. `checksums`: checksums of the weights that adapters are
    added to. `whole_folder`: the folder of the last push of all weights. Adapters in later folders are added to the
    weights in `whole_folder`.
    """

    copy: ServedCopy | None = None
    committed: str | None = None
    checksums: Checksums = field(default_factory=Checksums)
    whole_folder: Path | None = None


class _Names:
    """Translates trainers' names to workers' names, and keeps the translations for as long as workers name their
    parameters in the same way.
    """

    def __init__(self) -> None:
        self._rules: tuple[object, ...] | None = None
        self._own: Callable[[str], str | None] = str

    def rename(self, wanted: Weights) -> Callable[[str], str | None]:
        """Return a function that returns the workers' name for a trainer's name, or None for a tensor to leave out."""
        rules = wanted.renamed, wanted.respelled, wanted.left_out
        if rules != self._rules:
            self._rules, self._own = rules, cache(partial(own_name, names=wanted))
        return self._own


class WeightSender:
    """Sends weights by `transport`. `folder`: for the transports `disk` and `delta` only. See `WeightPublisher` for the
    other parameters.
    """

    def __init__(
        self,
        transport: Transport,
        settings: PushSettings,
        *,
        folder: Path | None,
        host: str,
        is_sparse: bool,
        full_every: int,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._folder = folder
        self._host = host
        self._is_sparse = is_sparse
        self._chain = FolderChain(folder, full_every) if transport == "delta" and folder is not None else None
        self._buffers: list[torch.Tensor] = []
        self._sent = _Sent()
        self._names = _Names()

    def send(
        self,
        workers: PushTargets,
        replies: Sequence[Weights],
        tensors: TrainerTensors,
        version: int,
        allow_older: bool,
        adapters: TrainerAdapters | None,
        adapter: str | None = None,
    ) -> PushResult:
        """Push the tensors to these workers. If `adapters` is given, push only `adapters.sent`. `adapter`: the name
        under which the workers serve the adapters beside their base weights, or None.

        `replies`: the parameters that each worker wants. `tensors`: iterator over the tensors to push. If `adapters` is
        given, the iterator yields the tensors of `adapters.tensors`. Raise PushError if the push fails.
        """
        gpu = None if self._folder is not None else self._gpu_for_buckets(tensors, workers, replies)
        # Each worker adds adapters to its own weights, so there is no complete set of weights to lend.
        borrowers = _borrowers(replies) if self._may_lend and gpu is None and adapters is None else {}
        are_independent = self._transport not in FAIL_TOGETHER
        transaction = Transaction(
            workers,
            self._settings,
            version,
            allow_older,
            borrowers=borrowers,
            are_independent=are_independent,
            adapter=adapter,
        )
        common = _common(workers, replies)
        rename = self._names.rename(common)
        if adapters is None:
            load = _Load(common, None, tensors.mapping, tensors, rename)
        else:
            if adapters.is_alone:
                _check_quantization(workers, replies)
            told = adapters.describe(common, tensors, self._sent.checksums, rename, common.quantization)
            load = _Load(with_adapters(common, told), told, adapters.sent, tensors, rename)
        if self._chain is not None:
            return self._push_by_chain(self._chain, transaction, load)
        if self._folder is not None:
            return self._push_by_folder(self._folder, transaction, load)
        base = self._sent.committed if adapters is None and common.push_id == self._sent.committed else None
        return self._push_by_slots(transaction, load, gpu, base)

    def send_folder(
        self,
        workers: PushTargets,
        replies: Sequence[Weights],
        path: Path,
        manifest: FolderManifest,
        allow_older: bool,
    ) -> PushResult:
        """Make these workers serve the folder of an earlier push.

        Raise PushError if the push fails, and ConfigError if the folder's dtype differs from the workers' dtype.
        """
        wanted = _common(workers, replies)
        if manifest.dtype != wanted.dtype:
            raise ConfigError(
                f"folder: the folder has weights in {manifest.dtype!r}, but the workers serve {wanted.dtype}; push "
                f"again in {wanted.dtype}",
                field="folder",
                value=manifest.dtype,
            )
        version = manifest.weight_version
        transaction = Transaction(workers, self._settings, version, allow_older, manifest.push_id)
        self._verify_folder(transaction, wanted.dtype, manifest.adapters, path)
        return self._commit_folder(transaction, path)

    def stage_chain(
        self,
        workers: PushTargets,
        replies: Sequence[Weights],
        place: str,
        version: int,
        push_id: str | None,
        allow_older: bool,
    ) -> Transaction:
        """Make these workers read `version` from the chain in `place`. Return the verified transaction.

        `push_id`: id of the push of this version; None for a new id. Raise PushError if a worker cannot read the
        version.
        """
        transaction = Transaction(workers, self._settings, version, allow_older, push_id)
        if replies:
            _verify(transaction, _common(workers, replies).dtype, ChainSource(place=place))
        return transaction

    def close(self) -> None:
        """Free the buffers, and forget the state of earlier pushes."""
        if self._chain is not None:
            self._chain.forget()
        self._buffers, self._sent = [], _Sent(whole_folder=self._sent.whole_folder)

    @property
    def _may_lend(self) -> bool:
        """Return whether workers may share the memory of their weights. For sparse pushes, return False, since writing
        a changed element to shared memory would copy the element's memory page.
        """
        return self._transport == "shared" and not self._is_sparse and not self._settings.in_place

    def _gpu_for_buckets(
        self, tensors: TrainerTensors, workers: PushTargets, replies: Sequence[Weights]
    ) -> torch.device | None:
        """Return the GPU of the tensors if all workers can receive buckets from this GPU's memory. If a worker cannot
        receive buckets from GPU memory, return None; buckets are then sent in host memory.
        """
        gpus = {address: reply.gpu for address, reply in zip(workers.addresses, replies, strict=True)}
        if self._is_sparse or self._transport == "relay" or None in gpus.values():
            return None
        device = tensors.device()
        reaches_all = shares_gpu if self._transport == "shared" else broadcasts_between_gpus
        return device if reaches_all(gpu_of(device), gpus) else None

    def _push_by_slots(
        self, transaction: Transaction, load: _Load, gpu: torch.device | None, base: str | None
    ) -> PushResult:
        wanted, bucket_bytes = load.wanted, BUCKET_BYTES[self._transport] if gpu is None else GPU_BUCKET_BYTES
        if load.adapters is not None and load.adapters.is_alone:
            bucket_bytes = min(bucket_bytes, ADAPTER_BUCKET_BYTES)
        itemsize = max(dtype_named(dtype).itemsize for dtype in (wanted.dtype, *wanted.dtypes.values()))
        largest = slot_bytes(wanted.shapes.values(), itemsize, bucket_bytes)
        self._sent.committed = None
        with closing(self._open_slots(largest, transaction, gpu)) as slots:
            with transaction.phase("begin"):
                slots.open()
                begun = transaction.begin(wanted.dtype, slots.source, base, load.adapters)
                if self._transport == "shared":
                    begun.add_done_callback(lambda _: slots.opened())
                else:  # the workers wait for the trainer, and must not wait for its tensors
                    begun.result()
                    slots.opened()
            with transaction.phase("stage"):
                outbox = Outbox(slots, transaction, begun, dtypes_of(wanted), bucket_bytes)
                load.put_all(outbox.put_rows if load.adapters else self._putter(outbox, wanted, base))
                outbox.finish()
            transaction.verify()
            if gpu is None:
                self._keep_buffers(slots)
        pause = transaction.commit()
        self._sent.committed = transaction.push_id if self._is_sparse and load.adapters is None else None
        return result_of(transaction, outbox.num_bytes, pause, is_sparse=base is not None)

    def _open_slots(self, size: int, transaction: Transaction, gpu: torch.device | None) -> Slots:
        if self._transport == "shared":
            return SharedSlots(size) if gpu is None else CudaIpcSlots(size, gpu)
        if self._transport == "relay":
            return RelaySlots(size, self._host, transaction.num_receivers, self._settings.timeout, transaction.lose)
        buffers, self._buffers = self._buffers, []
        if gpu is not None or not buffers or len(buffers[0]) < size:
            buffers = [torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(MOST_UNDER_WAY)]
        backend, limits = "gloo" if gpu is None else "nccl", (self._settings.timeout, self._settings.begin_timeout)
        return GroupSlots(backend, buffers, self._host, transaction.num_receivers, transaction.push_id, *limits)

    def _keep_buffers(self, slots: Slots) -> None:
        """Keep the buffers of a process group for the next push. No transfer from these buffers may be in flight."""
        if self._transport == "collective":
            self._buffers = slots.slots

    def _putter(self, outbox: Outbox, wanted: Parameters, base: str | None) -> Put:
        """Return the function that sends a tensor. The function sends either the whole tensor or only its changed
        elements.
        """
        if not self._is_sparse:
            return outbox.put_rows
        if self._sent.copy is None or not self._sent.copy.fits(wanted):
            self._sent.copy = ServedCopy(wanted)
        kept = self._sent.copy

        def put_whole(name: str, tensor: torch.Tensor) -> None:
            outbox.put_rows(name, kept.replace(name, tensor))

        def put_changes(name: str, tensor: torch.Tensor) -> None:
            changes = kept.update(name, tensor)
            if changes is None:
                outbox.put_rows(name, kept.tensor(name))
            else:
                outbox.put_elements(name, tuple(tensor.shape), *changes)

        return put_whole if base is None else put_changes

    def _push_by_folder(self, parent: Path, transaction: Transaction, load: _Load) -> PushResult:
        wanted, adapters = load.wanted, load.adapters
        with transaction.phase("stage"):
            shapes = spellings_of(wanted).all_shapes()
            version, dtypes = transaction.version, own_dtypes(wanted)
            writer = FolderWriter(parent, transaction.push_id, version, wanted.dtype, shapes, dtypes, adapters)
            with closing(writer):
                load.put_all(partial(_write, writer, dtypes_of(wanted)))
                folder = writer.finish()
        try:
            self._verify_folder(transaction, wanted.dtype, adapters, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
        result = self._commit_folder(transaction, folder)
        if adapters is None or not adapters.is_alone:
            self._sent.whole_folder = folder
        remove_others(folder, self._sent.whole_folder)
        return result

    def _verify_folder(self, transaction: Transaction, dtype: str, adapters: Adapters | None, folder: Path) -> None:
        _verify(transaction, dtype, DiskSource(folder=str(folder)), adapters)

    def _push_by_chain(self, chain: FolderChain, transaction: Transaction, load: _Load) -> PushResult:
        with transaction.phase("stage"):
            link = chain.write(transaction.push_id, transaction.version, load.wanted, load.put_all)
        try:
            _verify(transaction, load.wanted.dtype, ChainSource(place=str(chain.parent)))
        except BaseException:
            chain.take_back(link)
            raise
        num_bytes, pause = folder_bytes(link.path), transaction.commit()
        chain.commit(link)
        return result_of(transaction, num_bytes, pause, is_sparse=not link.is_full)

    def _commit_folder(self, transaction: Transaction, folder: Path) -> PushResult:
        pause = transaction.commit()
        return result_of(transaction, (folder / MODEL_FILE).stat().st_size, pause, is_sparse=False)


def _verify(transaction: Transaction, dtype: str, source: Source, adapters: Adapters | None = None) -> None:
    """Make the workers read a source that has no buckets."""
    with transaction.phase("begin"):
        transaction.begin(dtype, lambda _: source, adapters=adapters).result()
    transaction.verify()


@dataclass
class _Load:
    """The content of a push, and the check that the content is complete.

    `wanted`: the parameters that the workers want. `adapters`: description of the push's adapters. `mapping`: the
    tensors by name, if they are known in advance. `tensors`: iterator over the tensors. `rename`: returns the workers'
    name for a trainer's name, or None for a tensor to leave out.
    """

    wanted: Parameters
    adapters: Adapters | None
    mapping: Mapping[str, torch.Tensor] | None
    tensors: TrainerTensors
    rename: Callable[[str], str | None]

    def __post_init__(self) -> None:
        self._checklist = Checklist(self.wanted, None if self.mapping is None else dict(self._renamed(self.mapping)))

    def _renamed(self, mapping: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in mapping.items():
            check_is_tensor(name, tensor)
            if (own := self.rename(name)) is not None:
                yield own, tensor

    def put_all(self, put: Put) -> None:
        for name, tensor in self.tensors:
            if (own := self.rename(name)) is not None and self._checklist.take(own, tensor):
                put(own, tensor)
            del tensor  # frees the memory before the next tensor is gathered
        self._checklist.finish()


def _write(writer: FolderWriter, dtype_of: Callable[[str], torch.dtype], name: str, tensor: torch.Tensor) -> None:
    for _, chunk in host_chunks(tensor, dtype_of(name)):
        writer.append(name, raw_bytes(chunk))


def result_of(transaction: Transaction, num_bytes: int, pause_seconds: float, is_sparse: bool) -> PushResult:
    return PushResult(
        version=transaction.version,
        push_id=transaction.push_id,
        num_bytes=num_bytes,
        total_seconds=transaction.total_seconds,
        seconds=transaction.seconds,
        pause_seconds=pause_seconds,
        is_sparse=is_sparse,
        left_out=transaction.left_out,
    )


def _borrowers(replies: Sequence[Weights]) -> dict[int, int]:
    """Map each borrower's position to its lender's position. The lender is the first worker with the same `kin`."""
    first: dict[str | None, int] = {}
    lenders = [first.setdefault(reply.kin, position) for position, reply in enumerate(replies)]
    found = enumerate(zip(lenders, replies, strict=True))
    return {position: lender for position, (lender, reply) in found if reply.kin is not None and lender != position}


def _check_quantization(workers: PushTargets, replies: Sequence[Weights]) -> None:
    """Raise PushError if the workers quantize differently. Adapters would then be added to different base weights."""
    (first, *others) = replies
    for address, other in zip(workers.addresses[1:], others, strict=True):
        if other.quantization != first.quantization:
            raise PushError(
                f"adapters: worker {address} stores weights in {other.quantization}, but {workers.addresses[0]} in "
                f"{first.quantization}, so their base weights differ; use a separate publisher for each kind of worker"
            )


def _common(workers: PushTargets, replies: Sequence[Weights]) -> Weights:
    """Return the parameters that all workers want. If the workers serve different pushes, the result's `push_id` is
    None.

    Raise PushError if the workers want different parameters.
    """
    addresses, (first, *others) = workers.addresses, replies
    fields = "dtype", "dtypes", "shapes", "parts", "tied"
    for address, other in zip(addresses[1:], others, strict=True):
        if any(getattr(other, field) != getattr(first, field) for field in fields):
            raise PushError(
                f"worker {address} expects other parameters than {addresses[0]} (dtypes {other.dtype} and "
                f"{first.dtype}, or different shapes); use a separate publisher for each kind of worker"
            )
    is_common = all(other.push_id == first.push_id for other in others)
    return first if is_common else first.model_copy(update={"push_id": None})
