"""The workers of a fleet as a client sees them: who is there, what each told last, and which of them gets a group.

Owns: a client for each member, the task that looks at them, the placement. Does not own: requests, nor the workers.
Promises: a group goes only to workers that answer, of one kind, whose weights are as new as the newest, up to the
staleness that is allowed; a worker that is lost or no member any more is told to those that asked it, as soon as it is
known. All of it happens on the event loop of the first call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trueroll.errors import ConfigError, TruerollError, UnavailableError, WorkerFailedError, WorkerLostError

from ..client.client import AsyncRolloutClient
from ..client.loop_thread import wrong_process
from ..client.membership import Member, Membership
from ..protocol import Health, State
from .placement import Placed, Placement

FOLLOW_SECONDS = 0.1
"""Between two looks at who is a member."""
LOOK_SECONDS = 1.0
"""Between two looks at the health of each."""
ANSWER_SECONDS = 5.0
"""A worker that does not answer for so long gets no more until it does."""
KIND = ("architecture", "vocab_size", "backend", "isa", "dtype", "torch_version")
"""Of `Health.engine`: what the bits of a sample depend on, beside weights and request."""
_PACES = 64
_FEWEST_PACES = 4
_READY: frozenset[State] = frozenset({"ready", "updating"})
_HELD: frozenset[State] = frozenset({"paused", "asleep", "waking", "dirty"})

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Link:
    """A worker, its client, and what it told last. `health`: None before it answered. `is_silent`: it was asked, and
    did not answer. `is_gone`: it is no member any more, and its client is closed. `is_odd`: of another kind.
    `is_refusing`: it refused a request because of its state, and has not reported since that it is ready. `num_looks`:
    how often it was asked and answered; `has_refused`: it has refused a request since, though its state allowed it.
    """

    member: Member
    client: AsyncRolloutClient
    health: Health | None = None
    is_silent: bool = False
    is_gone: bool = False
    is_odd: bool = False
    is_refusing: bool = False
    num_looks: int = 0
    has_refused: bool = False

    @property
    def key(self) -> str:
        """Of its process, among those that have been there."""
        return self.member.key

    @property
    def kind(self) -> tuple[Any, ...] | None:
        engine = self.health and self.health.engine
        return None if not engine else tuple(engine.get(name) for name in KIND)


class WorkerPool:
    """`make_client` makes the client of an address. `max_staleness`: by how many versions the weights of a worker that
    gets a group may be older than the newest. `mixed_kinds`: take workers of any kind.
    """

    def __init__(
        self,
        membership: Membership,
        make_client: Callable[[str], AsyncRolloutClient],
        max_staleness: int,
        mixed_kinds: bool,
    ) -> None:
        self._membership = membership
        self._make_client = make_client
        self._max_staleness = max_staleness
        self._mixed_kinds = mixed_kinds
        self._links: dict[str, Link] = {}
        self._placement = Placement()
        self._open: dict[str, Link] = {}
        self._kind: tuple[Any, ...] | None = None
        self._newest: int | None = None
        self._must_look = False
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._is_closed = False
        self._paces: deque[float] = deque(maxlen=_PACES)

    @property
    def links(self) -> list[Link]:
        """All members."""
        return list(self._links.values())

    @property
    def open_links(self) -> list[Link]:
        """Those that may get a group."""
        return list(self._open.values())

    @property
    def slowest_pace(self) -> float | None:
        """Seconds for a unit of cost, of the slowest of the groups that were finished last; None of too few."""
        return max(self._paces) if len(self._paces) >= _FEWEST_PACES else None

    async def start(self) -> None:
        """Before each call: all members have been met. Raise ConfigError if they differ in kind."""
        self._check_home()
        if self._meeting is None:
            self._home = os.getpid(), asyncio.get_running_loop()
            self.follow()
            self._watch = asyncio.create_task(self._keep_looking())
            self._meeting = asyncio.create_task(self._meet())
        await asyncio.shield(self._meeting)  # all calls wait for it, whichever of them is given up
        self._check_home()
        if not self._mixed_kinds:
            self._check_kinds()

    async def _meet(self) -> None:
        await self._look_at_all()
        self._kind = None  # that of the first member, not of the first one that answered
        self._sort()

    async def close(self) -> None:
        """Disconnect from all, for good."""
        if self._is_closed:
            return
        self._check_home()
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for link in self.links:
            self._drop(link)
        last = [*self._closing] if self._meeting is None else [*self._closing, self._meeting]
        await asyncio.gather(*last, return_exceptions=True)

    async def place(
        self, prompt: Sequence[int], cost: float, avoid: Callable[[], Collection[str]], deadline: float, patience: float
    ) -> tuple[Link, Placed]:
        """Choose a worker for a group whose prompt has these `beginnings`, none of the keys in `avoid`.

        Wait until there is one. Raise WorkerLostError at `deadline` (monotonic seconds), the end of `patience` seconds.
        """
        while (found := self.try_place(prompt, cost, avoid())) is None:
            await self._change(deadline, patience)
        return found

    def try_place(self, prompt: Sequence[int], cost: float, avoid: Collection[str]) -> tuple[Link, Placed] | None:
        """Choose a worker as `place` does; None if none can be asked now."""
        placed = self._placement.place(prompt, time.monotonic(), cost, avoid)
        return None if placed is None else (self._open[placed.worker], placed)

    async def _change(self, deadline: float, patience: float) -> None:
        """Wait until others may be asked than now, or one that refused a request has told how it is. Raise
        WorkerLostError at the deadline.
        """
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            told = ", ".join(f"{link.member.name} ({self._word(link)})" for link in self.links) or "no member"
            raise WorkerLostError(
                f"fleet: expected a worker that may be asked within {patience} s, found {told}; see their logs"
            ) from None

    def finish(self, placed: Placed, seconds: float) -> None:
        """A worker has finished a group that it had for so long."""
        self._placement.finish(placed, time.monotonic())
        self._paces.append(seconds / placed.cost)

    def withdraw(self, placed: Placed) -> None:
        """A worker has a group no longer that it did not finish."""
        self._placement.withdraw(placed)

    async def look(self, link: Link) -> None:
        """Ask a worker how it is."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                health = await link.client.health()
        except (TruerollError, TimeoutError):
            link.is_silent = True
        else:
            if link.health is None or link.health.instance != health.instance:
                log.info("worker %s answers: %s", link.member.name, health.instance)
            link.health, link.is_silent = health, False
            link.is_refusing = link.is_refusing and health.state != "ready"
            link.num_looks += 1
            if link.has_refused:
                link.has_refused = False
                self._tell_waiting()
        self._sort()

    def looks(self) -> dict[str, int]:
        """How often each worker that may be asked now was looked at, by its key."""
        return {key: link.num_looks for key, link in self._open.items()}

    async def note_error(self, link: Link, error: TruerollError) -> None:
        """See what an error tells of the worker that a request met it at. One that is lost is not asked before it has
        answered again; one that refuses requests because of its state, not before it reports that it is ready.
        """
        if isinstance(error, WorkerLostError | WorkerFailedError):
            link.is_silent = True
        elif isinstance(error, UnavailableError):
            await self.look(link)  # one that ends is not asked again
            link.is_refusing = True
        self._sort()

    async def is_ending(self, link: Link) -> bool:
        """Whether a worker that ended a sample by itself is about to exit, so that nobody meant the sample to end."""
        await self.look(link)
        state = link.health and link.health.state
        return link.is_gone or link.is_silent or state in ("draining", "failed")

    async def _keep_looking(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                new = self.follow()
                refusing = [link for link in self.links if link.is_refusing and not link.is_silent]
                await asyncio.gather(*map(self.look, {*new, *refusing}))
                if self._must_look or time.monotonic() - looked >= LOOK_SECONDS:
                    self._must_look = False
                    await self._look_at_all()
                    looked = time.monotonic()
            except TruerollError as error:
                log.warning("fleet: %s", error)

    async def _look_at_all(self) -> None:
        await asyncio.gather(*map(self.look, self.links))

    def follow(self) -> list[Link]:
        """Take note of who came and who went. Returns who came, who is to be looked at."""
        members = {member.name: member for member in self._membership.members()}
        for name, link in list(self._links.items()):
            if name not in members or members[name].key != link.key:
                self._drop(link)
            elif members[name] != link.member:
                link.member = members[name]
                self._sort()
        new = [member for name, member in members.items() if name not in self._links]
        for member in new:
            self._links[member.name] = Link(member, self._make_client(member.address))
        return [self._links[member.name] for member in new]

    def _drop(self, link: Link) -> None:
        link.is_gone = True
        self._links.pop(link.member.name, None)
        self._sort()
        task = asyncio.create_task(link.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _sort(self) -> None:
        """Find out who may be asked, and tell those who wait if that is others than before."""
        if not self._mixed_kinds:
            self._find_odd()
        serving = [link for link in self.links if link.member.standing == "serving"]
        answering = [link for link in serving if link.health and not link.is_silent and not link.is_odd]
        able = [link for link in answering if link.health and link.health.state in _READY | _HELD]
        newest = max(map(_version, able), default=0)
        fresh = [link for link in able if _version(link) >= newest - self._max_staleness]
        taking = [link for link in fresh if not link.is_refusing]
        ready = [link for link in taking if link.health and link.health.state in _READY]
        chosen = {link.key: link for link in ready or taking}
        self._note_version(newest)
        if chosen.keys() == self._open.keys():
            return
        for key in self._open.keys() - chosen.keys():
            self._placement.remove(key)
        for key in chosen.keys() - self._open.keys():
            self._placement.add(key)
        self._open = chosen
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_version(self, newest: int) -> None:
        """After a push, what the caches hold is of no use, and the other workers have the version as well, or soon."""
        if self._newest == newest:
            return
        self._newest = newest
        self._placement.forget()
        self._must_look = True

    def _find_odd(self) -> None:
        """Of a fleet that is running the first kind counts; whoever joins with another one is left out."""
        kinds = [link.kind for link in self.links if link.kind is not None]
        if self._kind not in kinds and kinds:
            self._kind = kinds[0]
        for link in self.links:
            was_odd, link.is_odd = link.is_odd, link.kind not in (None, self._kind)
            if link.is_odd and not was_odd:
                log.error("fleet: worker %s is left out: %s", link.member.name, self._difference(link))

    def _check_kinds(self) -> None:
        odd = [link for link in self.links if link.is_odd]
        if odd:
            raise ConfigError(
                f"fleet: worker {odd[0].member.name}: {self._difference(odd[0])}; the same request would give other "
                "bits there: leave it out, or allow it with mixed_kinds=True"
            )

    def _difference(self, link: Link) -> str:
        pairs = zip(KIND, self._kind or (), link.kind or (), strict=False)
        expected, found = zip(*((f"{n} {a}", f"{n} {b}") for n, a, b in pairs if a != b), strict=True)
        return f"expected {', '.join(expected)} as of the others, found {', '.join(found)}"

    def _word(self, link: Link) -> str:
        if link.is_odd:
            return "of another kind"
        if link.is_silent or link.health is None:
            return "does not answer"
        if link.member.standing != "serving":
            return link.member.standing
        refuses = ", refuses requests" if link.is_refusing else ""
        return f"{link.health.state}, version {link.health.weight_version}{refuses}"

    def _check_home(self) -> None:
        if self._is_closed:
            raise TruerollError("client: closed; make a new one")
        if self._home is None:
            return
        pid, loop = self._home
        if error := wrong_process(pid):
            raise error
        if asyncio.get_running_loop() is not loop:
            raise TruerollError(
                "client: expected a call in the event loop of its first one, found another loop; make a client in "
                "each, or use FleetClient"
            )


def _version(link: Link) -> int:
    return (link.health and link.health.weight_version) or 0
