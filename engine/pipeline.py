"""The way of a step: planned, queued, and its results given to the samples and scores that it was computed for.

A GPU computes one step while the host plans the next and queues it behind. A sequence that `max_tokens` does not end
takes part in the next step with a token that the host has not seen yet; if that token turns out to end the sample, its
row of the step under way is thrown away. On a CPU a step is done before `step` returns.

Owns the step under way, why a sample ends with a token, and which weights its tokens are recorded with. Does not own
what computes (`running.executor`), which tokens are computed (`scheduling.scheduler`), nor the open requests
(`ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ledger import Entry, Ledger
from .outputs.open_requests import Commit, OpenSample, OpenScore
from .outputs.stop_strings import TokenizerError
from .request import FinishReason, Output
from .running.executor import Computation, Executor
from .running.sampler import Drawn
from .running.step import Takers, plan_step, takers_of
from .scheduling.prompts import SharedPrompts
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Chunk, Chunks, Generation, Sequence

_NOT_FINITE = (
    "logits: expected a finite number for the drawn token, found NaN or infinity; check the weights of the model"
)


@dataclass(frozen=True)
class _QueuedStep:
    """A step under way, and whom it was queued for."""

    chunks: Chunks
    takers: Takers
    computation: Computation


class Pipeline:
    """Computes the open requests of `ledger`, one step after the other. `commit`: the weights in use. `steps`: how many
    were computed. `expert_tokens`: that of `EngineStats`.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, prompts: SharedPrompts, ledger: Ledger) -> None:
        info = executor.info
        self.commit = Commit(0)
        self.steps = 0
        self.expert_tokens = bytes(8 * info.expert_layers * info.num_experts)
        self._scheduler, self._executor, self._prompts, self._ledger = scheduler, executor, prompts, ledger
        self._queued: _QueuedStep | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a step is queued whose results nobody has taken."""
        return self._queued is not None

    def step(self) -> list[Output]:
        """What `Engine.step` promises."""
        self._executor.check_ready()
        chunks = self._scheduler.schedule()
        queued = self._launch(chunks) if chunks else None
        outputs = self.settle()
        self._queued = queued
        if queued is None or not self._ledger or not self._executor.runs_ahead:
            return outputs + self.settle()
        self._expect(queued)
        return outputs

    def settle(self) -> list[Output]:
        """Waits for the step under way, if there is one; returns what it finished."""
        queued, self._queued = self._queued, None
        if queued is None:
            return []
        results = queued.computation.wait()
        self.expert_tokens = results.expert_tokens
        if results.drawn is not None:
            self._accept(queued.takers, results.drawn)
        if results.routes is not None:
            self._record_routes(queued.chunks, results.routes)
        self._scheduler.publish(queued.chunks)
        scores = zip(queued.takers.scores, results.scores, strict=True)
        outputs = [output for (i, score), found in scores for output in self._record(queued.chunks[i], score, found)]
        if results.drawn is not None:
            outputs += self._go_on(queued, results.drawn)
            outputs += self._begin(queued, results.drawn)
        return outputs

    def abort(self, entry: Entry) -> Output:
        """Ends a sample or a score with what it has."""
        sequence = self._ledger.sequence_of(entry)
        if isinstance(entry, OpenScore):
            self._scheduler.finish(sequence)
            return self._ledger.finish_score(entry, "abort", self.commit)
        assert isinstance(sequence.purpose, Generation)
        sequence.purpose.samples.remove(entry)
        if not sequence.purpose.samples:
            self._prompts.close(sequence)
            self._scheduler.finish(sequence)
        return self._ledger.finish_sample(entry, "abort")

    def _launch(self, chunks: Chunks) -> _QueuedStep:
        """Queues a step on the device, behind the one under way."""
        lanes = self._scheduler.running.lanes
        takers = takers_of(chunks, lanes)
        copies, block_size = self._scheduler.running.take_block_copies(), self._scheduler.cache.block_size
        computation = self._executor.compute(plan_step(chunks, lanes, takers, copies, block_size))
        self._scheduler.advance(chunks)
        self.steps += 1
        for place, _ in takers.prompts:
            self._prompts.close(chunks.sequences[place])
        return _QueuedStep(chunks, takers, computation)

    def _expect(self, queued: _QueuedStep) -> None:
        """Counts the tokens that the next step can compute with before they are seen."""
        chunks, takers, lanes = queued.chunks, queued.takers, self._scheduler.running.lanes
        lanes.expect(takers.decodes.lanes, takers.decodes.sequences)
        for place, samples in takers.prompts:
            if len(samples) == 1 and chunks.ends[place] + 1 < takers.samples[samples.start].draw.end:
                lanes.expect_first(chunks.sequences[place])

    def _record_routes(self, chunks: Chunks, rows: memoryview) -> None:
        """Adds what a step chose to the records of its sequences."""
        place, width = 0, self._executor.info.route_bytes
        for sequence, start, end in zip(chunks.sequences, chunks.starts.tolist(), chunks.ends.tolist(), strict=True):
            if sequence.routes is not None:
                sequence.routes.put(start, rows[place : place + (end - start) * width])
            place += (end - start) * width

    def _record(self, chunk: Chunk, score: OpenScore, columns: list[np.ndarray]) -> list[Output]:
        if not self._ledger.is_open(score):
            return []
        for column, found in zip(score.columns.values(), columns, strict=True):
            column[chunk.start : chunk.end] = found
        if not chunk.reaches_end:
            return []
        self._scheduler.finish(chunk.sequence)
        return [self._ledger.finish_score(score, "stop", self.commit)]

    def _accept(self, takers: Takers, drawn: Drawn) -> None:
        """Gives each sequence that decodes the tokens of its draws."""
        decodes = takers.decodes
        token_ids, counts = drawn.token_ids[: takers.num_decode_draws], takers.counts[: len(decodes)]
        self._scheduler.running.lanes.accept(decodes.lanes, decodes.sequences, token_ids, counts)

    def _go_on(self, queued: _QueuedStep, drawn: Drawn) -> list[Output]:
        """Gives each sample that decodes alone its tokens, up to the one that ends it."""
        takers, ended, row = queued.takers, list[Output](), 0
        ends = takers.counts.cumsum().tolist()
        for sequence, sample, end in zip(takers.decodes.sequences, takers.samples, ends, strict=False):
            reason = None
            while row < end and reason is None and self._ledger.is_open(sample):
                reason = self._append(sample, drawn, row)
                row += 1
            if reason is not None:
                self._scheduler.finish(sequence)
                ended.append(self._ledger.finish_sample(sample, reason))
            row = end
        return ended

    def _begin(self, queued: _QueuedStep, drawn: Drawn) -> list[Output]:
        """Gives the samples of each prompt their first tokens."""
        outputs, takers = list[Output](), queued.takers
        rows = takers.counts.cumsum() - 1
        for place, range_ in takers.prompts:
            found = [(takers.samples[i], int(rows[i])) for i in range_]
            samples = [(sample, row) for sample, row in found if self._ledger.is_open(sample)]
            outputs += self._part(queued.chunks.sequences[place], samples, drawn)
        return outputs

    def _part(self, sequence: Sequence, samples: list[tuple[OpenSample, int]], drawn: Drawn) -> list[Output]:
        """Gives each sample the token of its draw. Of those that go on, the first keeps the sequence, the others get
        forks.
        """
        ended: list[Output] = []
        going_on: list[OpenSample] = []
        for sample, row in samples:
            if reason := self._append(sample, drawn, row):
                ended.append(self._ledger.finish_sample(sample, reason))
            else:
                going_on.append(sample)
        for sample in going_on[1:]:
            self._ledger.move(sample, self._scheduler.fork(sequence, sample, sample.token_ids[-1]))
        if going_on:
            self._scheduler.running.lanes.begin(sequence, going_on[0], going_on[0].token_ids[-1])
        elif ended:
            self._scheduler.finish(sequence)
        return ended

    def _append(self, sample: OpenSample, drawn: Drawn, row: int) -> FinishReason | None:
        """Records the token of a draw; returns why the sample ends with it, if it does."""
        token = drawn.token_ids[row]
        if not drawn.is_finite[row]:
            sample.error = _NOT_FINITE
            return "error"
        sample.append(token, drawn.logprobs[row], self.commit, drawn.records.get(row))
        if sample.num_told is not None:
            self._ledger.grown.note(sample)
        try:
            matched = sample.stop_strings.feed(token) if sample.stop_strings is not None else None
        except TokenizerError as error:
            sample.error = (
                f"stop: expected the text of token {token}, found that the tokenizer failed: {error}; "
                "use stop_token_ids instead"
            )
            return "error"
        found = token if token in sample.ending_tokens else matched
        if found is not None and len(sample.token_ids) > sample.request.params.min_tokens:
            sample.stop_reason = found
            return "stop"
        return "length" if len(sample.token_ids) == sample.request.params.max_tokens else None
