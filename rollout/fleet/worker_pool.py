"""The workers of a fleet, as a client sees them: the members, their health, and the members that are eligible for
groups.

Owns: the task that checks the list of members and their health, and the decision about which workers may get groups.
Does not own: requests, or the choice of a worker for a group (`Dispatch`).

Guarantees:

- Groups are placed only on workers that answer health checks and are of one kind. A worker gets groups only if its
  weights are at most `max_staleness` versions older than the newest weights.
- If a worker is lost or is no longer a member, its pending requests are notified at once.
- Everything runs on the event loop of the first call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence

from trueroll.errors import TruerollError, UnavailableError, WorkerFailedError, WorkerLostError

from ..client.client import AsyncRolloutClient
from ..client.connection import wrong_process
from ..client.membership import Membership
from .dispatch import Dispatch
from .kinds import Kinds
from .links import Link, Links
from .placement import Placed

FOLLOW_SECONDS = 0.1
"""Interval between reads of the member list."""
LOOK_SECONDS = 1.0
"""Interval between health checks of all workers."""
ANSWER_SECONDS = 5.0
"""A worker that does not answer a health check for this long gets no requests until it answers again."""

log = logging.getLogger(__name__)


class WorkerPool:
    """The workers of a fleet.

    `make_client`: creates a client for an address. `max_staleness`: a worker is eligible only if its weights are at
    most this many versions older than the newest weights. `mixed_kinds`: whether workers of different kinds are
    accepted. `links`: all members. `dispatch`: the eligible workers.
    """

    def __init__(
        self,
        membership: Membership,
        make_client: Callable[[str], AsyncRolloutClient],
        max_staleness: int,
        mixed_kinds: bool,
    ) -> None:
        self.links = Links(membership, make_client)
        self.dispatch = Dispatch()
        self._kinds = Kinds(mixed_kinds)
        self._max_staleness = max_staleness
        self._watch: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Prepare for a call. The first call to `start` waits until the health of all members has been checked. Raise
        ConfigError if workers are of different kinds.
        """
        self._check_home()
        if self._meeting is None:
            self._home = os.getpid(), asyncio.get_running_loop()
            self.follow()
            self._watch = asyncio.create_task(self._keep_looking())
            self._meeting = asyncio.create_task(self._meet())
        await asyncio.shield(
            self._meeting
        )  # several calls may wait for this task, so a cancelled call must not cancel it
        self._check_home()
        self._kinds.check(self.links)

    async def _meet(self) -> None:
        await self._look_at_all()
        self._kinds.forget()  # the fleet's kind is the kind of the first listed member, not of the first to answer
        self._sort()

    async def close(self) -> None:
        """Disconnect from all workers. Later calls raise TruerollError."""
        if self._is_closed:
            return
        self._check_home()
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.links.close()
        self._sort()
        if self._meeting is not None:
            await asyncio.gather(self._meeting, return_exceptions=True)

    async def place(
        self, prompt: Sequence[int], cost: float, avoid: Callable[[], Collection[str]], deadline: float, patience: float
    ) -> tuple[Link, Placed]:
        """Choose a worker with `Dispatch.place`. If no worker is eligible, wait until a worker becomes eligible. Raise
        WorkerLostError if no worker becomes eligible by `deadline`, a time in monotonic seconds. `avoid`: function that
        returns the keys of workers that must not be chosen now. `patience`: length of the whole wait in seconds, which
        the error text states.
        """
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                while (found := self.dispatch.place(prompt, cost, avoid())) is None:
                    await self.dispatch.change()
                return found
        except TimeoutError:
            told = ", ".join(f"{link.member.name} ({self._word(link)})" for link in self.links) or "no member"
            raise WorkerLostError(
                f"fleet: no worker could take the request within {patience:g} s: {told}; see the workers' logs"
            ) from None

    async def look(self, link: Link) -> None:
        """Check the health of a worker, and update which workers are eligible."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                health = await link.client.health()
        except (TruerollError, TimeoutError):
            link.is_silent = True
        else:
            if link.health is None or link.health.instance != health.instance:
                log.info("worker %s answers: %s", link.member.name, health.instance)
            had_refused = link.has_refused
            link.note(health)
            if had_refused:
                self.dispatch.wake()
        self._sort()

    async def note_error(self, link: Link, error: TruerollError) -> None:
        """Update whether a worker is eligible, after a request to the worker has failed. A lost worker gets no requests
        until it answers again. A worker that refuses requests because of its state gets no requests until it reports
        that it is ready.
        """
        if isinstance(error, WorkerLostError | WorkerFailedError):
            link.is_silent = True
        elif isinstance(error, UnavailableError):
            await self.look(link)  # to find out whether the worker is exiting
            link.is_refusing = True
        self._sort()

    def follow(self) -> list[Link]:
        """Sync with the membership. Return the newly joined workers, which the caller must health-check."""
        new, has_changed = self.links.follow()
        if has_changed:
            self._sort()
        return new

    async def _keep_looking(self) -> None:
        looked, version = time.monotonic(), self.dispatch.version
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                new = self.follow()
                refusing = [link for link in self.links if link.is_refusing and not link.is_silent]
                await asyncio.gather(*map(self.look, {*new, *refusing}))
                is_new = version != self.dispatch.version  # a push soon reaches all workers, so check all again
                if is_new or time.monotonic() - looked >= LOOK_SECONDS:
                    version = self.dispatch.version
                    await self._look_at_all()
                    looked = time.monotonic()
            except TruerollError as error:
                log.warning("fleet: %s", error)

    async def _look_at_all(self) -> None:
        await asyncio.gather(*map(self.look, self.links))

    def _sort(self) -> None:
        """Update the eligible workers."""
        self._kinds.follow(self.links)
        able = [link for link in self.links if link.is_able and not self._kinds.is_odd(link)]
        newest = max((link.version for link in able), default=0)
        fresh = [link for link in able if link.version >= newest - self._max_staleness]
        taking = [link for link in fresh if not link.is_refusing]
        self.dispatch.open([link for link in taking if link.is_ready] or taking, newest)

    def _word(self, link: Link) -> str:
        return "of another kind" if self._kinds.is_odd(link) else link.word

    def _check_home(self) -> None:
        if self._is_closed:
            raise TruerollError("client: the client is closed; make a new one")
        if self._home is None:
            return
        pid, loop = self._home
        if error := wrong_process(pid):
            raise error
        if asyncio.get_running_loop() is not loop:
            raise TruerollError(
                "client: this call runs in another event loop than the first call; make a client in each event loop, "
                "or use FleetClient"
            )
