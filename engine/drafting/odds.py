"""How often guesses were right, learned while samples are generated."""

from __future__ import annotations

_DECAY, _PRIOR_WEIGHT = 0.95, 3.0


class Odds:
    """How often guesses of different kinds were right. `count`: the number of kinds, which are numbered from 0.

    Estimates start at the estimate of `prior`, or at 0.5 without a prior. `prior` also records every guess.
    """

    def __init__(self, count: int, prior: Odds | None = None) -> None:
        self._prior = prior
        self._right, self._tried = [0.0] * count, [0.0] * count

    def chance(self, kind: int) -> float:
        """Return the estimated probability that a guess is right."""
        prior = 0.5 if self._prior is None else self._prior.chance(kind)
        return (self._right[kind] + _PRIOR_WEIGHT * prior) / (self._tried[kind] + _PRIOR_WEIGHT)

    def record(self, kind: int, is_right: bool) -> None:
        """Record whether a guess was right. Earlier guesses count less than later guesses."""
        self._right[kind] = _DECAY * self._right[kind] + is_right
        self._tried[kind] = _DECAY * self._tried[kind] + 1
        if self._prior is not None:
            self._prior.record(kind, is_right)
