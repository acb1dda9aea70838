"""Placement of groups: on workers that have the prefix if load allows, and never on ineligible workers."""

from __future__ import annotations

import heapq
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from trueroll.engine.request import ContentSpan
from trueroll.rollout.fleet.loads import Rows
from trueroll.rollout.fleet.placement import PIECE, SLACK, Placed, Placement, beginnings


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def prompt(prefix: int, own: int, length: int = 4 * PIECE) -> list[int]:
    """Return the beginnings of a prompt with one of several prefixes and a unique end."""
    return beginnings(np.concatenate((tokens(length, prefix), tokens(PIECE // 2, 1000 + own))))


def fleet(workers: int | Iterable[str], **settings: Any) -> Placement:
    placement = Placement(**settings)
    for name in range(workers) if isinstance(workers, int) else workers:
        placement.add(str(name))
    return placement


def place(placement: Placement, beginnings: list[int], **settings: Any) -> Placed:
    placed = placement.place(beginnings, 0.0, **settings)
    assert placed is not None
    return placed


def homes(placement: Placement, count: int) -> list[str]:
    """Return the workers on which unknown prompts are placed, one prompt at a time with nothing else in flight."""
    found = []
    for prefix in range(count):
        placed = place(placement, prompt(prefix, 0))
        placement.withdraw(placed)
        placement.forget()
        found.append(placed.worker)
    return found


def test_beginnings_are_those_of_whole_pieces() -> None:
    base = tokens(5 * PIECE, 0)
    other = base.copy()
    other[2 * PIECE] += 1
    assert len(beginnings(base)) == 5 == len({*beginnings(base)})
    assert beginnings(base[: 3 * PIECE + 7]) == beginnings(base)[:3]
    same = [one == two for one, two in zip(beginnings(base), beginnings(other), strict=True)]
    assert same == [True, True, False, False, False]
    assert not {*beginnings(base)} & {*beginnings(base, "salt")}
    assert len(beginnings(base[:3])) == 1 and beginnings(base[:3]) != beginnings(base[:4])


def test_beginnings_are_the_same_up_to_other_content() -> None:
    base, short = tokens(5 * PIECE, 0), tokens(3, 0)
    one, other = ((ContentSpan(2 * PIECE - 1, 2 * PIECE + 1, bytes([number] * 32)),) for number in (1, 2))
    for spans in (other, ()):
        pairs = zip(beginnings(base, spans=one), beginnings(base, spans=spans), strict=True)
        assert [first == second for first, second in pairs] == [True, False, False, False, False]
    assert beginnings(base, spans=one) == beginnings(base.copy(), spans=one)
    assert beginnings(short, spans=(ContentSpan(0, 1, bytes(32)),)) != beginnings(short)


def test_long_prompts_have_few_beginnings() -> None:
    assert [len(beginnings(np.zeros(PIECE * count, np.int32))) for count in (16, 17, 18, 48)] == [16, 16, 17, 32]
    assert len(beginnings(np.zeros(1_000_000, np.int32))) < 160


def test_a_prefix_stays_on_one_worker_while_load_allows() -> None:
    placement = fleet(20, free_load=8)
    for prefix in range(30):
        placed = [place(placement, prompt(prefix, own)) for own in range(8)]
        assert len({each.worker for each in placed}) == 1
        for each in placed:
            placement.finish(each, 1.0)
    assert len({*homes(placement, 30)}) > 10, "different prefixes go to different workers"


def test_a_popular_prefix_spreads_as_its_load_grows() -> None:
    placement = fleet(50, free_load=8)
    placed = [place(placement, prompt(0, own)) for own in range(8)]
    assert len({each.worker for each in placed}) == 1, "no more than one worker may have"
    placed += [place(placement, prompt(0, own)) for own in range(8, 64)]
    assert 8 <= len({each.worker for each in placed}) <= 12
    placed += [place(placement, prompt(0, own)) for own in range(64, 1000)]
    loads = Counter(each.worker for each in placed)
    assert len(loads) == 50 and max(loads.values()) <= math.ceil((1 + SLACK) * 1000 / 50)


def test_a_spread_prefix_is_shared_among_its_holders() -> None:
    placement = fleet(50, free_load=2)
    placed = [place(placement, prompt(0, own)) for own in range(8)]
    spread = {each.worker for each in placed}
    assert len(spread) == 4
    for each in placed:
        placement.withdraw(each)
    again = [place(placement, prompt(0, own)).worker for own in range(4)]
    assert {*again} == spread, "each once, since the others have less load"


def test_later_turns_go_where_their_conversation_is() -> None:
    placement = fleet(20, free_load=4)
    system = tokens(4 * PIECE, 0)
    talks = [np.concatenate((system, tokens(2 * PIECE, 1 + talk))) for talk in range(40)]
    placed = [place(placement, beginnings(talk)) for talk in talks]
    first = [each.worker for each in placed]
    assert len({*first}) > 5, "one system prompt, many workers"
    for each in placed:
        placement.withdraw(each)
    for turn in (1, 2):
        talks = [np.concatenate((talk, tokens(PIECE, 100 * turn + i))) for i, talk in enumerate(talks)]
        for home, talk in zip(first[::-1], talks[::-1], strict=True):
            again = place(placement, beginnings(talk))
            placement.withdraw(again)
            assert again.worker == home


def test_an_unknown_prefix_goes_to_one_of_two_workers() -> None:
    placement, places = fleet(20, free_load=100), []
    for own in range(10):
        places.append(place(placement, prompt(0, own)).worker)
        placement.forget()
    assert [*Counter(places).values()] == [5, 5], "each time to the less loaded one"


def test_a_joining_worker_gets_prompts_with_a_prefix_that_most_workers_hold() -> None:
    placement = fleet(10, free_load=100)
    system = tokens(PIECE, 0)
    for own in range(9):
        place(placement, beginnings(system), avoid={str(worker) for worker in range(10)} - {str(own)})
    placement.add("another")
    places = []
    for own in range(60):
        places.append(place(placement, beginnings(np.concatenate((system, tokens(PIECE, 1 + own))))))
        placement.withdraw(places[-1])
    assert Counter(each.worker for each in places)["another"] > 1


def test_no_worker_exceeds_the_bound() -> None:
    placement, chance = fleet(16), random.Random(0)
    under_way: list[Placed] = []
    fullest = 0
    for own in range(3000):
        placed = place(placement, prompt(int(chance.paretovariate(0.8)) % 500, own))
        under_way.append(placed)
        bound = math.ceil((1 + SLACK) * len(under_way) / 16)
        assert placement.load(placed.worker) <= bound
        fullest += placement.load(placed.worker) == bound
        while len(under_way) > 160:
            placement.withdraw(under_way.pop(chance.randrange(len(under_way))))
    assert fullest > 50, "some workers reached the bound"


def test_the_bound_holds_for_groups_of_any_cost() -> None:
    placement, chance, total = fleet(8, free_load=0.0), random.Random(0), 0.0
    for own in range(400):
        cost = chance.uniform(0.1, 30)
        total += cost
        placed = place(placement, prompt(own % 3, own), cost=cost)
        assert placement.load(placed.worker) <= (1 + SLACK) * total / 8 + cost


def test_a_worker_that_joins_or_leaves_moves_only_its_own_prompts() -> None:
    names = [f"worker {i}" for i in range(20)]
    before = homes(fleet(names), 300)
    assert max(Counter(before).values()) < 45 and len({*before}) == 20, "spread evenly"
    placement = fleet(names)
    placement.remove(names[7])
    without = homes(placement, 300)
    assert [new for old, new in zip(before, without, strict=True) if old != names[7] and old != new] == []
    assert len({new for old, new in zip(before, without, strict=True) if old == names[7]}) > 3
    placement.add("another")
    joined = homes(placement, 300)
    moved = [new for old, new in zip(without, joined, strict=True) if old != new]
    assert 0 < len(moved) < 45 and {*moved} == {"another"}


def test_clients_that_know_nothing_of_each_other_agree() -> None:
    names = [f"tcp://10.0.0.{i}:5000" for i in range(20)]
    assert homes(fleet(names), 100) == homes(fleet(reversed(names)), 100)


def test_loads_follow_measured_speeds() -> None:
    """Workers finish one group at a time. Two of the workers are four times as fast as the others. A worker has ten
    groups in flight on average.
    """
    seconds = {str(i): 0.25 if i < 2 else 1.0 for i in range(8)}
    placement = fleet(seconds)
    free_at = dict.fromkeys(seconds, 0.0)
    ends: list[tuple[float, int, Placed]] = []
    finished: Counter[str] = Counter()
    now, chance = 0.0, random.Random(0)
    for own in range(4000):
        placed = placement.place(prompt(chance.randrange(2000), own), now)
        assert placed is not None
        free_at[placed.worker] = max(now, free_at[placed.worker]) + seconds[placed.worker]
        heapq.heappush(ends, (free_at[placed.worker], own, placed))
        if len(ends) == 80:
            now, _, done = heapq.heappop(ends)
            placement.finish(done, now)
            finished[done.worker] += own > 2000
    fast, slow = [[name for name in seconds if (seconds[name] < 1) == which] for which in (True, False)]
    assert 2.5 < placement.speed(fast[0]) / placement.speed(slow[0]) < 5
    assert sum(map(placement.load, fast)) / 2 > 1.6 * sum(map(placement.load, slow)) / 6
    assert min(finished[name] for name in fast) > 3 * max(finished[name] for name in slow)


def test_a_returning_worker_counts_as_new() -> None:
    placement = fleet(4, free_load=4)
    old = place(placement, prompt(0, 0))
    placement.finish(place(placement, prompt(0, 1)), 9.0)
    placement.remove(old.worker)
    elsewhere = place(placement, prompt(0, 2))
    assert elsewhere.worker != old.worker
    placement.add(old.worker)
    assert (placement.load(old.worker), placement.speed(old.worker)) == (0.0, 1.0)
    placement.finish(old, 10.0)
    assert (placement.load(old.worker), placement.speed(old.worker)) == (0.0, 1.0)
    assert place(placement, prompt(0, 3)).worker == elsewhere.worker, "its cache was lost"


def test_removed_and_avoided_workers_are_not_chosen() -> None:
    placement = fleet(6, free_load=100)
    home = place(placement, prompt(0, 0)).worker
    second = place(placement, prompt(0, 1), avoid=[home]).worker
    assert second != home
    placement.remove(second)
    assert {place(placement, prompt(0, own)).worker for own in range(20)} == {home}
    placement.remove(home)
    rest = {*"012345"} - {home, second}
    assert {place(placement, prompt(own, 0)).worker for own in range(20)} == rest
    assert placement.place(prompt(0, 3), 0.0, avoid=rest) is None
    for worker in rest:
        placement.remove(worker)
    assert placement.place(prompt(0, 3), 0.0) is None
    placement.add(home)
    assert place(placement, prompt(0, 4)).worker == home


def test_a_full_worker_is_chosen_if_there_is_no_other() -> None:
    placement = fleet(40, free_load=1)
    names = {place(placement, prompt(own, 0)).worker for own in range(400)}
    assert len(names) == 40
    for own in range(20):
        assert place(placement, prompt(0, own), avoid=names - {"3"}).worker == "3"
    assert placement.load("3") > (1 + SLACK) * 420 / 40


def test_a_name_cannot_be_added_twice() -> None:
    with pytest.raises(ValueError, match="worker '1' is already in the fleet"):
        fleet(3).add("1")


def test_the_index_keeps_the_most_recently_used_beginnings() -> None:
    placement = fleet(10, capacity=200, free_load=1e9)
    home = place(placement, prompt(0, 0)).worker
    for own in range(1, 500):
        place(placement, prompt(own, 0))
        assert placement.num_remembered <= 200
        if own % 20 == 0:
            assert place(placement, prompt(0, own)).worker == home
    remembered = placement._index.beginnings
    assert {*prompt(0, 0)} <= remembered and not {*prompt(1, 0)} & remembered
    place(placement, beginnings(tokens(40 * 16 * PIECE, 9)))
    assert placement.num_remembered <= 200


def test_forgotten_beginnings_have_no_effect() -> None:
    placement = fleet(10, free_load=1e9)
    [home] = homes(placement, 1)
    placed = place(placement, prompt(0, 1), avoid=[home])
    placement.withdraw(placed)
    assert place(placement, prompt(0, 2)).worker == placed.worker != home
    placement.withdraw(placed)
    placement.forget()
    assert placement.num_remembered == 0
    assert place(placement, prompt(0, 3)).worker == home, "by its rank"


def test_half_the_capacity_of_recent_beginnings_is_always_kept() -> None:
    """Repeated prompts add no new beginnings, so they do not displace recent beginnings."""
    placement, chance, used = fleet(3, capacity=12), random.Random(0), dict[int, None]()
    for _ in range(300):
        asked = prompt(chance.randrange(4), 0, chance.randrange(1, 7) * PIECE)
        placement.withdraw(place(placement, asked))
        for each in asked:
            used.pop(each, None)
            used[each] = None
        assert {*list(used)[-6:]} <= placement._index.beginnings
    assert len(used) == 24 and placement.num_remembered <= 12


CAPACITY = 12
"""Less than the number of beginnings in a walk."""


class Walk:
    """Random calls, with checks after each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.placement = fleet(6, capacity=CAPACITY, free_load=3)
        self.there = {*map(str, range(6))}
        self.lost: set[str] = set()
        self.under_way: list[Placed] = []
        self.calls: Counter[str] = Counter()
        self.now = 0.0

    def step(self) -> None:
        call = self.chance.choices([self.place, self.end, self.remove, self.add], [20, 18, 2, 1])[0]
        call()
        self.now += self.chance.random()
        self.check()

    def place(self) -> None:
        avoid = {str(i) for i in range(6) if self.chance.random() < 0.1}
        prefix, length = self.chance.choice([(0, 2), (0, 4), (0, 6), (1, 4), (2, 4), (3, 1)])
        own = self.chance.randrange(10**6)
        placed = self.placement.place(prompt(prefix, own, length * PIECE), self.now, self.chance.random() + 0.5, avoid)
        if placed is None:
            assert self.there <= avoid
            self.calls["none"] += 1
            return
        assert placed.worker in self.there - avoid
        self.under_way.append(placed)
        self.calls["placed"] += 1

    def end(self) -> None:
        if self.under_way:
            placed = self.under_way.pop(self.chance.randrange(len(self.under_way)))
            if self.chance.random() < 0.8:
                self.placement.finish(placed, self.now)
            else:
                self.placement.withdraw(placed)

    def _move(self, source: set[str], to: set[str], call: str) -> None:
        if source:
            name = self.chance.choice(sorted(source))
            source.remove(name)
            to.add(name)
            getattr(self.placement, call)(name)
            self.calls[call] += 1
            if call == "remove":
                gone = [placed for placed in self.under_way if placed.worker == name]
                self.under_way = [placed for placed in self.under_way if placed.worker != name]
                for placed in gone:
                    self.chance.choice([self.placement.withdraw, lambda each: self.placement.finish(each, self.now)])(
                        placed
                    )

    def remove(self) -> None:
        self._move(self.there, self.lost, "remove")

    def add(self) -> None:
        self._move(self.lost, self.there, "add")

    def check(self) -> None:
        placement = self.placement
        there = placement._loads.workers
        assert {*there} == self.there
        for name in there:
            cost = sum(placed.cost for placed in self.under_way if placed.worker == name)
            assert placement.load(name) == pytest.approx(cost)
            assert 0.05 <= placement.speed(name) <= 20
        assert placement._loads._done == pytest.approx(sum(worker.done for worker in there.values()))
        assert placement._loads._busy == pytest.approx(sum(worker.busy for worker in there.values()))
        assert placement.num_remembered <= CAPACITY
        self.calls["full"] += placement.num_remembered > CAPACITY // 2
        for holders in placement._index._newer.values():
            assert 0 < len(holders) == len({*holders}) and {*holders} <= {*there.values()}
        for prefix in range(4):
            got = [{*placement._index._newer.get(each, ())} for each in prompt(prefix, 0, 6 * PIECE)]
            assert all(longer <= shorter for shorter, longer in zip(got, got[1:], strict=False))


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_keep_the_promises(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(1000):
        walk.step()
    assert min(walk.calls[call] for call in ("placed", "none", "remove", "add", "full")) > 0


def test_running_sums_match_the_workers() -> None:
    placement, chance, under_way = fleet(10), random.Random(0), []
    for own in range(2000):
        under_way.append(place(placement, prompt(own % 50, own), cost=chance.random()))
        if len(under_way) > 30:
            placement.finish(under_way.pop(chance.randrange(30)), own / 10)
    kept = placement._loads.rows
    made_anew = Rows(placement._loads.workers.values())
    assert kept.load == pytest.approx(made_anew.load) and kept.speed == pytest.approx(made_anew.speed)
    assert kept.pressure.tolist() == made_anew.pressure.tolist() and len({*kept.pressure.tolist()}) > 5


SAME_ANYWHERE = """
import random
import numpy as np
from trueroll.rollout.fleet.loads import Rows
from trueroll.rollout.fleet.placement import Placement, beginnings
placement, chance, under_way = Placement(capacity=50), random.Random(0), []
for i in range(20):
    placement.add(f"worker {i}")
for i in range(300):
    prompt = np.array([chance.randrange(8)] * 64 + [i] * 64, np.int32)
    under_way.append(placement.place(beginnings(prompt), i / 7))
    print(under_way[-1].worker)
    if chance.random() < 0.8:
        placement.finish(under_way.pop(chance.randrange(len(under_way))), i / 7)
"""


def test_the_same_calls_give_the_same_placements_in_any_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", SAME_ANYWHERE],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len({*runs[0].splitlines()}) > 10
