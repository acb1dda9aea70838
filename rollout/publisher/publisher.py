"""The trainer's side: `WeightPublisher` pushes weights to workers, none of which commits them before all have verified.

`WorkerClients` owns one client of each worker, all on one event loop on a thread of its own, and which did not answer
last: every call ends within its timeout, or as soon as the worker is no member of its fleet any more, and the first
worker that fails ends a call to all of them with an error that names it, but a greeting, which waits for all.
`WeightPublisher` owns which workers there are, and what each of them was last known to serve. Not owned here: how
weights travel (`WeightSender`), and the trainer's tensors. Promises: `push` returns when every worker that was not left
out serves the new weights, or raises an error that says which worker failed and what each of the others serves: all of
them the old weights, unless one failed at its commit; every wait for a worker has a deadline, but not what CUDA itself
waits for behind a broadcast of NCCL's; after a failure the next push needs nothing restarted here; a worker that does
not answer when a push begins costs it `ANSWER_SECONDS`, and the next ones `LOST_SECONDS` each; a push to a fleet is
made again without what is lost on the way, where the tensors can be read again.
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
from ...kernels.wrappers import adapted_inside
from ...weight_sync.payload.manifest import LAST_VERSION
from ...weight_sync.trainer.adapters import TrainerAdapters
from ...weight_sync.trainer.sender import Transport, WeightSender
from ...weight_sync.trainer.targets import WorkerFailure
from ...weight_sync.trainer.trainer_tensors import (
    PushResult,
    Tensors,
    TrainerTensors,
    can_be_read_again,
    push_on_all_ranks,
)
from ...weight_sync.trainer.transaction import PushSettings
from ...weight_sync.transports.disk import read_manifest
from .. import protocol
from ..client.client import AsyncRolloutClient, Key, LoopThread
from ..client.membership import FleetArg, KeepsPush, Membership, PushNote, is_fleet, membership_of

OnLost: TypeAlias = Literal["raise", "skip"]
DEFAULT_HOST = "127.0.0.1"
LATE_SECONDS = 0.2
"""Between two looks at the workers that joined during a push. Clients look more often, and then ask none of these."""
_LOST = (DeadlineError, WorkerLostError, IllegalStateError)
"""How the greeting of a worker ends that does not answer, still loads its model, or has failed."""

ANSWER_SECONDS = 5.0
"""How long a worker may take to answer a greeting: it does so at once, also while it computes, unless it is stopped."""
LOST_SECONDS = 1.0
"""The same for one that did not answer the greeting before."""
FOLLOW_SECONDS = 0.1
"""Between two looks at the members of the fleet."""

log = logging.getLogger(__name__)


class WorkerClients:
    """A client of each worker at `addresses`: the `PushTargets` of a push. A position is an index into them. `keys`:
    `server_public_key` and `client_key` of `RolloutClient`. `membership`: of the fleet that they are in.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float,
        keys: tuple[Key | None, Key | None],
        membership: Membership | None = None,
    ) -> None:
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f"addresses: expected a list of strings, found {addresses!r:.80}; give a list")
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"addresses: expected each worker once, found {list(addresses)}; leave the others out")
        self.addresses = tuple(addresses)
        self._clients = [AsyncRolloutClient(address, timeout, *keys) for address in addresses]
        self._thread = LoopThread("weight-publisher")
        self._silent: set[str] = set()
        self._gone: set[str] = set()
        self._following = None if membership is None else self._thread.submit(self._follow(membership))

    @property
    def are_members(self) -> bool:
        """Whether none has left its fleet since."""
        return not self._gone

    def at(self, positions: Iterable[int]) -> WorkerClients:
        """Those at these positions, by the same clients, which end with this one."""
        chosen, positions = copy.copy(self), tuple(positions)
        chosen.addresses = tuple(self.addresses[position] for position in positions)
        chosen._clients = [self._clients[position] for position in positions]
        return chosen

    def greet(self, timeout: float) -> list[protocol.Weights | TruerollError]:
        """What each worker wants, or in its place the error: DeadlineError where nothing answers. Waits for at most
        `timeout`, but much shorter where nothing answers soon.
        """
        replies = self._thread.submit(self._greet(timeout)).result()
        silent = zip(self.addresses, replies, strict=True)
        self._silent.clear()
        self._silent.update(address for address, reply in silent if isinstance(reply, DeadlineError))
        return replies

    def ask(
        self, what: str, calls: protocol.PushCall | Sequence[protocol.PushCall], timeout: float
    ) -> Future[list[protocol.PushStatus]]:
        """Send each worker its call, or all the same one. The result: all replies, in order; or WorkerFailure as soon
        as one failed.
        """
        each = calls if isinstance(calls, Sequence) else [calls] * len(self.addresses)
        return self._thread.submit(self._ask_until_failure(what, each, timeout))

    def ask_all(self, call: protocol.PushCall, timeout: float) -> list[protocol.PushStatus | TruerollError]:
        """Send every worker a call, and wait for all the replies, or the errors in their place."""
        return self._thread.submit(self._ask_all(call, timeout)).result()

    def close(self) -> None:
        """Disconnect, and end the thread."""
        self._thread.end(self._close)

    async def _close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _ask_until_failure(self, what: str, calls: Sequence[protocol.Call], timeout: float) -> list[Any]:
        tasks = [asyncio.create_task(self._ask(position, call, timeout)) for position, call in enumerate(calls)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks)
        asked = zip(self.addresses, tasks, strict=True)
        errors = {address: task.exception() for address, task in asked if not task.cancelled() and task.exception()}
        if errors:
            raise WorkerFailure(what, errors)  # type: ignore[arg-type]
        return [task.result() for task in tasks]

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
            raise DeadlineError(f"{call.type}: expected an answer within {timeout} s, found none") from None
        except TruerollError:
            if self.addresses[position] in self._gone:
                raise WorkerLostError("worker: it is no member of its fleet any more; see the fleet's log") from None
            raise

    async def _follow(self, membership: Membership) -> None:
        """Close the clients of workers that are members no more, so that no call waits for them: a fleet notices
        sooner than a client that a worker has ended.
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


@dataclass(frozen=True)
class _Party:
    """The workers of a push, what each of them wants, and the addresses of those that are left out."""

    workers: WorkerClients
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
    `disk`, where a folder for each push is written; older ones are removed; it is made with mode 0700 if it is not
    there and otherwise keeps its mode. `host`: for `collective`, the address of this machine that workers can reach, by
    default 127.0.0.1; what travels there is neither encrypted nor authenticated.
    `sparse`: send only the elements that changed since the last push, where the workers still serve that; this keeps a
    copy of the weights in the trainer. `in_flight`: what becomes of a worker's running requests: they go on under the
    new weights (`recompute`), finish first, within `drain_timeout` seconds (`drain`), or end with what they have
    (`abort`). `in_place`: write into the live weights, for workers without memory for a second set; a push that fails
    then leaves a worker generating nothing until one succeeds. `reject_nonfinite`: refuse NaN and infinities.
    `on_lost`: with a worker that does not answer when a push begins, or still loads its model, the push is an error
    (`raise`), or goes on to the others (`skip`) and to that one again once it is back. `server_public_key`,
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
        _check(0.0 < timeout <= 86400.0, "timeout", "more than 0 seconds, at most 86400", timeout)
        _check(0.0 < drain_timeout <= 86400.0, "drain_timeout", "more than 0 seconds, at most 86400", drain_timeout)
        _check((folder is None) == (transport != "disk"), "folder", "one for disk, none otherwise", folder)
        _check(host is None or transport == "collective", "host", f"none for {transport}", host)
        _check(not (sparse and transport == "disk"), "sparse", "False for disk, which holds whole weights", sparse)
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
        )
        self._keys = server_public_key, client_key
        self._workers: WorkerClients | None = None
        self._latest: dict[str, str] = {}
        """By address, the push that was committed there last."""
        self._terms: tuple[int, bool] | None = None
        """Version and `allow_older` of the last push."""
        self._instances: dict[str, str] = {}
        """By address, the process that was there when a push began last."""
        self._fleet: Membership | None = None
        self._taken_out: set[str] = set()
        """Of the push under way to a fleet: the addresses of workers that were lost."""

    def connect(self, addresses: Sequence[str]) -> None:
        """Push to these workers from now on, and to no others. Sends nothing yet."""
        workers = WorkerClients(addresses, self._settings.timeout, self._keys)
        self._disconnect()
        self._workers = workers

    def connect_fleet(self, fleet: FleetArg) -> None:
        """From now on push to the workers that serve in `fleet` when a push begins: a `Fleet`, its file, or the
        addresses of workers. Sends nothing yet.

        A worker that is lost during a push is taken out of it, and the push made again to the others, unless the
        tensors came from an iterator or are sharded. A push of adapters alone is made again with the weights that they
        are added to if a worker has others. The fleet itself brings the weights to the worker that replaces it, and to
        workers that join later; a worker that joins while none serves is pushed to.
        """
        membership = membership_of(fleet)
        self._disconnect()
        self._fleet = membership

    def push(self, tensors: Tensors, version: int, *, allow_older: bool = False, adapters: bool = False) -> PushResult:
        """Make every worker serve these weights, as version `version`.

        The version is at most 2**63 - 2, and later than the version that each worker serves, 0 at first and after a
        restart, unless `allow_older`: then samples of two different weights may carry the same version.

        `tensors`: a module, or Hugging Face names with tensors as a mapping or an iterable of pairs, of any dtype and
        on any device. Where they are sharded (DTensor, as by FSDP2), every rank of the trainer calls this with the same
        names in the same order: rank 0 gathers one after the other and pushes, the others return when it is done, or
        raise what it raises. Of DistributedDataParallel the module inside is pushed, by rank 0 alone. Raise
        PushError if not all workers have committed; the next push then sends every tensor whole.

        A model of PEFT is sent as it is, and workers add its LoRA adapter to its weights, as an aligned forward pass
        does. `adapters`: send A and B alone, and `modules_to_save`, to workers that have the other weights already,
        from their checkpoint or from a push without `adapters`: checksums tell. What changes a frozen weight through
        `.data` is not noticed by them.
        """
        version = plain(version)
        is_version = type(version) is int and 0 <= version <= LAST_VERSION
        _check(is_version, "version", f"an integer from 0 to {LAST_VERSION}", version)
        self._taken_out.clear()
        alone = adapters
        while True:
            again = bool(self._taken_out)  # some may have committed the version before another one was lost
            push = partial(self._push, version=version, allow_older=allow_older or again)
            try:
                result = self._push_on_all_ranks(tensors, alone, push)
            except PushError as error:
                if not self._takes_out(error, tensors):
                    raise
                log.warning("push of version %d is made again without what was lost: %s", version, error)
                continue
            if result is None:  # on every rank alike
                alone = False
                continue
            self._tell_fleet(version, result.push_id)
            self._wait_for_late_ones(result.push_id)
            return replace(result, left_out=sorted({*result.left_out, *self._taken_out}))

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
        return self._push_on_all_ranks(tensors, False, self._restore)

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
            result = self._sender.send_folder(in_need.workers, in_need.replies, path, manifest, allow_older)
            result = replace(result, left_out=party.left_out)
        self._latest = dict.fromkeys(party.workers.addresses, manifest.push_id)
        self._terms = manifest.weight_version, allow_older
        self._tell_fleet(manifest.weight_version, manifest.push_id)
        return result

    def close(self) -> None:
        """Disconnect, and free what is held. The workers go on."""
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
        """Whether to push again to a fleet, without the workers that were lost."""
        lost = set(error.lost) - self._taken_out
        if self._fleet is None or not lost or not can_be_read_again(tensors):
            return False
        self._taken_out |= lost
        return len(self._fleet_addresses()) > 0

    def _wait_for_late_ones(self, push_id: str) -> None:
        """Return once this push has reached every worker that serves in the fleet: one that began to serve meanwhile
        has older weights until the fleet notices.
        """
        deadline = time.monotonic() + self._settings.timeout
        while self._fleet is not None and self._workers is not None:
            known = {*self._workers.addresses, *self._taken_out}
            late = [m.address for m in self._fleet.members() if m.standing == "serving" and m.address not in known]
            if not late or not self._is_any_behind(late, push_id):
                return
            if time.monotonic() > deadline:
                log.warning("push %s: of those that joined meanwhile, %s still serve what was before it", push_id, late)
                return
            time.sleep(LATE_SECONDS)

    def _is_any_behind(self, addresses: list[str], push_id: str) -> bool:
        workers = WorkerClients(addresses, self._settings.timeout, self._keys, self._fleet)
        try:
            replies = workers.greet(self._settings.timeout)
        finally:
            workers.close()
        return any(isinstance(reply, protocol.Weights) and reply.push_id != push_id for reply in replies)

    def _tell_fleet(self, version: int, push_id: str) -> None:
        """Tell the fleet of the push: should it lose all its workers now, it serves nothing else."""
        if not isinstance(self._fleet, KeepsPush):
            return
        try:
            self._fleet.note_push(PushNote(version, push_id))
        except ConfigError as error:
            log.warning("the fleet learns of version %d only when it looks at its workers: %s", version, error)

    def _fleet_addresses(self) -> list[str]:
        """The addresses to push to: of the workers that serve, or of those that join while none serves."""
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
        """`push` of the tensors, or of a model of PEFT with its adapters, or of these `alone`."""
        adapters = _adapters_of(tensors, alone)
        in_place = self._settings.in_place and adapters is not None
        _check(not in_place, "in_place", "False with a model of PEFT, or merged_weights of it", in_place)
        source = tensors if adapters is None else adapters.tensors
        return push_on_all_ranks(source, self._has_workers, lambda found: push(found, adapters))

    def _push(
        self, tensors: TrainerTensors, adapters: TrainerAdapters | None, version: int, allow_older: bool
    ) -> PushResult | None:
        """None if adapters alone are not enough for a fleet, in which a worker may have the merged weights of another,
        or have been started anew.
        """
        party = self._meet()
        try:
            result = self._push_to(party, tensors, adapters, version, allow_older)
        except OtherBaseError as error:
            if self._fleet is None or adapters is None or not adapters.is_alone:
                raise
            log.warning("push of version %d is made again with the weights that adapters belong to: %s", version, error)
            return None
        self._latest = dict.fromkeys(party.workers.addresses, result.push_id)
        self._terms = version, allow_older
        return result

    def _restore(self, tensors: TrainerTensors, adapters: TrainerAdapters | None) -> PushResult | None:
        if self._terms is None:
            raise ConfigError("restore: expected a push before, whose version it takes, found none; call push")
        party = self._meet()
        stale = party.where(self._is_stale)
        if not stale.replies:
            return None
        result = self._push_to(stale, tensors, adapters, *self._terms)
        self._latest |= dict.fromkeys(stale.workers.addresses, result.push_id)
        if len(stale.replies) == len(party.replies):  # otherwise the push that was noted is still there
            self._tell_fleet(result.version, result.push_id)
        return result

    def _is_stale(self, address: str, reply: protocol.Weights | TruerollError) -> bool:
        found = reply.push_id if isinstance(reply, protocol.Weights) else None
        return found is None or found != self._latest.get(address)

    def _meet(self) -> _Party:
        """The workers that answer. Raise PushError if one does not, and is not to be left out."""
        workers = self._connected()
        replies = workers.greet(self._settings.timeout)
        errors = {i: reply for i, reply in enumerate(replies) if isinstance(reply, TruerollError)}
        are_lost = all(isinstance(error, _LOST) for error in errors.values())
        may_skip = self._on_lost == "skip" or self._fleet is not None
        if errors and not (may_skip and are_lost and len(errors) < len(replies)):
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

    def _push_to(
        self,
        party: _Party,
        tensors: TrainerTensors,
        adapters: TrainerAdapters | None,
        version: int,
        allow_older: bool,
    ) -> PushResult:
        result = self._sender.send(party.workers, party.replies, tensors, version, allow_older, adapters)
        return replace(result, left_out=party.left_out)

    def _connected(self) -> WorkerClients:
        if self._fleet is not None:
            addresses = self._fleet_addresses()
            known = self._workers
            if known is None or list(known.addresses) != addresses or not known.are_members:
                self._disconnect_workers()
                self._workers = WorkerClients(addresses, self._settings.timeout, self._keys, self._fleet)
        if self._workers is None or not self._workers.addresses:
            advice = (
                "call connect with their addresses first" if self._fleet is None else "wait until its fleet has some"
            )
            raise ConfigError(f"workers: expected some, found none; {advice}")
        return self._workers


def connect_to(publisher: WeightPublisher, target: str) -> None:
    """Have it push to a worker by its address, or to a fleet by its file or by several addresses."""
    if is_fleet(target):
        publisher.connect_fleet(target)
    else:
        publisher.connect([target])


def _adapters_of(tensors: Tensors, alone: bool) -> TrainerAdapters | None:
    """Those of a model of PEFT; None for anything else, unless they are to be sent `alone`."""
    model = adapted_inside(tensors) if isinstance(tensors, torch.nn.Module) else None
    _check(model is not None or not alone, "adapters", "False but for a model of PEFT", alone)
    try:
        return None if model is None else TrainerAdapters(read_tensors(model), alone)
    except AlignmentError as error:
        raise PushError(str(error)) from None


def _check(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"{name}: expected {expected}, found {found!r}; correct it", field=name, value=found)
