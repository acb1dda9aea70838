"""The workers of a fleet as a client knows them: who is a member, a client for each, and what each told last.

Owns: the clients of the workers, until they are disconnected. Does not own when a worker is looked at, nor whether it
is asked (`WorkerPool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..client.client import AsyncRolloutClient
from ..client.membership import Member, Membership
from ..protocol import Health, State

_READY: frozenset[State] = frozenset({"ready", "updating"})
_HELD: frozenset[State] = frozenset({"paused", "asleep", "waking", "dirty"})
_ENDING: frozenset[State] = frozenset({"draining", "failed"})


@dataclass(eq=False)
class Link:
    """A worker, its client, and what it told last. `health`: None before it answered. `is_silent`: it was asked, and
    did not answer. `is_gone`: it is no member any more, and its client is closed. `is_refusing`: it refused a request
    because of its state, and has not reported since that it is ready. `num_looks`: how often it was asked and answered;
    `has_refused`: it has refused a request since, though its state allowed it.
    """

    member: Member
    client: AsyncRolloutClient
    health: Health | None = None
    is_silent: bool = False
    is_gone: bool = False
    is_refusing: bool = False
    num_looks: int = 0
    has_refused: bool = False

    @property
    def key(self) -> str:
        """Of its process, among those that have been there."""
        return self.member.key

    @property
    def version(self) -> int:
        """Of its weights, as it told last."""
        return (self.health and self.health.weight_version) or 0

    @property
    def is_able(self) -> bool:
        """Whether it answers, and has the fleet's weights and a state in which it takes requests, or will again."""
        is_there = self.member.standing == "serving" and not self.is_silent
        return is_there and self.health is not None and self.health.state in _READY | _HELD

    @property
    def is_ready(self) -> bool:
        """Whether its state lets it begin requests now."""
        return self.health is not None and self.health.state in _READY

    @property
    def is_ending(self) -> bool:
        """Whether it is about to exit, so that nobody meant a sample to end that it ended by itself."""
        return self.is_gone or self.is_silent or (self.health is not None and self.health.state in _ENDING)

    @property
    def word(self) -> str:
        """How it is, for an error."""
        if self.is_silent or self.health is None:
            return "does not answer"
        if self.member.standing != "serving":
            return self.member.standing
        refuses = ", refuses requests" if self.is_refusing else ""
        return f"{self.health.state}, version {self.health.weight_version}{refuses}"

    def note(self, health: Health) -> None:
        """It has answered."""
        self.health, self.is_silent = health, False
        self.is_refusing = self.is_refusing and health.state != "ready"
        self.num_looks += 1
        self.has_refused = False


class Links:
    """Those of all members. `make_client` makes the client of an address."""

    def __init__(self, membership: Membership, make_client: Callable[[str], AsyncRolloutClient]) -> None:
        self._membership = membership
        self._make_client = make_client
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Link]:
        return iter([*self._links.values()])

    def follow(self) -> tuple[list[Link], bool]:
        """Sync with the membership. Return newly joined workers, which the caller must look at, and whether there was
        any other change.
        """
        members = {member.name: member for member in self._membership.members()}
        has_changed = False
        for link in self:
            now = members.get(link.member.name)
            has_changed = has_changed or now != link.member
            if now is None or now.key != link.key:
                self._drop(link)
            else:
                link.member = now
        new = [
            Link(member, self._make_client(member.address))
            for name, member in members.items()
            if name not in self._links
        ]
        self._links |= {link.member.name: link for link in new}
        return new, has_changed

    async def close(self) -> None:
        """Disconnect from all."""
        for link in self:
            self._drop(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _drop(self, link: Link) -> None:
        link.is_gone = True
        del self._links[link.member.name]
        task = asyncio.create_task(link.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
