"""Sequences: the tokens, progress and purpose of each sequence, and the lanes of running sequences.

A lane is an index in arrays with one element per running sequence. `Lanes` assigns lanes, counts the tokens of
sequences in every step, and delivers the tokens to sequences and samples, at once or later (`deferred`). The counters
of a running sequence are stored only in the arrays of `Counters`, so that a step reads the counters of all sequences
with one array operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from ...kernels.contract import NO_SLOT
from ..cache.prefix_cache import Chain, Table
from ..outputs.open_requests import DRAW, OpenSample, OpenScore
from ..outputs.routes import Routes
from .deferred import Deferred
from .media import SequenceMedia


@dataclass(eq=False, slots=True)
class Generation:
    """The purpose of a generating sequence: to draw, after its last token, one token for each of `samples`.

    A sequence has several samples only while it computes the prompt that they share.
    """

    samples: list[OpenSample]


Purpose: TypeAlias = Generation | OpenScore


class StateCounters:
    """The counters of recurrent states that every step needs: arrays with one element per lane, int64 [capacity].

    `slot`, `source`, `target`: the slots of the state (see the module `recurrent`). `num_repeated`: how many of the
    computed tokens are accepted drafts that the state does not include yet; the next step computes these tokens again.
    """

    def __init__(self, capacity: int) -> None:
        self.slot, self.source, self.target, self.num_repeated = (np.zeros(capacity, np.int64) for _ in range(4))


class Counters:
    """The counters of running sequences, which every step needs. Each counter is an array with one element per lane,
    int64 [capacity].

    `num_tokens`: the number of prompt tokens and decoded tokens so far, including an unseen token. `num_computed`: the
    number of tokens with KV in the sequence's blocks, counting the KV that the steps in flight are computing.
    `last_token`: the last token that the host has seen. `has_unseen` (bool): whether the sequence has an unseen token.
    An unseen token is a token that the step in flight draws and that the host does not know yet. `states`: the counters
    of recurrent states. `shift`: the position of each token after the last image, minus the token's index. `media_end`:
    the index of the first token after the last image; 0 without images.
    """

    def __init__(self, capacity: int) -> None:
        self.num_tokens, self.num_computed, self.num_prompt_tokens = (np.zeros(capacity, np.int64) for _ in range(3))
        self.shift, self.media_end = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.last_token, self.has_unseen = np.zeros(capacity, np.int64), np.zeros(capacity, np.bool_)
        self.states = StateCounters(capacity)


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens to be computed. While the sequence runs, its counters are stored only in `counters`, at `lane`.

    The scheduler writes `table`, `branch`, `chain`, `claim` and `num_cached_tokens`. The lanes (`Lanes`) write
    `tokens`, `purpose`, `counters` and `lane`. Both the scheduler and the engine write `routes`.

    `order`: (arrival of the request, sample index). Lower orders are served first, and higher orders are preempted
    first. `tokens`: the tokens that the host has seen, except the tokens in `Lanes.deferred`. `purpose`: the samples
    for which tokens are drawn after the last token, or the score that receives the log-probs. `claim`: the hash of the
    block that this sequence waits for while another sequence computes it; None if this sequence waits for no block.
    `num_cached_tokens`: the number of tokens found in the cache when the sequence first started; None before the first
    start. `branch`: the position at which the sequence will take a checkpoint, because the cache lacks a checkpoint
    there. `branch` is the end of the tokens that the sequence found in the cache, or 0 if no checkpoint is planned
    there. `routes`: the recorded experts of the sequence's tokens; None if not requested. A waiting sequence with drawn
    tokens has the recorded experts of all tokens except the last. `lane`: -1 if the sequence waits; a waiting sequence
    holds no blocks. `media`: the images of the prompt, or None.
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
    media: SequenceMedia | None = None

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and decoded tokens so far, including an unseen token of a running sequence."""
        return len(self.tokens) if self.counters is None else int(self.counters.num_tokens[self.lane])

    @property
    def num_computed(self) -> int:
        """The number of tokens with computed KV, including KV that the steps in flight are computing."""
        return 0 if self.counters is None else int(self.counters.num_computed[self.lane])

    @property
    def num_decoded(self) -> int:
        """The number of tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def needs_routes(self) -> bool:
        """Return whether the sequence needs the routed experts of every cached block that it uses.

        The result is True if the sequence records routed experts and has not drawn a token yet. After the first draw,
        the experts of all earlier tokens are already recorded in the sequence.
        """
        return self.routes is not None and self.num_decoded == 0

    @property
    def num_uncomputed(self) -> int:
        """The number of tokens without computed KV."""
        return self.num_tokens - self.num_computed


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, which one step computes. Earlier steps computed tokens [0, start)."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the chunk."""
        return self.end - self.start

    @property
    def reaches_end(self) -> bool:
        """Return whether the chunk includes the last token of the sequence, so that the next token can be drawn."""
        return self.end == self.sequence.num_tokens

    @property
    def drawing(self) -> list[OpenSample]:
        """The samples for which tokens are drawn after the chunk."""
        purpose = self.sequence.purpose
        return purpose.samples if self.reaches_end and isinstance(purpose, Generation) else []

    @property
    def scoring(self) -> OpenScore | None:
        """The score that receives the log-probs of the chunk, or None."""
        purpose = self.sequence.purpose
        return purpose if isinstance(purpose, OpenScore) else None


@dataclass(frozen=True, eq=False)
class Chunks:
    """The work of one step: tokens [starts[i], ends[i]) of `sequences[i]`. Each sequence has one chunk.

    `lanes`: the lanes of the sequences when the step was planned. `num_left`: how many sequences had left each lane
    when the step was planned. `lanes`, `num_left`, `starts`, `ends`: int64 [N]. `drafts`: maps a lane to the drafted
    tokens at the end of the lane's chunk. Drafted tokens follow the sequence's tokens, but do not belong to the
    sequence.
    """

    sequences: AnySequence[Sequence]
    lanes: np.ndarray
    num_left: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    drafts: Mapping[int, AnySequence[int]] = field(default_factory=dict)

    def take(self, places: np.ndarray) -> Chunks:
        """Return the chunks at the given indices."""
        lanes, num_left, starts, ends = (a[places] for a in (self.lanes, self.num_left, self.starts, self.ends))
        return Chunks([self.sequences[i] for i in places], lanes, num_left, starts, ends, self.drafts)

    @property
    def num_drafted(self) -> np.ndarray:
        """The number of drafted tokens at the end of each chunk, int64 [N]."""
        if not self.drafts:
            return np.zeros(len(self), np.int64)
        return np.array([len(self.drafts.get(lane, ())) for lane in self.lanes.tolist()], np.int64)

    def add_drafts(self, drafts: Mapping[int, AnySequence[int]]) -> Chunks:
        """Return the chunks with drafted tokens appended. `drafts`: maps a lane to the lane's drafted tokens. The
        chunks must not have drafts yet.
        """
        added = replace(self, drafts=drafts)
        return replace(added, ends=self.ends + added.num_drafted)

    def cut(self, ends: np.ndarray) -> Chunks:
        """Return the chunks without drafts, cut off at `ends` (int64 [N])."""
        return replace(self, ends=ends, drafts={})

    def __getitem__(self, place: int) -> Chunk:
        return Chunk(self.sequences[place], int(self.starts[place]), int(self.ends[place]))

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.sequences, self.starts.tolist(), self.ends.tolist())

    def __len__(self) -> int:
        return len(self.lanes)


_FEWEST_BLOCKS = 16


class Lanes(Counters):
    """Lanes for up to `capacity` running sequences. `sequence.lane` is the index of a sequence's lane.

    Each array has one element or row per lane. `num_blocks`: the number of blocks of the sequence, int64. `num_left`:
    the number of sequences that have left the lane, int64. `tables`: the block tables of each group, as an int64 array
    [capacity, blocks] that is padded with zeros. `sequences`: the sequence in the lane, or None. `is_decoding` (bool):
    whether the sequence has decoded tokens and only one sample. `has_routes` (bool): whether the sequence records
    routed experts. `samples`, `draws`: the sample of a decoding sequence, and the sample's `DRAW`. `deferred`: drawn
    tokens that the lane's sample and sequence have not received.
    """

    def __init__(self, capacity: int, num_groups: int = 1) -> None:
        super().__init__(capacity)
        self.num_blocks, self.num_left = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.tables = [np.zeros((capacity, _FEWEST_BLOCKS), np.int64) for _ in range(num_groups)]
        self.sequences, self.samples = np.full(capacity, None, object), np.full(capacity, None, object)
        self.is_decoding, self.draws = np.zeros(capacity, np.bool_), np.zeros(capacity, DRAW)
        self.has_routes = np.zeros(capacity, np.bool_)
        self.deferred = Deferred(capacity)
        self._free = list(reversed(range(capacity)))

    def enter(self, sequence: Sequence, num_computed: int = 0, slot: int = NO_SLOT, source: int = NO_SLOT) -> None:
        """Assign a lane to a sequence that starts to run. The KV of `num_computed` tokens is already computed."""
        lane = self._free.pop()
        sequence.counters, sequence.lane = self, lane
        self.sequences[lane] = sequence
        self.num_computed[lane], self.num_prompt_tokens[lane] = num_computed, sequence.num_prompt_tokens
        states = self.states
        states.slot[lane], states.source[lane], states.target[lane] = slot, source, slot
        states.num_repeated[lane] = 0
        media = sequence.media
        self.shift[lane], self.media_end[lane] = (0, 0) if media is None else (media.shift, media.end)
        self.num_blocks[lane], self.has_routes[lane] = 0, sequence.routes is not None
        for table in self.tables:
            table[lane] = 0
        self.add_blocks(sequence)
        self._see(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Free the lane of a sequence that no longer runs. The sequence receives its deferred tokens."""
        self.deliver(sequence)
        self.sequences[sequence.lane] = self.samples[sequence.lane] = None
        self.is_decoding[sequence.lane] = False
        self.num_left[sequence.lane] += 1
        self._free.append(sequence.lane)
        sequence.counters, sequence.lane = None, -1

    def chunks(self, lanes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Chunks:
        """Return chunks of tokens [starts, ends) for the sequences in `lanes`. All arrays are int64 [N]."""
        return Chunks(self.sequences[lanes].tolist(), lanes, self.num_left[lanes], starts, ends)

    def add_blocks(self, sequence: Sequence) -> None:
        """Copy the new blocks of a sequence to its lane."""
        lane, table = sequence.lane, sequence.table
        known, count = int(self.num_blocks[lane]), len(table.blocks[0])
        if count > self.tables[0].shape[1]:
            self.tables = [_wider(rows, 2 * count) for rows in self.tables]
        for rows, blocks in zip(self.tables, table.blocks, strict=False):
            rows[lane, known:count] = blocks[known:]
        self.num_blocks[lane] = count

    def expect_first(self, sequence: Sequence) -> None:
        """Count a sequence's first token as unseen, while the step in flight draws it. The sequence has one sample."""
        self.num_tokens[sequence.lane] += 1
        self.has_unseen[sequence.lane] = True
        self._find_sample(sequence)

    def expect(self, decodes: Chunks) -> None:
        """Count the next token of each decoding sequence as an unseen token, while the step in flight draws it.

        The last token that `max_tokens` allows is not counted, because no step computes its KV.
        """
        lanes = decodes.lanes
        goes_on = self._holds(decodes) & (self.num_tokens[lanes] + 1 < self.draws["end"][lanes])
        lanes = lanes[goes_on]
        self.num_tokens[lanes] += 1
        self.has_unseen[lanes] = True

    def begin(self, sequence: Sequence, sample: OpenSample, token_id: int) -> None:
        """Make `sample` the only sample of a running or waiting sequence, and append the sample's first token."""
        sequence.purpose = Generation([sample])
        sequence.tokens.append(token_id)
        if sequence.lane >= 0:
            self._see(sequence)

    def defer(self, decodes: Chunks, token_ids: np.ndarray, logprobs: np.ndarray, is_finite: np.ndarray) -> np.ndarray:
        """Store the next tokens of decoding sequences in `deferred`, except tokens that may end their sample, and
        tokens of samples that must see each token. Return, as bool [N], which tokens are stored.

        `token_ids` (int64), `logprobs` (float32), `is_finite` (bool): [N], one for each sequence. The caller then calls
        `accept`, which counts the tokens.
        """
        lanes = decodes.lanes
        is_last = self.num_tokens[lanes] - self.has_unseen[lanes] + 1 >= self.draws["end"][lanes]
        return self.deferred.add(lanes, token_ids, logprobs, self._holds(decodes) & is_finite & ~is_last)

    def allow_deferral(self, sequence: Sequence) -> None:
        """Allow `defer` to store the next tokens of a decoding sequence, if the sequence still runs. The sequence's
        sample must have received all earlier tokens, and at least one token of the current weights.
        """
        lane = sequence.lane
        if lane >= 0 and (sample := self.samples[lane]) is not None:
            self.deferred.open(lane, sample.ending_tokens)

    def deliver(self, sequence: Sequence) -> None:
        """Append the deferred tokens of a sequence, if there are any, to the sequence and its sample. Do not defer
        further tokens until the next call of `allow_deferral`.
        """
        if (lane := sequence.lane) < 0 or not self.deferred.is_open[lane]:
            return
        self._deliver(sequence)
        self.deferred.close(lane)

    def deliver_all(self) -> None:
        """Call `deliver` for all sequences."""
        for sequence in self.sequences[self.deferred.is_open].tolist():
            self.deliver(sequence)

    def deliver_for(self, chunks: Chunks) -> None:
        """Append the deferred tokens of the sequences of `chunks` to the sequences and their samples. Tokens that are
        drawn later may be deferred again.
        """
        is_behind = self._holds(chunks) & (self.deferred.counts[chunks.lanes] > 0)
        for place in is_behind.nonzero()[0].tolist():
            self._deliver(chunks.sequences[place])

    def accept(self, decodes: Chunks, token_ids: np.ndarray, counts: np.ndarray, deferred: np.ndarray) -> None:
        """Count the next tokens of decoding sequences, and append them to the sequences unless they are deferred. For
        all new tokens of a sequence except the last, the KV is already computed.

        `token_ids` (int64): the new tokens of all sequences, concatenated. `counts` (int64 [N]): the number of new
        tokens of each sequence, which is at least 1. `deferred` (bool [N]): which sequences have a single new token
        that `defer` has stored. A sequence that has left its lane since the step was planned also receives its tokens.
        """
        sequences, lanes, last, places = decodes.sequences, decodes.lanes, token_ids, (~deferred).nonzero()[0]
        if len(token_ids) == len(sequences):
            for place, token_id in zip(places.tolist(), token_ids[places].tolist(), strict=True):
                sequences[place].tokens.append(token_id)
        else:
            ends = counts.cumsum()
            last = last[ends - 1]
            for place, start, end in zip(places.tolist(), (ends - counts)[places], ends[places], strict=True):
                sequences[place].tokens.extend(token_ids[start:end].tolist())
        if not (held := self._holds(decodes)).all():
            lanes, last, counts = lanes[held], last[held], counts[held]
        self.last_token[lanes] = last
        self.num_tokens[lanes] += counts - self.has_unseen[lanes]
        if len(token_ids) > len(sequences):
            self.num_computed[lanes] += counts - 1
            self.states.num_repeated[lanes] = counts - 1  # otherwise 0 since `Scheduler.advance`
        self.has_unseen[lanes] = False

    @property
    def read_tokens(self) -> bool:
        """Return whether the edits of a decoding sample depend on its earlier tokens."""
        return bool((self.draws["reads_tokens"] & self.is_decoding).any())

    def check(self, running: list[Sequence]) -> None:
        """Raise RuntimeError if a running sequence does not match its lane, or if any other lane is not free."""
        if wrong := [sequence for sequence in running if not self._fits(sequence)]:
            raise RuntimeError(f"lanes: lane {wrong[0].lane} does not match its sequence {wrong[0].order}")
        if sum(sequence is not None for sequence in self.sequences) != len(running):
            raise RuntimeError(f"lanes: the number of lanes in use differs from the {len(running)} running sequences")

    def _deliver(self, sequence: Sequence) -> None:
        tokens, logprobs = self.deferred.take(sequence.lane)
        if tokens:
            sample: OpenSample = self.samples[sequence.lane]
            sequence.tokens.frombytes(tokens)
            sample.token_ids.frombytes(tokens)
            if sample.logprobs is not None:
                sample.logprobs.frombytes(logprobs)

    def _holds(self, chunks: Chunks) -> np.ndarray:
        """Return, as bool [N], which sequences are still in the lane that they had when the step was planned."""
        return self.num_left[chunks.lanes] == chunks.num_left

    def _see(self, sequence: Sequence) -> None:
        """Update the counters of a running sequence from `tokens`. The sequence has no unseen token after this call."""
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
        num_deferred = self.deferred.counts[lane]
        last = self.deferred.last(lane) if num_deferred else sequence.tokens[-1]
        num_tokens = len(sequence.tokens) + num_deferred + self.has_unseen[lane]
        counts = num_tokens, sequence.num_prompt_tokens, last
        stored = self.num_tokens[lane], self.num_prompt_tokens[lane], self.last_token[lane]
        blocks = [table[lane, : self.num_blocks[lane]].tolist() for table in self.tables]
        is_same = counts == stored and self.is_decoding[lane] == (sample is not None)
        return bool(is_same) and blocks == [blocks.tolist() for blocks in sequence.table.blocks]


@dataclass(frozen=True, eq=False)
class Takers:
    """The samples and scores that receive the results of a step.

    A chunk's place is its index among the chunks of the step. `samples`: the samples for which tokens are drawn.
    Samples with a sequence of their own come first, and samples that draw their first token come last. Samples of the
    same prompt are adjacent. `places`, `counts`: int64; sample i draws from the last `counts[i]` rows of the chunk at
    `places[i]`. The draws are in the order of `samples`. `decodes`: the chunks of the samples with a sequence of their
    own. `scores`: for each scored chunk, its index in the step and its score request. `prompts`: for each completed
    prompt, the index of its chunk and the range of its samples in `samples`.
    """

    decodes: Chunks
    places: np.ndarray
    counts: np.ndarray
    samples: AnySequence[OpenSample]
    scores: AnySequence[tuple[int, OpenScore]]
    prompts: AnySequence[tuple[int, range]]

    @property
    def num_decode_draws(self) -> int:
        """The number of draws that belong to `decodes`. The draws of `decodes` precede all other draws."""
        return int(self.counts[: len(self.decodes)].sum())


def takers_of(chunks: Chunks, lanes: Lanes) -> Takers:
    """Before `chunks` are computed, return the samples and scores that will receive the chunks' results."""
    is_decoding = lanes.is_decoding[chunks.lanes]
    num_known = lanes.num_tokens[chunks.lanes]
    places = (is_decoding & (chunks.ends >= num_known)).nonzero()[0]
    decodes = chunks if len(places) == len(chunks.lanes) else chunks.take(places)
    counts = (chunks.ends - num_known)[places] + 1
    others = [(i, chunks[i]) for i in (~is_decoding).nonzero()[0].tolist()]
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
    """Return a sequence's sample if the sequence has decoded tokens and only one sample; otherwise return None."""
    match sequence.purpose:
        case Generation([sample]) if sequence.num_decoded > 0:
            return sample
    return None
