"""How the tokens of a sample are drawn, in the numbers that the ops take: a record that stays the same to its end."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, LOWEST_TEMPERATURE, SAMPLE
from ..request import Distribution, SamplingParams


class DrawRecord(NamedTuple):
    """`seed`, `target`, `temperature`, `raw`: those of `Wanted`. `plain`: neither filters nor `top_logprobs`.
    `first_free`: the first position for whose token none is banned. `end`: the first position beyond `max_tokens`.
    """

    seed: int
    target: int
    temperature: float
    raw: bool
    plain: bool
    first_free: int
    end: int

    @classmethod
    def of(cls, params: SamplingParams, seed: int, num_prompt_tokens: int, bans: bool) -> DrawRecord:
        """That of a sample with `max_tokens` and an unsigned 64-bit seed. `bans`: some tokens are banned at first."""
        assert params.max_tokens is not None
        return cls(
            as_signed(seed),
            GREEDY if params.is_greedy else SAMPLE,
            divisor(params),
            params.logprobs == "raw",
            not params.has_filters and params.top_logprobs is None,
            num_prompt_tokens + (params.min_tokens if bans else 0),
            num_prompt_tokens + params.max_tokens,
        )


DRAW = np.dtype(list(zip(DrawRecord._fields, "q q f ? ? q q".split(), strict=True)))
"""The same as an element of an array."""


def divisor(distribution: Distribution) -> float:
    """What logits are divided by, a float32: infinity for a temperature beyond it. Greedy rows keep theirs."""
    value = 1.0 if distribution.is_greedy else max(distribution.temperature, LOWEST_TEMPERATURE)
    # array("f") makes that infinity; torch refuses such a number, and numpy warns.
    return array("f", (value,))[0]


def as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed
