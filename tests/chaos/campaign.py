"""Rounds in which a fleet works and something is killed at a random moment, and what must hold after each.

Each round generates, pushes, sleeps or scales, while a worker, its actor, a client's process or the raylet is killed
with SIGKILL. Then: every sample there once, with the bits that a worker gives that nobody disturbs, of the version that
was pushed last; the fleet whole again; no process and no shared memory left over.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from trueroll.errors import ConfigError, PushError, TruerollError
from trueroll.rollout import Fleet, FleetClient, Group, RolloutClient, SamplingParams, WeightPublisher, launch_worker

Bits = list[list[tuple[tuple[int, ...], bytes]]]

NUM_WORKERS = 2
PROMPTS = [[i, 5, 6, 7] * 6 for i in range(1, 7)]
PARAMS = SamplingParams(n=4, max_tokens=400, ignore_eos=True)
SEED = 11
SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=1024, max_num_seqs=16, dtype="float32")
WHOLE_SECONDS = 300.0
LEFT_SECONDS = 120.0
KILLED = {"worker": 8, "actor": 8, "client": 3, "raylet": 1}
"""Shares of what is killed."""
DONE = {"generate": 6, "push": 6, "sleep": 3, "scale": 2}
"""Shares of what is being done meanwhile."""
CLIENT = """
import sys
sys.path.insert(0, sys.argv[2])
from chaos.campaign import PARAMS, PROMPTS, SEED
from trueroll.rollout import FleetClient
with FleetClient(sys.argv[1]) as client:
    print("begun", flush=True)
    while True:
        client.generate(PROMPTS, PARAMS, seed=SEED)
"""


class BrokenPromise(Exception):
    """What a round has found."""


def bits(groups: list[Group]) -> Bits:
    """Tokens and log-probs of each sample of each group."""
    return [[(tuple(s.token_ids), s.logprobs.tobytes()) for s in group.samples] for group in groups]


class Weights:
    """Two sets of weights, of which the versions take turns, and the samples that each gives."""

    def __init__(self, folder: Path) -> None:
        own = load_file(folder / "model.safetensors")
        self.sets = [{name: tensor * factor for name, tensor in own.items()} for factor in (1.0, 1.25)]
        with (
            launch_worker(str(folder), **SETTINGS) as worker,
            RolloutClient(worker.address) as client,
            WeightPublisher("shared") as publisher,
        ):
            publisher.connect([worker.address])
            self.samples = [self._samples(client, publisher, version) for version in range(2)]
        if self.samples[0] == self.samples[1]:
            raise BrokenPromise("premise: expected other samples from other weights, found the same")

    def _samples(self, client: RolloutClient, publisher: WeightPublisher, version: int) -> Bits:
        publisher.push(self.of(version), version + 1)
        return bits(client.generate(PROMPTS, PARAMS, seed=SEED))

    def of(self, version: int) -> dict[str, torch.Tensor]:
        return self.sets[version % 2]

    def expected(self, version: int) -> Bits:
        return self.samples[version % 2]


@dataclass
class Numbers:
    """What the rounds came to."""

    rounds: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    hit: int = 0
    """Rounds in which something was killed while the work was under way."""


class _Work:
    """Something that runs on a thread. `errors`: what it raised."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.errors: list[BaseException] = []
        self._action = action
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self.errors.append(error)


class Campaign:
    """A fleet of the model in `folder`, and rounds that `seed` chooses. `file`: of the fleet."""

    def __init__(
        self, folder: Path, file: Path, seed: int, transport: Any = "shared", with_raylet: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.numbers = Numbers()
        self.weights = Weights(folder)
        self.version = 0
        self._killed = KILLED if with_raylet else {name: share for name, share in KILLED.items() if name != "raylet"}
        self._shared_memory = _shared_memory()
        self._file = file
        fields: dict[str, Any] = {} if transport != "disk" else dict(folder=file.parent / "pushes")
        self._publisher = WeightPublisher(transport, timeout=20.0, **fields)
        weights_folder = fields.get("folder")
        self.fleet = Fleet(str(folder), NUM_WORKERS, file=file, weights_folder=weights_folder, **SETTINGS)
        self.client = FleetClient(self.fleet, timeout=15.0)
        self._publisher.connect_fleet(self.fleet)
        self._push(1)
        self._seconds = dict.fromkeys(DONE, 0.5)

    def close(self) -> None:
        """End the fleet; nothing of it may remain."""
        self.client.close()
        self._publisher.close()
        self.fleet.close()
        self._check_left(0)

    def run(self, rounds: int, on_round: Callable[[Numbers], None] = lambda numbers: None) -> None:
        """Raise BrokenPromise for the first round that finds one."""
        for _ in range(rounds):
            done, killed = (self.random.choices([*t], [*t.values()])[0] for t in (DONE, self._killed))
            delay = self.random.random() * self._seconds[done]
            try:
                self._round(done, killed, delay)
            except (TruerollError, BrokenPromise) as error:
                found = f"round {self.numbers.rounds}: {done}, {killed} killed after {delay:.3f} s: {error}"
                raise BrokenPromise(found) from error
            self.numbers.rounds += 1
            self.numbers.killed[killed] += 1
            on_round(self.numbers)

    def _round(self, done: str, killed: str, delay: float) -> None:
        other = self._start_client() if killed == "client" else None
        work, began = _Work(getattr(self, f"_{done}")), time.monotonic()
        time.sleep(delay)
        self.numbers.hit += work.thread.is_alive()
        self._kill(killed, other)
        self._wait_for(work, restores=done != "push")
        self._seconds[done] += 0.4 * (min(5.0, time.monotonic() - began) - self._seconds[done])
        self._settle()

    def _wait_for(self, work: _Work, restores: bool = True) -> None:
        """Until it is done, with a trainer that brings weights which all have lost, unless the work is its own."""
        while work.thread.is_alive():
            work.thread.join(0.2)
            if restores:
                self._restore()
        if work.errors:
            raise work.errors[0]

    def _start_client(self) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-P", "-c", CLIENT, str(self._file), str(Path(__file__).parents[1]))
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return process

    def _kill(self, killed: str, other: subprocess.Popen[bytes] | None) -> None:
        if other is not None:
            other.kill()
            other.wait()
        elif killed == "raylet":
            for child in psutil.Process().children():
                if child.name() == "raylet":
                    child.kill()
        elif pids := list(self.fleet.pids().values()):
            actor, worker = self.random.choice(pids)
            try:
                os.kill(actor if killed == "actor" else worker, 9)
            except ProcessLookupError:
                pass  # of the round before, and not replaced yet

    # What is done meanwhile.

    def _generate(self) -> None:
        groups = self.client.generate(PROMPTS, PARAMS, seed=SEED, min_weight_version=self.version)
        self._check(groups)

    def _push(self, version: int | None = None) -> None:
        """As a trainer does: again, if nobody was there."""
        version = self.version + 1 if version is None else version
        deadline = time.monotonic() + WHOLE_SECONDS
        while True:
            try:
                self._publisher.push(self.weights.of(version), version, allow_older=True)
                break
            except (PushError, ConfigError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        self.version = version

    def _sleep(self) -> None:
        self.client.sleep(level=1)
        self.client.wake_up()

    def _scale(self) -> None:
        self.fleet.scale(NUM_WORKERS + 1)
        self.fleet.scale(NUM_WORKERS)

    def _restore(self) -> None:
        """If all that had the weights are gone, the trainer brings them again."""
        members = self.fleet.members()
        if members and all(member.standing == "joining" for member in members):
            try:
                self._publisher.push(self.weights.of(self.version), self.version, allow_older=True)
            except (PushError, ConfigError):
                pass  # one is gone again, or not there yet

    # What must hold.

    def _settle(self) -> None:
        """The fleet comes back, with all weights, and everything works."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while not self._is_whole():
            self._restore()
            if time.monotonic() > deadline:
                raise BrokenPromise(f"expected a whole fleet, found {self.fleet.members()}")
            time.sleep(0.2)
        self._wait_for(_Work(self._work_again))
        self._check_left(NUM_WORKERS)

    def _work_again(self) -> None:
        self.client.wake_up()
        self._generate()

    def _is_whole(self) -> bool:
        return self.fleet.num_serving == NUM_WORKERS and len(self._versions()) == NUM_WORKERS

    def _versions(self) -> list[int]:
        """Of the workers that answer and serve the version of the last push."""
        try:
            return [h.weight_version for h in self.client.healths().values() if h.weight_version == self.version]
        except TruerollError:
            return []

    def _check(self, groups: list[Group]) -> None:
        versions = {span.version for g in groups for s in g.samples for span in s.weight_versions}
        if versions != {self.version}:
            raise BrokenPromise(f"expected version {self.version}, found {versions}")
        if bits(groups) != self.weights.expected(self.version):
            raise BrokenPromise("found other samples than without failures")

    def _check_left(self, num_workers: int) -> None:
        """As many worker processes as there should be, and no shared memory of theirs."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (count := len(_worker_processes(self._file))) != num_workers or _shared_memory() - self._shared_memory:
            if time.monotonic() > deadline:
                left = sorted(_shared_memory() - self._shared_memory)
                raise BrokenPromise(f"expected {num_workers} worker processes, found {count}, and in /dev/shm {left}")
            time.sleep(0.2)


def _worker_processes(file: Path) -> list[int]:
    """Those that were started under this process, whoever has adopted them since."""
    mark = f"TRUEROLL_CHAOS={file}"
    return [process.pid for process in psutil.process_iter() if _is_worker(process, mark)]


def _is_worker(process: psutil.Process, mark: str) -> bool:
    try:
        if "trueroll.rollout.worker.process" not in process.cmdline():
            return False
        return mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except (psutil.Error, OSError):
        return False


def _shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if "trueroll" in entry.name}
