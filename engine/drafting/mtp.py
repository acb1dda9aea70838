"""A drafter that uses the model's module for multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AnySequence

import numpy as np

from ..running.executor import Executor
from ..running.mtp import DraftStep
from ..running.step import pairs_of
from ..scheduling.scheduler import Running
from ..scheduling.sequence import Sequence
from .odds import Odds


class MtpDrafter:
    """Drafts for the sequences of `running`, on the device of `executor`. `most`: the maximum number of tokens drafted
    for a sequence in a step.

    The probability that a token is right is estimated from earlier drafts, since the engine needs the probability
    before the token is drafted.
    """

    name = "mtp"

    def __init__(self, executor: Executor, running: Running, most: int) -> None:
        self._executor, self._running = executor, running
        self._most, self._prior, self._odds = most, Odds(most), dict[Sequence, Odds]()

    def expect(self, sequence: Sequence, seed: int, most: int) -> AnySequence[float]:
        if sequence.num_computed + 1 < sequence.num_tokens:
            return ()  # the module, like the decoder, has not computed all earlier tokens yet
        odds = self._odds.setdefault(sequence, Odds(self._most, self._prior))
        return [odds.chance(depth) for depth in range(most)]

    def draft(self, counts: Mapping[Sequence, int]) -> AnySequence[AnySequence[int]]:
        lanes, chosen = self._running.lanes, np.array([sequence.lane for sequence in counts])
        step = DraftStep(
            token_ids=lanes.last_token[chosen],
            positions=lanes.num_tokens[chosen] - 1,
            counts=np.array(list(counts.values())),
            block_table=lanes.tables[0][chosen, : lanes.num_blocks[chosen].max()],
            records=lanes.draws[chosen],
            block_copies=pairs_of(self._running.take_block_copies()),
        )
        return self._executor.draft(step)

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        odds = self._odds.setdefault(sequence, Odds(self._most, self._prior))
        for depth in range(min(drafted, accepted + 1)):
            odds.record(depth, depth < accepted)

    def end(self, sequence: Sequence, seed: int) -> None:
        self._odds.pop(sequence, None)
