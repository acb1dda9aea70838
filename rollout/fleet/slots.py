"""The places of a fleet, the worker that has each now, and what clients and publishers are told of them.

Owns: who is a member, and the file that says it. Does not own what becomes of a worker (`Keeper`), nor how many places
there are (`Scaler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from trueroll.errors import TruerollError

from ..client.membership import Member, MembersFile, Standing
from .joining import Joining
from .metrics import WorkerReport
from .running_worker import RunningWorker


@dataclass(eq=False)
class Slot:
    """A place in the fleet, and the worker that has it now. `first_error`: what kept its first worker from running,
    until another one runs. `waits_since`: the number of the latest call of `scale` after which nothing was found to
    have the weights that its worker needs.
    """

    name: str
    worker: RunningWorker | None = None
    is_leaving: bool = False
    num_starts: int = 0
    first_error: TruerollError | None = None
    waits_since: int | None = None
    joining: Joining = field(init=False)

    def __post_init__(self) -> None:
        self.joining = Joining(self.name)

    @property
    def member(self) -> Member | None:
        """What clients are told of its worker."""
        return None if (worker := self.worker) is None else worker.member

    @property
    def is_serving(self) -> bool:
        """Whether clients may ask its worker."""
        return (worker := self.worker) is not None and worker.is_serving

    @property
    def report(self) -> WorkerReport:
        """What is known of its worker."""
        restarts, num_failures = max(0, self.num_starts - 1), self.joining.num_failures
        if (worker := self.worker) is None:
            return WorkerReport(None, None, None, restarts, num_failures)
        standing = worker.member and worker.member.standing
        return WorkerReport(standing, worker.health, worker.stats, restarts, num_failures)


class Slots:
    """`file`: is kept up to date with who is a member. `num_scales`: how often `scale` was called."""

    def __init__(self, file: MembersFile | None) -> None:
        self.num_scales = 0
        self._slots: dict[str, Slot] = {}
        self._members: tuple[Member, ...] = ()
        self._file = file

    def __iter__(self) -> Iterator[Slot]:
        return iter([*self._slots.values()])

    def members(self) -> Sequence[Member]:
        """Who is there now, also those that join or leave."""
        return self._members

    @property
    def staying(self) -> list[Slot]:
        """Those that are not to leave."""
        return [slot for slot in self if not slot.is_leaving]

    @property
    def serving(self) -> list[RunningWorker]:
        """The workers that clients may ask."""
        return [slot.worker for slot in self if slot.worker is not None and slot.worker.is_serving]

    @property
    def are_asleep(self) -> bool:
        """Whether all that serve are: the memory of those that were lost is then left to the trainer as well."""
        states = [worker.health.state for worker in self.serving if worker.health is not None]
        return bool(states) and all(state == "asleep" for state in states)

    def newest(self, but: RunningWorker) -> RunningWorker | None:
        """Of those that serve, the worker from which another one gets the weights: the newest ones, and of workers with
        the same one that can write them now.
        """
        peers = [worker for worker in self.serving if worker is not but and worker.health]
        return max(peers, key=_readiness_to_give, default=None)

    def are_ahead_of(self, worker: RunningWorker) -> bool:
        """Whether the others serve newer weights, and no push is under way that may just have reached them."""
        healths = [other.health for other in self.serving if other.health is not None]
        if worker.health is None or any(health.push or health.state == "updating" for health in healths):
            return False
        newest = max((health.weight_version or 0 for health in healths), default=0)
        return (worker.health.weight_version or 0) < newest

    def add(self) -> Slot:
        """A place for one more worker."""
        slot = Slot(next(name for i in count() if (name := f"worker-{i}") not in self._slots))
        self._slots[slot.name] = slot
        return slot

    def remove(self, slot: Slot) -> None:
        """A place that is empty."""
        del self._slots[slot.name]
        self.publish()

    def stand(self, slot: Slot, standing: Standing) -> None:
        """Tell what becomes of the worker in a slot, and what troubles it."""
        if slot.worker is not None and slot.worker.member is not None:
            slot.worker.member = replace(slot.worker.member, standing=standing, trouble=slot.joining.trouble)
            self.publish()

    def publish(self) -> None:
        """Tell who is there."""
        self._members = tuple(slot.member for slot in self if slot.member is not None)
        if self._file is not None:
            self._file.tell(self._members)

    def withdraw(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.remove()

    @property
    def is_stale(self) -> bool:
        """Whether the file could not be written."""
        return self._file is not None and self._file.is_stale


def _readiness_to_give(peer: RunningWorker) -> tuple[int, bool]:
    assert peer.health is not None
    return peer.health.weight_version or 0, peer.health.state in ("ready", "paused")
