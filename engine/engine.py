"""The engine: requests in, finished samples out, one `step` at a time.

Joins the parts of the engine: `admission` accepts requests, `pipeline` holds the open requests and computes them step
by step, and `running.executor` runs the computation. Owns the order in which weights, memory and requests change
together. One thread owns the engine; there are no locks.

Promises:

- Every request that `add` accepted is finished by exactly one output per sample (or one for a score), returned by
  `step`, `settle`, `abort`, `commit_weights`, `sleep` or `interrupt`.
- The deltas of a sample, concatenated, are a prefix of its output, to the bit.
- A sample's bits are a function of weights, prompt, parameters, seed, backend, instruction set and dtype alone.
- The weights that produced each token are recorded. No token is computed from KV of other weights.
- A prompt that several samples or several requests share is computed once.

An exception from `step` is final: the engine's state is then undefined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from .admission import Admission
from .cache.prefix_cache import Entry, PrefixCache
from .cache.routes import RouteRecords
from .config import EngineConfig
from .drafting.drafter import Drafter
from .drafting.drafting import Drafting
from .drafting.repeats import RepeatsDrafter
from .outputs.open_requests import Commit, OpenScore
from .pipeline import Ledger, Pipeline
from .request import InFlight, Output, Request, SampleDelta, Tag
from .running.executor import Executor, LocalExecutor
from .running.loading import EngineInfo, LoadedModel, load_model
from .running.weights import WeightStaging, WeightStore
from .scheduling.recurrent import Intervals, StateSlots, StateStats
from .scheduling.scheduler import Scheduler, SharedPrompts
from .stats import EngineStats


class Engine:
    """A model, its KV cache and its requests. Raise ConfigError or ModelError if `config` cannot be served.

    `loaded`: the result of `load_model` for the same model, dtype, device and backend. Pass it to share weights among
    engines.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None, drafter: Drafter | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config) if loaded is None else loaded
        self._executor: Executor = LocalExecutor(config, loaded)
        self._scheduler = _new_scheduler(config, self.info)
        self._prompts, self._ledger = SharedPrompts(), Ledger(self._executor.routes)
        self._admission = Admission(self.info, loaded.folder, self._scheduler, self._prompts, self._ledger)
        drafting = _new_drafting(config, self.info, drafter)
        self._pipeline = Pipeline(self._executor, self._scheduler, self._prompts, self._ledger, drafting)

    @property
    def info(self) -> EngineInfo:
        """The served model and the memory it uses."""
        return self._executor.info

    @property
    def weights(self) -> WeightStore:
        """The weights in use."""
        return self._executor.weights

    @property
    def weight_version(self) -> int:
        """The version of the weights in use; 0 for the checkpoint's weights."""
        return self._pipeline.commit.version

    @property
    def has_unfinished(self) -> bool:
        """Return whether an accepted request is unfinished, so that `step` has work to do."""
        return bool(self._ledger.open)

    def add(self, request: Request) -> None:
        """Accept a request. Raise InvalidRequestError if the request could never be served; nothing changes then."""
        self._admission.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """End a score, one sample, or all unfinished samples of a request. Return their outputs.

        An aborted sample keeps its current tokens, an aborted score has no log-probs. Raise UnknownRequestError if the
        score or the samples are not running.
        """
        return [self._pipeline.abort(entry) for entry in self._ledger.find(request_id, index)]

    def stream(self, request_id: str) -> None:
        """Make `take_deltas` report the growth of a request's samples, beginning with their current tokens.

        Raise UnknownRequestError if the request has no unfinished samples.
        """
        self._ledger.grown.follow(self._ledger.samples_of(request_id))

    def take_deltas(self) -> list[SampleDelta]:
        """Return the new tokens of the unfinished samples of streamed requests, since the last call.

        The last tokens of a finished sample are in its output.
        """
        return self._ledger.grown.take(self._ledger.is_open)

    def step(self) -> list[Output]:
        """Compute one chunk of every scheduled sequence, draw the next tokens, and return finished outputs.

        On a GPU, queue this step, wait for the previous step and return the outputs of the previous step. If no request
        is open then, wait for both steps.
        """
        return self._pipeline.step()

    def settle(self) -> list[Output]:
        """Wait for the step in flight, if there is one, and return its outputs."""
        return self._pipeline.settle()

    def commit_weights(self, staging: WeightStaging, version: int, in_flight: InFlight) -> list[Output]:
        """Serve the staged weights from the next step on. Return the outputs of the step in flight and of aborts.

        `in_flight`: what happens to running requests. `recompute`: they keep their tokens and their KV is computed
        again, while scores restart. `abort`: they end with their current tokens. `drain`: there must be no unfinished
        requests, running or waiting.

        Raise RuntimeError if `drain` finds unfinished requests, or while the weights sleep. Raise ValueError if the
        staging is incomplete. In all these cases nothing changes.
        """
        self._check_drained(in_flight)
        self._executor.commit(staging)
        outputs = self.settle()  # Its tokens were drawn with the old weights and carry the old version.
        self._pipeline.commit = Commit(version)
        return outputs + self.interrupt(in_flight)

    def sleep(self, level: int, tags: Collection[Tag], in_flight: InFlight) -> list[Output]:
        """Release the memory of `tags` until `wake_up`. Return the same outputs as `commit_weights`.

        `level`: 1 keeps the weights on the host; 2 drops them, so that a commit must follow the `wake_up`. Cached
        prefixes are dropped in any case. `in_flight`: as in `commit_weights`; if only the weights sleep, requests under
        `recompute` keep their blocks. Raise RuntimeError, with nothing changed, if `drain` finds unfinished requests.
        """
        if "kv_cache" in tags or in_flight == "abort":
            outputs = self.interrupt(in_flight)
        else:
            self._check_drained(in_flight)
            outputs = self.settle()
            self.invalidate_prefix_cache()
        self._executor.sleep(level, tags)
        return outputs

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Reallocate the memory of `tags`. Weights that were dropped are incomplete until the next commit.

        Once nothing sleeps any more, CUDA graphs are captured again.
        """
        self._executor.wake_up(tags)

    def interrupt(self, in_flight: InFlight) -> list[Output]:
        """Drop cached prefixes and the blocks of all running sequences. Return the same outputs as `commit_weights`.

        `in_flight`: as in `commit_weights`. Raise RuntimeError, with nothing changed, if `drain` finds unfinished
        requests.
        """
        self._check_drained(in_flight)
        outputs = self.settle()
        self.invalidate_prefix_cache()
        if in_flight != "abort":
            self._scheduler.recompute_running()
            return outputs
        for sequence in self._scheduler.started():
            purpose = sequence.purpose
            entries = [purpose] if isinstance(purpose, OpenScore) else purpose.samples.copy()
            outputs += [self._pipeline.abort(entry) for entry in entries]
        return outputs

    def memory(self) -> dict[str, int]:
        """Return the bytes that weights and KV cache hold now, 0 for memory that sleeps or was dropped.

        For a model with experts, `routed_experts` has the bytes of the recorded experts, on the host.
        """
        held, routes = self._executor.memory(), self._scheduler.routes
        return held if routes is None else held | {"routed_experts": routes.num_bytes + self._ledger.route_bytes}

    def invalidate_prefix_cache(self) -> None:
        """Prevent later requests from reusing KV that was computed until now. Running requests keep theirs."""
        self._scheduler.cache.invalidate()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for exactly once."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """Return the counters and the gauges of the current moment."""
        scheduler, ledger, admission = self._scheduler, self._ledger, self._admission
        tables, states = scheduler.cache.tables, scheduler.running.states
        checkpoints = StateStats() if states is None else states.slots.stats
        return EngineStats(
            steps=self._pipeline.steps,
            num_running=len(scheduler.running.sequences),
            num_waiting=len(scheduler.waiting),
            prefix_queries=scheduler.stats.prefix_queries + admission.joined_tokens,
            prefix_hits=scheduler.stats.prefix_hits + admission.joined_tokens,
            computed_tokens=scheduler.stats.computed_tokens,
            computed_prompt_tokens=scheduler.stats.computed_prompt_tokens,
            generated_tokens=ledger.generated_tokens,
            preemptions=scheduler.stats.preemptions,
            recomputed=scheduler.stats.recomputed,
            deferred_admissions=scheduler.stats.deferred_admissions,
            evictions=sum(pool.evictions for pool in tables.pools),
            shortened_hits=scheduler.stats.shortened_hits,
            checkpoints_skipped=checkpoints.skipped,
            checkpoints_evicted=checkpoints.evicted,
            checkpoints_restored=checkpoints.restored,
            checkpoints_ready=checkpoints.ready,
            checkpoints_reserved=checkpoints.reserved,
            expert_tokens=self._pipeline.expert_tokens,
            pools=tables.stats(),
            samples_finished=dict(ledger.finished),
        )

    def _check_drained(self, in_flight: InFlight) -> None:
        if in_flight == "drain" and self.has_unfinished:
            raise RuntimeError(f"engine still has unfinished requests after a drain (got {len(self._ledger.open)})")


def _new_drafting(config: EngineConfig, info: EngineInfo, drafter: Drafter | None) -> Drafting | None:
    most, adapts = config.num_speculative_tokens, drafter is None
    if drafter is None and config.speculative == "ngram":
        drafter = RepeatsDrafter()
    return None if drafter is None else Drafting(drafter, most, info.vocab_size, adapts)


def _new_scheduler(config: EngineConfig, info: EngineInfo) -> Scheduler:
    """Return a scheduler with an empty prefix cache.

    When an entry leaves the cache, its state checkpoint and its routed experts are dropped, too.
    """
    slots = StateSlots(info.num_slots, info.checkpoints) if info.live_states else None
    routes = RouteRecords(info.num_blocks, config.block_size * info.route_bytes) if info.num_experts else None

    def forget(entries: Iterable[Entry]) -> None:
        entries = list(entries)
        if slots is not None:
            slots.forget(entries)
        if routes is not None:
            routes.forget(entries)

    num_blocks = dict(zip(info.windows, info.blocks_by_window, strict=True))
    cache = PrefixCache(num_blocks, config.block_size, config.enable_prefix_caching, forget)
    intervals = Intervals(info.state_interval, config.decode_state_interval)
    return Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens, slots, intervals, routes)
