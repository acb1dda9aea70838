"""The workers that a publisher pushes to: one client each, all on one event loop on a thread of its own.

Owns: the clients, the thread, and who did not answer last. Promises: every call ends within its timeout, or as soon as
the worker is no member of its fleet any more, and the first worker that fails ends a call to all of them with an error
that names it, but a greeting, which waits for all.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from trueroll.errors import ConfigError, DeadlineError, TruerollError, WorkerLostError

from ...weight_sync.trainer.targets import WorkerFailure
from .. import protocol
from ..client.client import AsyncRolloutClient, Key
from ..client.loop_thread import LoopThread
from ..client.membership import Membership

ANSWER_SECONDS = 5.0
"""How long a worker may take to answer a greeting: it does so at once, also while it computes, unless it is stopped."""
LOST_SECONDS = 1.0
"""The same for one that did not answer the greeting before."""
FOLLOW_SECONDS = 0.1
"""Between two looks at who is a member."""

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
        """Wait no longer for those that are members no more: their fleet sees them end, which here nobody does."""
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
