"""Trainers and workers that die, hang or lose their connection in each phase of a push. The tests kill real processes.
Afterwards the old version is served with the same bits as before, no request is lost, and the next push succeeds
without a restart. The failing push has distinct weights ("lost"), so that any trace of these weights is detected.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from forked import ForkedPopen
from machines import lends_huge_pages
from matrix import thinned
from safetensors.torch import load_file, save_file
from serving import RawClient

from tiny import make_tiny_model
from trueroll.engine.cache.lending import place_to_lend
from trueroll.rollout import Group, RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker
from trueroll.rollout.protocol import PushProgress

from .forwarder import Fault, Forwarder
from .trainer_process import BUCKET_BYTES, large_adapter

TRANSPORTS = ("shared", "collective", "relay", "disk", "delta")
WITHOUT_BUCKETS = ("disk", "delta")
PHASES = ("begin", "stage", "verify", "commit")
SHARES = place_to_lend() is not None
"""True if, with `shared`, the second worker maps the first worker's memory after the first worker has verified the
push.
"""
STEPS = [
    *((transport, phase) for transport in TRANSPORTS for phase in PHASES),
    pytest.param("shared", "lend", marks=lends_huge_pages),
]
EVERY_RUN = {*(("shared", phase) for phase in (*PHASES, "lend")), ("collective", "stage"), ("disk", "commit")}
EVERY_RUN |= {("delta", "verify")}
"""The pairs that every run tests: each phase, and each transport in a phase that the transport handles differently."""
PROGRESS = {"begin": "begun", "stage": "staged", "verify": "staged", "lend": "verified", "commit": "verified"}
PATIENT = 60.0
"""Timeout of pushes that must succeed, in seconds."""
SHORT = 1.5
"""Timeout of pushes that must fail, in seconds. The tests wait for it."""
LONGER = 10.0
"""Timeout of a publisher with one push that must fail and a second push that must succeed, in seconds."""
PROMPTS = [[1, 20, 30, 40] * 6, [7]]
PARAMS = SamplingParams(n=2, max_tokens=16, top_p=0.9)
LONG_PROMPT = [1, 20, 30]
LONG: dict[str, Any] = dict(n=12, max_tokens=500, seed=9, ignore_eos=True)
HERE = Path(__file__).parent
SHM = Path("/dev/shm")

Bits = list[tuple[bytes, bytes]]
"""(tokens, log-probs) of each sample."""


def packed(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def bits_of(groups: list[Group]) -> Bits:
    samples = [sample for group in groups for sample in group.samples]
    assert all(sample.logprobs is not None and len(sample.logprobs) for sample in samples)
    return [(packed(s.token_ids), s.logprobs.tobytes()) for s in samples if s.logprobs is not None]


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.03)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of the same shapes: `old`, `lost` (pushed by the failing pushes) and `new`."""
    parent = tmp_path_factory.mktemp("kills")
    old = make_tiny_model("llama", parent / "old", max_position_embeddings=2048)
    tensors = load_file(old / "model.safetensors")
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "lost": lambda tensor: tensor.roll(1, 0),
        "new": lambda tensor: tensor.flip(0),
    }
    for name, change in changes.items():
        shutil.copytree(old, parent / name)
        changed = {key: change(tensor).contiguous() for key, tensor in tensors.items()}
        save_file(changed, parent / name / "model.safetensors", metadata={"format": "pt"})
    assert sum(tensor.nbytes for tensor in tensors.values()) > 10 * BUCKET_BYTES
    return {name: parent / name for name in ("old", "lost", "new")}


class Trainer:
    """The parent's side of a `trainer_process`."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "trainer_process.py")]
        self.process = ForkedPopen(command, text=True)
        self.is_pushing = False

    def connect(self, addresses: list[str], settings: dict[str, Any] | None = None) -> None:
        """Make a publisher with these settings, or connect the existing publisher to other workers."""
        self._tell(json.dumps({"connect": addresses} | ({} if settings is None else {"settings": settings})))
        assert self.hear() == {"connected": addresses}

    def push(self, folder: Path, version: int) -> None:
        """Push a checkpoint. The push must succeed."""
        self.start(folder, version, None)
        outcome = self.hear()
        assert outcome.get("version") == version, outcome

    def start(self, folder: Path, version: int, hold: str | None, adapters: bool = False) -> None:
        self.is_pushing = True
        self._tell(json.dumps({"push": str(folder), "version": version, "hold": hold, "adapters": adapters}))

    def push_until(self, phase: str, folder: Path, version: int, adapters: bool = False) -> str | None:
        """Begin a push and stop in `phase`. Return the name of its shared memory."""
        self.start(folder, version, phase, adapters)
        held = self.hear()
        assert held.get("held") == phase, held
        return held["memory"]

    def go_on(self, order: str = "go") -> dict[str, Any]:
        """Let the held push continue. Return the outcome of the push."""
        self._tell(order)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the trainer ended with {self.process.wait()}"
        answer = json.loads(line)
        self.is_pushing &= "held" in answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def _tell(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


class Trainers:
    """Keeps one trainer alive. After a kill, the next trainer starts in the background."""

    def __init__(self) -> None:
        self.current = Trainer()

    def kill(self) -> None:
        self.current.kill()
        self.replace()

    def replace(self) -> None:
        self.current = Trainer()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    trainers = Trainers()
    yield trainers
    trainers.current.kill()


@pytest.fixture
def trainer(trainers: Trainers) -> Iterator[Trainer]:
    yield trainers.current
    if trainers.current.is_pushing:  # the test has failed, so the next test gets a new trainer
        trainers.kill()


class Running:
    """A request that runs on a worker during a fault."""

    def __init__(self, address: str) -> None:
        self._raw = RawClient(address)
        self._id = secrets.token_hex(8)
        self._raw.generate(self._id, LONG_PROMPT, **LONG)

    def end(self, expected: Bits, version: int) -> None:
        """Assert that the request ends once, with all tokens from one version."""
        replies = self._raw.receive_until("done", "error")
        assert [reply["type"] for reply in replies] == ["sample"] * LONG["n"] + ["done"], replies
        assert {reply["id"] for reply in replies} == {self._id}
        samples = {reply["index"]: reply for reply in replies[:-1]}
        assert [(samples[i]["token_ids"], samples[i]["logprobs"]) for i in range(LONG["n"])] == expected
        assert all(sample["weight_versions"] == [[version, 0, LONG["max_tokens"]]] for sample in samples.values())
        self._raw.send("ack", ids=[self._id])
        self._raw.send("health", id="health")
        assert self._raw.receive()["type"] == "health"
        self._raw.close()


class Fleet:
    """Two workers, and the weights that they serve. Worker 0 listens on TCP, worker 1 on an ipc socket.

    `version`: version of the last push to both. `expected`, `expected_long`: for each checkpoint, the samples of a
    worker that was started from that checkpoint.
    """

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self.models = models
        self.version = 0
        self.expected: dict[str, Bits] = {}
        self.expected_long: dict[str, Bits] = {}
        self._folder = folder
        self._executor = ThreadPoolExecutor(2)
        self._starting: dict[int, Future[WorkerProcess]] = {}
        self._spare: Future[WorkerProcess] | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._clients: dict[int, RolloutClient] = {}
        for index, name in enumerate(("lost", "new")):
            self.start(index, model=name)
        for index, name in enumerate(("lost", "new")):
            self.measure(index, name)
        self.kill(1)
        self.start(1)
        self.measure(1, "old")
        self._spare = self._launch(f"ipc://{folder}/spare", "old")
        assert len({json.dumps(repr(bits)) for bits in (*self.expected.values(), *self.expected_long.values())}) == 6

    def measure(self, index: int, name: str) -> None:
        """Record the worker's samples as the expected samples of the weights with this name."""
        client = self.client(index)
        self.expected[name] = bits_of(client.generate(PROMPTS, PARAMS, seed=5))
        self.expected_long[name] = bits_of(client.generate([LONG_PROMPT], SamplingParams(**LONG)))

    def start(self, index: int, address: str | None = None, model: str = "old") -> None:
        """Start a worker in the background, at its old address or at an unused address."""
        fresh = (f"ipc://{self._folder}/{secrets.token_hex(4)}", "tcp://127.0.0.1:*")[index]
        starting = self._launch(address or fresh, model)
        if index == 1 and address is None and self._spare is not None:
            starting, self._spare = self._spare, starting
        self._starting[index] = starting

    def _launch(self, address: str, model: str) -> Future[WorkerProcess]:
        settings: dict[str, Any] = dict(num_blocks=300, num_threads=1, address=address)
        return self._executor.submit(launch_worker, str(self.models[model]), **settings)

    def worker(self, index: int) -> WorkerProcess:
        if index in self._starting:
            self._workers[index] = self._starting.pop(index).result()
            self._clients[index] = RolloutClient(self._workers[index].address, timeout=PATIENT)
        return self._workers[index]

    def client(self, index: int) -> RolloutClient:
        self.worker(index)
        return self._clients[index]

    @property
    def addresses(self) -> list[str]:
        return [self.worker(index).address for index in (0, 1)]

    def progress(self, index: int) -> PushProgress | None:
        return self.client(index).health().push

    def kill(self, index: int) -> str:
        """Kill a worker and return its address."""
        worker = self.worker(index)
        self._clients.pop(index).close()
        worker.kill()
        assert worker.exit_code == -signal.SIGKILL
        return worker.address

    def push(self, name: str, transport: Any = "shared", folder: Path | None = None) -> None:
        """Push to both workers from this process. The push must succeed."""
        settings = settings_of(transport, PATIENT, folder)
        with WeightPublisher(**settings) as publisher:
            publisher.connect(self.addresses)
            self.version += 1
            publisher.push(load_file(self.models[name] / "model.safetensors"), self.version)

    def check(self, index: int, name: str, version: int | None = None) -> None:
        """Assert that the worker serves this checkpoint, to the bit. `version`: the expected version, by default the
        version of the last push.
        """
        version = self.version if version is None else version
        client = self.client(index)
        groups = client.generate(PROMPTS, PARAMS, seed=5)
        assert bits_of(groups) == self.expected[name]
        for group in groups:
            for sample in group.samples:
                assert [span.version for span in sample.weight_versions] == [version]
        health = client.health()
        assert (health.state, health.weight_version) == ("ready", version)

    def check_freed(self, index: int) -> None:
        """Assert that the worker has released all state and memory of a push."""
        health = self.client(index).health()
        assert health.push is None and health.memory["staging"] == 0

    def close(self) -> None:
        for index in (0, 1):
            self.client(index).close()
            self._workers[index].close()
        if self._spare is not None:
            self._spare.result().close()
        self._executor.shutdown()


@pytest.fixture(scope="module")
def whole_fleet(
    models: dict[str, Path], forked_workers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    fleet = Fleet(models, tmp_path_factory.mktemp("sockets"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(whole_fleet: Fleet, request: pytest.FixtureRequest) -> Fleet:
    """Two live workers that serve `old` from a push. With `collective`, this push is the worker's first collective
    push, which may take longer than SHORT.
    """
    transport = request.getfixturevalue("transport") if "transport" in request.fixturenames else "shared"
    for index in (0, 1):
        if whole_fleet.client(index) and whole_fleet.worker(index).exit_code is not None:
            whole_fleet.start(index)
    whole_fleet.push("old", "collective" if transport == "collective" else "shared")
    for index in (0, 1):
        whole_fleet.check(index, "old")
    return whole_fleet


def settings_of(transport: str, timeout: float, folder: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = dict(transport=transport, timeout=timeout)
    return settings | ({"folder": str(folder)} if transport in WITHOUT_BUCKETS else {})


def connect(fleet: Fleet, trainer: Trainer, transport: str, timeout: float, folder: Path) -> None:
    """Connect the trainer to the fleet, so that the trainer's next push by `delta` is a delta."""
    trainer.connect(fleet.addresses, settings_of(transport, timeout, folder))
    if transport == "delta":
        fleet.version += 1
        trainer.push(fleet.models["old"], fleet.version)


def check_phase(fleet: Fleet, transport: str, phase: str, version: int, folder: Path, lends: bool = SHARES) -> None:
    """Assert that the workers are in this phase of this push. `lends`: True if workers share memory in this phase."""
    if phase == "stage" and transport in WITHOUT_BUCKETS:
        names = {"disk": f"version-{version}-*.tmp/*.safetensors", "delta": f"weight_v{version:06d}-*.tmp"}
        assert len(list(folder.glob(names[transport]))) == 1
        assert fleet.progress(0) is None and fleet.progress(1) is None
        return
    expected = PROGRESS[phase] if transport not in WITHOUT_BUCKETS or phase == "commit" else "begun"
    size = (fleet.models["old"] / "model.safetensors").stat().st_size
    for index in (0, 1):
        if phase == "commit" and index == 0:
            assert fleet.progress(0) is None and fleet.client(0).health().weight_version == version
            continue
        borrows = lends and transport == "shared" and index == 1
        if borrows and phase != "commit":
            assert fleet.progress(1) is None
            continue
        wait_until(lambda index=index: (push := fleet.progress(index)) is not None and push.phase == expected)
        push = fleet.progress(index)
        kind = "lent" if borrows else "chain" if transport == "delta" else transport
        assert push is not None and (push.weight_version, push.transport) == (version, kind)
        if borrows:
            assert push.bytes_staged == 0
            continue
        assert (push.bytes_staged > 0) == (push.phase != "begun")
        assert (push.bytes_staged > size // 2) == (push.phase != "begun" and phase != "stage")


def served_after(fleet: Fleet, phase: str, old: int) -> list[tuple[str, int]]:
    """Return (checkpoint, version) of the two workers after a push of version `old` + 1 failed in this phase."""
    return [("lost", old + 1) if phase == "commit" else ("old", old), ("old", old)]


each_phase = pytest.mark.parametrize(("transport", "phase"), STEPS, scope="module")
"""Parametrized in module scope, so that the tests of a phase run in sequence while a killed worker's replacement
starts.
"""


@each_phase
@thinned(lambda transport, phase: (transport, phase) in EVERY_RUN)
def test_a_killed_trainer(fleet: Fleet, trainers: Trainers, transport: str, phase: str, tmp_path: Path) -> None:
    connect(fleet, trainers.current, transport, PATIENT, tmp_path)
    fleet.version += 1
    memory = trainers.current.push_until(phase, fleet.models["lost"], fleet.version)
    check_phase(fleet, transport, phase, fleet.version, tmp_path)
    running = [Running(address) for address in fleet.addresses]
    wait_until(lambda: all(fleet.client(index).health().requests["open"] == 1 for index in (0, 1)))
    trainers.current.kill()
    assert [fleet.client(index).health().requests["open"] for index in (0, 1)] == [1, 1]
    trainers.replace()
    assert (memory is not None) == (transport == "shared")
    assert phase == "begin" or not (SHM / str(memory)).exists(), "only in `begin` the next push must remove it"
    served = served_after(fleet, phase, fleet.version - 1)
    for index, (name, version) in enumerate(served):
        fleet.check(index, name, version)
        running[index].end(fleet.expected_long[name], version)
    fleet.push("new", transport, tmp_path)
    assert not (SHM / str(memory)).exists()
    for index in (0, 1):
        fleet.check(index, "new")
        fleet.check_freed(index)
    assert transport != "disk" or len(list(tmp_path.iterdir())) == 1


@each_phase
@thinned(lambda transport, phase: phase in ("stage", "lend") and transport != "delta")
def test_a_trainer_that_hangs(fleet: Fleet, trainer: Trainer, transport: str, phase: str, tmp_path: Path) -> None:
    """The hang looks like a network failure. The workers abandon the push, and the trainer learns of this when it
    continues.
    """
    connect(fleet, trainer, transport, SHORT, tmp_path)
    old = fleet.version
    trainer.push_until(phase, fleet.models["lost"], old + 1)
    check_phase(fleet, transport, phase, old + 1, tmp_path)
    running = [Running(address) for address in fleet.addresses]
    process = psutil.Process(trainer.process.pid)
    process.suspend()
    try:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        for index, (name, version) in enumerate(served_after(fleet, phase, old)):
            wait_until(lambda index=index: fleet.progress(index) is None)
            fleet.check(index, name, version)
            fleet.check_freed(index)
            running[index].end(fleet.expected_long[name], version)
    finally:
        process.resume()
    outcome = trainer.go_on()
    if phase == "stage" and transport in WITHOUT_BUCKETS:  # the workers do not know of the push yet
        assert outcome.get("version") == old + 1
    else:
        assert outcome.get("kind") == "PushError", outcome
        for index, (_, version) in enumerate(served_after(fleet, phase, old)):
            assert f"{fleet.addresses[index]} serves version {version}" in outcome["error"]
    fleet.version = old + 2
    trainer.push(fleet.models["new"], fleet.version)
    for index in (0, 1):
        fleet.check(index, "new")


@each_phase
@thinned(lambda transport, phase: (transport, phase) in EVERY_RUN)
def test_a_killed_worker(fleet: Fleet, trainer: Trainer, transport: str, phase: str, tmp_path: Path) -> None:
    """In the phase `commit`, the worker dies after the other worker's commit and before its own."""
    survivor = fleet.addresses[0]
    connect(fleet, trainer, transport, SHORT, tmp_path)
    old = fleet.version
    trainer.push_until(phase, fleet.models["lost"], old + 1)
    check_phase(fleet, transport, phase, old + 1, tmp_path)
    running = Running(survivor)
    wait_until(lambda: fleet.client(0).health().requests["open"] == 1)
    dead = fleet.kill(1)
    assert fleet.client(0).health().requests["open"] == 1
    fleet.start(1)
    outcome = trainer.go_on()
    name, version = served_after(fleet, phase, old)[0]
    assert outcome.get("kind") == "PushError", outcome
    assert f"{survivor} serves version {version}" in outcome["error"]
    assert f"{dead} does not answer" in outcome["error"]
    fleet.check(0, name, version)
    running.end(fleet.expected_long[name], version)
    fleet.check_freed(0)
    trainer.connect([survivor])
    trainer.push(fleet.models["new"], old + 2)
    fleet.check(0, "new", old + 2)
    fleet.version = old + 2


@lends_huge_pages
@pytest.mark.parametrize("phase", ["stage", "lend", "commit"])
def test_a_killed_lender(fleet: Fleet, trainer: Trainer, phase: str) -> None:
    """In the phase `commit`, the lender has committed. The other worker has the lender's memory, but has not received a
    commit call.
    """
    trainer.connect(fleet.addresses, settings_of("shared", SHORT, None))
    old = fleet.version
    trainer.push_until(phase, fleet.models["lost"], old + 1)
    check_phase(fleet, "shared", phase, old + 1, Path())
    running = Running(fleet.addresses[1])
    wait_until(lambda: fleet.client(1).health().requests["open"] == 1)
    dead = fleet.kill(0)
    outcome = trainer.go_on()
    fleet.start(0)
    name, version = ("lost", old + 1) if phase == "commit" else ("old", old)
    if phase == "commit":
        assert outcome.get("version") == version, outcome
    else:
        assert outcome.get("kind") == "PushError" and f"{dead} does not answer" in outcome["error"], outcome
        running.end(fleet.expected_long["old"], old)
    fleet.check(1, name, version)
    fleet.check_freed(1)
    trainer.connect([fleet.addresses[1]])
    trainer.push(fleet.models["new"], old + 2)
    fleet.check(1, "new", old + 2)
    fleet.version = old + 2


@pytest.mark.parametrize(
    ("transport", "phase", "victim"),
    [
        (transport, phase, victim)
        for phase in PHASES
        for transport, victim in (("shared", "trainer"), ("shared", "worker"), ("collective", "trainer"))
    ],
    scope="module",
)
@thinned(
    lambda transport, phase, victim: (
        (transport, phase) in EVERY_RUN
        and phase in ("stage", "commit")
        and (transport, victim) != ("shared", "trainer")
    )
)
def test_a_kill_during_a_push_of_adapters(
    fleet: Fleet, trainers: Trainers, transport: str, phase: str, victim: str, tmp_path: Path
) -> None:
    if "adapted" not in fleet.expected:
        with WeightPublisher() as publisher:
            publisher.connect(fleet.addresses)
            fleet.version += 1
            publisher.push(large_adapter(fleet.models["old"]), fleet.version, adapters=True)
        fleet.measure(0, "adapted")
        assert fleet.expected["adapted"] not in (fleet.expected["old"], fleet.expected["new"])
        fleet.push("old")
    trainer, old = trainers.current, fleet.version
    trainer.connect(fleet.addresses, settings_of(transport, SHORT, tmp_path))
    trainer.push_until(phase, fleet.models["old"], old + 1, adapters=True)
    check_phase(fleet, transport, phase, old + 1, tmp_path, lends=False)
    served = [("adapted", old + 1) if phase == "commit" else ("old", old), ("old", old)]
    if victim == "trainer":
        trainers.kill()
        fleet.check(1, *served[1])
    else:
        fleet.kill(1)
        fleet.start(1)
        assert trainer.go_on().get("kind") == "PushError"
    fleet.check(0, *served[0])
    wait_until(lambda: fleet.progress(0) is None)
    fleet.check_freed(0)
    fleet.version += 1
    fleet.push("new", transport, tmp_path)
    fleet.check(0, "new")


@pytest.mark.parametrize(("transport", "victim"), [("shared", 1), ("collective", 0), ("disk", 1)])
@thinned(lambda transport, victim: transport == "collective")
def test_a_worker_restarted_at_its_address(
    fleet: Fleet, trainer: Trainer, transport: str, victim: int, tmp_path: Path
) -> None:
    trainer.connect(fleet.addresses, settings_of(transport, SHORT, tmp_path))
    fleet.version += 1
    trainer.push_until("stage", fleet.models["lost"], fleet.version)
    check_phase(fleet, transport, "stage", fleet.version, tmp_path)
    running = Running(fleet.addresses[1 - victim])
    address = fleet.kill(victim)
    outcome = trainer.go_on()
    assert outcome.get("kind") == "PushError" and f"{address} does not answer" in outcome["error"], outcome
    fleet.check(1 - victim, "old", fleet.version - 1)
    running.end(fleet.expected_long["old"], fleet.version - 1)
    fleet.start(victim, address)
    fleet.check(victim, "old", 0)
    assert fleet.addresses[victim] == address
    if transport == "collective":
        fleet.push("old", transport)  # because the first push takes longer than SHORT
    fleet.version += 1
    trainer.push(fleet.models["new"], fleet.version)
    for index in (0, 1):
        fleet.check(index, "new")


@pytest.mark.parametrize("transport", TRANSPORTS)
@thinned(lambda transport: transport == "shared")
def test_a_worker_that_hangs(fleet: Fleet, trainer: Trainer, transport: str, tmp_path: Path) -> None:
    """The worker hangs in the middle of the buckets, or with folders before it reads them."""
    phase = "begin" if transport in WITHOUT_BUCKETS else "stage"
    connect(fleet, trainer, transport, SHORT, tmp_path)
    old = fleet.version
    trainer.push_until(phase, fleet.models["lost"], old + 1)
    check_phase(fleet, transport, phase, old + 1, tmp_path)
    running = [Running(address) for address in fleet.addresses]
    wait_until(lambda: all(fleet.client(index).health().requests["open"] == 1 for index in (0, 1)))
    hung = psutil.Process(fleet.worker(1).pid)
    hung.suspend()
    try:
        wait_until(lambda: hung.status() == psutil.STATUS_STOPPED)
        outcome = trainer.go_on()
        assert outcome.get("kind") == "PushError", outcome
        assert f"{fleet.addresses[0]} serves version {old}" in outcome["error"]
        assert f"{fleet.addresses[1]} does not answer" in outcome["error"]
        fleet.check(0, "old", old)
        assert hung.status() == psutil.STATUS_STOPPED
    finally:
        hung.resume()
    wait_until(lambda: fleet.progress(1) is None)
    fleet.check(1, "old", old)
    for each in running:
        each.end(fleet.expected_long["old"], old)
    fleet.version = old + 2
    trainer.push(fleet.models["new"], fleet.version)
    for index in (0, 1):
        fleet.check(index, "new")
        fleet.check_freed(index)


def test_a_worker_killed_while_it_waits_to_commit(fleet: Fleet, trainer: Trainer) -> None:
    """With `drain`, the worker waits for a running request after the other worker has committed."""
    survivor, victim = fleet.addresses
    trainer.connect(fleet.addresses, settings_of("shared", SHORT, None) | {"in_flight": "drain"})
    with RawClient(victim) as raw:
        raw.generate("drained", LONG_PROMPT, n=64, max_tokens=2000, ignore_eos=True)
        wait_until(lambda: fleet.client(1).health().requests["open"] == 1)
        trainer.start(fleet.models["lost"], fleet.version + 1, None)
        wait_until(lambda: fleet.client(0).health().weight_version == fleet.version + 1)
        wait_until(lambda: fleet.client(1).health().state == "updating")
        fleet.kill(1)
        fleet.start(1)
    outcome = trainer.hear()
    assert outcome.get("kind") == "PushError", outcome
    assert f"{survivor} serves version {fleet.version + 1}" in outcome["error"]
    assert f"{victim} does not answer" in outcome["error"]
    fleet.check(0, "lost", fleet.version + 1)
    trainer.connect([survivor])
    fleet.version += 2
    trainer.push(fleet.models["new"], fleet.version)
    fleet.check(0, "new")


def test_a_data_connection_that_breaks(fleet: Fleet, trainer: Trainer) -> None:
    """All TCP connections of the trainer are cut in the middle of the buckets. The push fails within its timeout."""
    trainer.connect(fleet.addresses, settings_of("collective", LONGER, None))
    old = fleet.version
    trainer.push_until("stage", fleet.models["lost"], old + 1)
    check_phase(fleet, "collective", "stage", old + 1, Path())
    outcome = trainer.go_on("cut")
    assert outcome.get("kind") == "PushError", outcome
    for index in (0, 1):
        assert f"{fleet.addresses[index]} serves version {old}" in outcome["error"]
        fleet.check(index, "old", old)
        fleet.check_freed(index)
    fleet.version = old + 2
    trainer.push(fleet.models["new"], fleet.version)
    for index in (0, 1):
        fleet.check(index, "new")


CALLS = {
    "begin": ("begin_push", 1, 1),
    "stage": ("stage_bucket", 4, 2),
    "verify": ("verify_push", 1, 1),
    "commit": ("commit_push", 1, 1),
}
"""For each phase: the message type, the number of the affected message, and the number of replies in flight at that
time.
"""
BY_MESSAGE = [(way, phase) for way in TRANSPORTS for phase in PHASES if way not in WITHOUT_BUCKETS or phase != "stage"]


def check_crossing(group: Group, fleet: Fleet, old: int) -> None:
    """Assert that a request during a push of `old` + 1 is complete, and that its tokens from version `old` have the
    correct bits.
    """
    for sample, (tokens, logprobs) in zip(group.samples, fleet.expected_long["old"], strict=True):
        assert (len(sample.token_ids), sample.finish_reason) == (LONG["max_tokens"], "length")
        assert sample.logprobs is not None
        for span in sample.weight_versions:
            assert span.version in (old, old + 1)
            if span.version == old:
                kept = slice(4 * span.start, 4 * span.end)
                assert packed(sample.token_ids[span.start : span.end]) == tokens[kept]
                assert sample.logprobs[span.start : span.end].tobytes() == logprobs[kept]


@pytest.mark.parametrize("fault", ["lose call", "lose answer"])
@pytest.mark.parametrize(("transport", "phase"), BY_MESSAGE)
@thinned(lambda transport, phase, fault: (transport, phase) in EVERY_RUN)
def test_a_connection_that_breaks(
    fleet: Fleet, trainer: Trainer, transport: str, phase: str, fault: Fault, tmp_path: Path
) -> None:
    """A message or its reply is lost with the connection. The push still succeeds, and so does a request."""
    old = fleet.version
    with Forwarder(fleet.addresses[0]) as line, RolloutClient(line.address, timeout=PATIENT) as client:
        trainer.connect([line.address, fleet.addresses[1]], settings_of(transport, PATIENT, tmp_path))
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(lambda: client.generate([LONG_PROMPT], SamplingParams(**LONG)))
            wait_until(lambda: fleet.client(0).health().requests["open"] == 1)
            line.arm(fault, *CALLS[phase])
            fleet.version = old + 1
            trainer.push(fleet.models["new"], fleet.version)
            assert line.struck.is_set()
            if fault == "lose call":
                assert CALLS[phase][0].encode() in line.lost
            else:
                assert line.lost.count(b"push_status") == CALLS[phase][2]
            (group,) = running.result()
    check_crossing(group, fleet, old)
    for index in (0, 1):
        fleet.check(index, "new")
        fleet.check_freed(index)


@pytest.mark.parametrize(("transport", "phase"), BY_MESSAGE)
@thinned(lambda transport, phase: (transport, phase) in EVERY_RUN and phase in ("stage", "commit"))
def test_a_connection_that_freezes(fleet: Fleet, trainer: Trainer, transport: str, phase: str, tmp_path: Path) -> None:
    """The connection forwards nothing until after the deadline. Then the held messages arrive, too late."""
    old = fleet.version
    with Forwarder(fleet.addresses[0]) as line:
        other = fleet.addresses[1]
        trainer.connect([line.address, other], settings_of(transport, SHORT, tmp_path))
        line.arm("freeze", *CALLS[phase])
        running = Running(fleet.addresses[0])
        trainer.start(fleet.models["lost"], old + 1, None)
        outcome = trainer.hear()
        assert line.struck.is_set() and CALLS[phase][0].encode() in line.lost
        name, version = served_after(fleet, phase, old)[0]
        assert outcome.get("kind") == "PushError", outcome
        assert f"{line.address} does not answer" in outcome["error"]
        assert f"{other} serves version {version}" in outcome["error"]
        fleet.check(1, name, version)
        wait_until(lambda: fleet.progress(0) is None)
        fleet.check(0, "old", old)
        running.end(fleet.expected_long["old"], old)
        line.thaw()
        fleet.version = old + 2
        trainer.push(fleet.models["new"], fleet.version)
    for index in (0, 1):
        fleet.check(index, "new")
        fleet.check_freed(index)
