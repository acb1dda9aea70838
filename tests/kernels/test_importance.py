"""Importance weights and diagnostics against closed forms: two known distributions, enumerated exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.errors import AlignmentError
from trueroll.kernels.importance import Diagnostics, Level, diagnose, log_ratios, masked_weights, truncated_weights

# Rollout and trainer: distributions over three tokens. The second token depends on the first.
Q = torch.tensor([4, 3, 1], dtype=torch.float64) / 8
P = torch.tensor([1, 5, 2], dtype=torch.float64) / 8
Q2 = torch.tensor([[4, 3, 1], [2, 2, 4], [1, 6, 1]], dtype=torch.float64) / 8
P2 = torch.tensor([[5, 1, 2], [1, 3, 4], [2, 2, 4]], dtype=torch.float64) / 8
LEVELS: list[Level] = ["token", "sequence", "geometric"]
WEIGHTS: list[Callable[..., Tensor]] = [
    partial(truncated_weights, cap=2.0),
    partial(masked_weights, low=0.5, high=2.0),
]


def drawn() -> Tensor:
    """Return eight tokens with the frequencies of `Q`, so that a mean over the tokens is the expectation under `Q`."""
    return torch.arange(3).repeat_interleave((Q * 8).long())


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Return three arrays for all sequences of two tokens: the log-probs in the trainer and in the rollout, [9, 2]
    each, and the probability of each sequence in the rollout, [9].
    """
    first, second = torch.tensor([*product(range(3), repeat=2)]).T
    log_p, log_q = (torch.stack([one[first], two[first, second]], 1).log() for one, two in ((P, P2), (Q, Q2)))
    return log_p, log_q, log_q.sum(1).exp()


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 log-probs of trainer and rollout, [3, 40], and a mask with gaps that has no token in its second
    row.
    """
    generator = torch.Generator().manual_seed(0)
    sampled = -3 * torch.rand(3, 40, generator=generator)
    log_probs = sampled + 0.3 * torch.randn(3, 40, generator=generator)
    mask = torch.rand(3, 40, generator=generator) < 0.7
    mask[1] = False
    return log_probs, sampled, mask


def test_the_estimators_have_the_expectations_that_they_estimate() -> None:
    found = diagnose(P.log()[drawn()], Q.log()[drawn()], high=2.0)
    kl = (Q * (Q / P).log()).sum().item()
    assert found.k1 == pytest.approx(kl, rel=1e-14) and found.k3 == pytest.approx(kl, rel=1e-14)
    assert found.k2 == pytest.approx((Q * (P / Q).log().square() / 2).sum().item(), rel=1e-14)
    assert abs(found.k2 - kl) > 0.01  # k2 is biased
    perplexities = [torch.exp(-(Q * policy.log()).sum()).item() for policy in (P, Q)]
    assert found.perplexity_gap == pytest.approx(perplexities[0] - perplexities[1], rel=1e-13)
    assert found.clipped_share == 0.0 and found.largest_ratio == pytest.approx(2.0, rel=1e-15)


def test_a_small_difference_is_not_lost_to_rounding() -> None:
    """In float32, k3 and the perplexity gap would be noise, or 0."""
    sampled, delta = torch.tensor([-1.5, -2.0]), 2.0**-22
    found = diagnose(sampled + torch.tensor([delta, -delta]), sampled, high=2.0)
    assert found.k1 == 0.0 and found.k2 == delta**2 / 2
    assert found.k3 == pytest.approx(delta**2 / 2, rel=1e-6)
    gap = diagnose(sampled - delta, sampled, high=2.0).perplexity_gap
    assert gap == pytest.approx(math.exp(1.75) * delta, rel=1e-6)


@pytest.mark.parametrize("cap", [1.0, 1.5, 1e6])
def test_truncated_weights_have_their_closed_form(cap: float) -> None:
    weights = truncated_weights(P.log(), Q.log(), cap=cap)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), torch.minimum(P / Q, torch.tensor(cap)), rtol=1e-7, atol=0)
    # E_q[min(r, cap)] is sum(min(p, cap * q)), 1 where nothing is truncated.
    assert (Q * weights).sum().item() == pytest.approx(torch.minimum(P, cap * Q).sum().item(), rel=1e-7)


def test_masked_weights_leave_out_what_lies_beyond_the_bounds() -> None:
    assert (P / Q).tolist() == [0.25, 5 / 3, 2.0]
    kept = {(0.0, 1.9): [1, 1, 0], (0.3, 1.9): [0, 1, 0], (0.3, 2.1): [0, 1, 1], (0.0, 1.0): [1, 0, 0]}
    for (low, high), expected in kept.items():
        weights = masked_weights(P.log(), Q.log(), low=low, high=high)
        torch.testing.assert_close(weights.double(), P / Q * torch.tensor(expected), rtol=1e-7, atol=0)
        shares = diagnose(P.log()[drawn()], Q.log()[drawn()], low=low, high=high).clipped_share
        assert shares == (Q * (1 - torch.tensor(expected))).sum().item()


def test_ratios_at_the_bounds_are_kept() -> None:
    zero = torch.zeros(3)
    weights = masked_weights(zero, zero, low=1.0, high=1.0)
    assert weights.tolist() == [1.0] * 3 and diagnose(zero, zero, low=1.0, high=1.0).clipped_share == 0.0


def test_weights_of_sequences_are_unbiased_and_those_of_tokens_are_not() -> None:
    """For any function of a sequence, the weighted mean under the rollout equals the mean under the trainer."""
    log_p, log_q, probability = pairs()
    value = torch.arange(9.0, dtype=torch.float64).square()
    expected = (log_p.sum(1).exp() * value).sum().item()
    found = {}
    for level in LEVELS:
        weights = truncated_weights(log_p, log_q, level=level, cap=1e6)
        found[level] = (probability * weights[:, 1] * value).sum().item()
        assert level == "token" or torch.equal(weights[:, 0], weights[:, 1])
    assert found["sequence"] == pytest.approx(expected, rel=1e-6)
    assert all(abs(found[level] / expected - 1) > 0.01 for level in ("token", "geometric"))
    truncated = truncated_weights(log_p, log_q, level="sequence", cap=1.5)[:, 0]
    assert (probability * truncated).sum().item() == pytest.approx(
        torch.minimum(log_p.sum(1).exp(), 1.5 * probability).sum().item(), rel=1e-6
    )


def test_a_sequence_has_the_product_or_the_geometric_mean_of_its_ratios() -> None:
    log_probs, sampled, mask = ragged()
    for level in LEVELS:
        found = log_ratios(log_probs, sampled, mask, level=level)
        assert found.dtype == torch.float64 and not found[~mask].any()
        for row in (0, 2):
            own = [log_probs[row, i].item() - sampled[row, i].item() for i in mask[row].nonzero().flatten()]
            assert len(own) > 20
            one = {"sequence": math.fsum(own), "geometric": math.fsum(own) / len(own)}
            expected = own if level == "token" else [one[level]] * len(own)
            assert found[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weigh", WEIGHTS)
def test_neither_padding_nor_packing_changes_a_bit(weigh: Callable[..., Tensor], level: Level) -> None:
    log_probs, sampled, mask = ragged()
    padded = weigh(log_probs, sampled, mask, level=level)
    assert len(padded[mask].unique()) > 1 and not padded[~mask].any()

    wider = [torch.nn.functional.pad(x, (5, 8), value=False) for x in (log_probs, sampled, mask)]
    assert torch.equal(weigh(*wider, level=level), torch.nn.functional.pad(padded, (5, 8)))

    packed = [x.flatten() for x in (log_probs, sampled, mask)]
    assert torch.equal(weigh(*packed, lengths=[40, 40, 40], level=level), padded.flatten())

    # Only the tokens of the mask, as in a trainer that indexes every tensor with [mask].
    compact = weigh(log_probs[mask], sampled[mask], lengths=mask.sum(1).tolist(), level=level)
    assert torch.equal(compact, padded[mask])

    if level != "token":  # the premise: sequences have different ratios
        assert not torch.equal(compact, weigh(log_probs[mask], sampled[mask], lengths=[len(compact)], level=level))
    rows = [weigh(*(x[row : row + 1] for x in (log_probs, sampled, mask)), level=level) for row in (0, 2)]
    assert torch.equal(torch.cat(rows), padded[[0, 2]])


def test_diagnostics_are_of_the_tokens_of_the_mask() -> None:
    log_probs, sampled, mask = ragged()
    for level in LEVELS:
        found = diagnose(log_probs, sampled, mask, level=level, high=1.2)
        lengths = mask.sum(1).tolist()
        assert found == diagnose(log_probs[mask], sampled[mask], lengths=lengths, level=level, high=1.2)
        ratios = log_ratios(log_probs, sampled, mask, level=level).exp()[mask]
        assert found.largest_ratio == ratios.max().item()
        assert found.clipped_share == pytest.approx((ratios > 1.2).double().mean().item())
        assert level != "token" or 0.1 < found.clipped_share < 0.9


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_have_weights_of_exactly_1(level: Level) -> None:
    _, sampled, mask = ragged()
    for weigh in WEIGHTS:
        assert torch.equal(weigh(sampled, sampled, mask, level=level), mask.float())
    found = diagnose(sampled, sampled, mask, level=level, low=1.0, high=1.0)
    assert repr(found) == repr(Diagnostics(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))  # repr distinguishes -0.0 from 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_finite_however_far_apart_the_policies_are(dtype: torch.dtype) -> None:
    """Ratios of e^±100 exceed float32, and products of such ratios exceed float64."""
    sampled = torch.tensor([[-100.0] * 20, [0.0] * 20], dtype=dtype)
    log_probs = sampled.flip(0)
    assert torch.equal(
        log_ratios(log_probs, sampled, level="sequence"), torch.tensor([[2e3] * 20, [-2e3] * 20]).double()
    )
    for level in LEVELS:
        assert truncated_weights(log_probs, sampled, level=level, cap=2.0)[0].tolist() == [2.0] * 20
        assert masked_weights(log_probs, sampled, level=level, high=2.0)[0].tolist() == [0.0] * 20
        for weigh in WEIGHTS:
            assert weigh(log_probs, sampled, level=level)[1].max() <= 1e-43
    largest = torch.finfo(torch.float32).max
    assert truncated_weights(log_probs, sampled, cap=largest)[0].tolist() == [largest] * 20
    tokens = diagnose(log_probs, sampled, high=2.0)
    assert all(map(math.isfinite, tokens)) and tokens.k1 == 0.0 and tokens.k2 == 5000.0
    assert tokens.clipped_share == 0.5 and tokens.largest_ratio == pytest.approx(math.exp(100), rel=1e-12)
    assert diagnose(log_probs, sampled, level="sequence", high=2.0).largest_ratio == math.inf


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weigh", WEIGHTS)
def test_no_gradient_flows_through_weights(weigh: Callable[..., Tensor], level: Level) -> None:
    log_probs, sampled, mask = ragged()
    log_probs.requires_grad_()
    weights = weigh(log_probs, sampled, mask, level=level)
    assert not weights.requires_grad and not log_ratios(log_probs, sampled, mask, level=level).requires_grad
    (weights * log_probs).sum().backward()
    assert log_probs.grad is not None and torch.equal(log_probs.grad, weights)
    assert not weigh(sampled, log_probs, mask, level=level).requires_grad


def test_values_outside_the_mask_are_not_read() -> None:
    log_probs, sampled, mask = ragged()
    for level in LEVELS:
        expected = [weigh(log_probs, sampled, mask, level=level) for weigh in WEIGHTS]
        holes = [x.masked_fill(~mask, bad) for x, bad in ((log_probs, math.nan), (sampled, -math.inf))]
        found = [weigh(*holes, mask, level=level) for weigh in WEIGHTS]
        assert all(map(torch.equal, found, expected))
        assert diagnose(*holes, mask=mask, level=level, high=2.0) == diagnose(
            log_probs, sampled, mask, level=level, high=2.0
        )
    as_integers = [weigh(log_probs, sampled, mask.long()) for weigh in WEIGHTS]
    assert all(map(torch.equal, as_integers, [weigh(log_probs, sampled, mask) for weigh in WEIGHTS]))


@pytest.mark.parametrize("call", [*WEIGHTS, log_ratios, partial(diagnose, high=2.0)])
def test_a_mask_without_a_token_is_an_error(call: Callable[..., Any]) -> None:
    log_probs, sampled, mask = ragged()
    for level in LEVELS:
        with pytest.raises(AlignmentError, match="mask selects no token"):
            call(log_probs, sampled, torch.zeros_like(mask), level=level)
    with pytest.raises(AlignmentError, match="mask selects no token"):
        call(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sampled=torch.zeros(2, 3)), r"sampled must have shape \[2, 4\] like log_probs .got \[2, 3\]"),
        (dict(mask=torch.ones(4)), r"mask must have shape \[2, 4\] like log_probs .got \[4\]"),
        (dict(sampled=torch.full((2, 4), math.nan)), "has NaN or infinity within the mask"),
        (dict(log_probs=torch.full((2, 4), -math.inf)), "has NaN or infinity within the mask"),
        (dict(level="sentence"), "level must be token, sequence or geometric .got 'sentence'"),
        (dict(level="sequence", lengths=[4, 4]), r"lengths must .* .got \[4, 4\] with sum 8 for shape \[2, 4\]"),
        (dict(low=1.5), "low must be from 0 to 1 .got 1.5"),
        (dict(low=-0.5), "low must be from 0 to 1 .got -0.5"),
        (dict(high=0.5), "high must be from 1 to 3.403e.38 .got 0.5"),
        (dict(high=math.inf), "high must .* .got inf"),
        (dict(high=math.nan), "high must .* .got nan"),
    ],
)
def test_invalid_arguments_are_errors(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(log_probs=torch.zeros(2, 4), sampled=torch.zeros(2, 4), high=2.0)
    for call in (masked_weights, diagnose):
        with pytest.raises(AlignmentError, match=message):
            call(**(given | changes))


@pytest.mark.parametrize("lengths", [None, [3, 4], [9, -1], []])
def test_packed_sequences_need_their_lengths(lengths: Sequence[int] | None) -> None:
    zero = torch.zeros(8)
    with pytest.raises(AlignmentError, match="lengths must"):
        truncated_weights(zero, zero, lengths=lengths, level="sequence", cap=2.0)


def test_a_cap_below_1_is_an_error() -> None:
    with pytest.raises(AlignmentError, match="cap must be from 1 to 3.403e.38 .got 0.99"):
        truncated_weights(torch.zeros(1), torch.zeros(1), cap=0.99)
