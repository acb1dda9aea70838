"""The scheduler without a model. The driver records the expected content of every KV slot, and checks each step."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from matrix import thinned
from random_calls import run_until_seen

from trueroll.engine.cache.host_tier import Copies
from trueroll.engine.cache.prefix_cache import Chain, PrefixCache
from trueroll.engine.outputs.open_requests import DrawRecord, OpenScore
from trueroll.engine.request import ScoreRequest
from trueroll.engine.scheduling.scheduler import Scheduler, Waiting
from trueroll.engine.scheduling.sequence import Chunk, Chunks, Generation, Sequence
from trueroll.errors import InvalidRequestError

from ..caches import CollidingCache, CountingCache

PROFILE = settings(derandomize=True, deadline=None, max_examples=100, stateful_step_count=40)

Content = tuple[int, int]
"""The content of a slot: the epoch in which the slot was computed, and the number of the salted token prefix that ends
in the slot.
"""


SCORE = OpenScore(ScoreRequest("score", np.zeros(2, np.int32)), (0, 0), None)


@dataclass(eq=False)
class Sample:
    """Draws `length` tokens and then ends. Each token depends only on the preceding tokens and on `order`."""

    order: tuple[int, int]
    length: int
    sequence: Sequence
    drawn: int = 0
    draw: DrawRecord = DrawRecord()

    def next_token(self) -> int:
        self.drawn += 1
        tokens = self.sequence.tokens
        return (5 * len(tokens) + tokens[-1] + self.order[1] % 2) % 3

    def renew_kv(self) -> None:
        """Do nothing: no commit keeps the sample's KV."""

    @property
    def is_done(self) -> bool:
        return self.drawn == self.length


class Driver:
    """Plays the engine's part around a scheduler. Raises AssertionError in any step that breaks a promise."""

    def __init__(
        self,
        num_blocks: int | dict[int | None, int],
        block_size: int,
        max_num_seqs: int,
        budget: int,
        cache: type[PrefixCache] = PrefixCache,
        host_blocks: tuple[int, ...] = (),
    ) -> None:
        groups: dict[int | None, int] = num_blocks if isinstance(num_blocks, dict) else {None: num_blocks}
        self.cache = cache(groups, block_size, host_blocks=host_blocks)
        self.scheduler = Scheduler(self.cache, max_num_seqs, budget)
        self.kv = self._no_kv()
        self.host: list[dict[int, list[Content | None]]] = [{} for _ in groups]
        self.holds: dict[Sequence, list[Content]] = {}
        self.prefixes: dict[tuple[object, int], int] = {}
        self.open: list[Sample | Sequence] = []
        self.steps = 0
        self.arrivals = 0
        self.needed_steps = 0
        self.seen: Counter[str] = Counter()

    def _all_free(self) -> bool:
        return all(pool.num_free == pool.num_blocks for pool in self.cache.tables.pools)

    def _no_kv(self) -> list[list[list[Content | None]]]:
        """Return empty slots, for each group and block."""
        return [[[None] * self.cache.block_size for _ in range(pool.num_blocks)] for pool in self.cache.tables.pools]

    def add(self, prompt: list[int], lengths: list[int], salt: str | None = None) -> Sequence:
        """Add a group with one sample per length. Without lengths, add a score request."""
        sequence = self._sequence(prompt, salt)
        samples: list[Any] = [Sample((self.arrivals, i), length, sequence) for i, length in enumerate(lengths)]
        sequence.purpose = Generation(samples.copy()) if samples else SCORE
        self.open += samples or [sequence]
        self.needed_steps += sum(len(prompt) + length for length in lengths or [0])
        self.scheduler.cache.tables.check_fits(len(prompt) + max(lengths, default=0))
        self.scheduler.waiting.add(sequence)
        self.arrivals += 1
        return sequence

    def _sequence(self, prompt: list[int], salt: str | None) -> Sequence:
        chain = self.cache.identity.new_chain(salt)
        return Sequence((self.arrivals, 0), array("i", prompt), len(prompt), chain, SCORE)

    def step(self) -> Chunks:
        before = list(self.scheduler.running.sequences)
        preemptions = self.scheduler.stats.preemptions
        epoch = self.cache.identity.epoch
        chunks = self.scheduler.schedule()
        self._check_limits(chunks)
        self._check_preemptions(before, self.scheduler.stats.preemptions - preemptions)
        self._check_progress(before, chunks)
        for sequence in set(self.scheduler.running.sequences).difference(before):
            self._check_hits(sequence, epoch)
        self.steps += bool(self.open)
        self._copy(self.scheduler.running.take_block_copies())
        self._write(chunks)
        self.scheduler.advance(chunks)
        self.scheduler.publish(chunks)
        for chunk in chunks:
            if chunk.reaches_end:
                self._extend(chunk.sequence)
        return chunks

    def _copy(self, copies: list[Copies]) -> None:
        """Copy blocks and slots in order, as a device does before it computes a step."""
        for kv, host, of_group in zip(self.kv, self.host, copies, strict=True):
            for source, to in of_group:
                content = kv[source] if source >= 0 else host[source]
                self.seen["stored"] += to < 0
                self.seen["restored block"] += source < 0
                if to >= 0:
                    kv[to] = content.copy()
                else:
                    host[to] = content.copy()

    def abort(self, target: Sample | Sequence) -> None:
        self.open.remove(target)
        sequence = target.sequence if isinstance(target, Sample) else target
        match sequence.purpose:
            case Generation(samples):
                samples.remove(target)  # type: ignore[arg-type]
                if samples:
                    return
        self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.check_whole(sequence)
        self.holds.pop(sequence, None)
        self.scheduler.finish(sequence)

    def recompute(self) -> None:
        """Recompute all running sequences, as after a change of the weights."""
        running = self.scheduler.running.sequences.copy()
        self.needed_steps += sum(sequence.num_tokens for sequence in running)
        self.scheduler.recompute_running()
        assert not self.scheduler.running.sequences and self._all_free()
        assert self.scheduler.started() == [s for s in self.scheduler.waiting if s.num_tokens > s.num_prompt_tokens]
        for sequence in running:
            del self.holds[sequence]
        self.seen["recompute"] += bool(running)

    def step_until(self, condition: Callable[[], bool]) -> list[Chunk]:
        """Return the chunks of the last step. A step computes at least one token."""
        chunks: list[Chunk] = []
        while not condition():
            assert self.open
            chunks = list(self.step())
            assert self.steps <= self.needed_steps
        return chunks

    def drain(self) -> None:
        self.step_until(lambda: not self.open)
        self.check()
        assert not self.scheduler.running.sequences and not self.scheduler.waiting
        assert self._all_free()

    def check(self) -> None:
        """Check that every block is counted once, that running sequences keep their KV, and that every claim has an
        owner.
        """
        self.scheduler.check_integrity()
        tables = [sequence.table for sequence in self.scheduler.running.sequences]
        for group, pool in enumerate(self.cache.tables.pools):
            assert pool.num_free == pool.num_blocks - len({block for table in tables for block in table.held(group)})
        for sequence in self.scheduler.running.sequences:
            self.check_whole(sequence)
            self.check_blocks(sequence, sequence.num_computed)
            if sequence.chain.epoch == self.cache.identity.epoch:
                assert len(sequence.chain.entries) == sequence.num_computed // self.cache.block_size
        waiting = [*self.scheduler.waiting]
        assert len(waiting) == len(self.scheduler.waiting) and waiting == sorted(waiting, key=lambda s: s.order)
        owners = {id(sequence.chain) for sequence in self.scheduler.running.sequences}
        assert {id(chain) for chain in self.cache.claims._chains.values()} <= owners

    def check_whole(self, sequence: Sequence) -> None:
        """Check that a sequence holds exactly the blocks with its own KV that its next token can attend to."""
        end, holds = sequence.num_computed, self.holds.get(sequence, [])
        for group, start in enumerate(sequence.table.starts):
            window, first = self.cache.tables.windows[group], start * self.cache.block_size
            reached = 0 if window is None else max(0, end - window + 1)
            assert reached - self.cache.block_size < first <= reached
            self.seen["gave back"] += first > 0
            assert self._held(sequence, group, end)[first:] == holds[first:end]

    def check_blocks(self, sequence: Sequence, end: int) -> None:
        assert len(sequence.table) == self.cache.tables.blocks_for(end)

    def _held(self, sequence: Sequence, group: int, end: int) -> list[Content | None]:
        size, kv = self.cache.block_size, {**self.host[group], **dict(enumerate(self.kv[group]))}
        for source, to in self.cache.tables.copies[group]:
            kv[to] = kv[source]
        blocks = sequence.table.blocks[group]
        return [kv[blocks[p // size]][p % size] for p in range(end)]

    def _contents(self, sequence: Sequence, start: int, end: int) -> list[Content]:
        """Return the expected content of slots [start, end) after they are computed in this epoch."""
        prefix: object = self.holds[sequence][start - 1][1] if start else f"salt {sequence.chain.salt!r}"
        contents: list[Content] = []
        for token in sequence.tokens[start:end]:
            number = self.prefixes.setdefault((prefix, token), len(self.prefixes))
            contents.append((self.cache.identity.epoch, number))
            prefix = number
        return contents

    def _check_limits(self, chunks: Chunks) -> None:
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running.sequences) <= self.scheduler.running._capacity
        assert self.scheduler.running.sequences == sorted(self.scheduler.running.sequences, key=lambda s: s.order)
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence in self.scheduler.running.sequences
            assert sequence.num_computed == chunk.start < chunk.end <= sequence.num_tokens
            self.check_blocks(sequence, chunk.end)

    def _check_preemptions(self, before: list[Sequence], preemptions: int) -> None:
        """Check that the newest running sequences were preempted, and that no other sequence was admitted instead."""
        survivors = [sequence for sequence in before if sequence.table]
        assert survivors == before[: len(survivors)]
        assert preemptions == len(before) - len(survivors)
        for sequence in before[len(survivors) :]:
            del self.holds[sequence]
        if preemptions:
            assert self.scheduler.running.sequences == survivors
            self.seen["preempted"] += 1

    def _check_progress(self, before: list[Sequence], chunks: Chunks) -> None:
        """Check progress: the oldest unfinished sequence runs, and every decode runs unless blocks are short."""
        scheduled = {chunk.sequence for chunk in chunks}
        assert bool(chunks) == bool(self.open)
        assert set(before[:1]) <= scheduled
        stalled = [s for s in before if s.table and s.num_uncomputed == 1 and s not in scheduled]
        assert not stalled or self.cache.tables.num_available == 0
        spent = sum(chunk.end - chunk.start for chunk in chunks)
        if spent < self.scheduler.max_num_batched_tokens and not all(chunk.reaches_end for chunk in chunks):
            self.seen["chunk shrunk"] += 1

    def _check_hits(self, sequence: Sequence, epoch: int) -> None:
        """Check that a newly admitted sequence starts after cached blocks of its own prefix, which were computed in
        this epoch.
        """
        self.holds[sequence] = []
        self.holds[sequence] = self._contents(sequence, 0, sequence.num_computed)
        assert all(held_in == epoch for held_in, _ in self.holds[sequence])
        self.check_whole(sequence)
        self.seen["hit"] += sequence.num_computed > 0

    def _write(self, chunks: Chunks) -> None:
        size, running = self.cache.block_size, self.scheduler.running.sequences
        for chunk in chunks:
            self.holds[chunk.sequence] += self._contents(chunk.sequence, chunk.start, chunk.end)
        for group, kv in enumerate(self.kv):
            references = Counter(block for sequence in running for block in sequence.table.held(group))
            for sequence, start, end in chunks:
                for p in range(start, end):
                    block = sequence.table.blocks[group][p // size]
                    assert references[block] == 1
                    kv[block][p % size] = self.holds[sequence][p]

    def _extend(self, sequence: Sequence) -> None:
        """Give every sample its token. Each unfinished sample gets its own sequence."""
        if not isinstance(sequence.purpose, Generation):
            self.open.remove(sequence)
            self.finish(sequence)
            return
        drawn = [(sample, sample.next_token()) for sample in cast("list[Any]", sequence.purpose.samples)]
        going_on = [(sample, token) for sample, token in drawn if not sample.is_done]
        for sample, token in going_on[1:]:
            sample.sequence = self._fork(sequence, sample, token)
        for sample, token in going_on[:1]:
            sample.sequence = sequence
            self.scheduler.running.lanes.begin(sequence, sample, token)
        for sample, _ in drawn:
            if sample.is_done:
                self.open.remove(sample)
        if not going_on:
            self.finish(sequence)

    def _fork(self, parent: Sequence, sample: Sample, token: int) -> Sequence:
        pending = self._num_copies()
        child = self.scheduler.fork(parent, sample, token)  # type: ignore[arg-type]
        if child.table:
            self.holds[child] = self.holds[parent].copy()
            self.check_whole(child)
            self.seen["fork with a copy"] += self._num_copies() - pending
        self.seen["fork that waits"] += not child.table
        return child

    def _num_copies(self) -> int:
        return sum(map(len, self.cache.tables.copies))


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, computes and aborts requests, and drops the cache, in any order and with far too few blocks."""

    cache: type[PrefixCache] = PrefixCache
    num_blocks: dict[int | None, int] = {None: 8}
    host_blocks: tuple[int, ...] = ()
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            self.num_blocks, block_size=2, max_num_seqs=5, budget=7, cache=self.cache, host_blocks=self.host_blocks
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        lengths=st.lists(st.integers(1, 6), max_size=3),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(self, prompt: list[int], lengths: list[int], salt: str | None) -> None:
        self.driver.add(prompt, lengths, salt)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()
            self.driver.check()

    @precondition(lambda self: self.driver.open)
    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        self.driver.abort(self.driver.open[number % len(self.driver.open)])

    @rule(event=st.sampled_from(["invalidate", "recompute", "both"] + 9 * ["neither"]))
    def lose(self, event: str) -> None:
        if event in ("invalidate", "both"):
            self.driver.cache.invalidate()
            self.seen["invalidate while running"] += bool(self.driver.scheduler.running.sequences)
        if event in ("recompute", "both"):
            self.driver.recompute()

    @invariant()
    def check(self) -> None:
        self.driver.check()

    def teardown(self) -> None:
        self.driver.drain()
        self.seen.update(self.driver.seen)
        self.seen["deferred"] += self.driver.scheduler.stats.deferred_admissions
        self.seen["eviction"] += sum(pool.evictions for pool in self.driver.cache.tables.pools)


class CollidingMachine(SchedulerMachine):
    """Like `SchedulerMachine`, with only two different hashes."""

    cache = CollidingCache
    seen: Counter[str] = Counter()


class WindowMachine(SchedulerMachine):
    """Layers without a window, and layers with two windows and fewer blocks."""

    num_blocks = {None: 8, 3: 4, 6: 5}
    seen: Counter[str] = Counter()


class WindowsAloneMachine(SchedulerMachine):
    """All layers have a window."""

    num_blocks = {6: 6}
    seen: Counter[str] = Counter()


class CollidingWindowMachine(CollidingMachine):
    """Layers with a window, and only two different hashes."""

    num_blocks = {None: 8, 3: 6}
    seen: Counter[str] = Counter()


class HostMachine(SchedulerMachine):
    """A host tier that is too small for the evicted blocks."""

    host_blocks = (5,)
    seen: Counter[str] = Counter()


class HostWindowMachine(CollidingMachine):
    """Layers with and without windows, a host tier for each, and only two different hashes."""

    num_blocks = {None: 8, 3: 4, 6: 5}
    host_blocks = (9, 1, 3)
    seen: Counter[str] = Counter()


class HostWindowsAloneMachine(WindowsAloneMachine):
    """All layers have a window, and the host tier is larger than the device."""

    host_blocks = (12,)
    seen: Counter[str] = Counter()


EVENTS = {
    "preempted",
    "hit",
    "chunk shrunk",
    "fork with a copy",
    "fork that waits",
    "invalidate while running",
    "recompute",
    "deferred",
    "eviction",
}


MACHINES = [
    *(SchedulerMachine, CollidingMachine, WindowMachine, WindowsAloneMachine, CollidingWindowMachine),
    *(HostMachine, HostWindowMachine, HostWindowsAloneMachine),
]


@thinned(lambda machine: machine not in (HostMachine, HostWindowsAloneMachine))
@pytest.mark.parametrize("machine", MACHINES)
def test_requests_in_any_order_all_finish(machine: type[SchedulerMachine]) -> None:
    machine.seen.clear()
    events = EVENTS if machine.num_blocks.keys() == {None} else EVENTS | {"gave back"}
    events |= {"stored", "restored block"} if machine.host_blocks else set()
    run_until_seen(machine, PROFILE, lambda: events - (+machine.seen).keys())


def random_prompt(rng: random.Random, shortest: int, longest: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(rng.randint(shortest, longest))]


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_thousand_samples_finish_in_a_tenth_of_the_blocks_they_need(group_size: int) -> None:
    rng = random.Random(0)
    requests = [
        (random_prompt(rng, 8, 200), [rng.randint(8, 200) for _ in range(group_size)])
        for _ in range(1000 // group_size)
    ]
    blocks = sum(-(-(len(prompt) + length) // 16) for prompt, lengths in requests for length in lengths)
    driver = Driver(num_blocks=blocks // 10, block_size=16, max_num_seqs=256, budget=512)
    for prompt, lengths in requests:
        driver.add(prompt, lengths)
    driver.drain()
    stats = driver.scheduler.stats
    # The last token of a sample is never computed, and a group's prompt is computed once.
    needed = sum(len(prompt) + sum(lengths) - len(lengths) for prompt, lengths in requests)
    assert stats.preemptions > 50
    assert needed < stats.computed_tokens < 1.5 * needed


def test_a_long_prompt_makes_no_decode_wait() -> None:
    driver = Driver(num_blocks=600, block_size=16, max_num_seqs=65, budget=512)
    decodes = {driver.add([i, i + 1, i + 2], [100]) for i in range(64)}
    driver.step()
    assert all(sequence.num_uncomputed == 1 for sequence in decodes)
    prompt = driver.add([7] * 4000, [1])
    steps: list[Chunks] = []
    while not steps or prompt in driver.holds:
        steps.append(driver.step())
    assert len(steps) == -(-4000 // (512 - 64))
    for chunks in steps:
        sizes = {chunk.sequence: chunk.end - chunk.start for chunk in chunks}
        assert {sequence for sequence, size in sizes.items() if size == 1} >= decodes
        assert sizes.keys() == decodes | {prompt}


def test_a_preempted_sequence_finds_its_blocks_again_and_hashes_none_twice() -> None:
    driver = Driver(num_blocks=7, block_size=2, max_num_seqs=2, budget=16, cache=CountingCache)
    driver.add([1, 1, 1, 1], [5])
    preempted = driver.add([2, 2, 2, 2, 2, 2], [5])
    driver.step_until(lambda: driver.seen["preempted"] > 0)
    assert preempted in driver.scheduler.waiting
    chunks = driver.step_until(lambda: bool(preempted.table))
    assert [(chunk.start, chunk.end) for chunk in chunks if chunk.sequence is preempted] == [(6, 9)]
    driver.drain()
    assert isinstance(driver.cache, CountingCache) and driver.cache.digests == 8 // 2 + 10 // 2


def test_a_chunk_shrinks_to_the_blocks_that_are_left() -> None:
    driver = Driver(num_blocks=4, block_size=2, max_num_seqs=2, budget=3)
    driver.add([1, 1], [4])
    prompt = driver.add([2] * 6, [1])
    starts_and_ends = [[(c.start, c.end) for c in driver.step() if c.sequence is prompt] for _ in range(4)]
    # In the third step, the budget has two tokens left for the prompt, but the prompt's second block has room for only
    # one.
    assert starts_and_ends == [[(0, 1)], [(1, 3)], [(3, 4)], []]
    assert driver.scheduler.stats.preemptions == 1
    driver.drain()


def test_a_shared_prefix_is_computed_once() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, budget=8)
    prefix = list(range(20))
    driver.add([*prefix, 100], [3])
    followers = [driver.add([*prefix, 200 + i], [3]) for i in range(3)]
    driver.step()
    assert all(sequence in driver.scheduler.waiting for sequence in followers)
    driver.drain()
    stats = driver.scheduler.stats
    assert stats.computed_prompt_tokens == len(prefix) + 4
    assert stats.deferred_admissions > 0
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * (len(prefix) + 1), 3 * len(prefix))


@pytest.mark.parametrize("salts", [(None, "a"), ("a", "b")])
def test_different_salts_neither_wait_nor_hit(salts: tuple[str | None, str | None]) -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, budget=64)
    for salt in salts:
        driver.add([1] * 20, [3], salt)
    assert len(driver.step()) == 2
    driver.drain()
    assert driver.scheduler.stats.computed_prompt_tokens == 40


def test_a_reader_takes_over_when_the_writer_is_aborted() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, budget=8)
    prefix = list(range(40))
    driver.add([*prefix, 100], [3])
    reader = driver.add([*prefix, 200], [3])
    driver.step()
    driver.step()
    assert reader in driver.scheduler.waiting
    assert driver.cache.claims._chains
    driver.abort(driver.open[0])
    assert not driver.cache.claims._chains
    assert [(chunk.sequence, chunk.start, chunk.end) for chunk in driver.step()] == [(reader, 16, 24)]
    driver.drain()


def test_a_reader_continues_when_the_writer_is_preempted() -> None:
    driver = Driver(num_blocks=12, block_size=2, max_num_seqs=8, budget=3)
    driver.add([9], [14])
    prefix = list(range(20))
    writer = driver.add([*prefix, 100], [1])
    reader = driver.add([*prefix, 200], [1])
    driver.step_until(lambda: bool(writer.table))
    assert driver.cache.claims._chains
    driver.step_until(lambda: driver.seen["preempted"] > 0)
    assert [*driver.scheduler.waiting] == [writer, reader]
    assert not driver.cache.claims._chains
    driver.drain()


def schedule_unpublished(driver: Driver) -> tuple[Chunks, int]:
    """Plan a step before the previous step is done. Return the step, and the number of prefixes that were looked up for
    it.
    """
    assert isinstance(driver.cache, CountingCache)
    before = driver.cache.lookups
    chunks = driver.scheduler.schedule()
    driver.scheduler.advance(chunks)
    return chunks, driver.cache.lookups - before


def test_a_step_looks_up_few_sequences_that_wait_for_a_prefix() -> None:
    count, most = 1000, 32
    driver = Driver(num_blocks=4096, block_size=4, max_num_seqs=100, budget=2048, cache=CountingCache)
    prefix = list(range(40))
    writer = driver.add([*prefix, 100], [3])
    readers = [driver.add([*prefix, 200 + i], [3]) for i in range(count)]
    other = driver.add([7] * 5, [3])
    steps = [schedule_unpublished(driver) for _ in range(count // most + 1)]
    assert [chunk.sequence for chunks, _ in steps for chunk in chunks] == [writer, other], "no sequence is starved"
    lookups = [number for _, number in steps]
    assert max(lookups) <= 1 + most and sum(lookups) == 1 + count + 1
    assert [*driver.scheduler.waiting] == readers
    deferred = driver.scheduler.stats.deferred_admissions
    chunks, number = schedule_unpublished(driver)
    assert (len(chunks), number) == (0, 0), "until the prefix is published, nothing is looked up again"
    assert driver.scheduler.stats.deferred_admissions == deferred + count
    for chunks, _ in steps:
        driver.scheduler.publish(chunks)
    chunks, number = schedule_unpublished(driver)
    assert [(c.sequence, c.start) for c in chunks] == [(reader, len(prefix)) for reader in readers[:98]]
    assert number == 98


def test_a_step_does_not_examine_sequences_without_room() -> None:
    count = 16_000
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=2, budget=64, cache=CountingCache)
    for i in range(count):
        driver.add([i], [30])
    driver.step()
    assert (len(driver.scheduler.running.sequences), len(driver.scheduler.waiting)) == (2, count - 2)
    tracemalloc.start()
    chunks, lookups = schedule_unpublished(driver)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chunks) == 2 and lookups == 0
    assert peak < count, "nothing is allocated per sequence"


class Sorted(list):
    """A list that fails if it is searched from the beginning."""

    def remove(self, value: object) -> None:
        pytest.fail("searched from the beginning")


def test_a_sequence_is_removed_without_a_search() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=4, budget=64)
    driver.scheduler.running.sequences = Sorted()
    for i in range(12):
        driver.add([i, i + 1], [3])
    driver.step()
    assert len(driver.scheduler.running.sequences) == 4 and len(driver.scheduler.waiting) == 8
    for sample in [driver.open[9], driver.open[2], driver.open[11], driver.open[5]]:
        driver.abort(sample)
    driver.recompute()
    assert [sequence.order[0] for sequence in driver.scheduler.waiting] == [0, 1, 3, 4, 6, 7, 8, 10]
    driver.drain()


def test_sequences_that_leave_and_return_keep_their_order_and_leave_nothing_behind() -> None:
    chance, waiting = random.Random(0), Waiting()
    sequences = [Sequence((i // 2, i % 2), array("i", [i]), 1, Chain(0, b""), Generation([])) for i in range(3000)]
    chance.shuffle(sequences)
    for sequence in sequences:
        waiting.add(sequence)
    for _ in range(20):  # each sequence leaves several times before it has been the first
        for sequence in sequences[::2]:
            waiting.remove(sequence)
        for sequence in sequences[::2]:
            waiting.add(sequence)
    assert len(waiting._heap) <= 2 * len(sequences) + 1024
    for sequence in sequences[1::2]:
        waiting.remove(sequence)
    left = sorted(sequences[::2], key=lambda each: each.order)
    assert [*waiting] == left and len(waiting) == len(left)
    for sequence in left:
        assert waiting.first is sequence
        waiting.remove(sequence)
    assert waiting.first is None and not waiting._heap


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    driver = Driver(num_blocks=16, block_size=2, max_num_seqs=8, budget=16)
    driver.add([1, 2, 3, 4, 5], [4, 4, 4])
    driver.step()
    tables = [sequence.table.blocks[0] for sequence in driver.scheduler.running.sequences]
    assert len(tables) == 3
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert driver.seen["fork with a copy"] == 2
    driver.drain()
    assert driver.scheduler.stats.computed_tokens == 5 + 3 * 3


def test_the_last_copy_into_a_block_before_a_step_counts() -> None:
    driver = Driver(num_blocks=16, block_size=2, max_num_seqs=8, budget=16)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        driver.add(prompt, [3, 3])
    driver.step()
    first, fork, other, _ = driver.scheduler.running.sequences
    [_, (destination, source)] = sorted(
        zip(fork.table.blocks[0], first.table.blocks[0], strict=True), key=lambda pair: pair[0] != pair[1]
    )
    assert (source, destination) in driver.cache.tables.copies[0] and source != destination, "premise"
    driver.scheduler.finish(fork)
    again = driver.scheduler.fork(other, Sample((9, 0), 1, other), 5)  # type: ignore[arg-type]
    assert destination in again.table.blocks[0], "premise: the block that was released last is taken first"
    [copies] = driver.scheduler.running.take_block_copies()
    [*_, last] = [source for source, to in copies if to == destination]
    assert last == other.table.blocks[0][again.table.blocks[0].index(destination)]
    assert driver.scheduler.running.take_block_copies() == [[]]


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    driver = Driver(num_blocks=16, block_size=2, max_num_seqs=8, budget=16)
    driver.add([1, 2, 3, 4], [3, 3])
    driver.step()
    first, second = driver.scheduler.running.sequences
    assert first.table.blocks == second.table.blocks
    assert driver.seen["fork with a copy"] == 0
    driver.drain()


def test_a_fork_that_waited_hits_the_prompt_and_publishes_its_tokens() -> None:
    driver = Driver(num_blocks=16, block_size=2, max_num_seqs=1, budget=16)
    driver.add([1, 2, 3, 4], [1, 2, 9])
    driver.step()
    assert driver.seen["fork that waits"] == 1
    waiting = next(iter(driver.scheduler.waiting))
    driver.drain()
    assert driver.scheduler.stats.computed_tokens == 4 + 1 + 8
    text = waiting.tokens[:12]
    assert len(driver.cache.lookup(driver.cache.identity.new_chain(None), text, len(text))) == 6


@pytest.mark.parametrize("invalidated", [False, True])
def test_invalidation_hides_running_sequences_and_keeps_them_running(invalidated: bool) -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, budget=8)
    old = driver.add(list(range(24)), [5])
    driver.step()
    if invalidated:
        driver.cache.invalidate()
    new = driver.add(list(range(24)), [5])
    starts: dict[Sequence, int] = {}
    for _ in range(6):
        for chunk in driver.step():
            starts.setdefault(chunk.sequence, chunk.start)
    assert starts == {old: 8, new: 0 if invalidated else 20}
    driver.drain()
    assert driver.scheduler.stats.preemptions == 0


def test_sequences_that_waited_during_an_invalidation_are_published() -> None:
    driver = Driver(num_blocks=16, block_size=2, max_num_seqs=1, budget=16)
    driver.add([1, 2, 3], [3])
    driver.add([4] * 9, [1])
    driver.step()
    driver.cache.invalidate()
    driver.drain()
    reader = driver.add([4] * 9, [1])
    assert [(chunk.sequence, chunk.start) for chunk in driver.step()] == [(reader, 8)]


def test_nothing_overtakes_a_request_that_waits_for_blocks() -> None:
    driver = Driver(num_blocks=6, block_size=2, max_num_seqs=8, budget=32)
    first, large, small = driver.add([1] * 6, [5]), driver.add([2] * 10, [1]), driver.add([3], [1])
    driver.step()
    assert driver.cache.tables.pools[0].num_free >= driver.cache.tables.blocks_for(small.num_tokens)
    assert (driver.scheduler.running.sequences, [*driver.scheduler.waiting]) == ([first], [large, small])
    driver.step_until(lambda: first not in driver.scheduler.running.sequences)
    assert [chunk.sequence for chunk in driver.step()] == [large, small]
    driver.drain()


def test_a_score_request_computes_every_token_and_others_hit_them() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, budget=8)
    for _ in range(2):
        driver.add(list(range(20)), [])
        driver.drain()
    assert driver.scheduler.stats.computed_tokens == 40
    reader = driver.add(list(range(20)), [1])
    assert [(chunk.sequence, chunk.start) for chunk in driver.step()] == [(reader, 16)]
    assert driver.scheduler.stats.prefix_queries == 20


def test_a_request_that_can_never_fit_is_rejected_with_the_numbers() -> None:
    scheduler = Scheduler(PrefixCache({None: 3}, 4), max_num_seqs=1, max_num_batched_tokens=4)
    scheduler.cache.tables.check_fits(12)
    with pytest.raises(InvalidRequestError, match=r"needs 4 KV blocks for 13 tokens .*, but .* only 3"):
        scheduler.cache.tables.check_fits(13)


def _hold_blocks_while_waiting(driver: Driver) -> None:
    driver.scheduler.waiting.add(driver.scheduler.running.sequences.pop())


def _lose_a_block(driver: Driver) -> None:
    driver.scheduler.running.sequences[0].table.blocks[0].pop()


def _share_a_block_uncounted(driver: Driver) -> None:
    first, second = (sequence.table.blocks[0] for sequence in driver.scheduler.running.sequences)
    first[0] = second[0]


def _count_a_token_in_its_lane_alone(driver: Driver) -> None:
    driver.scheduler.running.lanes.num_tokens[driver.scheduler.running.sequences[1].lane] += 1


def _read_another_block(driver: Driver) -> None:
    driver.scheduler.running.lanes.tables[0][driver.scheduler.running.sequences[1].lane, 0] += 1


def _draw_no_more(driver: Driver) -> None:
    driver.scheduler.running.lanes.is_decoding[driver.scheduler.running.sequences[1].lane] = False


def _draw_for_another(driver: Driver) -> None:
    first, second = (sequence.lane for sequence in driver.scheduler.running.sequences)
    driver.scheduler.running.lanes.samples[first] = driver.scheduler.running.lanes.samples[second]


def _keep_a_lane(driver: Driver) -> None:
    sequence = driver._sequence([1], None)
    sequence.table = driver.scheduler.cache.tables.allocate([], 0)
    driver.scheduler.running.lanes.enter(sequence)


@pytest.mark.parametrize(
    "corrupt",
    [
        _hold_blocks_while_waiting,
        _lose_a_block,
        _share_a_block_uncounted,
        _count_a_token_in_its_lane_alone,
        _read_another_block,
        _draw_no_more,
        _draw_for_another,
        _keep_a_lane,
    ],
)
def test_the_integrity_check_finds_a_corruption(corrupt: Callable[[Driver], None]) -> None:
    driver = Driver(num_blocks=8, block_size=2, max_num_seqs=3, budget=8)
    driver.add([1, 2, 3], [5])
    driver.add([4, 5, 6], [5])
    driver.step()
    driver.scheduler.check_integrity()
    corrupt(driver)
    with pytest.raises(RuntimeError, match="waiting sequence holds blocks|have wrong reference counts|lane"):
        driver.scheduler.check_integrity()
