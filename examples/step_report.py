"""What a step costs beside the model: `python examples/step_report.py`.

Drives scheduler and prefix cache as the engine does, without a model, and times what each step asks of them:
`schedule`, `advance`, `publish` and the gauges of `stats`. Some sequences decode all the time; what differs is how much
is cached, and who waits. Where all that wait share a prefix, the one that computes it is not done before the end.
"""

import random
import statistics
import time
from array import array

import numpy as np
from rich.console import Console
from rich.table import Table

from trueroll.engine.cache.prefix_cache import PrefixCache
from trueroll.engine.scheduling.scheduler import Scheduler
from trueroll.engine.scheduling.sequence import Generation, Sequence

CACHED_BLOCKS = 500_000
WAITING = 16_000
RUNNING = 64
STEPS = 100
BLOCK_SIZE = 16
PREFIX = 32 * BLOCK_SIZE
"""Tokens that prompts share, or not; each has a block's worth of its own after them."""


class Load:
    """A scheduler with `RUNNING` sequences that decode, and room for `spare` more."""

    def __init__(self, spare: int = 0, cached_blocks: int = 0) -> None:
        own_blocks = (RUNNING + spare) * (PREFIX + BLOCK_SIZE + STEPS + 2 * BLOCK_SIZE) // BLOCK_SIZE
        self.cache = PrefixCache(cached_blocks + own_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.cache, RUNNING + spare, (RUNNING + spare) * (PREFIX + BLOCK_SIZE))
        self.random = random.Random(0)
        self.arrivals = 0
        self.unpublished: Sequence | None = None
        self.fill(cached_blocks)
        for _ in range(RUNNING):
            self.add(self.tokens(PREFIX))
        self.step()

    def tokens(self, count: int) -> array:
        return array("i", self.random.choices(range(50_000), k=count))

    def fill(self, num_blocks: int) -> None:
        """Leaves so many free blocks that are cached."""
        while num_blocks:
            count = min(num_blocks, PREFIX // BLOCK_SIZE)
            table = self.cache.allocate((), count)
            self.cache.publish(self.cache.new_chain(None), self.tokens(PREFIX), table, count * BLOCK_SIZE)
            self.cache.release(table)
            num_blocks -= count

    def add(self, prefix: array) -> Sequence:
        prompt = prefix + self.tokens(BLOCK_SIZE)
        sequence = Sequence((self.arrivals, 0), prompt, len(prompt), self.cache.new_chain(None), Generation([]))
        self.scheduler.add(sequence)
        self.arrivals += 1
        return sequence

    def step(self) -> float:
        start = time.perf_counter()
        chunks = self.scheduler.schedule()
        self.scheduler.advance(chunks)
        published = [i for i, sequence in enumerate(chunks.sequences) if sequence is not self.unpublished]
        self.scheduler.publish(chunks.take(np.array(published, np.int64)))
        gauges = self.cache.num_cached, self.cache.num_free, len(self.scheduler.running), self.scheduler.num_waiting
        seconds = time.perf_counter() - start
        assert min(gauges) >= 0
        for chunk in chunks:
            if chunk.reaches_end and chunk.sequence is not self.unpublished:
                chunk.sequence.tokens.append(1)
                self.scheduler.lanes.repeat(chunk.sequence)
        return seconds

    def abort_waiting(self) -> float:
        waiting = list(self.scheduler.waiting)
        self.random.shuffle(waiting)
        start = time.perf_counter()
        for sequence in waiting:
            self.scheduler.finish(sequence)
        return time.perf_counter() - start


def nothing_else() -> Load:
    return Load()


def much_is_cached() -> Load:
    load = Load(cached_blocks=CACHED_BLOCKS)
    assert load.cache.num_cached == CACHED_BLOCKS
    return load


def different_prompts_wait() -> Load:
    load = Load()
    for _ in range(WAITING):
        load.add(load.tokens(PREFIX))
    return load


def one_prefix_is_waited_for() -> Load:
    load = Load(spare=4)
    prefix = load.tokens(PREFIX)
    load.unpublished = load.add(prefix)
    for _ in range(WAITING):
        load.add(prefix)
    return load


def main() -> None:
    console = Console(width=120)
    scenarios = {
        "nothing else": nothing_else,
        f"{CACHED_BLOCKS:,} blocks are cached": much_is_cached,
        f"{WAITING:,} different prompts wait": different_prompts_wait,
        f"{WAITING:,} wait for one prefix": one_prefix_is_waited_for,
    }
    table = Table(f"{RUNNING} decode, and", "median ms", "longest ms", "abort of all that wait: ms")
    for name, make in scenarios.items():
        load = make()
        seconds = [load.step() for _ in range(STEPS)]
        num_waiting = load.scheduler.num_waiting
        assert num_waiting == (WAITING if "wait" in name else 0)
        aborted = f"{load.abort_waiting() * 1e3:.1f}" if num_waiting else ""
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.2f}", f"{max(seconds) * 1e3:.2f}", aborted)
    console.print(f"steps of {RUNNING} sequences or a few more, {STEPS} of each kind")
    console.print(table)


if __name__ == "__main__":
    main()
