"""The engine: requests in, finished samples out, one `step` at a time.

Joins its parts: `admission` takes requests in, `pipeline` has those that are open and computes them step by step,
and `running.executor` is what computes. Owns the order in which weights, memory and requests change together. One
thread owns the engine: nothing here is locked.

Promises: every request that `add` accepted is finished by exactly one output per sample (or one for a score), from
`step`, `settle`, `abort`, `commit_weights`, `sleep` or `interrupt`. The deltas of a sample, one behind the other, are
how its output begins, to the bit. A sample's bits are a function of weights, prompt, parameters, seed, backend,
instruction set and dtype alone; the weights that produced each token are on record, and none is computed from KV that
other weights left. A prompt that several samples or several requests share is computed once.
An exception from `step` is final: the engine's state is then undefined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from .admission import Admission
from .cache.prefix_cache import Entry, PrefixCache
from .cache.routes import RouteRecords
from .config import EngineConfig
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

    `loaded`: what `load_model` gave for this config's model, dtype, device and backend, so that engines can share
    weights.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config) if loaded is None else loaded
        self._executor: Executor = LocalExecutor(config, loaded)
        self._scheduler = _new_scheduler(config, self.info)
        self._prompts, self._ledger = SharedPrompts(), Ledger(self._executor.routes)
        self._admission = Admission(self.info, loaded.folder, self._scheduler, self._prompts, self._ledger)
        self._pipeline = Pipeline(self._executor, self._scheduler, self._prompts, self._ledger)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves, and with how much memory."""
        return self._executor.info

    @property
    def weights(self) -> WeightStore:
        """The weights in use."""
        return self._executor.weights

    @property
    def weight_version(self) -> int:
        """Of the weights in use; 0 for those of the checkpoint."""
        return self._pipeline.commit.version

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request is unfinished, so that `step` has something to do."""
        return bool(self._ledger.open)

    def add(self, request: Request) -> None:
        """Accepts a request. Raise InvalidRequestError, and change nothing, if it could never be served."""
        self._admission.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends one sample, or all unfinished ones, with what they have. Raise UnknownRequestError if there is none."""
        return [self._pipeline.abort(entry) for entry in self._ledger.find(request_id, index)]

    def stream(self, request_id: str) -> None:
        """Lets `take_deltas` tell how the samples of a request grow, first of all what they have. Raise
        UnknownRequestError if there are none.
        """
        self._ledger.grown.follow(self._ledger.samples_of(request_id))

    def take_deltas(self) -> list[SampleDelta]:
        """What the unfinished samples of streamed requests have got since this was called last. What a finished one got
        since then is in its output.
        """
        return self._ledger.grown.take(self._ledger.is_open)

    def step(self) -> list[Output]:
        """Computes one chunk of every scheduled sequence, draws the next tokens; returns what finished.

        On a GPU it queues that step and returns what the one before finished; with nothing to queue, what all finish.
        """
        return self._pipeline.step()

    def settle(self) -> list[Output]:
        """Waits for the step under way, if there is one; returns what it finished."""
        return self._pipeline.settle()

    def commit_weights(self, staging: WeightStaging, version: int, in_flight: InFlight) -> list[Output]:
        """Serves what was staged from the next step on; returns what the step under way finishes and what is aborted.

        `in_flight`: running requests have their KV computed anew and keep their tokens, while scores begin again
        (`recompute`), end with what they have (`abort`), or must not exist, waiting ones neither (`drain`).
        Raise RuntimeError for requests that `drain` finds, or while the weights sleep; ValueError for an incomplete
        staging; then nothing changed.
        """
        self._check_drained(in_flight)
        self._executor.commit(staging)
        outputs = self.settle()  # Its tokens were drawn with the old weights, and carry their version.
        self._pipeline.commit = Commit(version)
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
        self._executor.sleep(level, tags)
        return outputs

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Takes the memory of `tags` again; weights that were dropped are not whole before the next commit.

        Once nothing sleeps any more, CUDA graphs are captured anew.
        """
        self._executor.wake_up(tags)

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
            purpose = sequence.purpose
            entries = [purpose] if isinstance(purpose, OpenScore) else purpose.samples.copy()
            outputs += [self._pipeline.abort(entry) for entry in entries]
        return outputs

    def memory(self) -> dict[str, int]:
        """The bytes held now by weights and KV cache, 0 for what sleeps elsewhere or is dropped; and of a model with
        experts by the record of those chosen (`routed_experts`), on the host.
        """
        held, routes = self._executor.memory(), self._scheduler.routes
        return held if routes is None else held | {"routed_experts": routes.num_bytes + self._ledger.route_bytes}

    def invalidate_prefix_cache(self) -> None:
        """Makes sure that no later request reuses KV computed until now; running requests keep theirs."""
        self._scheduler.cache.invalidate()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for exactly once."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """The counters and gauges of this moment."""
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
            evictions=sum([pool.evictions for pool in tables.pools]),
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
            raise RuntimeError(f"engine: expected no unfinished requests after a drain, found {len(self._ledger.open)}")


def _new_scheduler(config: EngineConfig, info: EngineInfo) -> Scheduler:
    """A scheduler with an empty prefix cache, and what hangs on the cache's entries."""
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
