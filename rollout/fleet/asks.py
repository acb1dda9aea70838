"""An `Ask` is the set of messages that one worker gets for a client's request: either one message for the whole
request, or one message for each missing sample.

Pure functions and data. A missing sample is a sample that was neither delivered nor aborted. A sample depends on its
seed and its prompt, but not on the worker. So a missing sample can be requested as sample 0 of a separate request. The
seed of the separate request is chosen so that its sample 0 gets the same random numbers as the missing sample. A
partial sample is continued: only its remaining tokens are requested.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trueroll.errors import (
    QueueFullError,
    StaleWeightsError,
    TruerollError,
    UnavailableError,
    UnreadError,
    WorkerFailedError,
    WorkerLostError,
)

from ...engine.request import FinishReason, SampleOutput, derive_seed, seed_before, seed_of
from .. import protocol
from ..client.continuation import continuation
from ..client.requests import Request

_LOST = (WorkerLostError, WorkerFailedError, UnreadError)
_REFUSED = (QueueFullError, StaleWeightsError, UnavailableError)


@dataclass(eq=False)
class Ask:
    """The messages that one worker gets for a client's request.

    - `messages`: either a single message for the whole request, with the key None; or one message for each missing
      sample, with the sample's index as the key
    - `prior`: the partial samples to continue, by index
    - `num_samples`: number of samples that the worker has sent
    - `is_lost`: whether the worker is lost or about to exit
    - `refusal`: the error with which the worker refused the request; None if the worker did not refuse
    """

    messages: dict[int | None, Request]
    prior: dict[int, SampleOutput]
    num_samples: int = 0
    is_lost: bool = False
    refusal: TruerollError | None = None

    def note(self, error: TruerollError) -> bool:
        """Record an error from the worker. Return whether the request may succeed on another worker."""
        self.is_lost = self.is_lost or isinstance(error, _LOST)
        self.refusal = error if isinstance(error, _REFUSED) else self.refusal
        return isinstance(error, _LOST + _REFUSED)

    def has_answered_all(self, n: int) -> bool:
        """Return whether this `Ask` is for a whole request and the worker has sent all `n` samples. If the result is
        True, the next reply is the terminal reply.
        """
        return None in self.messages and self.num_samples == n

    def targets(self, indices: Collection[int], n: int) -> list[tuple[str, int | None]]:
        """Return the arguments of the `abort` calls that end the samples `indices` on the worker, as pairs (request id,
        sample index). `n`: number of samples in the request. A pair with the index None aborts the whole request.
        """
        if (whole := self.messages.get(None)) is None:
            return [(message.id, None) for index, message in self.messages.items() if index in indices]
        return [(whole.id, None)] if len(indices) == n else [(whole.id, index) for index in sorted(indices)]


def ask_for_all(request: Request) -> Ask:
    """Return an `Ask` for the whole request, with the content and id unchanged."""
    return Ask({None: request.model_copy(update=dict(caller=protocol.new_id()))}, {})


def ask_for_missing(request: protocol.Generate, missing: Collection[int], parts: Mapping[int, SampleOutput]) -> Ask:
    """Return an `Ask` for the samples with the indices `missing`. For a sample in `parts`, request only the remaining
    tokens.
    """
    caller = protocol.new_id()
    messages: dict[int | None, Request] = {}
    for index in missing:
        messages[index] = _message_for(request, index, parts.get(index), caller)
    return Ask(messages, {index: parts[index] for index in missing if index in parts})


def _message_for(request: protocol.Generate, index: int, part: SampleOutput | None, caller: str) -> protocol.Generate:
    update: dict[str, Any] = dict(caller=caller, id=protocol.new_id())
    if part is None:
        seed = seed_before(derive_seed(group_seed(request), index))
        update |= dict(params=request.params.model_copy(update=dict(n=1, seed=seed)))
    else:
        update |= continuation(0, request.prompt_token_ids, part, request.params)
        update["num_prior_tokens"] += request.num_prior_tokens
    return request.model_copy(update=update)


def group_seed(request: protocol.Generate) -> int:
    """Return the seed that a worker would use for the group."""
    seed = request.params.seed
    prompt = request.prompt_token_ids + protocol.content_of_images(request.images)
    return seed_of(request.id, prompt) if seed is None else seed


def end_of_group(request: protocol.Generate, finish_reasons: dict[FinishReason, int]) -> protocol.Done:
    """Return the terminal reply for a group with samples from several `Ask` objects."""
    params = request.params.model_copy(update=dict(seed=group_seed(request)))
    length = len(request.prompt_token_ids) // 4
    return protocol.Done(id=request.id, params=params, num_prompt_tokens=length, finish_reasons=finish_reasons)


def aborted_scores(request: protocol.GetScores) -> protocol.Scores:
    """Return the result of a scoring request that was aborted before a worker sent the result."""
    return protocol.Scores(id=request.id, logprobs=b"", finish_reason="abort", weight_versions=())


def empty_sample(request: protocol.Generate, index: int) -> SampleOutput:
    """Return an aborted sample without tokens."""
    seed = derive_seed(group_seed(request), index)
    return SampleOutput.empty("", index, seed, request.params)
