"""The state of one request of a fleet's client, across all workers that run the request. Pure: no clock, no I/O.

Owns: which samples are delivered or missing, the content of the next `Ask`, and the terminal reply of the request. Does
not own: the choice of a worker, or when an `Ask` is sent (`FleetRequest`).

Guarantees:

- Each sample is delivered once, unless the request is restarted. The tokens of a sample do not depend on the worker.
- The request gets exactly one terminal reply.
- If a worker is lost before any sample was delivered, the whole request is sent again, with the same id, to another
  worker. If a worker is lost after a sample was delivered, another worker gets a separate request for each missing
  sample.
- If a worker exits in the middle of a sample, another worker continues the sample.
- The weight versions of all tokens differ by at most `max_staleness`. If a push would make the versions differ by more
  than `max_staleness`, the request is restarted. If the caller has already received a part of the request's samples and
  must not get samples again (`may_repeat` is False), the request fails instead of being restarted.
- Replies to an `Ask` that is no longer needed are ignored.
"""

from __future__ import annotations

from dataclasses import replace

from trueroll.errors import StaleWeightsError, TruerollError

from ...engine.request import SampleDelta
from .. import protocol
from ..client.continuation import joined
from ..client.requests import Request
from .asks import Ask, aborted_scores, ask_for_all, ask_for_missing
from .samples import Reply, Samples
from .setbacks import Setbacks


class GroupState:
    """The state of one request.

    `may_repeat`, `max_staleness`: see `Samples`. `n`: number of samples, 1 for a scoring request. `is_over`: whether
    the request has ended. `setbacks`: the workers that were lost while they ran the request, and the workers that
    refused the request.

    Methods return replies, which the caller must deliver in the returned order.
    """

    def __init__(self, request: Request, *, may_repeat: bool, max_staleness: int) -> None:
        self.request = request
        self.n = request.params.n if isinstance(request, protocol.Generate) else 1
        self.is_over = False
        self.setbacks = Setbacks()
        self._samples = Samples(request, may_repeat, max_staleness)
        self._asks: list[Ask] = []  # only deltas for the first `Ask` are delivered
        self._to_end: set[int] = set()  # the indices of samples that the caller aborted

    @property
    def num_to_ask(self) -> int:
        """Number of samples that are not delivered yet and were not aborted by the caller."""
        return self.n - len(self._samples.delivered.keys() | self._to_end)

    def ask(self) -> Ask:
        """Return the `Ask` for the next worker. The `Ask` is for the whole request if no sample was delivered or
        aborted, and no partial sample was kept. In all other cases, the `Ask` is for the samples that are neither
        delivered nor aborted.
        """
        done, parts = self._samples.delivered.keys() | self._to_end, self._samples.parts
        if isinstance(self.request, protocol.Generate) and (done or parts):
            missing = [index for index in range(self.n) if index not in done]
            ask = ask_for_missing(self.request, missing, parts)
        else:
            ask = ask_for_all(self.request)
        self._asks.append(ask)
        return ask

    def wants(self, ask: Ask) -> bool:
        """Return whether replies to the `Ask` are still needed. Return False if the `Ask` or the request has ended, or
        if the request was restarted after the `Ask` was sent.
        """
        return ask in self._asks

    def end_ask(self, ask: Ask, worker: str, num_looks: int) -> None:
        """Record that a worker will send no more replies to an `Ask`. `worker`: the worker's key. `num_looks`: number
        of health checks of this worker so far.
        """
        if ask in self._asks:
            self._asks.remove(ask)
        self.setbacks.num_losses += ask.is_lost
        self.setbacks.note(worker, num_looks, ask.refusal)

    def abort(self, index: int | None) -> set[int]:
        """Abort sample `index`; None aborts all samples. Return the indices of the newly aborted samples."""
        named = range(self.n) if index is None else {index}
        ending = {i for i in named if i < self.n} - self._samples.delivered.keys() - self._to_end
        self._to_end |= ending
        return ending

    def settle(self) -> list[Reply]:
        """If no `Ask` is pending, return the replies that need no worker: aborted samples, the terminal reply of a
        complete group, or an error if too many workers were lost while they ran the request.
        """
        if self.is_over or self._asks:
            return []
        replies: list[Reply] = []
        if aborted := self._to_end - self._samples.delivered.keys():
            if not isinstance(self.request, protocol.Generate):
                return self._finish(aborted_scores(self.request))
            replies = self._samples.deliver_aborted(aborted)
        if len(self._samples.delivered) == self.n:
            return replies + self._finish(self._samples.end())
        if error := self.setbacks.too_many_losses(self.request.id):
            return replies + self._finish(error)
        return replies

    def is_cut(self, index: int | None, reply: Reply) -> bool:
        """Return whether the reply is a sample that was aborted, but not by the caller. A worker that is about to exit
        may abort samples. `index`: see `take`.
        """
        if not isinstance(reply, protocol.FinishedSample | protocol.Scores) or reply.finish_reason != "abort":
            return False
        own = _index_of(index, reply)
        return own not in self._to_end and own not in self._samples.delivered

    def take(self, ask: Ask, index: int | None, reply: Reply) -> list[Reply]:
        """Handle a worker's reply to an `Ask`. `index`: index of a sample that was requested separately; None for the
        whole request. If a worker that is lost or about to exit aborts a sample on its own, the aborted sample is not
        delivered, and another worker continues the sample.
        """
        if not self.wants(ask):
            return []
        if isinstance(reply, TruerollError):
            return [] if ask.note(reply) else self._finish(reply)
        if isinstance(reply, SampleDelta):
            piece = replace(reply, request_id=self.request.id, index=_index_of(index, reply))
            return self._samples.show(ask, piece) if ask is self._asks[0] else []
        if isinstance(reply, protocol.FinishedSample | protocol.Scores):
            return self._take_result(ask, index, reply)
        if isinstance(reply, protocol.Done) and len(self._samples.delivered) == self.n:
            counts = dict(finish_reasons=self._samples.finish_reasons)  # other asks may have sent samples
            return self._finish(reply.model_copy(update=counts) if index is None else self._samples.end())
        return []

    def fail(self, error: TruerollError) -> list[Reply]:
        """End the request with an error, unless it has already ended."""
        return [] if self.is_over else self._finish(error)

    def _take_result(
        self, ask: Ask, index: int | None, reply: protocol.FinishedSample | protocol.Scores
    ) -> list[Reply]:
        own = _index_of(index, reply)
        ask.num_samples += 1
        if own in self._samples.delivered:
            return []
        if not self._samples.accept(reply.weight_versions, ask.prior.get(own)):
            return self._begin_anew()
        goes_on = ask.is_lost and self.is_cut(index, reply)
        if isinstance(reply, protocol.FinishedSample):
            return self._take_sample(ask, self._whole(ask, own, reply), goes_on)
        return [] if goes_on else self._finish(reply)

    def _whole(self, ask: Ask, own: int, reply: protocol.FinishedSample) -> protocol.FinishedSample:
        """Return a worker's sample, joined with the tokens that an earlier worker generated. The sample gets this
        request's id and the index `own`.
        """
        if own in ask.prior:
            reply = protocol.sample_message(reply.id, joined(ask.prior[own], protocol.sample_output(reply)))
        return reply.model_copy(update=dict(id=self.request.id, index=own))

    def _take_sample(self, ask: Ask, sample: protocol.FinishedSample, goes_on: bool) -> list[Reply]:
        if goes_on:
            return self._samples.cut(ask if ask is self._asks[0] else None, sample)
        replies = self._samples.deliver(ask, sample)
        # If a worker has sent all samples of the request, its next message is the terminal reply.
        if len(self._samples.delivered) < self.n or ask.has_answered_all(self.n):
            return replies
        return replies + self._finish(self._samples.end())

    def _begin_anew(self) -> list[Reply]:
        try:
            self._samples.begin_anew()
        except StaleWeightsError as error:
            return self._finish(error)
        self._asks.clear()
        return []

    def _finish(self, end: Reply) -> list[Reply]:
        self.is_over = True
        self._asks.clear()
        return [end]


def _index_of(index: int | None, reply: SampleDelta | protocol.FinishedSample | protocol.Scores) -> int:
    if index is not None:
        return index
    return 0 if isinstance(reply, protocol.Scores) else reply.index
