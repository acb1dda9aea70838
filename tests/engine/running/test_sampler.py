"""Sampling parameters, row by row within one batch, on every backend.

The head is the identity, so that a hidden state equals its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trueroll.engine.outputs.open_requests import DRAW, DrawRecord
from trueroll.engine.request import Distribution, SamplingParams
from trueroll.engine.running.sampler import Sampler
from trueroll.engine.running.step import NO_LANE, Draws, ScoredRows
from trueroll.kernels.edits import RowEdits, Rules
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import PLAIN_HEAD

LOGITS = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 2


@pytest.fixture
def sampler(backend: str) -> Sampler:
    cpu = torch.device("cpu")
    ops = select_backend(backend, cpu, torch.float32).ops
    head = ops.new_weight(50, 50, torch.empty)
    head.copy_(torch.eye(50))
    return Sampler(ops, head, PLAIN_HEAD)


def log_prob(sampler: Sampler, logits: torch.Tensor, token_id: int) -> float:
    """Return the log-prob of a token from the sampler's own op. Check that this log-prob is close to the true log-prob.
    `logits`: [50].
    """
    found = sampler.ops.log_probs(logits[None], torch.tensor([token_id])).item()
    assert abs(found - logits.double().log_softmax(0)[token_id].item()) < 1e-6
    return found


class One(NamedTuple):
    """The result of one draw."""

    token_id: int
    logprob: float
    is_finite: bool
    record: tuple[bytes, ...] | None


class Draw(NamedTuple):
    """One draw of a token at `position` from row `row`."""

    row: int
    position: int
    record: DrawRecord
    edits: RowEdits | None


def draws_of(each: Sequence[Draw]) -> Draws:
    rows, positions = np.array([d.row for d in each]), np.array([d.position for d in each])
    edits = {i: d.edits for i, d in enumerate(each) if d.edits is not None}
    return Draws(rows, positions, np.full(len(each), NO_LANE), np.array([d.record for d in each], DRAW), edits)


def run(sampler: Sampler, logits: torch.Tensor, draws: Sequence[Draw]) -> list[One]:
    drawn = sampler.draw(logits, draws_of(draws)).wait()
    tops = map(drawn.records.get, range(len(draws)))
    return [One(*one) for one in zip(drawn.token_ids, drawn.logprobs, drawn.is_finite, tops, strict=True)]


def draw(row: int = 0, seed: int = 3, position: int = 9, banned: Sequence[int] = (), **params) -> Draw:
    record = DrawRecord.of(SamplingParams(max_tokens=1, **params), seed, position, None)
    rules = Rules.of(Distribution(min_tokens=1), banned, 50)
    return Draw(row, position, record, rules and rules.while_short)


def score(sampler: Sampler, token_ids: torch.Tensor, **distribution: Any) -> torch.Tensor:
    rows = ScoredRows(0, len(token_ids), token_ids.numpy(), Distribution(**distribution), None)
    [found] = sampler.score(LOGITS, token_ids, rows)
    return found


MIXED = [
    draw(0, temperature=0.0),
    draw(1, temperature=0.5, logprobs="raw"),
    draw(1, temperature=0.5, seed=2**64 - 1, logprobs="temperature"),
    draw(2, top_k=3),
    draw(3, top_p=0.5, logprobs="raw"),
    draw(4, min_p=0.3, temperature=2.0, logprobs="temperature"),
    draw(4, top_k=2, top_p=0.9, min_p=0.1, logprobs=None),
    draw(4, banned=(1, 2, 3)),
]


def test_hidden_states_equal_their_logits(sampler: Sampler) -> None:
    assert torch.equal(sampler.ops.lm_head(LOGITS, sampler.head), LOGITS)


def test_each_row_has_its_own_parameters(sampler: Sampler) -> None:
    together = run(sampler, LOGITS, MIXED)
    assert together == [drawn for one in MIXED for drawn in run(sampler, LOGITS, [one])]
    assert together[::-1] == run(sampler, LOGITS, MIXED[::-1])


def test_many_rows_give_the_results_of_single_rows(sampler: Sampler) -> None:
    assert run(sampler, LOGITS, MIXED * 20) == run(sampler, LOGITS, MIXED) * 20


@pytest.mark.parametrize("logprobs", ["raw", "temperature", "processed"])
def test_filters_that_drop_nothing_change_no_bit(sampler: Sampler, logprobs: str) -> None:
    asked: tuple[dict[str, Any], ...] = {}, {"top_k": 50}
    plain, filtered = (
        [draw(i % 5, seed=i, temperature=0.7, logprobs=logprobs, **filters) for i in range(100)] for filters in asked
    )
    assert not plain[0].record.has_filters and filtered[0].record.has_filters
    drawn = run(sampler, LOGITS, plain)
    assert drawn == run(sampler, LOGITS, filtered)
    assert len({one.token_id for one in drawn}) > 20


def test_greedy_takes_the_lowest_id_among_equals_and_the_models_own_distribution(sampler: Sampler) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [7, 9, 30]] = 1.5
    [drawn] = run(sampler, logits, [draw(temperature=0.0, top_k=1, top_p=0.1)])
    assert drawn.token_id == 7
    assert drawn.logprob == log_prob(sampler, logits[0], 7)


def test_logprobs_are_of_the_requested_distribution(sampler: Sampler) -> None:
    for mode, temperature in (("raw", 1.0), ("temperature", 0.5)):
        [drawn] = run(sampler, LOGITS, [draw(temperature=0.5, top_k=4, logprobs=mode)])
        assert drawn.logprob == log_prob(sampler, LOGITS[0] / temperature, drawn.token_id)
    best = (LOGITS[0] / 0.5).topk(4)
    [drawn] = run(sampler, LOGITS, [draw(temperature=0.5, top_k=4)])
    kept = best.values.log_softmax(0)[best.indices == drawn.token_id].item()
    assert drawn.logprob is not None and abs(drawn.logprob - kept) < 1e-6


def test_seed_and_position_both_matter(sampler: Sampler) -> None:
    base = [draw(seed=s, position=p) for s in range(30) for p in range(30)]
    ids = torch.tensor([d.token_id for d in run(sampler, LOGITS, base)]).view(30, 30)
    assert len(ids.unique(dim=0)) == len(ids.unique(dim=1).T) == 30


def test_banned_tokens_are_not_drawn(sampler: Sampler) -> None:
    everything_but_one = sorted(set(range(50)) - {13})
    [drawn] = run(sampler, LOGITS, [draw(banned=everything_but_one)])
    assert (drawn.token_id, drawn.logprob, drawn.is_finite) == (13, 0.0, True)


def test_nan_logits_are_reported(sampler: Sampler) -> None:
    broken = LOGITS.clone()
    broken[1] = torch.nan
    good, bad = run(sampler, broken, [draw(0), draw(1)])
    assert good.is_finite and not bad.is_finite
    assert [good] == run(sampler, LOGITS, [draw(0)])


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-30, 1e300])
def test_any_temperature_gives_finite_log_probs(sampler: Sampler, temperature: float) -> None:
    for drawn, row in zip(
        run(sampler, LOGITS, [draw(i, temperature=temperature) for i in range(5)]), LOGITS, strict=True
    ):
        assert drawn.is_finite and drawn.logprob is not None
        if temperature < 1:
            assert (drawn.token_id, drawn.logprob) == (row.argmax(), 0.0)
        else:
            assert abs(drawn.logprob + math.log(50)) < 1e-6


@pytest.mark.parametrize("filters", [{}, dict(top_k=4), dict(top_p=0.5, min_p=0.01)])
@pytest.mark.parametrize("temperature", [1e39, 1e300, 1e-320, 0.0, 0.7])
def test_a_score_uses_temperatures_like_a_draw(sampler: Sampler, temperature: float, filters: dict) -> None:
    mode = "processed" if filters else "temperature"
    drawn = run(sampler, LOGITS, [draw(row, temperature=temperature, logprobs=mode, **filters) for row in range(5)])
    assert all(one.is_finite for one in drawn)
    token_ids = torch.tensor([one.token_id for one in drawn])
    scores = score(sampler, token_ids, temperature=temperature, **filters)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.view(torch.int32), torch.tensor([one.logprob for one in drawn]).view(torch.int32))


def test_a_score_equals_the_log_probs_of_the_draw(sampler: Sampler) -> None:
    asked: list[dict[str, Any]] = [
        {},
        dict(temperature=0.0),
        dict(temperature=0.7, top_p=0.8),
        dict(top_k=3, min_p=0.1),
    ]
    for values in asked:
        draws = [draw(row, **values) for row in range(5)]
        drawn = run(sampler, LOGITS, draws)
        scores = score(sampler, torch.tensor([d.token_id for d in drawn]), **values)
        assert scores.tolist() == [d.logprob for d in drawn]
    assert score(sampler, LOGITS.argmin(-1), top_k=1).tolist() == [-torch.inf] * 5
