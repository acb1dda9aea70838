"""The executor: computes steps on one device, with the model, its memory, its CUDA graphs and its sampler.

Owns everything on the device: weights, KV cache, recurrent states, CUDA graphs and expert counts. Also owns warm-up,
and the sleep state of weights and KV cache. Does not own requests, sequences or blocks. A `Step` describes the
computation as plain arrays, so that a leader process could send the step to follower processes.

Guarantees: the results of a step depend only on the step, the previous steps and the weights. `compute` does not
synchronize the device. The caller can queue the next step before it waits for the results of the current step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ...kernels.transfer import to_device
from ..config import EngineConfig
from ..models.decoder import ROUTES, Decoder
from ..outputs.routes import RouteFormat
from ..request import Tag
from .adapters import AdapterStore
from .encoder import Encoder, ImageEncoder
from .experts import ExpertCounts, StepRoutes, route_format
from .graphs import DecodeGraphs
from .loading import EngineInfo, LoadedModel, available_memory, engine_info, find_max_model_len, uses_graphs
from .model_runner import LaneState, ModelRunner
from .mtp import DraftStep, MtpRunner
from .ranks import Links
from .sampler import Drawing, Drawn, Sampler, Scoring
from .step import ScoredRows, Step
from .warm_up import is_needed, warm_up
from .weights import WeightStaging, WeightStore

log = logging.getLogger(__name__)
_HOST = torch.device("cpu")


class StepResults(NamedTuple):
    """The results of a step, on the host.

    `drawn`: the drawn tokens, or None if the step draws no token. `scores`: for each score request in the step, a list
    of the columns that `Scoring.wait` returns; empty if the step has none of the request's scored tokens. `routes`:
    the expert rows of the step's tokens (see `RouteFormat`); None if the step does not record routes. Steps with
    drafted tokens always record routes. `expert_tokens`: as in `EngineStats`, without drafted tokens; empty for a model
    without experts.
    """

    drawn: Drawn | None
    scores: list[list[np.ndarray]]
    routes: memoryview | None
    expert_tokens: bytes


class Computation(Protocol):
    """A step in flight."""

    def wait(self) -> StepResults:
        """Wait until the device has computed the step, and return its results."""
        ...


class Peers(Protocol):
    """The other processes of an executor."""

    @property
    def waited_us(self) -> int:
        """How long this process has waited for the other processes, in microseconds."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if another process has failed."""
        ...

    def settle(self) -> None:
        """Wait until no other process computes. No step may be in flight in this process."""
        ...

    def close(self) -> None:
        """End the other processes. No call of the executor may follow."""
        ...


class NoPeers:
    """The `Peers` of an executor that is a single process."""

    waited_us = 0

    def check(self) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@runtime_checkable
class Executor(Protocol):
    """Computes steps, one after the other.

    `runs_ahead`: whether to queue a step before waiting for the previous step. `routes`: the format of recorded
    experts, or None for a model without experts.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def weights(self) -> WeightStore: ...

    @property
    def adapters(self) -> AdapterStore | None:
        """The weights of named adapters; None if the engine serves none."""
        ...

    @property
    def routes(self) -> RouteFormat | None: ...

    @property
    def runs_ahead(self) -> bool: ...

    @property
    def peers(self) -> Peers: ...

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of images, for a model with a vision tower."""
        ...

    def check_ready(self) -> None:
        """Raise RuntimeError if steps cannot be computed, because memory is asleep or the weights are incomplete."""
        ...

    def compute(self, step: Step) -> Computation:
        """Queue a step behind the step in flight. The queued step's `unseen` tokens are drawn by the step in flight."""
        ...

    def draft(self, step: DraftStep) -> list[list[int]]:
        """Return drafted tokens for each sequence of `step`. The model must have an MTP module. No step may be in
        flight. A rank of a stage without the MTP module only makes the `block_copies` of `step`.
        """
        ...

    def commit(self, staging: WeightStaging) -> None:
        """Use the staged weights from the next step on.

        Raise RuntimeError if the weights are asleep, and ValueError if the staging is incomplete. A call that raises
        RuntimeError or ValueError changes nothing.
        """
        ...

    def sleep(self, level: int, tags: Collection[Tag]) -> None:
        """Release the memory of `tags`. No step may be in flight. `level`: as in `Engine.sleep`."""
        ...

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Reallocate the memory of `tags`. The content of the KV cache is lost."""
        ...

    def memory(self) -> dict[str, int]:
        """Return how many bytes `weights`, `spare` (memory of replaced weights, kept for the next push), `kv_cache`,
        `adapters` (if named adapters are served) and `host_cache` (if there is a host tier) hold now: 0 for memory that
        is asleep. A sleep never releases the matrices A and B of adapters.
        """
        ...


def runs_ahead(device: torch.device) -> bool:
    """Return whether steps on this device are queued before the host has seen the previous step's tokens."""
    return device.type == "cuda"


@dataclass(frozen=True)
class LocalComputation:
    """A step in flight on the device of this process."""

    drawing: Drawing | None
    scores: Sequence[Scoring]
    routes: StepRoutes | None

    def wait(self) -> StepResults:
        drawn = None if self.drawing is None else self.drawing.wait()
        scores = [scoring.wait() for scoring in self.scores]
        rows, counts = (None, None) if self.routes is None else (self.routes.rows, self.routes.counts)
        return StepResults(
            drawn,
            scores,
            None if rows is None else rows.wait()[0].data.cast("B"),
            b"" if counts is None else counts.wait()[0].tobytes(),
        )


class LocalExecutor:
    """The executor of one process on one device. Construction includes the warm-up. A rank of any stage except the last
    computes its layers, but has no results.

    Raise ConfigError if `config` cannot be served.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        device = loaded.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events and graphs are created on the thread's current device
        started = time.monotonic()
        if is_needed(device):
            log.info("compiling kernels and measuring memory")
        available = warm_up(config, loaded, find_max_model_len(config, loaded.model.spec))
        on_host = available_memory(_HOST)
        if loaded.links is not None:
            available, on_host = _available_per_rank(available, on_host, loaded.links)
        info = engine_info(config, loaded, available)
        _check_host_tier(config.host_cache_bytes, on_host, info)
        spare = (
            1 if uses_graphs(config, loaded) else 0
        )  # one block per window and one state slot, for the padding rows of graphs
        num_blocks = [count + spare for count in info.blocks_by_window]
        journal = config.max_num_seqs, config.num_drafts
        mtp, stage = None, loaded.model.spec.stage
        if loaded.drafts_with_mtp(config) and stage.is_last:
            mtp = MtpRunner(loaded.model, num_blocks[0], config.block_size, config.num_drafts)
        sizes = num_blocks, config.block_size, info.num_slots + spare
        self._runner = ModelRunner(loaded.model, *sizes, journal, mtp, loaded.links, info.host_slots)
        self._sampler = Sampler(loaded.backend.ops, loaded.model.head, loaded.model.spec.head)
        self._graphs: DecodeGraphs | None = None
        if uses_graphs(config, loaded):
            parts = self._runner, self._sampler, info.blocks_by_window, info.num_slots
            self._graphs = DecodeGraphs(*parts, config.max_num_seqs, info.max_model_len)
            self._graphs.capture()
        formed = route_format(loaded.model.spec)
        self._experts = ExpertCounts(formed, device) if formed else None
        # Only the last stage has the drawn tokens on its device.
        ahead = runs_ahead(device) and stage.size == 1
        self._lanes = LaneState(config.max_num_seqs, device) if ahead else None
        self._asleep: set[Tag] = set()
        self.weights = loaded.weights
        self.adapters = AdapterStore(loaded.weights, config.adapter_bytes) if config.adapter_bytes else None
        self.info = replace(info, warm_up_seconds=time.monotonic() - started)
        if is_needed(device):
            log.info("warmed up in %.1f s", self.info.warm_up_seconds)
        log.info("memory in bytes: %s", ", ".join(f"{name} {size}" for name, size in _buckets(config, info).items()))

    @property
    def routes(self) -> RouteFormat | None:
        return None if self._experts is None else self._experts.format

    @property
    def runs_ahead(self) -> bool:
        return self._lanes is not None

    @property
    def peers(self) -> Peers:
        return NoPeers()

    @property
    def encoder(self) -> ImageEncoder | None:
        return self._runner.encoder

    def check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError(f"engine: memory of {sorted(self._asleep)} is asleep; wake it up before the next step")
        if not self.weights.is_whole:
            raise RuntimeError("engine: the weights are incomplete, so no step can run; commit a full set of weights")

    def compute(self, step: Step) -> LocalComputation:
        with torch.inference_mode():  # as a decorator, it would take several times as long
            return self._compute(step)

    def _compute(self, step: Step) -> LocalComputation:
        self._runner.host.copy(step.block_copies)
        graphs = self._graphs if step.adapter is None and self._graphs and self._graphs.serves(step) else None
        model, sampler = self._served(step.adapter)
        draw = self._prepared(step, graphs, sampler)
        hidden, found = graphs.run(step, self._lanes) if graphs else self._runner.run(step, self._lanes, model)
        if not self._runner.model.spec.stage.is_last:
            return LocalComputation(None, (), None)
        if self._runner.mtp is not None:
            self._runner.follow(self._runner.mtp, step, self._lanes, hidden)
        routes = None if self._experts is None else self._routes(self._experts, found[ROUTES], step)
        scores = [_score(sampler, rows, hidden[rows.start : rows.end]) for rows in step.scores]
        drawing = None if draw is None else draw(hidden)
        if drawing is not None and self._lanes is not None:
            self._lanes.update(step.draws, drawing.token_ids)
        return LocalComputation(drawing, scores, routes)

    @torch.inference_mode()
    def draft(self, step: DraftStep) -> list[list[int]]:
        self._runner.host.copy(step.block_copies)
        return [] if self._runner.mtp is None else self._runner.mtp.draft(step, self._sampler)

    def commit(self, staging: WeightStaging) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("engine: cannot commit weights while they are asleep; wake them up first")
        self.weights.commit(staging)

    def sleep(self, level: int, tags: Collection[Tag]) -> None:
        if self._graphs is not None:
            self._graphs.forget()
        if "kv_cache" in tags:
            self._runner.sleep()
        if "weights" in tags:
            if self.adapters is not None:
                self.adapters.drop_merged()
            self.weights.sleep(level)
        self._asleep.update(tags)

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Reallocate the memory of `tags`. When no memory is asleep anymore, capture the CUDA graphs again."""
        if "kv_cache" in tags:
            self._runner.wake_up()
        if "weights" in tags:
            self.weights.wake_up()
        self._asleep.difference_update(tags)
        if self._graphs is not None and not self._asleep:
            self._graphs.capture()

    def memory(self) -> dict[str, int]:
        held = {
            "weights": self.weights.num_held,
            "spare": self.weights.spare.num_held,
            "kv_cache": self._runner.num_held,
        }
        held |= {} if self.adapters is None else {"adapters": self.adapters.num_held}
        return held | {"host_cache": self._runner.host.num_held} if self.info.host_blocks else held

    def _routes(self, experts: ExpertCounts, routes: Tensor, step: Step) -> StepRoutes:
        """Count the tokens that a step routed to each expert, and start to copy the results to the host. This method
        does not count drafted tokens, because the host counts the accepted drafted tokens.
        """
        if not len(step.drafted):
            return experts.take(routes, None, step.records_routes)
        counted = np.delete(np.arange(len(step.token_ids)), step.drafted)
        return experts.take(routes, self._runner.to_device(counted), True)

    def _prepared(
        self, step: Step, graphs: DecodeGraphs | None, sampler: Sampler
    ) -> Callable[[Tensor], Drawing] | None:
        """Return a function that draws the tokens of a step from its hidden states; None if this rank draws none."""
        if not len(step.draws) or not self._runner.model.spec.stage.is_last:
            return None
        if graphs is not None and graphs.draws(step):
            return lambda hidden: graphs.draw(step)
        return sampler.prepared(step.draws, self._runner.device)

    def _served(self, adapter: str | None) -> tuple[Decoder, Sampler]:
        """Return the model and the sampler for an adapter, or for the base weights."""
        if adapter is None:
            return self._runner.model, self._sampler
        assert self.adapters is not None, "admission refuses requests for adapters that are not loaded"
        model = self.adapters.model_of(adapter)
        return model, Sampler(model.ops, model.head, model.spec.head)


def _score(sampler: Sampler, rows: ScoredRows, hidden: Tensor) -> Scoring:
    if not len(rows.token_ids):
        return Scoring([], has_mask=False)
    token_ids = to_device(torch.from_numpy(rows.token_ids), hidden.device)
    return Scoring(sampler.score(hidden, token_ids, rows), rows.has_mask)


def _available_per_rank(available: int, on_host: int, links: Links) -> list[int]:
    """Return two sizes in bytes: the device memory and the host memory that are available to every rank.

    `available`: the memory that is available to all ranks of the device together. `on_host`: the host memory that is
    available to all ranks of the worker together.
    """
    own = torch.tensor([available // links.num_sharers, on_host // links.topology.size])
    return torch.stack([*links.everyone.gather(own)]).amin(0).tolist()


def _check_host_tier(num_bytes: int, available: int, info: EngineInfo) -> None:
    """Raise ConfigError unless `num_bytes` bytes for a host tier fit into `available` bytes of host memory. On a CPU,
    the KV cache also takes its memory from these `available` bytes while the cache fills.
    """
    if torch.device(info.device).type == "cpu":
        available -= info.kv_bytes + info.state_bytes
    if num_bytes > max(0, available):
        raise ConfigError(
            f"host_cache_bytes must be at most the {max(0, available)} bytes of host memory that are available to each "
            f"rank (got {num_bytes}); lower host_cache_bytes",
            field="host_cache_bytes",
            value=num_bytes,
            limit=max(0, available),
        )


def _buckets(config: EngineConfig, info: EngineInfo) -> dict[str, int]:
    """Return the memory that an engine uses, as a map from the purpose to the size in bytes."""
    blocks = " + ".join(map(str, info.blocks_by_window))
    buckets = {"weights": info.weight_bytes, f"KV cache of {blocks} blocks": info.kv_bytes}
    if info.state_bytes:
        buckets[f"{info.live_states} live states, {info.checkpoints} checkpoints and drafts"] = info.state_bytes
    if info.route_bytes and info.enable_prefix_caching:
        most = info.num_blocks * info.block_size * info.route_bytes
        buckets[f"routed experts of {info.num_blocks} blocks, on the host, at most"] = most
    if config.host_cache_bytes:
        buckets["host tier with its routed experts, at most"] = config.host_cache_bytes
    if config.encoded_bytes:
        buckets["encoded images, at most"] = config.encoded_bytes
    if config.adapter_bytes:
        buckets["named adapters, at most"] = config.adapter_bytes
    return buckets | {"largest step": info.scratch_bytes}
