"""The engine: requests in, finished samples out, one `step` at a time.

Owns the open requests and the version of the weights, and joins scheduler, model runner, sampler and weights. One
thread owns the engine: nothing here is locked.

A GPU computes one step while the host plans the next and queues it behind. A sequence that `max_tokens` does not end
takes part in the next step with a token that the host has not seen yet; if that token turns out to end the sample, its
row of the step under way is thrown away. On a CPU a step is done before `step` returns.

Of a model with experts it keeps, for who asks, which ones were chosen for each token (`outputs.routes`), and counts for
all how many tokens each expert was given.

Promises: every request that `add` accepted is finished by exactly one output per sample (or one for a score), from
`step`, `settle`, `abort`, `commit_weights`, `sleep` or `interrupt`. The deltas of a sample, one behind the other, are
how its output begins, to the bit. A sample's bits are a function of weights, prompt, parameters, seed, backend,
instruction set and dtype alone; the weights that produced each token are on record, and none is computed from KV that
other weights left. A prompt that several samples or several requests share is computed once.
An exception from `step` is final: the engine's state is then undefined.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trueroll.errors import InvalidRequestError, UnknownRequestError

from ..kernels.transfer import HostCopy, to_device
from .cache.prefix_cache import Entry, PrefixCache
from .cache.routes import RouteRecords
from .cache.states import StateSlots
from .config import EngineConfig
from .models.decoder import ROUTES
from .outputs.draw_records import DrawRecord
from .outputs.open_requests import Commit, OpenSample, OpenScore
from .outputs.routes import Routes
from .outputs.stop_strings import StopStrings, TokenizerError, Vocabulary, load_vocabulary
from .outputs.tops import TopColumns
from .request import (
    FinishReason,
    GenerateRequest,
    InFlight,
    Output,
    Request,
    SampleDelta,
    SampleOutput,
    ScoreOutput,
    ScoreRequest,
    Tag,
    check_length,
    derive_seed,
)
from .running.experts import ExpertCounts, StepRoutes, route_format
from .running.graphs import DecodeGraphs
from .running.loading import EngineInfo, LoadedModel, engine_info, find_max_model_len, load_model, uses_graphs
from .running.model_runner import ModelRunner
from .running.sampler import Drawing, Drawn, Sampler
from .running.step import Purposes, ScoredRows, Step, plan_step, purposes_of
from .running.warm_up import is_needed, warm_up
from .running.weights import WeightStaging
from .scheduling.recurrent import Intervals
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Chunk, Chunks, Generation, Sequence

log = logging.getLogger(__name__)
_NOT_FINITE = (
    "logits: expected a finite number for the drawn token, found NaN or infinity; check the weights of the model"
)


@dataclass(frozen=True)
class PoolStats:
    """Blocks that the layers of one window share, or those without one. `in_use`: sequences hold them; `cached`: free
    ones whose prefix is still indexed; `empty`: the other free ones.
    """

    window: int | None
    in_use: int
    cached: int
    empty: int


@dataclass(frozen=True)
class EngineStats:
    """Lifetime counters, and gauges of this moment (`num_*`, `pools`).

    `prefix_queries`: prompt tokens of generate requests; `prefix_hits`: those of them found in the cache or shared with
    a running computation of the same prompt. `computed_prompt_tokens`: prompt tokens whose KV was computed, again after
    a preemption or a recompute too. `computed_tokens`: those and the decoded ones. `generated_tokens`: tokens of
    finished samples. `preemptions`: how often a running sequence gave its blocks to an older one; `recomputed`: how
    often one lost them to a commit of weights or to a sleep. `deferred_admissions`: how often a request waited a step
    for a prefix that another one was computing. `evictions`: cached blocks that were reused for something else.
    `pools`: for each window of the model's layers.

    Of recurrent states, 0 for models without: `shortened_hits`, tokens that were found in the cache and computed all
    the same, for want of a checkpoint of their state; `checkpoints_skipped`, those that found no place;
    `checkpoints_evicted`, those that gave their place away; `checkpoints_restored`, how often a sequence went on from
    one; `checkpoints_ready` and `checkpoints_reserved`, those that can be restored now, and that steps under way take.
    `shortened_hits` also counts those that were computed again for want of the routed experts that were asked for.

    `expert_tokens`: of a model with experts how many tokens each one was given, int64 [layers with experts, experts per
    layer] as little-endian bytes, those of the step under way left out; empty for models without.
    """

    steps: int
    num_running: int
    num_waiting: int
    prefix_queries: int
    prefix_hits: int
    computed_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    recomputed: int
    deferred_admissions: int
    evictions: int
    shortened_hits: int
    checkpoints_skipped: int
    checkpoints_evicted: int
    checkpoints_restored: int
    checkpoints_ready: int
    checkpoints_reserved: int
    expert_tokens: bytes
    pools: tuple[PoolStats, ...]
    samples_finished: dict[str, int]

    @property
    def blocks_in_use(self) -> int:
        """Of all pools."""
        return sum(pool.in_use for pool in self.pools)


@dataclass(frozen=True)
class _QueuedStep:
    """A step under way. `scores`: for each of those of `purposes` its log-probs, and the other columns of its
    `OpenScore`. `routes`: of a model with experts.
    """

    chunks: Chunks
    purposes: Purposes
    drawn: Drawing | None
    scores: list[list[HostCopy]]
    routes: StepRoutes | None


def _runs_ahead(device: torch.device) -> bool:
    """Whether a step is queued before the tokens of the one before are seen."""
    return device.type == "cuda"


def _buckets(info: EngineInfo) -> dict[str, int]:
    """What an engine's memory is for, in bytes."""
    blocks = " + ".join(map(str, info.blocks_by_window))
    buckets = {"weights": info.weight_bytes, f"KV cache of {blocks} blocks": info.kv_bytes}
    if info.state_bytes:
        buckets[f"{info.live_states} live states and {info.checkpoints} checkpoints"] = info.state_bytes
    if info.route_bytes and info.enable_prefix_caching:
        most = info.num_blocks * info.block_size * info.route_bytes
        buckets[f"routed experts of {info.num_blocks} blocks, on the host, at most"] = most
    return buckets | {"largest step": info.scratch_bytes}


def _check_prior(request: GenerateRequest) -> None:
    if request.num_prior_tokens > (most := len(request.prompt_token_ids)):
        raise InvalidRequestError(
            f"num_prior_tokens: expected at most the {most} tokens of the prompt, found {request.num_prior_tokens}"
        )
    if request.num_prior_tokens and request.params.n > 1:
        raise InvalidRequestError(
            f"num_prior_tokens: expected n = 1, as it is one sample that goes on, found n = {request.params.n}"
        )


def _load_vocabulary(folder: Path) -> Vocabulary | str:
    """The tokenizer of a model folder; without one, what to answer requests with stop strings."""
    try:
        return load_vocabulary(folder)
    except InvalidRequestError as error:
        return str(error)


class Engine:
    """A model, its KV cache and its requests. Raise ConfigError or ModelError if `config` cannot be served.

    `loaded`: what `load_model` gave for this config's model, dtype, device and backend, so that engines can share
    weights.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._loaded = load_model(config) if loaded is None else loaded
        device = self._loaded.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: events and graphs belong to the current device
        self.weights = self._loaded.weights
        self._commit = Commit(0)
        self._vocabulary = _load_vocabulary(self._loaded.folder)
        self._warm_up(config)
        info = self.info
        self._slots = StateSlots(info.num_slots, info.checkpoints)
        num_blocks = dict(zip(info.windows, info.blocks_by_window, strict=True))
        self._cache = PrefixCache(num_blocks, config.block_size, config.enable_prefix_caching, self._forget)
        formed = route_format(self._loaded.model.spec)
        self._experts = ExpertCounts(formed, device) if formed else None
        self._expert_tokens = bytes(8 * info.expert_layers * info.num_experts)
        self._routes = RouteRecords(info.num_blocks, config.block_size * info.route_bytes) if formed else None
        self._scheduler = Scheduler(
            self._cache,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self._slots if info.live_states else None,
            Intervals(info.state_interval, config.decode_state_interval),
            self._routes,
        )
        self._open: dict[str, dict[int, OpenSample] | OpenScore] = {}
        self._sequences: dict[OpenSample | OpenScore, Sequence] = {}
        self._grown: list[OpenSample] = []
        self._prompts: dict[tuple[bytes, str | None, bool], Sequence] = {}
        self._runs_ahead = _runs_ahead(device)
        self._queued: _QueuedStep | None = None
        self._asleep: set[Tag] = set()
        self._arrivals = 0
        self._steps = 0
        self._joined_tokens = 0
        self._generated_tokens = 0
        self._finished: Counter[str] = Counter()

    def _warm_up(self, config: EngineConfig) -> None:
        """Makes all that computes, ready for the first step."""
        started, loaded = time.monotonic(), self._loaded
        available = warm_up(config, loaded, find_max_model_len(config, loaded.model.spec))
        info = engine_info(config, loaded, available)
        spare = 1 if uses_graphs(config, loaded) else 0  # block and slot of states, for the padding of graphs
        num_blocks = [count + spare for count in info.blocks_by_window]
        self._runner = ModelRunner(loaded.model, num_blocks, config.block_size, info.num_slots + spare)
        self._sampler = Sampler(loaded.backend.ops, loaded.model.head)
        self._graphs: DecodeGraphs | None = None
        if uses_graphs(config, loaded):
            parts = self._runner, self._sampler, info.blocks_by_window, info.num_slots
            self._graphs = DecodeGraphs(*parts, config.max_num_seqs, info.max_model_len)
            self._graphs.capture()
        self.info = replace(info, warm_up_seconds=time.monotonic() - started)
        if is_needed(loaded.model.device):
            log.info("warmed up in %.1f s", self.info.warm_up_seconds)
        log.info("memory in bytes: %s", ", ".join(f"{name} {size}" for name, size in _buckets(info).items()))

    def _forget(self, entries: Iterable[Entry]) -> None:
        """What hangs on entries goes with them."""
        entries = list(entries)
        self._slots.forget(entries)
        if self._routes is not None:
            self._routes.forget(entries)

    @property
    def weight_version(self) -> int:
        """Of the weights in use; 0 for those of the checkpoint."""
        return self._commit.version

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request waits for outputs, so that `step` has something to do."""
        return bool(self._open)

    def add(self, request: Request) -> None:
        """Accepts a request. Raise InvalidRequestError, and change nothing, if it could never be served."""
        if request.id in self._open:
            raise InvalidRequestError(f"request id: expected one that is not running, found {request.id!r} running")
        if isinstance(request, ScoreRequest):
            self._add_score(request)
        else:
            self._add_group(request)
        self._arrivals += 1

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends one sample, or all unfinished ones, with what they have. Raise UnknownRequestError if there is none."""
        entry = self._open.get(request_id)
        if isinstance(entry, OpenScore) and index is None:
            return self._abort_sequence(self._sequences[entry])
        if not isinstance(entry, dict) or (index is not None and index not in entry):
            what = f"request {request_id!r}" + ("" if index is None else f", sample {index}")
            raise UnknownRequestError(f"abort: expected a running request or sample, found none for {what}")
        samples = list(entry.values()) if index is None else [entry[index]]
        return [self._abort_sample(sample) for sample in samples]

    def stream(self, request_id: str) -> None:
        """Lets `take_deltas` tell how the samples of a request grow, first of all what they have. Raise
        UnknownRequestError if there are none.
        """
        samples = self._open.get(request_id)
        if not isinstance(samples, dict):
            raise UnknownRequestError(f"stream: expected a running request for samples, found none of {request_id!r}")
        for sample in samples.values():
            if sample.num_told is None:
                sample.num_told = 0
                self._grown += [sample] * bool(sample.token_ids)

    def take_deltas(self) -> list[SampleDelta]:
        """What the unfinished samples of streamed requests have got since this was called last. What a finished one got
        since then is in its output.
        """
        grown, self._grown = self._grown, []
        return [sample.take_delta() for sample in dict.fromkeys(grown) if sample in self._sequences]

    def step(self) -> list[Output]:
        """Computes one chunk of every scheduled sequence, draws the next tokens; returns what finished.

        On a GPU it queues that step and returns what the one before finished; with nothing to queue, what all finish.
        """
        self._check_awake()
        chunks = self._scheduler.schedule()
        queued = self._launch(chunks) if chunks else None
        outputs = self.settle()
        self._queued = queued
        if queued is None or not self._open or not self._runs_ahead:
            return outputs + self.settle()
        self._expect(queued)
        return outputs

    def settle(self) -> list[Output]:
        """Waits for the step under way, if there is one; returns what it finished."""
        queued, self._queued = self._queued, None
        if queued is None:
            return []
        drawn = queued.drawn.wait() if queued.drawn is not None else None
        if queued.routes is not None:
            self._record_routes(queued.chunks, queued.routes)
        self._scheduler.publish(queued.chunks)
        scores = zip(queued.purposes.scores, queued.scores, strict=True)
        outputs = [output for (i, score), found in scores for output in self._record(queued.chunks[i], score, found)]
        if drawn is not None:
            outputs += self._go_on(queued, drawn)
            outputs += self._begin(queued, drawn)
        return outputs

    def commit_weights(self, staging: WeightStaging, version: int, in_flight: InFlight) -> list[Output]:
        """Serves what was staged from the next step on; returns what the step under way finishes and what is aborted.

        `in_flight`: running requests have their KV computed anew and keep their tokens, while scores begin again
        (`recompute`), end with what they have (`abort`), or must not exist, waiting ones neither (`drain`).
        Raise RuntimeError for that or while the weights sleep, ValueError for an incomplete staging; then nothing
        changed.
        """
        if "weights" in self._asleep:
            raise RuntimeError("engine: expected weights that are awake for a commit; wake them up first")
        self._check_drained(in_flight)
        self.weights.commit(staging)
        outputs = self.settle()  # Its tokens were drawn with the old weights, and carry their version.
        self._commit = Commit(version)
        return outputs + self.interrupt(in_flight)

    def sleep(self, level: int, tags: Collection[Tag], in_flight: InFlight) -> list[Output]:
        """Gives the memory of `tags` back until `wake_up`; returns what `commit_weights` would.

        `level` 1 keeps the weights on the host, 2 drops them: then a commit must follow the `wake_up`. Cached prefixes
        are forgotten in any case. `in_flight` is that of `commit_weights`; if only the weights sleep, requests that
        `recompute` applies to keep their blocks. Raise RuntimeError, with nothing changed, where a commit would.
        """
        if "kv_cache" in tags or in_flight == "abort":
            outputs = self.interrupt(in_flight)
        else:
            self._check_drained(in_flight)
            outputs = self.settle()
            self.invalidate_prefix_cache()
        if self._graphs is not None:
            self._graphs.forget()
        if "kv_cache" in tags:
            self._runner.arena.drop(keep=False)
        if "weights" in tags:
            self.weights.sleep(level)
        self._asleep.update(tags)
        return outputs

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Takes the memory of `tags` again; weights that were dropped are not whole before the next commit.

        Once nothing sleeps any more, CUDA graphs are captured anew.
        """
        if "kv_cache" in tags:
            self._runner.arena.restore()
        if "weights" in tags:
            self.weights.wake_up()
        self._asleep.difference_update(tags)
        if self._graphs is not None and not self._asleep:
            self._graphs.capture()

    def interrupt(self, in_flight: InFlight) -> list[Output]:
        """Forgets cached prefixes and takes the blocks of all that run; returns what `commit_weights` would.

        `in_flight` is that of `commit_weights`. Raise RuntimeError, with nothing changed, for an unfinished `drain`.
        """
        self._check_drained(in_flight)
        outputs = self.settle()
        self.invalidate_prefix_cache()
        if in_flight != "abort":
            self._scheduler.recompute_running()
            return outputs
        for sequence in self._scheduler.started():
            outputs += self._abort_sequence(sequence)
        return outputs

    def memory(self) -> dict[str, int]:
        """The bytes held now by weights and KV cache, 0 for what sleeps elsewhere or is dropped; and of a model with
        experts by the record of those chosen (`routed_experts`), on the host.
        """
        held = {"weights": self.weights.num_held, "kv_cache": self._runner.arena.num_held}
        return held if self._routes is None else held | {"routed_experts": self._routes.num_bytes + self._open_routes()}

    def _open_routes(self) -> int:
        """The bytes of the records of open requests."""
        records = [sequence.routes for sequence in set(self._sequences.values()) if sequence.routes is not None]
        shared = {id(routes.shared): len(routes.shared) for routes in records}
        return sum(shared.values()) + sum(len(routes.own) for routes in records)

    def invalidate_prefix_cache(self) -> None:
        """Makes sure that no later request reuses KV computed until now; running requests keep theirs."""
        self._cache.invalidate()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for exactly once."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """The counters and gauges of this moment."""
        scheduler, cache, slots = self._scheduler, self._cache, self._slots
        return EngineStats(
            steps=self._steps,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            prefix_queries=scheduler.stats.prefix_queries + self._joined_tokens,
            prefix_hits=scheduler.stats.prefix_hits + self._joined_tokens,
            computed_tokens=scheduler.stats.computed_tokens,
            computed_prompt_tokens=scheduler.stats.computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.stats.preemptions,
            recomputed=scheduler.stats.recomputed,
            deferred_admissions=scheduler.stats.deferred_admissions,
            evictions=cache.evictions,
            shortened_hits=scheduler.stats.shortened_hits,
            checkpoints_skipped=slots.stats.skipped,
            checkpoints_evicted=slots.stats.evicted,
            checkpoints_restored=slots.stats.restored,
            checkpoints_ready=slots.num_ready,
            checkpoints_reserved=slots.num_reserved,
            expert_tokens=self._expert_tokens,
            pools=tuple(
                PoolStats(window, pool.num_blocks - pool.num_free, pool.num_cached, pool.num_free - pool.num_cached)
                for window, pool in zip(cache.windows, cache.pools, strict=True)
            ),
            samples_finished=dict(self._finished),
        )

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(f"engine: expected all memory for a step, found {sorted(self._asleep)} asleep")
        if not self.weights.is_whole:
            raise RuntimeError("engine: expected whole weights for a step, found none; commit a full set of them")

    def _check_drained(self, in_flight: InFlight) -> None:
        if in_flight == "drain" and self._open:
            raise RuntimeError(f"engine: expected no unfinished requests after a drain, found {len(self._open)}")

    def _abort_sequence(self, sequence: Sequence) -> list[Output]:
        match sequence.purpose:
            case Generation(samples):
                return [self._abort_sample(sample) for sample in samples.copy()]
            case OpenScore() as score:
                self._scheduler.finish(sequence)
                return [self._finish_score(score, "abort")]

    def _add_group(self, request: GenerateRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        params = request.params.with_max_tokens(num_prompt_tokens, self.info.max_model_len)
        if params.seed is None:
            raise InvalidRequestError("seed: expected a number, found None; give one, such as `seed_of` the request")
        assert params.max_tokens is not None
        self._check_tokens(request.prompt_token_ids, 1, num_prompt_tokens + params.max_tokens)
        _check_prior(request)
        self._check_top_logprobs(params.top_logprobs)
        self._check_experts(params.return_routed_experts)
        self._check_vocabulary("stop_token_ids", np.asarray(params.stop_token_ids, np.int64))
        ending_tokens = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.info.eos_token_ids)
        if params.min_tokens > 0:
            self._check_some_go_on(ending_tokens)
        banned = array("q", ending_tokens)
        request = replace(request, params=params)
        watches = [self._watch(request) for _ in range(params.n)]
        seeds = [derive_seed(params.seed, i) for i in range(params.n)]
        samples = [
            OpenSample(
                request,
                i,
                (self._arrivals, i),
                seed,
                DrawRecord.of(params, seed, num_prompt_tokens, bool(banned)),
                ending_tokens,
                banned,
                watch,
                logprobs=None if params.logprobs is None else array("f"),
                tops=None if params.top_logprobs is None else TopColumns(params.top_logprobs),
            )
            for i, (seed, watch) in enumerate(zip(seeds, watches, strict=True))
        ]
        self._open[request.id] = dict(enumerate(samples))
        self._sequences |= dict.fromkeys(samples, self._prompt_sequence(request, samples))

    def _watch(self, request: GenerateRequest) -> StopStrings | None:
        if not request.params.stop:
            return None
        if isinstance(self._vocabulary, str):
            raise InvalidRequestError(self._vocabulary)
        watch = StopStrings(self._vocabulary, request.params.stop)
        if num_prior := request.num_prior_tokens:
            try:
                watch.feed_prior(request.prompt_token_ids[-num_prior:].tolist())
            except TokenizerError as error:
                raise InvalidRequestError(f"stop: expected the text of the prior tokens, found that {error}") from None
        return watch

    def _prompt_sequence(self, request: GenerateRequest, samples: list[OpenSample]) -> Sequence:
        """What computes the prompt for a request's samples: a sequence that does so already, or a new one."""
        prompt, salt = array("i", request.prompt_token_ids.tolist()), request.params.cache_salt
        records = request.params.return_routed_experts
        if running := self._prompts.get((prompt.tobytes(), salt, records)):
            self._join(running, samples)
            return running
        chain, purpose = self._cache.new_chain(salt, records), Generation(samples)
        sequence = Sequence((self._arrivals, 0), prompt, len(prompt), chain, purpose, salt)
        sequence.routes = self._new_routes(records)
        self._scheduler.add(sequence)
        if self._cache.enabled:
            self._prompts[prompt.tobytes(), salt, records] = sequence
        return sequence

    def _new_routes(self, records: bool) -> Routes | None:
        return Routes(self.info.route_bytes) if records else None

    def _join(self, running: Sequence, samples: list[OpenSample]) -> None:
        assert isinstance(running.purpose, Generation)
        running.purpose.samples += samples
        for sample in samples:
            sample.joined = True
        self._joined_tokens += running.num_prompt_tokens

    def _add_score(self, request: ScoreRequest) -> None:
        self._check_tokens(request.token_ids, 2, len(request.token_ids))
        self._check_top_logprobs(request.top_logprobs)
        self._check_experts(request.return_routed_experts)
        # The last token is only predicted, never read.
        tokens = array("i", request.token_ids[:-1].tolist())
        records, score = request.return_routed_experts, OpenScore.of(request)
        chain = self._cache.new_chain(request.cache_salt, records)
        sequence = Sequence((self._arrivals, 0), tokens, len(tokens), chain, score, request.cache_salt)
        sequence.routes = self._new_routes(records)
        self._scheduler.add(sequence)
        self._open[request.id] = score
        self._sequences[score] = sequence

    def _check_tokens(self, token_ids: np.ndarray, minimum: int, num_tokens: int) -> None:
        if len(token_ids) < minimum:
            raise InvalidRequestError(f"token ids: expected at least {minimum}, found {len(token_ids)}")
        self._check_vocabulary("token ids", token_ids)
        check_length(len(token_ids), num_tokens - len(token_ids), self.info.max_model_len)
        self._scheduler.check_fits(num_tokens)

    def _check_vocabulary(self, what: str, token_ids: np.ndarray) -> None:
        outside = token_ids[(token_ids < 0) | (token_ids >= self.info.vocab_size)]
        if len(outside):
            raise InvalidRequestError(
                f"{what}: expected ids in [0, {self.info.vocab_size}), found {outside[0]}; "
                "use the model's own tokenizer"
            )

    def _check_top_logprobs(self, k: int | None) -> None:
        if k is not None and k > self.info.vocab_size:
            raise InvalidRequestError(
                f"top_logprobs: expected at most {self.info.vocab_size}, as many as the model has tokens, found {k}; "
                "ask for fewer"
            )

    def _check_experts(self, records: bool) -> None:
        if records and self._experts is None:
            raise InvalidRequestError(
                f"return_routed_experts: expected False, as no layer of {self.info.model} has experts, found True; "
                "leave it out"
            )

    def _check_some_go_on(self, ending_tokens: frozenset[int]) -> None:
        if len(ending_tokens) == self.info.vocab_size:
            raise InvalidRequestError(
                f"min_tokens: expected one of the {self.info.vocab_size} token ids that does not end a sample, found "
                "all of them in stop_token_ids and the model's own; give fewer of them, or set min_tokens to 0"
            )

    def _launch(self, chunks: Chunks) -> _QueuedStep:
        """Queues a step on the device, behind the one under way."""
        lanes = self._scheduler.lanes
        purposes = purposes_of(chunks, lanes)
        step = plan_step(chunks, lanes, purposes, self._scheduler.take_block_copies(), self._cache.block_size)
        drawn, scores, routes = self._compute(step, any(sequence.routes is not None for sequence in chunks.sequences))
        self._scheduler.advance(chunks)
        self._steps += 1
        for i, _ in purposes.prompts:
            self._close_prompt(chunks.sequences[i])
        return _QueuedStep(chunks, purposes, drawn, scores, routes)

    def _compute(self, step: Step, records: bool) -> tuple[Drawing | None, list[list[HostCopy]], StepRoutes | None]:
        """What is drawn, the columns of each of the step's scores, and which experts were chosen, where somebody
        records that for each token.
        """
        before = self._queued.drawn if self._queued is not None else None
        drawn = before.token_ids if before is not None else None
        self._runner.copy_blocks(step)
        graphs = self._graphs if self._graphs is not None and self._graphs.serves(step) else None
        hidden, found = (graphs or self._runner).run(step, drawn)
        routes = self._experts.take(found[ROUTES], records) if self._experts is not None else None
        scores = [self._score(rows, hidden[rows.start : rows.end]) for rows in step.scores]
        if graphs is not None and graphs.draws(step):
            return graphs.draw(step), scores, routes
        return self._sampler.draw(hidden, step.draws) if len(step.draws) else None, scores, routes

    def _score(self, rows: ScoredRows, hidden: Tensor) -> list[HostCopy]:
        targets = to_device(torch.from_numpy(rows.token_ids), hidden.device)
        if rows.top_logprobs is None:
            return [HostCopy(self._sampler.score(hidden, targets, rows.distribution))]
        found = self._sampler.score_statistics(hidden, targets, rows.distribution, rows.top_logprobs)
        return [HostCopy(column) for column in found]

    def _expect(self, queued: _QueuedStep) -> None:
        """Counts the tokens that the next step can compute with before they are seen."""
        purposes, lanes = queued.purposes, self._scheduler.lanes
        lanes.expect(queued.chunks.lanes[purposes.decodes], purposes.sequences)
        row = len(purposes.decodes)
        for i, samples in purposes.prompts:
            if len(samples) == 1 and queued.chunks.ends[i] + 1 < samples[0].draw.end:
                queued.chunks.sequences[i].unseen_row = row
                lanes.repeat(queued.chunks.sequences[i])
            row += len(samples)

    def _record_routes(self, chunks: Chunks, routes: StepRoutes) -> None:
        """Adds what a step chose to the records of its sequences."""
        self._expert_tokens = routes.counts.wait().numpy().tobytes()
        if routes.rows is None:
            return
        rows, width = routes.rows.wait().numpy().data.cast("B"), self.info.route_bytes
        place = 0
        for sequence, start, end in zip(chunks.sequences, chunks.starts.tolist(), chunks.ends.tolist(), strict=True):
            if sequence.routes is not None:
                sequence.routes.put(start, rows[place : place + (end - start) * width])
            place += (end - start) * width

    def _record(self, chunk: Chunk, score: OpenScore, columns: list[HostCopy]) -> list[Output]:
        if score not in self._sequences:
            return []
        for column, found in zip(score.columns, columns, strict=True):
            column[chunk.start : chunk.end] = found.wait().numpy()
        if not chunk.reaches_end:
            return []
        self._scheduler.finish(chunk.sequence)
        return [self._finish_score(score, "stop")]

    def _go_on(self, queued: _QueuedStep, drawn: Drawn) -> list[Output]:
        """Gives each sample that decodes alone its token."""
        purposes = queued.purposes
        self._scheduler.lanes.see(queued.chunks.lanes[purposes.decodes], purposes.sequences, drawn.token_ids)
        ended: list[Output] = []
        for row, (sequence, sample) in enumerate(zip(purposes.sequences, purposes.samples, strict=True)):
            sequence.unseen_row = None
            if sample not in self._sequences:
                continue
            sequence.tokens.append(drawn.token_ids[row])
            if reason := self._append(sample, drawn, row):
                self._scheduler.finish(sequence)
                ended.append(self._finish_sample(sample, reason))
        return ended

    def _begin(self, queued: _QueuedStep, drawn: Drawn) -> list[Output]:
        """Gives the samples of each prompt their first tokens."""
        outputs: list[Output] = []
        row = len(queued.purposes.decodes)
        for i, samples in queued.purposes.prompts:
            still_open = [(sample, row + k) for k, sample in enumerate(samples) if sample in self._sequences]
            outputs += self._part(queued.chunks.sequences[i], still_open, drawn)
            row += len(samples)
        return outputs

    def _part(self, sequence: Sequence, samples: list[tuple[OpenSample, int]], drawn: Drawn) -> list[Output]:
        """Gives each sample the token of its draw. Of those that go on, the first keeps the sequence, the others get
        forks.
        """
        sequence.unseen_row = None
        ended: list[Output] = []
        going_on: list[OpenSample] = []
        for sample, row in samples:
            if reason := self._append(sample, drawn, row):
                ended.append(self._finish_sample(sample, reason))
            else:
                going_on.append(sample)
        for sample in going_on[1:]:
            self._sequences[sample] = self._scheduler.fork(sequence, sample, sample.token_ids[-1])
        if going_on:
            sequence.purpose = Generation(going_on[:1])
            sequence.tokens.append(going_on[0].token_ids[-1])
            self._scheduler.lanes.repeat(sequence)
        elif ended:
            self._scheduler.finish(sequence)
        return ended

    def _append(self, sample: OpenSample, drawn: Drawn, row: int) -> FinishReason | None:
        """Records the token of a draw; returns why the sample ends with it, if it does."""
        token = drawn.token_ids[row]
        if not drawn.is_finite[row]:
            sample.error = _NOT_FINITE
            return "error"
        sample.append(token, drawn.logprobs[row], self._commit, drawn.tops.get(row))
        if sample.num_told is not None:
            self._grown.append(sample)
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

    def _close_prompt(self, sequence: Sequence) -> None:
        """No further request may join this computation of a prompt."""
        key = sequence.tokens.tobytes(), sequence.cache_salt, sequence.routes is not None
        if self._prompts.get(key) is sequence:
            del self._prompts[key]

    def _abort_sample(self, sample: OpenSample) -> Output:
        sequence = self._sequences[sample]
        assert isinstance(sequence.purpose, Generation)
        sequence.purpose.samples.remove(sample)
        if not sequence.purpose.samples:
            self._close_prompt(sequence)
            self._scheduler.finish(sequence)
        return self._finish_sample(sample, "abort")

    def _finish_sample(self, sample: OpenSample, reason: FinishReason) -> SampleOutput:
        group, sequence = self._open[sample.request.id], self._sequences.pop(sample)
        assert isinstance(group, dict)
        del group[sample.index]
        if not group:
            del self._open[sample.request.id]
        self._finished[reason] += 1
        self._generated_tokens += len(sample.token_ids)
        return sample.output(reason, sequence.num_cached_tokens or 0, self._routed_experts(sequence, sample.num_fed))

    def _finish_score(self, score: OpenScore, reason: FinishReason) -> ScoreOutput:
        sequence = self._sequences.pop(score)
        del self._open[score.request.id]
        num_fed = sequence.num_tokens if reason == "stop" else 0
        return score.output(reason, self.weight_version, self._routed_experts(sequence, num_fed))

    def _routed_experts(self, sequence: Sequence, num_fed: int) -> np.ndarray | None:
        """Those of its first tokens, if somebody asked for them and there are some."""
        if self._experts is None or sequence.routes is None or not num_fed:
            return None
        return self._experts.format.array(sequence.routes.rows(0, num_fed))
