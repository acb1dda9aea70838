"""The running sequences as arrays, kept from step to step: what a step needs of each is gathered at once.

Owns which lane of the arrays each running sequence has, and gives sequences their tokens: tokens and counters change
together. Counters of a running sequence are stored here alone.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence

import numpy as np

from ...kernels.contract import NO_SLOT
from ..outputs.draw_records import DRAW
from ..outputs.open_requests import OpenSample
from .sequence import Columns, Generation, Sequence

_FEWEST_BLOCKS = 16


class Lanes(Columns):
    """Up to `capacity` running sequences; the place of each is `sequence.lane`. Beside the columns of all:

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
        sequence.columns, sequence.lane = self, lane
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
        sequence.columns, sequence.lane = None, -1

    def add_blocks(self, sequence: Sequence) -> None:
        """Adds to a lane the blocks that its sequence got."""
        lane, table = sequence.lane, sequence.table
        known, count = int(self.num_blocks[lane]), len(table)
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
        ends = counts.cumsum()
        if len(token_ids) == len(sequences):
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                sequence.tokens.append(token_id)
        else:
            for sequence, start, end in zip(sequences, (ends - counts).tolist(), ends.tolist(), strict=True):
                sequence.tokens.extend(token_ids[start:end])
        held = np.flatnonzero(self._holds(lanes, sequences))
        lanes = lanes[held]
        self.last_token[lanes] = np.array(token_ids)[ends[held] - 1]
        self.num_tokens[lanes] += counts[held] - self.has_unseen[lanes]
        self.has_unseen[lanes] = False

    def check(self, running: list[Sequence]) -> None:
        """Raise RuntimeError unless each sequence that runs has a lane that fits it, and there is no other lane."""
        if wrong := [sequence for sequence in running if not self._fits(sequence)]:
            raise RuntimeError(f"lanes: expected a lane that fits sequence {wrong[0].order}, found {wrong[0].lane}")
        if sum(sequence is not None for sequence in self.sequences) != len(running):
            raise RuntimeError(f"lanes: expected {len(running)} lanes in use, as many as sequences run")

    def _holds(self, lanes: np.ndarray, sequences: AnySequence[Sequence]) -> np.ndarray:
        """Which of some lanes are still those of the sequences that had them, bool [lanes]."""
        return np.fromiter((sequence.lane for sequence in sequences), np.int64, len(lanes)) == lanes

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
