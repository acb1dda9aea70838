"""The scale and the soft cap of logits: every op of the head sees them, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueroll.kernels.contract import GREEDY, SAMPLE, Wanted
from trueroll.kernels.specs import HeadSpec

from .backends import SERVED, Served, params_of
from .inputs import randn, same_bits, stored

ROWS, VOCABULARY = 9, 4 * 512 + 37
CAPPED = HeadSpec(0.5, soft_cap=3.0)
every_implementation = pytest.mark.parametrize("served", params_of(SERVED), indirect=True)


def inputs(served: Served) -> tuple[Tensor, Tensor]:
    return randn(ROWS, 64, dtype=served.dtype), randn(VOCABULARY, 64, dtype=served.dtype, seed=1)


@every_implementation
def test_logits_are_scaled_and_capped(served: Served) -> None:
    hidden, dense = inputs(served)
    weight = stored(served.ops, dense)
    products = served.ops.lm_head(hidden, weight)
    assert same_bits(served.ops.lm_head(hidden, weight, HeadSpec(0.3)), products * 0.3)
    found, expected = served.ops.lm_head(hidden, weight, CAPPED), 3.0 * (products.double() * 0.5 / 3.0).tanh()
    assert (found - expected).abs().max() < 2e-6 and found.abs().max() <= 3.0
    assert (products.abs().amax(1) > 20.0).all(), "premise: the cap changes some logits of each row"


@every_implementation
def test_every_op_of_the_head_sees_the_same_logits(served: Served) -> None:
    hidden, dense = inputs(served)
    ops, weight = served.ops, stored(served.ops, dense)
    targets = torch.tensor([GREEDY, SAMPLE, 3, 2000, GREEDY, SAMPLE, SAMPLE, 17, 511])
    temperatures, raw, rows = torch.full((ROWS,), 0.7), torch.arange(ROWS) % 2 == 0, torch.arange(ROWS)
    wanted = Wanted(rows, targets, temperatures, raw, rows * 5 + 1, rows * 11)
    logits = ops.lm_head(hidden, weight, CAPPED)
    scaled = logits / temperatures[:, None]
    drawn = ops.sample(scaled, wanted.seeds, wanted.positions)
    tokens = torch.where(targets == GREEDY, logits.argmax(1), torch.where(targets == SAMPLE, drawn, targets))
    basis = torch.where(raw[:, None], logits, scaled)

    token_ids, logprobs, finite = ops.next_tokens(hidden, weight, wanted, CAPPED)
    assert torch.equal(token_ids, tokens) and finite.all()
    assert same_bits(logprobs, ops.log_probs(basis, tokens))
    assert not torch.equal(logprobs, ops.next_tokens(hidden, weight, wanted)[1]), "premise"

    token_ids, found, _ = ops.next_token_statistics(hidden, weight, wanted, 4, CAPPED)
    assert torch.equal(token_ids, tokens)
    assert all(map(same_bits, found, ops.token_statistics(basis, tokens, 4)))

    cut = ops.HEAD_SECTION
    parts = [stored(ops, part) for part in (dense[:cut], dense[cut:])]
    sections = [ops.head_sections(hidden, part, wanted, 4, i * cut, CAPPED) for i, part in enumerate(parts)]
    folded = ops.fold_sections([torch.cat(each, 1) for each in zip(*sections, strict=True)], wanted, 4)
    assert torch.equal(folded.token_ids, tokens) and same_bits(folded.logprobs, logprobs)
