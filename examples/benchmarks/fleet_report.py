"""Report the overhead of a fleet: `python examples/benchmarks/fleet_report.py [MODEL]`. The report compares three pairs
of setups. The two setups of a pair are measured alternately:

- the workload `group` of `trueroll bench` through a client of one worker, and through a fleet client of that worker;
- one worker with two threads, and two workers with one thread each;
- a push over shared memory to one worker, and to four workers. The report also shows the pause of a worker during the
  commit.

The report needs no Ray, because a fleet client also accepts addresses.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from trueroll.rollout import (
    FleetClient,
    RolloutClient,
    SamplingParams,
    WeightPublisher,
    WorkerProcess,
    launch_worker,
    resolve_model,
)

ROUNDS = 5
PROMPTS, PROMPT_TOKENS = 8, 128
GROUP = SamplingParams(n=8, max_tokens=128, ignore_eos=True)
KV_MEMORY = 128 * 2**20
MANY = 4
VERSIONS = itertools.count(1)
"""Versions of the pushes. Every push needs a higher version than the previous push."""


def prompts(seed: int) -> list[np.ndarray]:
    """Return prompts that are different for each seed, so that no prompt is cached."""
    return list(np.random.default_rng(seed).integers(100, 1000, (PROMPTS, PROMPT_TOKENS), np.int32))


def tokens_per_second(client: RolloutClient, seed: int) -> float:
    start = time.perf_counter()
    groups = client.generate(prompts(seed), GROUP, seed=seed)
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    return tokens / (time.perf_counter() - start)


def in_turns(measures: list[Callable[[int], float]]) -> list[list[float]]:
    """Return the values of each measure, one per round, after a warm-up round. Every other round runs the measures in
    reverse order.
    """
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(ROUNDS + 1):
        each = list(enumerate(measures))
        for i, measure in each[:: 1 if turn % 2 else -1]:
            value = measure(len(measures) * turn + i)
            if turn:
                found[i].append(value)
    return found


def ratio(table: Table, name: str, first: list[float], second: list[float], goal: str) -> None:
    """Add a row with the median of each setup and the median of the per-round ratios."""
    of_each = [b / a for a, b in zip(first, second, strict=True)]
    medians = [f"{statistics.median(values):,.3g}" for values in (first, second)]
    table.add_row(name, *medians, f"{statistics.median(of_each):.3f}", goal)


def report_clients(table: Table, model: str) -> None:
    with (
        launch_worker(model, num_threads=2, kv_memory=KV_MEMORY) as worker,
        RolloutClient(worker.address) as plain,
        FleetClient([worker.address]) as fleet,
    ):
        first, second = in_turns([lambda i: tokens_per_second(plain, i), lambda i: tokens_per_second(fleet, i)])
    ratio(table, "tokens/s of one worker: plain client, fleet client", first, second, "at least 0.98")


def report_two_workers(table: Table, model: str) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(launch_worker(model, num_threads=2, kv_memory=KV_MEMORY))
        two = [stack.enter_context(launch_worker(model, num_threads=1, kv_memory=KV_MEMORY)) for _ in range(2)]
        single = stack.enter_context(RolloutClient(one.address))
        double = stack.enter_context(FleetClient([worker.address for worker in two]))
        first, second = in_turns([lambda i: tokens_per_second(single, i), lambda i: tokens_per_second(double, i)])
    ratio(table, "tokens/s: one worker with two threads, two workers with one", first, second, "at least 0.80")


def report_pushes(table: Table, model: str) -> None:
    weights = {name: tensor for file in Path(model).glob("*.safetensors") for name, tensor in load_file(file).items()}
    with ExitStack() as stack:
        workers = [stack.enter_context(launch_worker(model, num_threads=1, kv_memory=KV_MEMORY)) for _ in range(MANY)]
        pauses: list[float] = []

        def pusher(some: list[WorkerProcess]) -> Callable[[int], float]:
            publisher = stack.enter_context(WeightPublisher("shared"))
            publisher.connect_fleet([worker.address for worker in some])

            def push(_: int) -> float:
                result = publisher.push(weights, next(VERSIONS))
                if len(some) > 1:
                    pauses.append(result.pause_seconds / result.total_seconds)
                return result.total_seconds

            return push

        first, second = in_turns([pusher(workers[:1]), pusher(workers)])
    ratio(table, f"seconds of a push: to one worker, to {MANY}", first, second, "at most 1.5")
    table.add_row(
        "longest pause of a worker during that push", "", "", f"{statistics.median(pauses):.3f}", "below 0.05"
    )


def main(model: str) -> None:
    folder = resolve_model(model)
    table = Table("what", "first", "second", "ratio", "goal", title=f"{model}, {torch.get_num_threads()} threads here")
    report_clients(table, str(folder))
    report_two_workers(table, str(folder))
    report_pushes(table, str(folder))
    Console().print(table)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2"])
