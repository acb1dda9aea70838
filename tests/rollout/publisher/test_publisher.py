"""The trainer's side of a push, with workers on threads: which weights workers serve after successful and failed
pushes.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, FakeStaging, FakeWeights
from matrix import thinned
from pushing import ask
from safetensors.torch import load_file
from serving import FaultyWorker, RawClient
from weight_sync.transports.gloo_push import warm_up
from weight_sync.transports.stand_ins import CudaLibrary, NcclGroup, gpu, host_tensor_at

from trueroll.errors import (
    ConfigError,
    ForbiddenError,
    IllegalStateError,
    PushError,
    VersionGapError,
    WorkerFailedError,
)
from trueroll.rollout import PushResult, WeightPublisher, protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.network.router import Peer
from trueroll.rollout.publisher import publisher as publisher_module
from trueroll.weight_sync.payload.manifest import MANIFEST_FILE, MODEL_FILE
from trueroll.weight_sync.payload.tensors import DTYPES
from trueroll.weight_sync.trainer import sender as sender_module
from trueroll.weight_sync.trainer.transaction import Transaction
from trueroll.weight_sync.transports import cuda_ipc as cuda_ipc_module
from trueroll.weight_sync.transports import gpu as gpu_module
from trueroll.weight_sync.transports import nccl as nccl_module
from trueroll.weight_sync.transports.relay_reader import RelayReader
from trueroll.weight_sync.transports.shared import SharedSlots

SHAPES = {"embed.weight": (1000, 2), "a.weight": (33, 40), "norm.weight": (40,), "conv.weight": (16, 2, 3)}
TIED = {"head.weight": "embed.weight"}
TRANSPORTS = ("shared", "collective", "relay", "disk")
PHASES = ("weights", "begin_push", "stage_bucket", "verify_push", "commit_push")
STEPS = [(way, phase) for way in TRANSPORTS for phase in PHASES if (way, phase) != ("disk", "stage_bucket")]
INDEPENDENT_STEPS = [(way, phase) for way, phase in STEPS if way != "collective" and phase != "weights"]
BUCKET_BYTES = 1024


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start the fork server, because the first push through gloo may exceed the timeouts of these tests."""
    warm_up()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", dict.fromkeys(TRANSPORTS, BUCKET_BYTES))


def trainer_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Cluster:
    """Workers on threads, each with its own weights. All start at version 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[FaultyWorker] = []
        self.threads: dict[FaultyWorker, threading.Thread] = {}

    def start(self, address: str | None = None, weights: FakeWeights | None = None) -> FaultyWorker:
        address = address or f"ipc://{self.folder}/worker{len(self.threads)}"
        engine = FakeEngine(weights or FakeWeights(SHAPES, tied=TIED, ignored=["old.bias"]))
        engine.weight_version = 0
        worker = FaultyWorker(WorkerConfig(address=address), engine)
        self.workers.append(worker)
        self.threads[worker] = threading.Thread(target=worker.run, daemon=True)
        self.threads[worker].start()
        assert worker.ready.wait(20)
        return worker

    def end(self, worker: FaultyWorker) -> None:
        worker.drain()
        self.threads[worker].join(20)
        assert not self.threads[worker].is_alive()
        self.workers.remove(worker)

    @contextmanager
    def publisher(self, transport: Any = "shared", **settings: Any) -> Iterator[WeightPublisher]:
        if transport == "disk":
            settings = dict(folder=self.folder / "pushes") | settings
        defaults: dict[str, Any] = dict(timeout=20.0)
        with WeightPublisher(transport, **(defaults | settings)) as publisher:
            publisher.connect([worker.address for worker in self.workers])
            yield publisher


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for worker in list(cluster.workers):
        cluster.end(worker)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/trueroll-" in line]
    assert [line for line in mapped if not line.endswith("(deleted)")] == []  # mapped memory has no name any more


def serves(worker: FaultyWorker, tensors: dict[str, torch.Tensor], result: PushResult) -> bool:
    """Return whether the worker reports this push and serves the trainer's tensors, cast to its dtype, to the bit."""
    weights = worker.engine.weights
    with RawClient(worker.address) as client:
        told = ask(client, "weights")
    dtypes = {name: DTYPES[weights.dtypes.get(name, weights.dtype)] for name in tensors}
    same = all(same_bits(weights.live[name], tensor.to(dtypes[name])) for name, tensor in tensors.items())
    return same and (told["weight_version"], told["push_id"]) == (result.version, result.push_id)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_worker_serves_the_pushed_weights(cluster: Cluster, transport: str, num_workers: int) -> None:
    workers = [cluster.start() for _ in range(num_workers)]
    with cluster.publisher(transport) as publisher:
        for version in (3, 4):
            tensors = trainer_tensors(version)
            result = publisher.push(tensors, version)
            assert all(serves(worker, tensors, result) for worker in workers)
            assert result.num_bytes >= sum(tensor.numel() * 2 for tensor in tensors.values())
            assert not result.is_sparse
            assert set(result.seconds) == {"begin", "stage", "verify", "commit"}
    if transport != "disk":
        assert workers[0].calls.count("stage_bucket") > 6  # so that slots are reused


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_are_cast_to_the_workers_dtype(cluster: Cluster, transport: str, dtype: str) -> None:
    worker = cluster.start(weights=FakeWeights(SHAPES, dtype))
    with cluster.publisher(transport) as publisher:
        tensors = trainer_tensors(dtype=torch.float64)
        assert serves(worker, tensors, publisher.push(tensors, 1))


def test_a_module_an_iterator_and_odd_strides_are_accepted(cluster: Cluster) -> None:
    worker = cluster.start(weights=FakeWeights({"weight": (20, 30), "bias": (20,)}))
    module = torch.nn.Linear(30, 20)
    expected = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    with cluster.publisher() as publisher:
        assert serves(worker, expected, publisher.push(module, 1))
        expected["weight"] += 1
        strided = {**expected, "weight": expected["weight"].T.contiguous().T}
        assert not strided["weight"].is_contiguous()
        assert serves(worker, expected, publisher.push(iter(strided.items()), 2))
        assert (
            serves(worker, expected, publisher.push(module.named_parameters(), 3)) is False
        )  # the module has other values
        assert serves(worker, dict(module.state_dict()), publisher.push(module.named_parameters(), 4))


@pytest.mark.parametrize(
    "transport,is_sparse", [(way, False) for way in TRANSPORTS] + [("shared", True), ("relay", True)]
)
def test_a_parameter_travels_in_its_own_dtype(cluster: Cluster, transport: str, is_sparse: bool) -> None:
    own = {"norm.weight": "float32", "a.weight": "float32"}
    worker = cluster.start(weights=FakeWeights(SHAPES, tied=TIED, dtypes=own))
    before, after = trainer_tensors(1), trainer_tensors(1)
    after["a.weight"][3, 4:7] += 2.0**-20
    with cluster.publisher(transport, sparse=is_sparse) as publisher, RawClient(worker.address) as client:
        for version, tensors in enumerate((before, after), 1):
            result = publisher.push(tensors, version)
            assert serves(worker, tensors, result) and result.is_sparse == (is_sparse and version == 2)
            assert (told := ask(client, "weights"))["dtype"] == "bfloat16" and told["dtypes"] == own
        others = cluster.start(weights=FakeWeights(SHAPES, tied=TIED))
        publisher.connect([worker.address, others.address])
        with pytest.raises(PushError, match="expects other parameters than "):
            publisher.push(after, 3)
    assert worker.engine.weights.live["a.weight"].dtype == torch.float32
    assert not same_bits(before["a.weight"].bfloat16().float(), before["a.weight"]), "rounding must be visible"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_iterator", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.weight"), ["missing: norm.weight"]),
        (lambda t: t.update({"b.weight": t["a.weight"]}), ["b.weight: unknown"]),
        (lambda t: t.update({"module.a.weight": t.pop("a.weight")}), ["module.a.weight", "wrapper", "'module.'"]),
        (lambda t: t.update({"a.weight": t["a.weight"].T}), ["a.weight: expected shape [33, 40], found [40, 33]"]),
        (lambda t: t.update({"head.weight": t["embed.weight"] + 1}), ["head.weight", "differs from embed.weight"]),
        (lambda t: t.update({"head.weight": t["embed.weight"][:50]}), ["head.weight: expected shape"]),
        (lambda t: t.update({"a.weight": "text"}), ["a.weight"]),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    cluster: Cluster, transport: str, is_iterator: bool, change: Any, words: list[str]
) -> None:
    if not is_iterator and words == ["a.weight"]:
        words = ["a.weight: is a", "not a tensor"]
    worker = cluster.start()
    with cluster.publisher(transport) as publisher:
        before = trainer_tensors(1)
        first = publisher.push(before, 1)
        tensors = trainer_tensors(2)
        change(tensors)
        with pytest.raises(PushError) as error:
            publisher.push(iter(tensors.items()) if is_iterator else tensors, 2)
        assert all(word in str(error.value) for word in words)
        assert serves(worker, before, first)
        after = trainer_tensors(3)
        assert serves(worker, after, publisher.push(after, 3))


def test_a_doubled_tensor_is_refused(cluster: Cluster) -> None:
    worker = cluster.start()
    tensors = list(trainer_tensors().items())
    with cluster.publisher() as publisher:
        with pytest.raises(PushError, match="norm.weight: was sent twice") as error:
            publisher.push(iter([*tensors, tensors[2]]), 1)
        assert f"{worker.address} serves version 0" in str(error.value)
    assert worker.engine.weight_version == 0 and "commit_push" not in worker.calls


def test_tied_and_ignored_tensors_are_left_out(cluster: Cluster) -> None:
    worker = cluster.start()
    tensors = trainer_tensors()
    with cluster.publisher() as publisher:
        plain = publisher.push(tensors, 1)
        extra = {**tensors, "head.weight": tensors["embed.weight"], "old.bias": torch.ones(3)}
        alike = {**extra, "head.weight": tensors["embed.weight"].clone()}
        for version, more in enumerate([extra, alike, dict(reversed(alike.items()))], 1):
            for number, given in enumerate((more, iter(more.items()))):
                result = publisher.push(given, 2 * version + number)
                assert serves(worker, tensors, result) and result.num_bytes <= plain.num_bytes + 512


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainers_names_become_the_workers(cluster: Cluster, transport: str) -> None:
    weights = FakeWeights(SHAPES, tied=TIED)
    weights.renamed, weights.left_out = {"inner.": "", "outer.tower.": "tower."}, ("tower.",)
    weights.respelled = {".gain": ".weight"}
    worker, tensors = cluster.start(weights=weights), trainer_tensors()
    named = {f"inner.{name}".replace("norm.weight", "norm.gain"): tensor for name, tensor in tensors.items()}
    assert "inner.norm.gain" in named, "premise"
    named |= {"outer.tower.weight": torch.ones(3), "tower.bias": torch.ones(2)}
    with cluster.publisher(transport) as publisher:
        for version, given in enumerate((named, iter(named.items()), tensors), 1):
            assert serves(worker, tensors, publisher.push(given, version))
        for twice in (named | tensors, iter([*named.items(), *tensors.items()])):
            with pytest.raises(PushError, match="was sent twice"):
                publisher.push(twice, 4)
        with pytest.raises(PushError, match="tensor outer.other.weight: unknown"):
            publisher.push(named | {"outer.other.weight": torch.ones(3)}, 4)


@pytest.mark.parametrize("way", [*TRANSPORTS, "sparse"])
def test_nonfinite_values_are_refused_unless_allowed(cluster: Cluster, way: str) -> None:
    worker = cluster.start()
    settings: dict[str, Any] = dict(transport="shared", sparse=True) if way == "sparse" else dict(transport=way)
    tensors = trainer_tensors()
    with cluster.publisher(**settings) as publisher:
        first = publisher.push(tensors, 1)
        broken = {name: tensor.clone() for name, tensor in tensors.items()}
        broken["a.weight"][20, 3] = -float("inf")
        with pytest.raises(PushError, match="a.weight: expected finite values .*reject_nonfinite=False") as error:
            publisher.push(broken, 2)
        assert worker.address in str(error.value) and "serves version 1" in str(error.value)
        assert serves(worker, tensors, first)
    with cluster.publisher(reject_nonfinite=False, **settings) as publisher:
        assert serves(worker, broken, publisher.push(broken, 3))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_iterator_is_consumed_one_tensor_at_a_time(cluster: Cluster, transport: str) -> None:
    worker = cluster.start()
    tensors = trainer_tensors()
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name in SHAPES:
            alive.append(sum(reference() is not None for reference in made))
            tensor = tensors[name].clone()
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    gc.disable()
    try:
        with cluster.publisher(transport) as publisher:
            result = publisher.push(one_by_one(), 1)
    finally:
        gc.enable()
    assert serves(worker, tensors, result)
    assert len(made) == len(SHAPES)  # each tensor was made once
    assert alive == [0] * len(SHAPES)  # and freed before the next tensor was made


@pytest.mark.parametrize(("transport", "phase"), [step for step in STEPS if step[1] != "commit_push"])
def test_if_one_worker_refuses_all_keep_the_old_version(cluster: Cluster, transport: str, phase: str) -> None:
    workers = [cluster.start() for _ in range(3)]
    with cluster.publisher(transport, timeout=3600.0) as publisher:  # no call may wait this long
        before = trainer_tensors(1)
        first = publisher.push(before, 1)
        workers[1].refuse[phase] = IllegalStateError("state: expected ready, found asleep")
        with pytest.raises(PushError) as error:
            publisher.push(trainer_tensors(2), 2)
        assert f"worker {workers[1].address} failed: state: expected ready, found asleep" in str(error.value)
        if phase != "weights":
            assert f"{workers[0].address} serves version 1" in str(error.value)
        assert all(serves(worker, before, first) for worker in workers)
        after = trainer_tensors(3)
        result = publisher.push(after, 3)
        assert all(serves(worker, after, result) for worker in workers)


@pytest.mark.parametrize(("transport", "phase"), STEPS)
@thinned(lambda transport, phase: transport == "collective")
def test_a_worker_that_does_not_answer_meets_the_deadline(cluster: Cluster, transport: str, phase: str) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher(transport, timeout=2.0) as publisher:
        workers[1].mute = {phase}
        with pytest.raises(PushError) as error:
            publisher.push(trainer_tensors(1), 1)
        assert f"worker {workers[1].address} failed" in str(error.value)
        assert phase in workers[1].calls
        workers[1].mute = set()
        after = trainer_tensors(2)
        result = publisher.push(after, 2)
        assert all(serves(worker, after, result) for worker in workers)


def test_a_failure_at_commit_says_what_each_worker_serves(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher() as publisher:
        publisher.push(trainer_tensors(1), 1)
        workers[1].refuse["commit_push"] = IllegalStateError("state: expected updating, found asleep")
        with pytest.raises(PushError) as error:
            publisher.push(trainer_tensors(2), 2)
    assert f"at commit, worker {workers[1].address} failed" in str(error.value)
    assert f"{workers[0].address} serves version 2" in str(error.value)
    assert f"{workers[1].address} serves version 1" in str(error.value)
    assert (workers[0].engine.weight_version, workers[1].engine.weight_version) == (2, 1)


def test_a_dead_worker_can_be_left_out(cluster: Cluster) -> None:
    dead, living = cluster.start(), cluster.start()
    with cluster.publisher(timeout=2.0) as publisher:
        publisher.push(trainer_tensors(1), 1)
        cluster.end(dead)
        with pytest.raises(PushError, match=dead.address):
            publisher.push(trainer_tensors(2), 2)
        assert living.engine.weight_version == 1
        publisher.connect([living.address])
        tensors = trainer_tensors(3)
        assert serves(living, tensors, publisher.push(tensors, 3))


# Workers that share memory.


class KinStaging(FakeStaging):
    """A staging that can be lent to other workers in this process."""

    lent: ClassVar[list[KinStaging]] = []
    has_optional = True

    def lend(self) -> tuple[int, int, int, int]:
        self.lent.append(self)
        return 1, len(self.lent), 1, 1

    def withdraw(self) -> None:
        pass


class KinWeights(FakeWeights):
    """Weights that share memory with other weights of the same `kin`. `has_lost`: behave as if the lender had ended."""

    has_lost = False

    def __init__(self, kin: str) -> None:
        super().__init__(SHAPES, tied=TIED)
        self.kin = kin * 64

    def new_lendable(self) -> KinStaging:
        return KinStaging(self.live, in_place=False)

    def borrow(self, lent: tuple[int, int, int, int], has_optional: bool) -> KinStaging:
        if self.has_lost:
            raise FileNotFoundError
        return KinStaging.lent[lent[1] - 1]


def got(worker: FaultyWorker) -> set[str]:
    """Return the types of push calls since the last call of this function."""
    calls, worker.calls = set(worker.calls), []
    return calls - {"weights"}


ALL_CALLS = {"begin_push", "stage_bucket", "verify_push", "commit_push"}


def test_one_worker_of_each_kin_gets_the_buckets_for_all_of_them(cluster: Cluster) -> None:
    *kin, stranger = [cluster.start(weights=KinWeights(kin)) for kin in "aaab"]
    workers = [*kin, stranger, cluster.start()]
    with cluster.publisher() as publisher:
        for version in (1, 2):
            tensors = trainer_tensors(version)
            result = publisher.push(tensors, version)
            assert all(serves(worker, tensors, result) for worker in workers)
            expected = [ALL_CALLS, *[ALL_CALLS - {"stage_bucket"}] * 2, ALL_CALLS, ALL_CALLS]
            assert [got(worker) for worker in workers] == expected
        assert kin[0].engine.weights.live["a.weight"] is kin[2].engine.weights.live["a.weight"]
    for settings in (dict(in_place=True), dict(sparse=True), dict(transport="collective")):
        with cluster.publisher(**settings) as publisher:
            tensors = trainer_tensors(version := version + 1)
            result = publisher.push(tensors, version)
            assert all(serves(worker, tensors, result) for worker in workers)
            assert [got(worker) for worker in workers] == [ALL_CALLS] * 5, settings


@pytest.mark.parametrize(
    ("position", "phase"),
    [(0, "begin_push"), (0, "stage_bucket"), (0, "verify_push"), (1, "begin_push"), (1, "verify_push")],
)
def test_if_a_worker_that_shares_memory_refuses_all_keep_the_old_version(
    cluster: Cluster, position: int, phase: str
) -> None:
    workers = [cluster.start(weights=KinWeights("c")) for _ in range(3)]
    before, tensors = trainer_tensors(1), trainer_tensors(2)
    with cluster.publisher() as publisher:
        first = publisher.push(before, 1)
        workers[position].refuse[phase] = IllegalStateError("busy")
        with pytest.raises(PushError, match=f"{workers[position].address} failed: .*busy") as caught:
            publisher.push(tensors, 2)
        assert caught.value.lost == (workers[position].address,)
        assert all(serves(worker, before, first) for worker in workers)
        result = publisher.push(tensors, 3)
        assert all(serves(worker, tensors, result) for worker in workers)


def test_a_lender_that_ends_before_others_map_its_memory_is_lost(cluster: Cluster) -> None:
    lender, other = [cluster.start(weights=KinWeights("d")) for _ in range(2)]
    before = trainer_tensors(1)
    with cluster.publisher(timeout=2.0) as publisher:
        first = publisher.push(before, 1)
        weights = other.engine.weights
        assert isinstance(weights, KinWeights)
        weights.has_lost = True
        lender.mute.add("abort_push")
        with pytest.raises(PushError, match=f"{other.address} failed: lent: .*{lender.address} does not") as caught:
            publisher.push(trainer_tensors(2), 2)
        assert caught.value.lost == (lender.address,) and serves(other, before, first)


def test_lent_memory_needs_whole_weights_and_the_same_kin(cluster: Cluster) -> None:
    worker, stranger = cluster.start(weights=KinWeights("e")), cluster.start()
    source = dict(kind="lent", kin="e" * 64, pid=1, fd=1, inode=1, num_bytes=1)
    begin = dict(push_id="1" * 32, weight_version=1, dtype="bfloat16")
    with RawClient(worker.address) as kin, RawClient(stranger.address) as other, closing(SharedSlots(64)) as slots:
        shared = slots.source(0).model_dump()
        for client, fields in (
            (other, dict(source=source)),
            (kin, dict(source=source | {"kin": "f" * 64})),
            (kin, dict(source=source, in_place=True)),
            (kin, dict(source=source, base="2" * 32)),
            (kin, dict(source=source, adapters={"weights": []})),
            (kin, dict(source=source, lends=True)),
            (other, dict(source=shared, lends=True)),
            (kin, dict(source=shared, lends=True, in_place=True)),
        ):
            reply = ask(client, "begin_push", **begin, **fields)
            assert reply["type"] == "error" and reply["code"] in ("push_failed", "version_gap"), fields
            assert re.search("requires whole tensors|the changes are relative to", reply["message"]), fields


# Restarted workers.


@pytest.mark.parametrize(
    ("transport", "sparse"), [("shared", True), ("collective", True), ("relay", True), ("disk", False)]
)
def test_a_restarted_worker_gets_the_next_push_whole_and_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, transport: str, sparse: bool
) -> None:
    old, other = cluster.start(), cluster.start()
    with cluster.publisher(transport, sparse=sparse) as publisher:
        publisher.push(trainer_tensors(1), 1)
        assert publisher.push(trainer_tensors(1), 2).is_sparse == sparse
        cluster.end(old)
        new = cluster.start(old.address)
        tensors = trainer_tensors(2)
        assert "was restarted" not in caplog.text
        result = publisher.push(tensors, 3)
        assert not result.is_sparse and serves(new, tensors, result) and serves(other, tensors, result)
        [told] = [line for line in caplog.messages if "was restarted" in line]
        assert f"worker {new.address} was restarted since the last push, and has served version 0 since" in told
        assert publisher.push(trainer_tensors(2), 4).is_sparse == sparse
        assert caplog.text.count("was restarted") == 1


def test_versions_that_are_not_later_are_refused_unless_allowed(cluster: Cluster) -> None:
    workers = [cluster.start(), cluster.start()]
    with cluster.publisher() as publisher:
        before = trainer_tensors(1)
        first = publisher.push(before, 7)
        for version in (7, 3):
            with pytest.raises(PushError, match=f"version {version} is not newer than .* 7; .*allow_older"):
                publisher.push(trainer_tensors(2), version)
            assert all(serves(worker, before, first) for worker in workers)
        result = publisher.push(before, 3, allow_older=True)
        assert all(serves(worker, before, result) for worker in workers)


def test_the_last_version_leaves_room_for_another_int64(cluster: Cluster) -> None:
    """2**63 - 1 is the largest int64, so no version could follow it."""
    worker = cluster.start()
    with cluster.publisher() as publisher:
        versions: list[Any] = [2**63 - 1, np.int64(2**63 - 1), -1, 1.0, True, np.True_]
        for version in versions:
            with pytest.raises(ConfigError, match=f"^version: must be an integer from 0 to {2**63 - 2} "):
                publisher.push(trainer_tensors(1), version)
        tensors = trainer_tensors(1)
        result = publisher.push(tensors, np.int64(2**63 - 2))  # type: ignore[arg-type]
        assert serves(worker, tensors, result) and result.version == 2**63 - 2 and type(result.version) is int


@pytest.mark.parametrize(("transport", "sparse"), [("shared", False), ("shared", True), ("collective", False)])
def test_a_restarted_worker_is_restored_and_the_others_notice_nothing(
    cluster: Cluster, transport: str, sparse: bool
) -> None:
    workers = [cluster.start() for _ in range(3)]
    tensors = trainer_tensors(1)
    with cluster.publisher(transport, sparse=sparse) as publisher:
        assert publisher.stale_workers() == [worker.address for worker in workers], "nothing was pushed"
        first = publisher.push(tensors, 5)
        assert publisher.stale_workers() == [] and publisher.restore(tensors) is None
        cluster.end(workers[1])
        workers[1] = cluster.start(workers[1].address)
        assert publisher.stale_workers() == [workers[1].address]
        calls = [worker.calls.copy() for worker in (workers[0], workers[2])]
        result = publisher.restore(tensors)
        assert result is not None and result.version == 5 and not result.is_sparse
        assert serves(workers[1], tensors, result) and publisher.stale_workers() == []
        for worker, before in zip((workers[0], workers[2]), calls, strict=True):
            assert set(worker.calls[len(before) :]) == {"weights"} and serves(worker, tensors, first)
        after = publisher.push(trainer_tensors(2), 6)
        assert not after.is_sparse and all(serves(worker, trainer_tensors(2), after) for worker in workers)
        assert publisher.push(trainer_tensors(2), 7).is_sparse == sparse and publisher.stale_workers() == []


@pytest.mark.parametrize("version", [0, 5])
def test_dirty_workers_and_version_0_are_restored(cluster: Cluster, version: int) -> None:
    worker, other = cluster.start(), cluster.start()
    tensors = trainer_tensors(1)
    with cluster.publisher() as publisher, RawClient(worker.address) as client:
        publisher.push(tensors, version, allow_older=version == 0)
        ask(client, "sleep", level=2, tags=["weights"])
        ask(client, "wake_up")
        cluster.end(other)
        other = cluster.start(other.address)
        assert publisher.stale_workers() == [worker.address, other.address]
        result = publisher.restore(iter(tensors.items()))
        assert result is not None and all(serves(each, tensors, result) for each in (worker, other))


def test_restore_needs_an_earlier_push_and_no_folder(cluster: Cluster) -> None:
    cluster.start()
    with cluster.publisher() as publisher, pytest.raises(ConfigError, match="restore: nothing was pushed yet"):
        publisher.restore(trainer_tensors())
    with cluster.publisher("disk") as publisher, pytest.raises(ConfigError, match="call push_folder"):
        publisher.restore(trainer_tensors())


def test_a_folder_goes_only_to_workers_that_do_not_serve_it(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    tensors = trainer_tensors(1)
    with cluster.publisher("disk") as publisher:
        first = publisher.push(tensors, 5)
    [folder] = (cluster.folder / "pushes").iterdir()
    cluster.end(workers[1])
    workers[1] = cluster.start(workers[1].address)
    workers[0].calls.clear()
    with cluster.publisher("disk") as publisher:  # a restarted trainer can also push this version
        again = publisher.push_folder(folder)
        assert again is not None and serves(workers[1], tensors, again) and serves(workers[0], tensors, first)
        assert "begin_push" not in workers[0].calls
        assert publisher.stale_workers() == [] and publisher.push_folder(folder) is None
        publisher.push(trainer_tensors(2), 6)
        [folder] = (cluster.folder / "pushes").iterdir()
    with cluster.publisher() as publisher:
        publisher.push(tensors, 7)
        with pytest.raises(PushError, match="is not newer than the served version 7"):
            publisher.push_folder(folder)
        back = publisher.push_folder(folder, allow_older=True)
        assert back is not None and all(serves(worker, trainer_tensors(2), back) for worker in workers)


# Lost workers.


@pytest.fixture(autouse=True)
def _brief_waits_for_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "LOST_SECONDS", 0.2)


def lose(cluster: Cluster, publisher: WeightPublisher, worker: FaultyWorker) -> None:
    """End a worker, and mark it as silent in the publisher, so that the publisher waits only briefly for it."""
    cluster.end(worker)
    assert publisher._workers is not None
    publisher._workers._silent.add(worker.address)


def test_a_dead_worker_is_reported_long_before_the_timeout(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "ANSWER_SECONDS", 2.0)
    dead, living = cluster.start(), cluster.start()
    tensors = trainer_tensors(1)
    with cluster.publisher(timeout=3600.0) as publisher:  # no call may wait this long
        first = publisher.push(tensors, 1)
        cluster.end(dead)
        for _ in range(2):
            with pytest.raises(PushError, match=rf"worker {dead.address} failed: .*no answer within.*on_lost='skip'"):
                publisher.push(trainer_tensors(2), 2)
        assert serves(living, tensors, first) and publisher.stale_workers() == [dead.address]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lost_workers_are_skipped_and_included_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    dead, *living = (cluster.start() for _ in range(3))
    with cluster.publisher(transport, timeout=3600.0, on_lost="skip") as publisher:
        assert publisher.push(trainer_tensors(1), 1).left_out == []
        lose(cluster, publisher, dead)
        for version in (2, 3):
            tensors = trainer_tensors(version)
            result = publisher.push(tensors, version)
            assert result.left_out == [dead.address] and all(serves(worker, tensors, result) for worker in living)
            assert caplog.text.count(f"worker {dead.address} is left out of the push") == version - 1
        assert publisher.stale_workers() == [dead.address]
        back = cluster.start(dead.address)
        for version in range(4, 2000):  # the worker answers as soon as it is connected again
            result = publisher.push(tensors, version)
            if not result.left_out:
                break
        assert all(serves(worker, tensors, result) for worker in (back, *living))


def test_a_loading_worker_is_left_out_but_one_that_refuses_is_not(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher(on_lost="skip") as publisher:
        workers[0].refuse["weights"] = IllegalStateError("weights: expected ready, found state loading")
        assert publisher.push(trainer_tensors(1), 1).left_out == [workers[0].address]
        workers[0].refuse["weights"] = ForbiddenError("weights: expected another role")
        with pytest.raises(PushError, match=f"worker {workers[0].address} failed: weights: expected another role"):
            publisher.push(trainer_tensors(2), 2)
        result = publisher.push(trainer_tensors(2), 2)
        assert result.left_out == [] and all(serves(worker, trainer_tensors(2), result) for worker in workers)


def test_losing_all_workers_is_an_error(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher(on_lost="skip") as publisher:
        publisher.push(trainer_tensors(1), 1)
        lose(cluster, publisher, worker)
        with pytest.raises(PushError, match=f"worker {worker.address} failed"):
            publisher.push(trainer_tensors(2), 2)


def test_a_worker_lost_during_a_collective_push_fails_only_that_push(cluster: Cluster) -> None:
    dying, living = cluster.start(), cluster.start()
    tensors = trainer_tensors(1)
    with cluster.publisher("collective", on_lost="skip", timeout=2.0) as publisher:
        first = publisher.push(tensors, 1)
        dying.mute = {"verify_push"}
        with pytest.raises(PushError, match=f"at verify, worker {dying.address} failed"):
            publisher.push(trainer_tensors(2), 2)
        assert serves(living, tensors, first)
        lose(cluster, publisher, dying)
        result = publisher.push(trainer_tensors(2), 2)
        assert result.left_out == [dying.address] and serves(living, trainer_tensors(2), result)


@pytest.mark.parametrize(("transport", "phase"), INDEPENDENT_STEPS)
def test_a_push_continues_without_a_lost_worker(cluster: Cluster, transport: str, phase: str) -> None:
    workers = [cluster.start() for _ in range(3)]
    tensors = trainer_tensors(1)
    pairs = iter(tensors.items())  # can be read only once, so the push cannot be repeated
    with cluster.publisher(transport, on_lost="skip", timeout=4.0) as publisher:  # a relay's silence takes a part of it
        workers[1].refuse[phase] = WorkerFailedError("worker: gone")
        result = publisher.push(pairs, 1)
        assert result.left_out == publisher.stale_workers() == [workers[1].address]
        assert workers[1].engine.weight_version == 0 and phase in workers[1].calls
        assert all(serves(worker, tensors, result) for worker in (workers[0], workers[2]))
        result = publisher.push(tensors, 2)
        assert result.left_out == [] and all(serves(worker, tensors, result) for worker in workers)
        for worker in workers:
            worker.refuse[phase] = WorkerFailedError("worker: gone")
        with pytest.raises(PushError, match="worker: gone"):
            publisher.push(tensors, 3)


@pytest.mark.parametrize("on_lost", ["skip", "raise"])
def test_a_worker_that_gets_no_bytes_is_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, on_lost: str) -> None:
    follow = RelayReader._follow

    def follow_unless_cut_off(self: RelayReader, member: Any, *args: Any) -> None:
        if self._source.position == 1:
            raise OSError("no route to host")
        follow(self, member, *args)

    monkeypatch.setattr(RelayReader, "_follow", follow_unless_cut_off)
    workers, tensors = [cluster.start() for _ in range(3)], trainer_tensors(1)
    with cluster.publisher("relay", on_lost=on_lost, timeout=4.0) as publisher:
        if on_lost == "raise":
            with pytest.raises(
                PushError, match=f"worker {workers[1].address} failed: relay: cannot receive .*no route"
            ):
                publisher.push(tensors, 1)
            return
        result = publisher.push(tensors, 1)
        assert result.left_out == [workers[1].address]
        assert all(serves(worker, tensors, result) for worker in (workers[0], workers[2]))


@pytest.mark.parametrize("transport", ["shared", "relay"])
def test_a_lost_worker_does_not_hide_a_fault_of_the_push(cluster: Cluster, transport: str) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher(transport, on_lost="skip", timeout=4.0) as publisher:
        workers[0].refuse["stage_bucket"] = WorkerFailedError("worker: gone")
        with pytest.raises(PushError, match=f"worker {workers[1].address} failed: .*expected finite values"):
            publisher.push(trainer_tensors() | {"a.weight": torch.full((33, 40), torch.nan)}, 1)


def test_a_worker_that_computes_for_long_or_is_stopped_for_a_moment_is_not_lost(cluster: Cluster) -> None:
    computing, stopped = cluster.start(), cluster.start()
    dispatch = stopped._dispatch
    handle = dispatch._handle

    def handle_late(peer: Peer, message: protocol.Call) -> None:
        dispatch._handle = handle  # type: ignore[method-assign]
        time.sleep(publisher_module.ANSWER_SECONDS / 4)
        computing.engine.gate.set()
        handle(peer, message)

    with cluster.publisher() as publisher, RawClient(computing.address) as client:
        computing.engine.gate.clear()
        client.generate("long")
        assert computing.engine.at_gate.wait(20)
        dispatch._handle = handle_late  # type: ignore[method-assign]
        result = publisher.push(trainer_tensors(1), 1)
        assert dispatch._handle == handle
        assert all(serves(worker, trainer_tensors(1), result) for worker in cluster.workers)


def test_workers_that_want_different_parameters_are_an_error(cluster: Cluster) -> None:
    cluster.start()
    other = cluster.start(weights=FakeWeights(SHAPES, "float32"))
    with cluster.publisher() as publisher:
        with pytest.raises(PushError, match=f"worker {other.address} expects other parameters"):
            publisher.push(trainer_tensors(), 1)


def test_a_failed_push_in_place_reports_lost_weights(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher(in_place=True) as publisher:
        tensors = trainer_tensors(1)
        assert serves(worker, tensors, publisher.push(tensors, 1))
        worker.refuse["verify_push"] = IllegalStateError("no")
        with pytest.raises(
            PushError, match=f"{worker.address} has lost its weights .it was at version 1.; it needs a complete push"
        ):
            publisher.push(trainer_tensors(2), 2)
        after = trainer_tensors(3)
        assert serves(worker, after, publisher.push(after, 3))


def test_in_place_a_worker_that_was_not_written_to_still_serves(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher(in_place=True) as publisher:
        tensors = trainer_tensors(1)
        first = publisher.push(tensors, 1)
        workers[1].refuse["begin_push"] = IllegalStateError("no")
        with pytest.raises(PushError) as error:
            publisher.push(trainer_tensors(2), 2)
    assert workers[1]._vitals.health().state == "ready" and serves(workers[1], tensors, first)
    assert f"{workers[1].address} serves version 1" in str(error.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("in_place", [False, True])
@thinned(lambda transport, in_place: transport == "shared")
def test_a_drain_may_take_longer_than_the_timeout(cluster: Cluster, transport: str, in_place: bool) -> None:
    """The other worker also waits for the drain. After `drain_timeout`, the push fails and no weights change."""
    worker, idle = cluster.start(), cluster.start()
    engine = worker.engine
    engine.flow.clear()
    settings: dict[str, Any] = dict(timeout=2.0, in_flight="drain", in_place=in_place)
    tensors = trainer_tensors()
    with RawClient(worker.address) as client:
        client.generate("running")
        while not engine.requests:
            time.sleep(0.001)
        with cluster.publisher(transport, drain_timeout=0.1, **settings) as publisher:
            with pytest.raises(PushError, match=f"1 unfinished.*{worker.address} serves version 0"):
                publisher.push(tensors, 1)
        threading.Timer(3.5, engine.flow.set).start()
        with cluster.publisher(transport, drain_timeout=60.0, **settings) as publisher:
            result = publisher.push(tensors, 2)
        assert engine.flow.is_set()
        assert serves(worker, tensors, result) and serves(idle, tensors, result)
        assert client.receive_until("done")[-1]["finish_reasons"] == {"length": 1}


# Sparse pushes.


def change_some(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Change a few elements of one tensor, all elements of another, and nothing else. The changes include -0.0 for 0.0,
    and NaN.
    """
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["a.weight"][0, 0] = -0.0
    changed["a.weight"][32, 39] = float("nan")
    changed["a.weight"][7, 5] += 10
    changed["norm.weight"] += 100
    return changed


def zero_at_origin() -> dict[str, torch.Tensor]:
    tensors = trainer_tensors(1)
    tensors["a.weight"][0, 0] = 0.0
    return tensors


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_a_sparse_push_has_the_bits_of_a_full_one(cluster: Cluster, transport: str) -> None:
    workers = [cluster.start() for _ in range(2)]
    tensors = zero_at_origin()
    changed = change_some(tensors)
    with cluster.publisher(transport, sparse=True, reject_nonfinite=False) as publisher:
        full = publisher.push(tensors, 1)
        assert not full.is_sparse
        result = publisher.push(changed, 2)
        assert result.is_sparse and result.num_bytes < full.num_bytes / 5
        assert all(serves(worker, changed, result) for worker in workers)
        assert torch.signbit(workers[0].engine.weights.live["a.weight"][0, 0])
        same = publisher.push(changed, 3)
        assert same.is_sparse and same.num_bytes == 0
        assert all(serves(worker, changed, same) for worker in workers)


def test_a_sparse_push_may_be_applied_twice(cluster: Cluster) -> None:
    worker = cluster.start()
    applied = []
    commit = worker.engine.weights.commit

    def commit_twice(staging: Any) -> None:
        commit(staging)
        commit(staging)
        applied.append(sum(len(indices) > 0 for _, indices, _ in staging.elements))

    worker.engine.weights.commit = commit_twice  # type: ignore[method-assign]
    tensors = zero_at_origin()
    changed = change_some(tensors)
    with cluster.publisher(sparse=True, reject_nonfinite=False) as publisher:
        publisher.push(tensors, 1)
        assert serves(worker, changed, publisher.push(changed, 2))
    assert applied == [0, 1]


def test_a_long_list_of_changes_is_cut_over_buckets(cluster: Cluster) -> None:
    shapes = {"big.weight": (64, 300)}
    worker = cluster.start(weights=FakeWeights(shapes))
    tensors = {"big.weight": torch.zeros(64, 300)}
    with cluster.publisher(sparse=True) as publisher:
        publisher.push(tensors, 1)
        worker.calls.clear()
        tensors["big.weight"].view(-1)[::5] = 1.0
        result = publisher.push(tensors, 2)
        assert result.is_sparse and worker.calls.count("stage_bucket") > 10
        assert serves(worker, tensors, result)


def test_a_tensor_with_many_changes_is_sent_whole(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher(sparse=True) as publisher:
        full = publisher.push(trainer_tensors(1), 1)
        tensors = trainer_tensors(2)
        result = publisher.push(tensors, 2)
        assert result.is_sparse and result.num_bytes == full.num_bytes
        assert serves(worker, tensors, result)


def test_after_a_gap_the_push_is_full(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    with cluster.publisher(sparse=True, reject_nonfinite=False) as publisher, cluster.publisher() as another:
        publisher.push(trainer_tensors(1), 1)
        another.push(trainer_tensors(9), 9)
        tensors = trainer_tensors(2)
        result = publisher.push(tensors, 10)
        assert not result.is_sparse and all(serves(worker, tensors, result) for worker in workers)
        assert publisher.push(change_some(tensors), 11).is_sparse


def test_a_gap_during_a_push_is_an_error_and_the_next_push_is_full(cluster: Cluster) -> None:
    workers = [cluster.start() for _ in range(2)]
    tensors = trainer_tensors(1)
    with cluster.publisher(sparse=True, reject_nonfinite=False) as publisher:
        first = publisher.push(tensors, 1)
        workers[1].refuse["begin_push"] = VersionGapError("base: expected another")
        changed = change_some(tensors)
        with pytest.raises(VersionGapError, match=f"worker {workers[1].address} failed: base"):
            publisher.push(changed, 2)
        assert all(serves(worker, tensors, first) for worker in workers)
        result = publisher.push(changed, 3)
        assert not result.is_sparse and all(serves(worker, changed, result) for worker in workers)


def test_after_a_failed_sparse_push_the_next_is_full(cluster: Cluster) -> None:
    worker = cluster.start()
    tensors = zero_at_origin()
    with cluster.publisher(sparse=True, reject_nonfinite=False) as publisher:
        publisher.push(tensors, 1)
        changed = change_some(tensors)
        worker.refuse["verify_push"] = IllegalStateError("no")
        with pytest.raises(PushError):
            publisher.push(changed, 2)
        result = publisher.push(changed, 3)
        assert not result.is_sparse and serves(worker, changed, result)
        assert publisher.push(changed, 4).is_sparse


# Pushes between GPUs, with host memory in place of theirs.


class Gpus:
    """Pretends that the trainer is on GPU 0, and that workers start on GPU `next`, or on a CPU if `next` is None.

    `sources`: kind of the source of each push.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library = CudaLibrary()
        self.next: int | None = 0
        self.sources: list[str] = []
        NcclGroup.made.clear()
        monkeypatch.setattr(cuda_ipc_module, "load_driver", lambda: cuda_ipc_module.Driver(self.library))
        monkeypatch.setattr(cuda_ipc_module, "tensor_at", host_tensor_at)
        monkeypatch.setattr(cuda_ipc_module, "gpu_of", lambda device: gpu(0))
        monkeypatch.setattr(sender_module, "gpu_of", lambda device: gpu(0))
        monkeypatch.setattr(nccl_module, "gpu_of", lambda device: gpu(0))
        monkeypatch.setattr(sender_module, "GPU_BUCKET_BYTES", BUCKET_BYTES)
        monkeypatch.setattr(gpu_module, "gpu_of", lambda device: None if self.next is None else gpu(self.next))
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        self._watch(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = Transaction.begin

        def watched(transaction: Transaction, dtype: str, source: Any, *args: Any, **others: Any) -> Any:
            backend = getattr(source(0), "backend", None)
            self.sources.append(source(0).kind if backend is None else f"{source(0).kind} {backend}")
            return begin(transaction, dtype, source, *args, **others)

        monkeypatch.setattr(Transaction, "begin", watched)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize(
    ("transport", "numbers", "way"),
    [
        ("shared", [0], "cuda_ipc"),
        ("shared", [0, 0], "cuda_ipc"),
        ("shared", [0, 1], "shared"),
        ("shared", [0, None], "shared"),
        ("collective", [1], "collective nccl"),
        ("collective", [1, 2], "collective nccl"),
        ("collective", [1, None], "collective gloo"),
        ("disk", [0], "disk"),
    ],
)
def test_weights_go_from_gpu_to_gpu_if_possible(
    cluster: Cluster, gpus: Gpus, transport: str, numbers: list[int | None], way: str
) -> None:
    workers = []
    for number in numbers:
        gpus.next = number
        workers.append(cluster.start())
    with cluster.publisher(transport) as publisher:
        for version in (3, 4):
            tensors = trainer_tensors(version)
            result = publisher.push(tensors if version == 3 else iter(tensors.items()), version)
            assert all(serves(worker, tensors, result) for worker in workers)
            assert not gpus.library.allocated and not any(gpus.library.opened.values())
            assert not gpus.library.freed_while_open
    assert gpus.sources == [way, way]
    assert bool(gpus.library.opened) == (way == "cuda_ipc")
    assert len(NcclGroup.made) == (2 * len(workers) + 2 if way == "collective nccl" else 0)
    if transport != "disk":
        assert workers[0].calls.count("stage_bucket") > 6


def test_collective_on_one_gpu_is_refused_before_anything_begins(cluster: Cluster, gpus: Gpus) -> None:
    worker = cluster.start()
    with cluster.publisher("collective") as publisher:
        with pytest.raises(
            ConfigError, match=f"the trainer and worker {worker.address} are both on GPU .*push by 'shared'"
        ):
            publisher.push(trainer_tensors(), 1)
    assert "begin_push" not in worker.calls and not NcclGroup.made


@pytest.mark.parametrize(("transport", "way"), [("shared", "shared"), ("collective", "collective gloo")])
def test_a_sparse_push_goes_through_host_memory(cluster: Cluster, gpus: Gpus, transport: str, way: str) -> None:
    worker = cluster.start()
    tensors = zero_at_origin()
    changed = change_some(tensors)
    with cluster.publisher(transport, sparse=True, reject_nonfinite=False) as publisher:
        publisher.push(tensors, 1)
        result = publisher.push(changed, 2)
        assert result.is_sparse and serves(worker, changed, result)
    assert gpus.sources == [way, way]


@pytest.mark.parametrize(("transport", "number"), [("shared", 0), ("collective", 1)])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("weights", "commit_push")])
def test_a_push_between_gpus_that_fails_leaves_nothing_behind(
    cluster: Cluster, gpus: Gpus, transport: str, number: int, phase: str
) -> None:
    gpus.next = number
    workers = [cluster.start()]
    gpus.next = number and number + 1
    workers.append(cluster.start())
    with cluster.publisher(transport) as publisher:
        before = trainer_tensors(1)
        first = publisher.push(before, 1)
        workers[1].refuse[phase] = IllegalStateError("state: expected ready, found asleep")
        with pytest.raises(PushError, match=f"{workers[0].address} serves version 1"):
            publisher.push(trainer_tensors(2), 2)
        assert all(serves(worker, before, first) for worker in workers)
        assert not gpus.library.allocated
        after = trainer_tensors(3)
        result = publisher.push(after, 3)
        assert all(serves(worker, after, result) for worker in workers)
    end = time.monotonic() + 20
    while any(gpus.library.opened.values()) or not all(group.is_aborted for group in NcclGroup.made):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_corrupt_bucket_between_gpus_is_detected(
    cluster: Cluster, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cluster.start()
    before = trainer_tensors(1)
    with cluster.publisher() as publisher:
        first = publisher.push(before, 1)
        stage = Transaction.stage

        def damaged(transaction: Transaction, bucket: Any) -> Any:
            if bucket.index == 0:
                [address] = gpus.library.allocated
                host_tensor_at(address, 1, torch.device("cpu"))[0] ^= 1
            return stage(transaction, bucket)

        monkeypatch.setattr(Transaction, "stage", damaged)
        with pytest.raises(PushError, match=r"bucket 0 \(embed.weight.*\): expected word sum .* corrupt"):
            publisher.push(trainer_tensors(2), 2)
        assert serves(worker, before, first)


# Disk.


def test_a_folder_is_a_checkpoint_and_can_be_pushed_again(cluster: Cluster) -> None:
    worker = cluster.start()
    tensors = trainer_tensors()
    with cluster.publisher("disk") as publisher:
        first = publisher.push(tensors, 5)
        [folder] = (cluster.folder / "pushes").iterdir()
        assert folder.name == f"version-5-{first.push_id[:8]}"
        read = load_file(folder / MODEL_FILE)
        assert read.keys() == tensors.keys()
        assert all(same_bits(read[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
        cluster.end(worker)
        restarted = cluster.start(worker.address)
        again = publisher.push_folder(folder)
        assert again is not None
        assert (again.version, again.push_id, again.num_bytes) == (5, first.push_id, first.num_bytes)
        assert serves(restarted, tensors, again)


def test_only_older_pushes_and_leftovers_are_removed(cluster: Cluster) -> None:
    cluster.start()
    parent = cluster.folder / "pushes"
    leftover = parent / "version-1-00000000.tmp"
    kept = [parent / "version-1-00000000", parent / "notes", parent / "version-7-00000000.tmp.old"]
    for folder in (leftover, *kept):
        folder.mkdir(parents=True)
    with cluster.publisher("disk") as publisher:
        first = publisher.push(trainer_tensors(1), 1)
        assert not leftover.exists() and all(folder.exists() for folder in kept)
        second = publisher.push(trainer_tensors(2), 2)
    assert first.push_id != second.push_id
    found = {folder.name for folder in parent.iterdir()}
    assert found == {f"version-2-{second.push_id[:8]}", *(folder.name for folder in kept)}


def test_a_corrupt_or_foreign_folder_is_refused(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher("disk") as publisher:
        publisher.push(trainer_tensors(), 1)
        cluster.end(worker)
        worker = cluster.start(worker.address)
        [folder] = (cluster.folder / "pushes").iterdir()
        file = folder / MODEL_FILE
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(PushError, match=r"tensor \S+: expected checksum"):
            publisher.push_folder(folder)
        file.write_bytes(whole[:-10])
        with pytest.raises(PushError, match="safetensors"):
            publisher.push_folder(folder)
        file.write_bytes(whole)
        (folder / MANIFEST_FILE).write_text("{}")
        with pytest.raises(PushError, match="manifest"):
            publisher.push_folder(folder)
        with pytest.raises(PushError, match="none"):
            publisher.push_folder(cluster.folder / "none")
        assert worker.engine.weight_version == 0 and "commit_push" not in worker.calls


def test_a_folder_that_cannot_be_written_is_an_error(cluster: Cluster) -> None:
    worker = cluster.start()
    (cluster.folder / "file").write_text("")
    with cluster.publisher("disk", folder=cluster.folder / "file") as publisher:
        with pytest.raises(PushError, match="cannot write"):
            publisher.push(trainer_tensors(), 1)
    assert "begin_push" not in worker.calls


# Settings.


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (dict(transport="carrier pigeon"), "transport"),
        (dict(timeout=0.0), "timeout"),
        (dict(transport="disk"), "folder"),
        (dict(folder="x"), "folder"),
        (dict(transport="disk", folder="x", sparse=True), "sparse"),
        (dict(sparse=True, in_place=True), "sparse"),
        (dict(in_flight="hope"), "in_flight"),
        (dict(host="127.0.0.1"), "host"),
        (dict(on_lost="wait"), "on_lost"),
        (dict(drain_timeout=-1.0), "drain_timeout"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be"):
        WeightPublisher(**settings)


def test_invalid_calls_are_refused() -> None:
    with WeightPublisher() as publisher:
        with pytest.raises(ConfigError, match="call connect"):
            publisher.push({}, 1)
        with pytest.raises(ConfigError, match="version"):
            publisher.push({}, -1)
        with pytest.raises(ConfigError, match="has an address twice"):
            publisher.connect(["ipc://a", "ipc://a"])
        with pytest.raises(ConfigError, match="address"):
            publisher.connect(["nonsense"])
        with pytest.raises(ConfigError, match="loopback"):
            publisher.connect(["tcp://8.8.8.8:1"])


def test_a_host_of_another_machine_is_refused(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher("collective", host="192.0.2.1") as publisher:
        with pytest.raises(ConfigError, match="host"):
            publisher.push(trainer_tensors(), 1)
    assert worker.engine.weight_version == 0


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (None, "cannot push a NoneType"),
        (torch.zeros(3), "cannot push a Tensor"),
        ([torch.zeros(3)], "give pairs"),
        ({5: torch.zeros(3)}, "a name must be a string"),
        ({"norm.weight": torch.zeros(40, device="meta")}, "tensor norm.weight: .* meta"),
        ({"norm.weight": torch.zeros(40, dtype=torch.complex64)}, "tensor norm.weight: .*complex64"),
        ({"norm.weight": torch.zeros(40).to_sparse()}, "tensor norm.weight: .*sparse"),
        ([("x" * 10**6, torch.zeros(5))], f"tensor {'x' * 80}: unknown"),
    ],
)
def test_objects_that_cannot_be_pushed_are_refused_by_name(cluster: Cluster, tensors: Any, named: str) -> None:
    cluster.start()
    with cluster.publisher() as publisher:
        with pytest.raises(PushError, match=named) as caught:
            publisher.push(tensors, 1)
        assert len(str(caught.value)) < 1000


def test_addresses_and_versions_of_the_wrong_kind_are_refused(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher() as publisher:
        for addresses in (worker.address, [None], [5]):
            with pytest.raises(ConfigError, match="addresses: must be a list of strings"):
                publisher.connect(addresses)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="version"):
            publisher.push({}, True)


def test_a_push_by_disk_that_fails_leaves_no_folder(cluster: Cluster) -> None:
    worker = cluster.start()
    with cluster.publisher("disk") as publisher:
        first = publisher.push(trainer_tensors(1), 1)
        worker.refuse["verify_push"] = PushError("verify: expected nothing of the kind")
        with pytest.raises(PushError, match="nothing of the kind"):
            publisher.push(trainer_tensors(2), 2)
        [folder] = (cluster.folder / "pushes").iterdir()
        assert folder.name == f"version-1-{first.push_id[:8]}"
