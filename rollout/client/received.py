"""What deltas have brought of a sample, until its caller takes it.

Promises: the pieces that are taken make the sample, to the bit. A piece begins where the one before ended; or at 0,
where what came before is void, since the worker had forgotten the request when it was asked for again after a lost
connection, and computed it anew. However late a piece is taken, no more than the sample is kept.
"""

from __future__ import annotations

from trueroll.errors import ProtocolError

from ...engine.request import SampleDelta
from ..protocol import Delta, FinishedSample, Growth, delta_of, sample_delta


class Received:
    """One sample. `put` and `finish` tell what the worker says, `take` gives what is new in it."""

    def __init__(self) -> None:
        self._growth: Growth | None = None
        self._num_taken = 0
        self._is_anew = False
        self._is_announced = False

    def put(self, delta: Delta) -> bool:
        """Adds a delta. Returns whether there is something to take that was not announced so yet. Raise ProtocolError
        if tokens before it are missing.
        """
        if self._growth is None or not self._growth.put(delta):
            self._begin(delta)
        was_announced, self._is_announced = self._is_announced, True
        return not was_announced

    def finish(self, sample: FinishedSample) -> SampleDelta | None:
        """The last piece of a sample that has ended; None if all was taken."""
        whole, growth = delta_of(sample), self._growth
        if growth is None or growth.num_tokens > whole.num_tokens or not growth.put(whole):
            self._begin(whole)
        return self.take()

    def take(self) -> SampleDelta | None:
        """What was not taken yet; None if there is nothing."""
        self._is_announced = False
        growth, start = self._growth, self._num_taken
        if growth is None or (growth.num_tokens == start and not self._is_anew):
            return None
        self._num_taken, self._is_anew = growth.num_tokens, False
        return sample_delta(growth.part(start))

    def _begin(self, delta: Delta) -> None:
        if delta.start:
            raise ProtocolError(
                f"deltas: expected the tokens of {delta.id!r}, sample {delta.index}, in order, found those from "
                f"{delta.start} on out of it; use the same release of trueroll on both sides"
            )
        self._growth = Growth(delta)
        self._is_anew, self._num_taken = self._num_taken > 0, 0
