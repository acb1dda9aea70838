"""A sequence of tokens and how much of it the KV cache holds: the one noun that scheduler, runner and engine share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .prefix_cache import Chain


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens [0, num_tokens), of which [0, num_computed) have their KV in the blocks of `table`, or will have it when
    the steps under way are done.

    The scheduler writes `num_computed`, `table`, `chain`, `claim` and `num_cached_tokens`; the engine writes the rest.

    `order`: (arrival of the request, sample index); lower goes first, and higher is preempted first.
    `samples`: what is drawn from the logits after the last token; several while a group's prompt is computed.
    `scores`: where a score request collects its log-probs; None for a sequence that generates.
    `cache_salt`: the request's own, for a new chain after an invalidation.
    `unseen_row`: of the draws of the step under way, the one that gives the token after `tokens`; `num_tokens` counts
    that token already. None if no token is unseen.
    `claim`: the hash of the block that it waits for while another sequence computes that; None if it waits for none.
    `num_cached_tokens`: tokens found in the cache when the sequence was first admitted; None before.
    """

    order: tuple[int, int]
    tokens: array[int]
    num_prompt_tokens: int
    chain: Chain
    cache_salt: str | None = None
    samples: list[Any] = field(default_factory=list)
    scores: Any = None
    unseen_row: int | None = None
    num_computed: int = 0
    table: array[int] = field(default_factory=lambda: array("q"))
    claim: bytes | None = None
    num_cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens so far, prompt and decoded, with the unseen one."""
        return len(self.tokens) + (self.unseen_row is not None)

    @property
    def num_decoded(self) -> int:
        """Tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed."""
        return self.num_tokens - self.num_computed


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to be computed in one step; [0, start) are computed by then."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Those of the chunk."""
        return self.end - self.start

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be drawn after it."""
        return self.end == self.sequence.num_tokens
