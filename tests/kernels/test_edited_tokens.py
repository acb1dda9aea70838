"""Edits and targets in the op that computes the logits, and records of filters: the bits of separate steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch

from trueroll.engine.running.sampler import packed_bits
from trueroll.kernels.contract import GREEDY, MASK_BITS, SAMPLE, EditingBackend
from trueroll.kernels.edits import ENTRY, RowEdits, edit, edits_packer

from .backends import SERVED, Served, params_of
from .inputs import randn, same_bits, stored
from .test_joined_ops import wanted

ROWS = 13


@pytest.fixture(params=params_of([served for served in SERVED if served[0].backend == "cpu"]))
def editing(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Every implementation that fuses edits, with every dtype that it supports."""
    implementation, dtype = request.param
    with implementation.chosen() as ops:
        yield Served(ops, dtype)


def changes(vocab_size: int, rows: list[int]) -> Iterator[tuple[int, RowEdits]]:
    """Yield edits of rows. Some rows have no entries, some have entries for all tokens, and some have masks."""
    random = np.random.default_rng(vocab_size)
    for i, row in enumerate(rows):
        size = [0, vocab_size, vocab_size // 3 + 1][i % 3]
        entries = np.zeros(size, ENTRY)
        entries["token_id"] = np.sort(random.permutation(vocab_size)[:size])
        entries["count"] = random.integers(0, 4, size) * (random.random(size) < 0.5)
        entries["occurs"] = (entries["count"] > 0) | (random.random(size) < 0.3)
        entries["bias"] = random.choice(np.array([0.0, 1.5, -3.25, -np.inf], np.float32), size, p=[0.6, 0.2, 0.1, 0.1])
        entries["bias"][entries["token_id"] == vocab_size - 1] = -np.inf
        penalties = np.array([(1.0, 0.0, 0.0), (1.3, 0.7, -0.2), (0.6, -0.1, 0.9)][i % 3], np.float32)
        words = -(-vocab_size // MASK_BITS)
        mask = random.integers(-(2**31), 2**31, words).astype(np.int32)
        mask[random.random(words) < 0.5] = -1
        mask[0] |= 1
        yield row, RowEdits(entries.tobytes(), penalties, mask if i % 2 else None)


@pytest.mark.parametrize("vocab_size", [17, 1001, pytest.param(49153, marks=pytest.mark.exhaustive)])
def test_edited_tokens_have_the_bits_of_separate_steps(editing: Served, vocab_size: int, two_threads: None) -> None:
    ops = cast(EditingBackend, editing.ops)
    weight = stored(ops, randn(vocab_size, 33, dtype=editing.dtype, seed=1))
    hidden = randn(ROWS, 33, dtype=editing.dtype)
    asked = wanted(torch.tensor([SAMPLE, GREEDY, vocab_size - 1, 0, vocab_size // 2] * ROWS)[:ROWS])
    rows = dict(changes(vocab_size, [1, 2, 0, 3, 7, 6, 9, 5, 12]))
    rows[9].mask = rows[2].mask
    random = np.random.default_rng(0)
    targets = {row: random.integers(0, vocab_size, size) for row, size in ((3, 200), (0, 1), (11, 130), (12, 7))}
    packed = edits_packer(rows, targets, ROWS, vocab_size)()
    num_masked = sum(each.mask is not None for each in rows.values())
    assert len(packed.masks) < num_masked == int((packed.mask_places >= 0).sum()), "premise: two rows share a mask"
    edits = ops.prepare_edits(packed)
    logits = edit(ops, ops.lm_head(hidden, weight), rows)
    scaled = logits / asked.temperatures[:, None]
    basis = torch.where(asked.raw[:, None], logits, scaled)
    tokens = torch.where(asked.targets == SAMPLE, ops.sample(scaled, asked.seeds, asked.positions), asked.targets)
    tokens = torch.where(asked.targets == GREEDY, scaled.argmax(-1), tokens)
    k = min(9, vocab_size)
    expected = ops.token_statistics(basis, tokens, k)
    finite = scaled.gather(1, tokens[:, None]).isfinite()[:, 0] & ~expected.logprobs.isnan()
    of_targets = [
        ops.log_probs(basis[row : row + 1], torch.from_numpy(targets[row])[None])[0] for row in sorted(targets)
    ]
    assert logits.isneginf().any() and not finite[2] and finite.any() and tokens[2] == vocab_size - 1, "premise"
    for each in (None, k):
        found, listed = ops.edited_tokens(hidden, weight, asked, edits, each)
        assert same_bits(found.token_ids, tokens) and same_bits(found.logprobs, expected.logprobs)
        assert same_bits(found.finite, finite) and same_bits(listed, torch.cat(of_targets))
        assert (found.statistics is None) == (each is None)
    for mine, theirs in zip(found.statistics or (), expected, strict=True):
        assert same_bits(mine, theirs)


def test_requests_without_edits_and_targets_have_the_bits_of_next_tokens(editing: Served) -> None:
    ops, weight = cast(EditingBackend, editing.ops), stored(editing.ops, randn(700, 64, dtype=editing.dtype, seed=1))
    hidden, asked = randn(4, 64, dtype=editing.dtype), wanted(torch.tensor([SAMPLE, GREEDY, 5, SAMPLE]))
    found, listed = ops.edited_tokens(hidden, weight, asked, ops.prepare_edits(edits_packer({}, {}, 4, 700)()), None)
    assert all(map(same_bits, found[:3], ops.next_tokens(hidden, weight, asked))) and not len(listed)


@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1003])
def test_recorded_filters_have_the_bits_of_separate_steps(editing: Served, vocab_size: int) -> None:
    """Some rows have equal logits, logits of -inf, a NaN or an infinity. Some filters drop nothing."""
    ops, rows = cast(EditingBackend, editing.ops), 24
    logits = (randn(rows, vocab_size) * 4).round(decimals=0) if vocab_size < 100 else randn(rows, vocab_size) * 4
    logits[3:6][randn(3, vocab_size, seed=1) > 0.5] = -torch.inf
    logits[6], logits[7, -1], logits[8, 0], logits[10] = -torch.inf, torch.nan, torch.inf, 1.0
    top_k = torch.tensor([-1, -1, 3, vocab_size])[torch.arange(rows) % 4]
    top_p, min_p = (
        torch.tensor([1.0, 0.9, 0.3])[torch.arange(rows) % 3],
        torch.tensor([0.0, 0.2])[torch.arange(rows) % 2],
    )
    filtered = ops.filter_logits(logits.clone(), top_k, top_p, min_p)
    found = logits.clone()
    bits, sums = ops.filter_recorded(found, top_k, top_p, min_p)
    assert same_bits(found, filtered) and torch.equal(bits, packed_bits(filtered))
    token_ids = filtered.argmax(-1)
    mass = ops.log_probs_of(filtered.gather(1, token_ids[:, None])[:, 0], sums)
    assert same_bits(mass, ops.log_probs(logits, token_ids))
    if vocab_size > 5:
        assert (
            filtered[10].isfinite().nonzero().flatten().tolist() in ([0, 1], [0, 1, 2])
            and not bits.any(1).all()
            and bits.any()
        ), "premise"
