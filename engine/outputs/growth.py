"""The samples that have grown since their deltas were told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..request import SampleDelta
from .open_requests import OpenSample


class Grown:
    """Samples whose deltas were asked for."""

    def __init__(self) -> None:
        self._samples: list[OpenSample] = []

    def follow(self, samples: Iterable[OpenSample]) -> None:
        """Tell how these grow from now on, first of all what they have."""
        for sample in samples:
            if sample.num_told is None:
                sample.num_told = 0
                self._samples += [sample] * bool(sample.token_ids)

    def note(self, sample: OpenSample) -> None:
        """A sample that is followed has got a token."""
        self._samples.append(sample)

    def take(self, is_open: Callable[[OpenSample], bool]) -> list[SampleDelta]:
        """What the open ones have got since this was called last."""
        grown, self._samples = self._samples, []
        return [sample.take_delta() for sample in dict.fromkeys(grown) if is_open(sample)]
