"""How evenly a model's experts are used, from what a worker tells of the tokens that each was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trueroll.errors import ProtocolError


def expert_tokens(info: Mapping[str, Any], stats: Mapping[str, Any]) -> np.ndarray:
    """Tokens that each expert was given so far, int64 [layers with experts, experts]. `info`, `stats`: `engine` of
    `Health` and of `Stats`. Raises ProtocolError if there are not so many numbers.
    """
    shape = info["expert_layers"], info["num_experts"]
    if len(stats["expert_tokens"]) != 8 * shape[0] * shape[1]:
        raise ProtocolError(
            f"expert_tokens: expected 8 bytes for each of {shape[0]} x {shape[1]} experts, found "
            f"{len(stats['expert_tokens'])}; use the same release of trueroll on both sides"
        )
    return np.frombuffer(stats["expert_tokens"], "<i8").reshape(shape)


def imbalance(tokens: np.ndarray) -> np.ndarray:
    """For each layer the tokens of its busiest expert over the mean of all: float64 [layers]. From 1, where all have as
    many, to the number of experts over those of a token; 1 for no tokens.
    """
    mean = tokens.mean(1)
    return np.where(mean > 0, tokens.max(1) / np.maximum(mean, 1e-9), 1.0)
