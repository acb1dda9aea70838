"""A chaos campaign: in each round a fleet works, a process is killed at a random moment, and the fleet must recover.

The work of a round is to generate, stream, score, push, sleep or scale. During the work, SIGKILL ends a worker, a
worker's actor, a client's process, the raylet or all workers. In some rounds a worker is killed while the folder of
weights is not writable. After each round, the following must hold:

- Every sample arrived once, with the bits of an undisturbed worker, and the version of the last push. The folder
  contains a push of an earlier run, which was never served.
- Every problem that waiting does not solve was reported as an error.
- The fleet has all its workers again, and no process, shared memory or socket has leaked.

`STRICT` workers also reject requests during a push or while asleep. Two calls fill the queue of such a worker.
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trueroll.errors import ConfigError, IllegalStateError, PushError, TruerollError, WorkerLostError
from trueroll.rollout import Fleet, Group, launch_worker
from trueroll.rollout.fleet import keeper

from .work import (
    MOMENTS,
    PROMPTS,
    TRANSPORTS,
    Bits,
    BrokenPromise,
    Work,
    bits,
    command,
    read_moment,
    tell_memory,
    write_old_push,
)

NUM_WORKERS = 2
SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=1024, max_num_seqs=16, dtype="float32")
WHOLE_SECONDS = 300.0
LEFT_SECONDS = 120.0
TICK_SECONDS = 0.3
STRICT: dict[str, Any] = dict(while_unavailable="reject", max_queued_requests=20)
"""Settings under which workers reject requests that they cannot start at once. The queue has room for the prompts of
one call, but not of two calls.
"""
VICTIMS = ("worker", "actor", "client", "raylet", "all", "folder")
AT_SOME_MOMENTS = dict(raylet=4, all=4, folder=3)
"""Number of rounds per lap for each of these victims. All other victims are killed once per lap at each moment."""
LOSE_ALL = ("raylet", "all")
SECONDS = dict(generate=1.0, stream=1.0, score=0.2, sleep=0.05, wake=0.05, grow=5.0, shrink=1.0)
"""Initial estimates of the duration of each moment, in seconds. The phases of a push are not listed, because each lasts
`PHASE_SECONDS`.
"""
PHASE_SECONDS = 0.01
SHORTER, LONGER = 0.7, 1.2
"""Factors on the estimated duration: after a kill that came too late, and after a kill in time."""
STEADY_SECONDS = 3.0
"""A worker that was up for this many seconds is replaced without delay. The value is small, because the rounds kill
workers very often.
"""


def plan(seed: int, rounds: int) -> list[tuple[str, str]]:
    """Return the victim and the moment of each round. Each lap has all pairs of victim and moment, in an order
    determined by `seed`.
    """
    chosen, found = random.Random(seed), []
    moments = {victim: _forever(f"{victim} {seed}", list(MOMENTS)) for victim in AT_SOME_MOMENTS}
    while len(found) < rounds:
        pairs = [(victim, moment) for victim in VICTIMS if victim not in AT_SOME_MOMENTS for moment in MOMENTS]
        pairs += [(victim, next(moments[victim])) for victim, count in AT_SOME_MOMENTS.items() for _ in range(count)]
        chosen.shuffle(pairs)
        found += pairs
    return found[:rounds]


def _forever(seed: str, moments: list[str]) -> Iterator[str]:
    chosen = random.Random(seed)
    while True:
        chosen.shuffle(moments)
        yield from moments


def check_samples(groups: list[Group], versions: set[int], expected: Callable[[int], Bits]) -> None:
    """Raise BrokenPromise unless each prompt has one group with the expected bits.

    `versions`: allowed weight versions; a group has exactly one. `expected`: the bits for a version.
    """
    if len(groups) != len(PROMPTS):
        raise BrokenPromise(f"{len(PROMPTS)} prompts got {len(groups)} groups")
    for position, group in enumerate(groups):
        found = {span.version for sample in group.samples for span in sample.weight_versions}
        if len(found) != 1 or not found <= versions:
            raise BrokenPromise(f"a group has weight versions {found}, not one of {versions}")
        if bits([group])[0] != expected(*found)[position]:
            raise BrokenPromise("the samples differ from those without failures")


class Expected:
    """The results of an undisturbed worker with each of the two sets of weights. Successive versions alternate between
    the sets.
    """

    def __init__(self, model: Path, pushes: Path) -> None:
        with launch_worker(str(model), **SETTINGS) as worker:
            work = Work([worker.address], model, pushes, lambda moment: None)
            found = []
            for version in (2, 3):
                work.push(version, "shared")
                found.append((bits(work.generate(version)), work.score(version)))
            work.close()
        (self._samples, self._scores) = zip(*found, strict=True)
        if self._samples[0] == self._samples[1] or self._scores[0] == self._scores[1]:
            raise BrokenPromise("premise: both sets of weights give the same samples")
        if any(len({len(tokens) for tokens, _ in group}) == 1 for group in self._samples[0]):
            raise BrokenPromise("premise: all samples of a group have the same length")

    def samples(self, version: int) -> Bits:
        return self._samples[version % 2]

    def scores(self, version: int) -> list[bytes]:
        return self._scores[version % 2]


@dataclass
class Numbers:
    """Counts over the rounds. `hit`: number of rounds in which the kill came before the moment was over. `told`: number
    of reported errors about problems that waiting does not solve.
    """

    rounds: int = 0
    hit: int = 0
    told: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    last: str = ""


class _BackgroundCall:
    """A call on a thread. `errors`: the exception that it raised."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.errors: list[BaseException] = []
        self._action = action
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self.errors.append(error)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the call's end, calling `meanwhile`, and raise the call's exception."""
        while self.is_alive:
            self._thread.join(0.2)
            meanwhile()
        if self.errors:
            raise self.errors[0]


class _Other:
    """A client in a process of its own."""

    def __init__(
        self, arguments: list[str], on_moment: Callable[[str], None], on_memory: Callable[[str], None]
    ) -> None:
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self._on_moment, self._on_memory = on_moment, on_memory
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if (moment := read_moment(line, self._on_memory)) is not None:
                    self._on_moment(moment)


class Campaign:
    """A fleet that serves `model`, with a client and a trainer. `file`: the fleet's file.

    `seed`: determines which worker is killed, and when. `settings`: settings of the workers, besides `SETTINGS`.
    """

    def __init__(self, model: Path, file: Path, seed: int, **settings: Any) -> None:
        self.numbers = Numbers()
        self.version = 2
        self._random = random.Random(seed)
        self._model, self._file, self._folder = model, file, file.parent / "weights"
        self._expected = Expected(model, file.parent / "undisturbed")
        self._before = _processes(file)
        self._memory: set[str] = set()
        self._pushing = threading.Lock()
        self._addresses: set[str] = set()
        self._moments: queue.Queue[str | None] = queue.Queue()
        self._now: str | None = None
        self._seconds = {moment: SECONDS.get(moment, PHASE_SECONDS) for moment in MOMENTS}
        tell_memory(self._memory.add)
        keeper.STEADY_SECONDS = STEADY_SECONDS
        self._leave_old_push()
        self.fleet = Fleet(str(model), NUM_WORKERS, file=file, weights_folder=self._folder, **SETTINGS | settings)
        self._work = Work(self.fleet, model, self._folder, self._begin)
        self._work.push(self.version, "shared")
        self._normal = _processes(file)
        if self._normal - self._before != Counter(worker=NUM_WORKERS, actor=NUM_WORKERS) + self._of_the_cluster():
            raise BrokenPromise(f"premise: a fleet has processes {self._normal}, before it {self._before}")

    def _of_the_cluster(self) -> Counter[str]:
        return Counter() if self._before["raylet"] else Counter(raylet=1, gcs_server=1)

    def _leave_old_push(self) -> None:
        """Leave a push by disk in the folder, as if from an earlier run.

        The next push by disk removes that leftover.
        """
        if not list(self._folder.glob("version-900-*")):
            write_old_push(self._folder, self._model, f"{self._random.getrandbits(128):032x}")

    def close(self) -> None:
        """Close the fleet. Raise BrokenPromise if a process, file or socket of the fleet remains."""
        self._work.close()
        self.fleet.close()
        self._check_left(self._before)

    def run(
        self, rounds: Iterable[tuple[str, str]], on_round: Callable[[Numbers], None] = lambda numbers: None
    ) -> None:
        """Run rounds of (victim, moment). Raise BrokenPromise for the first round that breaks a promise."""
        for victim, moment in rounds:
            transport = self._random.choices(TRANSPORTS, (3, 1, 1, 1))[0]
            what = f"{moment}, {victim} killed" + (f", {transport}" if MOMENTS[moment] == "push" else "")
            started = time.monotonic()
            try:
                was_hit = self._round(victim, moment, transport)
            except (TruerollError, BrokenPromise) as error:
                raise BrokenPromise(f"round {self.numbers.rounds}: {what}: {type(error).__name__}: {error}") from error
            self.numbers.rounds += 1
            self.numbers.hit += was_hit
            self.numbers.killed[victim] += 1
            self.numbers.last = f"{what}{'' if was_hit else ' too late'}, {time.monotonic() - started:.1f} s"
            on_round(self.numbers)

    def _round(self, victim: str, moment: str, transport: str) -> bool:
        done, lost = MOMENTS[moment], []
        self._leave_old_push()
        self._moments, self._now, self._transport, self._victim = queue.Queue(), None, transport, victim
        self._done = done
        self._served = {self.version, self.version + (done == "push")}  # the other client may push this version
        meanwhile = None if done in ("generate", "stream", "score") else _BackgroundCall(self._generate_any)
        other = self._start_other(moment, done, transport) if victim == "client" else None
        work = None if other and done != "scale" else _BackgroundCall(lambda: self._do(done))
        try:
            was_hit = self._wait_for(moment)
            lost = self._kill(victim, other)
        finally:
            if other is not None:
                other.kill()
        if work is not None:
            work.wait(self._restore if done != "push" else lambda: None)
        elif done == "push":
            self._push()  # as the trainer does after its restart
        if victim == "folder":
            self._check_told(lost)
        self._settle(lost, meanwhile)
        return was_hit

    def _start_other(self, moment: str, done: str, transport: str) -> _Other:
        arguments = command(self._file, self._model, self._folder, moment, self.version, transport)
        return _Other(arguments, (lambda told: None) if done == "scale" else self._begin, self._memory.add)

    def _begin(self, moment: str | None) -> None:
        self._now = moment
        self._moments.put(moment)

    def _wait_for(self, moment: str) -> bool:
        """Wait for a random time within the moment. Return whether the moment still lasts after the wait."""
        while (found := self._next_moment()) != moment:
            if found is None:
                return False
        time.sleep(self._random.random() * self._seconds[moment])
        was_hit = self._now == moment
        self._seconds[moment] *= LONGER if was_hit else SHORTER
        return was_hit

    def _next_moment(self) -> str | None:
        for _ in _ticks(WHOLE_SECONDS):
            with suppress(queue.Empty):
                return self._moments.get(timeout=TICK_SECONDS)
        raise BrokenPromise("no moment began")

    def _kill(self, victim: str, other: _Other | None) -> list[int]:
        """Kill the victim. Return the pids of workers and actors that must be replaced."""
        pids = list(self.fleet.pids().values())
        self._addresses |= {member.address for member in self.fleet.members()}
        if other is not None:
            other.kill()
            return []
        if victim == "raylet":
            for child in psutil.Process().children():
                if child.name() == "raylet":
                    child.kill()
            return [pid for both in pids for pid in both]
        if victim == "all":
            for _, worker in pids:
                with suppress(ProcessLookupError):
                    os.kill(worker, 9)
            return [worker for _, worker in pids]
        if victim == "folder":
            self._spoil()
        actor, worker = self._random.choice(pids)
        with suppress(ProcessLookupError):  # the worker was leaving the fleet and has just ended
            os.kill(actor if victim == "actor" else worker, 9)
        return [actor, worker]

    def _spoil(self) -> None:
        """From now on, prevent workers from writing their weights for other workers."""
        joins = self._folder / "joins"
        while not joins.is_file():
            shutil.rmtree(joins, ignore_errors=True)
            with suppress(OSError):  # a worker is writing to the folder
                joins.write_text("")

    def _mend(self) -> None:
        joins = self._folder / "joins"
        if joins.is_file():
            joins.unlink()
            joins.mkdir(exist_ok=True)

    # Work during the kill.

    def _do(self, done: str) -> None:
        try:
            getattr(self, f"_{done}")()
        finally:
            self._begin(None)

    def _generate(self) -> None:
        check_samples(self._work.generate(self.version), {self.version}, self._expected.samples)

    def _generate_any(self) -> None:
        """Generate under the served weights, or under the weights of a new push."""
        check_samples(self._work.samples(), self._served, self._expected.samples)

    def _stream(self) -> None:
        if self._work.stream(self.version) != self._expected.samples(self.version):
            raise BrokenPromise("the samples differ from those without failures")

    def _score(self) -> None:
        if self._work.score(self.version) != self._expected.scores(self.version):
            raise BrokenPromise("the scores differ from those without failures")

    def _push(self) -> None:
        with self._pushing:
            self._served.add(self.version + 1)
            self._until_there(lambda: self._work.push(self.version + 1, self._transport), (PushError, ConfigError))
            self.version += 1

    def _sleep(self) -> None:
        self._until_there(self._work.sleep, (WorkerLostError,))

    def _scale(self) -> None:
        """Scale up and down. Push while the new worker joins. The new worker must never serve the weights from before
        these pushes.
        """
        self._begin("grow")
        growing = _BackgroundCall(lambda: self._scale_to(NUM_WORKERS + 1))
        while growing.is_alive:
            self._push()
            check_samples(self._work.samples(), {self.version}, self._expected.samples)
        growing.wait()
        self._begin("shrink")
        self._scale_to(NUM_WORKERS)

    def _scale_to(self, num_workers: int) -> None:
        """Scale the fleet. After an error, make the folder writable again or wait, then retry."""
        for _ in _ticks(WHOLE_SECONDS):
            try:
                return self.fleet.scale(num_workers)
            except PushError as error:
                self._note_refusal(error)
                self._mend()
            except IllegalStateError as error:
                self._note_loss(error)
                time.sleep(TICK_SECONDS)
        raise BrokenPromise("no worker serves")

    def _note_refusal(self, error: PushError) -> None:
        if self._victim != "folder" or "weights_folder: cannot create" not in str(error):
            raise error
        self.numbers.told["folder"] += 1

    def _note_loss(self, error: IllegalStateError) -> None:
        if self._victim not in LOSE_ALL or "all workers were lost" not in str(error):
            raise error
        self.numbers.told["all"] += 1

    def _until_there(self, action: Callable[[], None], errors: tuple[type[TruerollError], ...]) -> None:
        """Run `action`. Retry only if all workers were killed, because then no worker could answer."""
        for _ in _ticks(WHOLE_SECONDS):
            try:
                return action()
            except errors:
                if self._victim not in LOSE_ALL:
                    raise
                time.sleep(TICK_SECONDS)
        raise BrokenPromise("no worker came back")

    def _restore(self) -> None:
        """Push the weights again if every worker with these weights was killed."""
        members = self.fleet.members()
        if self._victim in LOSE_ALL and members and all(member.standing == "joining" for member in members):
            if self._done != "scale":
                try:
                    self.fleet.scale(NUM_WORKERS)
                except IllegalStateError as error:
                    self._note_loss(error)
            with self._pushing, suppress(PushError, ConfigError):  # a worker has not started yet
                self._work.push(self.version, self._transport)

    # Checks after a round.

    def _check_told(self, lost: list[int]) -> None:
        """Wait until the fleet reports a worker that cannot get its weights, then make the folder writable again. The
        wait also ends if the worker got its weights from the folder of a push by disk.
        """
        for _ in _ticks(WHOLE_SECONDS):
            if not (self._folder / "joins").is_file() or self._is_whole(lost):
                break
            if any(member.trouble for member in self.fleet.members()):
                self._scale_to(NUM_WORKERS)
                break
            time.sleep(TICK_SECONDS)
        self._mend()

    def _settle(self, lost: list[int], meanwhile: _BackgroundCall | None) -> None:
        """Wait until the fleet is whole and has all weights, then check that everything works."""
        for _ in _ticks(WHOLE_SECONDS):
            if self._is_whole(lost):
                break
            self._restore()
            time.sleep(TICK_SECONDS)
        else:
            raise BrokenPromise(f"the fleet is not whole: {self.fleet.members()}")
        if meanwhile is not None:
            meanwhile.wait()
        self._generate()
        self._check_left(self._normal)

    def _is_whole(self, lost: list[int]) -> bool:
        """Return whether all lost processes were replaced, and all workers serve the version of the last push."""
        if self.fleet.num_serving != NUM_WORKERS or any(
            pid in pids for pids in self.fleet.pids().values() for pid in lost
        ):
            return False
        try:
            healths = self._work.client.healths().values()
            if any(health.state == "asleep" for health in healths):
                self._work.client.wake_up()  # the client that put the workers to sleep was killed
        except TruerollError:
            return False
        return [(health.state, health.weight_version) for health in healths] == [("ready", self.version)] * NUM_WORKERS

    def _check_left(self, processes: Counter[str]) -> None:
        """Check that the expected processes run, and that ended processes left no files."""
        for _ in _ticks(LEFT_SECONDS):
            if (found := _processes(self._file)) == processes and not self._files_left():
                return
            time.sleep(TICK_SECONDS)
        raise BrokenPromise(f"processes {found}, not {processes}; files left: {self._files_left()}")

    def _files_left(self) -> list[Path]:
        there = {member.address for member in self.fleet.members()}
        sockets = [Path(address.removeprefix("ipc://")) for address in self._addresses - there]
        files = [*sockets, *(Path("/dev/shm") / name for name in self._memory)]
        return [file for file in files if file.exists()] + list(self._folder.glob("joins/*"))


def _ticks(seconds: float) -> Iterator[None]:
    """Yield once per `TICK_SECONDS` of running time. Time in which this process was stopped does not count."""
    yield from (None for _ in range(int(seconds / TICK_SECONDS)))


def _processes(file: Path) -> Counter[str]:
    """Count the descendants of this process by kind, including descendants that another process has adopted."""
    mark = f"TRUEROLL_CHAOS={file}".encode()
    return Counter(kind for process in psutil.process_iter() if (kind := _kind(process, mark)) is not None)


def _kind(process: psutil.Process, mark: bytes) -> str | None:
    try:
        line = process.cmdline()
        if "trueroll.rollout.worker.process" in line:
            kind = "worker"
        elif line and line[0].startswith("ray::_Runner"):
            kind = "actor"
        elif (kind := process.name()) not in ("raylet", "gcs_server"):
            return None
        return kind if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0") else None
    except (psutil.Error, OSError):
        return None
