"""The drafts of a step: which sequences get how many drafted tokens, which of them are accepted, and the statistics."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

import numpy as np

from ..scheduling.sequence import Chunks, Lanes, Sequence
from .drafter import Drafter


@dataclass
class DraftStats:
    """Lifetime counters.

    `drafts`: chunks with drafted tokens. `drafted`: drafted tokens. `accepted`: drafted tokens that became tokens of a
    sequence. `drafted_at`, `accepted_at`: the same by position in the draft, from 0.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        missing = [0] * (num_drafted - len(self.drafted_at))
        self.drafted_at += missing
        self.accepted_at += missing
        for i in range(num_drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < num_accepted


class Drafting:
    """Drafts at most `most` tokens per sequence and step. `vocab_size`: drafts end before an id that is not below it."""

    def __init__(self, drafter: Drafter, most: int, vocab_size: int) -> None:
        self.stats = DraftStats()
        self._drafter, self._most, self._vocab_size = drafter, most, vocab_size

    def propose(self, chunks: Chunks, lanes: Lanes) -> dict[int, AnySequence[int]]:
        """Return drafts by lane for the decoding sequences of a step whose tokens are all seen."""
        found = dict[int, AnySequence[int]]()
        decodes = lanes.is_decoding[chunks.lanes] & (chunks.ends == lanes.num_tokens[chunks.lanes])
        for place in np.flatnonzero(decodes).tolist():
            lane, sequence = int(chunks.lanes[place]), chunks.sequences[place]
            most = min(self._most, int(lanes.draws["end"][lane]) - 1 - sequence.num_tokens)
            if most > 0 and len(drafts := self._draft(sequence, lanes.samples[lane].seed, most)):
                found[lane] = drafts
        return found

    def end(self, sequence: Sequence, seed: int) -> None:
        """Let the drafter learn from a sequence that a sample leaves for good."""
        self._drafter.end(sequence, seed)

    def record(self, decodes: Chunks, counts: np.ndarray) -> None:
        """Count the drafts of a step. `counts`: int64, the number of draws that each decode takes."""
        for lane, count in zip(decodes.lanes.tolist(), counts.tolist(), strict=True):
            if lane in decodes.drafts:
                self.stats.count(len(decodes.drafts[lane]), count - 1)

    def _draft(self, sequence: Sequence, seed: int, most: int) -> AnySequence[int]:
        drafts = list(self._drafter.draft(sequence, seed, most)[:most])
        valid = [0 <= token < self._vocab_size for token in drafts]
        return drafts if all(valid) else drafts[: valid.index(False)]
