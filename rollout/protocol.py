"""The messages between client and worker: their fields, and their form on the wire.

A message is one ZMQ frame: a MessagePack map with `version`, `type` and the fields of one class below. Arrays travel
as raw little-endian bytes: int32 for tokens, float32 for log-probs. `docs/protocol.md` tells the same to writers of
other clients. Everything received passes through `from_client` or `from_worker`, so that nothing behind this module
meets a field that is missing, unknown, mistyped or out of its range. Knows no sockets and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import msgpack
import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ..engine.errors import InvalidRequestError, TruerollError
from ..engine.request import (
    CacheSalt,
    Distribution,
    FinishReason,
    InFlight,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    Tag,
    TopLogprobs,
    WeightSpan,
    brief,
    describe_validation_error,
)
from ..weight_sync.manifest import Bucket, Gpu, PushId, Source
from .errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_ID_CHARS = 128
MAX_ERROR_CHARS = 2000
MAX_DEPTH = 6
"""How deep maps and arrays of a message lie within each other. The deepest: message, bucket, pieces, piece, shape."""
MAX_ELEMENTS = 2**18
"""Of all the maps and arrays in a client's message together: enough for the pieces of a bucket."""
MAX_FIELDS = 32
"""Of a map in a client's message."""
MAX_ACK_IDS = 1024
_ID_WITHIN_BYTES = 1024
_NIL = b"\xc0"

State: TypeAlias = Literal["loading", "ready", "paused", "draining", "asleep", "waking", "updating", "dirty", "failed"]
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
PushPhase: TypeAlias = Literal["begun", "staged", "verified", "committed", "aborted"]


def _is_whole_words(data: bytes) -> bytes:
    if len(data) % 4:
        raise ValueError(f"array: expected 4 bytes for each element, found {len(data)} bytes")
    return data


Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Count = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0, lt=2**63)]
Array = Annotated[bytes, AfterValidator(_is_whole_words)]
Span: TypeAlias = tuple[Count, Count, Count]
DtypeName = Annotated[str, Field(max_length=80)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]
Tags = Annotated[tuple[Tag, ...], Field(min_length=1), FailFast()]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Request(_Message):
    """`caller`: a name for who asks, the same when the request is sent again for want of its reply. An abort that came
    before, from somebody else, is no answer to it.

    `min_weight_version`: begin with no weights older than that; a worker that serves older ones answers with the error
    `stale_weights` or, if it is to `wait_for_weights`, begins once a push has brought them.
    """

    min_weight_version: Version | None = None
    wait_for_weights: bool = False
    caller: Id | None = None

    @model_validator(mode="after")
    def _knows_what_it_waits_for(self) -> Self:
        if self.wait_for_weights and self.min_weight_version is None:
            raise ValueError("wait_for_weights: expected min_weight_version with it, found none; give both")
        return self


class Generate(_Request):
    """Asks for `params.n` samples of a prompt. `prompt_token_ids`: int32 array. `num_prior_tokens`: see
    `GenerateRequest`. For the rest see `_Request`.
    """

    type: Literal["generate"] = "generate"
    id: Id
    prompt_token_ids: Array
    params: SamplingParams
    num_prior_tokens: Count = 0


class Score(_Request):
    """Asks for the log-probs of given tokens, at least two. `token_ids`: int32 array. `top_logprobs`: see
    `SamplingParams`. For the rest see `_Request`.
    """

    type: Literal["score"] = "score"
    id: Id
    token_ids: Array
    distribution: Distribution = Distribution()
    cache_salt: CacheSalt | None = None
    top_logprobs: TopLogprobs | None = None


class Abort(_Message):
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


class Ack(_Message):
    """Says that the results of these requests are needed no more. Has no reply."""

    type: Literal["ack"] = "ack"
    ids: Annotated[tuple[Id, ...], FailFast(), Field(max_length=MAX_ACK_IDS)]


class GetHealth(_Message):
    type: Literal["health"] = "health"
    id: Id


class GetStats(_Message):
    type: Literal["stats"] = "stats"
    id: Id


class Pause(_Message):
    """Asks to generate nothing from the next step on. Running requests keep their tokens and their blocks."""

    type: Literal["pause"] = "pause"
    id: Id


class Resume(_Message):
    """Asks to end a pause."""

    type: Literal["resume"] = "resume"
    id: Id


class Drain(_Message):
    """Asks to finish what was accepted so far, for at most `timeout` seconds, and then to pause."""

    type: Literal["drain"] = "drain"
    id: Id
    timeout: Seconds = 600.0


class Sleep(_Message):
    """Asks to give memory back. `level` 1 keeps the weights on the host, 2 drops them: then a push must follow.

    `tags`: which memory. `in_flight`: what becomes of running requests; `drain` takes at most `timeout` seconds.
    """

    type: Literal["sleep"] = "sleep"
    id: Id
    level: Literal[1, 2] = 1
    tags: Tags = ALL_TAGS
    in_flight: InFlight = "recompute"
    timeout: Seconds = 600.0


class WakeUp(_Message):
    """Asks to take the memory of `tags` again."""

    type: Literal["wake_up"] = "wake_up"
    id: Id
    tags: Tags = ALL_TAGS


class Invalidate(_Message):
    """Asks to forget all cached prefixes; running requests keep their blocks."""

    type: Literal["invalidate"] = "invalidate"
    id: Id


class GetWeights(_Message):
    type: Literal["weights"] = "weights"
    id: Id


class BeginPush(_Message):
    """Begins a push of weights, and ends one that was under way before.

    `base`: the push whose weights the changed elements of this one refer to; None for a push that brings every tensor
    whole. `allow_older`: also if the version is not later than the one that is served. `in_place`: write into the live
    weights, for want of memory: nothing is generated from now until the commit, and `in_flight` says what becomes of
    running requests; `drain` takes at most `drain_timeout` seconds. `timeout`: seconds that each other wait of this
    push may take.
    """

    type: Literal["begin_push"] = "begin_push"
    id: Id
    push_id: PushId
    weight_version: Count
    base: PushId | None = None
    allow_older: bool = False
    dtype: DtypeName
    source: Source
    in_place: bool = False
    in_flight: InFlight = "recompute"
    drain_timeout: Seconds = 600.0
    reject_nonfinite: bool = True
    timeout: Seconds = 60.0


class StageBucket(_Message):
    """Announces a bucket. Its reply says that the bytes were copied and are right, so that its place is free again."""

    type: Literal["stage_bucket"] = "stage_bucket"
    id: Id
    push_id: PushId
    bucket: Bucket


class VerifyPush(_Message):
    """Asks whether every parameter has arrived exactly once, in `num_buckets` buckets."""

    type: Literal["verify_push"] = "verify_push"
    id: Id
    push_id: PushId
    num_buckets: Count


class CommitPush(_Message):
    """Asks to serve the verified weights from the next step on. `in_flight` `drain` takes at most `timeout` seconds."""

    type: Literal["commit_push"] = "commit_push"
    id: Id
    push_id: PushId
    in_flight: InFlight = "recompute"
    timeout: Seconds = 600.0


class AbortPush(_Message):
    """Asks to forget a push. One that is not known counts as aborted; one that is committed stays so, and says it."""

    type: Literal["abort_push"] = "abort_push"
    id: Id
    push_id: PushId


class Tops(_Message):
    """What `top_logprobs` recorded, of `k` tokens for each one: `entropy` and `logprobs` float32, `token_ids` int32."""

    k: TopLogprobs
    entropy: Array
    token_ids: Array
    logprobs: Array

    @model_validator(mode="after")
    def _has_k_for_each(self) -> Tops:
        expected = self.k * len(self.entropy)
        if len(self.token_ids) != expected or len(self.logprobs) != expected:
            raise ValueError(
                f"tops: expected {expected} bytes of token ids and of log-probs, {self.k} for each entropy, found "
                f"{len(self.token_ids)} and {len(self.logprobs)}"
            )
        return self


class Sample(_Message):
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
    tops: Tops | None = None
    caller: Id | None = None


class Done(_Message):
    """Ends a generate: all its samples were sent. `params` are as used, the seed included."""

    type: Literal["done"] = "done"
    id: Id
    params: SamplingParams
    num_prompt_tokens: Count
    finish_reasons: dict[FinishReason, Count]
    caller: Id | None = None


class Scores(_Message):
    """Ends a score; the fields are those of `ScoreOutput`."""

    type: Literal["scores"] = "scores"
    id: Id
    logprobs: Array
    finish_reason: FinishReason
    weight_versions: tuple[Span, ...]
    tops: Tops | None = None
    caller: Id | None = None


class Error(_Message):
    """Ends the message `id` without a result; None if the message could not be read that far."""

    type: Literal["error"] = "error"
    id: Id | None
    code: str
    message: str
    caller: Id | None = None


class Aborted(_Message):
    """Ends an abort. `num_samples`: how many unfinished samples (or scores) it ended."""

    type: Literal["aborted"] = "aborted"
    id: Id
    request_id: Id
    num_samples: Count


class Status(_Message):
    """Ends a pause, resume, drain, sleep, wake_up or invalidate: the state that it led to."""

    type: Literal["status"] = "status"
    id: Id
    state: State
    weight_version: Count


class Weights(_Message):
    """What a push must bring, and what is served now.

    `shapes`: of every parameter, by its Hugging Face name. `tied`: names that are copies of a parameter, and of which;
    `ignored`: further names that may be left out. `push_id`: the push that is served, None for the model's own
    checkpoint or while no complete weights are there. `gpu`: the GPU that they are on, None for a CPU. `instance`: see
    `Health`.
    """

    type: Literal["weights"] = "weights"
    id: Id
    dtype: str
    shapes: dict[str, tuple[Count, ...]]
    tied: dict[str, str]
    ignored: tuple[str, ...]
    weight_version: Count
    push_id: PushId | None
    gpu: Gpu | None
    instance: str


class PushStatus(_Message):
    """Ends a begin_push, stage_bucket, verify_push, commit_push or abort_push: how far the push has come.

    `state` and `weight_version` are the worker's. `pause_seconds`: how long the commit kept the engine from stepping;
    None before it.
    """

    type: Literal["push_status"] = "push_status"
    id: Id
    push_id: PushId
    phase: PushPhase
    state: State
    weight_version: Count
    pause_seconds: float | None = None


class PushProgress(_Message):
    """A push under way, as `Health` shows it. `bytes_staged` and `seconds` count from its beginning."""

    push_id: PushId
    weight_version: Count
    transport: str
    phase: PushPhase
    in_place: bool
    bytes_staged: Count
    seconds: float


class Health(_Message):
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


class Stats(_Message):
    """Lifetime counters. `engine`: those of `EngineStats`, empty while loading. `service`: those of `ServiceStats`."""

    type: Literal["stats"] = "stats"
    id: Id
    engine: dict[str, Any]
    service: dict[str, Count]


LifecycleCall: TypeAlias = Pause | Resume | Drain | Sleep | WakeUp | Invalidate
PushCall: TypeAlias = BeginPush | StageBucket | VerifyPush | CommitPush | AbortPush
Call: TypeAlias = Generate | Score | Abort | GetHealth | GetStats | GetWeights | LifecycleCall | PushCall
FromClient: TypeAlias = Call | Ack
FromWorker: TypeAlias = Sample | Done | Scores | Error | Aborted | Health | Stats | Status | Weights | PushStatus

REPLIES: dict[Any, tuple[type[FromWorker], ...]] = {
    Generate: (Sample, Done),
    Score: (Scores,),
    Abort: (Aborted,),
    GetHealth: (Health,),
    GetStats: (Stats,),
    GetWeights: (Weights,),
    **dict.fromkeys(get_args(LifecycleCall), (Status,)),
    **dict.fromkeys(get_args(PushCall), (PushStatus,)),
}
"""What a worker answers each kind of call by, beside errors."""

_FROM_CLIENT: TypeAdapter[FromClient] = TypeAdapter(Annotated[FromClient, Field(discriminator="type")])
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="type")])


def message_types(union: Any) -> tuple[str, ...]:
    """The `type` of every message in `FromClient` or `FromWorker`."""
    return tuple(message.model_fields["type"].default for message in get_args(union))


_CLIENT_TYPES, _WORKER_TYPES = message_types(FromClient), message_types(FromWorker)


def encode(message: FromClient | FromWorker) -> bytes:
    """The frame that carries `message`."""
    return msgpack.Packer().pack({"version": PROTOCOL_VERSION, **message.model_dump()})


def encode_for_anyone(message: Sample | Done | Scores) -> bytes:
    """The frame of a reply up to the value of its last field, the caller: `address` completes it."""
    return encode(message.model_copy(update={"caller": None}))[: -len(_NIL)]


def address(reply: bytes, caller: str | None) -> bytes:
    """The frame of a reply of `encode_for_anyone`, for one caller."""
    return reply + msgpack.Packer().pack(caller)


def from_client(frame: bytes, max_elements: int = MAX_ELEMENTS) -> FromClient:
    """The message in a client's frame. Raises ProtocolError, also beyond `max_elements` in all, `MAX_FIELDS` in a map
    or `MAX_DEPTH`, so that no frame takes much more time and memory than its bytes; InvalidRequestError for sampling
    parameters.
    """
    return _check(_unpack(frame, max_elements, MAX_FIELDS), _FROM_CLIENT, _CLIENT_TYPES)


def from_worker(frame: bytes) -> FromWorker:
    """The message in a worker's frame. Raises ProtocolError."""
    return _check(_unpack(frame, 2 * len(frame), len(frame)), _FROM_WORKER, _WORKER_TYPES)


def _unpack(frame: bytes, max_elements: int, max_fields: int) -> dict[str, Any]:
    """Its fields unchecked. Raises ProtocolError beyond the limits."""
    count = _element_counter(max_elements)
    try:
        _check_that_all_is_there(frame)
        fields = msgpack.unpackb(
            frame,
            use_list=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=max_elements,
            max_map_len=max_fields,
            list_hook=count,
            object_hook=lambda fields: _with_string_keys(count(fields)),
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"message: expected one MessagePack map, found bytes that do not decode ({error})"
        ) from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"message: expected a MessagePack map, found {type(fields).__name__}")
    _check_depth(fields)
    return fields


def _check_that_all_is_there(frame: bytes) -> None:
    """Raises what unpacking would where an array or a map announces more than follows, before room is made for it."""
    unpacker = msgpack.Unpacker(use_list=False, max_ext_len=0, max_buffer_size=len(frame) + 1)
    unpacker.feed(frame)
    unpacker.skip()


def _element_counter(limit: int) -> Callable[[Any], Any]:
    """A function to call with every map and array that was read, which raises ValueError beyond `limit` elements."""
    num_elements = 0

    def count(values: Any) -> Any:
        nonlocal num_elements
        num_elements += 1 + len(values)
        if num_elements > limit:
            raise ValueError(f"more than {limit} elements of maps and arrays")
        return values

    return count


def _with_string_keys(fields: dict[Any, Any]) -> dict[str, Any]:
    """MessagePack also has bytes as keys, which no message has."""
    for key in fields:
        if not isinstance(key, str):
            raise ValueError(f"{brief(key)} is no string, as a key must be")
    return fields


def _check_depth(fields: dict[str, Any]) -> None:
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        level = [value for values in level for value in _values(values) if isinstance(value, tuple | dict)]
        if not level:
            return
    raise ProtocolError(f"message: expected maps and arrays at most {MAX_DEPTH} deep, found deeper ones")


def _values(values: tuple[Any, ...] | dict[str, Any]) -> Iterable[Any]:
    return values.values() if isinstance(values, dict) else values


def id_in(frame: bytes) -> str | None:
    """The id of an unchecked message, so that even its rejection can name it; None if it has no valid one.

    It is looked for among the first fields alone, within so few bytes that nothing there can cost much.
    """
    unpacker = msgpack.Unpacker(use_list=False, max_ext_len=0)
    unpacker.feed(memoryview(frame)[:_ID_WITHIN_BYTES])
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                id = unpacker.unpack()
                return id if isinstance(id, str) and 1 <= len(id) <= MAX_ID_CHARS else None
            unpacker.skip()
    except Exception:  # whatever these bytes are, they hold no id
        return None
    return None


def _check(fields: dict[str, Any], union: TypeAdapter[Any], types: tuple[str, ...]) -> Any:
    version = fields.get("version")
    if version != PROTOCOL_VERSION or type(version) is not int:
        raise ProtocolError(
            f"version: expected {PROTOCOL_VERSION}, found {brief(version)}; use the same release on both sides"
        )
    if fields.get("type") not in types:
        raise ProtocolError(f"type: expected one of {', '.join(types)}, found {brief(fields.get('type'))}")
    try:
        return union.validate_python({key: value for key, value in fields.items() if key != "version"})
    except ValidationError as error:
        raise ProtocolError(describe_validation_error(error)) from None


def tokens_to_bytes(token_ids: Sequence[int] | np.ndarray, what: str) -> bytes:
    """Token ids as the protocol's int32 array. Raises InvalidRequestError naming `what` it was for."""
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # sequences of several lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise InvalidRequestError(f"{what}: expected a flat sequence of token ids, found {brief(token_ids)}")
    if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
        raise InvalidRequestError(
            f"{what}: expected token ids that fit in 32 bits, found {tokens.min()}..{tokens.max()}"
        )
    return tokens.astype("<i4").tobytes()


def bytes_to_tokens(data: bytes) -> np.ndarray:
    """int32 [num_tokens], writable."""
    return np.frombuffer(data, "<i4").astype(np.int32)


def sample_message(id: str, output: SampleOutput) -> Sample:
    """The message that carries a sample the engine finished of the request `id`."""
    return Sample(
        id=id,
        index=output.index,
        token_ids=np.array(output.token_ids, "<i4").tobytes(),
        logprobs=None if output.logprobs is None else output.logprobs.astype("<f4").tobytes(),
        finish_reason=output.finish_reason,
        seed=output.seed,
        num_cached_tokens=output.num_cached_tokens,
        weight_versions=_spans(output.weight_versions),
        error=output.error,
        stop_reason=output.stop_reason,
        tops=_tops(output),
    )


def scores_message(id: str, output: ScoreOutput) -> Scores:
    """The message that carries a score the engine finished of the request `id`."""
    return Scores(
        id=id,
        logprobs=output.logprobs.astype("<f4").tobytes(),
        finish_reason=output.finish_reason,
        weight_versions=_spans(output.weight_versions),
        tops=_tops(output),
    )


def error_message(id: str | None, error: TruerollError, caller: str | None = None) -> Error:
    """The message that says that `id` has no result."""
    return Error(id=id, code=error.code, message=str(error)[:MAX_ERROR_CHARS], caller=caller)


def _spans(versions: tuple[WeightSpan, ...]) -> tuple[Span, ...]:
    return tuple((span.version, span.start, span.end) for span in versions)


def _tops(output: SampleOutput | ScoreOutput) -> Tops | None:
    if output.entropy is None or output.top_token_ids is None or output.top_logprobs is None:
        return None
    return Tops(
        k=output.top_token_ids.shape[1],
        entropy=output.entropy.astype("<f4").tobytes(),
        token_ids=output.top_token_ids.astype("<i4").tobytes(),
        logprobs=output.top_logprobs.astype("<f4").tobytes(),
    )


def top_arrays(tops: Tops | None) -> dict[str, np.ndarray]:
    """`entropy`, `top_token_ids` and `top_logprobs`, as the engine gave them, arrays writable; nothing of None."""
    if tops is None:
        return {}
    shape = len(tops.entropy) // 4, tops.k
    return {
        "entropy": bytes_to_logprobs(tops.entropy),
        "top_token_ids": bytes_to_tokens(tops.token_ids).reshape(shape),
        "top_logprobs": bytes_to_logprobs(tops.logprobs).reshape(shape),
    }


def sample_output(message: Sample) -> SampleOutput:
    """The sample in a message, as the engine gave it; its array is writable."""
    return SampleOutput(
        request_id=message.id,
        index=message.index,
        token_ids=bytes_to_tokens(message.token_ids).tolist(),
        logprobs=None if message.logprobs is None else bytes_to_logprobs(message.logprobs),
        finish_reason=message.finish_reason,
        seed=message.seed,
        num_cached_tokens=message.num_cached_tokens,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        error=message.error,
        stop_reason=message.stop_reason,
        **top_arrays(message.tops),
    )


def score_output(message: Scores) -> ScoreOutput:
    """The scores in a message, as the engine gave them; arrays writable."""
    return ScoreOutput(
        request_id=message.id,
        logprobs=bytes_to_logprobs(message.logprobs),
        finish_reason=message.finish_reason,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        **top_arrays(message.tops),
    )


def bytes_to_logprobs(data: bytes) -> np.ndarray:
    """float32 [num_logprobs], writable."""
    return np.frombuffer(data, "<f4").astype(np.float32)
