"""Pushes by delta and pulls from a chain, with workers on threads: which weights workers serve after successful and
failed pushes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_engine import FakeWeights
from pushing import ask
from serving import FaultyWorker, RawClient

from trueroll.errors import ConfigError, PushError
from trueroll.rollout import PushResult
from trueroll.weight_sync.transports.policy import PushPolicy
from weight_sync.deltas import slime

from .test_publisher import SHAPES, TIED, Cluster, serves, trainer_tensors

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for worker in list(cluster.workers):
        cluster.end(worker)


def step(tensors: Tensors, version: int) -> Tensors:
    """Return the weights after a step that changes a few elements of two tensors."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("a.weight", list(SHAPES)[version % 4]):
        changed[name].view(-1)[version % 40] += 1.0
    return changed


def history(count: int) -> list[Tensors]:
    """Return the weights of versions 0 to `count`."""
    found = [trainer_tensors()]
    for version in range(1, count + 1):
        found.append(step(found[-1], version))
    return found


def push_all(cluster: Cluster, versions: list[Tensors], full_every: int) -> list[PushResult]:
    with cluster.publisher("delta", folder=cluster.folder / "chain", full_every=full_every) as publisher:
        return [publisher.push(tensors, version) for version, tensors in enumerate(versions) if version]


def names(cluster: Cluster) -> list[int]:
    return sorted(int(path.name.removeprefix("weight_v")) for path in (cluster.folder / "chain").iterdir())


def version_of(worker: FaultyWorker) -> int:
    with RawClient(worker.address) as client:
        return ask(client, "weights")["weight_version"]


def test_a_push_sends_the_changed_bytes_and_now_and_then_a_checkpoint(workers: Cluster) -> None:
    worker, states = workers.start(), history(9)
    with workers.publisher("delta", folder=workers.folder / "chain", full_every=4) as publisher:
        results = []
        for version, tensors in enumerate(states[1:], 1):
            results.append(result := publisher.push(tensors, version))
            assert serves(worker, tensors, result)
    assert [result.is_sparse for result in results] == [version % 4 != 1 for version in range(1, 10)]
    whole = sum(tensor.numel() * 2 for tensor in states[0].values())
    assert all(result.num_bytes > whole for result in results if not result.is_sparse)
    assert all(result.num_bytes < whole / 3 for result in results if result.is_sparse)
    assert names(workers) == [5, 6, 7, 8, 9]


def test_a_push_brings_new_and_late_workers_to_its_version(workers: Cluster) -> None:
    first, states = workers.start(), history(5)
    with workers.publisher("delta", folder=workers.folder / "chain") as publisher:
        publisher.push(states[1], 1)
        late = workers.start()
        publisher.connect([first.address, late.address])
        publisher.push(states[2], 2)
        publisher.connect([first.address])
        for version in (3, 4):
            publisher.push(states[version], version)
        new = workers.start()
        publisher.connect([first.address, late.address, new.address])
        result = publisher.push(states[5], 5)
        assert result.is_sparse and all(serves(worker, states[5], result) for worker in (first, late, new))


def test_a_refused_push_of_a_served_version_leaves_its_folder(workers: Cluster) -> None:
    first, states = workers.start(), history(3)
    folder = workers.folder / "chain"
    with workers.publisher("delta", folder=folder) as publisher:
        publisher.push(states[1], 1)
        served = publisher.push(states[2], 2)
        with pytest.raises(PushError, match="version 2 is not newer than the served version 2"):
            publisher.push(states[3], 2)
        assert names(workers) == [1, 2] and serves(first, states[2], served)
        new = workers.start()
        publisher.connect([new.address])
        with publisher.pull(folder, 2) as staged:
            assert serves(new, states[2], staged.commit())
        result = publisher.push(states[3], 2, allow_older=True)
        assert names(workers) == [1, 2] and serves(new, states[3], result)


def test_a_worker_20_versions_behind_catches_up_without_the_trainer(workers: Cluster) -> None:
    """One worker serves version 1 of the chain, one serves its own checkpoint, and one serves the wanted version."""
    states, other = history(21), workers.start()
    push_all(workers, states, 100)
    new, current = workers.start(), workers.start()
    with workers.publisher() as publisher:
        publisher.connect([current.address])
        with publisher.pull(workers.folder / "chain", 1) as staged:
            first = staged.commit()
        assert serves(current, states[1], first) and not first.left_out
        publisher.connect([other.address, current.address, new.address])
        other.calls.clear()
        with publisher.pull(workers.folder / "chain", 21) as staged:
            assert version_of(current) == 1 and version_of(new) == 0, "premise: the workers serve their old weights"
            result = staged.commit()
        assert all(serves(worker, states[21], result) for worker in (other, current, new))
        assert "begin_push" not in other.calls, "it serves this push already"
        assert publisher.stale_workers() == []
        with publisher.pull(workers.folder / "chain", 21) as staged:
            assert staged.commit().push_id == result.push_id
        assert "begin_push" not in other.calls


def test_staged_weights_are_committed_once_or_dropped(workers: Cluster) -> None:
    worker, states = workers.start(), history(2)
    slime.write_full(workers.folder / "chain", 1, served_as(states[1]))
    slime.write_delta(workers.folder / "chain", 2, served_as(states[1]), served_as(states[2]))
    with workers.publisher() as publisher:
        with publisher.pull(workers.folder / "chain", 2):
            pass
        assert version_of(worker) == 0
        staged = publisher.pull(workers.folder / "chain", 2)
        staged.abort()
        with pytest.raises(ConfigError, match="version 2 was already committed or aborted; call pull again"):
            staged.commit()
        assert version_of(worker) == 0
        staged = publisher.pull(str(workers.folder / "chain"), 2)
        result = staged.commit()
        staged.abort()
        assert serves(worker, states[2], result)
        staged = publisher.pull(workers.folder / "chain", 1, allow_older=True)
        pushed = publisher.push(states[0], 3)
        with pytest.raises(PushError, match="at commit, worker .* failed: .* is not in progress"):
            staged.commit()
        assert serves(worker, states[0], pushed)


def served_as(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def test_slime_deltas_begin_with_the_checkpoint_of_the_worker(workers: Cluster) -> None:
    """Version 0 is the model that the worker was started with."""
    weights = FakeWeights(SHAPES, tied=TIED)
    states = [served_as(tensors) for tensors in history(3)]
    weights.live = {name: tensor.clone() for name, tensor in states[0].items()}
    worker = workers.start(weights=weights)
    for version in (1, 2, 3):
        slime.write_delta(workers.folder / "chain", version, states[version - 1], states[version])
    with workers.publisher() as publisher, publisher.pull(workers.folder / "chain", 3) as staged:
        assert serves(worker, states[3], staged.commit())


def test_a_failed_push_leaves_the_old_weights_and_the_next_push_is_whole(workers: Cluster) -> None:
    both, states = [workers.start(), workers.start()], history(5)
    infinite = states[2] | {"a.weight": states[2]["a.weight"] * float("inf")}
    incomplete = {name: tensor for name, tensor in states[2].items() if name != "embed.weight"}
    failures = [(infinite, "a.weight: expected finite values"), (incomplete, "are missing: embed.weight")]
    with workers.publisher("delta", folder=workers.folder / "chain") as publisher:
        for version, (broken, text) in zip((1, 3), failures, strict=True):
            result = publisher.push(states[version], version)
            assert not result.is_sparse
            with pytest.raises(PushError, match=text):
                publisher.push(broken, version + 1)
            assert all(serves(worker, states[version], result) for worker in both)
        assert names(workers) == [1, 3]
        both[1].refuse["verify_push"] = PushError("disk: planted")
        with pytest.raises(PushError, match="planted"):
            publisher.push(states[4], 4)
        assert all(serves(worker, states[3], result) for worker in both) and names(workers) == [1, 3]
        result = publisher.push(states[5], 5)
        assert not result.is_sparse and all(serves(worker, states[5], result) for worker in both)


def test_a_restarted_trainer_begins_with_a_checkpoint(workers: Cluster) -> None:
    """Folders of later versions, from the run before, are removed."""
    worker, states = workers.start(), history(4)
    push_all(workers, states, 100)
    with workers.publisher("delta", folder=workers.folder / "chain") as publisher:
        with pytest.raises(PushError, match="version 3 is not newer than the served version 4"):
            publisher.push(states[1], 3)
        result = publisher.push(states[1], 3, allow_older=True)
        assert not result.is_sparse and serves(worker, states[1], result)
        assert names(workers) == [1, 2, 3]
        result = publisher.push(states[2], 4)
        assert result.is_sparse and serves(worker, states[2], result)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("wrong base", "are not the base of this chain"),
        ("lost file", "cannot read a push from .*weight_v000001"),
        ("no folder", "chain: cannot read .*weight_v000002/model.safetensors: No such file"),
    ],
)
def test_a_refused_pull_leaves_the_old_weights(workers: Cluster, fault: str, text: str) -> None:
    worker, states = workers.start(), [served_as(tensors) for tensors in history(2)]
    chain = workers.folder / "chain"
    slime.write_delta(chain, 1, states[0], states[1])
    with workers.publisher() as publisher:
        if fault == "lost file":
            (chain / "weight_v000001" / "model-00000-of-00001.safetensors").unlink()
        with pytest.raises(PushError, match=text):
            publisher.pull(chain, 2 if fault == "no folder" else 1)
    assert version_of(worker) == 0 and all(not tensor.any() for tensor in worker.engine.weights.live.values())


def test_a_worker_reads_a_chain_only_where_its_policy_allows(workers: Cluster) -> None:
    worker, states = workers.start(), history(1)
    push_all(workers, states, 1)
    other = workers.start()
    policy = PushPolicy(folder=str(workers.folder / "elsewhere"))
    (workers.folder / "elsewhere").mkdir()
    other._control.pushes._policy = policy
    with workers.publisher() as publisher:
        publisher.connect([other.address])
        with pytest.raises(PushError, match="the worker has --push-folder"):
            publisher.pull(workers.folder / "chain", 1)
    assert version_of(other) == 0 and version_of(worker) == 1


@pytest.mark.parametrize("fields", [{"in_place": True}, {"base": "0" * 32}, {"lends": True}])
def test_a_chain_is_pushed_whole(workers: Cluster, fields: dict[str, object]) -> None:
    worker = workers.start()
    push = dict(push_id="1" * 32, weight_version=1, dtype="bfloat16", source={"kind": "chain", "place": "/nowhere"})
    with RawClient(worker.address) as client:
        reply = ask(client, "begin_push", **push, **fields)
    assert reply["code"] == "push_failed" and "a chain of deltas is not possible with in_place" in reply["message"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (dict(transport="delta"), "folder: must be set for disk and delta"),
        (dict(transport="delta", folder="x", sparse=True), "sparse: must be False for delta"),
        (dict(transport="delta", folder="x", in_place=True), "in_place: must be False for delta"),
        (dict(transport="delta", folder="x", full_every=0), "full_every: must be a positive integer for delta"),
        (
            dict(transport="disk", folder="x", full_every=3),
            "full_every: must be a positive integer for delta, else None",
        ),
    ],
)
def test_settings_are_checked(workers: Cluster, settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text), workers.publisher(**settings):  # type: ignore[arg-type]
        pass


def test_restore_names_pull(workers: Cluster) -> None:
    workers.start()
    with workers.publisher("delta", folder=workers.folder / "chain") as publisher:
        with pytest.raises(ConfigError, match="for delta, call pull"):
            publisher.restore(trainer_tensors())
