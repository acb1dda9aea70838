"""Pushes to the serving workers of a fleet, which skip lost workers, and hand-overs of weights to joining workers."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from serving import FaultyWorker

from trueroll.errors import (
    ConfigError,
    IllegalStateError,
    OtherBaseError,
    PushError,
    TruerollError,
    WorkerFailedError,
    WorkerLostError,
)
from trueroll.rollout import AsyncRolloutClient, WeightPublisher
from trueroll.rollout.client.membership import Member, PushNote, Standing
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.fleet import hand_over as hand_over_module
from trueroll.rollout.fleet import joining as joining_module
from trueroll.rollout.fleet.hand_over import WeightFolder, hand_over
from trueroll.rollout.fleet.joining import Joining
from trueroll.weight_sync.payload.manifest import MANIFEST_FILE
from trueroll.weight_sync.trainer import sender as sender_module

ANY_KEYS = (None, None)


class Members:
    """A membership that a test changes."""

    def __init__(self, *workers: FaultyWorker) -> None:
        self.now = [Member(f"worker-{i}", worker.address) for i, worker in enumerate(workers)]

    def members(self) -> list[Member]:
        return self.now

    def stand(self, index: int, standing: Standing) -> None:
        self.now[index] = Member(self.now[index].name, self.now[index].address, "", standing)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


@contextmanager
def worker() -> Iterator[FaultyWorker]:
    engine = FakeEngine()
    engine.weight_version = 0
    faulty = FaultyWorker(WorkerConfig(), engine)
    thread = threading.Thread(target=faulty.run)
    thread.start()
    assert faulty.ready.wait(30)
    try:
        yield faulty
    finally:
        faulty.drain()
        thread.join()


@pytest.fixture
def workers() -> Iterator[list[FaultyWorker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(worker()) for _ in range(3)]


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    with WeightPublisher("shared", timeout=20.0) as publisher:
        yield publisher


def versions(workers: list[FaultyWorker]) -> list[int]:
    return [worker.engine.weight_version for worker in workers]


def test_a_push_goes_to_the_workers_that_serve_when_it_begins(
    workers: list[FaultyWorker], publisher: WeightPublisher
) -> None:
    members = Members(*workers[:2])
    publisher.connect_fleet(members)
    assert publisher.push(tensors(1.0), 1).left_out == [] and versions(workers) == [1, 1, 0]
    members.now = Members(*workers).now
    members.stand(2, "joining")
    publisher.push(tensors(2.0), 2)
    assert versions(workers) == [2, 2, 0], "the fleet hands the weights to a joining worker"
    members.stand(2, "serving")
    members.stand(1, "leaving")
    publisher.push(tensors(3.0), 3)
    assert versions(workers) == [3, 3, 3], "a leaving worker finishes with the new weights"
    assert publisher.stale_workers() == []


def test_while_no_worker_serves_joining_ones_get_the_push(
    workers: list[FaultyWorker], publisher: WeightPublisher
) -> None:
    members = Members(*workers)
    publisher.connect_fleet(members)
    for index in range(3):
        members.stand(index, "joining")
    publisher.push(tensors(1.0), 1)
    assert versions(workers) == [1, 1, 1]
    members.now = []
    with pytest.raises(ConfigError, match="no worker to push to; wait until the fleet has workers"):
        publisher.push(tensors(1.0), 2)


@pytest.mark.parametrize("phase", ["begin_push", "stage_bucket", "verify_push", "commit_push"])
def test_a_worker_that_is_lost_is_taken_out_of_the_push(
    workers: list[FaultyWorker], publisher: WeightPublisher, phase: str
) -> None:
    publisher.connect_fleet(Members(*workers))
    workers[1].refuse[phase] = WorkerFailedError("worker: gone")
    result = publisher.push(tensors(1.0), 1)
    assert result.left_out == [workers[1].address] and versions(workers) == [1, 0, 1]
    assert phase in workers[1].calls, "it was there when the push began"
    assert workers[0].calls.count("begin_push") == 1, "the push was not repeated"
    publisher.push(tensors(2.0), 2)
    assert versions(workers) == [2, 2, 2], "it is taken in again if it is still a member"


@pytest.mark.parametrize("phase", ["weights", "begin_push", "stage_bucket", "verify_push", "commit_push"])
def test_a_push_does_not_wait_for_a_worker_that_has_left(workers: list[FaultyWorker], phase: str) -> None:
    """As after a kill, the fleet knows that the worker has left, while the worker itself is silent."""
    members = Members(*workers)
    workers[1].mute = {phase, "abort_push"}
    with WeightPublisher("shared", timeout=3600.0) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.connect_fleet(members)
        pushing = pool.submit(publisher.push, tensors(1.0), 1)
        while phase not in workers[1].calls:
            time.sleep(0.01)
        del members.now[1]
        assert pushing.result().left_out == [workers[1].address]
        assert versions(workers) == [1, 0, 1]
        members.now = Members(*workers).now
        workers[1].mute.clear()
        assert publisher.push(tensors(2.0), 2).left_out == [] and versions(workers) == [2, 2, 2]


def test_a_push_ends_when_all_serving_workers_have_it(workers: list[FaultyWorker]) -> None:
    """A worker that begins to serve during a push still has the weights from before the push."""
    members = Members(*workers)
    members.stand(2, "joining")
    verify = workers[0]._handle

    def join_meanwhile(peer: Any, message: Any) -> None:
        if message.type == "verify_push":
            members.stand(2, "serving")
        verify(peer, message)

    workers[0]._handle = join_meanwhile  # type: ignore[method-assign]
    with WeightPublisher("shared", timeout=3600.0) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.connect_fleet(members)
        pushing = pool.submit(publisher.push, tensors(1.0), 1)
        while "weights" not in workers[2].calls:
            time.sleep(0.01)
        assert versions(workers) == [1, 1, 0] and not pushing.done()
        members.stand(2, "joining")
        assert pushing.result().version == 1


def test_a_push_that_fails_for_all_leaves_no_worker_out(
    workers: list[FaultyWorker], publisher: WeightPublisher
) -> None:
    publisher.connect_fleet(Members(*workers))
    with pytest.raises(PushError, match="NaN"):
        publisher.push(tensors(float("nan")), 1)
    assert versions(workers) == [0, 0, 0]
    for worker in workers:
        worker.refuse["verify_push"] = IllegalStateError("worker: gone")
    with pytest.raises(PushError, match="gone"):
        publisher.push(tensors(1.0), 1)
    assert versions(workers) == [0, 0, 0]


def test_a_push_in_which_workers_depend_on_each_other_is_repeated_without_a_lost_worker(
    workers: list[FaultyWorker], publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "FAIL_TOGETHER", ("shared",))
    publisher.connect_fleet(Members(*workers))
    workers[1].refuse["stage_bucket"] = IllegalStateError("worker: gone")
    assert publisher.push(tensors(1.0), 1).left_out == [workers[1].address] and versions(workers) == [1, 0, 1]
    assert workers[0].calls.count("begin_push") == 2, "premise: the push was repeated"
    workers[0].refuse["verify_push"] = IllegalStateError("worker: gone")
    with pytest.raises(PushError, match="gone"):
        publisher.push(iter(tensors(2.0).items()), 2)
    assert versions(workers) == [1, 0, 1], "an iterator cannot be read again"


def join(
    joining: FaultyWorker, peer: FaultyWorker | None, folder: Path | WeightFolder, noted: PushNote | None = None
) -> bool:
    """Hand the weights to a worker. Return whether the worker then serves these weights."""
    weights = WeightFolder(folder) if isinstance(folder, Path) else folder

    async def run() -> bool:
        fleet = Members(joining)
        async with AsyncRolloutClient(joining.address) as client:
            if peer is None:
                return await hand_over(client, None, noted, weights, fleet, ANY_KEYS)
            async with AsyncRolloutClient(peer.address) as other:
                return await hand_over(client, other, noted, weights, fleet, ANY_KEYS)

    return asyncio.run(run())


def test_a_worker_that_joins_gets_the_weights_of_another(
    workers: list[FaultyWorker], publisher: WeightPublisher, tmp_path: Path
) -> None:
    first, second, _ = workers
    assert join(second, first, tmp_path) and second.calls == ["weights"], "both serve their checkpoint"
    publisher.connect([first.address])
    publisher.push(tensors(5.0), 7)
    assert join(second, first, tmp_path) and "save_weights" in first.calls
    assert versions(workers) == [7, 7, 0]
    assert second.engine.weights.checksums() == first.engine.weights.checksums()
    assert list((tmp_path / "joins").iterdir()) == []
    publisher.connect_fleet(Members(first, second))
    assert publisher.stale_workers() == [second.address], "this publisher did not push there"


def test_a_worker_that_joins_gets_the_weights_of_a_push_by_disk(workers: list[FaultyWorker], tmp_path: Path) -> None:
    first, second, third = workers
    with WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect([first.address])
        push = publisher.push(tensors(5.0), 7)
    shutil.copytree(next(tmp_path.glob("version-7-*")), tmp_path / "version-9-01234567.tmp")  # an incomplete push
    assert join(second, first, tmp_path) and "save_weights" not in first.calls
    assert not join(third, None, tmp_path, PushNote(7, "0" * 32)), "there is no other push of that version"
    assert join(third, None, tmp_path, PushNote(7, push.push_id))
    assert versions(workers) == [7, 7, 7]


def test_the_weights_of_an_earlier_run_are_not_handed_over(
    workers: list[FaultyWorker], publisher: WeightPublisher, tmp_path: Path
) -> None:
    earlier, first, second = workers
    with WeightPublisher("disk", folder=tmp_path) as before:
        before.connect([earlier.address])
        before.push(tensors(5.0), 900)
    publisher.connect([first.address])
    push = publisher.push(tensors(1.0), 1)
    noted = PushNote(1, push.push_id)
    assert not join(second, None, tmp_path, noted) and versions(workers) == [900, 1, 0]
    assert join(second, first, tmp_path, noted) and versions(workers) == [900, 1, 1]
    publisher.connect([first.address, second.address])
    publisher.push(tensors(2.0), 2)
    assert versions(workers) == [900, 2, 2]


def test_a_worker_waits_if_nothing_has_its_weights(
    workers: list[FaultyWorker], publisher: WeightPublisher, tmp_path: Path
) -> None:
    noted = PushNote(1, "0" * 32)
    assert not join(workers[0], None, tmp_path, noted) and join(workers[0], None, tmp_path)
    publisher.connect([workers[0].address])
    publisher.push(tensors(1.0), 1)
    assert join(workers[0], None, tmp_path, noted), "pushed by a trainer that does not note pushes"


def test_adapters_without_their_base_are_tried_once(
    workers: list[FaultyWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect([workers[0].address])
        noted = PushNote(1, publisher.push(tensors(1.0), 1).push_id)
    attempts = []

    def refuse(*arguments: object) -> None:
        attempts.append(arguments)
        raise OtherBaseError("adapters: no push has their base weights")

    monkeypatch.setattr(hand_over_module, "_push", refuse)
    folder = WeightFolder(tmp_path)
    assert [join(workers[1], None, folder, noted) for _ in range(3)] == [False] * 3 and len(attempts) == 1


def test_errors_of_a_hand_over_are_raised(
    workers: list[FaultyWorker], publisher: WeightPublisher, tmp_path: Path
) -> None:
    first, second, third = workers
    publisher.connect([first.address])
    publisher.push(tensors(1.0), 1)
    folder = tmp_path / "weights"
    folder.write_text("")
    with pytest.raises(PushError, match="weights_folder: cannot create .*Not a directory"):
        join(second, first, folder)
    folder.unlink()
    first.refuse["save_weights"] = PushError("disk: cannot write it: No space left on device")
    with pytest.raises(PushError, match="No space left"):
        join(second, first, folder)
    second.refuse["begin_push"] = PushError("disk: cannot read a push from it")
    with pytest.raises(PushError, match="cannot read a push from it"):
        join(second, first, folder)
    assert list((folder / "joins").iterdir()) == [] and versions(workers) == [1, 0, 0]
    with WeightPublisher("disk", folder=folder) as by_disk:
        by_disk.connect([third.address])
        push = by_disk.push(tensors(2.0), 2)
    second.engine.weights.dtype = "bfloat16"
    with pytest.raises(ConfigError, match="the workers serve bfloat16"):
        join(second, None, folder, PushNote(2, push.push_id))
    (manifest,) = folder.glob(f"version-2-*/{MANIFEST_FILE}")
    manifest.write_text("[" * 100_000)
    with pytest.raises(PushError, match="is not a manifest"):
        join(second, None, folder, PushNote(2, push.push_id))


class Attempts:
    """The outcomes of hand-over attempts, in order. The last outcome repeats."""

    def __init__(self, *outcomes: bool | TruerollError) -> None:
        self.outcomes = list(outcomes)
        self.count = 0

    async def __call__(self) -> bool:
        outcome = self.outcomes[min(self.count, len(self.outcomes) - 1)]
        self.count += 1
        if isinstance(outcome, TruerollError):
            raise outcome
        return outcome


def outcomes(
    joining: Joining, attempts: Attempts, target: object = "a", count: int = 100, state: object = "ready"
) -> list[str]:
    async def run() -> list[str]:
        return [await joining.attempt(target, state, attempts) for _ in range(count)]

    return asyncio.run(run())


def test_attempts_to_hand_weights_over_are_bounded_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining_module, "FIRST_PAUSE", 0.0)
    refusal, joining = PushError("disk: no space"), Joining("worker-1")
    refused = Attempts(refusal)
    assert outcomes(joining, refused) == ["failed"] * 100
    assert refused.count == joining.num_failures == 3 and joining.trouble == "disk: no space"
    assert isinstance(joining.error, PushError)
    assert str(joining.error).startswith("worker-1: could not get the weights of the fleet in 3 attempts")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert outcomes(joining, refused, "b") and refused.count == 6, "other weights are tried again"
    joining.retry()
    assert outcomes(joining, Attempts(refusal, True), "b", 2) == ["failed", "done"]
    assert (joining.error, joining.trouble, joining.num_failures) == (None, "", 7)
    for error, count in ((ConfigError("dtype"), 1), (WorkerLostError("gone"), 20), (_lost(), 20)):
        joining, attempts = Joining("worker-1"), Attempts(error)
        outcomes(joining, attempts)
        assert attempts.count == count and type(joining.error) is type(error)
    assert outcomes(Joining("worker-1"), Attempts(False)) == ["waiting"] * 100


def test_a_new_state_of_the_peer_resets_only_transient_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "FIRST_PAUSE", 0.0)
    for error, count in ((WorkerLostError("gone"), 40), (PushError("disk: no space"), 3), (ConfigError("dtype"), 1)):
        joining, attempts = Joining("worker-1"), Attempts(error)
        outcomes(joining, attempts, state="asleep")
        outcomes(joining, attempts, state="ready")
        assert attempts.count == count


def _lost() -> PushError:
    error = PushError("at begin, a worker failed")
    error.lost = ("ipc:///somewhere",)
    return error


def test_attempts_are_further_apart_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    joining, attempts, found = Joining("worker-1"), Attempts(WorkerLostError("gone")), []
    while joining.error is None:
        before = attempts.count
        with suppress(StopIteration):
            joining.attempt("a", "ready", attempts).send(None)
        found += [now[0]] * (attempts.count - before)
        now[0] += 0.25
    gaps = [after - before for before, after in pairwise(found)]
    assert gaps[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0] and {*gaps[7:]} == {30.0} and len(found) == 20
