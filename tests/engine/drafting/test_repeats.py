"""The drafter of repeats: what it finds, its budget, and whose tokens it never looks at."""

from __future__ import annotations

from array import array

from trueroll.engine.cache.prefix_cache import Chain
from trueroll.engine.drafting.repeats import RepeatsDrafter
from trueroll.engine.request import HASH_BYTES, ContentSpan
from trueroll.engine.scheduling.sequence import Generation, Sequence


def sequence(prompt: list[int], sample: list[int], salt: bytes = b"", spans: tuple[ContentSpan, ...] = ()) -> Sequence:
    return Sequence((0, 0), array("i", prompt + sample), len(prompt), Chain(0, salt, spans), Generation([]))


def test_tokens_after_the_longest_match_are_drafted() -> None:
    drafter = RepeatsDrafter()
    running = sequence([1, 2, 3, 40, 9, 2, 3, 50, 8, 1, 2, 3], [7, 1, 2, 3])
    draft = drafter.draft(running, seed=0, most=4)
    assert list(draft.tokens) == [7, 1, 2, 3], "the match of [1, 2, 3] at the end of the prompt is the latest"
    assert draft.chances[0] == 0.5 and len(draft.chances) == 4


def test_a_text_that_repeats_itself_goes_on_behind_its_end() -> None:
    assert list(RepeatsDrafter().draft(sequence([1], [5, 6, 5, 6]), 0, 7).tokens) == [5, 6, 5, 6, 5, 6, 5]


def test_nothing_is_drafted_without_a_match() -> None:
    assert list(RepeatsDrafter().draft(sequence([1, 2, 3], [4, 5]), 0, 4).tokens) == []
    assert list(RepeatsDrafter().draft(sequence([1], []), 0, 4).tokens) == []


def test_siblings_and_earlier_samples_of_the_prompt_are_found() -> None:
    drafter, prompt = RepeatsDrafter(), [1, 2, 3]
    sibling = sequence(prompt, [10, 11, 12, 13, 14])
    assert not drafter.draft(sibling, 1, 4).tokens
    assert list(drafter.draft(sequence(prompt, [20, 10, 11]), 2, 2).tokens) == [12, 13]
    drafter.end(sibling, 1)
    assert list(drafter.draft(sequence(prompt, [30, 11, 12]), 3, 4).tokens) == [13, 14]


def test_a_sample_of_the_same_seed_is_looked_at_first() -> None:
    drafter, prompt = RepeatsDrafter(), [1, 2, 3]
    drafter.end(sequence(prompt, [10, 11, 12, 13, 14, 15, 16, 17]), 7)
    drafter.end(sequence(prompt, [10, 11, 12, 13, 99, 98, 97, 96]), 8)
    again = sequence(prompt, [10, 11, 12, 13])
    assert list(drafter.draft(again, 7, 3).tokens) == [14, 15, 16]
    assert list(drafter.draft(sequence(prompt, [10, 11, 12, 13]), 9, 2).tokens) == [99, 98], "the latest"


def test_chances_follow_the_predictions() -> None:
    drafter = RepeatsDrafter()
    right, wrong = sequence([1], [5, 6] * 8), sequence([2], [5, 6] * 8)
    first = drafter.draft(right, 0, 2).chances[0]
    for _ in range(20):
        right.tokens.extend([5, 6])
        better = drafter.draft(right, 0, 2).chances[0]
    for i in range(20):
        wrong.tokens.extend([5, 6, 5, 6, 100 + i, 5, 6, 5, 6])
        drafter.draft(wrong, 1, 2)
        wrong.tokens.extend([200 + i])
        worse = drafter.draft(wrong, 1, 2)
    assert better > 0.9 > first and not worse.tokens
    wrong.tokens.extend([5, 6, 5, 6])
    assert drafter.draft(wrong, 1, 2).chances[0] < first


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
        assert bool(drafter.draft(asked, 7, 2).tokens) == finds, name


def test_the_indexes_stay_in_their_budget() -> None:
    drafter = RepeatsDrafter(budget=200_000)
    for i in range(300):
        drafter.end(sequence([i, 2, 3], [*range(20)]), i)
        assert drafter.num_bytes <= 200_000
    assert drafter.num_bytes == sum(index.num_bytes for index in drafter._indexes.values())
    assert 20 < len(drafter._indexes) < 300
    assert drafter.draft(sequence([299, 2, 3], [0, 1, 2]), 1, 2).tokens, "the last prompt is there"
    assert not drafter.draft(sequence([0, 2, 3], [0, 1, 2]), 1, 2).tokens, "the first prompt is not"


def test_a_prompt_larger_than_the_budget_is_dropped_and_the_next_one_served() -> None:
    drafter = RepeatsDrafter(budget=100_000)
    hostile = sequence([5] * 100_000, [5, 5])
    assert list(drafter.draft(hostile, 1, 3).tokens) == [5, 5, 5]
    assert drafter.num_bytes == 0
    assert list(drafter.draft(sequence([1, 2, 3], [1, 2]), 1, 1).tokens) == [3]
