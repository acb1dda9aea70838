"""An engine without a model, for tests of the service. The fake has the real engine's methods. Tokens depend on the
seed.

Sample i of a group has `max_tokens - i` tokens, at least one, so the samples of a group finish at different steps. Four
special token ids in a prompt cause failures. A test can therefore trigger a failure even in another process. The
weights are small tensors, and no computation uses them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trueroll.engine.grammars.source import Grammar
from trueroll.engine.media import ImageLimits
from trueroll.engine.request import (
    FinishReason,
    GenerateRequest,
    Output,
    Request,
    SampleDelta,
    SampleOutput,
    ScoreOutput,
    WeightSpan,
    derive_seed,
)
from trueroll.engine.running.weights import AdapterBase
from trueroll.engine.stats import DraftStats, PoolStats
from trueroll.errors import InvalidRequestError, UnknownRequestError
from trueroll.weight_sync.payload.manifest import checksum
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.worker.assembly import LendableStagingArea, StagingArea

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 500
FAIL_IN_STEP = 901
FAIL_IN_ADD = 902
HANG_IN_STEP = 903
SLOW_STEP = 904
PLACEHOLDER = 905
STAGING_BYTES = 500
SHAPES = {"a": (48, 4), "b": (5,), "embed": (32, 4)}


@dataclass(frozen=True)
class FakeInfo:
    model: str = "fake"
    architecture: str = "FakeForCausalLM"
    dtype: str = "float32"
    max_num_seqs: int = 8
    device: str = "cpu"
    backend: str = "fake"
    backend_note: str = ""
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = 512
    route_bytes: int = 0
    max_record_bytes: int = 2**33
    live_states: int = 0
    checkpoints: int = 0
    expert_layers: int = 0
    num_experts: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    llguidance: str | None = None
    max_images: int = 0
    max_image_patches: int = 0


class FakeGrammars:
    """Grammars that need no preparation. Samples of the fake engine ignore them."""

    def find(self, grammar: Grammar) -> object | None:
        return grammar

    def prepare(self, grammar: Grammar) -> object:
        return grammar

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class FakeTower:
    """The images of this tower have blocks of 2 x 2 patches of 2 x 2 pixels."""

    placeholder: int = PLACEHOLDER
    video_placeholder: int | None = None
    frames: int = 1
    patch_size: int = 2
    merge: int = 2
    channels: int = 3
    sees_span: bool = False
    grid: tuple[int, int] | None = None

    def num_tokens(self, rows: int, columns: int) -> int:
        return rows * columns // 4


@dataclass(frozen=True)
class FakeStats:
    steps: int
    num_running: int
    num_waiting: int
    computed_tokens: int
    samples_finished: dict[str, int]
    prefix_queries: int = 0
    prefix_hits: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    deferred_admissions: int = 0
    evictions: int = 0
    host_stored: int = 0
    host_restored: int = 0
    host_evictions: int = 0
    host_hits: int = 0
    shortened_hits: int = 0
    images_encoded: int = 0
    image_evictions: int = 0
    record_errors: int = 0
    checkpoints_skipped: int = 0
    checkpoints_evicted: int = 0
    checkpoints_restored: int = 0
    checkpoints_ready: int = 0
    checkpoints_reserved: int = 0
    checkpoints_on_host: int = 0
    expert_tokens: bytes = b""
    pools: tuple[PoolStats, ...] = (PoolStats(None, 0, 0, 0, 0),)
    drafts: tuple[DraftStats, ...] = ()
    rank_wait_us: int = 0
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums of the live weights."""


def expected_tokens(seed: int, index: int, count: int) -> list[int]:
    """Return the first `count` tokens of sample `index` in a group with `seed`."""
    own = derive_seed(seed, index)
    return [(own >> (position % 50)) % VOCAB_SIZE for position in range(count)]


class FakeStaging:
    """Receives the rows and elements of a push, like `WeightStaging` of `trueroll.engine.running.weights`.

    `staged`: names of the tensors that have received rows.
    """

    def __init__(self, live: dict[str, torch.Tensor], in_place: bool) -> None:
        self.in_place = in_place
        self.tensors = live if in_place else {name: torch.full_like(tensor, 99.0) for name, tensor in live.items()}
        self.staged: set[str] = set()
        self.elements: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.num_bytes = STAGING_BYTES

    def rows(self, name: str, start: int, length: int) -> torch.Tensor:
        self.staged.add(name)
        return self.tensors[name].narrow(0, start, length)

    def put(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        assert not self.in_place
        self.elements.append((name, indices.clone(), values.clone()))

    def adapt(self, weights: Mapping[str, tuple[str, str, int, float]], alone: bool) -> None:
        raise NotImplementedError("FakeStaging has no adapters")

    def to_merge(self) -> Sequence[str]:
        return ()

    def merge(self, name: str) -> bool:
        raise NotImplementedError("FakeStaging has no adapters")

    def keep_base(self, tensors: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError("FakeStaging has no adapters")


class FakeWeights:
    """The target of pushes, initially zeros. `live`: the tensors after the last commit."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str = "bfloat16",
        tied: Mapping[str, str] | None = None,
        ignored: Collection[str] = (),
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.shapes = dict(shapes)
        self.dtype, self.dtypes = dtype, dict(dtypes or {})
        self.parts: dict[str, tuple[str, ...]] = {}
        self.kin: str | None = None
        self.commit_note = ""
        self.tied = dict(tied or {})
        self.ignored = frozenset(ignored)
        self.optional: Collection[str] = ()
        self.optional_note = ""
        self.quantization = "none"
        self.renamed: dict[str, str] = {}
        self.respelled: dict[str, str] = {}
        self.left_out: tuple[str, ...] = ()
        self.base = AdapterBase()
        self.live = {
            name: torch.zeros(shape, dtype=getattr(torch, self.dtypes.get(name, dtype)))
            for name, shape in shapes.items()
        }

    def new_staging(self, in_place: bool) -> FakeStaging:
        return FakeStaging(self.live, in_place)

    def new_lendable(self) -> LendableStagingArea:
        raise NotImplementedError("FakeWeights has no kin and shares no memory")

    def borrow(self, lent: tuple[int, int, int, int], has_optional: bool) -> StagingArea:
        raise NotImplementedError("FakeWeights has no kin and shares no memory")

    def commit(self, staging: FakeStaging) -> None:
        for name in staging.staged:
            self.live[name] = staging.tensors[name]
        for name, indices, values in staging.elements:
            self.live[name].put_(indices, values)

    def served(self, name: str) -> torch.Tensor:
        return self.live[name]

    def served_rows(self, name: str, start: int, length: int) -> torch.Tensor:
        return self.live[name].narrow(0, start, length)

    def before_adapters(self, name: str) -> torch.Tensor:
        raise NotImplementedError("FakeWeights has no adapters")

    def checksums(self) -> dict[str, int]:
        return {name: checksum(raw_bytes(tensor)) for name, tensor in self.live.items()}


class FakeEngine:
    """A step sets `at_gate`, waits for `gate`, and adds tokens only while `flow` is set.

    `requests`: all added requests, in order. `actions`: all other calls, in order.
    """

    info = FakeInfo()
    grammars = FakeGrammars()
    images = ImageLimits(FakeTower(), 8, 64)

    def __init__(self, weights: FakeWeights | None = None) -> None:
        self.weight_version = 3
        self.adapters = None
        self.weights = weights or FakeWeights(SHAPES, "float32", {"head": "embed"}, ["constant"])
        self.actions: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.flow = threading.Event()
        self.flow.set()
        self.requests: list[Request] = []
        self._open: dict[str, dict[int, int]] = {}
        self._by_id: dict[str, Request] = {}
        self._told: dict[str, Counter[int]] = {}
        self._steps = 0
        self._computed = 0
        self._finished: Counter[str] = Counter()
        self._kept: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    def add(self, request: Request) -> None:
        is_group = isinstance(request, GenerateRequest)
        tokens = request.prompt_token_ids if is_group else request.token_ids
        field, num_samples = ("prompt_token_ids", request.params.n) if is_group else ("token_ids", 1)
        if FAIL_IN_ADD in tokens:
            raise RuntimeError("broken add")
        if len(tokens) < (1 if is_group else 2):
            text = f"token ids: expected more, found {len(tokens)}"
            raise InvalidRequestError(text, field=field, value=len(tokens))
        if min(tokens) < 0 or max(tokens) >= VOCAB_SIZE:
            raise InvalidRequestError(
                f"token ids: expected ids in [0, {VOCAB_SIZE}), found {min(tokens)}..{max(tokens)}",
                field=field,
                limit=VOCAB_SIZE - 1,
            )
        if len(tokens) + ((request.params.max_tokens or 1) if is_group else 0) > MAX_MODEL_LEN:
            text = f"length: prompt and max_tokens together exceed max_model_len = {MAX_MODEL_LEN} tokens"
            raise InvalidRequestError(text, field=field, limit=MAX_MODEL_LEN)
        assert request.id not in self._open
        if is_group:
            params = request.params.with_max_tokens(len(tokens), MAX_MODEL_LEN)
            request = dataclasses.replace(request, params=params)
        self.requests.append(request)
        self._by_id[request.id] = request
        self._open[request.id] = dict.fromkeys(range(num_samples), 0)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        samples = self._open.get(request_id, {})
        indices = list(samples) if index is None else [index] if index in samples else []
        if not indices:
            raise UnknownRequestError(f"abort: request {request_id!r} is not running")
        return [self._finish(request_id, i, "abort") for i in indices]

    def stream(self, request_id: str) -> None:
        if request_id not in self._open or not isinstance(self._by_id[request_id], GenerateRequest):
            raise UnknownRequestError(
                f"stream: request {request_id!r} is not running, or is a score request, which has no samples"
            )
        self._told.setdefault(request_id, Counter())

    def take_deltas(self) -> list[SampleDelta]:
        deltas: list[SampleDelta] = []
        for id, told in self._told.items():
            for index, count in self._open[id].items():
                if count > (start := told[index]):
                    told[index] = count
                    tokens, logprobs = self._drawn(id, index, count)
                    deltas.append(
                        SampleDelta(id, index, start, tokens[start:], None if logprobs is None else logprobs[start:])
                    )
        return deltas

    def step(self) -> list[Output]:
        self.at_gate.set()
        self.gate.wait()
        time.sleep(0.0005)
        self._steps += 1
        outputs: list[Output] = []
        if not self.flow.is_set():
            return outputs
        for id in list(self._open):
            outputs += self._step_request(id)
        return outputs

    def commit_weights(self, staging: Any, version: int, in_flight: str) -> list[Output]:
        if in_flight == "keep":
            self._keep()
        self.actions.append(("commit", version, in_flight))
        self.weights.commit(staging)
        self.weight_version = version
        return self._act(in_flight)

    def _keep(self) -> None:
        requests = [self._by_id[id] for id in self._open]
        if any(isinstance(request, GenerateRequest) and request.params.one_version for request in requests):
            raise RuntimeError("commit: keep with an unfinished request that sets one_version")
        for id, samples in self._open.items():
            for index, count in samples.items():
                if count and isinstance(self._by_id[id], GenerateRequest):
                    self._kept.setdefault((id, index), (self.weight_version, count))

    def commit_adapter(self, staging: Any, name: str, version: int, in_flight: str) -> list[Output]:
        raise RuntimeError("the fake engine serves no named adapters")

    def remove_adapter(self, name: str) -> list[Output]:
        raise RuntimeError("the fake engine serves no named adapters")

    def sleep(self, level: int, tags: Collection[str], in_flight: str) -> list[Output]:
        self.actions.append(("sleep", level, tuple(tags), in_flight))
        return self._act(in_flight)

    def wake_up(self, tags: Collection[str]) -> None:
        self.actions.append(("wake_up", tuple(tags)))

    def settle(self) -> list[Output]:
        return []

    def interrupt(self, in_flight: str) -> list[Output]:
        self.actions.append(("interrupt", in_flight))
        return self._act(in_flight)

    def invalidate_prefix_cache(self) -> None:
        self.actions.append(("invalidate",))

    def check(self) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int]:
        return {"weights": 1000, "kv_cache": 2000}

    def _act(self, in_flight: str) -> list[Output]:
        if in_flight == "drain" and self._open:
            raise RuntimeError(f"engine still has unfinished requests after a drain (got {len(self._open)})")
        return [output for id in list(self._open) for output in self.abort(id)] if in_flight == "abort" else []

    def stats(self) -> FakeStats:
        counters = self._steps, len(self._open), 0, self._computed, dict(self._finished)
        return FakeStats(*counters, checksums=self.weights.checksums())

    def _step_request(self, id: str) -> list[Output]:
        request = self._by_id[id]
        if not isinstance(request, GenerateRequest):
            return [self._finish(id, 0, "stop")]
        if FAIL_IN_STEP in request.prompt_token_ids:
            raise RuntimeError("broken step")
        if HANG_IN_STEP in request.prompt_token_ids:
            time.sleep(3600)
        if SLOW_STEP in request.prompt_token_ids:
            time.sleep(0.05)
        for index in self._open[id]:
            self._open[id][index] += 1
            self._computed += 1
        limit = request.params.max_tokens
        assert limit is not None
        ended = [index for index, count in self._open[id].items() if count >= max(1, limit - index)]
        return [self._finish(id, index, "length") for index in ended]

    def _finish(self, id: str, index: int, reason: FinishReason) -> Output:
        count = self._open[id].pop(index)
        if not self._open[id]:
            del self._open[id]
            self._told.pop(id, None)
        self._finished[reason] += 1
        request = self._by_id[id]
        spans = (WeightSpan(self.weight_version, 0, count),) if count else ()
        if not isinstance(request, GenerateRequest):
            tokens = request.token_ids[1:] if reason == "stop" else request.token_ids[:0]
            spans = (WeightSpan(self.weight_version, 0, len(tokens)),) if len(tokens) else ()
            return ScoreOutput(id, -tokens.astype(np.float32) / request.distribution.temperature, reason, spans)
        tokens, logprobs = self._drawn(id, index, count)
        assert request.params.seed is not None
        version, start = self._kept.pop((id, index), (0, count))
        old_kv = (WeightSpan(version, start, count),) if start < count else ()
        seed = derive_seed(request.params.seed, index)
        return SampleOutput(id, index, tokens, logprobs, reason, seed, 1, spans, old_kv=old_kv)

    def _drawn(self, id: str, index: int, count: int) -> tuple[list[int], np.ndarray | None]:
        request = self._by_id[id]
        assert isinstance(request, GenerateRequest) and request.params.seed is not None
        params, seed = request.params, request.params.seed
        tokens = expected_tokens(seed, index, count)
        return tokens, None if params.logprobs is None else -(np.array(tokens, np.float32) + 1) / 7
