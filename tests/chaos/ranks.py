"""Kills ranks of workers by hand: `.venv/bin/python -P tests/chaos/ranks.py --rounds 100`. Exits with 1 on a broken
promise.

Each round starts a worker with four ranks, in 1, 2 or 4 stages, and kills one of its processes in a random phase: while
the worker starts, computes steps, receives and commits pushes, falls asleep and wakes up, or is idle. Promises:

- The worker ends within `SECONDS_TO_END`, with an exit code other than 0, and none of its processes is left.
- Each call gets a reply or an error. If a follower was killed, the worker's error names it.
- Each sample that a worker finishes has the bits of a worker with one rank, which serves the same requests again
  afterwards. Samples during pushes are not compared, because they may be of several versions.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from engine.checkpoints import another_version, read_tensors  # noqa: E402
from rich.console import Console  # noqa: E402

from tiny import make_tiny_model  # noqa: E402
from trueroll.errors import TruerollError  # noqa: E402
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, WorkerProcess, launch_worker  # noqa: E402

SIZES: dict[str, Any] = dict(num_attention_heads=8, intermediate_size=512, num_hidden_layers=4, vocab_size=1600)
SETTINGS: dict[str, Any] = dict(num_blocks=256, num_threads=1)
SECONDS_TO_END = 30.0
PROMPTS = [[1, 20, 30, 40] * 6, [1, 20, 30, 40] * 6 + [50], [7, 8, 9]]
PHASES = ("start", "step", "push", "sleep", "idle")
FOLLOWER = "trueroll.engine.parallel.follower"
Samples = list[tuple[tuple[int, ...], bytes]]


class BrokenPromise(Exception):
    """The text says which promise was broken."""


def generate(worker: WorkerProcess, seed: int) -> Samples:
    params = SamplingParams(n=4, max_tokens=200, top_p=0.9, ignore_eos=True)
    with RolloutClient(worker.address, timeout=8.0) as client:
        groups = client.generate(PROMPTS, params, seed=seed)
        return [(tuple(s.token_ids), np.asarray(s.logprobs).tobytes()) for group in groups for s in group.samples]


class Round:
    """One worker with four ranks, and the death of one of its processes."""

    def __init__(self, versions: list[Path], seed: int) -> None:
        self.random = random.Random(seed)
        self.seed, self.versions = seed, versions
        self.phase = self.random.choice(PHASES)
        self.before, self.rank = set(_followers()), self.random.randrange(4)
        if self.phase == "start":
            self.rank = max(1, self.rank)
        stages = self.random.choice((1, 2, 4))
        ranks = dict(tensor_parallel_size=4 // stages, pipeline_parallel_size=stages)
        self.settings: dict[str, Any] = SETTINGS | ranks
        self.name = f"round {seed}: {self.phase}, rank {self.rank}, {stages} stages"

    def run(self, expected: Samples) -> str:
        """Return the error that the calls got. `expected`: the samples of a worker with one rank."""
        if self.phase == "start":
            return self._kill_at_start()
        with launch_worker(str(self.versions[0]), **self.settings) as worker:
            mine = sorted(set(_followers()) - self.before, key=lambda process: int(process.cmdline()[-1]))
            _expect(len(mine) == 3, f"{self.name}: {len(mine)} followers")
            victims = [psutil.Process(worker.pid), *mine]
            with ThreadPoolExecutor(4) as pool:
                calls = self._begin(worker, pool)
                time.sleep(self.random.uniform(0.0, 0.5))
                victims[self.rank].send_signal(signal.SIGKILL)
                self._await_end(worker, mine)
                errors = [*filter(None, (self._outcome(call, expected) for call in calls))]
        is_named = self.rank == 0 or any(f"rank {self.rank} of 4" in error for error in errors)
        _expect(is_named or not errors, f"{self.name}: no error names the rank: {errors}")
        return next(iter(errors), "")

    def _begin(self, worker: WorkerProcess, pool: ThreadPoolExecutor) -> list[Future[Any]]:
        requests: list[Future[Any]] = [] if self.phase == "idle" else [pool.submit(generate, worker, self.seed)]
        if self.phase == "push":
            requests.append(pool.submit(self._push, worker))
        if self.phase == "sleep":
            requests = [pool.submit(self._sleep, worker)]
        return requests

    def _push(self, worker: WorkerProcess) -> None:
        with WeightPublisher("shared", timeout=8.0) as publisher:
            publisher.connect([worker.address])
            for version in range(1, 200):
                publisher.push(read_tensors(self.versions[version % 2]), version)

    def _sleep(self, worker: WorkerProcess) -> None:
        with RolloutClient(worker.address, timeout=8.0) as client:
            for _ in range(500):
                client.sleep(level=1)
                client.wake_up()

    def _await_end(self, worker: WorkerProcess, followers: list[psutil.Process]) -> None:
        end = time.monotonic() + SECONDS_TO_END
        while (code := worker.exit_code) is None:
            _expect(time.monotonic() < end, f"{self.name}: the worker still runs after {SECONDS_TO_END:.0f} s")
            time.sleep(0.05)
        _expect(code != 0, f"{self.name}: exit code 0")
        _, alive = psutil.wait_procs(followers, 10)
        _expect(not alive, f"{self.name}: processes are left: {alive}")

    def _outcome(self, call: Future[Any], expected: Samples) -> str:
        """Return the error of a call, or an empty text. Raise BrokenPromise for other samples than `expected`."""
        try:
            found = call.result(SECONDS_TO_END)
        except TruerollError as error:
            return str(error)
        except TimeoutError:
            raise BrokenPromise(f"{self.name}: a call got no reply") from None
        if found is not None and self.phase != "push":
            _expect(found == expected, f"{self.name}: other samples than on one rank")
        return ""

    def _kill_at_start(self) -> str:
        found = list[BaseException | WorkerProcess]()

        def launch() -> None:
            try:
                found.append(launch_worker(str(self.versions[0]), **self.settings))
            except TruerollError as error:
                found.append(error)

        thread = threading.Thread(target=launch)
        thread.start()
        end = time.monotonic() + SECONDS_TO_END
        while len(mine := sorted(set(_followers()) - self.before, key=lambda each: int(each.cmdline()[-1]))) < 3:
            _expect(time.monotonic() < end, f"{self.name}: no followers")
            time.sleep(0.01)
        time.sleep(self.random.uniform(0.0, 2.0))
        mine[self.rank - 1].kill()
        thread.join(SECONDS_TO_END)
        _expect(bool(found), f"{self.name}: the worker still starts after {SECONDS_TO_END:.0f} s")
        if isinstance(worker := found[0], WorkerProcess):  # it was ready before
            with worker:
                self._await_end(worker, mine)
            return ""
        _, alive = psutil.wait_procs(mine, 10)
        _expect(not alive, f"{self.name}: processes are left: {alive}")
        _expect(f"rank {self.rank} of 4" in str(worker), f"{self.name}: the error does not name the rank: {worker}")
        return str(worker)


def _followers() -> list[psutil.Process]:
    """Return the followers of the workers of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if FOLLOWER in process.cmdline():
                found.append(process)
        except psutil.Error:
            pass
    return found


def _expect(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenPromise(broken)


def play(rounds: int, seed: int, tell: Callable[[str], None]) -> Counter[str]:
    """Run the rounds. Return how often each phase was hit."""
    phases = Counter[str]()
    with tempfile.TemporaryDirectory() as parent:
        first = make_tiny_model("llama", Path(parent) / "0", **SIZES)
        versions = [first, another_version(first, Path(parent) / "1")]
        with launch_worker(str(first), **SETTINGS) as one:
            for number in range(seed, seed + rounds):
                played = Round(versions, number)
                expected = generate(one, number)
                error = played.run(expected)
                _expect(generate(one, number) == expected, f"{played.name}: other samples after the failure")
                phases[played.phase] += 1
                tell(f"{played.name}: {error or 'no call was open'}")
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console, started = Console(soft_wrap=True, highlight=False), time.monotonic()
    try:
        phases = play(arguments.rounds, arguments.seed, lambda line: console.print(line, markup=False))
    except BrokenPromise as broken:
        console.print(f"FAILED: {broken}", markup=False)
        return 1
    console.print(f"{arguments.rounds} rounds in {time.monotonic() - started:.0f} s: {dict(phases)}", markup=False)
    console.print("Every promise was kept.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
