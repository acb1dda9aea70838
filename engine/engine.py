"""The engine: requests in, finished samples out, one `step` at a time.

Connects the parts of the engine. `admission` accepts requests, `pipeline` tracks open requests and computes them step
by step, and `running.executor` runs each step on the device. `Engine` owns the order of operations when weights, memory
and requests change together. The engine has no locks: a single thread must make all calls.

Guarantees:

- Every accepted request gets exactly one output per sample, or exactly one output if it is a score request. Outputs are
  returned by `step`, `settle`, `abort`, `commit_weights`, `commit_adapter`, `remove_adapter`, `sleep` and `interrupt`.
- The concatenated deltas of a sample are a bitwise-identical prefix of the sample's output.
- The bits of a sample depend only on weights, prompt, sampling parameters, seed, backend, instruction set, dtype,
  pieces, and the formats in which weights and KV are stored.
- The output records the version of the weights that produced each token. Each token is computed from KV that was
  computed with the same version of the weights, except the tokens in `SampleOutput.old_kv`.
- KV of older weights is never published, which means that it is never added to the index of the prefix cache.
- The engine computes a prompt once for all samples and requests that share the prompt.

After `step` has raised an exception, the state of the engine is undefined. Discard the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from .admission import Admission
from .cache.prefix_cache import Entry, PrefixCache
from .cache.routes import RouteRecords
from .commits import Adapter, Commit
from .config import EngineConfig
from .drafting.drafter import Drafter
from .drafting.drafting import Drafting
from .drafting.mtp import MtpDrafter
from .drafting.repeats import RepeatsDrafter
from .grammars.masks import Grammars
from .media import ImageLimits
from .outputs.open_requests import OpenSample, OpenScore
from .parallel.leader import RankedExecutor
from .pipeline import Ledger, Pipeline
from .request import InFlight, Output, Request, SampleDelta, SleepInFlight, Tag
from .running.adapters import AdapterStaging, AdapterStore
from .running.executor import Executor, LocalExecutor
from .running.loading import EngineInfo, LoadedModel, load_model
from .running.weights import WeightStaging, WeightStore
from .scheduling.encodings import Encodings, EncodingStats
from .scheduling.recurrent import Intervals, StateSlots, StateStats
from .scheduling.scheduler import Scheduler, SharedPrompts
from .scheduling.sequence import Sequence
from .stats import EngineStats


class Engine:
    """A model, its KV cache and its requests. Raise ConfigError or ModelError if `config` cannot be served.

    `loaded`: the result of `load_model` for a configuration with the same model, dtype, device and backend as `config`.
    Pass a loaded model to share weights among engines. `drafter`: used instead of the drafters that
    `config.speculative` names. If `drafter` is given, `config.speculative` must not be `off`. `draft_always`: in each
    step, draft as many tokens as possible, whatever the drafts cost. If `drafter` is given, the engine always drafts as
    many tokens as possible.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel | None = None,
        drafter: Drafter | None = None,
        *,
        draft_always: bool = False,
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        assert drafter is None or config.num_drafts, "a drafter needs speculative other than off"
        self._executor, loaded = _new_executor(config, loaded)
        self._scheduler = _new_scheduler(config, self.info, loaded)
        self._prompts, self._ledger = SharedPrompts(), Ledger(self._executor.routes, config.max_record_bytes)
        spec = loaded.model.spec
        images = ImageLimits(spec.served_tower, config.max_images, config.max_image_patches)
        self._grammars = Grammars(loaded.folder, self.info.vocab_size, self.info.eos_token_ids)
        self._admission = Admission(
            self.info,
            loaded.folder,
            self._scheduler,
            self._prompts,
            self._ledger,
            spec,
            images,
            self._grammars,
            self.adapters,
        )
        self._drafting: Drafting | None = None
        if config.num_drafts:
            adapts = drafter is None and not draft_always
            drafters = [drafter] if drafter is not None else self._new_drafters(config, loaded)
            self._drafting = Drafting(drafters, config.num_drafts, self.info.vocab_size, adapts)
        parts = self._executor, self._scheduler, self._prompts, self._ledger, self._grammars
        self._pipeline = Pipeline(*parts, self._drafting)

    @property
    def info(self) -> EngineInfo:
        """The properties and limits of the engine."""
        return self._executor.info

    @property
    def images(self) -> ImageLimits:
        """The limits on the images of a request."""
        return self._admission.images

    @property
    def grammars(self) -> Grammars:
        """The grammars of requests. Any thread may call the methods `Grammars.find` and `Grammars.prepare`."""
        return self._grammars

    @property
    def weights(self) -> WeightStore:
        """The weights in use."""
        return self._executor.weights

    @property
    def adapters(self) -> AdapterStore | None:
        """The named adapters; None if the engine serves none. Change the named adapters only through the engine."""
        return self._executor.adapters

    @property
    def weight_version(self) -> int:
        """The version of the base weights in use; 0 for the checkpoint's weights."""
        return self._pipeline.commit.version

    @property
    def has_unfinished(self) -> bool:
        """Return whether an accepted request is unfinished, so that `step` has work to do."""
        return bool(self._ledger.open)

    def add(self, request: Request) -> None:
        """Accept a request. If the request can never be served, change nothing and raise InvalidRequestError."""
        self._admission.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Abort a score, one sample, or all unfinished samples of a request, and return the outputs.

        The output of an aborted sample has the tokens drawn so far. The output of an aborted score has no log-probs.
        Raise UnknownRequestError if the score or sample is unknown or finished.
        """
        outputs = [self._pipeline.abort(entry) for entry in self._ledger.find(request_id, index)]
        if not self.has_unfinished:
            self._pipeline.settle()  # no later call would settle, and other ranks would wait for this process
        return outputs

    def stream(self, request_id: str) -> None:
        """Make `take_deltas` return the tokens of a request's samples, including the tokens drawn so far.

        Raise UnknownRequestError if the request has no unfinished samples.
        """
        self._pipeline.stream(request_id)

    def take_deltas(self) -> list[SampleDelta]:
        """Return the tokens drawn since the last call, for the unfinished samples of streamed requests.

        The last tokens of a finished sample appear only in the sample's output.
        """
        return self._ledger.grown.take(self._ledger.is_open)

    def step(self) -> list[Output]:
        """Compute one chunk of every scheduled sequence, draw the next tokens, and return complete outputs.

        On a GPU, queue the new step, wait for the previous step and return the outputs of the previous step. If the
        previous step finished the last open request, also wait for the new step. With several stages, wait for the
        oldest step in flight only if every stage has a step, or if no new step can be planned.
        """
        return self._pipeline.step()

    def settle(self) -> list[Output]:
        """Wait for the step in flight, if there is one, and return its outputs. After this call, no process of the
        engine computes.
        """
        outputs = self._pipeline.settle()
        self._executor.peers.settle()
        return outputs

    def commit_weights(self, staging: WeightStaging, version: int, in_flight: InFlight) -> list[Output]:
        """Switch to the staged weights, beginning with the next step.

        Return the outputs of the step in flight and of aborted requests.

        `in_flight`: what happens to requests that have started. `recompute`: samples keep their tokens, but their KV is
        computed again; scores restart; samples with `one_version` that have tokens are aborted. `abort`: every started
        request is aborted. `drain`: the caller has already drained the engine, so no running or waiting request may be
        left.

        `keep`: samples that are decoding keep their KV. `SampleOutput.old_kv` lists the tokens that these samples draw
        over the old KV. The old KV is never published; neither are the blocks that these samples fill later. Sequences
        that are computing a prompt or a score, or are waiting, are computed with the new weights, as with `recompute`.
        If a sample loses its old KV, for example in a preemption, the KV is computed again with the current weights,
        and later tokens are not listed in `old_kv`.

        Raise RuntimeError if the weights are asleep, if `in_flight` is `drain` and a request is unfinished, or if
        `in_flight` is `keep` and a request with `one_version` is unfinished. Raise RuntimeError if a named adapter is
        loaded, because the adapter belongs to the present weights. Raise ValueError if the staging is incomplete. A
        call that raises RuntimeError or ValueError changes nothing.
        """
        self._check_drained(in_flight)
        self._check_no_adapters("commit")
        if in_flight == "keep" and _one_version(self._ledger.entries):
            raise RuntimeError("commit: in_flight keep would mix versions in unfinished requests with one_version")
        self._executor.commit(staging)
        self._forget_images()
        outputs = self.interrupt(in_flight)  # Tokens of steps in flight were drawn with the old weights.
        if in_flight == "keep":
            self._scheduler.keep_kv(self.weight_version)
        elif in_flight == "recompute":
            mixed = [sample for sample in _one_version(self._started()) if sample.token_ids]
            outputs += [self._pipeline.abort(sample) for sample in mixed]
        self._pipeline.commit = Commit(version)
        return outputs

    def commit_adapter(
        self, staging: AdapterStaging, name: str, version: int, in_flight: SleepInFlight
    ) -> list[Output]:
        """Load a named adapter, or replace the adapter with this name, beginning with the next step.

        Return the outputs of the steps in flight and of aborted requests. `in_flight`: as in `commit_weights`, for the
        requests of this adapter. All other requests continue, and keep their cached prefixes.

        Raise RuntimeError if the engine serves no named adapters, if the weights are incomplete, or if `in_flight` is
        `drain` and any request is unfinished. Raise ValueError if the adapter does not fit into
        `EngineConfig.adapter_bytes`. A call that raises RuntimeError or ValueError changes nothing.
        """
        store = self._adapter_store()
        self._check_drained(in_flight)
        if not self.weights.is_whole:
            raise RuntimeError("engine: the base weights are incomplete, so no adapter can be loaded")
        store.check(name, staging)
        outputs = self.settle()
        if (adapter := store.find(name)) is not None:
            self._prompts.clear()
            if in_flight == "abort":
                outputs += [self._pipeline.abort(entry) for entry in self._started(adapter)]
            self._scheduler.recompute([each for each in self._scheduler.running.sequences if _is_of(each, adapter)])
        store.install(name, staging, version)
        if adapter is not None:
            mixed = [sample for sample in _one_version(self._started(adapter)) if sample.token_ids]
            outputs += [self._pipeline.abort(sample) for sample in mixed]
        return outputs

    def remove_adapter(self, name: str) -> list[Output]:
        """Unload a named adapter and abort its requests. Return the outputs of the steps in flight and of aborted
        requests.

        Raise RuntimeError, with nothing changed, if no adapter has this name.
        """
        store = self._adapter_store()
        if (adapter := store.find(name)) is None:
            raise RuntimeError(f"engine: adapter {name!r} is not loaded")
        outputs = self.settle()
        own = [entry for entry in self._ledger.entries if _is_of(self._ledger.sequence_of(entry), adapter)]
        outputs += [self._pipeline.abort(entry) for entry in own]
        store.remove(name)
        return outputs

    def sleep(self, level: int, tags: Collection[Tag], in_flight: SleepInFlight) -> list[Output]:
        """Release the memory of `tags` until `wake_up`.

        Return the outputs of the step in flight and of aborted requests.

        `level`: 1 keeps the weights in host memory; 2 drops the weights, so that new weights must be committed after
        `wake_up`. A sleep drops cached prefixes at both levels. `in_flight`: as in `commit_weights`. If `in_flight` is
        `recompute` and only the weights are put to sleep, running requests keep their KV blocks. If `in_flight` is
        `drain` and a request is unfinished, change nothing and raise RuntimeError. Also raise RuntimeError if level 2
        would drop the base weights of a named adapter.
        """
        if level == 2 and "weights" in tags:
            self._check_no_adapters("sleep at level 2")
        if "kv_cache" in tags or in_flight == "abort":
            outputs = self.interrupt(in_flight)
        else:
            self._check_drained(in_flight)
            outputs = self.settle()
            self.invalidate_prefix_cache()
        self._executor.sleep(level, tags)
        self._forget_images()
        return outputs

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Reallocate the memory of `tags`. Weights that `sleep` dropped are incomplete until the next commit.

        The CUDA graphs are captured again when weights and KV cache are both awake.
        """
        self._executor.wake_up(tags)

    def interrupt(self, in_flight: InFlight) -> list[Output]:
        """Drop cached prefixes and the blocks of all running sequences. If `in_flight` is `keep`, decoding sequences
        keep their blocks.

        Return the outputs of the step in flight and of aborted requests.

        `in_flight`: as in `commit_weights`. If `in_flight` is `drain` and a request is unfinished, change nothing and
        raise RuntimeError.
        """
        self._check_drained(in_flight)
        outputs = self.settle()
        self.invalidate_prefix_cache()
        if in_flight == "abort":
            return outputs + [self._pipeline.abort(entry) for entry in self._started()]
        self._scheduler.recompute_running(keeps_decoding=in_flight == "keep")
        return outputs

    def check(self) -> None:
        """Raise RuntimeError if another process of the engine has failed."""
        self._executor.peers.check()

    def close(self) -> None:
        """End the engine's other processes. No call may follow. If `close` is not called, the other processes end when
        this process ends.
        """
        self._executor.peers.close()
        self._grammars.close()

    def memory(self) -> dict[str, int]:
        """Return the bytes that `weights`, `spare` (memory of replaced weights, kept for the next push), `kv_cache`,
        `adapters` (if named adapters are served) and `host_cache` (if there is a host tier) hold now: 0 for memory that
        is asleep. A sleep never releases the matrices A and B of adapters.

        Also return `records`, the bytes of host memory that the records of unfinished requests hold (see
        `EngineConfig.max_record_bytes`). For a model with experts, also return `routed_experts`, the bytes of host
        memory that all recorded expert ids hold.
        """
        held = self._executor.memory() | {"records": self._ledger.records.num_bytes}
        routes = self._scheduler.routes
        return (
            held if routes is None else held | {"routed_experts": routes.num_bytes + self._ledger.open_routes.num_bytes}
        )

    def invalidate_prefix_cache(self) -> None:
        """Prevent later requests from reusing KV computed before this call. Running requests keep their KV."""
        self._scheduler.cache.invalidate()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for exactly once."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """Return the current counters and gauges."""
        scheduler, ledger, admission = self._scheduler, self._ledger, self._admission
        tables, states = scheduler.cache.tables, scheduler.running.states
        checkpoints = StateStats() if states is None else states.slots.stats
        tiers = [tables.host] if states is None else [tables.host, states.slots.host]
        images = EncodingStats() if scheduler.running.encodings is None else scheduler.running.encodings.stats
        return EngineStats(
            steps=scheduler.stats.steps,
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
            host_stored=sum(tier.num_stored for tier in tiers),
            host_restored=sum(tier.num_restored for tier in tiers),
            host_evictions=sum(tier.num_evicted for tier in tiers),
            host_hits=tables.num_host_hits * tables.block_size,
            shortened_hits=scheduler.stats.shortened_hits,
            images_encoded=images.encoded,
            image_evictions=images.evictions,
            record_errors=ledger.records.num_errors,
            checkpoints_skipped=checkpoints.skipped,
            checkpoints_evicted=checkpoints.evicted,
            checkpoints_restored=checkpoints.restored,
            checkpoints_ready=checkpoints.ready,
            checkpoints_reserved=checkpoints.reserved,
            checkpoints_on_host=0 if states is None else states.slots.host.pools[0].num_cached,
            expert_tokens=self._pipeline.experts.counts,
            pools=tables.stats(),
            drafts=() if self._drafting is None else self._drafting.stats(),
            samples_finished=dict(ledger.finished),
            rank_wait_us=self._executor.peers.waited_us,
        )

    def _new_drafters(self, config: EngineConfig, loaded: LoadedModel) -> list[Drafter]:
        found: list[Drafter] = [RepeatsDrafter()] if config.wants_repeats else []
        if loaded.drafts_with_mtp(config):
            found.append(MtpDrafter(self._executor, self._scheduler.running, config.num_drafts))
        assert found, "with speculative='mtp', `loaded` must have been loaded with 'mtp' or 'auto'"
        return found

    def _forget_images(self) -> None:
        """Drop all encoded images, and the image that is being encoded."""
        if (encodings := self._scheduler.running.encodings) is not None and self._executor.encoder is not None:
            encodings.clear()
            self._executor.encoder.clear()

    def _adapter_store(self) -> AdapterStore:
        if self.adapters is None:
            raise RuntimeError("engine: no memory for named adapters; set adapter_bytes")
        return self.adapters

    def _check_no_adapters(self, what: str) -> None:
        if self.adapters:
            raise RuntimeError(f"{what}: unload the named adapters {self.adapters.names} first")

    def _started(self, adapter: Adapter | None = None) -> list[OpenSample | OpenScore]:
        """Return the samples and scores of the sequences that have started. `adapter`: return only samples and scores
        of this adapter.
        """
        started = [each for each in self._scheduler.started() if adapter is None or _is_of(each, adapter)]
        purposes = [sequence.purpose for sequence in started]
        return [entry for each in purposes for entry in ([each] if isinstance(each, OpenScore) else each.samples)]

    def _check_drained(self, in_flight: InFlight) -> None:
        if in_flight == "drain" and self.has_unfinished:
            raise RuntimeError(f"engine still has unfinished requests after a drain (got {len(self._ledger.open)})")


def _is_of(sequence: Sequence, adapter: Adapter) -> bool:
    return sequence.chain.adapter is adapter


def _one_version(entries: Iterable[OpenSample | OpenScore]) -> list[OpenSample]:
    """Return the samples of requests that set `one_version`."""
    return [each for each in entries if isinstance(each, OpenSample) and each.request.params.one_version]


def _new_executor(config: EngineConfig, loaded: LoadedModel | None) -> tuple[Executor, LoadedModel]:
    if config.num_ranks > 1:
        assert loaded is None, "each rank loads its own part of the model"
        ranked = RankedExecutor(config)
        return ranked, ranked.loaded
    loaded = load_model(config) if loaded is None else loaded
    return LocalExecutor(config, loaded), loaded


def _new_scheduler(config: EngineConfig, info: EngineInfo, loaded: LoadedModel) -> Scheduler:
    """Return a scheduler with an empty prefix cache.

    An entry that leaves the cache loses its state checkpoint and its routed experts.
    """
    slots = StateSlots(info.num_slots, info.checkpoints, info.host_states) if info.live_states else None
    routes, most = None, info.num_blocks + sum(info.host_blocks[:1])
    if info.num_experts:
        routes = RouteRecords(most, config.block_size * info.route_bytes)

    def forget(entries: Iterable[Entry]) -> None:
        entries = list(entries)
        if slots is not None:
            slots.forget(entries)
        if routes is not None:
            routes.forget(entries)

    num_blocks = dict(zip(info.windows, info.blocks_by_window, strict=True))
    cache = PrefixCache(num_blocks, config.block_size, config.enable_prefix_caching, forget, info.host_blocks)
    intervals = Intervals(info.state_interval, config.decode_state_interval)
    sizes = config.max_num_seqs, config.max_num_batched_tokens
    encodings, tower = None, loaded.model.spec.served_tower
    if tower is not None:
        encodings = Encodings(config.image_cache_bytes, tower, loaded.model.dtype.itemsize)
    return Scheduler(cache, *sizes, slots, intervals, routes, config.num_steps, encodings)
