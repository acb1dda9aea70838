"""The fields of the messages between client and worker, except for the messages of a push, which `weight_sync` defines.

`docs/protocol.md` describes the same messages for people who write their own client. Uses no sockets and imports no
torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from trueroll.errors import MAX_FIELD_CHARS, MAX_VALUE_CHARS

from ...engine.request import (
    MAX_SPANS,
    MAX_TARGETS,
    CacheSalt,
    ContentSpan,
    Distribution,
    FinishReason,
    SamplingParams,
    SleepInFlight,
    Tag,
    TopLogprobs,
)
from ...weight_sync.payload.manifest import AdapterName, PushId, Version
from ...weight_sync.payload.messages import (
    Count,
    GetWeights,
    Id,
    Message,
    PushCall,
    PushProgress,
    PushStatus,
    Seconds,
    State,
    Weights,
)
from .content import ImageRefs, NeedImage, PutImage

MAX_ACK_IDS = 1024
_BYTES_BESIDE = 200
"""Approximate size of a delta on the wire without its tokens."""
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


def _is_whole_words(data: bytes) -> bytes:
    if len(data) % 4:
        raise ValueError(f"array: length must be a multiple of 4 bytes, the size of an element (got {len(data)} bytes)")
    return data


def _accept_shared(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept a memoryview without validation, because only `from_worker` creates memoryviews."""
    return value if isinstance(value, memoryview) else validate(value)


Number: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**64)] | float
MAX_DELTA_SECONDS = 60
Shared = Annotated[bytes, WrapValidator(_accept_shared)]
"""Bytes, or a memoryview into a worker's frame. Code that reads arrays must accept both."""
Array = Annotated[Shared, AfterValidator(_is_whole_words)]
Span: TypeAlias = tuple[Count, Count, Count]
Spans = Annotated[tuple[ContentSpan, ...], FailFast(), Field(max_length=MAX_SPANS)]
Tags = Annotated[tuple[Tag, ...], Field(min_length=1), FailFast()]


class _Request(Message):
    """Fields that `Generate` and `GetScores` share.

    - `caller`: id of the caller that submits the request. To send a request again because its reply was lost, use the
      same caller id. After an abort, only callers that submitted the request before the abort get the aborted result.
    - `min_weight_version`: minimum weight version at which the request may begin. Without `wait_for_weights`, a worker
      with older weights answers with the error `stale_weights`.
    - `wait_for_weights`: do not begin before a push brings weights of the minimum version
    - `adapter`: the named adapter to use; None for the base weights. If `adapter` is given, `min_weight_version` is a
      version of the adapter.
    """

    adapter: AdapterName | None = None
    min_weight_version: Version | None = None
    wait_for_weights: bool = False
    caller: Id | None = None

    @field_validator("wait_for_weights")
    @classmethod
    def _knows_what_it_waits_for(cls, waits: bool, info: ValidationInfo) -> bool:
        if waits and info.data.get("min_weight_version", 0) is None:
            raise ValueError("wait_for_weights: requires min_weight_version, which is not set; set both")
        return waits


class Generate(_Request):
    """Request `params.n` samples of a prompt.

    - `prompt_token_ids`: int32 array
    - `num_prior_tokens`, `spans`: see `GenerateRequest`
    - `images`: the images of the prompt, sorted and disjoint (see `content`)
    - `deltas`: send new tokens to this caller in `Deltas` messages while the samples are generated
    - `delta_seconds`: minimum time between two `Deltas` messages to this caller, in seconds. The worker ignores
      `delta_seconds` while it streams to only a few callers.
    - `while_connected`: once every client that waits for the request has disconnected, end the request and drop its
      result
    - other fields: see `_Request`
    """

    type: Literal["generate"] = "generate"
    id: Id
    prompt_token_ids: Array
    params: SamplingParams
    num_prior_tokens: Count = 0
    spans: Spans = ()
    images: ImageRefs = ()
    deltas: bool = False
    delta_seconds: Annotated[float, Field(ge=0, le=MAX_DELTA_SECONDS)] = 0.0
    while_connected: bool = False

    @field_validator("delta_seconds")
    @classmethod
    def _delta_seconds_need_deltas(cls, seconds: float, info: ValidationInfo) -> float:
        if seconds and not info.data.get("deltas", True):
            raise ValueError("delta_seconds: requires deltas, which is false; set deltas to true")
        return seconds


class GetScores(_Request):
    """Request the log-probs of the tokens in a given sequence of two or more tokens.

    - `token_ids`: int32 array
    - `start`: index of the first token with a log-prob
    - `target_token_ids`: int32 array, row-major, with the same number of ids for each token from `start` on; see
      `ScoreRequest`
    - `spans`, `top_logprobs`, `return_routed_experts`, `return_sampling_mask`: see `ScoreRequest`
    - `images`: as in `Generate`
    - other fields: see `_Request`
    """

    type: Literal["score"] = "score"
    id: Id
    token_ids: Array
    distribution: Distribution = Distribution()
    start: Annotated[int, Field(ge=1, lt=2**63)] = 1
    target_token_ids: Array | None = None
    cache_salt: CacheSalt | None = None
    top_logprobs: TopLogprobs | None = None
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    spans: Spans = ()
    images: ImageRefs = ()


class Abort(Message):
    """End request `request_id`, or only its sample `index`. The result of an aborted request has the tokens that were
    generated before the abort.

    If `caller` is given, only this caller abandons the request, and the worker sends this caller no more replies. If no
    other caller waits for the request, the request ends and the worker drops its result.
    """

    type: Literal["abort"] = "abort"
    id: Id
    request_id: Id
    index: Count | None = None
    caller: Id | None = None

    @model_validator(mode="after")
    def _a_caller_gives_up_all_samples(self) -> Abort:
        if self.caller is not None and self.index is not None:
            raise ValueError("abort: caller and index cannot be combined; leave out one of them")
        return self


class Ack(Message):
    """Acknowledge results, so that the worker can drop them. There is no reply."""

    type: Literal["ack"] = "ack"
    ids: Annotated[tuple[Id, ...], FailFast(), Field(max_length=MAX_ACK_IDS)]


class GetHealth(Message):
    type: Literal["health"] = "health"
    id: Id


class GetStats(Message):
    type: Literal["stats"] = "stats"
    id: Id


class Pause(Message):
    """Pause generation before the next engine step. Running requests keep their tokens and their KV blocks."""

    type: Literal["pause"] = "pause"
    id: Id


class Resume(Message):
    """End a pause."""

    type: Literal["resume"] = "resume"
    id: Id


class Drain(Message):
    """Finish all accepted requests within `timeout` seconds, and then pause."""

    type: Literal["drain"] = "drain"
    id: Id
    timeout: Seconds = 600.0


class Sleep(Message):
    """Release memory.

    - `level`: 1 keeps the weights in host memory; 2 drops the weights, so a push must follow
    - `tags`: the kinds of memory to release
    - `in_flight`: what to do with running requests; `drain` waits for at most `timeout` seconds
    """

    type: Literal["sleep"] = "sleep"
    id: Id
    level: Literal[1, 2] = 1
    tags: Tags = ALL_TAGS
    in_flight: SleepInFlight = "recompute"
    timeout: Seconds = 600.0


class WakeUp(Message):
    """Allocate the kinds of memory in `tags` again."""

    type: Literal["wake_up"] = "wake_up"
    id: Id
    tags: Tags = ALL_TAGS


class Invalidate(Message):
    """Drop all cached prefixes. Running requests keep their KV blocks."""

    type: Literal["invalidate"] = "invalidate"
    id: Id


class UnloadAdapter(Message):
    """Unload a named adapter. The adapter's unfinished requests are aborted."""

    type: Literal["unload_adapter"] = "unload_adapter"
    id: Id
    name: AdapterName


class SaveWeights(Message):
    """Write the served weights into a new folder inside `folder`, in the format of a `disk` push.

    Only pushed weights can be written, not the weights of the checkpoint. Generation stops during the call.
    """

    type: Literal["save_weights"] = "save_weights"
    id: Id
    folder: Annotated[str, Field(min_length=1, max_length=4096)]


class GetChecksums(Message):
    """Request the checksums of the served weights. The engine computes the checksums between two of its steps."""

    type: Literal["checksums"] = "checksums"
    id: Id


class TopArrays(Message):
    """The data for `top_logprobs`: for each token, the `entropy` and the `k` most probable tokens at its position.

    `entropy`: float32 [num_tokens]. `token_ids`: int32 [num_tokens, k]. `logprobs`: float32 [num_tokens, k].
    """

    k: TopLogprobs
    entropy: Array
    token_ids: Array
    logprobs: Array

    @model_validator(mode="after")
    def _has_k_for_each(self) -> Self:
        expected = self.k * len(self.entropy)
        if len(self.token_ids) != expected or len(self.logprobs) != expected:
            raise ValueError(
                f"tops: token_ids and logprobs must each have {expected} bytes ({self.k} elements per token), but have "
                f"{len(self.token_ids)} and {len(self.logprobs)} bytes"
            )
        return self


class TargetArrays(Message):
    """The data for `target_token_ids`: for each token of the sample, the log-probs of the `k` target tokens at its
    position. `logprobs`: float32 [num_tokens, k].
    """

    k: Annotated[int, Field(ge=1, le=MAX_TARGETS)]
    logprobs: Array

    @model_validator(mode="after")
    def _has_k_for_each(self) -> Self:
        if len(self.logprobs) % (4 * self.k):
            raise ValueError(
                f"targets: logprobs must have {self.k} elements of 4 bytes per token (got {len(self.logprobs)} bytes)"
            )
        return self


class KeptArrays(Message):
    """The data for `return_sampling_mask`: for each token of the sample, or each scored token, the token ids that could
    be drawn at its position.

    `counts`: int32 [num_tokens], the number of ids for each token. `log_mass`: float32 [num_tokens]. `token_ids`: int32
    [sum of counts].
    """

    counts: Array
    log_mass: Array
    token_ids: Array

    @model_validator(mode="after")
    def _has_the_counted_ids(self) -> Self:
        counts = np.frombuffer(self.counts, "<i4")
        if len(self.log_mass) != len(self.counts):
            raise ValueError(
                f"kept: counts and log_mass must have the same size (got {len(self.counts)} and {len(self.log_mass)} "
                "bytes)"
            )
        if (counts < 0).any() or int(counts.sum(dtype=np.int64)) * 4 != len(self.token_ids):
            raise ValueError(
                f"kept: counts must not be negative and must add up to the number of ids in token_ids (got a sum of "
                f"{counts.sum(dtype=np.int64)} for {len(self.token_ids) // 4} ids)"
            )
        return self


class RoutedExperts(Message):
    """The data for `return_routed_experts`: dtype, shape and row-major elements of `SampleOutput.routed_experts`."""

    dtype: Literal["uint8", "uint16"]
    shape: tuple[Count, Count, Count]
    data: Shared

    @model_validator(mode="after")
    def _has_all_elements(self) -> Self:
        expected = math.prod(self.shape) * (1 if self.dtype == "uint8" else 2)
        if len(self.data) != expected:
            raise ValueError(
                f"routed_experts: {self.dtype} elements of shape {self.shape} need {expected} bytes (got "
                f"{len(self.data)})"
            )
        return self


class FinishedSample(Message):
    """One finished sample, with the fields of `SampleOutput`. `caller`: id of the caller that submitted the request."""

    type: Literal["sample"] = "sample"
    id: Id
    index: Count
    token_ids: Array
    logprobs: Array | None
    finish_reason: FinishReason
    seed: Count
    num_cached_tokens: Count
    weight_versions: tuple[Span, ...]
    error: str | None = None
    stop_reason: int | str | None = None
    num_drafted_tokens: Count = 0
    num_accepted_tokens: Count = 0
    old_kv: tuple[Span, ...] = ()
    tops: TopArrays | None = None
    targets: TargetArrays | None = None
    kept: KeptArrays | None = None
    routed_experts: RoutedExperts | None = None
    caller: Id | None = None


class Delta(Message):
    """New tokens of a sample of request `id`, starting at token `start`. Has the fields of `SampleDelta`."""

    id: Id
    index: Count
    start: Count
    token_ids: Array
    logprobs: Array | None
    tops: TopArrays | None = None
    targets: TargetArrays | None = None
    kept: KeptArrays | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_bytes(self) -> int:
        """Approximate size of the delta on the wire, in bytes."""
        parts = [part for part in (self, self.tops, self.targets, self.kept) if part is not None]
        return _BYTES_BESIDE + sum(
            len(value) for part in parts for _, value in part if isinstance(value, bytes | memoryview)
        )


class Deltas(Message):
    """The tokens of unfinished samples that are new since the last `Deltas` message to `caller`. One message has the
    new tokens of all requests that `caller` submitted with `deltas`.
    """

    type: Literal["deltas"] = "deltas"
    samples: tuple[Delta, ...]
    caller: Id | None = None


class Done(Message):
    """The terminal reply to `Generate`, which the worker sends after the last sample of the request. `params`: the
    parameters that the worker used, including the seed.
    """

    type: Literal["done"] = "done"
    id: Id
    params: SamplingParams
    num_prompt_tokens: Count
    finish_reasons: dict[FinishReason, Count]
    caller: Id | None = None


class Scores(Message):
    """The terminal reply to `GetScores`, with the fields of `ScoreOutput`."""

    type: Literal["scores"] = "scores"
    id: Id
    logprobs: Array
    finish_reason: FinishReason
    weight_versions: tuple[Span, ...]
    tops: TopArrays | None = None
    targets: TargetArrays | None = None
    kept: KeptArrays | None = None
    routed_experts: RoutedExperts | None = None
    caller: Id | None = None


class Error(Message):
    """The terminal reply to a message that failed.

    `id`: id of the failed message; None if the id could not be read. `field`, `value`, `limit`: as in `TruerollError`.
    """

    type: Literal["error"] = "error"
    id: Id | None
    code: str
    message: str
    field: Annotated[str, Field(max_length=MAX_FIELD_CHARS)] | None = None
    value: bool | Number | Annotated[str, Field(max_length=MAX_VALUE_CHARS)] | None = None
    limit: Number | None = None
    caller: Id | None = None


class Aborted(Message):
    """The terminal reply to `Abort`. `num_samples`: number of unfinished samples (or scores) that the abort ended."""

    type: Literal["aborted"] = "aborted"
    id: Id
    request_id: Id
    num_samples: Count


class Status(Message):
    """The terminal reply to `pause`, `resume`, `drain`, `sleep`, `wake_up`, `invalidate`, `unload_adapter` and
    `save_weights`. `state`: the state after the call.
    """

    type: Literal["status"] = "status"
    id: Id
    state: State
    weight_version: Count


class SavedWeights(Message):
    """The weights in the worker's `save_folder`.

    - `weight_version`, `push_id`: the saved push, which the worker serves after a restart; None if nothing is saved
    - `is_writing`: whether weights are being written, or are about to be
    - `num_saved`, `num_interrupted`, `num_failed`: numbers of writes since the start. A write is interrupted if the
      weights change or are released while they are read
    - `error`: why the last write failed, until a write succeeds; otherwise empty
    """

    weight_version: Count | None
    push_id: PushId | None
    is_writing: bool
    num_saved: Count
    num_interrupted: Count
    num_failed: Count
    error: str


class Health(Message):
    """The worker's state.

    - `instance`: random id of the worker's process
    - `seconds_since_progress`: seconds since the engine last made progress; None while loading. The engine makes
      progress when a step computes or finishes something, or when the idle engine gets new work.
    - `weight_version`: version of the served base weights; None while loading
    - `adapters`: version of each loaded adapter, by name
    - `requests`: the numbers of `open` requests (accepted but unfinished), of `running` and `waiting` sequences in the
      engine, and of `kept` results (not yet acknowledged)
    - `memory`: bytes of each kind of memory. The kinds are `process` (resident memory), `images` (pixels) and, once the
      model is loaded, `weights`, `kv_cache`, `staging`, and if the worker serves them, `adapters` and `routed_experts`
    - `engine`: description of the engine (model, backend, isa, dtype, sizes); None while loading
    - `sleeping`: tags of the memory that `sleep` has released
    - `push`: the push in progress, if any
    - `saved`: the saved weights; None without `save_folder`, and while loading
    """

    type: Literal["health"] = "health"
    id: Id
    state: State
    instance: str
    seconds_since_progress: float | None
    weight_version: Count | None
    adapters: dict[str, Count] = {}
    requests: dict[str, Count]
    memory: dict[str, Count]
    limits: dict[str, Count]
    engine: dict[str, Any] | None
    sleeping: tuple[Tag, ...] = ()
    push: PushProgress | None = None
    saved: SavedWeights | None = None


class Stats(Message):
    """Lifetime counters. `engine`: the fields of `EngineStats`; empty while the model loads. `service`: the fields of
    `ServiceStats`.
    """

    type: Literal["stats"] = "stats"
    id: Id
    engine: dict[str, Any]
    service: dict[str, Count]


class Checksums(Message):
    """The reply to `GetChecksums`.

    `checksums`: maps each parameter's Hugging Face name to the 64-bit XXH3 hash of the parameter's bytes. Adapters are
    merged before the hash is computed. `dtype`, `dtypes`, `renamed`, `respelled`, `left_out`, `push_id`: see `Weights`.
    """

    type: Literal["checksums"] = "checksums"
    id: Id
    dtype: str
    dtypes: dict[str, str]
    checksums: dict[str, Count]
    renamed: dict[str, str] = {}
    respelled: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    weight_version: Count
    push_id: PushId | None


LifecycleCall: TypeAlias = (
    Pause | Resume | Drain | Sleep | WakeUp | Invalidate | UnloadAdapter | SaveWeights | GetChecksums
)
Call: TypeAlias = Generate | GetScores | Abort | GetHealth | GetStats | GetWeights | LifecycleCall | PushCall
FromClient: TypeAlias = Call | Ack | PutImage
FromWorker: TypeAlias = (
    FinishedSample
    | Deltas
    | Done
    | Scores
    | Error
    | Aborted
    | Health
    | Stats
    | Status
    | Weights
    | Checksums
    | PushStatus
    | NeedImage
)

REPLIES: dict[Any, tuple[type[FromWorker], ...]] = {
    Generate: (FinishedSample, Done),
    GetScores: (Scores,),
    Abort: (Aborted,),
    GetHealth: (Health,),
    GetStats: (Stats,),
    GetWeights: (Weights,),
    **dict.fromkeys(get_args(LifecycleCall), (Status,)),
    **dict.fromkeys(get_args(PushCall), (PushStatus,)),
    GetChecksums: (Checksums,),
}
"""The types of the replies to each kind of call. Any call may also get an `Error`, and `Deltas` if requested. A request
with images may also get `NeedImage`.
"""
