"""What tests require of the samples that a session exports over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueroll.rollout import RolloutClient

Sample = dict[str, Any]


def bits(logprobs: Sequence[float]) -> bytes:
    return np.array(logprobs, np.float64).tobytes()


def assert_same_bits(sample: Sample, other: Sample) -> None:
    assert sample["token_ids"] == other["token_ids"] and sample["mask"] == other["mask"]
    assert bits(sample["logprobs"]) == bits(other["logprobs"])


def assert_scored(sample: Sample, client: RolloutClient) -> None:
    """Check that the worker computes the same log-probs for the sample's tokens as one sequence, and that the mask has
    the tokens of the turns.
    """
    [score] = client.score([sample["token_ids"]], 1.0)
    mask = np.array(sample["mask"]) == 1
    expected = np.concatenate((np.zeros(1, np.float32), score.logprobs)).astype(np.float64)
    assert bits(sample["logprobs"]) == np.where(mask, expected, 0.0).tobytes()
    drawn = np.zeros_like(mask)
    for turn in sample["turns"]:
        drawn[turn["start"] : turn["end"]] = True
    assert (drawn == mask).all()


def assert_continued(sample: Sample, answers: Sequence[Any]) -> None:
    """Check that each prompt begins with the previous prompt and its answer, and that the sample has the tokens and
    log-probs of all answers. `answers`: chat completions with token ids and log-probs.
    """
    assert len(answers) == len(sample["turns"]) > 1
    for answer, turn in zip(answers, sample["turns"], strict=True):
        [choice] = answer.choices
        start, end = turn["start"], turn["end"]
        assert sample["token_ids"][:start] == answer.prompt_token_ids
        assert sample["token_ids"][start:end] == choice.token_ids
        assert bits([token.logprob for token in choice.logprobs.content]) == bits(sample["logprobs"][start:end])
