"""The weights of a fleet: pushes of adapters alone to workers without the base weights, lent memory, and checksums."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from adapters import adapt, change
from peft import PeftModel
from rollout.publisher.test_expert_pushes import Weights, assert_equal, dense, serving

from tiny import make_tiny_model
from trueroll.engine.cache.lending import place_to_lend
from trueroll.engine.engine import Engine
from trueroll.errors import OtherBaseError, PushError, TruerollError
from trueroll.kernels.training import align, merged_weights
from trueroll.rollout import AsyncRolloutClient, FleetClient, WeightPublisher, audit
from trueroll.rollout.client.membership import Member, PushNote
from trueroll.rollout.fleet.hand_over import WeightFolder, hand_over


@dataclass
class Pair:
    """Two workers of `model` in bfloat16, in this process. `members`: the serving workers."""

    model: Path
    addresses: list[str]
    engines: list[Engine]
    stacks: list[ExitStack]
    serving: list[int] = field(default_factory=lambda: [0, 1])
    folders: dict[Path, WeightFolder] = field(default_factory=dict)

    def members(self) -> list[Member]:
        return [Member(f"worker-{i}", self.addresses[i]) for i in self.serving]

    def start(self, index: int) -> None:
        """Start a worker, or restart a running worker."""
        self.stacks[index].close()
        engine = self.stacks[index].enter_context(serving(self.model, self.addresses[index], dtype="bfloat16"))
        self.engines[index] = engine

    def join(self, index: int, folder: Path, peer: int | None = None, noted: PushNote | None = None) -> bool:
        """Give a worker the weights of `peer`, or of the recorded push in the folder."""

        async def run() -> bool:
            async with AsyncExitStack() as stack:
                clients = [AsyncRolloutClient(self.addresses[i]) for i in (index, peer) if i is not None]
                for client in clients:
                    await stack.enter_async_context(client)
                other = None if peer is None else clients[1]
                weights = self.folders.setdefault(folder, WeightFolder(folder))
                return await hand_over(clients[0], other, noted, weights, self, (None, None))

        return asyncio.run(run())

    def assert_serves(self, expected: Weights) -> None:
        for index in self.serving:
            names = self.engines[index].weights.shapes
            assert_equal(dense(self.engines[index]), {name: expected[name] for name in names})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    stacks = [ExitStack(), ExitStack()]
    pair = Pair(model, [f"ipc://{tmp_path}/worker-{i}" for i in range(2)], [None, None], stacks)  # type: ignore[list-item]
    try:
        for index in range(2):
            pair.start(index)
        yield pair
    finally:
        for stack in stacks:
            stack.close()


def merged(model: PeftModel) -> Weights:
    return dict(merged_weights(model, torch.bfloat16))


def lent_files() -> set[str]:
    """Return the inodes of the unnamed files that this process has mapped."""
    return set(re.findall(r"(\d+) +/memfd:trueroll-weights", Path("/proc/self/maps").read_text()))


def other_base(model: PeftModel) -> PeftModel:
    """Return the model with frozen weights that differ from its checkpoint."""
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.weight.add_(1)  # type: ignore[operator, union-attr]
    return model


def test_adapters_are_pushed_again_with_the_weights_if_a_worker_has_merged_ones(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = adapt(pair.model)
    with WeightPublisher(timeout=20.0) as publisher:
        publisher.connect_fleet(pair)
        alone = publisher.push(trained, 1, adapters=True).num_bytes
        pair.start(1)
        assert pair.join(1, tmp_path / "weights", peer=0)
        pair.assert_serves(merged(trained))
        for version, is_again in ((2, True), (3, False)):
            change(trained, seed=version)
            result = publisher.push(trained, version, adapters=True)
            assert (result.num_bytes > alone, result.left_out) == (is_again, []) and result.version == version
            pair.assert_serves(merged(trained))
        made_again = [record for record in caplog.records if "with the base weights" in record.message]
        assert (
            len(made_again) == 1
            and f"{pair.addresses[1]} failed: adapters: the adapters were trained" in made_again[0].getMessage()
        )
        publisher.connect(pair.addresses)
        with pytest.raises(OtherBaseError, match="other weights than .*model.embed_tokens.weight"):
            publisher.push(other_base(trained), 4, adapters=True)
        pair.assert_serves(merged(adapt(pair.model, seed=3)))


def test_after_all_workers_were_lost_the_push_brings_the_weights(pair: Pair) -> None:
    trained = other_base(adapt(pair.model))
    with WeightPublisher(timeout=20.0) as publisher:
        publisher.connect_fleet(pair)
        publisher.push(trained, 1)
        publisher.push(trained, 2, adapters=True)
        for index in range(2):
            pair.start(index)
        publisher.push(trained, 3, adapters=True)
        pair.assert_serves(merged(trained))
        with FleetClient(pair) as client:
            client.sleep(2)
            client.wake_up(["weights"])
            publisher.push(trained, 4, adapters=True)
            client.wake_up(["kv_cache"])
        pair.assert_serves(merged(trained))


def test_a_worker_that_joins_by_disk_gets_the_weights_before_the_adapters(pair: Pair, tmp_path: Path) -> None:
    trained = other_base(adapt(pair.model))
    with WeightPublisher("disk", folder=tmp_path / "pushes") as publisher:
        publisher.connect_fleet(pair)
        publisher.push(trained, 1)
        noted = PushNote(2, publisher.push(trained, 2, adapters=True).push_id)
        for index, peer in ((1, 0), (0, None)):
            pair.start(index)
            assert pair.join(index, tmp_path / "pushes", peer, noted)
            assert pair.engines[index].weights.base.kept and not (tmp_path / "pushes" / "joins").exists()
        pair.assert_serves(merged(trained))
        [whole] = (tmp_path / "pushes").glob("version-1-*")
        whole.rename(tmp_path / "gone")
        with WeightPublisher("disk", folder=tmp_path / "earlier") as earlier:
            earlier.connect([pair.addresses[1]])
            earlier.push(merged(adapt(pair.model, seed=7)), 900)
        [other] = (tmp_path / "earlier").glob("version-900-*")
        other.rename(tmp_path / "pushes" / other.name)
        pair.start(0)
        assert not pair.join(0, tmp_path / "pushes", noted=noted), "it waits for a push"
        assert pair.engines[0].weight_version == 0, "nothing of an earlier run was handed over"


def test_a_base_without_its_adapters_is_not_served(pair: Pair, tmp_path: Path) -> None:
    trained = other_base(adapt(pair.model))
    with WeightPublisher("disk", folder=tmp_path) as publisher:
        publisher.connect_fleet(pair)
        publisher.push(trained, 900)
        noted = PushNote(2, publisher.push(trained, 2, adapters=True, allow_older=True).push_id)
    [adapters] = tmp_path.glob("version-2-*")
    [tensors] = adapters.glob("*.safetensors")
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the manifest and the header stay intact
    pair.start(0)
    for _ in range(2):
        with pytest.raises(PushError):
            pair.join(0, tmp_path, noted=noted)
        assert pair.engines[0].weight_version == 900, "the base has reached the worker"


def test_checksums_and_an_audit_cover_all_workers(pair: Pair) -> None:
    trained = adapt(pair.model)
    align(trained)
    with WeightPublisher(timeout=20.0) as publisher, FleetClient(pair) as client:
        publisher.connect_fleet(pair)
        publisher.push(merged(trained), 1)
        with torch.autocast("cpu", torch.bfloat16):
            lent = audit(trained, client, [[1, 2, 3], [4, 5]], version=1)
        publisher.push(trained, 2, adapters=True)
        with torch.autocast("cpu", torch.bfloat16):
            adapted = audit(trained, client, [[1, 2, 3], [4, 5]], version=2)
        assert [(found.num_tokens, found.num_different, found.causes) for found in (lent, adapted)] == [
            (256, 0, ())
        ] * 2
        publisher.connect(pair.addresses[1:])
        change(trained, seed=1)
        publisher.push(trained, 2, allow_older=True, adapters=True)
        with pytest.raises(
            TruerollError, match=r"workers worker-0 \(version 2\) and worker-1 \(version .\) differ in the weights"
        ):
            audit(trained, client, [[1, 2, 3]])


def test_lent_weights_and_adapters_follow_each_other(pair: Pair) -> None:
    """A worker with lent weights gets its own memory if it adds adapters, sleeps, or receives an in-place push."""
    plain, trained = merged(adapt(pair.model, seed=7)), adapt(pair.model)
    before = dense(pair.engines[0])
    with WeightPublisher(timeout=20.0) as publisher, WeightPublisher(in_place=True) as in_place:
        publisher.connect_fleet(pair)
        for start in (1, 11):
            publisher.push(plain, start)
            pair.assert_serves(plain)
            assert place_to_lend() is None or len(lent_files()) == 1, "both have the same memory"
            publisher.push(before, start + 1)
            publisher.push(trained, start + 2, adapters=True)
            pair.assert_serves(merged(trained))
            publisher.push(before, start + 3)
            assert place_to_lend() is None or len(lent_files()) == 1
            publisher.connect([pair.addresses[1]])
            publisher.push(trained, start + 4, adapters=True)
            assert_equal(dense(pair.engines[0]), before)
            in_place.connect([pair.addresses[0]])
            in_place.push(plain, start + 4)
            expected = merged(trained)
            assert_equal(dense(pair.engines[1]), {name: expected[name] for name in before})
            publisher.connect_fleet(pair)
            with FleetClient(pair) as client:
                client.sleep(1)
                client.wake_up()
            publisher.push(before, start + 5)
            pair.assert_serves(before)
