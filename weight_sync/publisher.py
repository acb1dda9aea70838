"""The trainer's side: `WeightPublisher` pushes weights to workers, none of which commits them before all have verified.

Owns: the connections to the workers, the buffers, the base that sparse pushes need. Does not own the trainer's tensors,
and keeps none of them. Promises: `push` returns when every worker that was not left out serves the new weights, or
raises an error that says which worker failed and what each of the others serves: all of them the old weights, unless
one failed at its commit;
every wait for a worker has a deadline, but not what CUDA itself waits for behind a broadcast of NCCL's; after a failure
the next push needs nothing restarted here; a worker that does not answer when a push begins costs it `ANSWER_SECONDS`,
and the next ones `LOST_SECONDS` each. In memory it holds one gathered tensor and two buckets, and with `sparse` a copy
of the weights in the workers' dtype.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

from ..rollout import protocol
from ..rollout.errors import ConfigError, DeadlineError, IllegalStateError, PushError, TruerollError, WorkerLostError
from .base import Base
from .checklist import Checklist
from .collective import GroupSlots
from .cuda_ipc import CudaIpcSlots
from .disk import FolderWriter, read_manifest, remove_others
from .gpu import broadcasts_between_gpus, gpu_of, shares_gpu
from .manifest import MODEL_FILE, MOST_UNDER_WAY, DiskSource
from .outbox import Outbox, Slots
from .packing import slot_bytes
from .shared import SharedSlots
from .tensors import dtype_named, host_chunks, raw_bytes
from .trainer import WORD_BYTES, Tensors, TrainerTensors
from .transaction import PushSettings, Transaction
from .workers import Key, Workers

Transport: TypeAlias = Literal["shared", "collective", "disk"]
OnLost: TypeAlias = Literal["raise", "skip"]
Put: TypeAlias = Callable[[str, torch.Tensor], None]
BUCKET_BYTES = {"shared": 4 * 2**20, "collective": 16 * 2**20}
"""What was fastest: new shared memory costs more than short messages, a broadcast less the longer it is."""
GPU_BUCKET_BYTES = 64 * 2**20
"""For buckets in the memory of a GPU. Two are there at a time, and each costs a round of messages."""
DEFAULT_HOST = "127.0.0.1"
MOST_TOLD = 40
_LOST = (DeadlineError, WorkerLostError, IllegalStateError)
"""What a greeting of a worker ends with that does not answer, loads its model or has failed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushResult:
    """What a push took. `num_bytes`: sent to each worker. `seconds`: by phase. `pause_seconds`: the longest that a
    worker's engine made no step because of the commit. `is_sparse`: only what changed was sent. `left_out`: the
    addresses of workers that were lost, and that it went on without; ranks of the trainer other than 0 are told of
    `MOST_TOLD` at most.
    """

    version: int
    push_id: str
    num_bytes: int
    total_seconds: float
    seconds: dict[str, float]
    pause_seconds: float
    is_sparse: bool
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Party:
    """The workers of a push, what each of them wants, and the addresses of those that are left out."""

    workers: Workers
    replies: list[protocol.Weights]
    left_out: list[str]

    def where(self, holds: Callable[[str, protocol.Weights], bool]) -> _Party:
        """The part of it for which that holds."""
        told = enumerate(zip(self.workers.addresses, self.replies, strict=True))
        chosen = [position for position, (address, reply) in told if holds(address, reply)]
        return _Party(self.workers.at(chosen), [self.replies[position] for position in chosen], self.left_out)


class WeightPublisher:
    """Pushes weights by `transport`: `shared` memory of one machine, a `collective` process group over the network, or
    safetensors on `disk`. Any thread may call it, one call at a time; during a push nothing may change the tensors or,
    where they are sharded, use their process group.

    Where tensors and workers are on GPUs, weights stay in their memory: with `shared` if all are on the same GPU (CUDA
    IPC), with `collective` if each is on another one (NCCL; two on one GPU are refused). Otherwise, and with `sparse`,
    they go through host memory, and `collective` uses gloo.

    `timeout`: seconds that each wait may take; for `disk` that includes a worker's reading of the folder. `folder`: for
    `disk`, where a folder for each push is written; older ones are removed. `host`: for `collective`, the address of
    this machine that workers can reach, by default 127.0.0.1; what travels there is neither encrypted nor
    authenticated. `sparse`: send only the elements that changed since the last push, where the workers still serve
    that; this keeps a copy of the weights in the trainer. `in_flight`: what becomes of a worker's running requests:
    they go on under the new weights (`recompute`), finish first, within `drain_timeout` seconds (`drain`), or end with
    what they have (`abort`). `in_place`: write into the live weights, for workers without memory for a second set; a
    push that fails then leaves a worker generating nothing until one succeeds. `reject_nonfinite`: refuse NaN and
    infinities. `on_lost`: with a worker that does not answer when a push begins, or still loads its model, the push is
    an error (`raise`), or goes on to the others (`skip`) and to that one again once it is back. `server_public_key`,
    `client_key`: see `RolloutClient`; the client's role must be control.
    """

    def __init__(
        self,
        transport: Transport = "shared",
        *,
        timeout: float = 60.0,
        folder: str | Path | None = None,
        host: str | None = None,
        sparse: bool = False,
        in_flight: protocol.InFlight = "recompute",
        in_place: bool = False,
        reject_nonfinite: bool = True,
        on_lost: OnLost = "raise",
        drain_timeout: float = 600.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
    ) -> None:
        _check(transport in get_args(Transport), "transport", f"one of {', '.join(get_args(Transport))}", transport)
        _check(
            in_flight in get_args(protocol.InFlight),
            "in_flight",
            f"one of {', '.join(get_args(protocol.InFlight))}",
            in_flight,
        )
        _check(on_lost in get_args(OnLost), "on_lost", f"one of {', '.join(get_args(OnLost))}", on_lost)
        _check(0.0 < timeout <= 86400.0, "timeout", "seconds from 0 to 86400", timeout)
        _check(0.0 < drain_timeout <= 86400.0, "drain_timeout", "seconds from 0 to 86400", drain_timeout)
        _check((folder is None) == (transport != "disk"), "folder", "one for disk, none otherwise", folder)
        _check(host is None or transport == "collective", "host", f"none for {transport}", host)
        _check(not (sparse and transport == "disk"), "sparse", "False for disk, which holds whole weights", sparse)
        _check(not (sparse and in_place), "sparse", "False with in_place, which needs every tensor whole", sparse)
        self._transport = transport
        self._settings = PushSettings(timeout, in_flight, in_place, reject_nonfinite, drain_timeout)
        self._on_lost = on_lost
        self._folder = None if folder is None else Path(folder)
        self._host = host or DEFAULT_HOST
        self._is_sparse = sparse
        self._keys = server_public_key, client_key
        self._workers: Workers | None = None
        self._buffers: list[torch.Tensor] = []
        self._base: Base | None = None
        self._committed: str | None = None
        """The push that the base is of."""
        self._latest: dict[str, str] = {}
        """By address, the push that was committed there last."""
        self._terms: tuple[int, bool] | None = None
        """Version and `allow_older` of the last push."""
        self._instances: dict[str, str] = {}
        """By address, the process that was there when a push began last."""

    def connect(self, addresses: Sequence[str]) -> None:
        """Push to these workers from now on, and to no others. Sends nothing yet."""
        workers = Workers(addresses, self._settings.timeout, self._keys)
        self._disconnect()
        self._workers = workers

    def push(self, tensors: Tensors, version: int, *, allow_older: bool = False) -> PushResult:
        """Make every worker serve these weights, as version `version`.

        It must be later than the version that each serves, 0 at first and after a restart, unless `allow_older`: then
        samples of two different weights may carry the same version.

        `tensors`: a module, or Hugging Face names with tensors as a mapping or an iterable of pairs, of any dtype and
        on any device. Where they are sharded (DTensor), every rank of the trainer calls this with the same names in the
        same order: rank 0 gathers and pushes, the others return when it is done, or raise what it raises. Raise
        PushError if not all workers have committed; the next push then sends every tensor whole.
        """
        _check(type(version) is int and 0 <= version < 2**63, "version", "an integer from 0 on", version)
        result = self._on_all_ranks(tensors, partial(self._push, version=version, allow_older=allow_older))
        assert result is not None
        return result

    def stale_workers(self) -> list[str]:
        """The addresses of workers that do not serve what this publisher committed there last, or do not answer."""
        workers = self._connected()
        replies = zip(workers.addresses, workers.greet(self._settings.timeout), strict=True)
        return [address for address, reply in replies if self._is_stale(address, reply)]

    def restore(self, tensors: Tensors) -> PushResult | None:
        """Push the weights of the last push again, under its version, to the workers that do not serve them.

        The other workers notice nothing. One that does not answer is an error or left out, as in a push (`on_lost`).
        `tensors`: as for `push`; that they are those of the last push is not checked.
        None if no worker needs them. Raise ConfigError for `disk`, where `push_folder` does this, and before the first
        push; PushError as `push` does.
        """
        _check(self._transport != "disk", "restore", "a transport that keeps no folder; call push_folder", "disk")
        return self._on_all_ranks(tensors, self._restore)

    def push_folder(self, folder: str | Path, *, allow_older: bool = False) -> PushResult | None:
        """Push what an earlier push by `disk` wrote to the workers that do not serve it: thus one that was started anew
        gets the weights that it had.

        The other workers notice nothing. None if all serve it. `allow_older`, and what is raised: as for `push`.
        """
        path = Path(folder).absolute()
        manifest = read_manifest(path)
        party = self._meet()
        in_need = party.where(lambda _, reply: reply.push_id != manifest.push_id)
        result = None
        if in_need.replies:
            wanted = _common(in_need)
            expected = f"weights in {wanted.dtype}, as the workers serve"
            _check(manifest.dtype == wanted.dtype, "folder", expected, manifest.dtype)
            version = manifest.weight_version
            transaction = Transaction(in_need.workers, self._settings, version, allow_older, manifest.push_id)
            self._verify_folder(transaction, wanted, path)
            result = replace(self._commit_folder(transaction, path), left_out=party.left_out)
        self._latest = dict.fromkeys(party.workers.addresses, manifest.push_id)
        self._terms = manifest.weight_version, allow_older
        return result

    def close(self) -> None:
        """Disconnect, and free what is held. The workers go on."""
        self._disconnect()
        self._buffers, self._base, self._committed = [], None, None

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _on_all_ranks(self, tensors: Tensors, push: Callable[[TrainerTensors], PushResult | None]) -> PushResult | None:
        with torch.no_grad():
            from_trainer = TrainerTensors(tensors)
            if from_trainer.are_pushed_by_another_rank(self._workers is not None):
                return _follow(from_trainer)
            return _lead(from_trainer, push)

    def _push(self, tensors: TrainerTensors, version: int, allow_older: bool) -> PushResult:
        party = self._meet()
        result = self._push_to(party, tensors, version, allow_older)
        self._latest = dict.fromkeys(party.workers.addresses, result.push_id)
        self._terms = version, allow_older
        return result

    def _restore(self, tensors: TrainerTensors) -> PushResult | None:
        if self._terms is None:
            raise ConfigError("restore: expected a push before, whose version it takes, found none; call push")
        stale = self._meet().where(self._is_stale)
        if not stale.replies:
            return None
        result = self._push_to(stale, tensors, *self._terms)
        self._latest |= dict.fromkeys(stale.workers.addresses, result.push_id)
        return result

    def _is_stale(self, address: str, reply: protocol.Weights | TruerollError) -> bool:
        found = reply.push_id if isinstance(reply, protocol.Weights) else None
        return found is None or found != self._latest.get(address)

    def _meet(self) -> _Party:
        """Everybody who answers. Raise PushError if somebody does not, and is not to be left out."""
        workers = self._connected()
        replies = workers.greet(self._settings.timeout)
        errors = {i: reply for i, reply in enumerate(replies) if isinstance(reply, TruerollError)}
        are_lost = all(isinstance(error, _LOST) for error in errors.values())
        if errors and not (self._on_lost == "skip" and are_lost and len(errors) < len(replies)):
            failed = "; ".join(f"worker {workers.addresses[i]} failed: {error}" for i, error in errors.items())
            advice = "; start it anew, connect to others, or have it left out with on_lost='skip'" if are_lost else ""
            raise PushError(f"push: at the beginning, {failed}. Nothing was sent to any worker{advice}")
        for i, error in errors.items():
            log.warning(
                "worker %s is left out of the push, and taken in once it is back: %s", workers.addresses[i], error
            )
        told = {i: reply for i, reply in enumerate(replies) if isinstance(reply, protocol.Weights)}
        party = _Party(workers.at(told), list(told.values()), [workers.addresses[i] for i in errors])
        self._note_instances(party)
        return party

    def _note_instances(self, party: _Party) -> None:
        """Warn of workers that were started anew."""
        for address, reply in zip(party.workers.addresses, party.replies, strict=True):
            if self._instances.get(address, reply.instance) != reply.instance:
                log.warning(
                    "worker %s was started anew since the last push, and has served version %d since",
                    address,
                    reply.weight_version,
                )
            self._instances[address] = reply.instance

    def _push_to(self, party: _Party, tensors: TrainerTensors, version: int, allow_older: bool) -> PushResult:
        transaction = Transaction(party.workers, self._settings, version, allow_older)
        wanted = _common(party)
        checklist = Checklist(wanted, tensors.mapping)
        if self._transport == "disk":
            result = self._push_by_folder(transaction, wanted, checklist, tensors)
        else:
            result = self._push_by_slots(transaction, wanted, checklist, tensors, self._gpu_for_buckets(tensors, party))
        return replace(result, left_out=party.left_out)

    def _connected(self) -> Workers:
        if self._workers is None or not self._workers.addresses:
            raise ConfigError("workers: expected some, found none; call connect with their addresses first")
        return self._workers

    def _gpu_for_buckets(self, tensors: TrainerTensors, party: _Party) -> torch.device | None:
        """The tensors' GPU, if buckets in its memory can reach all workers on theirs. None: host memory it is."""
        gpus = {address: reply.gpu for address, reply in zip(party.workers.addresses, party.replies, strict=True)}
        if self._is_sparse or None in gpus.values():
            return None
        device = tensors.device()
        reaches_all = shares_gpu if self._transport == "shared" else broadcasts_between_gpus
        return device if reaches_all(gpu_of(device), gpus) else None

    def _push_by_slots(
        self,
        transaction: Transaction,
        wanted: protocol.Weights,
        checklist: Checklist,
        tensors: TrainerTensors,
        gpu: torch.device | None,
    ) -> PushResult:
        bucket_bytes = BUCKET_BYTES[self._transport] if gpu is None else GPU_BUCKET_BYTES
        largest = slot_bytes(wanted.shapes.values(), dtype_named(wanted.dtype).itemsize, bucket_bytes)
        base = self._committed if wanted.push_id == self._committed else None
        self._committed = None
        with closing(self._open_slots(largest, transaction, gpu)) as slots:
            with transaction.phase("begin"):
                slots.open()
                transaction.begin(wanted.dtype, slots.source, base).result()
                slots.opened()
            with transaction.phase("stage"):
                outbox = Outbox(slots, transaction, dtype_named(wanted.dtype), bucket_bytes)
                _take_all(tensors, checklist, self._putter(outbox, wanted, base))
                outbox.finish()
            transaction.verify()
            if gpu is None:
                self._keep_buffers(slots)
        pause = transaction.commit()
        self._committed = transaction.push_id if self._is_sparse else None
        return _result(transaction, outbox.num_bytes, pause, is_sparse=base is not None)

    def _open_slots(self, size: int, transaction: Transaction, gpu: torch.device | None) -> Slots:
        if self._transport == "shared":
            return SharedSlots(size) if gpu is None else CudaIpcSlots(size, gpu)
        buffers, self._buffers = self._buffers, []
        if gpu is not None or not buffers or len(buffers[0]) < size:
            buffers = [torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(MOST_UNDER_WAY)]
        backend, limits = "gloo" if gpu is None else "nccl", (self._settings.timeout, self._settings.begin_timeout)
        return GroupSlots(backend, buffers, self._host, transaction.num_workers, transaction.push_id, *limits)

    def _keep_buffers(self, slots: Slots) -> None:
        """Once nothing is under way from them any more."""
        if self._transport == "collective":
            self._buffers = slots.slots

    def _putter(self, outbox: Outbox, wanted: protocol.Weights, base: str | None) -> Put:
        """How each tensor is sent: whole, or what changed of it."""
        if not self._is_sparse:
            return outbox.put_rows
        dtype = dtype_named(wanted.dtype)
        if self._base is None or not self._base.fits(wanted.shapes, dtype):
            self._base = Base(wanted.shapes, dtype)
        kept = self._base

        def put_whole(name: str, tensor: torch.Tensor) -> None:
            outbox.put_rows(name, kept.replace(name, tensor))

        def put_changes(name: str, tensor: torch.Tensor) -> None:
            changes = kept.update(name, tensor)
            if changes is None:
                outbox.put_rows(name, kept.tensors[name])
            else:
                outbox.put_elements(name, wanted.shapes[name], *changes)

        return put_whole if base is None else put_changes

    def _push_by_folder(
        self, transaction: Transaction, wanted: protocol.Weights, checklist: Checklist, tensors: TrainerTensors
    ) -> PushResult:
        assert self._folder is not None
        with transaction.phase("stage"):
            writer = FolderWriter(self._folder, transaction.push_id, transaction.version, wanted.dtype, wanted.shapes)
            with closing(writer):
                _take_all(tensors, checklist, partial(_write, writer, dtype_named(wanted.dtype)))
                folder = writer.finish()
        try:
            self._verify_folder(transaction, wanted, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
        result = self._commit_folder(transaction, folder)
        remove_others(folder)
        return result

    def _verify_folder(self, transaction: Transaction, wanted: protocol.Weights, folder: Path) -> None:
        with transaction.phase("begin"):
            transaction.begin(wanted.dtype, lambda _: DiskSource(folder=str(folder))).result()
        transaction.verify()

    def _commit_folder(self, transaction: Transaction, folder: Path) -> PushResult:
        pause = transaction.commit()
        return _result(transaction, (folder / MODEL_FILE).stat().st_size, pause, is_sparse=False)


def _take_all(tensors: TrainerTensors, checklist: Checklist, put: Put) -> None:
    for name, tensor in tensors:
        if checklist.take(name, tensor):
            put(name, tensor)
        del tensor  # before the next one is made
    checklist.finish()


def _write(writer: FolderWriter, dtype: torch.dtype, name: str, tensor: torch.Tensor) -> None:
    for _, chunk in host_chunks(tensor, dtype):
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


def _common(party: _Party) -> protocol.Weights:
    """What all of them want; `push_id` is what all serve, None if they differ. Raise PushError if they want different
    things.
    """
    addresses, (first, *others) = party.workers.addresses, party.replies
    for address, other in zip(addresses[1:], others, strict=True):
        if (other.dtype, other.shapes, other.tied) != (first.dtype, first.shapes, first.tied):
            raise PushError(
                f"worker {address}: expected the same parameters as at {addresses[0]}, found others (dtype "
                f"{other.dtype} against {first.dtype}, or other shapes); use a publisher for each kind"
            )
    is_common = all(other.push_id == first.push_id for other in others)
    return first if is_common else first.model_copy(update={"push_id": None})


def _lead(tensors: TrainerTensors, push: Callable[[TrainerTensors], PushResult | None]) -> PushResult | None:
    """Push, take part in the gathers that are left, and tell the other ranks how it ended."""
    try:
        result = push(tensors)
    except Exception as error:
        tensors.gather_rest()
        if tensors.were_gathered and not tensors.is_broken:
            tensors.tell(_failure_word(error))
        raise
    if result is None:
        tensors.gather_rest()
    if tensors.were_gathered:
        tensors.tell(_result_word(result))
    return result


def _follow(tensors: TrainerTensors) -> PushResult | None:
    """Take part in the gathers, and learn from rank 0 how the push ended."""
    tensors.gather_rest()
    if not tensors.were_gathered:
        raise ConfigError("push: expected workers, or sharded tensors, on a rank other than 0; push from rank 0 alone")
    word = json.loads(tensors.hear())
    if "error" in word:
        raise PushError(f"on rank 0 of the trainer: {word['error']}")
    return word["result"] and PushResult(**word["result"])


def _result_word(result: PushResult | None) -> bytes:
    fields = result and asdict(result) | {"left_out": result.left_out[:MOST_TOLD]}
    return json.dumps({"result": fields}, ensure_ascii=False).encode()


def _failure_word(error: Exception) -> bytes:
    text = str(error) if isinstance(error, TruerollError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[: WORD_BYTES // 4 - 16]}, ensure_ascii=False).encode()[:WORD_BYTES]


def _check(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"{name}: expected {expected}, found {found!r}; correct it")
