"""The drafts of a step: chooses the drafter and the number of tokens for each sequence, and counts drafted and accepted
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul

import numpy as np

from ..outputs.open_requests import OpenSample
from ..scheduling.scheduler import Running, Scheduler
from ..scheduling.sequence import Chunks, Sequence
from ..stats import DraftStats
from .drafter import Drafter
from .rule import Pause, StepCosts, choose


class DraftCounts:
    """Counts drafts and, for each of the `most` positions in a draft, the drafted tokens and the accepted tokens."""

    def __init__(self, most: int) -> None:
        self.drafts, self.drafted, self.accepted = 0, [0] * most, [0] * most

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` tokens were accepted."""
        self.drafts += 1
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted


@dataclass
class _Choices:
    """The choice of drafters for the step in flight. `drafters`: the index of the drafter for each sequence. `price`:
    the cost of a drafted token, as `StepCosts.price` returns it.
    """

    drafters: dict[Sequence, int]
    price: float = 0.0


class Drafting:
    """Drafts at most `most` tokens per sequence and step. `vocab_size`: a draft ends before the first token id outside
    [0, vocab_size).

    `drafters`: in each step, each sequence uses the drafter with the highest expected number of accepted tokens.
    `adapts`: whether `rule` chooses the number of drafted tokens. If `adapts` is False, all tokens that a drafter can
    guess are computed. `costs`: the durations of steps, which the caller records.
    """

    def __init__(self, drafters: AnySequence[Drafter], most: int, vocab_size: int, adapts: bool = True) -> None:
        self.costs = StepCosts()
        self._drafters = [(drafter, DraftCounts(most)) for drafter in drafters]
        self._most, self._vocab_size, self._adapts = most, vocab_size, adapts
        self._pauses = dict[Sequence, Pause]()
        self._in_flight = _Choices({})
        self._step = 0

    def stats(self) -> tuple[DraftStats, ...]:
        """Return the statistics of each drafter."""
        return tuple(
            DraftStats(drafter.name, counts.drafts, tuple(counts.drafted), tuple(counts.accepted))
            for drafter, counts in self._drafters
        )

    def end(self, sequence: Sequence, seed: int) -> None:
        """Let the drafters learn from a sequence after its only sample has ended. `seed`: the sample's seed."""
        for drafter, _ in self._drafters:
            drafter.end(sequence, seed)
        self._pauses.pop(sequence, None)
        self._in_flight.drafters.pop(sequence, None)

    def begin_step(self, running: Running) -> bool:
        """Return whether to draft in the next step. Return False if drafting pauses for all decoding sequences."""
        lanes, order = running.lanes, running.in_order()
        pauses = [self._pauses.get(each) for each in lanes.sequences[order[lanes.is_decoding[order]]].tolist()]
        self._step += 1
        return any(pause is None or pause.allows_drafts(self._step) for pause in pauses)

    def extend(self, chunks: Chunks, scheduler: Scheduler) -> Chunks:
        """Return the chunks of a step, extended with drafted tokens.

        Drafted tokens use only free blocks and the unused part of the step's token budget. Drafting never preempts a
        sequence. All tokens of the sequences must already be known to the host.
        """
        running, fitting = scheduler.running, dict[Sequence, int]()
        rows = int((chunks.ends - chunks.starts).sum())
        if self._adapts and not self.costs.is_known(rows):
            return chunks  # the rule needs the measured cost of a step without drafts
        budget = scheduler.max_num_batched_tokens - rows
        for sequence, wanted in self._wanted(chunks, running).items():
            if count := running.extend_if_free(sequence, min(wanted, budget)):
                fitting[sequence] = count
                budget -= count
        if not fitting:
            return chunks
        drafts = dict[Sequence, list[int]]()
        for i, (drafter, _) in enumerate(self._drafters):
            if counts := {
                sequence: count for sequence, count in fitting.items() if self._in_flight.drafters[sequence] == i
            }:
                found = zip(counts.items(), drafter.draft(counts), strict=True)
                drafts |= {sequence: self._valid(tokens[:count]) for (sequence, count), tokens in found}
        for sequence, tokens in drafts.items():
            if not tokens:
                self._pauses[sequence].record(0.0)
        return chunks.add_drafts({sequence.lane: tokens for sequence, tokens in drafts.items() if tokens})

    def record(self, decodes: Chunks, counts: np.ndarray) -> None:
        """Record the drafts of a step. Drafts of sequences that were aborted since the step was planned do not count.
        `counts` (int64): the number of accepted draws of each decoding sequence.
        """
        decided = zip(decodes.sequences, decodes.lanes.tolist(), (counts - 1).tolist(), strict=True)
        for sequence, lane, accepted in decided:
            draft = decodes.drafts.get(lane)
            if draft and sequence in self._pauses:
                drafter, counted = self._drafters[self._in_flight.drafters[sequence]]
                counted.add(len(draft), accepted)
                drafter.record(sequence, len(draft), accepted)
                self._pauses[sequence].record(accepted - len(draft) * self._in_flight.price)

    def _wanted(self, chunks: Chunks, running: Running) -> dict[Sequence, int]:
        """Return how many tokens to draft for the decoding sequences of a step."""
        lanes = running.lanes
        decodes = chunks.take(
            np.flatnonzero(lanes.is_decoding[chunks.lanes] & (chunks.ends == lanes.num_tokens[chunks.lanes]))
        )
        most = np.minimum(lanes.draws["end"][decodes.lanes] - 1 - decodes.ends, self._most)
        if running.states is not None:
            most = running.states.most_drafted(decodes.ends, most)
        chances, asked = dict[int, AnySequence[float]](), dict[int, Pause]()
        self._in_flight = _Choices({})
        samples: list[OpenSample] = lanes.samples[decodes.lanes].tolist()
        places = zip(decodes.sequences, samples, decodes.lanes.tolist(), most.tolist(), strict=True)
        for sequence, sample, lane, limit in places:
            if limit > 0 and (pause := self._pauses.setdefault(sequence, Pause())).allows_drafts(self._step):
                asked[lane] = pause
                found = [drafter.expect(sequence, sample.seed, limit)[:limit] for drafter, _ in self._drafters]
                self._in_flight.drafters[sequence] = best = max(range(len(found)), key=lambda i: _promised(found[i]))
                if found[best]:
                    chances[lane] = found[best]
        rows, num_decodes = int((chunks.ends - chunks.starts).sum()), len(decodes)
        counts = self._choose(chances, rows, num_decodes)
        self._in_flight.price = self.costs.price(rows, sum(counts.values()), num_decodes) if self._adapts else 0.0
        for lane, pause in asked.items():
            if not counts.get(lane):
                pause.record(0.0)
        return {lanes.sequences[lane]: count for lane, count in counts.items() if count}

    def _valid(self, tokens: AnySequence[int]) -> list[int]:
        """Return the tokens before the first token outside the vocabulary."""
        return [*takewhile(lambda token: 0 <= token < self._vocab_size, tokens)]

    def _choose(self, chances: dict[int, AnySequence[float]], rows: int, tokens: int) -> dict[int, int]:
        if not self._adapts:
            return {lane: len(expected) for lane, expected in chances.items()}
        return choose(chances, self.costs, rows, tokens)


def _promised(chances: AnySequence[float]) -> float:
    """Return the expected number of accepted tokens of a draft."""
    return sum(accumulate(chances, mul))
