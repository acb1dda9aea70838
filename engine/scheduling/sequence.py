"""A sequence of tokens, how much of it the KV cache holds, and what it is computed for; and the running ones as arrays.

Owns which lane of the arrays each running sequence has, and gives sequences their tokens: tokens and counters change
together. Counters of a running sequence are stored in its lane alone (`Counters`), where every step gathers what it
needs of all at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from ...kernels.contract import NO_SLOT
from ..cache.prefix_cache import Chain, Table
from ..outputs.open_requests import DRAW, OpenSample, OpenScore
from ..outputs.routes import Routes


@dataclass(eq=False, slots=True)
class Generation:
    """A token is drawn after the last one for each of `samples`, of which there are several while the prompt of a group
    is computed.
    """

    samples: list[OpenSample]


Purpose: TypeAlias = Generation | OpenScore


class Counters:
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
    """Tokens to be computed. While it runs its counters are in `counters`, at `lane`, and nowhere else.

    The scheduler writes `table`, `branch`, `chain`, `claim` and `num_cached_tokens`, the lanes (`Lanes`) write
    `tokens`, `purpose`, `counters` and `lane`. Scheduler and engine write `routes`.

    `order`: (arrival of the request, sample index); lower goes first, and higher is preempted first.
    `tokens`: those that are seen.
    `purpose`: whose tokens are drawn after the last one, or whose log-probs are those of its tokens.
    `claim`: the hash of the block that it waits for while another sequence computes that; None if it waits for none.
    `num_cached_tokens`: tokens found in the cache when the sequence was first admitted; None before.
    `branch`: how many of its first tokens were in the cache when it was admitted, if no checkpoint of their state was;
    0 otherwise, or once there is one.
    `routes`: the experts that were chosen for its tokens, as far as steps are done; None if they were not asked for. Of
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
    counters: Counters | None = None
    lane: int = -1

    @property
    def num_tokens(self) -> int:
        """All tokens so far, prompt and decoded; of one that runs with the unseen one."""
        return len(self.tokens) if self.counters is None else int(self.counters.num_tokens[self.lane])

    @property
    def num_computed(self) -> int:
        """Of its first tokens, those that have their KV, or will have it when the steps under way are done."""
        return 0 if self.counters is None else int(self.counters.num_computed[self.lane])

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


_FEWEST_BLOCKS = 16
_lane_of = attrgetter("lane")


class Lanes(Counters):
    """Up to `capacity` running sequences; the place of each is `sequence.lane`. Beside the counters of all:

    `num_blocks`, int64 [capacity]; `tables`, for each group int64 [capacity, blocks]: the block tables, filled up with
    zeros. `sequences`: themselves. `is_decoding`, bool: whether they are of one sample that has tokens; `samples`,
    `draws`: that sample and its `DRAW`.
    """

    def __init__(self, capacity: int, num_groups: int = 1) -> None:
        super().__init__(capacity)
        self.num_blocks = np.zeros(capacity, np.int64)
        self.tables = [np.zeros((capacity, _FEWEST_BLOCKS), np.int64) for _ in range(num_groups)]
        self.sequences, self.samples = np.full(capacity, None, object), np.full(capacity, None, object)
        self.is_decoding, self.draws = np.zeros(capacity, np.bool_), np.zeros(capacity, DRAW)
        self._free = list(reversed(range(capacity)))

    def enter(self, sequence: Sequence, num_computed: int = 0, slot: int = NO_SLOT, source: int = NO_SLOT) -> None:
        """Gives a sequence that begins to run, with KV of its first `num_computed` tokens, a lane."""
        lane = self._free.pop()
        sequence.counters, sequence.lane = self, lane
        self.sequences[lane] = sequence
        self.num_computed[lane], self.num_prompt_tokens[lane] = num_computed, sequence.num_prompt_tokens
        self.slot[lane], self.source[lane], self.target[lane] = slot, source, slot
        self.num_blocks[lane] = 0
        for table in self.tables:
            table[lane] = 0
        self.add_blocks(sequence)
        self._see(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes the lane of a sequence that runs no longer."""
        self.sequences[sequence.lane] = self.samples[sequence.lane] = None
        self._free.append(sequence.lane)
        sequence.counters, sequence.lane = None, -1

    def add_blocks(self, sequence: Sequence) -> None:
        """Adds to a lane the blocks that its sequence got."""
        lane, table = sequence.lane, sequence.table
        known, count = int(self.num_blocks[lane]), len(table.blocks[0])
        if count > self.tables[0].shape[1]:
            self.tables = [_wider(rows, 2 * count) for rows in self.tables]
        for rows, blocks in zip(self.tables, table.blocks, strict=False):
            rows[lane, known:count] = blocks[known:]
        self.num_blocks[lane] = count

    def expect_first(self, sequence: Sequence) -> None:
        """Counts the first token of a sequence of one sample, which is being drawn."""
        self.num_tokens[sequence.lane] += 1
        self.has_unseen[sequence.lane] = True
        self._find_sample(sequence)

    def expect(self, lanes: np.ndarray, sequences: AnySequence[Sequence]) -> None:
        """Counts the next token of each sequence that decodes, which is being drawn, unless that is the last one it may
        get.
        """
        goes_on = self._holds(lanes, sequences) & (self.num_tokens[lanes] + 1 < self.draws["end"][lanes])
        lanes = lanes[goes_on]
        self.num_tokens[lanes] += 1
        self.has_unseen[lanes] = True

    def begin(self, sequence: Sequence, sample: OpenSample, token_id: int) -> None:
        """From now on a sequence, which may wait, is of this sample alone, whose first token it gets."""
        sequence.purpose = Generation([sample])
        sequence.tokens.append(token_id)
        if sequence.lane >= 0:
            self._see(sequence)

    def accept(
        self, lanes: np.ndarray, sequences: AnySequence[Sequence], token_ids: AnySequence[int], counts: np.ndarray
    ) -> None:
        """Gives each of some sequences that decode its next tokens: `counts`, int64, at least one each, of `token_ids`,
        sequence after sequence. `lanes`: those that they had when the step was planned; who left its lane since gets
        them, too.
        """
        last = np.array(token_ids)
        if len(token_ids) == len(sequences):
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                sequence.tokens.append(token_id)
        else:
            ends = counts.cumsum()
            last = last[ends - 1]
            for sequence, start, end in zip(sequences, (ends - counts).tolist(), ends.tolist(), strict=True):
                sequence.tokens.extend(token_ids[start:end])
        if not (held := self._holds(lanes, sequences)).all():
            lanes, last, counts = lanes[held], last[held], counts[held]
        self.last_token[lanes] = last
        self.num_tokens[lanes] += counts - self.has_unseen[lanes]
        self.has_unseen[lanes] = False

    def check(self, running: list[Sequence]) -> None:
        """Raise RuntimeError unless each sequence that runs has a lane that fits it, and there is no other lane."""
        if wrong := [sequence for sequence in running if not self._fits(sequence)]:
            raise RuntimeError(f"lanes: expected a lane that fits sequence {wrong[0].order}, found {wrong[0].lane}")
        if sum(sequence is not None for sequence in self.sequences) != len(running):
            raise RuntimeError(f"lanes: expected {len(running)} lanes in use, as many as sequences run")

    def _holds(self, lanes: np.ndarray, sequences: AnySequence[Sequence]) -> np.ndarray:
        """Which of some lanes are still those of the sequences that had them, bool [lanes]."""
        return np.fromiter(map(_lane_of, sequences), np.int64, len(lanes)) == lanes

    def _see(self, sequence: Sequence) -> None:
        """All tokens of a running sequence are seen."""
        lane = sequence.lane
        self.num_tokens[lane], self.last_token[lane] = len(sequence.tokens), sequence.tokens[-1]
        self.has_unseen[lane] = False
        self._find_sample(sequence)

    def _find_sample(self, sequence: Sequence) -> None:
        lane, sample = sequence.lane, _sample_of(sequence)
        self.samples[lane], self.is_decoding[lane] = sample, sample is not None
        if sample is not None:
            self.draws[lane] = sample.draw

    def _fits(self, sequence: Sequence) -> bool:
        lane, sample = sequence.lane, _sample_of(sequence)
        if lane < 0 or self.sequences[lane] is not sequence or self.samples[lane] is not sample:
            return False
        counts = len(sequence.tokens) + self.has_unseen[lane], sequence.num_prompt_tokens, sequence.tokens[-1]
        stored = self.num_tokens[lane], self.num_prompt_tokens[lane], self.last_token[lane]
        blocks = [table[lane, : self.num_blocks[lane]].tolist() for table in self.tables]
        is_same = counts == stored and self.is_decoding[lane] == (sample is not None)
        return bool(is_same) and blocks == [blocks.tolist() for blocks in sequence.table.blocks]


@dataclass(frozen=True, eq=False)
class Takers:
    """Who takes what a step gives.

    `samples`: those that draw. Sample i draws from a range of the last rows of the chunk at `places[i]`, `counts[i]` of
    them; the draws lie one range behind the other. The first ones are of `decodes`, which are chunks of samples that
    decode alone; those behind them begin, each with one row, several in a row from the same prompt. `scores`: the
    places of the chunks that are scored, and for whom. `prompts`: the place of each prompt after which samples draw,
    and which samples. `places`, `counts`: int64.
    """

    decodes: Chunks
    places: np.ndarray
    counts: np.ndarray
    samples: AnySequence[OpenSample]
    scores: AnySequence[tuple[int, OpenScore]]
    prompts: AnySequence[tuple[int, range]]

    @property
    def num_decode_draws(self) -> int:
        """How many of the draws are of decodes: the first ones."""
        return int(self.counts[: len(self.decodes)].sum())


def takers_of(chunks: Chunks, lanes: Lanes) -> Takers:
    """Those of the chunks of a step that is about to be computed."""
    is_decoding = lanes.is_decoding[chunks.lanes]
    num_known = lanes.num_tokens[chunks.lanes]
    places = np.flatnonzero(is_decoding & (chunks.ends >= num_known))
    decodes = chunks if len(places) == len(chunks.lanes) else chunks.take(places)
    counts = (chunks.ends - num_known)[places] + 1
    others = [(i, chunks[i]) for i in np.flatnonzero(~is_decoding).tolist()]
    samples = lanes.samples[decodes.lanes].tolist()
    prompts = list[tuple[int, range]]()
    for i, chunk in others:
        if beginning := chunk.drawing:
            prompts.append((i, range(len(samples), len(samples) + len(beginning))))
            samples += beginning
    if prompts:
        places = np.concatenate((places, *(np.full(len(range_), i) for i, range_ in prompts)))
        counts = np.concatenate((counts, np.ones(len(places) - len(counts), np.int64)))
    scores = [(i, score) for i, chunk in others if (score := chunk.scoring) is not None]
    return Takers(decodes, places, counts, samples, scores, prompts)


def _wider(rows: np.ndarray, width: int) -> np.ndarray:
    wider = np.zeros((len(rows), width), np.int64)
    wider[:, : rows.shape[1]] = rows
    return wider


def _sample_of(sequence: Sequence) -> OpenSample | None:
    """The one that it is of, if that has tokens."""
    match sequence.purpose:
        case Generation([sample]) if sequence.num_decoded > 0:
            return sample
    return None
