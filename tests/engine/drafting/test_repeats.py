"""The drafter of repeats: what it finds, its budget, and the samples that it never looks at."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence as Sized
from typing import NamedTuple

import pytest

from trueroll.engine.cache.prefix_cache import Chain
from trueroll.engine.drafting import repeats
from trueroll.engine.drafting.repeats import RepeatsDrafter
from trueroll.engine.request import HASH_BYTES, ContentSpan
from trueroll.engine.scheduling.sequence import Generation, Sequence


def sequence(prompt: list[int], sample: list[int], salt: bytes = b"", spans: tuple[ContentSpan, ...] = ()) -> Sequence:
    return Sequence((0, 0), array("i", prompt + sample), len(prompt), Chain(0, salt, spans), Generation([]))


class Guess(NamedTuple):
    """Guessed tokens and their chances."""

    tokens: Sized[int]
    chances: Sized[float]


def guess(drafter: RepeatsDrafter, running: Sequence, seed: int, most: int) -> Guess:
    chances = drafter.expect(running, seed, most)
    [tokens] = drafter.draft({running: len(chances)})
    assert len(tokens) == len(chances)
    return Guess(tokens, chances)


def test_tokens_after_the_longest_match_are_drafted() -> None:
    drafter = RepeatsDrafter()
    running = sequence([1, 2, 3, 40, 9, 2, 3, 50, 8, 1, 2, 3], [7, 1, 2, 3])
    draft = guess(drafter, running, seed=0, most=4)
    assert list(draft.tokens) == [7, 1, 2, 3], "the match of [1, 2, 3] at the end of the prompt is the latest"
    assert draft.chances[0] == 0.5 and len(draft.chances) == 4


def test_a_text_that_repeats_itself_goes_on_behind_its_end() -> None:
    assert list(guess(RepeatsDrafter(), sequence([1], [5, 6, 5, 6]), 0, 7).tokens) == [5, 6, 5, 6, 5, 6, 5]


def test_nothing_is_drafted_without_a_match() -> None:
    assert list(guess(RepeatsDrafter(), sequence([1, 2, 3], [4, 5]), 0, 4).tokens) == []
    assert list(guess(RepeatsDrafter(), sequence([1], []), 0, 4).tokens) == []


def test_siblings_and_earlier_samples_of_the_prompt_are_found() -> None:
    drafter, prompt = RepeatsDrafter(), [1, 2, 3]
    sibling = sequence(prompt, [10, 11, 12, 13, 14])
    assert not guess(drafter, sibling, 1, 4).tokens
    assert list(guess(drafter, sequence(prompt, [20, 10, 11]), 2, 2).tokens) == [12, 13]
    drafter.end(sibling, 1)
    assert list(guess(drafter, sequence(prompt, [30, 11, 12]), 3, 4).tokens) == [13, 14]


def test_a_sample_of_the_same_seed_is_looked_at_first() -> None:
    drafter, prompt = RepeatsDrafter(), [1, 2, 3]
    drafter.end(sequence(prompt, [10, 11, 12, 13, 14, 15, 16, 17]), 7)
    drafter.end(sequence(prompt, [10, 11, 12, 13, 99, 98, 97, 96]), 8)
    again = sequence(prompt, [10, 11, 12, 13])
    assert list(guess(drafter, again, 7, 3).tokens) == [14, 15, 16]
    assert list(guess(drafter, sequence(prompt, [10, 11, 12, 13]), 9, 2).tokens) == [99, 98], "the latest"


def test_chances_follow_the_predictions() -> None:
    drafter = RepeatsDrafter()
    right, wrong = sequence([1], [5, 6] * 8), sequence([2], [5, 6] * 8)
    first = guess(drafter, right, 0, 2).chances[0]
    for _ in range(20):
        right.tokens.extend([5, 6])
        better = guess(drafter, right, 0, 2).chances[0]
    for i in range(20):
        wrong.tokens.extend([5, 6, 5, 6, 100 + i, 5, 6, 5, 6])
        guess(drafter, wrong, 1, 2)
        wrong.tokens.extend([200 + i])
        worse = guess(drafter, wrong, 1, 2)
    assert better > 0.9 > first and not worse.tokens
    wrong.tokens.extend([5, 6, 5, 6])
    assert guess(drafter, wrong, 1, 2).chances[0] < first


def test_prompts_of_another_salt_or_content_are_never_looked_at() -> None:
    prompt, sample = [1, 2, 3], [10, 11, 12, 13, 14]
    image = (ContentSpan(0, 1, bytes(HASH_BYTES)),)
    asking = {
        "the same": (sequence(prompt, sample[:2]), True),
        "another salt": (sequence(prompt, sample[:2], b"user:b"), False),
        "another prompt": (sequence([1, 2, 4], sample[:2]), False),
        "content": (sequence(prompt, sample[:2], b"user:a", image), False),
    }
    asking["the same"] = (sequence(prompt, sample[:2], b"user:a"), True)
    drafter = RepeatsDrafter()
    drafter.end(sequence(prompt, sample, b"user:a"), 7)
    for name, (asked, finds) in asking.items():
        assert bool(guess(drafter, asked, 7, 2).tokens) == finds, name


def test_the_indexes_stay_in_their_budget() -> None:
    drafter = RepeatsDrafter(budget=400_000)
    for i in range(300):
        drafter.end(sequence([i, 2, 3], [*range(20)]), i)
        assert drafter.num_bytes <= 400_000
    assert drafter.num_bytes == sum(index.num_bytes for index in drafter._indexes.values())
    assert 10 < len(drafter._indexes) < 300
    assert guess(drafter, sequence([299, 2, 3], [0, 1, 2]), 1, 2).tokens, "the last prompt is there"
    assert not guess(drafter, sequence([0, 2, 3], [0, 1, 2]), 1, 2).tokens, "the first prompt is not"


def test_a_prompt_larger_than_the_budget_is_dropped_and_the_next_one_served() -> None:
    drafter = RepeatsDrafter(budget=100_000)
    hostile = sequence([5] * 100_000, [5, 5])
    assert not guess(drafter, hostile, 1, 3).tokens and drafter.num_bytes == 0
    drafter.end(hostile, 1)
    assert list(guess(drafter, sequence([1, 2, 3], [1, 2]), 1, 1).tokens) == [3]


def test_a_guess_stays_when_its_index_is_dropped_and_made_again() -> None:
    """In one step, the drafter guesses for one sequence, drops the index, and makes the index again for another
    sequence.
    """
    drafter = RepeatsDrafter(budget=38_000)
    first, second = sequence([*range(100)], [1, 2, 1, 2]), sequence([*range(500, 600)], [1, 2, 1, 2])
    assert drafter.expect(first, 0, 2)
    assert drafter.expect(second, 1, 2) and len(drafter._indexes) == 1, "premise: the first index is dropped"
    third = sequence([*range(100)], [3, 4])
    drafter.expect(third, 2, 2)
    assert list(drafter.draft({first: 2})[0]) == [1, 2]
    for each in (first, second, third):
        drafter.end(each, 0)
    assert not drafter._guesses and not drafter._keys


def test_prompts_that_do_not_fit_together_are_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    index = repeats.PromptIndex
    monkeypatch.setattr(repeats, "PromptIndex", lambda prompt, odds: made.append(len(prompt)) or index(prompt, odds))
    drafter = RepeatsDrafter(budget=300_000)
    running = [sequence([*range(i, i + 1500)], [1, 2, 1, 2]) for i in range(4)]
    for _ in range(5):
        for seed, each in enumerate(running):
            guess(drafter, each, seed, 2)
    assert len(made) == 4 and len(drafter._indexes) == 1
    for seed, each in enumerate(running):
        drafter.end(each, seed)
    assert not drafter._keys and drafter.num_bytes <= 300_000


@pytest.mark.parametrize("num_prompts", [1, 500])
def test_the_memory_of_many_short_samples_is_within_the_counted_bytes(num_prompts: int) -> None:
    tracemalloc.start()
    try:
        drafter = RepeatsDrafter()
        before = tracemalloc.get_traced_memory()[0]
        for i in range(3000):
            drafter.end(sequence([i % num_prompts, 2, 3], [*range(i % 7 + 1)]), i)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0 < used <= drafter.num_bytes <= 64 * 2**20
