"""The slots of a fleet, their current workers, and the list of members for clients and publishers.

Owns: the list of members, and the file with this list. Does not own: what happens to a worker (`Keeper`), or the number
of slots (`Scaler`).
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
    """A slot for one worker of the fleet, with the current worker.

    `num_starts`: number of workers started so far. `first_error`: the error that kept the slot's first worker from
    running; None once a worker runs. If no copy of the weights is left, the worker waits for a push. `waits_since`: the
    value of `Slots.num_scales` at the last attempt to give the waiting worker its weights; None if the worker does not
    wait for a push.
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
        """The worker's entry in the list of members; None if there is no entry."""
        return None if (worker := self.worker) is None else worker.member

    @property
    def is_serving(self) -> bool:
        """Return whether clients may send requests to the worker."""
        return (worker := self.worker) is not None and worker.is_serving

    @property
    def report(self) -> WorkerReport:
        """A report of the worker's state, for metrics."""
        restarts, num_failures = max(0, self.num_starts - 1), self.joining.num_failures
        if (worker := self.worker) is None:
            return WorkerReport(None, None, None, restarts, num_failures)
        standing = worker.member and worker.member.standing
        return WorkerReport(standing, worker.health, worker.stats, restarts, num_failures)


class Slots:
    """All slots of a fleet. `file`: file to which the current members are written. `num_scales`: number of calls to
    `scale`.
    """

    def __init__(self, file: MembersFile | None) -> None:
        self.num_scales = 0
        self._slots: dict[str, Slot] = {}
        self._members: tuple[Member, ...] = ()
        self._file = file

    def __iter__(self) -> Iterator[Slot]:
        return iter([*self._slots.values()])

    def members(self) -> Sequence[Member]:
        """Return the current members, including joining and leaving workers."""
        return self._members

    @property
    def staying(self) -> list[Slot]:
        """The slots that are not being removed."""
        return [slot for slot in self if not slot.is_leaving]

    @property
    def serving(self) -> list[RunningWorker]:
        """The workers that clients may send requests to."""
        return [slot.worker for slot in self if slot.worker is not None and slot.worker.is_serving]

    @property
    def are_asleep(self) -> bool:
        """Return whether all serving workers are asleep. While all workers are asleep, lost workers are not replaced,
        so that the trainer can use the memory.
        """
        states = [worker.health.state for worker in self.serving if worker.health is not None]
        return bool(states) and all(state == "asleep" for state in states)

    def newest(self, but: RunningWorker) -> RunningWorker | None:
        """Return the serving worker from which the worker `but` should get its weights; None if no other worker serves.
        Prefer the worker with the newest weights; if several workers have the newest weights, prefer a worker that can
        write its weights now.
        """
        peers = [worker for worker in self.serving if worker is not but and worker.health]
        return max(peers, key=_readiness_to_give, default=None)

    def are_ahead_of(self, worker: RunningWorker) -> bool:
        """Return whether other workers serve newer weights than `worker`. Return False during a push, because the push
        may reach the other workers before this worker.
        """
        healths = [other.health for other in self.serving if other.health is not None]
        if worker.health is None or any(health.push or health.state == "updating" for health in healths):
            return False
        newest = max((health.weight_version or 0 for health in healths), default=0)
        return (worker.health.weight_version or 0) < newest

    def add(self) -> Slot:
        """Add a slot with a new name."""
        slot = Slot(next(name for i in count() if (name := f"worker-{i}") not in self._slots))
        self._slots[slot.name] = slot
        return slot

    def remove(self, slot: Slot) -> None:
        """Remove an empty slot."""
        del self._slots[slot.name]
        self.publish()

    def stand(self, slot: Slot, standing: Standing) -> None:
        """Set the `standing` of the worker in a slot. Publish the `standing` together with the error of the last
        hand-over.
        """
        if slot.worker is not None and slot.worker.member is not None:
            slot.worker.member = replace(slot.worker.member, standing=standing, trouble=slot.joining.trouble)
            self.publish()

    def publish(self) -> None:
        """Publish the list of members."""
        self._members = tuple(slot.member for slot in self if slot.member is not None)
        if self._file is not None:
            self._file.tell(self._members)

    def withdraw(self) -> None:
        """Remove the file with the list of members."""
        if self._file is not None:
            self._file.remove()

    @property
    def is_stale(self) -> bool:
        """Return whether the last attempt to write the list of members failed."""
        return self._file is not None and self._file.is_stale


def _readiness_to_give(peer: RunningWorker) -> tuple[int, bool]:
    assert peer.health is not None
    return peer.health.weight_version or 0, peer.health.state in ("ready", "paused")
