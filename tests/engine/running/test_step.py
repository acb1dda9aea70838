"""A step as plain arrays: the array entries for each kind of chunk."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trueroll.engine.cache.prefix_cache import Chain, Table
from trueroll.engine.outputs.open_requests import BASES, DrawRecord, OpenSample, OpenScore
from trueroll.engine.request import Distribution, GenerateRequest, SamplingParams, ScoreRequest
from trueroll.engine.running.step import NO_LANE, Draws, Step, plan_step
from trueroll.engine.scheduling.sequence import Chunk, Chunks, Generation, Lanes, Purpose, Sequence, takers_of
from trueroll.kernels.contract import GREEDY, SAMPLE
from trueroll.kernels.edits import Editor, Rules

BLOCK_SIZE = 4
PROMPT_LEN = 4
VOCAB_SIZE = 64


def sample(seed: int = 7, **params: Any) -> OpenSample:
    request = GenerateRequest("r", np.zeros(PROMPT_LEN, np.int32), SamplingParams(max_tokens=9, **params))
    rules = Rules.of(request.params, [2], VOCAB_SIZE)
    record = DrawRecord.of(request.params, seed, PROMPT_LEN, rules)
    editor = rules and Editor(rules, request.prompt_token_ids, np.zeros(0, np.int32))
    return OpenSample(request, 0, (0, 0), seed, record, frozenset(), editor, None)


def sequence(purpose: Purpose, tokens: list[int], table: list[int]) -> Sequence:
    found = Sequence((0, 0), array("i", tokens), PROMPT_LEN, Chain(0, b""), purpose)
    found.table = Table([array("q", table)], [0])
    return found


def enter(chunks: AnySequence[Chunk]) -> tuple[Lanes, Chunks]:
    """Return lanes for the sequences of some chunks."""
    lanes = Lanes(len(chunks))
    for chunk in chunks:
        lanes.enter(chunk.sequence)
    sequences, starts, ends = zip(*chunks, strict=True)
    return lanes, lanes.chunks(np.array([s.lane for s in sequences]), np.array(starts), np.array(ends))


def plan(*chunks: Chunk, copies: AnySequence[tuple[int, int]] = (), unseen: Collection[int] = ()) -> Step:
    """Plan a step. `unseen`: indices of chunks with a sequence that has one unseen token."""
    lanes, each = enter(chunks)
    for i in unseen:
        lanes.expect_first(chunks[i].sequence)
    step = plan_step(each, lanes, takers_of(each, lanes), [[*copies]], BLOCK_SIZE)
    arrays = step.token_ids, step.positions, step.unseen, *step.slots, *step.block_tables, *step.block_copies
    assert {column.dtype for column in arrays} == {np.dtype(np.int64)}
    return step


def bans(step: Step) -> dict[int, list[int]]:
    """Return the banned tokens of each draw that has some."""
    banned = ((i, each.entries[each.entries["bias"] == -np.inf]) for i, each in step.draws.edits.items())
    return {i: entries["token_id"].tolist() for i, entries in banned}


def columns(draws: Draws) -> list[tuple[int, int, int, int]]:
    """Return row, target, seed and position of each draw."""
    records = draws.records
    each = draws.rows.tolist(), records["target"].tolist(), records["seed"].tolist(), draws.positions.tolist()
    return list(zip(*each, strict=True))


def test_a_prompt_beside_a_decode() -> None:
    prompt = sequence(Generation([sample()]), [10, 11, 12, 13, 14, 15], [5, 3])
    decode = sequence(Generation([sample(seed=2**64 - 1)]), [20, 21, 22, 23, 24], [7, 1])
    step = plan(Chunk(prompt, 2, 5), Chunk(decode, 4, 5))
    assert step.token_ids.tolist() == [12, 13, 14, 24]
    assert step.positions.tolist() == [2, 3, 4, 4]
    assert step.slots[0].tolist() == [5 * 4 + 2, 5 * 4 + 3, 3 * 4, 1 * 4]
    assert (step.query_starts, step.context_lens) == ([0, 3, 4], [5, 5])
    assert step.block_tables[0].tolist() == [[5, 3], [7, 1]]
    assert step.unseen.shape == (2, 0) and step.block_copies[0].shape == (0, 2) and step.scores == []
    assert columns(step.draws) == [(3, SAMPLE, -1, 5)], "the prompt's chunk does not reach its end"


def test_shorter_block_tables_are_padded() -> None:
    short, long = (sequence(Generation([sample()]), list(range(n)), table) for n, table in ((4, [6]), (9, [1, 2, 3])))
    assert plan(Chunk(short, 3, 4), Chunk(long, 8, 9)).block_tables[0].tolist() == [[6, 0, 0], [1, 2, 3]]


def test_each_sample_of_a_group_draws_from_the_same_row() -> None:
    greedy = sample(seed=3, temperature=0.0, logprobs="raw")
    banned = sample(seed=4, min_tokens=1)
    group = sequence(Generation([greedy, banned]), [1, 2, 3, 4], [0])
    step = plan(Chunk(group, 0, 4))
    assert columns(step.draws) == [(3, GREEDY, 3, 4), (3, SAMPLE, 4, 4)]
    assert step.draws.records["temperature"].tolist() == [1.0, 1.0]
    assert [BASES[place] for place in step.draws.records["basis"]] == ["raw", "processed"]
    assert bans(step) == {1: [2]}


def test_an_unseen_token_refers_to_its_lane() -> None:
    seen = sequence(Generation([sample()]), [1, 2, 3, 4, 5], [0, 1])
    behind = sequence(Generation([sample()]), [1, 2, 3, 4, 5], [2, 3])
    step = plan(Chunk(seen, 4, 5), Chunk(behind, 5, 6), unseen=[1])
    assert step.unseen.tolist() == [[1], [behind.lane]] and step.token_ids[0] == 5
    assert step.draws.positions.tolist() == [5, 6]


def test_a_decode_draws_after_every_token_that_its_lane_does_not_count() -> None:
    """The decode's lane has counted only the first five of the seven tokens."""
    decode = sequence(Generation([sample(min_tokens=3)]), [1, 2, 3, 4, 5, 6, 7], [0, 1])
    single, other = (sequence(Generation([sample(seed=seed)]), [1, 2, 3, 4, 5], [2, 3]) for seed in (8, 9))
    group = sequence(Generation([sample(seed=seed) for seed in (1, 2)]), [1, 2, 3, 4], [4])
    begins = sequence(Generation([sample(seed=3)]), [1, 2, 3, 4], [5])
    chunks = [Chunk(group, 2, 4), Chunk(decode, 4, 7), Chunk(begins, 1, 4), Chunk(single, 4, 5), Chunk(other, 2, 4)]
    lanes, each = enter(chunks)
    lanes.num_tokens[decode.lane] = 5
    assert isinstance(decode.purpose, Generation) and (editor := decode.purpose.samples[0].editor) is not None
    editor.append(5)
    each = replace(each, drafts={decode.lane: (6, 7)})
    takers = takers_of(each, lanes)
    step = plan_step(each, lanes, takers, [[]], BLOCK_SIZE)
    of_decode = [(row, SAMPLE, 7, position) for row, position in ((2, 5), (3, 6), (4, 7))]
    of_prompts = [(1, SAMPLE, 1, 4), (1, SAMPLE, 2, 4), (7, SAMPLE, 3, 4)]
    assert columns(step.draws) == [*of_decode, (8, SAMPLE, 8, 5), *of_prompts]
    assert step.draws.lanes.tolist() == [NO_LANE] * 3 + [single.lane] + [NO_LANE] * 2 + [begins.lane]
    assert bans(step) == {0: [2], 1: [2]}, "banned up to the third token"
    assert takers.num_decode_draws == 4 and list(takers.prompts) == [(0, range(2, 4)), (2, range(4, 5))]


def test_a_sequence_accepts_one_token_or_more() -> None:
    seen, behind, gone = (sequence(Generation([sample()]), [1, 2, 3, 4, 5], [0, 1]) for _ in range(3))
    lanes, each = enter([Chunk(seen, 4, 5), Chunk(behind, 4, 5), Chunk(gone, 4, 5)])
    lanes.expect(each.take(np.array([1])))
    lanes.leave(gone)
    lanes.accept(each, np.array([6, 7, 8, 9]), np.array([2, 1, 1]), np.zeros(3, np.bool_))
    assert [found.tokens[5:].tolist() for found in (seen, behind, gone)] == [[6, 7], [8], [9]]
    assert [(found.num_tokens, lanes.last_token[found.lane]) for found in (seen, behind)] == [(7, 7), (6, 8)]
    lanes.check([seen, behind])


def test_a_score_has_targets_and_draws_nothing() -> None:
    request = ScoreRequest("s", np.arange(30, 36, dtype=np.int32), Distribution(temperature=0.5), top_logprobs=2)
    decode = sequence(Generation([sample()]), [1, 2, 3, 4, 5], [0, 1])
    scored = sequence(OpenScore(request, (0, 0), None), list(range(30, 35)), [2, 3])
    step = plan(Chunk(decode, 4, 5), Chunk(scored, 1, 5))
    [rows] = step.scores
    assert (rows.start, rows.end, rows.token_ids.tolist()) == (1, 5, [32, 33, 34, 35])
    assert (rows.distribution, rows.top_logprobs) == (request.distribution, 2)
    assert len(step.draws) == 1


@pytest.mark.parametrize("copies", [[(4, 9)], [(4, -3), (4, 8), (-3, 9)]])
def test_block_copies_are_pairs_of_source_and_destination_in_order(copies: list[tuple[int, int]]) -> None:
    decode = sequence(Generation([sample()]), [1, 2, 3, 4, 5], [0, 9])
    found = plan(Chunk(decode, 4, 5), copies=copies).block_copies[0].tolist()
    assert found == [[*copy] for copy in copies]
