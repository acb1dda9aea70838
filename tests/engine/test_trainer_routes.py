"""Mixtures of experts: a trainer's aligned model computes the bits of the rollout's log-probs and finds its routes; a
plain one that replays them comes closer to its log-probs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueroll.kernels.training import align, token_experts

from .test_trainer_log_probs import (
    BATCHES,
    DTYPES,
    Rollout,
    count_differences,
    packed,
    roll_out,
    trainer_model,
)

LENGTHS = (80, 40, 5)


def sequences(rollout: Rollout) -> list[Tensor]:
    return [torch.tensor([*prompt, *sample.token_ids]).long() for prompt, sample in rollout]


def recorded(rollout: Rollout) -> Tensor:
    """The routes of all samples in one row, with one of zeros for the last token of each."""
    parts = [torch.from_numpy(sample.routed_experts) for _, sample in rollout if sample.routed_experts is not None]
    return torch.cat([torch.cat((part, torch.zeros_like(part[:1]))) for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trainer_computes_the_bits_and_finds_the_routes_of_the_rollout(
    mixture_model: Path, dtype: str, backend: str
) -> None:
    rollout = roll_out(mixture_model, LENGTHS, routes=True, dtype=dtype, backend=backend)
    model = trainer_model(mixture_model, dtype)
    align(model, backend)
    assert [count_differences(batch(model, rollout), rollout) for batch in BATCHES] == [0, 0, 0]
    rows, routes = sequences(rollout), recorded(rollout)
    lengths = [len(row) for row in rows]
    assert count_differences(packed(model, rollout, routes), rollout) == 0
    found = token_experts(model, torch.cat(rows), lengths=lengths)
    assert len(found.unique()) == 8, "premise: to all experts"
    for ours, theirs in zip(found.split(lengths), routes.int().split(lengths), strict=True):
        assert ours[:-1].equal(theirs[:-1])
