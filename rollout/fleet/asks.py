"""What one worker is asked for a request: all of it, or the samples that are missing, each by a request of its own.

Pure. A sample is a function of its own seed and of the tokens before it, so any worker gives the same one: alone it is
asked for as sample 0 of a request whose seed gives the same noise, and the rest of one as its continuation.
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
    """What one worker is asked. `messages`: for the whole request under None, or for single samples by index. `prior`:
    what those had before. `num_samples`: how many were answered. `is_lost`: its worker is lost, or about to exit.
    `refusal`: why its worker refused it.
    """

    messages: dict[int | None, Request]
    prior: dict[int, SampleOutput]
    num_samples: int = 0
    is_lost: bool = False
    refusal: TruerollError | None = None

    def note(self, error: TruerollError) -> bool:
        """Note an error of the worker, with which another worker may do better. Return whether it is one."""
        self.is_lost = self.is_lost or isinstance(error, _LOST)
        self.refusal = error if isinstance(error, _REFUSED) else self.refusal
        return isinstance(error, _LOST + _REFUSED)

    def has_answered_all(self, n: int) -> bool:
        """Whether all `n` samples of a whole request were answered, so that its end comes next."""
        return None in self.messages and self.num_samples == n

    def targets(self, indices: Collection[int], n: int) -> list[tuple[str, int | None]]:
        """The ids, and the samples of them, that the worker has to abort to end these of `n` samples."""
        if (whole := self.messages.get(None)) is None:
            return [(message.id, None) for index, message in self.messages.items() if index in indices]
        return [(whole.id, None)] if len(indices) == n else [(whole.id, index) for index in sorted(indices)]


def ask_for_all(request: Request) -> Ask:
    """The request as it is, under its own id."""
    return Ask({None: request.model_copy(update=dict(caller=protocol.new_id()))}, {})


def ask_for_missing(request: protocol.Generate, missing: Collection[int], parts: Mapping[int, SampleOutput]) -> Ask:
    """Each of these samples alone, or the rest of it if there is a part."""
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
        update |= continuation(0, protocol.bytes_to_tokens(request.prompt_token_ids), part, request.params)
        update["num_prior_tokens"] += request.num_prior_tokens
    return request.model_copy(update=update)


def group_seed(request: protocol.Generate) -> int:
    """The seed of the group, as a worker takes it."""
    seed = request.params.seed
    return seed_of(request.id, request.prompt_token_ids) if seed is None else seed


def end_of_group(request: protocol.Generate, finish_reasons: dict[FinishReason, int]) -> protocol.Done:
    """The end of a group that no worker has answered as a whole."""
    params = request.params.model_copy(update=dict(seed=group_seed(request)))
    length = len(request.prompt_token_ids) // 4
    return protocol.Done(id=request.id, params=params, num_prompt_tokens=length, finish_reasons=finish_reasons)


def aborted_scores(request: protocol.GetScores) -> protocol.Scores:
    """Scores that were aborted before a worker gave them."""
    return protocol.Scores(id=request.id, logprobs=b"", finish_reason="abort", weight_versions=())


def empty_sample(request: protocol.Generate, index: int) -> SampleOutput:
    """A sample that was aborted before it had a token."""
    seed = derive_seed(group_seed(request), index)
    return SampleOutput.empty("", index, seed, request.params)
