"""What a fleet's client knows about each worker: the worker's entry in the list of members, a separate client for this
worker, and the worker's last health report.

Owns: the client of each worker, until the client is disconnected. Does not own: when a worker's health is checked, or
whether a worker gets requests (`WorkerPool`).
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
    """A worker, its client, and its last health report.

    - `health`: the last report; None before the first report
    - `is_silent`: the worker did not answer the last health check or request
    - `is_gone`: the worker is no longer a member, and its client is closed
    - `is_refusing`: the worker refused a request because of the worker's state, and has not reported since then that it
      is ready
    - `num_looks`: number of answered health checks
    - `has_refused`: the worker has refused a request since the last health check, although the worker's state permits
      requests
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
        """Identifier of the worker's process, built from name, incarnation and address."""
        return self.member.key

    @property
    def version(self) -> int:
        """The weight version in the last health report; 0 before the first report."""
        return (self.health and self.health.weight_version) or 0

    @property
    def is_able(self) -> bool:
        """Return whether the worker answers, has the fleet's weights, and can take requests now or later."""
        is_there = self.member.standing == "serving" and not self.is_silent
        return is_there and self.health is not None and self.health.state in _READY | _HELD

    @property
    def is_ready(self) -> bool:
        """Return whether the worker can begin requests in its current state."""
        return self.health is not None and self.health.state in _READY

    @property
    def is_ending(self) -> bool:
        """Return whether the worker is gone or about to exit. A worker that is about to exit may abort samples that no
        caller has aborted.
        """
        return self.is_gone or self.is_silent or (self.health is not None and self.health.state in _ENDING)

    @property
    def word(self) -> str:
        """A description of the worker's condition, for error texts."""
        if self.is_silent or self.health is None:
            return "does not answer"
        if self.member.standing != "serving":
            return self.member.standing
        refuses = ", refuses requests" if self.is_refusing else ""
        return f"{self.health.state}, version {self.health.weight_version}{refuses}"

    def note(self, health: Health) -> None:
        """Record a health report."""
        self.health, self.is_silent = health, False
        self.is_refusing = self.is_refusing and health.state != "ready"
        self.num_looks += 1
        self.has_refused = False


class Links:
    """The links of all members. `make_client`: creates a client for an address."""

    def __init__(self, membership: Membership, make_client: Callable[[str], AsyncRolloutClient]) -> None:
        self._membership = membership
        self._make_client = make_client
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Link]:
        return iter([*self._links.values()])

    def follow(self) -> tuple[list[Link], bool]:
        """Sync with the membership. Return the newly joined workers, which the caller must health-check, and whether
        anything else has changed.
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
        """Disconnect from all workers."""
        for link in self:
            self._drop(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _drop(self, link: Link) -> None:
        link.is_gone = True
        del self._links[link.member.name]
        task = asyncio.create_task(link.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
