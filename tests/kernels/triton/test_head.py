"""Draws, log-probs and filters of the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from matrix import thinned
from torch import Tensor

from trueroll.kernels import reference
from trueroll.kernels.contract import GREEDY, LOGITS_ROWS, SAMPLE, Wanted
from trueroll.kernels.specs import PLAIN_HEAD, HeadSpec
from trueroll.kernels.triton import head
from trueroll.kernels.triton.head import SECTION, log_probs, next_tokens, sample
from trueroll.kernels.triton.launch import exact_jit, launch, recording

from ..inputs import filtered, randn, same_bits

VOCAB_SIZES = [1, 17, 1001, 4096, 9000]
HIDDEN = 48
ROWS = 5
OPS: Any = head


def some_seeds(rows: int) -> Tensor:
    """Return seeds of both signs, with bits in both halves of the 64 bits."""
    return torch.arange(rows) * 2**61 - 77


def some_positions(rows: int) -> Tensor:
    return torch.arange(rows) * 2**30 + 3


def head_of(vocab_size: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return hidden states [rows, HIDDEN] and a weight [vocab_size, HIDDEN]."""
    return randn(rows, HIDDEN, dtype=dtype), randn(vocab_size, HIDDEN, dtype=dtype, seed=1)


def wanted(targets: Sequence[int]) -> Wanted:
    rows = torch.arange(len(targets))
    temperatures = torch.tensor([0.5, 1.0, 1.7, 1e-30, 1e6])[rows % 5]
    return Wanted(
        rows, torch.tensor(targets), temperatures, rows % 2 == 0, some_seeds(len(rows)), some_positions(len(rows))
    )


@pytest.fixture
def quick_lm_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute logits with torch, row by row, because the interpreter would spend most of a test's time on logits."""

    def lm_head(x: Tensor, weight: Tensor, spec: HeadSpec = PLAIN_HEAD) -> Tensor:
        assert spec == PLAIN_HEAD
        return torch.stack([weight.float() @ row.float() for row in x])

    monkeypatch.setattr(head, "lm_head", lm_head)


def all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


@exact_jit
def _words(seeds_ptr, positions_ptr, words_ptr, COUNT: tl.constexpr):
    row, section = tl.program_id(0), tl.program_id(1)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    words = head.philox_words(seed, position, section * (COUNT // 4), COUNT)
    places = (row * tl.num_programs(1) + section) * COUNT + tl.arange(0, COUNT)
    tl.store(words_ptr + places, words.to(tl.int64))


@exact_jit
def _noise(words_ptr, noise_ptr, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    words = tl.load(words_ptr + places).to(tl.uint32)
    tl.store(noise_ptr + places, head.gumbel_noise(words))


def test_words_are_those_of_the_reference() -> None:
    seeds = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 12345678901234567])
    positions = torch.tensor([0, 2**32 - 1, 2**32, 7, 2**62 + 5, 2**31])
    words = torch.empty(6, 3 * 1024, dtype=torch.int64)
    launch(_words, (6, 3), seeds, positions, words, warps=4, COUNT=1024)
    assert torch.equal(words, reference.philox(seeds, positions, 3 * 1024))


def uniforms(words: Tensor) -> Tensor:
    """Return the uniform numbers of random words: float64, with the intermediate rounding to float32 that the
    definition has.
    """
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24).double()


def test_noise_against_float64() -> None:
    random = reference.philox(some_seeds(4), some_positions(4), 2**14).flatten()
    edges = torch.tensor([0, 1, 2, 2**8, 2**24 - 1, 2**24, 2**31, 2**31 + 1, 2**32 - 2**8, 2**32 - 2, 2**32 - 1])
    words = torch.cat((random, edges, torch.arange(2**12 - len(edges)) * 2**8))
    noise = torch.empty(len(words))
    launch(_noise, (len(words) // 1024,), words, noise, warps=4, COUNT=1024)
    expected = -torch.log(-torch.log1p(-uniforms(words)))
    assert expected.min() < -2.8 and expected.max() > 22.8, "both ends occur"
    # The relative error of the inner logarithm is the absolute error of the outer logarithm.
    assert ((noise.double() - expected).abs() <= 4 * 2.0**-24 * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("spread", [1, 12])
def test_log_probs_against_float64(vocab_size: int, spread: int) -> None:
    logits = randn(6, vocab_size) * spread
    token_ids = torch.arange(6) * 769 % vocab_size
    expected = logits.double().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    error = (log_probs(logits, token_ids).double() - expected).abs()
    assert (error <= 2.0**-24 * (16 + 4 * expected.abs())).all()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_sample_takes_the_highest_logit_with_noise(vocab_size: int) -> None:
    rows = 40 if vocab_size < SECTION else 8
    logits, seeds, positions = randn(rows, vocab_size) * 3, some_seeds(rows), some_positions(rows)
    noise = -torch.log(-torch.log1p(-uniforms(reference.philox(seeds, positions, vocab_size))))
    values = logits.double() + noise
    best = values.max(-1).values
    # Logits plus noise stay below 64, where one unit in the last place is 2**-18.
    rounding = 2.0**-17
    clear = (values > best[:, None] - rounding).sum(-1) == 1
    assert values.abs().max() < 64 and clear.double().mean() > 0.8
    assert torch.equal(sample(logits, seeds, positions)[clear], values.argmax(-1)[clear])


def test_masked_tokens_are_never_drawn() -> None:
    for kept in (0, SECTION - 1, SECTION, 4500):
        logits = torch.full((6, 4501), -torch.inf)
        logits[:, kept] = -1e4
        assert sample(logits, some_seeds(6), some_positions(6)).eq(kept).all()


RowOp = tuple[Callable[..., Sequence[Tensor]], tuple[Tensor, ...]]


def logits_with_a_broken_row(vocab_size: int) -> Tensor:
    logits = randn(ROWS, vocab_size)
    logits[2] = torch.nan
    return logits


def row_op(name: str, vocab_size: int) -> RowOp:
    """Return a row op and its inputs. Row 2 is NaN."""
    logits, i = logits_with_a_broken_row(vocab_size), torch.arange(ROWS)
    if name == "log_probs":
        return lambda *x: [log_probs(*x)], (logits, i * 769 % vocab_size)
    if name == "sample":
        return lambda *x: [sample(*x)], (logits, some_seeds(ROWS), some_positions(ROWS))
    if name == "filter_logits":
        filters = torch.tensor([-1, 3, 2, 700, 1]), torch.tensor([0.9, 1, 0.5, 1, 0.2]), torch.tensor([0, 0.3, 0, 0, 0])
        return lambda *x: [filtered(OPS, *x)], (logits, *filters)
    hidden, weight = head_of(vocab_size, torch.bfloat16)
    hidden[2] = torch.nan
    asked = wanted([SAMPLE, GREEDY, vocab_size - 1, SAMPLE, vocab_size // 2])
    columns = [getattr(asked, field.name) for field in dataclasses.fields(Wanted)[1:]]
    return lambda x, *some: next_tokens(x, weight, Wanted(torch.arange(len(x)), *some)), (hidden, *columns)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", ["log_probs", "sample", "filter_logits", "next_tokens"])
@thinned(lambda name, vocab_size: vocab_size in (VOCAB_SIZES[0], VOCAB_SIZES[-1]))
def test_rows_do_not_depend_on_company(name: str, vocab_size: int, quick_lm_head: None) -> None:
    op, inputs = row_op(name, vocab_size)
    together = op(*inputs)
    for i in range(ROWS):
        assert all_same(op(*(x[i : i + 1] for x in inputs)), [x[i : i + 1] for x in together]), f"row {i} alone"
    for shift in range(1, ROWS):
        moved = op(*(x.roll(shift, 0) for x in inputs))
        assert all_same([x.roll(-shift, 0) for x in moved], together), f"rows moved by {shift}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@thinned(lambda dtype, **_: dtype == torch.bfloat16)
def test_next_tokens_gives_the_bits_of_its_steps(vocab_size: int, dtype: torch.dtype) -> None:
    hidden, weight = head_of(vocab_size, dtype, rows=10)
    asked = wanted([SAMPLE, GREEDY, vocab_size - 1, 0, SAMPLE, SAMPLE, vocab_size // 2, SAMPLE, SAMPLE, GREEDY])
    logits = head.lm_head(hidden, weight)
    scaled = logits / asked.temperatures[:, None]
    drawn = sample(scaled, asked.seeds, asked.positions)
    token_ids = torch.where(asked.targets == SAMPLE, drawn, asked.targets)
    token_ids = torch.where(asked.targets == GREEDY, scaled.argmax(-1), token_ids)
    logprobs = log_probs(torch.where(asked.raw[:, None], logits, scaled), token_ids)
    finite = scaled.gather(1, token_ids[:, None]).isfinite()[:, 0]
    assert finite.all() and logprobs.isfinite().all()
    assert all_same(next_tokens(hidden, weight, asked), (token_ids, logprobs, finite))


def test_next_tokens_scores_what_it_drew() -> None:
    hidden, weight = head_of(1001, torch.bfloat16, rows=10)
    for target in (SAMPLE, GREEDY):
        asked = wanted([target] * 10)
        token_ids, logprobs, _ = next_tokens(hidden, weight, asked)
        assert len(token_ids.unique()) > 5
        again, scores, _ = next_tokens(hidden, weight, dataclasses.replace(asked, targets=token_ids))
        assert torch.equal(again, token_ids) and same_bits(scores, logprobs)


def test_next_tokens_of_more_rows_than_fit_at_once(quick_lm_head: None) -> None:
    rows = LOGITS_ROWS + 20
    hidden, weight = head_of(17, torch.bfloat16, rows=20)
    asked = wanted([SAMPLE, GREEDY, 3] * (rows // 3))
    assert len(asked.rows) == rows
    asked = dataclasses.replace(asked, rows=asked.rows * 7 % 20)
    found = next_tokens(hidden, weight, asked)
    last = range(LOGITS_ROWS - 3, rows)
    few = Wanted(*(getattr(asked, field.name)[last.start :] for field in dataclasses.fields(Wanted)))
    assert all_same([x[last.start :] for x in found], next_tokens(hidden, weight, few))


def test_no_rows() -> None:
    hidden, weight = head_of(17, torch.bfloat16)
    token_ids, logprobs, finite = next_tokens(hidden, weight, wanted([]))
    assert (token_ids.shape, logprobs.shape, finite.shape) == ((0,), (0,), (0,))


def test_equal_logits_go_to_the_lowest_id() -> None:
    """The equal logits are in one thread, in several threads, and in several sections."""
    groups = [[3, 4, 600, 4499], [15, 16], [SECTION - 1, SECTION], [SECTION + 1, SECTION + 2], [40, 3000]]
    weight = randn(4500, HIDDEN, dtype=torch.bfloat16, seed=1)
    hidden = weight[[group[0] for group in groups]]
    for row, group in zip(hidden, groups, strict=True):
        weight[group] = 4 * row
    for logits, group in zip(head.lm_head(hidden, weight), groups, strict=True):
        assert (logits == logits.max()).nonzero().flatten().tolist() == group, "the highest logits are equal"
    token_ids, _, _ = next_tokens(hidden, weight, wanted([GREEDY] * len(groups)))
    assert token_ids.tolist() == [group[0] for group in groups]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab_size,place", [(1, 0), (17, 16), (4500, 0), (4500, SECTION), (4500, 4499)])
def test_a_broken_row_is_reported(vocab_size: int, place: int, value: float, quick_lm_head: None) -> None:
    logits = randn(4, vocab_size)
    logits[:, place] = value
    assert log_probs(logits, torch.tensor([place, 0, vocab_size // 2, vocab_size - 1])).isnan().all()
    assert sample(logits, some_seeds(4), some_positions(4)).eq(place).all()
    hidden, weight = head_of(vocab_size, torch.bfloat16)
    hidden[:, 0], weight[place, 0] = 1.0, value
    broken = head.lm_head(hidden, weight)[:, place]
    assert broken.isnan().all() if value != value else broken.isposinf().all()
    token_ids, logprobs, finite = next_tokens(hidden, weight, wanted([SAMPLE, GREEDY, 0, vocab_size - 1, SAMPLE]))
    assert token_ids[[0, 1, 4]].eq(place).all() and logprobs.isnan().all() and not finite.any()


def test_a_row_without_any_token() -> None:
    logits = torch.full((2, 4500), -torch.inf)
    assert log_probs(logits, torch.tensor([0, 4499])).isnan().all()
    assert sample(logits, some_seeds(2), some_positions(2)).tolist() == [0, 0]


def test_tokens_without_probability() -> None:
    """Whole sections of -inf do not change a bit of other sections. A token with logit -inf has probability 0."""
    logits = torch.full((2, 3 * SECTION), -torch.inf)
    logits[:, SECTION : SECTION + 40] = randn(1, 40)
    few = logits[:, : 2 * SECTION].contiguous()
    ids = torch.tensor([SECTION + 7, 5])
    found = log_probs(logits, ids)
    assert same_bits(found, log_probs(few, ids)) and found[0].isfinite() and found[1] == -torch.inf


def test_next_tokens_says_which_logits_are_not_finite() -> None:
    """Cases are a token with logit -inf, and logits that overflow float32 when divided by the temperature."""
    hidden, weight = head_of(17, torch.bfloat16)
    hidden[:, 0], weight[5, 0] = 1.0, -torch.inf
    hidden[4] *= 2.0**100
    asked = dataclasses.replace(
        wanted([5, 6, SAMPLE, 5, GREEDY]), raw=torch.ones(5, dtype=torch.bool), temperatures=torch.ones(5)
    )
    asked.temperatures[4] = 2.0**-60
    _, logprobs, finite = next_tokens(hidden, weight, asked)
    assert logprobs[[0, 3]].isneginf().all() and logprobs[[1, 2, 4]].isfinite().all()
    assert finite.tolist() == [False, True, True, False, False]


def kept_in_float64(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens stay, bool [M, V]. Filters are float64 [M]. Tokens are ordered by logit, and equal logits by
    id.
    """
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1])
    in_top_k = (ranks < top_k[:, None]) | (top_k[:, None] < 0)
    weights = torch.exp(ordered - ordered[:, :1]) * in_top_k
    before = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    keep = in_top_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1)) & (weights >= min_p[:, None])
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def rows_to_filter(rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits with ties in every second row, and filters of every kind: float32, top_k int64."""
    i = torch.arange(rows)
    logits = randn(rows, vocab_size, seed=vocab_size) * 3
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[::5, ::3] = -torch.inf
    logits[:, vocab_size // 2] = 9.0
    return (
        logits,
        torch.tensor([-1, 3, vocab_size, 2**40, vocab_size // 3 + 1])[i % 5],
        torch.tensor([1.0, 0.9, 0.613, 1e-9])[i % 4],
        torch.tensor([0.0, 0.0371, 1e-3])[i % 3],
    )


@pytest.mark.parametrize("vocab_size", [1, 17, 1001, 9000])
def test_filters_against_float64(vocab_size: int) -> None:
    """Rows in which a filter is within 1e-5 of a token's probability are not compared, because the result depends on
    rounding.
    """
    logits, top_k, top_p, min_p = rows_to_filter(60, vocab_size)
    loose, strict = (
        kept_in_float64(logits, top_k, torch.where(top_p < 1, top_p.double() * f, 1.0), min_p.double() / f)
        for f in (1 + 1e-5, 1 - 1e-5)
    )
    clear = (loose == strict).all(-1)
    assert clear.double().mean() > 0.9
    found = filtered(OPS, logits, top_k, top_p, min_p)
    assert same_bits(found[clear], logits.masked_fill(~strict, -torch.inf)[clear])
    assert same_bits(found[clear], reference.filter_logits(logits.clone(), top_k, top_p, min_p)[clear])


def test_edges_of_the_filters() -> None:
    """Probabilities and their sums are exact in float32. top_p drops tokens once the sum is exactly top_p, and min_p
    keeps tokens with exactly its probability. The logits are equal. In every second row, the last logits are -inf
    (probability 0).
    """
    logits = torch.zeros(6, 4096)
    logits[1::2, 1024:] = -torch.inf
    top_p = torch.tensor([0.5, 0.5, 0.75, 0.75, 1.0, 1.0])
    found = filtered(OPS, logits, torch.full((6,), -1), top_p, torch.tensor([0, 0, 0, 0, 1.0, 1.0]))
    assert (found == 0).sum(-1).tolist() == [2048, 512, 3072, 768, 4096, 1024]
    assert (found == 0)[:, :512].all(), "ties go to the lower ids"


@pytest.mark.parametrize("top_k,top_p,min_p", [(0, 1.0, 0.0), (-1, 0.0, 0.0), (-1, 1.0, 2.0)])
def test_the_best_token_stays(top_k: int, top_p: float, min_p: float) -> None:
    logits = rows_to_filter(10, 1001)[0]
    filters = torch.full((10,), top_k), torch.full((10,), top_p), torch.full((10,), min_p)
    kept = filtered(OPS, logits, *filters) != -torch.inf
    assert torch.equal(kept, torch.zeros_like(kept).scatter_(1, logits.argmax(-1, keepdim=True), True))


@pytest.mark.parametrize("place", [0, 1000])
def test_filters_leave_a_row_with_nan_as_it_is(place: int) -> None:
    logits, *filters = rows_to_filter(12, 1001)
    logits[::2, place] = torch.nan
    found = filtered(OPS, logits, *filters)
    assert same_bits(found[::2], logits[::2]) and not same_bits(found[1::2], logits[1::2])


def test_filters_that_are_off_drop_nothing() -> None:
    logits = torch.cat((torch.zeros(1, 9000), randn(2, 9000)))
    assert same_bits(filtered(OPS, logits, torch.full((3,), -1), torch.ones(3), torch.zeros(3)), logits)


def launches(rows: int) -> set[object]:
    """Return the launches of the ops for this number of rows.

    The logits have no data, so reading a value is an error.
    """
    empty = partial(torch.empty, device="meta")
    logits, ids, numbers = empty(rows, 1001), empty(rows, dtype=torch.int64), empty(rows)
    hidden, weight = empty(rows, HIDDEN), empty(1001, HIDDEN)
    with recording() as found:
        log_probs(logits, ids)
        sample(logits, ids, ids)
        filtered(OPS, logits, ids, numbers, numbers)
        next_tokens(hidden, weight, Wanted(ids, ids, numbers, numbers.bool(), ids, ids))
    assert len(found) == 8
    return set(found)


def test_one_compiled_form_for_any_number_of_rows_and_no_value_read_by_the_host(quick_lm_head: None) -> None:
    assert launches(1) == launches(16) == launches(256) and len(launches(1)) == 4
