"""An op that joins several steps gives the bits of those steps one by one, on the same backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from trueroll.kernels.ops import GREEDY, SAMPLE, Backend, Wanted, Weight

from .backends import Served, for_served
from .inputs import empty_caches, make_qkv, randn, same_bits, stored

ROWS = 37


HEADS = [(2, 1, 128), (4, 2, 16), (6, 2, 64), (3, 3, 80), (9, 3, 96), (2, 2, 256)]
BIASES_AND_NORMS = [(True, True), (False, False), (False, True), (True, False)]


@for_served(
    "heads,kv_heads,size,biases,norms",
    [(*heads, *with_) for with_ in BIASES_AND_NORMS for heads in HEADS],
    interpreted=1,
)
def test_qkv(served: Served, heads: int, kv_heads: int, size: int, biases: bool, norms: bool) -> None:
    ops, dtype = served.ops, served.dtype
    weights = make_qkv(served, heads, kv_heads, size, biases, norms, hidden=130)
    x, norm = randn(ROWS, 130, dtype=dtype), randn(130, dtype=dtype, seed=3)
    rotation = ops.rotation(torch.arange(ROWS) * 11, 10000.0 ** (-torch.arange(0, size, 2) / size), 1.2)
    slots = torch.randperm(5 * 10, generator=torch.Generator().manual_seed(0))[:ROWS]
    caches, expected_caches = (empty_caches(5, 10, kv_heads, size, dtype) for _ in range(2))

    found = ops.qkv(x, norm, 1e-5, weights, rotation, *caches, slots)

    hidden = ops.rmsnorm(x, norm, 1e-5)
    projections = zip((weights.q, weights.k, weights.v), weights.biases or (None, None, None), strict=True)
    q, k, v = (ops.linear(hidden, weight, bias).view(ROWS, -1, size) for weight, bias in projections)
    if weights.head_norms is not None:
        parts = zip((q, k), weights.head_norms, strict=True)
        q, k = (ops.rmsnorm(part.view(-1, size), weight, 1e-5).view_as(part) for part, weight in parts)
    assert same_bits(found, ops.rope(q, rotation))
    ops.write_kv(ops.rope(k, rotation), v, *expected_caches, slots)
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert cache.isnan().sum() == (50 - ROWS) * kv_heads * size, "the other places are untouched"
        assert same_bits(cache, expected)


@pytest.mark.parametrize("n,k", [(576, 576), (17, 33), (513, 130)])
def test_linear_add(served: Served, n: int, k: int) -> None:
    weight = stored(served.ops, randn(n, k, dtype=served.dtype, seed=1))
    x, residual = randn(ROWS, k, dtype=served.dtype), randn(ROWS, n, dtype=served.dtype, seed=2)
    assert same_bits(served.ops.linear_add(x, weight, residual), served.ops.linear(x, weight) + residual)


@pytest.mark.parametrize("n,k", [(7, 40), (130, 577), (64, 64)])
def test_gate_up(served: Served, n: int, k: int) -> None:
    gate, up = (stored(served.ops, randn(n, k, dtype=served.dtype, seed=seed)) for seed in (1, 2))
    x, norm = randn(ROWS, k, dtype=served.dtype), randn(k, dtype=served.dtype, seed=3)
    hidden = served.ops.rmsnorm(x, norm, 1e-5)
    expected = served.ops.silu_mul(served.ops.linear(hidden, gate), served.ops.linear(hidden, up))
    assert same_bits(served.ops.gate_up(x, norm, 1e-5, gate, up), expected)


def wanted(targets: Tensor) -> Wanted:
    rows = torch.arange(len(targets))
    temperatures = torch.tensor([1.0, 0.5, 1.7, 1e-30, 1e6])[rows % 5]
    return Wanted(rows, targets, temperatures, rows % 2 == 0, rows * 2**57 - 5, rows * 2**28 + 3)


def step_by_step(ops: Backend, hidden: Tensor, weight: Weight, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    logits = ops.lm_head(hidden, weight)
    scaled = logits / wanted.temperatures[:, None]
    drawn = ops.sample(scaled, wanted.seeds, wanted.positions)
    tokens = torch.where(wanted.targets == SAMPLE, drawn, wanted.targets)
    tokens = torch.where(wanted.targets == GREEDY, scaled.argmax(-1), tokens)
    logprobs = ops.log_probs(torch.where(wanted.raw[:, None], logits, scaled), tokens)
    return tokens, logprobs, scaled.gather(1, tokens[:, None]).isfinite()[:, 0]


@for_served("vocab_size", [(1001,), (1,), (17,), (512,), (1040,), (49153,)], interpreted=2)
def test_next_tokens(served: Served, vocab_size: int) -> None:
    weight = stored(served.ops, randn(vocab_size, 33, dtype=served.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=served.dtype)
    asked = wanted(torch.tensor([SAMPLE, GREEDY, vocab_size - 1, 0, vocab_size // 2] * ROWS)[:ROWS])
    expected = step_by_step(served.ops, hidden, weight, asked)
    found = served.ops.next_tokens(hidden, weight, asked)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert found[2].all() and found[1].isfinite().all()


def test_next_tokens_scores_what_it_drew(quick: Served) -> None:
    weight = stored(quick.ops, randn(1001, 33, dtype=quick.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=quick.dtype)
    for target in (SAMPLE, GREEDY):
        drawn, logprobs, _ = quick.ops.next_tokens(hidden, weight, wanted(torch.full((ROWS,), target)))
        assert len(drawn.unique()) > ROWS // 2
        again, scores, _ = quick.ops.next_tokens(hidden, weight, wanted(drawn))
        assert torch.equal(again, drawn) and same_bits(scores, logprobs)


def test_several_draws_may_read_one_hidden_state(served: Served) -> None:
    hidden, weight = randn(4, 64, dtype=served.dtype), stored(served.ops, randn(300, 64, dtype=served.dtype, seed=1))
    rows = torch.tensor([2, 0, 2, 2, 3])
    asked = wanted(torch.tensor([SAMPLE, GREEDY, SAMPLE, 17, SAMPLE]))
    apart = served.ops.next_tokens(hidden[rows], weight, asked)
    together = served.ops.next_tokens(hidden, weight, dataclasses.replace(asked, rows=rows))
    assert all(same_bits(left, right) for left, right in zip(together, apart, strict=True))


def test_equal_logits_go_to_the_lowest_id(served: Served) -> None:
    """Ids that different lanes, panels and chunks of the native kernels hold."""
    rows = randn(1500, 64, dtype=served.dtype, seed=1)
    groups = [[3, 4, 19, 600, 1499], [15, 16], [511, 512], [1023, 1040], [40, 1400]]
    hidden = torch.stack([rows[group[0]] for group in groups])
    for group in groups:
        rows[group] = rows[group[0]].clone()
    weight = stored(served.ops, rows)
    logits = served.ops.lm_head(hidden, weight)
    for row, group in zip(logits, groups, strict=True):
        assert (row == row.max()).nonzero().flatten().tolist() == group, "the highest logits are equal"
    unused = torch.zeros(len(groups), dtype=torch.int64)
    asked = Wanted(torch.arange(len(groups)), unused + GREEDY, torch.ones(len(groups)), unused.bool(), unused, unused)
    assert served.ops.next_tokens(hidden, weight, asked)[0].tolist() == [group[0] for group in groups]


def test_next_tokens_takes_the_first_of_infinite_logits(quick: Served, two_threads: None) -> None:
    """Several threads look for a row's best token; which of them comes first must not matter."""
    rows = randn(528, 32, dtype=quick.dtype, seed=1)
    rows[[100, 520], 0] = torch.inf  # in two parts of the vocabulary; the second is short and soon done
    weight, hidden = stored(quick.ops, rows), randn(ROWS, 32, dtype=quick.dtype)
    hidden[:, 0] = 1.0
    assert quick.ops.lm_head(hidden, weight).isposinf().sum(1).eq(2).all()
    asked = wanted(torch.tensor([SAMPLE, GREEDY] * ROWS)[:ROWS])
    assert quick.ops.sample(quick.ops.lm_head(hidden, weight), asked.seeds, asked.positions).eq(100).all()
    for _ in range(20):
        tokens, logprobs, finite = quick.ops.next_tokens(hidden, weight, asked)
        assert tokens.eq(100).all() and logprobs.isnan().all() and not finite.any()


def test_next_tokens_never_passes_off_a_row_with_nan(served: Served) -> None:
    """The log-prob of such a row is no number: the row has to say so, whatever its token."""
    for vocab_size, broken in ((40, 7), (1001, 0), (1001, 600), (1001, 1000)):
        rows = randn(vocab_size, 33, dtype=served.dtype, seed=1)
        rows[broken] = torch.nan
        weight, hidden = stored(served.ops, rows), randn(4, 33, dtype=served.dtype)
        assert served.ops.lm_head(hidden, weight).isnan().sum(1).eq(1).all()
        targets = torch.tensor([SAMPLE, GREEDY, SAMPLE, GREEDY])
        _, logprobs, finite = served.ops.next_tokens(hidden, weight, wanted(targets))
        assert logprobs.isnan().all() and not finite.any(), f"id {broken} of {vocab_size}"
