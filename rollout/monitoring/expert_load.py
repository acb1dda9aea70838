"""The load balance of a model's experts, computed from the worker's token counts per expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trueroll.errors import ProtocolError


def expert_tokens(info: Mapping[str, Any], stats: Mapping[str, Any]) -> np.ndarray:
    """Return an int64 array [layers with experts, experts]: the number of tokens that each expert has processed.

    `info`: the field `engine` of `Health`. `stats`: the field `engine` of `Stats`. Raise ProtocolError if the sizes of
    `info` and `stats` do not match.
    """
    shape = info["expert_layers"], info["num_experts"]
    if len(stats["expert_tokens"]) != 8 * shape[0] * shape[1]:
        raise ProtocolError(
            f"expert_tokens: must have 8 bytes for each of {shape[1]} experts in {shape[0]} layers (got "
            f"{len(stats['expert_tokens'])} bytes); use the same release of trueroll on both sides"
        )
    return np.frombuffer(stats["expert_tokens"], "<i8").reshape(shape)


def imbalance(tokens: np.ndarray) -> np.ndarray:
    """Return a float64 array [layers]. Each element is the number of tokens of the layer's busiest expert, divided by
    the mean number of tokens per expert in the layer.

    The minimum, 1, means that the layer is balanced or has no tokens. The maximum is the total number of experts
    divided by the number of experts that process each token.
    """
    mean = tokens.mean(1)
    return np.where(mean > 0, tokens.max(1) / np.maximum(mean, 1e-9), 1.0)
