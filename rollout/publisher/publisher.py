"""The trainer's side: `WeightPublisher` pushes weights to workers. No worker commits weights before all workers have
verified the weights.

- `WorkerClients` owns the clients, one for each worker. All clients share one event loop on a separate thread. Every
  push begins with a greeting to each worker. The class remembers which workers did not reply to the last greeting. A
  call to a worker ends within its timeout, or as soon as the worker has left its fleet. As soon as any worker fails,
  `ask` fails with an error that names the worker. `greet` and `ask_all` wait for all workers.
- `WeightPublisher` owns the list of workers, and the push that each worker was last known to serve.

Does not own: how weights are transferred (`WeightSender`), or the trainer's tensors.

Guarantees:

- `push` returns when the new weights are served by every worker that is not listed in `PushResult.left_out`. If a
  worker fails, `push` raises an error that says which worker failed and which weights each worker serves. After the
  error, workers serve the old weights, unless the failure happened during the commit.
- Every wait for a worker has a deadline, except the wait inside CUDA for an NCCL broadcast.
- After a failure, the publisher is ready for the next push without a restart of the trainer.
- If a worker does not answer at the beginning of a push, that push is delayed by `ANSWER_SECONDS`, and each later push
  by `LOST_SECONDS`.
- If a worker of a fleet is lost during a push, the push continues without the worker. If the other workers depend on
  the lost worker (with `collective`, and if workers share memory), the push is repeated without the worker, provided
  that the trainer's tensors can be read a second time.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import torch

from trueroll.errors import (
    AlignmentError,
    ConfigError,
    DeadlineError,
    IllegalStateError,
    OtherBaseError,
    PushError,
    TruerollError,
    WorkerLostError,
)

from ...engine.request import InFlight, plain
from ...kernels.adapters import read_tensors
from ...kernels.precision import Rounding, roundings, with_quantization
from ...kernels.wrappers import adapted_inside, unwrapped
from ...weight_sync.deltas.index import Index
from ...weight_sync.deltas.places import OwnPlace, RemotePlace, is_url, read_index
from ...weight_sync.payload.manifest import LAST_VERSION
from ...weight_sync.payload.tensor_file import max_header_bytes
from ...weight_sync.trainer.adapters import TrainerAdapters
from ...weight_sync.trainer.sender import Transport, WeightSender
from ...weight_sync.trainer.targets import OF_LOST_WORKERS, Lost, WorkerFailure
from ...weight_sync.trainer.trainer_tensors import (
    PushResult,
    Tensors,
    TrainerTensors,
    can_be_read_again,
    push_on_all_ranks,
)
from ...weight_sync.trainer.transaction import PushSettings
from ...weight_sync.transports.disk import MOST_TENSORS, read_manifest
from .. import protocol
from ..client.client import AsyncRolloutClient, Key, LoopThread
from ..client.membership import FleetArg, KeepsPush, Membership, PushNote, is_fleet, membership_of
from .staged import Staged

OnLost: TypeAlias = Literal["raise", "skip"]
DEFAULT_HOST = "127.0.0.1"
FULL_EVERY = 20
"""Default of `full_every`."""
LATE_SECONDS = 0.2
"""Interval between checks of workers that joined during a push. Clients check workers more often, and send no requests
to workers with stale weights.
"""
_LOST = (DeadlineError, WorkerLostError, IllegalStateError)
"""Errors of a greeting to a worker that does not answer, still loads its model, or has failed."""

ANSWER_SECONDS = 5.0
"""Timeout of a greeting to a worker. A worker answers at once, even while it computes, unless its process is stopped.
"""
LOST_SECONDS = 1.0
"""Timeout of a greeting to a worker that did not answer the last greeting."""
LOST_TURN_SECONDS = 0.1
"""Interval at which a call checks whether another thread has found that a worker is lost."""
FOLLOW_SECONDS = 0.1
"""Interval at which the members of the fleet are checked."""

log = logging.getLogger(__name__)


class WorkerClients:
    """The clients of the workers at `addresses`, one for each worker. Implements `PushTargets`. A position is an index
    into `addresses`.

    `keys`: `server_public_key` and `client_key` of `RolloutClient`. `may_lose_workers`: see `PushTargets`.
    `membership`: the membership of the workers' fleet; None if the workers are in no fleet.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float,
        keys: tuple[Key | None, Key | None],
        may_lose_workers: bool,
        membership: Membership | None = None,
    ) -> None:
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f"addresses: must be a list of strings (got {addresses!r:.80})")
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"addresses: {list(addresses)} has an address twice; give each worker once")
        self.addresses = tuple(addresses)
        self.may_lose_workers = may_lose_workers
        self._clients = [AsyncRolloutClient(address, timeout, *keys) for address in addresses]
        self._thread = LoopThread("weight-publisher")
        self._silent: set[str] = set()
        self._gone: set[str] = set()
        self._following = None if membership is None else self._thread.submit(self._follow(membership))

    @property
    def are_members(self) -> bool:
        """Return whether all workers are still members of the fleet."""
        return not self._gone

    def at(self, positions: Iterable[int]) -> WorkerClients:
        """Return a `WorkerClients` for the workers at `positions`. The returned object shares the clients of this
        object, and is closed together with this object.
        """
        chosen, positions = copy.copy(self), tuple(positions)
        chosen.addresses = tuple(self.addresses[position] for position in positions)
        chosen._clients = [self._clients[position] for position in positions]
        return chosen

    def greet(self, timeout: float) -> list[protocol.Weights | TruerollError]:
        """Return a list with a `Weights` reply or an error for each worker. The reply says which parameters a push to
        the worker must contain, and which weights the worker serves. For a worker that does not answer, the error is
        DeadlineError. Waits at most `timeout` seconds, and never longer than `ANSWER_SECONDS`.
        """
        replies = self._thread.submit(self._greet(timeout)).result()
        silent = zip(self.addresses, replies, strict=True)
        self._silent.clear()
        self._silent.update(address for address, reply in silent if isinstance(reply, DeadlineError))
        return replies

    def ask(
        self,
        what: str,
        calls: protocol.PushCall | Sequence[protocol.PushCall],
        timeout: float,
        lost: Lost | None,
    ) -> Future[list[protocol.PushStatus]]:
        """See `PushTargets`."""
        each = calls if isinstance(calls, Sequence) else [calls] * len(self.addresses)
        return self._thread.submit(self._ask_until_failure(what, each, timeout, lost))

    def ask_all(self, call: protocol.PushCall, timeout: float) -> list[protocol.PushStatus | TruerollError]:
        """Send every worker the same call and wait. Return each worker's reply or error."""
        return self._thread.submit(self._ask_all(call, timeout)).result()

    def close(self) -> None:
        """Disconnect and end the thread."""
        self._thread.end(self._close)

    async def _close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _ask_until_failure(
        self, what: str, calls: Sequence[protocol.Call], timeout: float, lost: Lost | None
    ) -> list[Any]:
        tasks = {
            address: asyncio.create_task(self._ask(position, call, timeout))
            for position, (address, call) in enumerate(zip(self.addresses, calls, strict=True))
            if lost is None or address not in lost
        }
        try:
            errors = await _first_errors(tasks, lost)
        finally:
            for task in tasks.values():
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        replies = [task.result() for task in tasks.values() if not task.cancelled() and not task.exception()]
        if errors or not replies:
            raise WorkerFailure(what, errors or lost or {})
        return replies

    async def _ask_all(self, call: protocol.Call, timeout: float) -> list[Any]:
        asked = (self._ask(position, call, timeout) for position in range(len(self.addresses)))
        return await asyncio.gather(*asked, return_exceptions=True)

    async def _greet(self, timeout: float) -> list[Any]:
        waits = [LOST_SECONDS if address in self._silent else ANSWER_SECONDS for address in self.addresses]
        asked = (
            self._ask(position, protocol.GetWeights(id=protocol.new_id()), min(wait, timeout))
            for position, wait in enumerate(waits)
        )
        return await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, position: int, call: protocol.Call, timeout: float) -> protocol.FromWorker:
        try:
            return await asyncio.wait_for(self._clients[position].ask(call), timeout)
        except TimeoutError:
            raise DeadlineError(f"{call.type}: no answer within {timeout} s") from None
        except TruerollError:
            if self.addresses[position] in self._gone:
                raise WorkerLostError("worker: the worker has left its fleet; see the fleet's log") from None
            raise

    async def _follow(self, membership: Membership) -> None:
        """Close the clients of workers that have left the fleet, so that no call waits for these workers.

        A fleet notices the end of a worker sooner than a client does.
        """
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                there = {member.address for member in membership.members()}
            except TruerollError as error:
                log.warning("fleet: %s", error)
                continue
            for address, client in zip(self.addresses, self._clients, strict=True):
                if address not in there | self._gone:
                    self._gone.add(address)
                    await asyncio.shield(client.close())  # `_close` may cancel this task


async def _first_errors(tasks: dict[str, asyncio.Task[Any]], lost: Lost | None) -> dict[str, Any]:
    """Wait until all tasks are done or a task fails. Return the errors by address. If `lost` is given, do not wait for
    workers in `lost`, and add lost workers to `lost` instead of returning their errors.
    """
    turn = None if lost is None else LOST_TURN_SECONDS
    while True:
        waiting = [task for address, task in tasks.items() if not task.done() and address not in (lost or ())]
        if waiting:
            await asyncio.wait(waiting, timeout=turn, return_when=asyncio.FIRST_EXCEPTION)
        found = {address: task.exception() for address, task in tasks.items() if task.done()}
        errors: dict[str, Any] = {address: error for address, error in found.items() if error is not None}
        if lost is not None:
            lost |= {address: error for address, error in errors.items() if isinstance(error, OF_LOST_WORKERS)}
            errors = {address: error for address, error in errors.items() if address not in lost}
        if errors or not waiting:
            return errors


@dataclass(frozen=True)
class _Party:
    """The workers that take part in a push, each worker's `Weights` reply, and the addresses of workers that are left
    out.
    """

    workers: WorkerClients
    replies: list[protocol.Weights]
    left_out: list[str]

    def where(self, holds: Callable[[str, protocol.Weights], bool]) -> _Party:
        """Return a `_Party` with only those workers for which `holds` returns True."""
        told = enumerate(zip(self.workers.addresses, self.replies, strict=True))
        chosen = [position for position, (address, reply) in told if holds(address, reply)]
        return _Party(self.workers.at(chosen), [self.replies[position] for position in chosen], self.left_out)


class WeightPublisher:
    """Pushes weights to workers. Any thread may call the methods, but only one call may run at a time.

    Do not change the tensors during a push. If the tensors are sharded, do not use their process group for anything
    else during a push.

    - `transport`: `shared` (shared memory of one machine), `collective` (a process group over the network), `relay`
      (TCP connections, over which workers hand the weights on to each other), `disk` (safetensors files) or `delta`
      (files with the bytes that changed since the last push). If the tensors and all workers are on GPUs, `shared` and
      `collective` keep the weights in GPU memory. `shared` uses CUDA IPC if trainer and workers are on the same GPU.
      `collective` uses NCCL, and requires a separate GPU for the trainer and for each worker. If the weights cannot
      stay in GPU memory, and always with `sparse`, the weights are copied through host memory, and `collective` uses
      gloo.
    - `timeout`: limit on each wait, in seconds. With `disk` and `delta`, the limit includes the time that a worker
      needs to read the folder.
    - `folder`: for `disk` and `delta`, the folder for pushes. Each push creates a subfolder and removes the subfolders
      of older pushes. With `delta`, the subfolders from the second-to-last full checkpoint on are kept. A new folder
      gets mode 0700; an existing folder keeps its mode.
    - `full_every`: for `delta`, one in every `full_every` pushes writes a full checkpoint, from which a new or late
      worker starts. With `delta`, the trainer keeps a copy of the weights.
    - `host`: for `collective` and `relay`, the address at which workers reach this machine, by default 127.0.0.1. The
      traffic of `collective` and `relay` is neither encrypted nor authenticated.
    - `sparse`: send only the elements that changed since the last push, if a worker still serves the last push. With
      `sparse`, the trainer keeps a copy of the weights.
    - `in_flight`: what a worker does with running requests. `recompute` continues the requests with the new weights.
      `drain` finishes the requests first, within `drain_timeout` seconds. `abort` ends the requests, which then return
      the tokens that they have so far. `keep` continues the requests with the new weights over the KV of the old
      weights; `SampleOutput.old_kv` lists the tokens that are drawn over old KV. The promise of equal bits does not
      cover tokens that are drawn over old KV. A worker with an unfinished request that sets `one_version` refuses a
      push with `keep`.
    - `in_place`: workers overwrite the weights that they serve, and so need no memory for a second copy. After a failed
      `in_place` push, the workers generate nothing until a push succeeds.
    - `reject_nonfinite`: refuse weights with NaN or infinity.
    - `on_lost`: what the publisher does if a worker does not answer, or is still loading its model, when a push begins.
      With `raise`, the push fails. `skip` pushes without the unavailable worker; later pushes include this worker once
      it answers again. If a worker is lost during a push, `skip` continues the push without this worker. In two cases,
      the push fails instead: with `collective`, and if one worker maps the memory of another worker's weights, which
      workers on one machine do with `shared`.
    - `server_public_key`, `client_key`: see `RolloutClient`. The client with the key `client_key` needs the role
      `control`.
    """

    def __init__(
        self,
        transport: Transport = "shared",
        *,
        timeout: float = 60.0,
        folder: str | Path | None = None,
        full_every: int | None = None,
        host: str | None = None,
        sparse: bool = False,
        in_flight: InFlight = "recompute",
        in_place: bool = False,
        reject_nonfinite: bool = True,
        on_lost: OnLost = "raise",
        drain_timeout: float = 600.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
    ) -> None:
        _check(transport in get_args(Transport), "transport", f"one of {', '.join(get_args(Transport))}", transport)
        _check(in_flight in get_args(InFlight), "in_flight", f"one of {', '.join(get_args(InFlight))}", in_flight)
        _check(on_lost in get_args(OnLost), "on_lost", f"one of {', '.join(get_args(OnLost))}", on_lost)
        _check(0.0 < timeout <= 86400.0, "timeout", "more than 0 and at most 86400 seconds", timeout)
        _check(0.0 < drain_timeout <= 86400.0, "drain_timeout", "more than 0 and at most 86400 seconds", drain_timeout)
        has_folder = transport in ("disk", "delta")
        _check((folder is not None) == has_folder, "folder", "set for disk and delta, else None", folder)
        is_count = transport == "delta" and type(full_every) is int and full_every >= 1
        _check(full_every is None or is_count, "full_every", "a positive integer for delta, else None", full_every)
        has_host = transport in ("collective", "relay")
        _check(host is None or has_host, "host", f"None for {transport}", host)
        _check(not (sparse and has_folder), "sparse", f"False for {transport}", sparse)
        _check(not (in_place and transport == "delta"), "in_place", "False for delta", in_place)
        _check(not (sparse and in_place), "sparse", "False with in_place, which needs every tensor whole", sparse)
        self._transport = transport
        self._settings = PushSettings(timeout, in_flight, in_place, reject_nonfinite, drain_timeout)
        self._on_lost = on_lost
        self._sender = WeightSender(
            transport,
            self._settings,
            folder=None if folder is None else Path(folder),
            host=host or DEFAULT_HOST,
            is_sparse=sparse,
            full_every=full_every or FULL_EVERY,
        )
        self._keys = server_public_key, client_key
        self._workers: WorkerClients | None = None
        self._latest: dict[str, str] = {}
        """Id of the last push that each worker committed, by address."""
        self._terms: tuple[int, bool] | None = None
        """Version and `allow_older` of the last push."""
        self._instances: dict[str, str] = {}
        """The `instance` of each worker's process when the last push began, by address."""
        self._fleet: Membership | None = None
        self._taken_out: set[str] = set()
        """Addresses of workers that were lost during the current push to a fleet."""

    def connect(self, addresses: Sequence[str]) -> None:
        """Set the workers for all following pushes. Sends nothing to the workers."""
        workers = WorkerClients(addresses, self._settings.timeout, self._keys, self._on_lost == "skip")
        self._disconnect()
        self._workers = workers

    def connect_fleet(self, fleet: FleetArg) -> None:
        """Set the fleet for all following pushes. Sends nothing to the workers.

        Each push includes the workers that serve when the push begins. If no worker serves, the push includes the
        joining workers. `fleet`: a `Fleet`, its file, or addresses of workers.

        If a worker is lost during a push, the push continues without the lost worker. With `collective`, and if workers
        share the memory of pushed weights, the push is repeated without the lost worker, unless the tensors came from
        an iterator or are sharded. If a worker lacks the base weights for an adapters-only push, the push is repeated
        with the base weights. Workers that join later, including replacements of lost workers, get the weights from the
        fleet.
        """
        membership = membership_of(fleet)
        self._disconnect()
        self._fleet = membership

    def push(
        self,
        tensors: Tensors,
        version: int,
        *,
        allow_older: bool = False,
        adapters: bool = False,
        adapter: str | None = None,
    ) -> PushResult:
        """Make every worker serve the weights in `tensors`, as version `version`.

        Raise PushError if a worker has not committed the push. After PushError, even with `sparse`, the next push sends
        whole tensors.

        - `tensors`: a module, a mapping from Hugging Face names to tensors, or an iterable of (name, tensor) pairs.
          Tensors may have any dtype and be on any device. If tensors are sharded (DTensor, as with FSDP2), every rank
          of the trainer must call this method with the same names in the same order. Rank 0 gathers the tensors one by
          one and pushes them; the other ranks return when rank 0 returns, and raise when rank 0 raises. With
          DistributedDataParallel, call this method on rank 0 only. The module inside the DistributedDataParallel
          wrapper is pushed.
        - `version`: at most 2**63 - 2, and higher than every version that a worker serves. A new worker serves version
          0.
        - `allow_older`: accept a `version` that is not higher than the served versions. With `allow_older`, samples
          from different weights may have the same version.
        - `adapters`: for a PEFT model, send only the LoRA matrices A and B and the `modules_to_save`. The workers must
          already have the other weights of the model, from the checkpoint or from a push without `adapters`. Checksums
          verify the weights that are not sent, but do not detect that a frozen weight was changed through `.data`.
        - `adapter`: a name for the LoRA adapter; only together with `adapters`. The workers keep serving the base
          weights and other named adapters, and serve this adapter to requests that choose its name. With `adapter`,
          `version` is the version of this adapter, which is independent of the versions of the base weights and of
          other adapters. The workers need the setting `adapter_bytes`. In a fleet, workers that join later do not get
          the adapter.

        The adapters of a PEFT model are sent unmerged. Workers add the LoRA adapter to the weights, as an aligned
        forward pass does.
        """
        version = _checked_version(version)
        _check(adapters or adapter is None, "adapter", "None unless adapters is set", adapter)
        self._taken_out.clear()
        alone = adapters
        while True:
            again = bool(self._taken_out)  # some workers may have committed the version before another worker was lost
            push = partial(self._push, version=version, allow_older=allow_older or again, adapter=adapter)
            try:
                result = self._push_on_all_ranks(tensors, alone, push)
            except PushError as error:
                if not self._takes_out(error, tensors):
                    raise
                log.warning("repeating the push of version %d without lost workers: %s", version, error)
                continue
            if result is None:  # `result` is None on all ranks or on none
                alone = False
                continue
            if adapter is None:
                self._tell_fleet(version, result.push_id)
                self._wait_for_late_ones(result.push_id)
            return replace(result, left_out=sorted({*result.left_out, *self._taken_out}))

    def stale_workers(self) -> list[str]:
        """Return the addresses of workers that do not answer or do not serve the last push from this publisher."""
        workers = self._connected()
        replies = zip(workers.addresses, workers.greet(self._settings.timeout), strict=True)
        return [address for address, reply in replies if self._is_stale(address, reply)]

    def restore(self, tensors: Tensors) -> PushResult | None:
        """Repeat the last push, with the same version, for the workers that do not serve the last push.

        Workers that serve the last push are not affected. If a worker does not answer, `on_lost` decides whether the
        call fails or leaves the worker out. `tensors`: see `push`. The caller must pass the same weights as in the last
        push; the method does not check this. Return None if all workers serve the last push. Raise PushError for the
        same reasons as `push`. Raise ConfigError if nothing was pushed yet. Raise ConfigError also if the transport is
        `disk` (call `push_folder` instead) or `delta` (call `pull` instead).
        """
        rule = "used with shared, collective or relay; for disk, call push_folder; for delta, call pull"
        _check(self._transport not in ("disk", "delta"), "restore", rule, self._transport)
        return self._push_on_all_ranks(tensors, False, self._restore)

    def push_folder(self, folder: str | Path, *, allow_older: bool = False) -> PushResult | None:
        """Push the folder of an earlier `disk` push to the workers that do not serve the folder's weights, such as
        restarted workers. Workers that already serve the folder's weights are not affected. Return None if all workers
        already serve the folder's weights. `allow_older` and errors: see `push`.
        """
        path = Path(folder).absolute()
        manifest = read_manifest(path)
        party = self._meet()
        in_need = party.where(lambda _, reply: reply.push_id != manifest.push_id)
        result = None
        if in_need.replies:
            result = self._sender.send_folder(in_need.workers, in_need.replies, path, manifest, allow_older)
            result = replace(result, left_out=[*party.left_out, *result.left_out])
        self._latest = dict.fromkeys(party.workers.addresses, manifest.push_id)
        self._terms = manifest.weight_version, allow_older
        self._tell_fleet(manifest.weight_version, manifest.push_id)
        return result

    def pull(self, source: str | Path, version: int, *, allow_older: bool = False, reads_chain: bool = True) -> Staged:
        """Make every worker stage version `version` from the chain at `source`, while the worker generates. Return the
        staged version, which the caller commits or aborts.

        Each worker reads the chain itself: the deltas since the version that it serves, or a full checkpoint and the
        deltas after the checkpoint. `pull` needs no trainer. The chain may come from `push` with the transport `delta`,
        from slime or from SkyRL.

        - `source`: a folder, or a URL for fsspec such as s3://bucket/run, with subfolders such as `weight_v000123`.
          This process and every worker must be able to read the source. A worker reads a URL only if its `push_urls`
          allow it.
        - `allow_older`: see `push`.
        - `reads_chain`: if False, only the workers read the chain, not this process. `reads_chain` may be False only
          for chains of slime and SkyRL.

        Workers that already serve the push of version `version` are not affected. The chains of slime and SkyRL have no
        push ids. With such a chain, a worker that already serves `version` refuses the push, because the version is not
        newer. Raise PushError if the chain does not lead to `version`, or if a worker has not staged the version; all
        workers then keep their weights.
        """
        version = _checked_version(version)
        place = str(source) if is_url(str(source)) else str(Path(source).absolute())
        push_id = _index_of(place, version).push_id if reads_chain else None
        party = self._meet()
        in_need = party.where(lambda _, reply: push_id is None or reply.push_id != push_id)
        told = place, version, push_id, allow_older
        transaction = self._sender.stage_chain(in_need.workers, in_need.replies, *told)

        def note(result: PushResult) -> PushResult:
            self._latest = dict.fromkeys(party.workers.addresses, result.push_id)
            self._terms = version, allow_older
            self._tell_fleet(version, result.push_id)
            return replace(result, left_out=party.left_out)

        return Staged(transaction, party.left_out, note)

    def close(self) -> None:
        """Disconnect, and free all memory. The workers keep running."""
        self._disconnect()
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _has_workers(self) -> bool:
        return self._workers is not None or self._fleet is not None

    def _takes_out(self, error: PushError, tensors: Tensors) -> bool:
        """Record the workers that were lost during a push. Return whether to repeat the push without the lost
        workers.
        """
        lost = set(error.lost) - self._taken_out
        if self._fleet is None or not lost or not can_be_read_again(tensors):
            return False
        self._taken_out |= lost
        return len(self._fleet_addresses()) > 0

    def _wait_for_late_ones(self, push_id: str) -> None:
        """Wait until this push has reached every worker that serves in the fleet.

        A worker that began to serve during the push has older weights until the fleet gives the worker the new weights.
        """
        deadline = time.monotonic() + self._settings.timeout
        while self._fleet is not None and self._workers is not None:
            known = {*self._workers.addresses, *self._taken_out}
            late = [m.address for m in self._fleet.members() if m.standing == "serving" and m.address not in known]
            if not late or not self._is_any_behind(late, push_id):
                return
            if time.monotonic() > deadline:
                log.warning("push %s: workers that joined during the push still serve older weights: %s", push_id, late)
                return
            time.sleep(LATE_SECONDS)

    def _is_any_behind(self, addresses: list[str], push_id: str) -> bool:
        workers = WorkerClients(addresses, self._settings.timeout, self._keys, True, self._fleet)
        try:
            replies = workers.greet(self._settings.timeout)
        finally:
            workers.close()
        return any(isinstance(reply, protocol.Weights) and reply.push_id != push_id for reply in replies)

    def _tell_fleet(self, version: int, push_id: str) -> None:
        """Report the push to the fleet, so that replacements serve the pushed weights even if all workers are lost."""
        if not isinstance(self._fleet, KeepsPush):
            return
        try:
            self._fleet.note_push(PushNote(version, push_id))
        except ConfigError as error:
            log.warning("the fleet will notice version %d only when it checks its workers: %s", version, error)

    def _fleet_addresses(self) -> list[str]:
        """Return the addresses of the serving workers. If no worker serves, return the addresses of the joining
        workers.
        """
        assert self._fleet is not None
        members = self._fleet.members()
        chosen = [member for member in members if member.standing != "joining"] or members
        return [member.address for member in chosen if member.address not in self._taken_out]

    def _disconnect(self) -> None:
        self._fleet = None
        self._disconnect_workers()

    def _disconnect_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _push_on_all_ranks(
        self,
        tensors: Tensors,
        alone: bool,
        push: Callable[[TrainerTensors, TrainerAdapters | None], PushResult | None],
    ) -> PushResult | None:
        """Call `push` with the tensors and, for a PEFT model, with the model's adapters. `alone`: send only the
        adapters.
        """
        adapters = _adapters_of(tensors, alone)
        is_delta = self._transport == "delta" and adapters is not None
        _check(not is_delta, "transport", "another one for a PEFT model; or push its merged_weights", "delta")
        in_place = self._settings.in_place and adapters is not None
        _check(not in_place, "in_place", "False with a PEFT model; push its merged_weights instead", in_place)
        source = tensors if adapters is None else adapters.tensors
        return push_on_all_ranks(source, self._has_workers, lambda found: push(found, adapters))

    def _push(
        self,
        tensors: TrainerTensors,
        adapters: TrainerAdapters | None,
        version: int,
        allow_older: bool,
        adapter: str | None,
    ) -> PushResult | None:
        """Push to all workers. Return None if the push is adapters-only, but a worker of a fleet also needs the base
        weights.

        A worker needs the base weights if the worker was restarted, or got the merged weights of another worker.
        """
        party = self._meet()
        try:
            result = self._push_to(party, tensors, adapters, version, allow_older, adapter)
        except OtherBaseError as error:
            if self._fleet is None or adapters is None or not adapters.is_alone or adapter is not None:
                raise
            log.warning("repeating the push of version %d with the base weights of the adapters: %s", version, error)
            return None
        if adapter is None:
            self._latest = dict.fromkeys(party.workers.addresses, result.push_id)
            self._terms = version, allow_older
        return result

    def _restore(self, tensors: TrainerTensors, adapters: TrainerAdapters | None) -> PushResult | None:
        if self._terms is None:
            raise ConfigError("restore: nothing was pushed yet; call push")
        party = self._meet()
        stale = party.where(self._is_stale)
        if not stale.replies:
            return None
        result = self._push_to(stale, tensors, adapters, *self._terms)
        self._latest |= dict.fromkeys(stale.workers.addresses, result.push_id)
        if len(stale.replies) == len(party.replies):  # otherwise, workers still serve the recorded push
            self._tell_fleet(result.version, result.push_id)
        return result

    def _is_stale(self, address: str, reply: protocol.Weights | TruerollError) -> bool:
        found = reply.push_id if isinstance(reply, protocol.Weights) else None
        return found is None or found != self._latest.get(address)

    def _meet(self) -> _Party:
        """Return the workers that answer. Raise PushError if a worker does not answer and must not be left out."""
        workers = self._connected()
        replies = workers.greet(self._settings.timeout)
        errors = {i: reply for i, reply in enumerate(replies) if isinstance(reply, TruerollError)}
        are_lost = all(isinstance(error, _LOST) for error in errors.values())
        may_skip = self._on_lost == "skip" or self._fleet is not None
        if errors and not (may_skip and are_lost and len(errors) < len(replies)):
            failed = "; ".join(f"worker {workers.addresses[i]} failed: {error}" for i, error in errors.items())
            advice = "; restart it, connect to other workers, or leave it out with on_lost='skip'" if are_lost else ""
            raise PushError(f"push: {failed}. Nothing was sent to any worker{advice}")
        for i, error in errors.items():
            log.warning(
                "worker %s is left out of the push, and will get pushes again once it is back: %s",
                workers.addresses[i],
                error,
            )
        told = {i: reply for i, reply in enumerate(replies) if isinstance(reply, protocol.Weights)}
        party = _Party(workers.at(told), list(told.values()), [workers.addresses[i] for i in errors])
        self._note_instances(party)
        return party

    def _note_instances(self, party: _Party) -> None:
        """Log a warning for each worker that was restarted since the last push."""
        for address, reply in zip(party.workers.addresses, party.replies, strict=True):
            if self._instances.get(address, reply.instance) != reply.instance:
                log.warning(
                    "worker %s was restarted since the last push, and has served version %d since",
                    address,
                    reply.weight_version,
                )
            self._instances[address] = reply.instance

    def _push_to(
        self,
        party: _Party,
        tensors: TrainerTensors,
        adapters: TrainerAdapters | None,
        version: int,
        allow_older: bool,
        adapter: str | None = None,
    ) -> PushResult:
        result = self._sender.send(party.workers, party.replies, tensors, version, allow_older, adapters, adapter)
        return replace(result, left_out=[*party.left_out, *result.left_out])

    def _connected(self) -> WorkerClients:
        if self._fleet is not None:
            addresses = self._fleet_addresses()
            known = self._workers
            if known is None or list(known.addresses) != addresses or not known.are_members:
                self._disconnect_workers()
                self._workers = WorkerClients(addresses, self._settings.timeout, self._keys, True, self._fleet)
        if self._workers is None or not self._workers.addresses:
            advice = "call connect with addresses first" if self._fleet is None else "wait until the fleet has workers"
            raise ConfigError(f"workers: there is no worker to push to; {advice}")
        return self._workers


def connect_to(publisher: WeightPublisher, target: str) -> None:
    """Connect the publisher to `target`: the address of a worker, the file of a fleet, or several addresses."""
    if is_fleet(target):
        publisher.connect_fleet(target)
    else:
        publisher.connect([target])


def _checked_version(version: int) -> int:
    found = plain(version)
    is_version = type(found) is int and 0 <= found <= LAST_VERSION
    _check(is_version, "version", f"an integer from 0 to {LAST_VERSION}", found)
    return found


def _index_of(place: str, version: int) -> Index:
    """Return the content of the folder with version `version` in the chain at `place`. Raise PushError if this process
    cannot read the folder.
    """
    chain = RemotePlace(place) if is_url(place) else OwnPlace(Path(place))
    return read_index(chain, version, max_header_bytes(MOST_TENSORS))


def _adapters_of(tensors: Tensors, alone: bool) -> TrainerAdapters | None:
    """Return a PEFT model's adapters; None if `tensors` is not a PEFT model. Raise ConfigError if `alone` is set and
    `tensors` is not a PEFT model.
    """
    model = adapted_inside(tensors) if isinstance(tensors, torch.nn.Module) else None
    _check(model is not None or not alone, "adapters", "False unless tensors is a PEFT model", alone)
    try:
        return None if model is None else TrainerAdapters(read_tensors(model), alone, partial(_roundings_of, model))
    except AlignmentError as error:
        raise PushError(str(error)) from None


def _roundings_of(model: Any, quantization: str) -> dict[str, Rounding]:
    """For each weight of a PEFT model, by the name that workers use, return how workers with the setting `quantization`
    round this weight.
    """
    from ...kernels.plain_models import spec_of  # imported here because it imports transformers

    try:
        return roundings(with_quantization(spec_of(unwrapped(model)), quantization))
    except (AlignmentError, ConfigError) as error:
        raise PushError(f"adapters: a worker has quantization {quantization!r:.80}: {error}") from None


def _check(holds: bool, name: str, rule: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"{name}: must be {rule} (got {found!r})", field=name, value=found)
