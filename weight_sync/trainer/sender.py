"""The weights of a push on their way: buckets or a folder, filled and announced, until all workers have committed them.

Owns: the buffers, the copy of the served weights that sparse pushes need, and the checksums that pushes of adapters
need. Does not own the workers, nor the trainer's tensors, of which it keeps none. In memory it holds one gathered
tensor and two buckets, and with `sparse` that copy, in the workers' dtypes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from trueroll.errors import ConfigError, PushError

from ..payload.adapters import with_adapters
from ..payload.manifest import MODEL_FILE, MOST_UNDER_WAY, Adapters, DiskSource, FolderManifest
from ..payload.messages import Weights
from ..payload.packing import slot_bytes
from ..payload.parameters import Parameters, own_dtypes, spellings_of
from ..payload.tensors import dtype_named, dtypes_of, host_chunks, raw_bytes
from ..transports.collective import GroupSlots
from ..transports.cuda_ipc import CudaIpcSlots
from ..transports.disk import FolderWriter, remove_others
from ..transports.ends import Slots
from ..transports.gpu import broadcasts_between_gpus, gpu_of, shares_gpu
from ..transports.shared import SharedSlots
from .adapters import Checksums, TrainerAdapters
from .checklist import Checklist
from .outbox import Outbox
from .outcome import PushResult
from .served_copy import ServedCopy
from .targets import PushTargets
from .trainer_tensors import TrainerTensors
from .transaction import PushSettings, Transaction

Transport: TypeAlias = Literal["shared", "collective", "disk"]
Put: TypeAlias = Callable[[str, torch.Tensor], None]
BUCKET_BYTES = {"shared": 4 * 2**20, "collective": 16 * 2**20}
"""What was fastest: new shared memory costs more than short messages, a broadcast less the longer it is."""
GPU_BUCKET_BYTES = 64 * 2**20
"""For buckets in the memory of a GPU. Two are there at a time, and each costs a round of messages."""
ADAPTER_BUCKET_BYTES = 2**20
"""For adapters alone, which are so little that two larger ones would not be under way at the same time."""


@dataclass
class _Sent:
    """What is known of weights that were sent. `copy`: what sparse pushes send changes of, and `committed`, the push
    that it is of. `checksums`: of the weights that adapters are added to. `whole_folder`: what holds the weights that
    adapters were written for last.
    """

    copy: ServedCopy | None = None
    committed: str | None = None
    checksums: Checksums = field(default_factory=Checksums)
    whole_folder: Path | None = None


class WeightSender:
    """Sends weights by `transport`; for the rest see `WeightPublisher`. `folder`: for `disk`, and only for that."""

    def __init__(
        self, transport: Transport, settings: PushSettings, *, folder: Path | None, host: str, is_sparse: bool
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._folder = folder
        self._host = host
        self._is_sparse = is_sparse
        self._buffers: list[torch.Tensor] = []
        self._sent = _Sent()

    def send(
        self,
        workers: PushTargets,
        replies: Sequence[Weights],
        tensors: TrainerTensors,
        version: int,
        allow_older: bool,
        adapters: TrainerAdapters | None,
    ) -> PushResult:
        """Make these workers, which want what they have replied, serve the tensors, or those of `adapters`, which
        `tensors` goes through. Raise PushError.
        """
        gpu = None if self._transport == "disk" else self._gpu_for_buckets(tensors, workers, replies)
        # Adapters are added by each worker to what it has, so that there is nothing whole to lend.
        borrowers = _borrowers(replies) if self._may_lend and gpu is None and adapters is None else {}
        transaction = Transaction(workers, self._settings, version, allow_older, borrowers=borrowers)
        common = _common(workers, replies)
        if adapters is None:
            load = _Load(common, None, tensors.mapping, tensors)
        else:
            told = adapters.describe(common, tensors, self._sent.checksums)
            load = _Load(with_adapters(common, told), told, adapters.sent, tensors)
        if self._transport == "disk":
            return self._push_by_folder(transaction, load)
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
        """Make these workers serve what an earlier push wrote. Raise PushError; ConfigError for another dtype."""
        wanted = _common(workers, replies)
        if manifest.dtype != wanted.dtype:
            raise ConfigError(
                f"folder: expected weights in {wanted.dtype}, as the workers serve, found {manifest.dtype!r}; "
                "correct it",
                field="folder",
                value=manifest.dtype,
            )
        version = manifest.weight_version
        transaction = Transaction(workers, self._settings, version, allow_older, manifest.push_id)
        self._verify_folder(transaction, wanted.dtype, manifest.adapters, path)
        return self._commit_folder(transaction, path)

    def close(self) -> None:
        """Free what is held."""
        self._buffers, self._sent = [], _Sent(whole_folder=self._sent.whole_folder)

    @property
    def _may_lend(self) -> bool:
        """Whether workers may share memory. Not where a later push changes elements of it: each would copy its page."""
        return self._transport == "shared" and not self._is_sparse and not self._settings.in_place

    def _gpu_for_buckets(
        self, tensors: TrainerTensors, workers: PushTargets, replies: Sequence[Weights]
    ) -> torch.device | None:
        """The tensors' GPU, if buckets in its memory can reach all workers on theirs. None: host memory it is."""
        gpus = {address: reply.gpu for address, reply in zip(workers.addresses, replies, strict=True)}
        if self._is_sparse or None in gpus.values():
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
                transaction.begin(wanted.dtype, slots.source, base, load.adapters).result()
                slots.opened()
            with transaction.phase("stage"):
                outbox = Outbox(slots, transaction, dtypes_of(wanted), bucket_bytes)
                load.put_all(outbox.put_rows if load.adapters else self._putter(outbox, wanted, base))
                outbox.finish()
            transaction.verify()
            if gpu is None:
                self._keep_buffers(slots)
        pause = transaction.commit()
        self._sent.committed = transaction.push_id if self._is_sparse and load.adapters is None else None
        return _result(transaction, outbox.num_bytes, pause, is_sparse=base is not None)

    def _open_slots(self, size: int, transaction: Transaction, gpu: torch.device | None) -> Slots:
        if self._transport == "shared":
            return SharedSlots(size) if gpu is None else CudaIpcSlots(size, gpu)
        buffers, self._buffers = self._buffers, []
        if gpu is not None or not buffers or len(buffers[0]) < size:
            buffers = [torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(MOST_UNDER_WAY)]
        backend, limits = "gloo" if gpu is None else "nccl", (self._settings.timeout, self._settings.begin_timeout)
        return GroupSlots(backend, buffers, self._host, transaction.num_receivers, transaction.push_id, *limits)

    def _keep_buffers(self, slots: Slots) -> None:
        """Once nothing is under way from them any more."""
        if self._transport == "collective":
            self._buffers = slots.slots

    def _putter(self, outbox: Outbox, wanted: Parameters, base: str | None) -> Put:
        """How each tensor is sent: whole, or what changed of it."""
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

    def _push_by_folder(self, transaction: Transaction, load: _Load) -> PushResult:
        assert self._folder is not None
        wanted, adapters = load.wanted, load.adapters
        with transaction.phase("stage"):
            shapes = spellings_of(wanted).all_shapes()
            writer = FolderWriter(
                *(self._folder, transaction.push_id, transaction.version, wanted.dtype, shapes),
                *(own_dtypes(wanted), adapters),
            )
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
        with transaction.phase("begin"):
            transaction.begin(dtype, lambda _: DiskSource(folder=str(folder)), adapters=adapters).result()
        transaction.verify()

    def _commit_folder(self, transaction: Transaction, folder: Path) -> PushResult:
        pause = transaction.commit()
        return _result(transaction, (folder / MODEL_FILE).stat().st_size, pause, is_sparse=False)


@dataclass
class _Load:
    """What a push brings: `tensors`, which `wanted` asks for, `mapping` if they are known in advance; and what is told
    of adapters among them.
    """

    wanted: Parameters
    adapters: Adapters | None
    mapping: Mapping[str, torch.Tensor] | None
    tensors: TrainerTensors

    def __post_init__(self) -> None:
        self._checklist = Checklist(self.wanted, self.mapping)

    def put_all(self, put: Put) -> None:
        for name, tensor in self.tensors:
            if self._checklist.take(name, tensor):
                put(name, tensor)
            del tensor  # before the next one is made
        self._checklist.finish()


def _write(writer: FolderWriter, dtype_of: Callable[[str], torch.dtype], name: str, tensor: torch.Tensor) -> None:
    for _, chunk in host_chunks(tensor, dtype_of(name)):
        writer.append(name, raw_bytes(chunk))


def _result(transaction: Transaction, num_bytes: int, pause_seconds: float, is_sparse: bool) -> PushResult:
    return PushResult(
        version=transaction.version,
        push_id=transaction.push_id,
        num_bytes=num_bytes,
        total_seconds=transaction.total_seconds,
        seconds=transaction.seconds,
        pause_seconds=pause_seconds,
        is_sparse=is_sparse,
    )


def _borrowers(replies: Sequence[Weights]) -> dict[int, int]:
    """Who maps the memory of whom: the workers of a kin that of the first of them."""
    first: dict[str | None, int] = {}
    lenders = [first.setdefault(reply.kin, position) for position, reply in enumerate(replies)]
    found = enumerate(zip(lenders, replies, strict=True))
    return {position: lender for position, (lender, reply) in found if reply.kin is not None and lender != position}


def _common(workers: PushTargets, replies: Sequence[Weights]) -> Weights:
    """What all of them want; `push_id` is what all serve, None if they differ. Raise PushError if they want different
    things.
    """
    addresses, (first, *others) = workers.addresses, replies
    fields = "dtype", "dtypes", "shapes", "parts", "tied"
    for address, other in zip(addresses[1:], others, strict=True):
        if any(getattr(other, field) != getattr(first, field) for field in fields):
            raise PushError(
                f"worker {address}: expected the same parameters as at {addresses[0]}, found others (dtype "
                f"{other.dtype} against {first.dtype}, or other shapes); use a publisher for each kind"
            )
    is_common = all(other.push_id == first.push_id for other in others)
    return first if is_common else first.model_copy(update={"push_id": None})
