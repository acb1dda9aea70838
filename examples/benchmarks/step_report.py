"""Report the host's time for a step, without the model: `python examples/benchmarks/step_report.py`.

The first table times an engine with a model and a sampler that take no time, so a step consists only of the host's
work. Groups of 8 samples decode and never end. As on a GPU, the engine queues a step before it sees the tokens of the
previous step.

The second table calls the scheduler and the prefix cache in the engine's order, without a model. The table shows the
times of the calls in a step: `schedule`, `advance`, `publish`, and the gauges of `stats`. Some sequences decode all the
time. The rows of the table differ in the number of cached blocks, and in the waiting sequences: none, sequences with
different prompts, or sequences that all wait for one prefix. If all waiting sequences wait for one prefix, the sequence
that computes the prefix runs until the end of the measurement.

Both tables show CPU time, so other processes on the machine have little effect. The figures are the most accurate on an
idle core.
"""

import gc
import random
import statistics
import sys
import time
from array import array
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from laws_engine import cpu_seconds, host, prompt, request  # noqa: E402

from trueroll.engine.cache.prefix_cache import PrefixCache  # noqa: E402
from trueroll.engine.scheduling.scheduler import Scheduler  # noqa: E402
from trueroll.engine.scheduling.sequence import Generation, Sequence  # noqa: E402

HOST_SEQUENCES = (256, 1024, 4096)
GROUP = 8
PROMPT = 128
CACHED_BLOCKS = 500_000
WAITING = 16_000
RUNNING = 64
STEPS = 100
BLOCK_SIZE = 16
PREFIX = 32 * BLOCK_SIZE
"""Number of tokens in the prefix of a prompt. Each prompt adds one block of its own tokens."""


class Load:
    """A scheduler with `RUNNING` decoding sequences, and room for `spare` more sequences."""

    def __init__(self, spare: int = 0, cached_blocks: int = 0) -> None:
        own_blocks = (RUNNING + spare) * (PREFIX + BLOCK_SIZE + STEPS + 2 * BLOCK_SIZE) // BLOCK_SIZE
        self.cache = PrefixCache({None: cached_blocks + own_blocks}, BLOCK_SIZE)
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
        """Add `num_blocks` cached blocks that no sequence uses."""
        while num_blocks:
            count = min(num_blocks, PREFIX // BLOCK_SIZE)
            table = self.cache.tables.allocate((), count)
            self.cache.publish(self.cache.identity.new_chain(None), self.tokens(PREFIX), table, count * BLOCK_SIZE)
            self.cache.tables.release(table)
            num_blocks -= count

    def add(self, prefix: array) -> Sequence:
        prompt = prefix + self.tokens(BLOCK_SIZE)
        sequence = Sequence(
            (self.arrivals, 0), prompt, len(prompt), self.cache.identity.new_chain(None), Generation([])
        )
        self.scheduler.waiting.add(sequence)
        self.arrivals += 1
        return sequence

    def step(self) -> float:
        start = time.process_time()
        chunks = self.scheduler.schedule()
        self.scheduler.advance(chunks)
        published = [i for i, sequence in enumerate(chunks.sequences) if sequence is not self.unpublished]
        self.scheduler.publish(chunks.take(np.array(published, np.int64)))
        [pool] = self.cache.tables.pools
        gauges = pool.num_cached, pool.num_free, len(self.scheduler.running.sequences), len(self.scheduler.waiting)
        seconds = time.process_time() - start
        assert min(gauges) >= 0
        drawing = [i for i in published if chunks[i].reaches_end]
        decodes, ones = chunks.take(np.array(drawing, np.int64)), np.ones(len(drawing), np.int64)
        self.scheduler.running.lanes.accept(decodes, ones, ones, np.zeros(len(drawing), np.bool_))
        return seconds

    def abort_waiting(self) -> float:
        waiting = list(self.scheduler.waiting)
        self.random.shuffle(waiting)
        start = time.process_time()
        for sequence in waiting:
            self.scheduler.finish(sequence)
        return time.process_time() - start


def nothing_else() -> Load:
    return Load()


def much_is_cached() -> Load:
    load = Load(cached_blocks=CACHED_BLOCKS)
    assert load.cache.tables.pools[0].num_cached == CACHED_BLOCKS
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


def host_table() -> Table:
    table = Table("sequences that decode", "host's median ms", "longest ms")
    for count in HOST_SEQUENCES:
        size = PROMPT + STEPS + 32
        with host(count, size, count * (size // BLOCK_SIZE + 1)) as engine:
            for i in range(count // GROUP):
                engine.add(request(i, prompt(i, PROMPT), n=GROUP, max_tokens=STEPS + 32, seed=i))
            while engine.stats().num_running < count:
                engine.step()
            gc.freeze()  # a worker also freezes its objects
            seconds = [cpu_seconds(engine.step) for _ in range(STEPS)]
            assert engine.stats().num_running == count
        table.add_row(f"{count:,}", f"{statistics.median(seconds) * 1e3:.2f}", f"{max(seconds) * 1e3:.2f}")
    return table


def main() -> None:
    console = Console(width=120)
    console.print(f"steps of an engine without its model, {STEPS} of each kind")
    console.print(host_table())
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
        num_waiting = len(load.scheduler.waiting)
        assert num_waiting == (WAITING if "wait" in name else 0)
        aborted = f"{load.abort_waiting() * 1e3:.1f}" if num_waiting else ""
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.2f}", f"{max(seconds) * 1e3:.2f}", aborted)
    console.print(f"steps of {RUNNING} sequences or a few more, {STEPS} of each kind")
    console.print(table)


if __name__ == "__main__":
    main()
