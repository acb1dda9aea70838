"""The slots of a fleet, without Ray: the published members, and which worker hands over its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from trueroll.rollout import protocol
from trueroll.rollout.client.membership import FleetFile, Member, MembersFile
from trueroll.rollout.fleet.running_worker import RunningWorker
from trueroll.rollout.fleet.slots import Slot, Slots


def slots_of(*workers: str, file: MembersFile | None = None) -> Slots:
    """Return a slot for each description of a worker. A description is a state and a weight version, such as `ready 3`.
    `push` follows during a push, and `joining` follows before the worker serves.
    """
    slots = Slots(file)
    for told in workers:
        run(slots.add(), told)
    slots.publish()
    return slots


def run(slot: Slot, told: str) -> None:
    state, version, *more = told.split()
    slot.worker = RunningWorker(cast(Any, None), Path(), cast(Any, None), (1, 2))
    slot.worker.member = Member(slot.name, f"ipc:///{slot.name}", "", "joining" if "joining" in more else "serving")
    push = "id" if "push" in more else None
    slot.worker.health = protocol.Health.model_construct(state=state, weight_version=int(version), push=push)  # type: ignore[arg-type]


def workers(slots: Slots) -> list[RunningWorker]:
    return [slot.worker for slot in slots if slot.worker is not None]


@pytest.mark.parametrize(
    ("told", "giver"),
    [
        (["ready 3"], None),
        (["ready 3", "ready 3"], 1),
        (["ready 3", "ready 3 joining"], None),
        (["ready 3", "ready 4", "ready 5"], 2),
        (["ready 3", "asleep 5", "ready 4"], 1),  # the newest weights win, even if the worker cannot write them now
        (["ready 3", "asleep 5", "paused 5"], 2),
    ],
)
def test_choice_of_the_worker_that_gives_its_weights(told: list[str], giver: int | None) -> None:
    slots = slots_of(*told)
    assert slots.newest(but=workers(slots)[0]) is (None if giver is None else workers(slots)[giver])


@pytest.mark.parametrize(
    ("told", "are_ahead"),
    [
        (["ready 3", "ready 3"], False),
        (["ready 3", "ready 4"], True),
        (["ready 3", "ready 4 joining"], False),
        (["ready 4", "ready 3"], False),
        (["ready 3", "ready 4 push"], False),  # the push may reach the first worker in a moment
        (["ready 3", "ready 4", "updating 3"], False),
    ],
)
def test_detection_of_a_worker_behind_the_others(told: list[str], are_ahead: bool) -> None:
    slots = slots_of(*told)
    assert slots.are_ahead_of(workers(slots)[0]) == are_ahead


@pytest.mark.parametrize(
    ("told", "are_asleep"),
    [([], False), (["asleep 3", "asleep 3"], True), (["asleep 3", "ready 3"], False), (["asleep 3 joining"], False)],
)
def test_detection_of_a_fleet_that_is_asleep(told: list[str], are_asleep: bool) -> None:
    assert slots_of(*told).are_asleep == are_asleep


def test_a_slot_that_was_removed_leaves_its_name_to_the_next(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    slots = slots_of("ready 1", "ready 1", "ready 1", file=MembersFile(file, 0o600))
    seen, second = FleetFile(file), [*slots][1]
    second.is_leaving = True
    slots.stand(second, "leaving")
    assert [member.standing for member in slots.members()] == ["serving", "leaving", "serving"] and len(
        slots.staying
    ) == 2
    slots.remove(second)
    assert [member.name for member in seen.members()] == ["worker-0", "worker-2"] == [slot.name for slot in slots]
    assert [slots.add().name for _ in range(2)] == ["worker-1", "worker-3"]
    assert seen.members() == slots.members(), "a slot without a worker is not a member"
    slots.withdraw()
    assert not file.exists()


def test_the_trouble_of_a_joining_worker_is_published() -> None:
    slots = slots_of("ready 1")
    (slot,) = slots
    slot.joining.trouble = "disk: no space"
    slots.stand(slot, "joining")
    assert [member.told for member in slots.members()] == ["worker-0: disk: no space"]
