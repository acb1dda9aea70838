"""The samples of one request: delivered samples, partial samples, and the deltas that were delivered to the caller.

Pure: no clock, no I/O. Guarantees: each delta of a sample begins where the previous delta ended, or at token 0. The
concatenated deltas equal the sample. The weight versions of all accepted samples differ by at most `max_staleness`.
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
    """The samples of one request.

    - `may_repeat`: whether a sample may be delivered again, to replace the sample that was delivered before
    - `max_staleness`: maximum difference between the weight versions that generated the request's tokens; 0 if the
      request sets `one_version`
    - `delivered`: finish reasons of the delivered samples, by index
    - `parts`: the unfinished samples of workers that are exiting, by sample index
    """

    def __init__(self, request: Request, may_repeat: bool, max_staleness: int) -> None:
        self.delivered: dict[int, FinishReason] = {}
        self.parts: dict[int, SampleOutput] = {}
        self._request = request
        self._may_repeat = may_repeat
        is_one = isinstance(request, protocol.Generate) and request.params.one_version
        self._max_staleness = 0 if is_one else max_staleness
        self._versions: tuple[int, int] | None = None
        # For each sample index, a pair: where the tokens that were delivered in deltas came from, and how many tokens
        # were delivered. The tokens came from an `Ask`; None means a stored partial sample or a whole sample.
        self._shown: dict[int, tuple[Ask | None, int]] = {}

    def accept(self, spans: Sequence[tuple[int, int, int]], prior: SampleOutput | None) -> bool:
        """Record the weight versions of a sample, including its part `prior`. `spans`: the `weight_versions` of the
        worker's reply. `prior`: the part of the sample that an earlier worker generated; None if there is no such part.
        If any two recorded versions would differ by more than `max_staleness`, record nothing and return False.
        """
        versions = [version for version, _, _ in spans] + [*(self._versions or ())]
        versions += [span.version for span in prior.weight_versions] if prior else []
        if versions and max(versions) - min(versions) > self._max_staleness:
            return False
        self._versions = (min(versions), max(versions)) if versions else None
        return True

    def begin_anew(self) -> None:
        """Drop all samples, so that the request is restarted. Without `may_repeat`, raise StaleWeightsError if the
        caller has already received tokens of the request.
        """
        if not self._may_repeat and (self.delivered or self._shown):
            raise StaleWeightsError(
                f"request {self._request.id!r}: after some of its tokens were returned, a push changed the weights by "
                f"more than max_staleness = {self._max_staleness} versions; raise max_staleness, or use `generate`, "
                "which restarts such requests",
                limit=self._max_staleness,
            )
        self.delivered.clear()
        self.parts.clear()
        self._versions = None
        self._shown.clear()

    def show(self, ask: Ask, piece: SampleDelta) -> list[Reply]:
        """Return the replies that deliver a delta of a sample; no replies if an earlier delta was not delivered. `ask`:
        the `Ask` from which the delta came.
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
        """Keep a partial sample, so that another worker can continue it. If some tokens were not delivered in deltas,
        return one delta with all tokens of the sample. `ask`: the `Ask` of the sample; None if deltas of this `Ask` are
        not delivered.
        """
        self.parts[sample.index] = protocol.sample_output(sample)
        return [] if ask is None else self._show_whole(ask, sample)

    def deliver(self, ask: Ask | None, sample: protocol.FinishedSample) -> list[Reply]:
        """Return the replies that deliver a finished sample. `ask`: None if the sample did not come from a worker."""
        pieces = self._show_whole(ask, sample)
        self.delivered[sample.index] = sample.finish_reason
        self.parts.pop(sample.index, None)
        return [*pieces, sample]

    def deliver_aborted(self, indices: Collection[int]) -> list[Reply]:
        """Return the replies that deliver aborted samples, with the tokens that have arrived (possibly no tokens)."""
        request, replies = self._request, []
        assert isinstance(request, protocol.Generate)
        for index in sorted(indices):
            part = self.parts.get(index) or empty_sample(request, index)
            replies += self.deliver(None, protocol.sample_message(request.id, part))
        return replies

    def end(self) -> protocol.Done:
        """Return the terminal reply for a group with samples from several `Ask` objects."""
        assert isinstance(self._request, protocol.Generate)
        return end_of_group(self._request, self.finish_reasons)

    @property
    def finish_reasons(self) -> dict[FinishReason, int]:
        """A map from finish reasons to numbers of delivered samples."""
        return dict(Counter(self.delivered.values()))

    def _show_whole(self, ask: Ask | None, sample: protocol.FinishedSample) -> list[Reply]:
        """If the caller requested deltas and not all tokens were delivered in deltas, return one delta with the whole
        sample.
        """
        if not (isinstance(self._request, protocol.Generate) and self._request.deltas):
            return []
        count = len(sample.token_ids) // 4
        is_shown = self._shown.get(sample.index, (ask, 0)) == (ask, count)
        self._shown[sample.index] = None, count
        return [] if is_shown else [protocol.sample_delta(protocol.delta_of(sample))]
