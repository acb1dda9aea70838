"""The open requests: what each has so far, which sequence computes it, and what of it was told in deltas.

Owns every accepted request from its admission to its one output per sample, or one for a score. Does not own sequences,
nor the reasons for which a sample ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from typing import TypeAlias

import numpy as np

from trueroll.errors import UnknownRequestError

from .outputs.growth import Grown
from .outputs.open_requests import Commit, OpenSample, OpenScore
from .outputs.routes import RouteFormat
from .request import FinishReason, SampleOutput, ScoreOutput
from .scheduling.sequence import Sequence

Entry: TypeAlias = OpenSample | OpenScore


class Ledger:
    """Open samples and scores, each with its sequence. `routes`: how chosen experts are recorded, if the model has
    some. `generated_tokens`, `finished`: tokens of finished samples, and how many ended for each reason.
    """

    def __init__(self, routes: RouteFormat | None) -> None:
        self.routes = routes
        self.grown = Grown()
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self._open: dict[str, dict[int, OpenSample] | OpenScore] = {}
        self._sequences: dict[Entry, Sequence] = {}

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __iter__(self) -> Iterator[str]:
        """The ids of open requests."""
        return iter(self._open)

    def is_open(self, entry: Entry) -> bool:
        """Whether a sample or a score is not finished yet."""
        return entry in self._sequences

    def sequence_of(self, entry: Entry) -> Sequence:
        """The one that computes it."""
        return self._sequences[entry]

    def open_samples(self, samples: AnySequence[OpenSample], sequence: Sequence) -> None:
        """The samples of one request, whose prompt this sequence computes."""
        self._open[samples[0].request.id] = dict(enumerate(samples))
        self._sequences |= dict.fromkeys(samples, sequence)

    def open_score(self, score: OpenScore, sequence: Sequence) -> None:
        """A score, which this sequence computes."""
        self._open[score.request.id] = score
        self._sequences[score] = sequence

    def move(self, sample: OpenSample, sequence: Sequence) -> None:
        """From now on another sequence computes the sample."""
        self._sequences[sample] = sequence

    def find(self, request_id: str, index: int | None) -> list[Entry]:
        """The score, the sample of this index, or all unfinished ones. Raise UnknownRequestError if there is none."""
        entry = self._open.get(request_id)
        if isinstance(entry, OpenScore) and index is None:
            return [entry]
        if not isinstance(entry, dict) or (index is not None and index not in entry):
            what = f"request {request_id!r}" + ("" if index is None else f", sample {index}")
            raise UnknownRequestError(f"abort: expected a running request or sample, found none for {what}")
        return [*entry.values()] if index is None else [entry[index]]

    def samples_of(self, request_id: str) -> list[OpenSample]:
        """The unfinished samples of a request. Raise UnknownRequestError if there are none."""
        samples = self._open.get(request_id)
        if not isinstance(samples, dict):
            raise UnknownRequestError(f"stream: expected a running request for samples, found none of {request_id!r}")
        return [*samples.values()]

    def finish_sample(self, sample: OpenSample, reason: FinishReason) -> SampleOutput:
        """Its output; it is open no longer."""
        group, sequence = self._open[sample.request.id], self._sequences.pop(sample)
        assert isinstance(group, dict)
        del group[sample.index]
        if not group:
            del self._open[sample.request.id]
        self.finished[reason] += 1
        self.generated_tokens += len(sample.token_ids)
        return sample.output(reason, sequence.num_cached_tokens or 0, self._routed_experts(sequence, sample.num_fed))

    def finish_score(self, score: OpenScore, reason: FinishReason, commit: Commit) -> ScoreOutput:
        """Its output; it is open no longer. `commit`: the weights that computed all of it."""
        sequence = self._sequences.pop(score)
        del self._open[score.request.id]
        num_fed = sequence.num_tokens if reason == "stop" else 0
        return score.output(reason, commit.version, self._routed_experts(sequence, num_fed))

    @property
    def route_bytes(self) -> int:
        """The bytes of the records of routed experts of open requests."""
        records = [sequence.routes for sequence in set(self._sequences.values()) if sequence.routes is not None]
        shared = {id(routes.shared): len(routes.shared) for routes in records}
        return sum(shared.values()) + sum(len(routes.own) for routes in records)

    def _routed_experts(self, sequence: Sequence, num_fed: int) -> np.ndarray | None:
        """Those of its first tokens, if somebody asked for them and there are some."""
        if self.routes is None or sequence.routes is None or not num_fed:
            return None
        return self.routes.array(sequence.routes.rows(0, num_fed))
