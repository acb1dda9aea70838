"""Requests that the engine was not given yet: since the worker is not ready, or serves older weights than they demand.

Owns which of their samples have ended meanwhile. Does not own their ledger entries, nor the engine that it gives them
to. Promises: they leave in the order in which they came, those that wait for weights apart; to look at the others costs
nothing for those; what was aborted here is computed nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trueroll.errors import StaleWeightsError

from ...engine.request import GenerateRequest, Output, Request, SampleOutput, ScoreOutput, derive_seed
from ..protocol import Generate, GetScores


@dataclass
class Waiting:
    """A request and the message that brought it. `ended`: samples that were aborted; 0 is a score."""

    request: Request
    message: Generate | GetScores
    ended: set[int] = field(default_factory=set)

    def abort(self, index: int | None) -> list[Output]:
        """End sample `index`, or all that are left; empty if there is none of the kind."""
        if not isinstance(self.request, GenerateRequest):
            if index is not None or self.ended:
                return []
            self.ended.add(0)
            return [_empty_scores(self.request.id)]
        left = [i for i in range(self.request.params.n) if i not in self.ended]
        chosen = [i for i in left if index in (None, i)]
        self.ended.update(chosen)
        return [_empty_sample(self.request, i) for i in chosen]


class WaitingRoom:
    """Requests by key."""

    def __init__(self) -> None:
        self._due: dict[str, Waiting] = {}
        self._early: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._early)

    def __contains__(self, key: str) -> bool:
        return key in self._due or key in self._early

    def add(self, key: str, waiting: Waiting) -> None:
        """One more, to be looked at next."""
        self._due[key] = waiting

    def get(self, key: str) -> Waiting | None:
        return self._due.get(key) or self._early.get(key)

    def early(self, key: str) -> Waiting | None:
        """The request, if it waits for weights."""
        return self._early.get(key)

    def discard(self, key: str) -> None:
        """It has ended, or will not be served."""
        self._due.pop(key, None)
        self._early.pop(key, None)

    def look_at_all(self) -> None:
        """Other weights may be served now: `take_due` looks at those again that waited for some."""
        self._due, self._early = self._early | self._due, {}

    def take_due(self, version: int | None) -> tuple[dict[str, Waiting], dict[str, StaleWeightsError]]:
        """Those that can begin with weights `version`, and those that are refused for it.

        `version` None: it is not known yet, so that whoever demands one waits.
        """
        due, self._due = self._due, {}
        ready: dict[str, Waiting] = {}
        refused: dict[str, StaleWeightsError] = {}
        for key, waiting in due.items():
            if serves(waiting.message, version):
                ready[key] = waiting
            elif version is None or waiting.message.wait_for_weights:
                self._early[key] = waiting
            else:
                refused[key] = too_old(waiting.message, version)
        return ready, refused

    def take_early(self) -> list[Waiting]:
        """Those that wait for weights, which will not come."""
        early, self._early = self._early, {}
        return list(early.values())


def serves(message: Generate | GetScores, version: int | None) -> bool:
    """Whether weights `version` are as new as a request demands."""
    demanded = message.min_weight_version
    return demanded is None or (version is not None and version >= demanded)


def too_old(message: Generate | GetScores, version: int) -> StaleWeightsError:
    """What to tell whoever demands newer weights than those of `version`."""
    return StaleWeightsError(
        f"min_weight_version: expected weights of version {message.min_weight_version} or later, found version "
        f"{version} served, as by a worker that was started anew; push again, or ask with wait_for_weights",
        field="min_weight_version",
        value=message.min_weight_version,
        limit=version,
    )


def _empty_sample(request: GenerateRequest, index: int) -> SampleOutput:
    assert request.params.seed is not None
    seed = derive_seed(request.params.seed, index)
    return SampleOutput.empty(request.id, index, seed, request.params)


def _empty_scores(id: str) -> ScoreOutput:
    return ScoreOutput(id, np.empty(0, np.float32), "abort", ())
