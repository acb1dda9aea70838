"""How the tokens of a sample are drawn, in the numbers that the ops take: a record that stays the same to its end."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, LOWEST_TEMPERATURE, SAMPLE
from ..request import Distribution, SamplingParams

BASES = ("processed", "temperature", "raw")
"""What log-probs can be of, in the order of the numbers of `DrawRecord.basis`."""


class DrawRecord(NamedTuple):
    """`seed`, `target`, `temperature`: those of `Wanted`. `has_filters`, `top_k`, `top_p`, `min_p`: the filters of
    `Distribution`. `basis`: the place in BASES of what log-probs are of. `num_tops`: how many of the most probable
    tokens are listed beside the entropy, -1 if neither is recorded. `first_free`: the first position where no token is
    banned. `end`: the first position beyond `max_tokens`.
    """

    seed: int = 0
    target: int = SAMPLE
    temperature: float = 1.0
    has_filters: bool = False
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    basis: int = 0
    num_tops: int = -1
    first_free: int = 0
    end: int = 2**62

    @classmethod
    def of(cls, params: SamplingParams, seed: int, num_prompt_tokens: int, bans: bool) -> DrawRecord:
        """That of a sample with `max_tokens` and an unsigned 64-bit seed. `bans`: some tokens are banned at first."""
        assert params.max_tokens is not None
        return cls(
            as_signed(seed),
            GREEDY if params.is_greedy else SAMPLE,
            divisor(params),
            params.has_filters,
            params.top_k,
            params.top_p,
            params.min_p,
            BASES.index(params.logprobs or "processed"),
            -1 if params.top_logprobs is None else params.top_logprobs,
            num_prompt_tokens + (params.min_tokens if bans else 0),
            num_prompt_tokens + params.max_tokens,
        )

    @classmethod
    def of_scores(cls, distribution: Distribution) -> DrawRecord:
        """What counts for tokens that are given: the distribution."""
        filters = distribution.has_filters, distribution.top_k, distribution.top_p, distribution.min_p
        return cls(0, SAMPLE, divisor(distribution), *filters)


DRAW = np.dtype(list(zip(DrawRecord._fields, "q q f ? q f f b q q q".split(), strict=True)), align=True)
"""The same as an element of an array."""


def divisor(distribution: Distribution) -> float:
    """What logits are divided by, a float32: infinity for a temperature beyond it. Greedy rows keep theirs."""
    value = 1.0 if distribution.is_greedy else max(distribution.temperature, LOWEST_TEMPERATURE)
    # array("f") makes that infinity; torch refuses such a number, and numpy warns.
    return array("f", (value,))[0]


def as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed
