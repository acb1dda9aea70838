"""Recorded answers: what is read from them, and that a stream gives the same for any division of the text."""

from __future__ import annotations

import random

import pytest
from recorded_answers import Count, Recorded, counts, recorded

from trueroll.rollout.parsing.answers import Answer

COUNTS = {
    "deepseek": (78, 77, 77, 7),
    "gemma4": (44, 44, 44, 4),
    "glm": (48, 48, 48, 3),
    "gpt-oss": (45, 45, 44, 6),
    "kimi": (46, 46, 45, 3),
    "llama": (32, 32, 32, 2),
    "qwen3-hermes": (43, 43, 43, 7),
    "qwen3-xml": (53, 52, 52, 1),
}
"""By family: the numbers of well-formed answers, of answers with the right calls, of answers with the right texts, and
of malformed answers.
"""
MISSES = {
    "deepseek/sglang-v4-self-closing-invoke": "a tag that closes itself is not part of the format",
    "gpt-oss/llamacpp-builtin-python-recipient": "a message to a recipient that is no tool of the request is content",
    "kimi/k2i-vllm-empty-tool-section": "a section without calls is content",
    "qwen3-xml/llamacpp-q35-call-inside-think": "reasoning that does not end may mention a call",
}
"""The answers that are not read as their fixtures say, and the reasons."""


def test_recorded_answers_are_read_as_expected() -> None:
    found = {family: _sum(halves) for family, halves in counts().items()}
    assert {family: (each.expected, each.calls, each.texts, each.malformed) for family, each in found.items()} == COUNTS
    assert all(each.no_call == each.malformed for each in found.values())
    assert {id for each in found.values() for id, _ in each.misses} == MISSES.keys()


def _sum(halves: dict[str, Count]) -> Count:
    both = Count()
    for half in halves.values():
        for name in ("expected", "calls", "texts", "malformed", "no_call", "misses"):
            setattr(both, name, getattr(both, name) + getattr(half, name))
    return both


@pytest.mark.parametrize("family", COUNTS)
def test_a_stream_gives_the_same_for_any_division(family: str) -> None:
    rng = random.Random(family)
    for each in recorded():
        if each.fixture.family == family:
            whole = each.whole()
            for most in (1, 3, 9, 40):
                assert _streamed(each, rng, most) == whole, each.fixture.id


def _streamed(each: Recorded, rng: random.Random, most: int) -> Answer:
    stream, told, at = each.parser.stream(each.prompt), Answer(), 0
    while at < len(each.text):
        size = rng.randint(1, most)
        told.extend(stream.add(each.text[at : at + size]))
        at += size
    told.extend(stream.finish(each.finish_reason))
    return told
