"""What a step draws, as plain arrays on the host: the sampling parameters in the numbers that the ops take.

Whoever takes a step's tokens has a range of the rows of a chunk, one row or several, each with its own position. Here
the ranges lie one behind the other, row by row: what a row draws depends on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_LANE = -1
"""Of a draw whose token the host sees before another one follows it."""


@dataclass(frozen=True, eq=False)
class Draws:
    """R tokens to be drawn, each from a row of the hidden states. `rows`, `positions`: int64 [R], the row, and the
    absolute position of the token. `lanes`: int64 [R], the lane whose state on the device (`lane_state`) takes the
    token, no lane twice, or NO_LANE. `records`: `DRAW` [R]. `banned`: ids that cannot be drawn, of some of the R; an
    `array("q")` of many costs least.
    """

    rows: np.ndarray
    positions: np.ndarray
    lanes: np.ndarray
    records: np.ndarray
    banned: Mapping[int, Sequence[int]]

    @cached_property
    def is_cut(self) -> np.ndarray:
        """Which are not from the whole distribution, bool [R]: some tokens are banned, or filters may drop some."""
        is_cut = self.records["has_filters"].copy()
        is_cut[list(self.banned)] = True
        return is_cut

    @cached_property
    def is_plain(self) -> np.ndarray:
        """Which are from the whole distribution, of which nothing else is recorded, bool [R]."""
        return ~self.is_cut & (self.records["num_tops"] < 0)

    @cached_property
    def are_plain(self) -> bool:
        """Whether all are."""
        return bool(self.is_plain.all())

    def take(self, places: np.ndarray) -> Draws:
        """Those at some places."""
        banned = {i: self.banned[place] for i, place in enumerate(places.tolist()) if place in self.banned}
        return Draws(self.rows[places], self.positions[places], self.lanes[places], self.records[places], banned)

    def __len__(self) -> int:
        return len(self.rows)
