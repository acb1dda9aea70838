"""Sessions with answers that the test writes: a client without a worker, and a parser that knows the parts of each
answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from trueroll.engine.request import SampleOutput, SamplingParams, WeightSpan
from trueroll.rollout.client.client import AsyncRolloutClient
from trueroll.rollout.sessions.session import AsyncSession
from trueroll.rollout.text import TextModel


@dataclass(frozen=True)
class Reply:
    """An answer of the model: its text without the end, the token or the string that ends it, and its parts. Without
    parts, all text is content. Without an end, the answer was cut.
    """

    text: str
    end: str = ""
    reasoning: str = ""
    content: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    finish: str = ""


@dataclass
class Model:
    """Acts as client and parser. `replies`: the answers to give, in order. `prompts`, `params`: what was asked."""

    tokenizer: Tokenizer
    replies: list[Reply] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    cuts: random.Random = field(default_factory=lambda: random.Random(0))
    gate: asyncio.Event | None = None
    version: int = 0
    old_kv: tuple[WeightSpan, ...] = ()
    tracer: Any = None
    adapters: list[str | None] = field(default_factory=list)
    _parts: dict[tuple[int, ...], Reply] = field(default_factory=dict)

    async def generate(self, prompts: list[list[int]], params: SamplingParams, adapter: str | None = None) -> list[Any]:
        self.prompts += prompts
        self.params.append(params)
        self.adapters.append(adapter)
        reply = self.replies.pop(0)
        if self.gate is not None:
            await self.gate.wait()
        token_ids = self._tokens(reply.text)
        self._parts[tuple(token_ids)] = reply
        stop = self.tokenizer.token_to_id(reply.end) if reply.end else None
        whole = token_ids if stop is None else [*token_ids, stop]
        sample = SampleOutput(
            request_id="r",
            index=0,
            token_ids=whole,
            logprobs=-np.arange(1, len(whole) + 1, dtype=np.float32) / 8,
            finish_reason=cast(Any, reply.finish or ("length" if stop is None else "stop")),
            seed=params.seed or 0,
            num_cached_tokens=0,
            weight_versions=(WeightSpan(self.version, 0, len(whole)),),
            old_kv=self.old_kv,
            stop_reason=stop,
        )
        return [SimpleNamespace(samples=(sample,))]

    def whole(self, token_ids: Sequence[int], text: str, finish_reason: str) -> Any:
        reply = self._parts[tuple(token_ids)]
        calls = [dict(type="function", function=dict(name=name, arguments=given)) for name, given in reply.calls]
        content = reply.text if reply.content is None else reply.content
        return SimpleNamespace(content=content, reasoning_content=reply.reasoning, tool_calls=calls)

    def _tokens(self, text: str) -> list[int]:
        """Encode a text in pieces, so that its tokens differ from those of the whole text, as drawn tokens may."""
        token_ids, at = [], 0
        while at < len(text):
            size = self.cuts.randint(1, 6)
            token_ids += self.tokenizer.encode(text[at : at + size], add_special_tokens=False).ids
            at += size
        return token_ids


def session_of(model: Model, texts: TextModel, **settings: Any) -> AsyncSession:
    return AsyncSession(cast(AsyncRolloutClient, model), texts, seed=5, parser=model, **settings)
