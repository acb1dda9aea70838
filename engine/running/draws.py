"""What a step draws, as plain arrays on the host: the sampling parameters in the numbers that the ops take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, LOWEST_TEMPERATURE, SAMPLE
from ..request import Distribution, SamplingParams


class Draw(NamedTuple):
    """One token to be drawn at absolute `position` from hidden state `row`.

    `banned` ids cannot be drawn; an `array("q")` of many costs least.
    """

    row: int
    params: SamplingParams
    seed: int
    position: int
    banned: Sequence[int] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is from the whole distribution, of which nothing else is recorded."""
        return self.is_of_whole and self.params.top_logprobs is None

    @property
    def is_of_whole(self) -> bool:
        """Whether it is from the whole distribution."""
        return not (self.banned or self.params.has_filters)


@dataclass(frozen=True, eq=False)
class Draws:
    """K draws, and the columns of `Wanted` for them: `integers` int64 [4, K] (rows, targets, seeds, positions),
    `temperatures` float32 [K], `raw` bool [K].
    """

    each: Sequence[Draw]
    integers: np.ndarray
    temperatures: np.ndarray
    raw: np.ndarray

    @classmethod
    def of(cls, each: Sequence[Draw]) -> Draws:
        """The columns of some draws."""
        rows, params, seeds, positions, _ = zip(*each, strict=True) if each else ((),) * 5
        targets = [GREEDY if p.is_greedy else SAMPLE for p in params]
        columns = np.array([rows, targets, list(map(_as_signed, seeds)), positions], np.int64)
        return cls(each, columns, divisors(params), np.array([p.logprobs == "raw" for p in params], np.bool_))

    def take(self, places: Sequence[int]) -> Draws:
        """Those at some places."""
        each = [self.each[i] for i in places]
        return Draws(each, self.integers[:, places], self.temperatures[places], self.raw[places])

    def __len__(self) -> int:
        return len(self.each)


def divisors(distributions: Iterable[Distribution]) -> np.ndarray:
    """What logits are divided by, float32: infinity for a temperature beyond it. Greedy rows keep theirs."""
    values = [1.0 if d.is_greedy else max(d.temperature, LOWEST_TEMPERATURE) for d in distributions]
    # array("f") makes that infinity; torch refuses such a number, and numpy warns.
    return np.asarray(array("f", values))


def _as_signed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed
