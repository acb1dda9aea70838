"""What a step draws, as plain arrays on the host: the sampling parameters in the numbers that the ops take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kernels.contract import GREEDY, SAMPLE
from ..outputs.draw_records import as_signed, divisor
from ..request import SamplingParams


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
    """K draws, as the columns of `Wanted`: `integers` int64 [4, K] (rows, targets, seeds, positions), `temperatures`
    float32 [K], `raw` bool [K]. `special`: those that are not plain, by their place.
    """

    integers: np.ndarray
    temperatures: np.ndarray
    raw: np.ndarray
    special: Mapping[int, Draw]

    @classmethod
    def of(cls, each: Sequence[Draw]) -> Draws:
        """Some draws, of any kind."""
        rows, params, seeds, positions, _ = zip(*each, strict=True) if each else ((),) * 5
        targets = [GREEDY if p.is_greedy else SAMPLE for p in params]
        return cls(
            np.array([rows, targets, list(map(as_signed, seeds)), positions], np.int64),
            np.array(list(map(divisor, params)), np.float32),
            np.array([p.logprobs == "raw" for p in params], np.bool_),
            {i: draw for i, draw in enumerate(each) if not draw.is_plain},
        )

    def take(self, places: Sequence[int] | np.ndarray) -> Draws:
        """Those at some places."""
        found = {i: self.special[place] for i, place in enumerate(places) if place in self.special}
        return Draws(self.integers[:, places], self.temperatures[places], self.raw[places], found)

    def before(self, others: Draws) -> Draws:
        """These and then the others."""
        return Draws(
            np.concatenate((self.integers, others.integers), 1),
            np.concatenate((self.temperatures, others.temperatures)),
            np.concatenate((self.raw, others.raw)),
            {**self.special, **{len(self) + i: draw for i, draw in others.special.items()}},
        )

    def __len__(self) -> int:
        return len(self.raw)
