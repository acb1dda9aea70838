"""Recurrent states under the scheduler. The driver records the expected content of every slot, and checks each step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from random_calls import run_until_seen

from trueroll.engine.cache.host_tier import Copies
from trueroll.engine.cache.prefix_cache import Entry, PrefixCache
from trueroll.engine.scheduling.recurrent import Intervals, StateSlots
from trueroll.engine.scheduling.scheduler import Scheduler
from trueroll.engine.scheduling.sequence import Chunks, Sequence
from trueroll.kernels.contract import NO_SLOT

from .test_scheduler import PROFILE, Content, Driver, SchedulerMachine

Prompt = list[int]
EVERY_4 = Intervals(4, 0)


class HybridDriver(Driver):
    """A driver of a model with recurrent layers. `states`: for each slot, the last token that its state includes."""

    def __init__(
        self,
        num_blocks: int | dict[int | None, int] = 64,
        block_size: int = 2,
        max_num_seqs: int = 5,
        budget: int = 64,
        num_slots: int = 12,
        checkpoints: int = 6,
        intervals: Intervals = EVERY_4,
        host_blocks: tuple[int, ...] = (),
        host_states: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, budget, host_blocks=host_blocks)
        self.slots = StateSlots(num_slots, checkpoints, host_states)
        pools = {
            window: pool.num_blocks
            for window, pool in zip(self.cache.tables.windows, self.cache.tables.pools, strict=True)
        }
        self.cache = PrefixCache(pools, block_size, forget=self.slots.forget, host_blocks=host_blocks)
        self.scheduler = Scheduler(self.cache, max_num_seqs, budget, self.slots, intervals)
        self.states: dict[int, Content | None] = dict.fromkeys(range(-host_states, num_slots))

    def _copy(self, copies: list[Copies]) -> None:
        *copies, of_states = copies
        super()._copy(copies)
        for source, to in of_states:
            self.states[to] = self.states[source]
            self.seen["restored state"] += source < 0

    def check_blocks(self, sequence: Sequence, end: int) -> None:
        """A chunk that was cut at a checkpoint keeps its blocks for the next chunk."""
        assert len(sequence.table) >= self.cache.tables.blocks_for(end)

    def _write(self, chunks: Chunks) -> None:
        lanes = self.scheduler.running.lanes
        written = lanes.states.target[chunks.lanes].tolist()
        assert len(set(written)) == len(written), "no slot is written twice"
        for chunk in chunks:
            sequence, lane = chunk.sequence, chunk.sequence.lane
            source, others = lanes.states.source[lane], set(written) - {lanes.states.target[lane]}
            assert source not in others, "no slot is written that another sequence reads"
            before = self.holds[sequence][chunk.start - 1] if chunk.start else None
            found = None if source == NO_SLOT else self.states[source]
            assert found == before, "the state is the state after the previous tokens"
            self.seen["restored"] += source not in (lanes.states.slot[lane], NO_SLOT)
        super()._write(chunks)
        for chunk in chunks:
            lane = chunk.sequence.lane
            self.states[lanes.states.target[lane]] = self.holds[chunk.sequence][chunk.end - 1]
            self.seen["checkpoint"] += int(lanes.states.target[lane] != lanes.states.slot[lane])

    def _check_progress(self, before: list[Sequence], chunks: Chunks) -> None:
        """A waiting sequence may wait for a slot. A running sequence always has a slot."""
        assert bool(chunks) == bool(self.open)
        assert {sequence for sequence in before[:1] if sequence.table} <= {chunk.sequence for chunk in chunks}

    def checkpoints(self) -> list[int]:
        """Return the lengths of the prefixes with checkpoints, in tokens, ascending."""
        self.check()
        found = []
        for entry in self.slots._ready:
            found.append(0)
            while entry is not None:
                found[-1] += self.cache.block_size
                entry = entry.parent
        return sorted(found)


def run(driver: HybridDriver, prompt: Prompt, lengths: list[int]) -> Sequence:
    sequence = driver.add(prompt, lengths)
    driver.drain()
    return sequence


PROMPT = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]


def test_checkpoints_lie_at_the_interval_and_at_the_prompts_last_boundary() -> None:
    driver = HybridDriver()
    run(driver, PROMPT, [3])
    assert driver.checkpoints() == [4, 8, 10]


def test_a_repeated_prompt_resumes_at_its_last_boundary() -> None:
    driver = HybridDriver()
    assert run(driver, PROMPT, [1]).num_cached_tokens == 0
    assert run(driver, PROMPT, [1]).num_cached_tokens == 10
    assert driver.slots.stats.restored == 1 and driver.scheduler.stats.shortened_hits == 0


def test_a_prefix_hit_ends_at_the_deepest_checkpoint() -> None:
    driver = HybridDriver(intervals=Intervals(8, 0))
    run(driver, PROMPT, [1])
    assert driver.checkpoints() == [8, 10]
    other = [*PROMPT[:6], 1, 1]
    assert run(driver, other, [1]).num_cached_tokens == 0, "6 tokens are cached, but without a state"
    assert driver.scheduler.stats.shortened_hits == 6
    assert run(driver, [*PROMPT[:9], 0, 1, 1], [1]).num_cached_tokens == 8


def test_a_prefix_hit_ends_where_state_and_window_are_available() -> None:
    driver = HybridDriver({None: 64, 6: 64})
    entries, window = run(driver, PROMPT, [1]).chain.entries, driver.cache.tables.pools[1]
    assert driver.checkpoints() == [4, 8, 10]
    taken: list[int] = []
    while entries[1].blocks[1] is not None:
        taken += window.take(1)
    window.release(taken)
    assert [entry.blocks[1] is None for entry in entries] == [True, True, False, False, False]
    assert run(driver, PROMPT, [1]).num_cached_tokens == 10, "the next token reaches only tokens 5 to 9"
    driver.slots.forget([entries[4]])
    assert run(driver, PROMPT, [1]).num_cached_tokens == 0, "no state where the window is complete, and vice versa"
    assert run(driver, PROMPT, [1]).num_cached_tokens == 10, "tokens computed again can be hit again"


def test_the_second_prompt_takes_a_checkpoint_where_prompts_branch() -> None:
    driver = HybridDriver(intervals=Intervals(0, 0))
    cached = [run(driver, [*PROMPT[:8], *[own] * 5], [1]).num_cached_tokens for own in (2, 3, 4)]
    assert cached == [0, 0, 8]
    assert driver.scheduler.running.states is not None and not driver.scheduler.running.states.branches._takers


def test_prompts_share_a_prefix_in_a_cache_that_holds_one_prompt() -> None:
    """The second prompt recomputes the cached prefix. The prefix stays reachable while the prompt takes all other
    blocks.
    """
    driver, common = HybridDriver(num_blocks=16, intervals=Intervals(0, 0)), [*PROMPT, 1, 0, 1, 0, 0]
    cached = [run(driver, [*common, *[own] * 3], [10]).num_cached_tokens for own in (2, 3, 4, 5)]
    assert cached == [0, 0, 16, 16]
    assert sum(pool.evictions for pool in driver.cache.tables.pools) > 0, "premise"


def test_concurrent_prompts_compute_their_shared_prefix_twice() -> None:
    """The prompts compute the prefix once to find that it is shared, and a second time to write the checkpoint."""
    driver = HybridDriver(intervals=Intervals(0, 0), max_num_seqs=8, budget=200, num_slots=20)
    group = [driver.add([*PROMPT * 2, *[own] * 5], [1]) for own in (2, 3, 4, 5, 6)]
    driver.drain()
    assert [sequence.num_cached_tokens for sequence in group] == [0, 0, 22, 22, 22]


def test_waiting_for_a_branch_ends_if_its_taker_is_gone() -> None:
    driver = HybridDriver(intervals=Intervals(0, 0), budget=4)
    common = PROMPT[:8]
    run(driver, [*common, 0, 0, 0], [1])
    first, second = (driver.add([*common, *tail], [1]) for tail in ([1, 1, 1], [1, 0, 1]))
    driver.step()
    assert first.branch == 8 and not second.table
    driver.abort(driver.open[0])
    driver.step()
    assert second.table and second.branch == 8
    driver.drain()


def test_decodes_take_checkpoints_if_configured() -> None:
    driver = HybridDriver(intervals=Intervals(0, 4))
    sequence = run(driver, PROMPT, [8])
    assert driver.checkpoints() == [10, 12, 16]
    again = driver.add([*sequence.tokens], [1])
    driver.drain()
    assert again.num_cached_tokens == 16, "the next turn resumes from the decoded tokens"


def test_without_a_budget_nothing_is_reused_and_all_is_computed() -> None:
    driver = HybridDriver(num_slots=5, checkpoints=0)
    run(driver, PROMPT, [2, 2])
    assert run(driver, PROMPT, [2]).num_cached_tokens == 0
    assert driver.seen["checkpoint"] == 0 and driver.slots.stats.skipped == 0


def test_a_new_checkpoint_replaces_the_oldest() -> None:
    driver = HybridDriver(checkpoints=2)
    run(driver, PROMPT, [1])
    assert driver.checkpoints() == [8, 10]
    assert driver.slots.stats.evicted == 1 and driver.slots.stats.skipped == 0


def test_the_least_recently_used_checkpoint_is_evicted() -> None:
    driver = HybridDriver(checkpoints=2, intervals=Intervals(0, 0))
    first, second, third = [2] * 5, [3] * 7, [4] * 9
    for prompt in (first, second, first):
        run(driver, prompt, [1])
    assert driver.checkpoints() == [4, 6] and driver.slots.stats.restored == 1
    run(driver, third, [1])
    assert driver.checkpoints() == [4, 8], "the first checkpoint is older, but was restored since"


def test_a_prompt_of_whole_blocks_resumes_before_its_last_block() -> None:
    """The last token of a prompt is always computed, because sampling needs its logits."""
    driver = HybridDriver(intervals=Intervals(0, 0))
    cached = [run(driver, PROMPT[:10], [1]).num_cached_tokens for _ in range(2)]
    assert driver.checkpoints() == [8] and cached == [0, 8] and driver.scheduler.stats.shortened_hits == 0


def test_a_checkpoint_without_a_slot_is_skipped() -> None:
    driver = HybridDriver(checkpoints=1)
    sequence = run(driver, PROMPT, [1])
    assert driver.checkpoints() == [4], "the next step resumes from it, so that it cannot be evicted"
    assert driver.slots.stats.skipped == 1 and sequence.num_cached_tokens == 0


def test_two_requests_restore_one_checkpoint_in_one_step() -> None:
    driver = HybridDriver()
    run(driver, PROMPT, [1])
    both = [driver.add([*PROMPT[:10], *tail], [4]) for tail in ([0, 0], [1, 1])]
    chunks = driver.step()
    assert (
        len({*driver.scheduler.running.lanes.states.slot[chunks.lanes].tolist()}) == 2
        and driver.slots.stats.restored == 2
    )
    driver.drain()
    assert [sequence.num_cached_tokens for sequence in both] == [10, 10]


def test_a_sequence_without_a_slot_restores_no_checkpoint() -> None:
    driver = HybridDriver(num_slots=3, checkpoints=1, intervals=Intervals(0, 0))
    run(driver, PROMPT, [1])
    group = [driver.add([*PROMPT[:10], *tail], [4]) for tail in ([0, 0], [1, 1], [1, 0])]
    driver.step()
    assert len(driver.scheduler.running.sequences) == 2 and group[2].lane < 0, (
        "premise: the third request waits for a slot"
    )
    assert driver.slots.stats.restored == 2
    driver.drain()
    assert driver.slots.stats.restored == sum(sequence.num_cached_tokens == 10 for sequence in group)


def test_a_checkpoint_being_read_outlives_its_entry() -> None:
    driver = HybridDriver(budget=4)
    run(driver, PROMPT, [1])
    sequence = driver.add([*PROMPT[:10], 1, 0, 1, 0], [1])
    driver.scheduler.schedule()
    assert driver.scheduler.running.lanes.states.source[sequence.lane] != NO_SLOT
    driver.cache.invalidate()
    assert driver.slots.stats.ready == 0
    driver.scheduler.check_integrity()


def test_a_group_forks_from_a_restored_prompt() -> None:
    driver = HybridDriver()
    run(driver, PROMPT, [1])
    group = driver.add(PROMPT, [4, 5, 6])
    driver.step()
    assert group.num_cached_tokens == 10
    lanes = [sequence.lane for sequence in driver.scheduler.running.sequences]
    sources = {*driver.scheduler.running.lanes.states.source[lanes].tolist()}
    assert len(driver.scheduler.running.sequences) == 3 and len(sources) == 1, "all resume from one state"
    assert not sources & {*driver.scheduler.running.lanes.states.slot[lanes].tolist()}
    driver.drain()


def test_samples_without_a_slot_wait() -> None:
    driver = HybridDriver(num_slots=4, checkpoints=1)
    driver.add(PROMPT, [4, 4, 4, 4])
    driver.step_until(lambda: len(driver.scheduler.running.sequences) > 1)
    assert driver.seen["fork that waits"] > 0
    driver.drain()


def test_a_prompt_shorter_than_a_block_has_no_checkpoint() -> None:
    driver = HybridDriver(block_size=16, intervals=Intervals(16, 0))
    run(driver, PROMPT, [2])
    assert driver.checkpoints() == []


def test_a_commit_between_reserve_and_ready_leaves_no_checkpoint() -> None:
    driver = HybridDriver()
    sequence = driver.add(PROMPT, [1])
    chunks = driver.scheduler.schedule()
    lanes = driver.scheduler.running.lanes
    assert lanes.states.target[sequence.lane] != lanes.states.slot[sequence.lane] and driver.slots.stats.reserved == 1
    driver.scheduler.advance(chunks)
    driver.cache.invalidate()
    driver.scheduler.publish(chunks)
    assert driver.slots.stats.reserved == 0 and driver.slots.stats.ready == 0
    driver.scheduler.recompute_running()
    driver.scheduler.check_integrity()


def ready(slots: StateSlots) -> Entry:
    """Store a checkpoint, and return its entry."""
    entry, slot = Entry(b"", None, b"", b"", []), slots.reserve()
    assert slot is not None
    slots.make_ready(entry, slot)
    return entry


def test_a_checkpoint_on_the_host_keeps_its_slot_until_it_is_read() -> None:
    slots = StateSlots(1, 1, host_slots=1)
    first = ready(slots)
    assert slots.take() == 0 and slots.copies == [(0, -1)] and slots.is_on_host(first)
    assert slots.take_from_host(first) is None and slots.copies == [(0, -1)], "no slot is free"
    slots.release(0)
    second = ready(slots)
    assert slots.take_from_host(first) == 0 and slots.copies == [(0, -1), (-1, 0)]
    assert slots.is_on_host(first) and not slots.is_ready(second), "no slot of the host was free for the second one"
    slots.check_integrity([0])


def test_a_checkpoint_taken_again_leaves_the_host() -> None:
    slots = StateSlots(1, 1, host_slots=1)
    entry = ready(slots)
    slots.release(slots.take() or 0)
    assert slots.is_on_host(entry), "premise"
    taken = slots.reserve()
    assert taken is not None
    slots.make_ready(entry, taken)
    slots.check_integrity([])
    assert slots.is_ready(entry) and not slots.is_on_host(entry) and slots.host.pools[0].num_cached == 0
    slots.release(slots.take() or 0)
    slots.forget([entry])
    slots.check_integrity([])
    assert not slots.is_ready(entry) and slots.host.pools[0].num_cached == 0


class HybridMachine(SchedulerMachine):
    """Requests in any order, with far too few blocks and slots."""

    host_states = 0
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.driver = HybridDriver(
            num_blocks=self.num_blocks,
            max_num_seqs=5,
            budget=7,
            num_slots=8,
            checkpoints=2,
            intervals=Intervals(4, 2),
            host_blocks=self.host_blocks,
            host_states=self.host_states,
        )

    @rule(prompt=st.lists(st.integers(0, 1), min_size=5, max_size=10))
    def add_again(self, prompt: Prompt) -> None:
        self.driver.add(prompt[:4] * 2, [2])

    def teardown(self) -> None:
        super().teardown()
        assert isinstance(self.driver, HybridDriver)
        stats = self.driver.slots.stats
        self.seen.update({"evicted": stats.evicted, "skipped": stats.skipped})
        self.seen["shortened"] += self.driver.scheduler.stats.shortened_hits


class HybridWindowMachine(HybridMachine):
    """A model with layers without a window, layers with a window, and recurrent states."""

    num_blocks = {None: 8, 6: 6}
    seen: Counter[str] = Counter()


class HybridHostMachine(HybridMachine):
    """A host tier for blocks and states."""

    host_blocks = (8,)
    host_states = 3
    seen: Counter[str] = Counter()


EVENTS = {"preempted", "hit", "restored", "checkpoint", "evicted", "skipped", "shortened", "fork that waits"}


@pytest.mark.parametrize(
    ("machine", "events"),
    [
        (HybridMachine, EVENTS),
        (HybridWindowMachine, EVENTS | {"gave back"}),
        (HybridHostMachine, EVENTS | {"stored", "restored block", "restored state"}),
    ],
)
def test_requests_in_any_order_all_finish_and_read_their_own_states(
    machine: type[HybridMachine], events: set[str]
) -> None:
    machine.seen.clear()
    run_until_seen(machine, PROFILE, lambda: events - (+machine.seen).keys())
