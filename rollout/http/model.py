"""The model that is served, as requests see it: its name, its limits, its texts, and the worker behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trueroll.errors import InvalidRequestError, brief

from ...engine.request import SamplingParams, ScoreOutput
from ..client.client import AsyncRolloutClient
from ..protocol import new_id
from .errors import HttpError
from .texts import Texts


@dataclass(frozen=True)
class ServedModel:
    """`name`: what clients call it. `created`: when this front end began to serve it, in seconds since 1970.
    `max_prompts`: of a request, as many as the worker would queue. `salted`: the parameters that a request is computed
    with, for those that it asks for.
    """

    client: AsyncRolloutClient
    texts: Texts
    name: str
    max_model_len: int
    max_prompts: int
    eos_token_ids: frozenset[int]
    created: int
    salted: Callable[[SamplingParams], SamplingParams] = field(default=lambda params: params)

    def check_name(self, name: str | None) -> None:
        """Raise HttpError if a request names another model."""
        if name is not None and name != self.name:
            raise HttpError(
                404,
                f"model: expected {self.name!r}, the one that is served, found {brief(name)}; correct it",
                param="model",
                code="model_not_found",
            )

    def check_count(self, num_prompts: int) -> None:
        """Raise InvalidRequestError for more prompts than the worker would ever take together."""
        if num_prompts > self.max_prompts:
            raise InvalidRequestError(
                f"prompt: expected at most {self.max_prompts} prompts, the worker's max_queued_requests, found "
                f"{num_prompts}; send several requests"
            )

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_tokens: int | None) -> None:
        """Raise an error for a prompt without tokens, and for one that does not fit with its new tokens."""
        if not prompts or not all(prompts):
            raise InvalidRequestError("prompt: expected at least one token in each, found none; give some text")
        longest = max(map(len, prompts))
        if longest + (max_tokens or 1) > self.max_model_len:
            raise HttpError(
                400,
                f"prompt: expected at most {self.max_model_len} tokens, the model's maximum context length, in prompt "
                f"and completion together, found {longest} + {max_tokens or 1}; shorten one of them",
                param="prompt",
                code="context_length_exceeded",
            )

    async def score(self, sequences: list[list[int]], params: SamplingParams) -> list[ScoreOutput]:
        """Log-probs of given tokens, of the distribution that `params` draws from."""
        return await self.client.score(
            sequences,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            cache_salt=params.cache_salt,
            top_logprobs=params.top_logprobs,
        )

    def new_id(self, kind: str) -> str:
        """An id for an answer."""
        return f"{kind}-{new_id()}"

    def now(self) -> int:
        """In seconds since 1970."""
        return int(time.time())
