"""The messages between client and worker, by their fields; those of a push come from `weight_sync`.

`docs/protocol.md` tells the same to writers of other clients. Knows no sockets and imports no torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, FailFast, Field, ValidationInfo, field_validator, model_validator

from trueroll.errors import MAX_FIELD_CHARS, MAX_VALUE_CHARS

from ...engine.request import (
    MAX_SPANS,
    CacheSalt,
    ContentSpan,
    Distribution,
    FinishReason,
    InFlight,
    SamplingParams,
    Tag,
    TopLogprobs,
)
from ...weight_sync.payload.manifest import PushId, Version
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

MAX_ACK_IDS = 1024
_BYTES_BESIDE = 200
"""Of a delta, beside its tokens, about."""
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


def _is_whole_words(data: bytes) -> bytes:
    if len(data) % 4:
        raise ValueError(f"array: expected 4 bytes for each element, found {len(data)} bytes")
    return data


Number: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**64)] | float
Array = Annotated[bytes, AfterValidator(_is_whole_words)]
Span: TypeAlias = tuple[Count, Count, Count]
Spans = Annotated[tuple[ContentSpan, ...], FailFast(), Field(max_length=MAX_SPANS)]
Tags = Annotated[tuple[Tag, ...], Field(min_length=1), FailFast()]


class _Request(Message):
    """`caller`: a name for who asks, the same when the request is sent again for want of its reply. An abort that came
    before, from somebody else, is no answer to it.

    `min_weight_version`: begin with no weights older than that; a worker that serves older ones answers with the error
    `stale_weights` or, if it is to `wait_for_weights`, begins once a push has brought them.
    """

    min_weight_version: Version | None = None
    wait_for_weights: bool = False
    caller: Id | None = None

    @field_validator("wait_for_weights")
    @classmethod
    def _knows_what_it_waits_for(cls, waits: bool, info: ValidationInfo) -> bool:
        if waits and info.data.get("min_weight_version", 0) is None:
            raise ValueError("wait_for_weights: expected min_weight_version with it, found none; give both")
        return waits


class Generate(_Request):
    """Asks for `params.n` samples of a prompt. `prompt_token_ids`: int32 array. `num_prior_tokens`, `spans`: see
    `GenerateRequest`. `deltas`: tell this asker, by `Deltas`, how the samples grow. `while_connected`: end the request
    when nobody who waits for it is connected any more, and keep nothing of it. For the rest see `_Request`.
    """

    type: Literal["generate"] = "generate"
    id: Id
    prompt_token_ids: Array
    params: SamplingParams
    num_prior_tokens: Count = 0
    spans: Spans = ()
    deltas: bool = False
    while_connected: bool = False


class GetScores(_Request):
    """Asks for the log-probs of given tokens, at least two. `token_ids`: int32 array. `spans`, `top_logprobs`,
    `return_routed_experts`: see `ScoreRequest`. For the rest see `_Request`.
    """

    type: Literal["score"] = "score"
    id: Id
    token_ids: Array
    distribution: Distribution = Distribution()
    cache_salt: CacheSalt | None = None
    top_logprobs: TopLogprobs | None = None
    return_routed_experts: bool = False
    spans: Spans = ()


class Abort(Message):
    """Asks to end request `request_id`, or only its sample `index`, keeping what was generated so far.

    With `caller`, that one alone gives the request up: it gets no more replies to it, and the request ends, and is not
    kept, unless somebody else waits for it.
    """

    type: Literal["abort"] = "abort"
    id: Id
    request_id: Id
    index: Count | None = None
    caller: Id | None = None

    @model_validator(mode="after")
    def _a_caller_gives_up_all_samples(self) -> Abort:
        if self.caller is not None and self.index is not None:
            raise ValueError("abort: expected caller or index, found both; leave one of them out")
        return self


class Ack(Message):
    """Says that the results of these requests are needed no more. Has no reply."""

    type: Literal["ack"] = "ack"
    ids: Annotated[tuple[Id, ...], FailFast(), Field(max_length=MAX_ACK_IDS)]


class GetHealth(Message):
    type: Literal["health"] = "health"
    id: Id


class GetStats(Message):
    type: Literal["stats"] = "stats"
    id: Id


class Pause(Message):
    """Asks to generate nothing from the next step on. Running requests keep their tokens and their blocks."""

    type: Literal["pause"] = "pause"
    id: Id


class Resume(Message):
    """Asks to end a pause."""

    type: Literal["resume"] = "resume"
    id: Id


class Drain(Message):
    """Asks to finish what was accepted so far, for at most `timeout` seconds, and then to pause."""

    type: Literal["drain"] = "drain"
    id: Id
    timeout: Seconds = 600.0


class Sleep(Message):
    """Asks to give memory back. `level` 1 keeps the weights on the host, 2 drops them: then a push must follow.

    `tags`: which memory. `in_flight`: what becomes of running requests; `drain` takes at most `timeout` seconds.
    """

    type: Literal["sleep"] = "sleep"
    id: Id
    level: Literal[1, 2] = 1
    tags: Tags = ALL_TAGS
    in_flight: InFlight = "recompute"
    timeout: Seconds = 600.0


class WakeUp(Message):
    """Asks to take the memory of `tags` again."""

    type: Literal["wake_up"] = "wake_up"
    id: Id
    tags: Tags = ALL_TAGS


class Invalidate(Message):
    """Asks to forget all cached prefixes; running requests keep their blocks."""

    type: Literal["invalidate"] = "invalidate"
    id: Id


class SaveWeights(Message):
    """Asks to write the weights that are served, if a push brought them, into a new folder in `folder`, from which they
    can be pushed by disk. Nothing is generated meanwhile.
    """

    type: Literal["save_weights"] = "save_weights"
    id: Id
    folder: Annotated[str, Field(min_length=1, max_length=4096)]


class GetChecksums(Message):
    """Asks what the served weights are. Computed between two steps, which wait for it."""

    type: Literal["checksums"] = "checksums"
    id: Id


class TopArrays(Message):
    """What `top_logprobs` recorded, of `k` tokens for each one: `entropy` and `logprobs` float32, `token_ids` int32."""

    k: TopLogprobs
    entropy: Array
    token_ids: Array
    logprobs: Array

    @model_validator(mode="after")
    def _has_k_for_each(self) -> Self:
        expected = self.k * len(self.entropy)
        if len(self.token_ids) != expected or len(self.logprobs) != expected:
            raise ValueError(
                f"tops: expected {expected} bytes of token ids and of log-probs, {self.k} for each entropy, found "
                f"{len(self.token_ids)} and {len(self.logprobs)}"
            )
        return self


class RoutedExperts(Message):
    """What `return_routed_experts` recorded: the elements of `SampleOutput.routed_experts`, row by row, and its dtype
    and shape.
    """

    dtype: Literal["uint8", "uint16"]
    shape: tuple[Count, Count, Count]
    data: bytes

    @model_validator(mode="after")
    def _has_all_elements(self) -> Self:
        expected = math.prod(self.shape) * (1 if self.dtype == "uint8" else 2)
        if len(self.data) != expected:
            raise ValueError(
                f"routed_experts: expected {expected} bytes, {self.dtype} for each of {self.shape}, found "
                f"{len(self.data)}"
            )
        return self


class FinishedSample(Message):
    """One finished sample; the fields are those of `SampleOutput`. `caller`, here and below: of the submission."""

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
    tops: TopArrays | None = None
    routed_experts: RoutedExperts | None = None
    caller: Id | None = None


class Delta(Message):
    """What a sample of request `id` has got: its tokens from `start` on. The fields are those of `SampleDelta`."""

    id: Id
    index: Count
    start: Count
    token_ids: Array
    logprobs: Array | None
    tops: TopArrays | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_bytes(self) -> int:
        """About, on the wire."""
        per_token = 4 + 4 * (self.logprobs is not None) + (0 if self.tops is None else 4 + 8 * self.tops.k)
        return _BYTES_BESIDE + per_token * self.num_tokens


class Deltas(Message):
    """What unfinished samples have got since `caller` was told last, of all its requests that asked for it."""

    type: Literal["deltas"] = "deltas"
    samples: tuple[Delta, ...]
    caller: Id | None = None


class Done(Message):
    """Ends a generate: all its samples were sent. `params` are as used, the seed included."""

    type: Literal["done"] = "done"
    id: Id
    params: SamplingParams
    num_prompt_tokens: Count
    finish_reasons: dict[FinishReason, Count]
    caller: Id | None = None


class Scores(Message):
    """Ends a score; the fields are those of `ScoreOutput`."""

    type: Literal["scores"] = "scores"
    id: Id
    logprobs: Array
    finish_reason: FinishReason
    weight_versions: tuple[Span, ...]
    tops: TopArrays | None = None
    routed_experts: RoutedExperts | None = None
    caller: Id | None = None


class Error(Message):
    """Ends the message `id` without a result; None if the message could not be read that far. `field`, `value`,
    `limit`: those of `TruerollError`.
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
    """Ends an abort. `num_samples`: how many unfinished samples (or scores) it ended."""

    type: Literal["aborted"] = "aborted"
    id: Id
    request_id: Id
    num_samples: Count


class Status(Message):
    """Ends a pause, resume, drain, sleep, wake_up or invalidate: the state that it led to."""

    type: Literal["status"] = "status"
    id: Id
    state: State
    weight_version: Count


class Health(Message):
    """How the worker is.

    `instance` is random for each process. `seconds_since_progress` runs from the last step that computed or finished
    something, or from the arrival of work at an idle engine. It, `weight_version` and `engine` (what the engine is:
    model, backend, isa, dtype, sizes) are None while loading. `requests` counts those that are `open`
    (accepted, unfinished), those of them the engine has `running` and `waiting`, in sequences, and results `kept`.
    `memory` is in bytes by tag: `process` (resident), and once loaded `weights`, `kv_cache` and `staging`. `sleeping`:
    the tags whose memory was given back. `push`: the push under way, if any.
    """

    type: Literal["health"] = "health"
    id: Id
    state: State
    instance: str
    seconds_since_progress: float | None
    weight_version: Count | None
    requests: dict[str, Count]
    memory: dict[str, Count]
    limits: dict[str, Count]
    engine: dict[str, Any] | None
    sleeping: tuple[Tag, ...] = ()
    push: PushProgress | None = None


class Stats(Message):
    """Lifetime counters. `engine`: those of `EngineStats`, empty while loading. `service`: those of `ServiceStats`."""

    type: Literal["stats"] = "stats"
    id: Id
    engine: dict[str, Any]
    service: dict[str, Count]


class Checksums(Message):
    """`checksums`: of every parameter's bytes, adapters included, by its Hugging Face name: the 64-bit XXH3 hash.
    `dtype`, `dtypes` and `push_id`: as in `Weights`.
    """

    type: Literal["checksums"] = "checksums"
    id: Id
    dtype: str
    dtypes: dict[str, str]
    checksums: dict[str, Count]
    weight_version: Count
    push_id: PushId | None


LifecycleCall: TypeAlias = Pause | Resume | Drain | Sleep | WakeUp | Invalidate | SaveWeights | GetChecksums
Call: TypeAlias = Generate | GetScores | Abort | GetHealth | GetStats | GetWeights | LifecycleCall | PushCall
FromClient: TypeAlias = Call | Ack
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
"""What a worker answers each kind of call by, beside errors, and `Deltas` where they are asked for."""
