"""Edits of logits against the processors of transformers, and against plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from trueroll.engine.request import Distribution
from trueroll.kernels.edits import EditedText, Editor, Rules, edit, edit_slopes
from trueroll.kernels.selection import select_backend

VOCAB_SIZE = 50
OPS = select_backend("reference", torch.device("cpu"), torch.float32).ops
LOGITS = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
PROMPT, SAMPLE = np.array([7, 3, 7, 9], np.int32), np.array([3, 11, 11, 20, 11], np.int32)
ENDING = (1, 2)
DISTRIBUTIONS = (
    dict(repetition_penalty=1.3),
    dict(frequency_penalty=0.4, presence_penalty=-0.7),
    dict(logit_bias={3: 2.5, 40: -100.0}),
    dict(allowed_token_ids=[3, 5, 7, 11, 31, 32, 33, 49]),
    dict(bad_words_token_ids=[[8], [11, 20], [20, 11, 5], [11, 11, 30]]),
    dict(min_tokens=3, stop_token_ids=[12]),
    dict(
        repetition_penalty=0.8,
        frequency_penalty=0.1,
        presence_penalty=1.5,
        logit_bias={11: 1.0, 12: -1.0},
        allowed_token_ids=range(2, 45),
        bad_words_token_ids=[[11, 20], [11, 11]],
        min_tokens=2,
    ),
)


def plain(logits: Sequence[float], given: Distribution, prompt: np.ndarray, sample: np.ndarray) -> list[float]:
    """Compute the edits of one row, token by token, each operation in float32."""
    f32, out = np.float32, list[float]()
    banned = {
        word[-1] for word in given.bad_words_token_ids if [*word[:-1]] == [*sample[len(sample) - len(word) + 1 :]]
    }
    banned |= {*ENDING, *given.stop_token_ids} if len(sample) < given.min_tokens else set()
    for token, logit in enumerate(logits):
        value, count = f32(logit) + f32(dict(given.logit_bias).get(token, 0.0)), [*sample].count(token)
        if token in {*prompt, *sample}:
            penalty = f32(given.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value = f32(value - f32(given.frequency_penalty) * f32(count))
        value = f32(value - f32(given.presence_penalty) * f32(count > 0))
        is_out = token in banned or (given.allowed_token_ids is not None and token not in given.allowed_token_ids)
        out.append(-math.inf if is_out else float(value))
    return out


def rules_of(given: Distribution) -> Rules:
    rules = Rules.of(given, sorted({*ENDING, *given.stop_token_ids}), VOCAB_SIZE)
    assert rules is not None
    return rules


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=lambda params: "-".join(params))
def test_edits_equal_plain_python(params: dict) -> None:
    given = Distribution(**params)
    rows = EditedText(rules_of(given), np.concatenate((PROMPT, SAMPLE, [0])), len(PROMPT)).rows(4, 4 + len(SAMPLE) + 1)
    edited = edit(OPS, LOGITS, dict(enumerate(rows)))
    expected = [plain(LOGITS[i].tolist(), given, PROMPT, SAMPLE[:i]) for i in range(len(rows))]
    assert torch.equal(edited.view(torch.int32), torch.tensor(expected).view(torch.int32))
    assert not torch.equal(edited, LOGITS), "premise"


def test_a_repetition_penalty_equals_that_of_transformers() -> None:
    editor = Editor(rules_of(Distribution(repetition_penalty=1.7)), PROMPT, SAMPLE)
    text: Any = torch.tensor([[*PROMPT, *SAMPLE]])
    logits: Any = LOGITS[:1]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(text, logits)
    assert torch.equal(edit(OPS, LOGITS[:1], {0: editor.row()}), expected)


def test_rows_without_edits_keep_their_bits_and_the_logits_stay() -> None:
    before, editor = LOGITS.clone(), Editor(rules_of(Distribution(logit_bias={3: 1.0})), PROMPT, SAMPLE)
    edited = edit(OPS, LOGITS, {2: editor.row()})
    assert torch.equal(LOGITS, before) and (edited != LOGITS).nonzero().tolist() == [[2, 3]]
    assert edit(OPS, LOGITS, {}) is LOGITS


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=lambda params: "-".join(params))
def test_an_editor_that_grows_equals_a_new_one(params: dict) -> None:
    """`rows` does not change the editor, and the prior tokens of a continued sample count as tokens of the sample."""
    rules = rules_of(Distribution(**params))
    growing = Editor(rules, PROMPT, SAMPLE[:0])
    ahead = growing.rows(SAMPLE.tolist())
    for i, token in enumerate(SAMPLE.tolist()):
        new = Editor(rules, PROMPT, SAMPLE[:i], num_new=i)
        each = [edit(OPS, LOGITS, {0: row}) for row in (growing.row(), new.row(), ahead[i])]
        assert torch.equal(each[0], each[1]) and torch.equal(each[0], each[2])
        growing.append(token)


def test_slopes_are_the_derivatives_of_the_edits() -> None:
    given = Distribution(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0, 9: -1.0})
    rows = {1: Editor(rules_of(given), PROMPT, SAMPLE).row()}
    logits = LOGITS.clone().requires_grad_()
    edit(OPS, logits, rows).sum().backward()
    assert logits.grad is not None and torch.equal(edit_slopes(LOGITS, rows), logits.grad)


def test_neutral_values_make_no_rules() -> None:
    neutral = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, min_tokens=0)
    assert Rules.of(Distribution(**neutral, bad_words_token_ids=[]), ENDING, VOCAB_SIZE) is None
    assert Rules.of(Distribution(min_tokens=3), (), VOCAB_SIZE) is None
