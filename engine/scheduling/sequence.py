"""A sequence of tokens, how much of it the KV cache holds, and what it is computed for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from ..cache.chains import Chain
from ..cache.tables import Table
from ..outputs.open_requests import OpenSample, OpenScore
from ..outputs.routes import Routes


@dataclass(eq=False, slots=True)
class Generation:
    """A token is drawn after the last one for each of `samples`, of which there are several while the prompt of a group
    is computed.
    """

    samples: list[OpenSample]


Purpose: TypeAlias = Generation | OpenScore


class Columns:
    """What every step asks of running sequences: arrays with an element for each lane, int64 [capacity].

    `num_tokens`: all tokens so far, prompt and decoded, with one that is still unseen. `num_computed`: the tokens [0,
    num_computed) have their KV in the sequence's blocks, or will have it when the steps under way are done.
    `last_token`: the last one that is seen. `has_unseen`: whether the step under way draws one more (bool). `slot`,
    `source`, `target`: where its recurrent state lies (`recurrent`).
    """

    def __init__(self, capacity: int) -> None:
        self.num_tokens, self.num_computed, self.num_prompt_tokens = (np.zeros(capacity, np.int64) for _ in range(3))
        self.last_token, self.has_unseen = np.zeros(capacity, np.int64), np.zeros(capacity, np.bool_)
        self.slot, self.source, self.target = (np.zeros(capacity, np.int64) for _ in range(3))


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens to be computed. While it runs its counters are in `columns`, at `lane`, and nowhere else.

    The scheduler writes `table`, `branch`, `chain`, `claim` and `num_cached_tokens`, the lanes (`Lanes`) write
    `tokens`, `purpose`, `columns` and `lane`. Scheduler and engine write `routes`.

    `order`: (arrival of the request, sample index); lower goes first, and higher is preempted first.
    `tokens`: those that are seen.
    `purpose`: whose tokens are drawn after the last one, or whose log-probs are those of its tokens.
    `claim`: the hash of the block that it waits for while another sequence computes that; None if it waits for none.
    `num_cached_tokens`: tokens found in the cache when the sequence was first admitted; None before.
    `branch`: how many of its first tokens were in the cache when it was admitted, if no checkpoint of their state was;
    0 otherwise, or once there is one.
    `routes`: the experts that were chosen for its tokens, as far as steps are done; None if nobody asked for them. Of
    one that waits after a token was drawn, all its tokens but the last have theirs.
    `lane`: -1 of a sequence that waits, which holds no blocks.
    """

    order: tuple[int, int]
    tokens: array[int]
    num_prompt_tokens: int
    chain: Chain
    purpose: Purpose
    table: Table = field(default_factory=Table)
    claim: bytes | None = None
    num_cached_tokens: int | None = None
    branch: int = 0
    routes: Routes | None = None
    columns: Columns | None = None
    lane: int = -1

    @property
    def num_tokens(self) -> int:
        """All tokens so far, prompt and decoded; of one that runs with the unseen one."""
        return len(self.tokens) if self.columns is None else int(self.columns.num_tokens[self.lane])

    @property
    def num_computed(self) -> int:
        """Of its first tokens, those that have their KV, or will have it when the steps under way are done."""
        return 0 if self.columns is None else int(self.columns.num_computed[self.lane])

    @property
    def num_decoded(self) -> int:
        """Tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def needs_routes(self) -> bool:
        """Whether it records routed experts, and has to know those of what it finds in the cache. Once a token is
        drawn, all before it have theirs.
        """
        return self.routes is not None and self.num_decoded == 0

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

    @property
    def drawing(self) -> list[OpenSample]:
        """Those for which a token is drawn after it."""
        purpose = self.sequence.purpose
        return purpose.samples if self.reaches_end and isinstance(purpose, Generation) else []

    @property
    def scoring(self) -> OpenScore | None:
        """What its log-probs belong to."""
        purpose = self.sequence.purpose
        return purpose if isinstance(purpose, OpenScore) else None


@dataclass(frozen=True, eq=False)
class Chunks:
    """What a step computes: tokens [starts[i], ends[i]) of `sequences[i]`, each of which has one chunk.

    `lanes`: those of the sequences when the step was planned. `lanes`, `starts`, `ends`: int64 [N].
    """

    sequences: AnySequence[Sequence]
    lanes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def take(self, places: np.ndarray) -> Chunks:
        """Those at some places."""
        return Chunks([self.sequences[i] for i in places], self.lanes[places], self.starts[places], self.ends[places])

    def __getitem__(self, place: int) -> Chunk:
        return Chunk(self.sequences[place], int(self.starts[place]), int(self.ends[place]))

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.sequences, self.starts.tolist(), self.ends.tolist())

    def __len__(self) -> int:
        return len(self.lanes)
