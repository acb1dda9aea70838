"""The running sequences as arrays, kept from step to step: what a step needs of each is gathered at once.

Owns which lane of the arrays each running sequence has. A sequence itself is the truth: its lane repeats what every
step asks of it. Scheduler and engine write both, many lanes at a time where they change in every step.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import Any

import numpy as np

from ..outputs.draw_records import DRAW
from ..outputs.open_requests import OpenSample
from .sequence import Generation, Sequence

_FEWEST_BLOCKS = 16


class Lanes:
    """Up to `capacity` running sequences; the place of each is `sequence.lane`. Columns, int64 [capacity]:

    `num_tokens`, `num_computed`, `num_prompt_tokens`, `unseen_row` (-1 for none), `num_blocks`, `source`, `target`:
    what they are of a sequence. `last_token`: the last one that is seen. `tables`, for each group [capacity, blocks]:
    their block tables, filled up with zeros. `sequences`: themselves. `is_decoding`, bool: whether they are of one
    sample that has tokens; `samples`, `draws`: that sample and its `DRAW`.
    """

    def __init__(self, capacity: int, num_groups: int = 1) -> None:
        self.num_tokens = np.zeros(capacity, np.int64)
        self.num_computed = np.zeros(capacity, np.int64)
        self.num_prompt_tokens = np.zeros(capacity, np.int64)
        self.unseen_row = np.zeros(capacity, np.int64)
        self.num_blocks = np.zeros(capacity, np.int64)
        self.last_token = np.zeros(capacity, np.int64)
        self.source, self.target = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.tables = [np.zeros((capacity, _FEWEST_BLOCKS), np.int64) for _ in range(num_groups)]
        self.sequences, self.samples = np.full(capacity, None, object), np.full(capacity, None, object)
        self.is_decoding, self.draws = np.zeros(capacity, np.bool_), np.zeros(capacity, DRAW)
        self._free = list(reversed(range(capacity)))

    def enter(self, sequence: Sequence) -> None:
        """Gives a sequence that begins to run a lane."""
        sequence.lane = lane = self._free.pop()
        self.sequences[lane] = sequence
        for table in self.tables:
            table[lane] = 0
        self.num_blocks[lane] = 0
        self.repeat(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes the lane of a sequence that runs no longer."""
        self.sequences[sequence.lane] = self.samples[sequence.lane] = None
        self._free.append(sequence.lane)
        sequence.lane = -1

    def repeat(self, sequence: Sequence) -> None:
        """Writes the lane of a sequence anew, if it has one."""
        lane = sequence.lane
        if lane < 0:
            return
        for name, value in self._values(sequence).items():
            getattr(self, name)[lane] = value
        self.add_blocks(sequence)
        if (sample := self.samples[lane]) is not None:
            self.draws[lane] = sample.draw

    def add_blocks(self, sequence: Sequence) -> None:
        """Repeats the blocks that a sequence with a lane got."""
        lane, table = sequence.lane, sequence.table
        known, count = int(self.num_blocks[lane]), len(table)
        if count > self.tables[0].shape[1]:
            self.tables = [_wider(rows, 2 * count) for rows in self.tables]
        for rows, blocks in zip(self.tables, table.blocks, strict=False):
            rows[lane, known:count] = blocks[known:]
        self.num_blocks[lane] = count

    def holds(self, lanes: np.ndarray, sequences: AnySequence[Sequence]) -> np.ndarray:
        """Which of some lanes are still those of the sequences that had them, bool [lanes]."""
        return np.fromiter((sequence.lane for sequence in sequences), np.int64, len(lanes)) == lanes

    def expect(self, lanes: np.ndarray, sequences: AnySequence[Sequence]) -> None:
        """Counts, for sequences that decode, the token of row i of the draws under way as the i-th one's next token,
        unless that is the last one it may get.
        """
        goes_on = self.holds(lanes, sequences) & (self.num_tokens[lanes] + 1 < self.draws["end"][lanes])
        rows = np.flatnonzero(goes_on)
        self.num_tokens[lanes[rows]] += 1
        self.unseen_row[lanes[rows]] = rows
        for row in rows.tolist():
            sequences[row].unseen_row = row

    def see(self, lanes: np.ndarray, sequences: AnySequence[Sequence], token_ids: AnySequence[int]) -> None:
        """Repeats that each of some sequences got its next token, which may have been counted before it was seen."""
        held = np.flatnonzero(self.holds(lanes, sequences))
        lanes = lanes[held]
        self.last_token[lanes] = np.array(token_ids)[held]
        self.num_tokens[lanes] += self.unseen_row[lanes] < 0
        self.unseen_row[lanes] = -1

    def check(self, running: list[Sequence]) -> None:
        """Raise RuntimeError unless each sequence that runs has a lane that repeats it, and there is no other lane."""
        for sequence in running:
            lane = sequence.lane
            same = lane >= 0 and self.sequences[lane] is sequence
            same = same and all(getattr(self, name)[lane] == value for name, value in self._values(sequence).items())
            blocks = [blocks.tolist() for blocks in sequence.table.blocks]
            if not same or [table[lane, : self.num_blocks[lane]].tolist() for table in self.tables] != blocks:
                raise RuntimeError(f"lanes: expected what lane {lane} repeats to be that of sequence {sequence.order}")
        if sum(sequence is not None for sequence in self.sequences) != len(running):
            raise RuntimeError(f"lanes: expected {len(running)} lanes in use, as many as sequences run")

    def _values(self, sequence: Sequence) -> dict[str, Any]:
        sample = _sample_of(sequence)
        return dict(
            num_tokens=sequence.num_tokens,
            num_computed=sequence.num_computed,
            num_prompt_tokens=sequence.num_prompt_tokens,
            unseen_row=-1 if sequence.unseen_row is None else sequence.unseen_row,
            last_token=sequence.tokens[-1],
            source=sequence.source,
            target=sequence.target,
            is_decoding=sample is not None,
            samples=sample,
        )


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
