"""The pipeline: plans and queues each step, then passes its results to the open requests.

While a GPU computes one step, the host plans and queues the next step. The next step includes every sequence that has
not reached `max_tokens`, although the host has not seen the sequence's last token yet. If the unseen token ends the
sample, the sequence's row in the next step is discarded. While penalties, bad words or a grammar make the logits of a
sample depend on its earlier tokens, the host waits for these tokens before it plans the next step. On a CPU, a step is
done before `step` returns.

If a model is divided into stages, as many steps are in flight as there are stages. A step needs the last token of each
of its sequences, so no other step in flight may be drawing one of these tokens. The scheduler therefore divides the
sequences among the steps in flight. While steps are in flight, no sequence is preempted. With speculative decoding,
only one step is in flight.

A step computes sequences of a single adapter. If the scheduler plans sequences of several adapters, the pipeline queues
one step for each adapter, one after the other. The steps that are planned together form one turn of the pipeline.

`Ledger` owns every accepted request until the last output of the request. `Pipeline` owns the steps in flight, decides
whether a token ends a sample, and records, for each token, the version of the weights that drew it. `Pipeline` does not
own the computation (`running.executor`) or the choice of the tokens to compute (`scheduling.scheduler`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from trueroll.errors import UnknownRequestError

from .commits import Adapter, Commit
from .drafting.drafting import Drafting
from .experts import ExpertRecorder
from .grammars.masks import Grammars
from .outputs.open_requests import Grown, OpenSample, OpenScore, RecordBudget
from .outputs.routes import OpenRoutes, RouteFormat
from .outputs.stop_strings import TokenizerError
from .request import FinishReason, Output, SampleOutput, ScoreOutput
from .running.executor import Computation, Executor
from .running.sampler import WHOLE_VOCABULARY, Drawn, kept_ids
from .running.step import plan_step, ranges
from .scheduling.scheduler import Scheduler, SharedPrompts
from .scheduling.sequence import Chunk, Chunks, Generation, Sequence, Takers, takers_of

Entry: TypeAlias = OpenSample | OpenScore
_FEWEST_TO_DEFER = 8  # with fewer sequences in a step, it takes less time to give each sample its token
_LAYERS_PER_STEP = 2
"""The number of vision-tower layers computed per step: only a few, so that an image does not delay other requests."""
_NOT_FINITE = "the logit of the drawn token is NaN or infinite; check the weights of the model"
_NOTHING_LEFT = (
    "the logit of the drawn token is NaN or infinite; either the request's bans leave no token to draw, or the weights "
    "of the model are wrong"
)


class Ledger:
    """The open samples and scores, each with the sequence that computes it.

    `open`: maps the id of each request to its unfinished samples, by index, or to its score. `routes`: the format of
    recorded experts, or None if the model has no experts. `generated_tokens`: tokens of finished samples. `finished`:
    the number of finished samples for each finish reason. `open_routes`: the experts recorded for open requests.
    `grown`: the streamed samples with new tokens. `records`: the bytes of the records of open samples and scores.
    """

    def __init__(self, routes: RouteFormat | None, max_record_bytes: int) -> None:
        self.routes = routes
        self.grown = Grown()
        self.open_routes = OpenRoutes()
        self.records = RecordBudget(max_record_bytes)
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self.open: dict[str, dict[int, OpenSample] | OpenScore] = {}
        self._sequences: dict[Entry, Sequence] = {}

    def is_open(self, entry: Entry) -> bool:
        """Return whether a sample or a score is unfinished."""
        return entry in self._sequences

    @property
    def entries(self) -> Collection[Entry]:
        """The open samples and scores."""
        return self._sequences.keys()

    def sequence_of(self, entry: Entry) -> Sequence:
        """Return the sequence that computes a sample or a score."""
        return self._sequences[entry]

    def open_samples(self, samples: AnySequence[OpenSample], sequence: Sequence) -> None:
        """Open the samples of one request. `sequence`: the sequence that computes the prompt."""
        self.open[samples[0].request.id] = dict(enumerate(samples))
        self._sequences |= dict.fromkeys(samples, sequence)

    def open_score(self, score: OpenScore, sequence: Sequence) -> None:
        """Open a score. `sequence`: the sequence that computes the score."""
        self.open[score.request.id] = score
        self._sequences[score] = sequence

    def move(self, sample: OpenSample, sequence: Sequence) -> None:
        """Record that `sequence` computes the sample from now on."""
        self._sequences[sample] = sequence

    def find(self, request_id: str, index: int | None) -> list[Entry]:
        """Return the score, the sample with this index, or all unfinished samples of a request.

        Raise UnknownRequestError if the score or sample is unknown or finished.
        """
        entry = self.open.get(request_id)
        if isinstance(entry, OpenScore) and index is None:
            return [entry]
        if not isinstance(entry, dict) or (index is not None and index not in entry):
            what = f"request {request_id!r}" + ("" if index is None else f", sample {index}")
            raise UnknownRequestError(f"abort: {what} is not running")
        return [*entry.values()] if index is None else [entry[index]]

    def samples_of(self, request_id: str) -> list[OpenSample]:
        """Return the unfinished samples of a request.

        Raise UnknownRequestError if the request has no unfinished samples.
        """
        samples = self.open.get(request_id)
        if not isinstance(samples, dict):
            raise UnknownRequestError(
                f"stream: request {request_id!r} is not running, or is a score request, which has no samples"
            )
        return [*samples.values()]

    def append(self, sample: OpenSample, drawn: Drawn, row: int, commit: Commit) -> FinishReason | None:
        """Record a drawn token. Return the finish reason if the token ends the sample, otherwise None.

        `row`: the row of the token in `drawn`. `commit`: the weights that drew the token.
        """
        token = int(drawn.token_ids[row])
        if not drawn.is_finite[row]:
            fault = None if sample.place is None else sample.place.error
            sample.error = fault or (_NOT_FINITE if sample.editor is None else _NOTHING_LEFT)
            return "error"
        if not sample.commits or sample.commits[-1][0] is not commit:
            sample.commits.append((commit, len(sample.token_ids)))
        sample.token_ids.append(token)
        sample.follow(token)
        if sample.logprobs is not None:
            sample.logprobs.append(drawn.logprobs[row])
        if sample.records is not None or sample.targets is not None or sample.kept is not None:
            self._record(sample, drawn, row)
        if sample.num_told is not None:
            self.grown.note(sample)
        matched = None
        if sample.stop_strings is not None:
            try:
                matched = sample.stop_strings.feed(token)
            except TokenizerError as error:
                sample.error = (
                    f"stop: the tokenizer failed to decode token {token}: {error}; use stop_token_ids instead"
                )
                return "error"
        found = token if token in sample.ending_tokens else matched
        if found is not None and len(sample.token_ids) > sample.request.params.min_tokens:
            sample.stop_reason = found
            return "stop"
        return "length" if len(sample.token_ids) == sample.request.params.max_tokens else None

    def _record(self, sample: OpenSample, drawn: Drawn, row: int) -> None:
        if sample.records is not None:
            sample.records.append(drawn.records[row])
        if sample.targets is not None:
            sample.targets.append((drawn.targets[row],))
        if sample.kept is not None:
            sample.kept.append(drawn.kept.get(row, WHOLE_VOCABULARY))
        self.records.hold(sample)

    def finish_sample(self, sample: OpenSample, reason: FinishReason) -> SampleOutput:
        """End a sample and return its output."""
        group, sequence = self.open[sample.request.id], self._sequences.pop(sample)
        assert isinstance(group, dict)
        del group[sample.index]
        if not group:
            del self.open[sample.request.id]
        self.records.release(sample)
        self.finished[reason] += 1
        self.generated_tokens += len(sample.token_ids)
        return sample.output(reason, sequence.num_cached_tokens or 0, self._routed_experts(sequence, sample.num_fed))

    def finish_score(self, score: OpenScore, reason: FinishReason, commit: Commit) -> ScoreOutput:
        """End a score and return its output. `commit`: the weights that computed the score."""
        sequence = self._sequences.pop(score)
        del self.open[score.request.id]
        self.records.release(score)
        num_fed = sequence.num_tokens if reason == "stop" else 0
        return score.output(reason, commit.version, self._routed_experts(sequence, num_fed))

    def _routed_experts(self, sequence: Sequence, num_fed: int) -> np.ndarray | None:
        """Return the routed experts of the first `num_fed` tokens.

        Return None if routed experts were not requested, or if no token was fed to the model.
        """
        if self.routes is None or sequence.routes is None or not num_fed:
            return None
        return self.routes.array(sequence.routes.rows(0, num_fed))


@dataclass(frozen=True)
class _QueuedStep:
    """A step in flight, and the samples and scores that receive its results. `commit`: the weights of the step."""

    chunks: Chunks
    takers: Takers
    computation: Computation
    started: float
    commit: Commit

    def kept(self, counts: np.ndarray) -> Chunks:
        """Return the chunks, with rejected drafted tokens removed. `counts` (int64): the number of accepted draws of
        each decoding sequence.
        """
        if not self.chunks.drafts:
            return self.chunks
        ends, num_decodes = self.chunks.ends.copy(), len(counts)
        ends[self.takers.places[:num_decodes]] -= self.takers.counts[:num_decodes] - counts
        return self.chunks.cut(ends)


class Pipeline:
    """Computes the open requests of `ledger`, step by step.

    `commit`: the base weights in use. `experts`: records the experts to which the steps routed tokens.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        prompts: SharedPrompts,
        ledger: Ledger,
        grammars: Grammars,
        drafting: Drafting | None = None,
    ) -> None:
        self.commit = Commit(0)
        self.experts = ExpertRecorder(executor.routes)
        self._scheduler, self._executor, self._prompts, self._ledger = scheduler, executor, prompts, ledger
        self._queued = deque[list[_QueuedStep]]()  # each entry holds the steps of one turn
        self._grammars, self._drafting = grammars, drafting

    def step(self) -> list[Output]:
        """See `Engine.step`."""
        self._executor.check_ready()
        # The next step depends on which drafts are accepted, and drafters read the last tokens.
        outputs = self.settle() if any(queued.chunks.drafts for turn in self._queued for queued in turn) else []
        runs_ahead = self._executor.runs_ahead
        if runs_ahead and self._scheduler.running.lanes.read_tokens:
            outputs += self.settle()
        drafting = self._drafting if self._drafting and self._drafting.begin_step(self._scheduler.running) else None
        if drafting is not None:
            outputs += self.settle()
        started, num_before = time.monotonic(), len(self._queued)
        chunks = self._scheduler.schedule(may_preempt=runs_ahead or not num_before)
        if drafting is not None:
            chunks = drafting.extend(chunks, self._scheduler)
        if self._grammars.is_used:
            chunks = self._masked(chunks)
        parts = _by_adapter(chunks) if self._executor.adapters else [chunks] * bool(len(chunks))
        turn = [self._launch(part, started) for part in parts]
        self._encode(all_layers=not turn and not num_before)
        if not turn or runs_ahead or num_before + 1 == self._scheduler.num_steps:
            outputs += self._settle_next()
        if turn:
            self._queued.append(turn)
        if not self._ledger.open or (self._scheduler.num_steps == 1 and not runs_ahead):
            return outputs + self._drain()
        if runs_ahead:
            for queued in turn:
                self._expect(queued)
        return outputs

    def _masked(self, chunks: Chunks) -> Chunks:
        """Find the masks of allowed tokens for the draws and scores of a step that a grammar restricts, and return the
        chunks with shortened drafts. A draft ends before the first token that the grammar excludes, because an excluded
        token is never drawn.
        """
        takers = takers_of(chunks, self._scheduler.running.lanes)
        drafts: dict[int, AnySequence[int]] = dict(chunks.drafts)
        lanes = chunks.lanes[takers.places].tolist()
        constrained = [(lane, sample.place) for lane, sample in zip(lanes, takers.samples, strict=True) if sample.place]
        if not drafts and not any(score.place for _, score in takers.scores):
            if constrained:
                self._grammars.begin([place for _, place in constrained])
            return chunks
        self._grammars.fill([(place, drafts.get(lane, ())) for lane, place in constrained])
        for lane, place in constrained:
            if lane in drafts:
                drafts[lane] = drafts[lane][: len(place.masks) - 1]
        for i, score in takers.scores:
            start, end = score.request.start, chunks[i].end + 1
            if score.place is not None and (first := max(chunks[i].start + 1, start)) < end:
                self._grammars.fill_given(score.place, first - start, end - start)
        if drafts == chunks.drafts:
            return chunks
        plain = chunks.cut(chunks.ends - chunks.num_drafted)
        return plain.add_drafts({lane: tokens for lane, tokens in drafts.items() if tokens})

    def _encode(self, all_layers: bool) -> None:
        """Encode a part of the image that the oldest sequence waits for. `all_layers`: whether to finish the image in
        this call, because no step can be computed in the meantime.
        """
        encodings, encoder = self._scheduler.running.encodings, self._executor.encoder
        if encodings is None or encoder is None:
            return
        if (task := encodings.choose()) is not None:
            encoder.begin(task)
        if encodings.under_way is not None and encoder.advance(None if all_layers else _LAYERS_PER_STEP):
            encodings.finish()

    def settle(self) -> list[Output]:
        """Wait for the steps in flight, and return their outputs. Also append all deferred tokens
        (`scheduling.deferred`) to their samples and sequences.
        """
        outputs = self._drain()
        self._scheduler.running.lanes.deliver_all()
        return outputs

    def _drain(self) -> list[Output]:
        """Wait for the steps in flight, and return their outputs."""
        outputs = list[Output]()
        while self._queued:
            outputs += self._settle_next()
        return outputs

    def _settle_next(self) -> list[Output]:
        """Wait for the steps of the oldest turn in flight, if there is one, and return their outputs."""
        turn = self._queued.popleft() if self._queued else []
        return [output for queued in turn for output in self._settle(queued, is_alone=len(turn) == 1)]

    def _settle(self, queued: _QueuedStep, is_alone: bool) -> list[Output]:
        """Wait for a step, and return its outputs. `is_alone`: whether the step is the only step of its turn. If the
        turn has several steps, the step's time is not recorded, because the measured time includes the whole turn.
        """
        results = queued.computation.wait()
        kept = queued.chunks
        drawn, ended = results.drawn, list[tuple[int, FinishReason]]()
        if drawn is not None:
            counts, deferred, ended = self._go_on(queued, drawn)
            kept = queued.kept(counts)
            self._accept(queued.takers, counts, deferred, drawn)
        if results.expert_tokens:
            self.experts.record(queued.chunks, kept.ends, results.routes, results.expert_tokens)
        self._scheduler.publish(kept)
        if self._drafting is not None and is_alone:
            rows = int((queued.chunks.ends - queued.chunks.starts).sum())
            self._drafting.costs.record(rows, queued.started, time.monotonic())
        outputs = [self._end(queued.takers, owner, reason) for owner, reason in ended]
        if drawn is not None:
            outputs += self._begin(queued, drawn)
        outputs += self._bound_records()
        for (i, score), found in zip(queued.takers.scores, results.scores, strict=True):
            outputs += self._record(queued.chunks[i], score, found, queued.commit)
        return outputs

    def stream(self, request_id: str) -> None:
        """See `Engine.stream`."""
        samples = self._ledger.samples_of(request_id)
        for sample in samples:
            self._scheduler.running.lanes.deliver(self._ledger.sequence_of(sample))
        self._ledger.grown.follow(samples)

    def abort(self, entry: Entry) -> Output:
        """Abort a sample or a score and return its output. The output of a sample has the tokens drawn so far."""
        return self._cut(entry, "abort")

    def _bound_records(self) -> list[Output]:
        """End the samples and scores with the most record bytes, until the records of open requests are within their
        limit. When this method is called, every sample that has ended must already be closed. A score may still be
        open although all its tokens are computed, because its columns of this step are not recorded yet. This method
        may end such a score with an error.
        """
        outputs = list[Output]()
        while (entry := self._ledger.records.take_excess()) is not None:
            outputs.append(self._cut(entry, "error"))
        return outputs

    def _cut(self, entry: Entry, reason: FinishReason) -> Output:
        """End a sample or a score before its last token, and return its output."""
        sequence = self._ledger.sequence_of(entry)
        self._scheduler.running.lanes.deliver(sequence)
        if isinstance(entry, OpenScore):
            self._scheduler.finish(sequence)
            return self._ledger.finish_score(entry, reason, self._commit_of(sequence))
        assert isinstance(sequence.purpose, Generation)
        sequence.purpose.samples.remove(entry)
        if not sequence.purpose.samples:
            self._prompts.close(sequence)
            self._leave(entry, sequence)
        return self._ledger.finish_sample(entry, reason)

    def _launch(self, chunks: Chunks, started: float) -> _QueuedStep:
        """Queue a step on the device, behind the step in flight. `started`: the time at which the planning began."""
        lanes = self._scheduler.running.lanes
        takers = takers_of(chunks, lanes)
        copies, block_size = self._scheduler.running.take_block_copies(), self._scheduler.cache.block_size
        step = plan_step(chunks, lanes, takers, copies, block_size)
        computation = self._executor.compute(step)  # if this raises, the chunks stay planned
        self._scheduler.advance(chunks.cut(chunks.ends - chunks.num_drafted) if chunks.drafts else chunks)
        for place, _ in takers.prompts:
            self._prompts.close(chunks.sequences[place])
        return _QueuedStep(chunks, takers, computation, started, self._commit_of(chunks.sequences[0]))

    def _commit_of(self, sequence: Sequence) -> Commit:
        """Return the commit of the weights with which a sequence is computed now."""
        adapter = sequence.chain.adapter
        return self.commit if adapter is None else adapter.commit

    def _expect(self, queued: _QueuedStep) -> None:
        """Count the tokens that the queued step draws, so that the next step can compute their KV.

        The host sees the drawn tokens only after it has queued the next step.
        """
        chunks, takers, lanes = queued.chunks, queued.takers, self._scheduler.running.lanes
        lanes.expect(takers.decodes)
        for place, samples in takers.prompts:
            if len(samples) == 1 and chunks.ends[place] + 1 < takers.samples[samples.start].draw.end:
                lanes.expect_first(chunks.sequences[place])

    def _record(self, chunk: Chunk, score: OpenScore, columns: list[np.ndarray], commit: Commit) -> list[Output]:
        if not self._ledger.is_open(score):
            return []
        if score.place is not None and score.place.error is not None:
            score.error = f"structured_outputs: {score.place.error}"
            return [self._cut(score, "error")]
        outputs = self._put(score, chunk.end + 1 - score.request.start, columns) if columns else []
        if chunk.reaches_end and self._ledger.is_open(score):
            self._scheduler.finish(chunk.sequence)
            outputs.append(self._ledger.finish_score(score, "stop", commit))
        return outputs

    def _put(self, score: OpenScore, end: int, columns: list[np.ndarray]) -> list[Output]:
        """Record the columns of the scored tokens before row `end`, and return the outputs of the samples and scores
        that have to end because of the columns. The memory of columns and of kept ids is counted before it is
        allocated.
        """
        outputs = list[Output]()
        if not score.columns:
            outputs += self._hold(score)
            if not self._ledger.is_open(score):
                return outputs
            score.allocate()
        if not score.kept_ids:
            score.put(end, columns)
            return outputs
        *columns, bits = columns
        score.put(end, columns)
        outputs += self._hold(score)
        if self._ledger.is_open(score):
            score.keep(end, *kept_ids(bits))
        return outputs

    def _hold(self, score: OpenScore) -> list[Output]:
        """Count the memory of a score, and end the samples and scores that exceed the limit."""
        self._ledger.records.hold(score)
        return self._bound_records()

    def _go_on(
        self, queued: _QueuedStep, drawn: Drawn
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[int, FinishReason]]]:
        """Append the accepted draws to each sample that has its own sequence, or defer the draws.

        Return three values: the number of accepted draws of each decoding sequence (int64 array), which draws are
        deferred (bool array), and a list of (index of the decoding sequence, finish reason) for the samples that end.
        """
        takers, commit, ended = queued.takers, queued.commit, list[tuple[int, FinishReason]]()
        decodes, counts, lanes = takers.decodes, takers.counts[: len(takers.decodes)], self._scheduler.running.lanes
        starts = (counts.cumsum() - counts).tolist() if decodes.drafts else range(len(counts))
        taken = np.ones(len(counts), np.int64) if decodes.drafts else counts
        may_defer = len(counts) >= _FEWEST_TO_DEFER and self._drafting is None
        deferred = self._defer(takers, drawn)
        for i in (~deferred).nonzero()[0].tolist():
            if not self._ledger.is_open(sample := takers.samples[i]):
                continue
            sequence, start = decodes.sequences[i], starts[i]
            lanes.deliver(sequence)
            reason = self._ledger.append(sample, drawn, start, commit)
            drafts = decodes.drafts.get(int(decodes.lanes[i]), ()) if decodes.drafts else ()
            for place, draft in enumerate(drafts, start):
                if reason is not None or draft != drawn.token_ids[place]:
                    break
                taken[i] += 1
                reason = self._ledger.append(sample, drawn, place + 1, commit)
            if drafts:
                sample.num_drafted += len(drafts)
                sample.num_accepted += int(taken[i]) - 1
            if reason is not None:
                ended.append((i, reason))
            elif may_defer and sample.is_plain:
                lanes.allow_deferral(sequence)
        return taken, deferred, ended

    def _defer(self, takers: Takers, drawn: Drawn) -> np.ndarray:
        """Defer draws (`scheduling.deferred`), and return which draws are deferred. A draw is deferred only if nothing
        except the edits of logits reads it before the next step. With drafters, no draw is deferred, because drafters
        read all tokens before every step.
        """
        decodes, lanes = takers.decodes, self._scheduler.running.lanes
        count = len(decodes)
        if self._drafting is not None or not lanes.deferred.num_open:
            return np.zeros(count, np.bool_)
        columns = drawn.token_ids, drawn.logprobs, drawn.is_finite
        deferred = lanes.defer(decodes, *(column[:count] for column in columns))
        self._follow(takers, deferred, drawn)
        return deferred

    def _follow(self, takers: Takers, deferred: np.ndarray, drawn: Drawn) -> None:
        """Pass deferred draws to the samples with edits, because the edits of the next draws may depend on the deferred
        draws.
        """
        decodes = takers.decodes
        edits_end = self._scheduler.running.lanes.draws["edits_end"][decodes.lanes]
        edited = (deferred & (decodes.ends + 1 < edits_end)).nonzero()[0]
        for i, token_id in zip(edited.tolist(), drawn.token_ids[edited].tolist(), strict=True):
            takers.samples[i].follow(token_id)

    def _accept(self, takers: Takers, counts: np.ndarray, deferred: np.ndarray, drawn: Drawn) -> None:
        """Append the accepted draws to each decoding sequence. `counts` (int64): the number of draws that each sequence
        accepts. `deferred` (bool): which sequences receive their draw later.
        """
        decodes, drawn_counts, token_ids = takers.decodes, takers.counts[: len(counts)], drawn.token_ids
        if decodes.drafts:
            token_ids = token_ids[ranges(drawn_counts.cumsum() - drawn_counts, counts)]
        else:
            token_ids = token_ids[: len(counts)]
        self._scheduler.running.lanes.accept(decodes, token_ids, counts, deferred)
        if decodes.drafts and self._drafting is not None:
            self._scheduler.stats.computed_tokens += int((counts - 1).sum())  # `advance` did not count them
            self._drafting.record(decodes, counts)

    def _end(self, takers: Takers, owner: int, reason: FinishReason) -> Output:
        """End a decoding sequence and its sample, and return the sample's output. `owner`: the sequence's index."""
        sample = takers.samples[owner]
        self._leave(sample, takers.decodes.sequences[owner])
        return self._ledger.finish_sample(sample, reason)

    def _leave(self, sample: OpenSample, sequence: Sequence) -> None:
        """End a sequence that computes only `sample`."""
        if self._drafting is not None and sample.token_ids:
            self._drafting.end(sequence, sample.seed)
        self._scheduler.finish(sequence)

    def _begin(self, queued: _QueuedStep, drawn: Drawn) -> list[Output]:
        """Append the first token to each sample of the computed prompts."""
        outputs, takers = list[Output](), queued.takers
        if not takers.prompts:
            return outputs
        rows = takers.counts.cumsum() - 1
        for place, range_ in takers.prompts:
            found = [(takers.samples[i], int(rows[i])) for i in range_]
            samples = [(sample, row) for sample, row in found if self._ledger.is_open(sample)]
            outputs += self._split(queued.chunks.sequences[place], samples, drawn, queued.commit)
        return outputs

    def _split(
        self, sequence: Sequence, samples: list[tuple[OpenSample, int]], drawn: Drawn, commit: Commit
    ) -> list[Output]:
        """Append to each sample the token that was drawn for it with the weights of `commit`.

        Of the samples that continue, the first sample keeps the sequence, and each other sample gets a fork of the
        sequence.
        """
        ended: list[Output] = []
        going_on: list[OpenSample] = []
        for sample, row in samples:
            if reason := self._ledger.append(sample, drawn, row, commit):
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


def _by_adapter(chunks: Chunks) -> list[Chunks]:
    """Divide chunks by the adapters of their sequences, in the order in which the adapters first appear."""
    places: dict[Adapter | None, list[int]] = {}
    for i, sequence in enumerate(chunks.sequences):
        places.setdefault(sequence.chain.adapter, []).append(i)
    if len(places) == 1:
        return [chunks]
    return [chunks.take(np.array(own, np.int64)) for own in places.values()]
