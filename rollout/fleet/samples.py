"""What is there of one request: which samples were delivered, the parts of others, and the pieces that were shown.

Pure. Promises: the pieces of a sample that are shown are its own: one begins where the one before ended, or at 0, and
together they are the sample. All versions of weights that are accepted differ by no more than is allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

from trueroll.errors import StaleWeightsError, TruerollError

from ...engine.request import FinishReason, SampleDelta, SampleOutput
from .. import protocol
from ..client.requests import Request
from .asks import Ask, empty_sample, end_of_group

Reply: TypeAlias = protocol.FromWorker | SampleDelta | TruerollError


class Samples:
    """`may_repeat`: the caller may get a sample again, which then replaces the one before. `max_staleness`: by how many
    versions the weights of tokens may differ.

    `delivered`: how each sample that was delivered ended. `parts`: what others have, which a worker cut.
    """

    def __init__(self, request: Request, may_repeat: bool, max_staleness: int) -> None:
        self.delivered: dict[int, FinishReason] = {}
        self.parts: dict[int, SampleOutput] = {}
        self._request = request
        self._may_repeat = may_repeat
        self._max_staleness = max_staleness
        self._versions: tuple[int, int] | None = None
        # By sample: the ask whose tokens were shown, and how many. None: those of its part, or of the whole sample.
        self._shown: dict[int, tuple[Ask | None, int]] = {}

    def accept(self, spans: Sequence[tuple[int, int, int]], prior: SampleOutput | None) -> bool:
        """Note the versions of a sample, and of its part before. Return False, and note nothing, if they and those of
        what is there are too far apart.
        """
        versions = [version for version, _, _ in spans] + [*(self._versions or ())]
        versions += [span.version for span in prior.weight_versions] if prior else []
        if versions and max(versions) - min(versions) > self._max_staleness:
            return False
        self._versions = (min(versions), max(versions)) if versions else None
        return True

    def begin_anew(self) -> None:
        """Drop all that is there. Raise StaleWeightsError if the caller has a part of it, and may not get it again."""
        if not self._may_repeat and (self.delivered or self._shown):
            raise StaleWeightsError(
                f"request {self._request.id!r}: expected weights whose versions differ by at most max_staleness = "
                f"{self._max_staleness}, found others in a part of it, after a push; allow more, or use `generate`, "
                "which asks again",
                limit=self._max_staleness,
            )
        self.delivered.clear()
        self.parts.clear()
        self._versions = None
        self._shown.clear()

    def show(self, ask: Ask, piece: SampleDelta) -> list[Reply]:
        """A piece of a sample from the worker whose pieces are shown, as it is to be delivered. It is dropped if one
        before it was not shown.
        """
        own, start = piece.index, piece.start
        if own in ask.prior:
            start += len(ask.prior[own].token_ids)
        shown = ask if piece.start else None, start
        if own in self.delivered or (start and self._shown.get(own) != shown):
            return []
        self._shown[own] = ask, start + len(piece.token_ids)
        return [replace(piece, start=start)]

    def cut(self, ask: Ask | None, sample: protocol.FinishedSample) -> list[Reply]:
        """Keep what a sample has, so that it can go on. `ask`: None if its pieces are not shown."""
        self.parts[sample.index] = protocol.sample_output(sample)
        return [] if ask is None else self._show_whole(ask, sample)

    def deliver(self, ask: Ask | None, sample: protocol.FinishedSample) -> list[Reply]:
        """A sample, as it is to be delivered. `ask`: None if no worker answered with it."""
        pieces = self._show_whole(ask, sample)
        self.delivered[sample.index] = sample.finish_reason
        self.parts.pop(sample.index, None)
        return [*pieces, sample]

    def deliver_aborted(self, indices: Collection[int]) -> list[Reply]:
        """Samples that end with what they have, which may be nothing."""
        request, replies = self._request, []
        assert isinstance(request, protocol.Generate)
        for index in sorted(indices):
            part = self.parts.get(index) or empty_sample(request, index)
            replies += self.deliver(None, protocol.sample_message(request.id, part))
        return replies

    def end(self) -> protocol.Done:
        """The end of a group whose samples came from several asks."""
        assert isinstance(self._request, protocol.Generate)
        return end_of_group(self._request, dict(Counter(self.delivered.values())))

    def _show_whole(self, ask: Ask | None, sample: protocol.FinishedSample) -> list[Reply]:
        """All of a sample in one piece, where pieces are wanted and those that were shown are not its own."""
        if not (isinstance(self._request, protocol.Generate) and self._request.deltas):
            return []
        count = len(sample.token_ids) // 4
        is_shown = self._shown.get(sample.index, (ask, 0)) == (ask, count)
        self._shown[sample.index] = None, count
        return [] if is_shown else [protocol.sample_delta(protocol.delta_of(sample))]
