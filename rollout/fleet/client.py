"""The clients of a fleet: the calls of `RolloutClient`, answered by many workers.

Owns the meaning of the calls for many workers. Does not own the workers: a `WorkerPool` knows them, and a
`FleetRequest` brings each request to its end. Imports neither torch nor ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from trueroll.errors import (
    ConfigError,
    IllegalStateError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
    WorkerLostError,
    brief,
)

from ...engine.request import SampleDelta, plain
from ...weight_sync.payload.manifest import list_names
from .. import protocol
from ..client.client import AsyncRolloutClient, RolloutClient, placed
from ..client.membership import FleetArg, is_fleet, membership_of
from ..client.requests import Request, message_of
from ..network.keys import Key
from .links import Link
from .open_requests import OpenRequests
from .request import FleetRequest
from .samples import Reply
from .totals import FleetHealth, all_healths, all_stats, all_statuses
from .worker_pool import WorkerPool

T = TypeVar("T")


class AsyncFleetClient(AsyncRolloutClient):
    """A client of all workers of a fleet, with the calls of `AsyncRolloutClient`.

    `fleet`: a `Fleet`, the file that one writes, or the addresses of workers. A group stays together, and goes where
    the beginning of its prompt is cached. What a lost worker had is asked of another one: each sample comes once, with
    the same tokens. Calls like `pause` and `sleep` go to all workers; `health` and `stats` tell of all together,
    `healths` and `all_stats` of each.

    `timeout`, `server_public_key`, `client_key`: see `RolloutClient`, for each worker. `max_staleness`: by how many
    versions the weights of a group's tokens may differ, and those of a worker that is asked be older than the newest; a
    group that a push would mix otherwise is begun anew, or raises StaleWeightsError from `stream` if a part of it was
    yielded. `mixed_kinds`: take workers that differ in backend, instruction set, dtype or version of torch, so that a
    sample's bits depend on the worker; otherwise ConfigError. `straggler_seconds`: a request that takes longer than
    that, and three times as long for its size as others, is asked of a second worker too; None: never. `patience`:
    seconds to wait for a worker while there is none; WorkerLostError after them. `while_connected`: see
    `AsyncRolloutClient`.
    """

    def __init__(
        self,
        fleet: FleetArg,
        timeout: float = 30.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
        *,
        max_staleness: int = 0,
        mixed_kinds: bool = False,
        straggler_seconds: float | None = 30.0,
        patience: float = 600.0,
        while_connected: bool = False,
    ) -> None:
        max_staleness = plain(max_staleness)
        if type(max_staleness) is not int or max_staleness < 0:
            text = f"max_staleness: expected an integer from 0 on, found {brief(max_staleness)}; correct it"
            raise ConfigError(text, field="max_staleness", value=max_staleness, limit=0)

        def make_client(address: str) -> AsyncRolloutClient:
            return AsyncRolloutClient(address, timeout, server_public_key, client_key)

        self.address = str(fleet)
        self._pool = WorkerPool(membership_of(fleet), make_client, max_staleness, mixed_kinds)
        self._max_staleness, self._patience = max_staleness, patience
        self._while_connected = while_connected
        self._requests = OpenRequests(straggler_seconds)

    @property
    def num_asked_twice(self) -> int:
        """Requests that a second worker was asked for, as they were far behind."""
        return self._requests.num_asked_twice

    async def exchange(
        self, requests: Mapping[int, Request], what: str | None, errors: str = "raise", *, in_groups: bool = False
    ) -> AsyncGenerator[tuple[int, protocol.FromWorker | SampleDelta | TruerollError], None]:
        """See `AsyncRolloutClient.exchange`."""
        await self._pool.start()
        ids = [request.id for request in requests.values()]
        self._requests.check(ids)
        replies: asyncio.Queue[tuple[int, Reply]] = asyncio.Queue()
        settings: dict[str, Any] = dict(
            may_repeat=in_groups, max_staleness=self._max_staleness, patience=self._patience
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            for position, request in requests.items():
                sent = FleetRequest(self._pool, request, _put(replies, position), **settings)
                tasks.append(self._requests.begin(request.id, sent))
            num_unfinished = len(requests)
            while num_unfinished:
                position, reply = await replies.get()
                num_unfinished -= isinstance(reply, TruerollError | protocol.Done | protocol.Scores)
                if isinstance(reply, TruerollError):
                    reply = reply if what is None else placed(reply, f"{what}[{position}]")
                    if errors == "raise":
                        raise reply
                yield position, reply
        finally:
            self._requests.end(ids)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(
        self, request_ids: str | Iterable[str], index: int | None = None, *, missing_ok: bool = False
    ) -> int:
        """See `AsyncRolloutClient.abort`. Requests that others made are looked for at all workers."""
        await self._pool.start()
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return sum(await asyncio.gather(*(self._abort_one(id, index, missing_ok) for id in ids)))

    async def _abort_one(self, id: str, index: int | None, missing_ok: bool) -> int:
        # Made only to raise InvalidRequestError for an id or an index that no worker would take.
        message_of(protocol.Abort, id=protocol.new_id(), request_id=id, index=index)
        if request := self._requests.get(id):
            ended = await request.abort(index)
        else:
            ended = sum((await self._ask_each(lambda link: link.client.abort(id, index, missing_ok=True))).values())
        if not ended and not missing_ok:
            which = f"request {id!r}" if index is None else f"sample {index} of request {id!r}"
            raise UnknownRequestError(f"abort: expected something unfinished of {which}, found none at any worker")
        return ended

    async def abort_all(self) -> int:
        """End all requests of this client, as `abort` does; returns how many samples that ended."""
        return await self.abort(self._requests.ids, missing_ok=True)

    async def health(self) -> FleetHealth:
        """How the fleet is: sums over the workers that answer; state and weight version of the one that is least ready;
        `instance` counts them; `troubles` says of each worker that joins why it could not get the weights.
        """
        healths = list((await self.healths()).values())
        return all_healths(healths, [link.member.told for link in self._pool.links if link.member.trouble])

    async def stats(self) -> protocol.Stats:
        """The lifetime counters of all workers that answer, added up."""
        return all_stats(list((await self.all_stats()).values()))

    async def healths(self) -> dict[str, protocol.Health]:
        """How each worker is, by its name; those that do not answer are left out."""
        return await self._ask_each(lambda link: link.client.health())

    async def all_stats(self) -> dict[str, protocol.Stats]:
        """The lifetime counters of each worker, by its name; those that do not answer are left out."""
        return await self._ask_each(lambda link: link.client.stats())

    async def weight_checksums(self) -> protocol.Checksums:
        """What the weights are that all workers which serve have. Raise IllegalStateError if they differ, as they do
        during a push.
        """
        found = await self._ask_each(lambda link: link.client.weight_checksums(), are_serving=True)
        (first, expected), *others = found.items()
        for name, other in others:
            if other.checksums != expected.checksums:
                differing = [key for key, value in expected.checksums.items() if other.checksums.get(key) != value]
                raise IllegalStateError(
                    f"fleet: worker {name}: expected the weights of {first}, version {expected.weight_version}, found "
                    f"others in {list_names(differing)}, version {other.weight_version}; ask again after the push"
                )
        return expected

    async def ask(self, message: protocol.Call) -> protocol.FromWorker:
        """Send a call of the lifecycle to all workers that are members now. Returns the status of the one that is least
        ready. Raises the first error of a worker that is not lost.
        """
        await self._pool.start()
        self._pool.follow()

        def ask(link: Link) -> Awaitable[protocol.FromWorker]:
            return link.client.ask(message.model_copy(update={"id": protocol.new_id()}))

        found = await self._ask_each(ask)
        await asyncio.gather(*map(self._pool.look, self._pool.links))
        return all_statuses([reply for reply in found.values() if isinstance(reply, protocol.Status)])

    async def close(self) -> None:
        """Disconnect. Calls that still wait raise TruerollError; their requests go on."""
        self._requests.close()
        await self._pool.close()

    async def _ask_each(self, call: Callable[[Link], Awaitable[T]], are_serving: bool = False) -> dict[str, T]:
        """What each worker that answers says, or only those that serve. Raises the first other error; WorkerLostError
        if none answers.
        """
        await self._pool.start()
        found: dict[str, T] = {}
        while not found:
            links = [link for link in self._pool.links if not link.is_silent]
            if are_serving:
                links = [link for link in links if link.member.standing == "serving"]
            found = await _ask_these(links, call)
            if not found and not any(link.is_gone for link in links):  # otherwise others have taken their places
                raise WorkerLostError("fleet: expected a worker that answers, found none; see their logs")
        return found


class FleetClient(RolloutClient):
    """A client of all workers of a fleet for code without an event loop: `AsyncFleetClient` with the calls of
    `RolloutClient`. For the arguments see `AsyncFleetClient`.
    """

    def __init__(
        self,
        fleet: FleetArg,
        timeout: float = 30.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
        *,
        max_staleness: int = 0,
        mixed_kinds: bool = False,
        straggler_seconds: float | None = 30.0,
        patience: float = 600.0,
    ) -> None:
        settings: dict[str, Any] = dict(max_staleness=max_staleness, mixed_kinds=mixed_kinds)
        settings |= dict(straggler_seconds=straggler_seconds, patience=patience)
        self._fleet = AsyncFleetClient(fleet, timeout, server_public_key, client_key, **settings)
        self._begin(self._fleet)

    def healths(self) -> dict[str, protocol.Health]:
        """See `AsyncFleetClient.healths`."""
        return self._wait(self._fleet.healths())

    def all_stats(self) -> dict[str, protocol.Stats]:
        """See `AsyncFleetClient.all_stats`."""
        return self._wait(self._fleet.all_stats())

    @property
    def num_asked_twice(self) -> int:
        """Requests that a second worker was asked for, as they were far behind."""
        return self._fleet.num_asked_twice


def client_for(
    target: str, timeout: float, keys: tuple[Key | None, Key | None], *, while_connected: bool = False
) -> AsyncRolloutClient:
    """The client of a worker by its address, or of a fleet by its file or by several addresses."""
    kind = AsyncFleetClient if is_fleet(target) else AsyncRolloutClient
    return kind(target, timeout, *keys, while_connected=while_connected)


def _put(replies: asyncio.Queue[tuple[int, Reply]], position: int) -> Callable[[Reply], None]:
    return lambda reply: replies.put_nowait((position, reply))


async def _ask_these(links: list[Link], call: Callable[[Link], Awaitable[T]]) -> dict[str, T]:
    replies = await asyncio.gather(*(call(link) for link in links), return_exceptions=True)
    found: dict[str, T] = {}
    for link, reply in zip(links, replies, strict=True):
        if not isinstance(reply, BaseException):
            found[link.member.name] = reply
        elif not (link.is_gone or isinstance(reply, WorkerLostError | UnavailableError)):  # the latter: it ends
            raise reply
    return found
