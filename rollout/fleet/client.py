"""The clients of a fleet: the calls of `RolloutClient`, answered by many workers.

Owns: the meaning of each call for many workers. Does not own: the list of workers (`WorkerPool`), nor the execution of
a request (`FleetRequest`). Imports neither torch nor ray.
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

    All samples of a group go to one worker, preferably one that has the beginning of the prompt in its prefix cache. If
    a worker is lost, its unfinished samples are requested from another worker: each sample is returned once, with the
    same tokens. Calls like `pause` and `sleep` go to all workers. `health` and `stats` describe all workers together,
    `healths` and `all_stats` each worker.

    - `fleet`: a `Fleet`, the file that a fleet writes, or the addresses of workers
    - `timeout`, `server_public_key`, `client_key`: as for `RolloutClient`, for each worker
    - `max_staleness`: maximum difference between the weight versions of a group's tokens, and between the newest
      weights and the weights of a worker that gets requests. A group that exceeds it because of a push is restarted;
      `stream` raises StaleWeightsError instead if it has already yielded a part of the group.
    - `mixed_kinds`: accept workers that differ in architecture, vocabulary, backend, instruction set, dtype or version
      of torch, so that the bits of a sample depend on its worker. False raises ConfigError for such workers.
    - `straggler_seconds`: a request is sent to a second worker as well if it takes longer than this, and more than
      three times as long for its size as the slowest recent request. None disables that.
    - `patience`: seconds to wait while no worker can take a request; then the call raises WorkerLostError
    - `while_connected`: see `AsyncRolloutClient`
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
            text = f"max_staleness: must be an integer of at least 0 (got {brief(max_staleness)})"
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
        """Number of stragglers that were sent to a second worker as well."""
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
        """See `AsyncRolloutClient.abort`. If an id is not of a request of this client, all workers are asked for it."""
        await self._pool.start()
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return sum(await asyncio.gather(*(self._abort_one(id, index, missing_ok) for id in ids)))

    async def _abort_one(self, id: str, index: int | None, missing_ok: bool) -> int:
        # Only to raise InvalidRequestError for an id or an index that no worker would accept.
        message_of(protocol.Abort, id=protocol.new_id(), request_id=id, index=index)
        if request := self._requests.get(id):
            ended = await request.abort(index)
        else:
            ended = sum((await self._ask_each(lambda link: link.client.abort(id, index, missing_ok=True))).values())
        if not ended and not missing_ok:
            which = f"request {id!r}" if index is None else f"sample {index} of request {id!r}"
            raise UnknownRequestError(f"abort: {which} is not running on any worker")
        return ended

    async def abort_all(self) -> int:
        """Abort all requests of this client. Return the number of samples that this ended."""
        return await self.abort(self._requests.ids, missing_ok=True)

    async def health(self) -> FleetHealth:
        """Return the combined health of the workers that answer.

        Counts are summed. `state`: state of the worker that is least ready. `weight_version`: the oldest version.
        `instance`: the number of workers. `troubles`: for each joining worker, why it could not get the weights.
        """
        healths = list((await self.healths()).values())
        return all_healths(healths, [link.member.told for link in self._pool.links if link.member.trouble])

    async def stats(self) -> protocol.Stats:
        """Return the lifetime counters, summed over all workers that answer."""
        return all_stats(list((await self.all_stats()).values()))

    async def healths(self) -> dict[str, protocol.Health]:
        """Return the health of each worker by its name, without the workers that do not answer."""
        return await self._ask_each(lambda link: link.client.health())

    async def all_stats(self) -> dict[str, protocol.Stats]:
        """Return the lifetime counters of each worker by its name, without the workers that do not answer."""
        return await self._ask_each(lambda link: link.client.stats())

    async def weight_checksums(self) -> protocol.Checksums:
        """Return the checksums of the weights, which are the same on all serving workers. Raise IllegalStateError if
        they are not, which can happen during a push.
        """
        found = await self._ask_each(lambda link: link.client.weight_checksums(), are_serving=True)
        (first, expected), *others = found.items()
        for name, other in others:
            if other.checksums != expected.checksums:
                differing = [key for key, value in expected.checksums.items() if other.checksums.get(key) != value]
                raise IllegalStateError(
                    f"fleet: workers {first} (version {expected.weight_version}) and {name} (version "
                    f"{other.weight_version}) differ in the weights {list_names(differing)}; try again after the push"
                )
        return expected

    async def ask(self, message: protocol.Call) -> protocol.FromWorker:
        """Send a lifecycle call to all current members. Return the combined status: the state of the worker that is
        least ready, and the oldest weight version. Raise the first error of a worker that is not lost.
        """
        await self._pool.start()
        self._pool.follow()

        def ask(link: Link) -> Awaitable[protocol.FromWorker]:
            return link.client.ask(message.model_copy(update={"id": protocol.new_id()}))

        found = await self._ask_each(ask)
        await asyncio.gather(*map(self._pool.look, self._pool.links))
        return all_statuses([reply for reply in found.values() if isinstance(reply, protocol.Status)])

    async def close(self) -> None:
        """Disconnect from all workers. Pending calls raise TruerollError; their requests keep running."""
        self._requests.close()
        await self._pool.close()

    async def _ask_each(self, call: Callable[[Link], Awaitable[T]], are_serving: bool = False) -> dict[str, T]:
        """Call each worker. Return the replies by name, without the workers that do not answer. `are_serving`: call
        only serving workers. Raise WorkerLostError if no worker answers. Raise the first error of a worker that is
        neither lost nor exiting.
        """
        await self._pool.start()
        found: dict[str, T] = {}
        while not found:
            links = [link for link in self._pool.links if not link.is_silent]
            if are_serving:
                links = [link for link in links if link.member.standing == "serving"]
            found = await _ask_these(links, call)
            if not found and not any(link.is_gone for link in links):  # otherwise try the replacements of gone workers
                raise WorkerLostError("fleet: no worker answers; see the workers' logs")
        return found


class FleetClient(RolloutClient):
    """A client of all workers of a fleet for code without an event loop, with the calls of `RolloutClient`. For the
    arguments see `AsyncFleetClient`.
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
        """See `AsyncFleetClient.num_asked_twice`."""
        return self._fleet.num_asked_twice


def client_for(
    target: str, timeout: float, keys: tuple[Key | None, Key | None], *, while_connected: bool = False
) -> AsyncRolloutClient:
    """Return a client of a worker, given its address, or of a fleet, given its file or several addresses."""
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
        elif not (link.is_gone or isinstance(reply, WorkerLostError | UnavailableError)):  # Unavailable means exiting
            raise reply
    return found
