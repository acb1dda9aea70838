"""The number of drafted tokens follows the costs of rows and the chances of tokens."""

from __future__ import annotations

from trueroll.engine.drafting.rule import Pause, StepCosts, bucket_of, choose


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, each in seconds.items():
        record(costs, rows, each)
    return costs


def record(costs: StepCosts, rows: int, seconds: float) -> None:
    """Record a step that follows the recorded steps after a pause."""
    started = costs._ended + 7.0
    costs.record(rows, started, started + seconds)


def test_buckets() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 100)] == [1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 128]


def test_rows_that_cost_nothing_are_all_taken_and_expensive_ones_are_not() -> None:
    drafts = {0: [0.5, 0.5, 0.5], 3: [0.1]}
    assert choose(drafts, costs_of({2: 1.0, 6: 1.0}), 2, 2) == {0: 3, 3: 1}
    assert choose(drafts, costs_of({2: 1.0, 3: 1.5, 4: 2.0, 6: 3.0}), 2, 2) == {0: 0, 3: 0}


def test_the_likeliest_rows_are_taken_first() -> None:
    costs = costs_of({4: 1.0, 6: 1.1, 8: 2.0})
    assert choose({0: [0.3], 1: [0.9, 0.9], 2: [0.2]}, costs, 4, 4) == {0: 0, 1: 2, 2: 0}


def test_a_stair_is_climbed_if_the_rows_behind_it_pay_for_it() -> None:
    stairs = costs_of({4: 1.0, 6: 1.4, 8: 1.4})
    assert choose({0: [0.9, 0.9, 0.9, 0.9]}, stairs, 4, 4) == {0: 4}
    assert choose({0: [0.9]}, stairs, 4, 4) == {0: 0}


def test_unmeasured_rows_are_tried_and_old_measurements_forgotten() -> None:
    costs = costs_of({2: 1.0})
    assert costs.seconds(1) == 1.0 and 1.0 < costs.seconds(4) < 2.0
    record(costs, 4, 5.0)
    assert costs.seconds(4) == 5.0
    record(costs, 4, 90.0)
    record(costs, 4, 6.0)
    assert costs.seconds(4) == 6.0, "the median"
    for _ in range(600):
        record(costs, 2, 1.0)
    assert costs.seconds(4) < 2.0


def test_a_step_that_was_queued_ahead_starts_when_the_step_before_it_is_done() -> None:
    costs = StepCosts()
    costs.record(2, 10.0, 11.0)
    costs.record(4, 10.5, 13.0)
    assert costs.seconds(2) == 1.0 and costs.seconds(4) == 2.0


def drafts(pause: Pause, gain: float, steps: range) -> list[int]:
    """Return the numbers of the steps that draft. Each draft gains `gain` tokens."""
    found = list[int]()
    for step in steps:
        if pause.allows_drafts(step):
            found.append(step)
            pause.record(gain)
    return found


def test_after_16_steps_without_gain_only_every_16th_step_drafts() -> None:
    assert drafts(Pause(), 0.0, range(5, 100)) == [*range(5, 21), 32, 48, 64, 80, 96]


def test_a_gain_ends_a_pause() -> None:
    pause = Pause()
    drafts(pause, 0.0, range(40))
    assert drafts(pause, 3.0, range(40, 60)) == [*range(48, 60)]


def test_sequences_make_their_trials_in_the_same_steps() -> None:
    early, late = drafts(Pause(), 0.0, range(0, 200)), drafts(Pause(), 0.0, range(70, 200))
    assert [step for step in early if step > 90] == [step for step in late if step > 90] != []


def test_the_cost_of_a_step_is_measured_again_now_and_then() -> None:
    costs = costs_of({4: 1.0})
    assert costs.is_known(4) and costs.is_known(3) is False
    for step in range(40):
        record(costs, 8, 2.0)
        assert costs.is_known(4) == (step < 31) and costs.is_known(8)


def test_accepted_tokens_that_cost_more_than_they_gain_are_in_vain() -> None:
    price = costs_of({8: 1.0, 16: 1.5}).price(8, 8, 8)
    assert price == 0.5
    assert len(drafts(Pause(), 2 - 2 * price, range(100))) == 100 > len(drafts(Pause(), 1 - 2 * price, range(100)))
