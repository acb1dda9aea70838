"""What goes into the engine and what comes out of it: requests, sampling parameters, outputs and their columns.

Owns the meaning and the ranges of every sampling parameter, and the table of columns: what is recorded of each token of
a sample beside the token, such as its log-prob. All code that slices, joins or makes columns, from the engine to the
front end, goes by this table, so that a new column changes its fields, its message and the code that makes it, and
nothing else. Routed experts are no column: they are recorded of the tokens of the prompt, too (`outputs.routes`).

Knows nothing of models, blocks or sockets, and imports no torch, so that clients share these types with the engine.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import uuid
from bisect import bisect_right
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from trueroll.errors import ConfigError, InvalidRequestError, TruerollError, brief


@dataclass(frozen=True)
class Column:
    """`name`: its field in `SampleOutput`, `SampleDelta` and `ScoreOutput`. `dtype`: of its elements, of which a token
    has one, or as many as `top_logprobs` asks for if it `is_listed`.
    """

    name: str
    dtype: str
    is_listed: bool = False

    def shape(self, rows: int, k: int) -> tuple[int, ...]:
        """That of the column of `rows` tokens with `k` elements listed."""
        return (rows, k) if self.is_listed else (rows,)

    def num_bytes(self, k: int) -> int:
        """Those of a token, with `k` elements listed."""
        return np.dtype(self.dtype).itemsize * (k if self.is_listed else 1)


TOKENS = Column("token_ids", "<i4")
"""The tokens themselves, where these lie beside their columns."""
LOGPROBS = Column("logprobs", "<f4")
TOPS = (Column("entropy", "<f4"), Column("top_token_ids", "<i4", True), Column("top_logprobs", "<f4", True))
"""What `top_logprobs` asks for."""
COLUMNS = (LOGPROBS, *TOPS)

Columns: TypeAlias = dict[str, np.ndarray]
"""Columns of the same tokens, by name, in the order of `COLUMNS`."""


def columns_of(output: Any) -> Columns:
    """Those of a `SampleOutput`, `SampleDelta` or `ScoreOutput`."""
    found = ((column.name, getattr(output, column.name)) for column in COLUMNS)
    return {name: values for name, values in found if values is not None}


def as_fields(columns: Columns) -> dict[str, Any]:
    """Columns as the fields of an output, None for those that are not there."""
    return {column.name: columns.get(column.name) for column in COLUMNS}


def new_columns(has_logprobs: bool, top_logprobs: int | None, rows: int = 0) -> Columns:
    """Those that are asked for, of `rows` tokens, filled with zeros."""
    asked = (LOGPROBS,) * has_logprobs + (TOPS if top_logprobs is not None else ())
    return {column.name: np.zeros(column.shape(rows, top_logprobs or 0), column.dtype) for column in asked}


def cut_columns(columns: Columns, start: int, end: int | None = None) -> Columns:
    """Those of tokens [start, end)."""
    return {name: values[start:end] for name, values in columns.items()}


def join_columns(first: Columns, rest: Columns) -> Columns:
    """Those of tokens, and of others behind them, of which the same is recorded."""
    return {name: np.concatenate((values, rest[name])) for name, values in first.items()}


class GrowingColumns:
    """Columns to which tokens are added one by one. `k`: how many elements of a token the listed ones have."""

    def __init__(self, columns: Sequence[Column], k: int) -> None:
        self._columns, self._k = columns, k
        self._num_tokens = 0
        self._content = [bytearray() for _ in columns]

    def append(self, values: Sequence[bytes]) -> None:
        """One more token, with its elements in each column."""
        self._num_tokens += 1
        for content, value in zip(self._content, values, strict=True):
            content += value

    def arrays(self, start: int = 0) -> Columns:
        """Those of the tokens from `start` on, writable."""
        k, rows = self._k, self._num_tokens - start
        pairs = zip(self._columns, self._content, strict=True)
        parts = [(column, content[column.num_bytes(k) * start :]) for column, content in pairs]
        return {column.name: np.frombuffer(part, column.dtype).reshape(column.shape(rows, k)) for column, part in parts}


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
LogprobsMode: TypeAlias = Literal["processed", "temperature", "raw"]
InFlight: TypeAlias = Literal["drain", "recompute", "abort"]
Tag: TypeAlias = Literal["weights", "kv_cache"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""Of one stop string."""
MAX_STOP_TOKEN_IDS = 4096
MAX_TOP_LOGPROBS = 128
MAX_SPANS = 1024
HASH_BYTES = 32
"""Of the content of a span."""
_MAX_SHOWN_FAULTS = 4

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]
CacheSalt: TypeAlias = Annotated[str, Field(max_length=1024)]
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def plain(value: Any) -> Any:
    """Turn a numpy scalar into a Python value, whose type strict validation checks. Return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


class Distribution(BaseModel):
    """The distribution a token is drawn from: the model's logits, a temperature, then filters.

    `temperature` divides the logits; 0 means greedy: the lowest id among the highest logits, and the model's own
    distribution wherever a log-prob is asked for. `top_k` (-1: off) keeps the k highest logits, ties going to the lower
    id. `top_p` keeps the shortest run of the most probable tokens whose probability reaches p. `min_p` drops tokens
    less probable than min_p times the most probable one. The filters apply in that order, each to what the one before
    left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=-1, ge=-1, lt=2**63)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)

    def __init__(self, /, **values: Any) -> None:
        """Raise InvalidRequestError naming every parameter that is unknown, mistyped or out of range."""
        try:
            super().__init__(**{name: plain(value) for name, value in values.items()})
        except ValidationError as error:
            raise from_validation(InvalidRequestError, error) from None

    @model_validator(mode="after")
    def _top_k_is_off_or_positive(self) -> Distribution:
        if self.top_k == 0:
            raise InvalidRequestError(
                "top_k: expected -1 (off) or at least 1, found 0", field="top_k", value=0, limit=1
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, with no draw."""
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Whether any token can be dropped before the draw."""
        return bool(self._filters)

    @property
    def _filters(self) -> list[str]:
        """The names of the parameters that can drop a token."""
        is_on = dict(top_k=self.top_k > 0, top_p=self.top_p < 1.0, min_p=self.min_p > 0.0)
        return [] if self.is_greedy else [name for name, drops in is_on.items() if drops]


class SamplingParams(Distribution):
    """How the samples of one prompt are drawn, when they end, and what is recorded. Numbers may be scalars of numpy.

    `seed` None lets the worker take `seed_of` the request; sample i uses `derive_seed(seed, i)`. A sample ends at an
    end-of-sequence token of the model (any that generation_config.json, config.json or the tokenizer names, unless
    `ignore_eos`; `health` has them as `engine["eos_token_ids"]`), a token of `stop_token_ids` or a string of `stop`
    (one string, or several), none of them before `min_tokens`; the tokens that ended it are part of it. It ends after
    `max_tokens` at the latest; None: where the model's context ends. `logprobs` says of which distribution:
    `processed` (after temperature and filters: what was drawn from), `temperature` (after temperature alone), `raw`
    (the model's own) or None. `top_logprobs` records, for each token, the entropy of that distribution and its so many
    most probable tokens; 0 records the entropy alone, None neither. `return_routed_experts` records which experts a
    model with such chose for each token, of the prompt too. `cache_salt` keeps prefix reuse among requests with the
    same salt.
    """

    n: int = Field(default=1, ge=1, lt=2**63)
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = 128
    min_tokens: int = Field(default=0, ge=0, lt=2**63)
    seed: Seed | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], FailFast(), Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(
        default=(), strict=False
    )
    stop: Annotated[tuple[StopString, ...], FailFast(), Field(max_length=MAX_STOP_STRINGS)] = Field(
        default=(), strict=False
    )
    ignore_eos: bool = False
    logprobs: LogprobsMode | None = "processed"
    top_logprobs: TopLogprobs | None = None
    return_routed_experts: bool = False
    cache_salt: CacheSalt | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_one_stop(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _token_ids_are_plain(cls, token_ids: Any) -> Any:
        if isinstance(token_ids, np.ndarray):
            return token_ids.tolist()
        if isinstance(token_ids, list | tuple) and not {*map(type, token_ids)} <= {int}:
            return [plain(token) for token in token_ids]
        return token_ids

    @model_validator(mode="after")
    def _min_tokens_can_be_reached(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens: expected at most max_tokens = {self.max_tokens}, found {self.min_tokens}",
                field="min_tokens",
                value=self.min_tokens,
                limit=self.max_tokens,
            )
        return self

    @model_validator(mode="after")
    def _top_logprobs_have_a_distribution(self) -> SamplingParams:
        if self.top_logprobs is not None and self.logprobs is None:
            raise InvalidRequestError(
                f"top_logprobs: expected None where logprobs is None, found {self.top_logprobs}; say in logprobs of "
                "which distribution",
                field="top_logprobs",
                value=self.top_logprobs,
            )
        return self

    @property
    def trainer_temperature(self) -> float:
        """The `temperature` at which a trainer computes the distribution of these log-probs, as `token_log_probs` and
        a plain log-softmax of its logits divided by it do.

        Raise ConfigError if no trainer computes that distribution: it is one of filtered or of banned tokens, or there
        are no log-probs.
        """
        if self.logprobs is None:
            text = "logprobs: expected log-probs to compute again, found None; sample with 'temperature'"
            raise ConfigError(text, field="logprobs")
        if self.logprobs == "raw":
            return 1.0
        found = self._filters + ["min_tokens"] * (self.min_tokens > 0)
        if self.logprobs == "processed" and found:
            raise ConfigError(
                f"logprobs: expected those of a distribution that a trainer computes, found 'processed' with "
                f"{', '.join(found)}, which a trainer's softmax does not know; sample with logprobs='temperature', or "
                f"without {', '.join(found)}",
                field="logprobs",
                value=self.logprobs,
            )
        return self.temperature

    def with_max_tokens(self, prompt_len: int, max_model_len: int) -> SamplingParams:
        """Those of a prompt of `prompt_len` tokens, with a number for `max_tokens`: the rest of the context for None,
        and 1 where there is no rest.
        """
        if self.max_tokens is not None:
            return self
        rest = max(1, max_model_len - prompt_len, self.min_tokens)
        return self.model_copy(update={"max_tokens": rest})


E = TypeVar("E", bound=TruerollError)
_BOUNDS = {"ge": 0, "gt": 1, "le": 0, "lt": -1, "min_length": 0, "max_length": 0}
"""The bounds in a fault of pydantic, and what an integer is away from them that keeps to them."""


def from_validation(kind: type[E], error: ValidationError, first_part: int = 0) -> E:
    """The error of `kind` that tells of a pydantic error. `first_part`: see `about_fault`."""
    return kind(describe_validation_error(error), **about_fault(error, first_part))


def about_fault(error: ValidationError, first_part: int = 0, num_parts: int | None = None) -> dict[str, Any]:
    """`field`, `value` and `limit` of the first fault of a pydantic error. `first_part`, `num_parts`: which parts of
    its location name the field.
    """
    fault = error.errors()[0]
    found, limit = _found_and_limit(fault)
    return dict(field=_name_of(fault["loc"][first_part:][:num_parts]), value=found, limit=limit)


def _found_and_limit(fault: Any) -> tuple[Any, int | float | None]:
    found, context = None if fault["type"] == "missing" else fault["input"], fault.get("ctx", {})
    name = next((name for name in _BOUNDS if name in context), None)
    if name is None:
        return found, None
    if name.endswith("length"):
        return len(found) if isinstance(found, Sized) else None, context[name]
    limit = context[name]
    return found, limit + _BOUNDS[name] if isinstance(limit, int) else limit


def _name_of(location: Sequence[int | str]) -> str | None:
    """Such as `stop[3]`; None if there is no location."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).strip(".") or None


def describe_validation_error(error: ValidationError) -> str:
    """One line for the first faults of a pydantic error: which field, what was expected, what was found."""
    shown = [_describe_fault(fault) for fault in error.errors()[:_MAX_SHOWN_FAULTS]]
    hidden = error.error_count() - len(shown)
    return "; ".join(shown + [f"and {hidden} more"] * bool(hidden))


def _describe_fault(fault: Any) -> str:
    where = ".".join(str(part)[:80] for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown parameter; remove it or check its spelling"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}, found {brief(fault['input'])}"


_PLACE = struct.Struct("<qq")


class ContentSpan(NamedTuple):
    """Tokens [start, end) of a prompt stand for content other than text. `content_hash`, 32 bytes, identifies all that
    this content is, its size included: no bytes of it are compared.
    """

    start: int
    end: int
    content_hash: bytes


def content_within(spans: Sequence[ContentSpan], start: int, end: int) -> bytes:
    """What identifies the content of tokens [start, end): the sorted spans that touch them, with their places relative
    to `start`; empty if there are none. Equal for equal content alone.
    """
    first = bisect_right(spans, start, key=lambda span: span.end)
    touching = takewhile(lambda span: span.start < end, islice(spans, first, None))
    return b"".join(_PLACE.pack(span.start - start, span.end - start) + span.content_hash for span in touching)


def check_spans(spans: Sequence[ContentSpan], num_tokens: int) -> None:
    """Raise InvalidRequestError unless spans of a prompt of `num_tokens` tokens are sorted and disjoint."""
    before = 0
    for i, span in enumerate(spans):
        if not before <= span.start < span.end <= num_tokens:
            raise InvalidRequestError(
                f"spans[{i}]: tokens [{span.start}, {span.end}) are empty, overlap the span before, or lie outside the "
                f"{num_tokens} tokens of the prompt; give sorted spans that share no token",
                field=f"spans[{i}]",
            )
        if len(span.content_hash) != HASH_BYTES:
            raise InvalidRequestError(
                f"spans[{i}]: a content hash has {HASH_BYTES} bytes (got {len(span.content_hash)})",
                field=f"spans[{i}]",
                value=len(span.content_hash),
                limit=HASH_BYTES,
            )
        before = span.end


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt and how to sample from it: the unit of work, one prefill for `params.n` samples.

    `prompt_token_ids`: int32 [prompt_len]. `spans`: those of its tokens that stand for other content, sorted and
    disjoint. `params.seed` must be set. `num_prior_tokens`: how many of the last tokens of the prompt belong to the
    sample that goes on, so that a stop string may begin in them.
    """

    id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    num_prior_tokens: int = 0
    spans: tuple[ContentSpan, ...] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """Asks for the log-probs of given tokens. `token_ids`: int32 [num_tokens], at least two; `spans`: as in
    `GenerateRequest`. `top_logprobs`, `return_routed_experts`: those of `SamplingParams`.
    """

    id: str
    token_ids: np.ndarray
    distribution: Distribution = field(default_factory=Distribution)
    cache_salt: str | None = None
    top_logprobs: int | None = None
    return_routed_experts: bool = False
    spans: tuple[ContentSpan, ...] = ()


Request: TypeAlias = GenerateRequest | ScoreRequest


@dataclass(frozen=True)
class WeightSpan:
    """Tokens [start, end) of a sample were produced by the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class SampleOutput:
    """One finished sample.

    `token_ids`: with the token that ended it. `logprobs`: float32 [num_tokens] of the asked-for distribution, or None.
    `stop_reason`: the token (also the model's own) or the string that ended it, if the finish reason is `stop`. `seed`:
    the sample's own derived seed. `num_cached_tokens`: the tokens of the prompt whose KV this request found already
    computed, or shared with another request's computation. `error` says why, if the finish reason is `error`.

    None unless `top_logprobs=k` asked for them: `entropy`, float32 [num_tokens], of the distribution of each token's
    log-prob, in nats; `top_token_ids`, int32 [num_tokens, k], and `top_logprobs`, float32 [num_tokens, k]: its most
    probable tokens, highest logit first, of equal ones the lower id first. Where fewer than k tokens are left the
    dropped ones follow, with log-prob -inf, the lowest ids first.

    `routed_experts`, None unless `return_routed_experts` asked for it, or without tokens: uint8, beyond 256 experts
    uint16, [num_prompt_tokens + num_tokens - 1, layers with experts, experts per token]. Row t has the experts, by
    ascending id, that were chosen for token t of prompt and sample when it was fed; the last token never was. The rows
    that tokens were drawn after are those of the weights that drew them, those before them of the first token's.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: np.ndarray | None
    finish_reason: FinishReason
    seed: int
    num_cached_tokens: int
    weight_versions: tuple[WeightSpan, ...]
    error: str | None = None
    stop_reason: int | str | None = None
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @classmethod
    def empty(cls, request_id: str, index: int, seed: int, params: SamplingParams) -> SampleOutput:
        """A sample that was aborted before it had a token. `seed`: its own."""
        return cls(
            request_id=request_id,
            index=index,
            token_ids=[],
            finish_reason="abort",
            seed=seed,
            num_cached_tokens=0,
            weight_versions=(),
            **as_fields(new_columns(params.logprobs is not None, params.top_logprobs)),
        )


@dataclass(frozen=True)
class SampleDelta:
    """What a sample has got while it grows: its tokens from `start` on, and what belongs to each.

    At least one token, unless the sample was begun anew (`start` is 0) and then ended without any.

    `token_ids`, `logprobs`, `entropy`, `top_token_ids`, `top_logprobs`: those of `SampleOutput`, for these tokens.
    """

    request_id: str
    index: int
    start: int
    token_ids: list[int]
    logprobs: np.ndarray | None
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class ScoreOutput:
    """Log-probs of a scored sequence.

    `logprobs`: float32 [num_tokens - 1]; entry i is the log-prob of token i + 1 given tokens [0, i + 1). Empty if
    `finish_reason` is `abort`; otherwise `finish_reason` is `stop`. `entropy`, `top_token_ids`, `top_logprobs` and
    `routed_experts`: those of `SampleOutput`, for each of its entries; the last one is None of an aborted score.
    """

    request_id: str
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


Output: TypeAlias = SampleOutput | ScoreOutput

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def new_id() -> str:
    """A random id for a message, a request, a caller or a push: 32 lower-case hexadecimal digits."""
    return uuid.uuid4().hex


def derive_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sample `index` in a group with `seed`: distinct for every index.

    SplitMix64 (Steele, Lea, Flood 2014): the finalizer is a bijection and the increment is odd, so no two indices meet.
    """
    z = (operator.index(seed) + (operator.index(index) + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _FACTORS[1]) & _MASK
    return z ^ (z >> 31)


def seed_before(sample_seed: int) -> int:
    """The seed with which a request's sample 0 has `sample_seed`: the inverse of `derive_seed(..., 0)`."""
    z = sample_seed ^ (sample_seed >> 31) ^ (sample_seed >> 62)
    z = (z * pow(_FACTORS[1], -1, 2**64)) & _MASK
    z = z ^ (z >> 27) ^ (z >> 54)
    z = (z * pow(_FACTORS[0], -1, 2**64)) & _MASK
    z = z ^ (z >> 30) ^ (z >> 60)
    return (z - _GOLDEN) & _MASK


def check_length(field: str, prompt_len: int, num_new: int, max_model_len: int) -> None:
    """Raise InvalidRequestError unless a prompt, which is in `field`, and its new tokens fit the model."""
    if prompt_len + num_new > max_model_len:
        raise InvalidRequestError(
            f"length: expected at most max_model_len = {max_model_len} tokens in prompt and max_tokens together, found "
            f"{prompt_len} + {num_new}; shorten one of them",
            field=field,
            value=prompt_len + num_new,
            limit=max_model_len,
        )


def seed_of(id: str, prompt: bytes) -> int:
    """The 63-bit seed of a request that names none: its id's and its prompt's, so that the same request asked again,
    of any worker, draws the same samples.
    """
    digest = hashlib.blake2b(len(id).to_bytes(8, "little") + id.encode() + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
