"""Requests, sampling parameters, outputs and their columns: every type that enters or leaves the engine.

Owns the meaning and the range of every sampling parameter. Also owns the table of columns. A column is a value recorded
for each token of a sample, such as the token's log-prob. All code that slices, joins or creates columns, from the
engine to the front end, uses the table of columns. To add a column, change the table, the fields of outputs, the
message in `protocol.messages` and its maps in `protocol.codec`, the code that computes the column (`running.sampler`),
the code that decides which columns a request gets (`admission`), and `http.records`. Routed experts are not a column,
because they are also recorded for the tokens of the prompt (`outputs.routes`).

Knows nothing about models, blocks or sockets. Does not import torch, so that clients can use these types without torch.
"""

from __future__ import annotations

import hashlib
import operator
import re
import struct
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from trueroll.errors import ConfigError, InvalidRequestError, TruerollError, brief

from .grammars.source import Grammar, as_grammar
from .media import ImageInput


class Widths(NamedTuple):
    """The number of elements per token in columns with lists. `tops`: the number of elements per token in the columns
    of the most probable tokens. `targets`: the number of elements per token in the column of the target tokens.
    """

    tops: int = 0
    targets: int = 0


@dataclass(frozen=True, eq=False)
class Column:
    """A value that is recorded for each token. Each column is a single object, compared by identity.

    `name`: the name of the column's field in `SampleOutput`, `SampleDelta` and `ScoreOutput`. `dtype`: the dtype of one
    element. `listed`: the field of `Widths` that says how many elements each token has. `counts`: if the number of
    elements differs between tokens, the name of the column that has these numbers; the elements of all tokens are then
    concatenated. If `listed` and `counts` are empty, a token has one element.
    """

    name: str
    dtype: str
    listed: str = ""
    counts: str = ""

    def num_bytes(self, widths: Widths) -> int:
        """Return the number of bytes per token. The column must have the same number of bytes for each token."""
        assert not self.counts
        return np.dtype(self.dtype).itemsize * (getattr(widths, self.listed) if self.listed else 1)

    def array(self, content: bytes | bytearray, rows: int, widths: Widths) -> np.ndarray:
        """Return the content of the column for `rows` tokens as an array, which shares the memory of `content`."""
        found = np.frombuffer(content, self.dtype)
        return found.reshape(rows, getattr(widths, self.listed)) if self.listed else found


TOKENS = Column("token_ids", "<i4")
"""The token ids themselves, for code that stores them next to the columns."""
LOGPROBS = Column("logprobs", "<f4")
TOPS = (Column("entropy", "<f4"), Column("top_token_ids", "<i4", "tops"), Column("top_logprobs", "<f4", "tops"))
"""The columns that a request gets by setting `top_logprobs`."""
TARGETS = Column("target_logprobs", "<f4", "targets")
"""The column that a request gets by setting `target_token_ids`."""
KEPT_COUNTS, KEPT_LOG_MASS = Column("kept_counts", "<i4"), Column("kept_log_mass", "<f4")
KEPT_IDS = Column("kept_token_ids", "<i4", counts="kept_counts")
KEPT = (KEPT_COUNTS, KEPT_LOG_MASS, KEPT_IDS)
"""The columns that a request gets by setting `return_sampling_mask`."""
COLUMNS = (LOGPROBS, *TOPS, TARGETS, *KEPT)
_BY_NAME = {column.name: column for column in COLUMNS}

Columns: TypeAlias = dict[str, np.ndarray]
"""The columns of a range of tokens: a map from column name to values, in the order of `COLUMNS`."""


def columns_of(output: Any) -> Columns:
    """Return the columns of a `SampleOutput`, `SampleDelta` or `ScoreOutput`."""
    found = ((column.name, getattr(output, column.name)) for column in COLUMNS)
    return {name: values for name, values in found if values is not None}


def as_fields(columns: Columns) -> dict[str, Any]:
    """Return columns as the fields of an output. The field of a missing column is None."""
    return {LOGPROBS.name: None, **columns}


def empty_columns(params: SamplingParams) -> Columns:
    """Return the columns of a sample without tokens."""
    targets = len(params.target_token_ids)
    asked = (LOGPROBS,) * (params.logprobs is not None) + (TARGETS,) * (targets > 0)
    asked += (TOPS if params.top_logprobs is not None else ()) + (KEPT if params.return_sampling_mask else ())
    widths = Widths(params.top_logprobs or 0, targets)
    return {column.name: column.array(b"", 0, widths).copy() for column in COLUMNS if column in asked}


def new_columns(top_logprobs: int | None, num_targets: int, has_mask: bool, rows: int) -> Columns:
    """Return the columns of a score for `rows` tokens, filled with zeros, and without kept ids. `num_targets`: the
    number of target tokens at each position. `has_mask`: whether `return_sampling_mask` is set.
    """
    asked = (LOGPROBS, *(TOPS if top_logprobs is not None else ()), *(TARGETS,) * (num_targets > 0), *KEPT * has_mask)
    widths = Widths(top_logprobs or 0, num_targets)
    sizes = {column: 0 if column.counts else rows * column.num_bytes(widths) for column in asked}
    return {column.name: column.array(bytearray(size), rows, widths) for column, size in sizes.items()}


def cut_columns(columns: Columns, start: int, end: int | None = None) -> Columns:
    """Return the columns of tokens [start, end)."""
    return {name: _cut(_BY_NAME[name], columns, start, end) for name in columns}


def _cut(column: Column, columns: Columns, start: int, end: int | None) -> np.ndarray:
    values = columns[column.name]
    if not column.counts:
        return values[start:end]
    counts = columns[column.counts]
    first = int(counts[:start].sum())
    return values[first : first + int(counts[start:end].sum())]


def join_columns(first: Columns, rest: Columns) -> Columns:
    """Concatenate the columns of two adjacent ranges of tokens. `rest`: the columns of the second range of tokens."""
    return {name: np.concatenate((values, rest[name])) for name, values in first.items()}


class GrowingColumns:
    """Columns to which tokens are appended one by one. `num_bytes`: the size of the content of all columns."""

    def __init__(self, columns: Sequence[Column], widths: Widths) -> None:
        self._columns, self._widths = columns, widths
        self.num_bytes = 0
        self._num_tokens = 0
        self._content = [bytearray() for _ in columns]

    def append(self, values: Sequence[bytes]) -> None:
        """Append a token. `values`: the bytes of the token's value in each column."""
        self._num_tokens += 1
        for content, value in zip(self._content, values, strict=True):
            content += value
            self.num_bytes += len(value)

    def arrays(self, start: int = 0) -> Columns:
        """Return writable copies of the columns, from token `start` on."""
        pairs = zip(self._columns, self._content, strict=True)
        shared = {column.name: column.array(part, self._num_tokens, self._widths) for column, part in pairs}
        return {name: values.copy() for name, values in cut_columns(shared, start).items()}


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
LogprobsMode: TypeAlias = Literal["processed", "temperature", "raw"]
InFlight: TypeAlias = Literal["drain", "recompute", "abort", "keep"]
"""What happens to running requests when weights are committed."""
SleepInFlight: TypeAlias = Literal["drain", "recompute", "abort"]
"""What happens to running requests at a sleep. `keep` is not possible, because a sleep may release the KV."""
Tag: TypeAlias = Literal["weights", "kv_cache"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""The limit for one stop string."""
MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 1e4
MAX_TOP_LOGPROBS = 1024
MAX_TARGETS = 1024
"""The limit for the number of targets at one position."""
MAX_SPANS = 1024
NO_TARGET = -1
HASH_BYTES = 32
"""The length of the content hash of a span."""
_MAX_SHOWN_FAULTS = 4

_EDITS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "min_tokens",
    "structured_outputs",
)
_BANS = ("allowed_token_ids", "bad_words_token_ids", "min_tokens", "structured_outputs")
"""The edits that set logits to minus infinity."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class _HashableFailFast(FailFast):
    """A hashable `FailFast`. Python hashes the types of a union, including the `FailFast` that annotates a type."""

    __hash__ = object.__hash__  # type: ignore[assignment]


TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]
CacheSalt: TypeAlias = Annotated[str, Field(max_length=1024)]
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Bias: TypeAlias = Annotated[float, Field(ge=-100.0, le=100.0)]
BadWord: TypeAlias = Annotated[tuple[TokenId, ...], FailFast(), Field(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
AllowedTokenIds: TypeAlias = Annotated[
    tuple[TokenId, ...], _HashableFailFast(), Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python value, which strict validation accepts. Return a value that is not a numpy
    scalar unchanged.
    """
    return value.item() if isinstance(value, np.generic) else value


def _plain_ids(token_ids: Any) -> Any:
    """Convert an array, or a list with numpy scalars, to a list of plain values. Return any other value unchanged."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.tolist()
    if isinstance(token_ids, list | tuple) and not {*map(type, token_ids)} <= {int}:
        return [plain(token) for token in token_ids]
    return token_ids


def _as_tuples(parts: Any, most: int, most_each: int) -> Any:
    """Convert lists in a list to tuples of plain values. A list that is too long is cut to one element above its limit,
    so that validation still rejects it.
    """
    if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
        return parts
    found = islice(parts, most + 1)
    return [tuple(map(plain, part[: most_each + 1])) if isinstance(part, list | tuple) else part for part in found]


class Distribution(BaseModel):
    """The distribution from which a token is drawn. A temperature and then filters are applied to the model's logits.

    `temperature` divides the logits. Temperature 0 means greedy: the token with the highest logit is chosen. Among
    equal logits, the lowest token id wins. Greedy log-probs are log-probs of the model's own distribution. A
    temperature beyond the range of float32 counts as infinite. An infinite temperature is refused if other parameters
    ban tokens. `top_k` (-1: off) keeps the k tokens with the highest logits. Among equal logits, lower token ids win.
    `top_p` keeps the smallest set of most probable tokens with a total probability of at least p. `min_p` drops tokens
    with a probability below min_p times the highest probability. The filters apply in the order `top_k`, `top_p`,
    `min_p`. Each filter sees only the tokens that the previous filter kept.

    All parameters besides the temperature and the filters edit the logits before the temperature divides them. The
    edits affect a greedy choice, too. `kernels.edits` defines the order and the arithmetic of the edits. The prompt is
    everything before the sample's first token. `allowed_token_ids`: no other token is drawn; None allows all tokens.
    `bad_words_token_ids`: sequences of tokens that a sample must not contain. `logit_bias`: maps token ids to numbers
    from -100 to 100, which are added to the logits of the tokens. A `repetition_penalty` above 1 makes tokens of prompt
    and sample less likely; 1 is off. `frequency_penalty` is subtracted from a token's logit once for each time the
    token occurs in the sample. `presence_penalty` is subtracted once from the logit of each token that occurs in the
    sample. `frequency_penalty` and `presence_penalty` are from -2 to 2, and 0 is off.

    `min_tokens`: before a sample has this many tokens, the tokens that end a sample are not drawn. The tokens that end
    a sample are the tokens in `stop_token_ids` and, unless `ignore_eos` is set, the model's end-of-sequence tokens.

    `structured_outputs`: a `Grammar`, or a map with its fields; None allows all texts. A token is drawn only if the
    sample's text, including this token, is a prefix of a text that the grammar allows. The tokens that end a sample are
    drawn only where the text is complete, unless they are themselves part of the text. Special tokens are never part of
    the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=-1, ge=-1, lt=2**63)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], FailFast(), Field(max_length=MAX_LOGIT_BIAS)] = Field(
        default=(), strict=False
    )
    allowed_token_ids: AllowedTokenIds | None = Field(default=None, strict=False)
    bad_words_token_ids: Annotated[tuple[BadWord, ...], FailFast(), Field(max_length=MAX_BAD_WORDS)] = Field(
        default=(), strict=False
    )
    min_tokens: int = Field(default=0, ge=0, lt=2**63)
    stop_token_ids: Annotated[tuple[TokenId, ...], FailFast(), Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(
        default=(), strict=False
    )
    ignore_eos: bool = False
    structured_outputs: Grammar | None = None

    def __init__(self, /, **values: Any) -> None:
        """Raise InvalidRequestError if a parameter is unknown, has the wrong type, or is out of range.

        The error describes the first few faults, and counts the remaining faults.
        """
        try:
            super().__init__(**{name: plain(value) for name, value in values.items()})
        except ValidationError as error:
            raise from_validation(InvalidRequestError, error) from None

    @field_validator("stop_token_ids", "allowed_token_ids", mode="before")
    @classmethod
    def _token_ids_are_plain(cls, token_ids: Any) -> Any:
        return _plain_ids(token_ids)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases_are_pairs(cls, biases: Any) -> Any:
        return _as_tuples(biases.items() if isinstance(biases, Mapping) else biases, MAX_LOGIT_BIAS, 2)

    @field_validator("bad_words_token_ids", mode="before")
    @classmethod
    def _words_are_tuples(cls, words: Any) -> Any:
        return _as_tuples(words, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _grammar_is_complete(cls, value: Any) -> Any:
        try:
            return as_grammar(value)
        except ValidationError as error:
            raise ValueError(f"structured_outputs: {describe_validation_error(error)}") from None

    @field_validator("logit_bias")
    @classmethod
    def _each_bias_is_given_once(cls, biases: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        tokens = [token for token, _ in biases]
        if (twice := next((token for token, count in Counter(tokens).items() if count > 1), None)) is not None:
            raise ValueError(f"logit_bias: token {twice} has more than one bias; give one bias for each token")
        return tuple(sorted(biases))

    @model_validator(mode="after")
    def _top_k_is_off_or_positive(self) -> Distribution:
        if self.top_k == 0:
            raise InvalidRequestError("top_k must be -1 (off) or at least 1 (got 0)", field="top_k", value=0, limit=1)
        return self

    @model_validator(mode="after")
    def _bans_have_a_finite_temperature(self) -> Distribution:
        """A temperature beyond float32 is infinite. The logit of a banned token, divided by an infinite temperature,
        would be NaN.
        """
        if self.temperature > _MAX_FLOAT32 and (bans := [name for name in self._edits if name in _BANS]):
            text = f"temperature must be at most {_MAX_FLOAT32:.8g} with {bans[0]} (got {self.temperature:g})"
            raise InvalidRequestError(text, field="temperature", value=self.temperature, limit=_MAX_FLOAT32)
        return self

    @model_validator(mode="after")
    def _grammar_has_an_end(self) -> Distribution:
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos must be false with structured_outputs, because only an end-of-sequence token can end a "
                "complete text; leave ignore_eos out",
                field="ignore_eos",
                value=True,
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Return whether sampling is greedy: the most probable token is chosen, not a random one."""
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Return whether any filter is on, in which case tokens may be dropped before the draw."""
        return bool(self._filters)

    @property
    def num_numbers(self) -> int:
        """The total length of the lists in the parameters, from which callers estimate memory. An inner list counts as
        its length plus 2, and an entry of `logit_bias` as 4. In a grammar, four characters count as 1, and each text of
        `choice` adds 2.
        """
        words, grammar = sum(len(word) + 2 for word in self.bad_words_token_ids), self.structured_outputs
        text = 0 if grammar is None else grammar.num_chars // 4 + 2 * len(grammar.choice)
        return len(self.stop_token_ids) + 4 * len(self.logit_bias) + len(self.allowed_token_ids or ()) + words + text

    def most_kept(self, vocab_size: int) -> int:
        """Return the maximum number of ids that `return_sampling_mask` records for a token."""
        allowed, has_grammar = self.allowed_token_ids, self.structured_outputs is not None
        if not (self.has_filters or self.min_tokens or self.bad_words_token_ids or allowed or has_grammar):
            return 0  # the whole vocabulary, for which no ids are recorded
        top_k = self.top_k if self.has_filters and self.top_k > 0 else vocab_size
        return min(top_k, vocab_size if allowed is None else len(allowed), vocab_size)

    @property
    def _filters(self) -> list[str]:
        """The names of the filters that are on."""
        is_on = dict(top_k=self.top_k > 0, top_p=self.top_p < 1.0, min_p=self.min_p > 0.0)
        return [] if self.is_greedy else [name for name, drops in is_on.items() if drops]

    @property
    def _edits(self) -> list[str]:
        """The names of the parameters that edit logits."""
        return [name for name in _EDITS if getattr(self, name) != type(self).model_fields[name].default]


class SamplingParams(Distribution):
    """How the samples of one prompt are drawn, when they end, and what is recorded. Numbers may be numpy scalars.

    `seed`: the seed of the request. If the seed is None, the worker derives a seed with `seed_of`. Sample i uses
    `derive_seed(seed, i)`.

    A sample ends at an end-of-sequence token of the model, at a token in `stop_token_ids` or at a string in `stop` (one
    string or several). Until a sample has `min_tokens` tokens, it does not end at an end-of-sequence token, a stop
    token or a stop string. The output includes the tokens that ended the sample. The end-of-sequence tokens are listed
    in generation_config.json, config.json or the tokenizer; `health` returns them as `engine["eos_token_ids"]`. With
    `ignore_eos`, end-of-sequence tokens do not end a sample. `max_tokens` limits the tokens of a sample; with None, a
    sample may fill the model's context.

    `logprobs`: the distribution under which the log-probs of tokens are computed. `processed`: the distribution from
    which tokens are drawn, after temperature and filters. `temperature`: the distribution after temperature, without
    filters. `raw`: the model's own distribution. If `logprobs` is None, the samples have no log-probs. `top_logprobs`:
    the number of most probable tokens that are recorded for each token of the sample. With `top_logprobs`, the entropy
    of the distribution is recorded as well. If `top_logprobs` is 0, only the entropy is recorded. If `top_logprobs` is
    None, neither the tokens nor the entropy is recorded. `target_token_ids`: for each token of the sample, record the
    log-probs of these tokens, as `target_logprobs`. `return_sampling_mask`: for each token of the sample, record the
    tokens that could be drawn after filters and bans, as `kept_token_ids`, and the logarithm of their total
    probability, as `kept_log_mass`. `return_routed_experts`: record the experts chosen for each token of prompt and
    sample, if the model is a mixture of experts. `cache_salt`: only requests with the same salt share cached prefixes.

    `one_version`: never draw a sample's tokens with several versions of the weights. A commit with `in_flight`
    `recompute` then ends a sample that has tokens, with finish reason `abort`. While a request with `one_version` is
    unfinished, a commit with `in_flight` `keep` is refused.
    """

    n: int = Field(default=1, ge=1, lt=2**63)
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = 128
    seed: Seed | None = None
    stop: Annotated[tuple[StopString, ...], FailFast(), Field(max_length=MAX_STOP_STRINGS)] = Field(
        default=(), strict=False
    )
    logprobs: LogprobsMode | None = "processed"
    top_logprobs: TopLogprobs | None = None
    target_token_ids: Annotated[tuple[TokenId, ...], FailFast(), Field(max_length=MAX_TARGETS)] = Field(
        default=(), strict=False
    )
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    cache_salt: CacheSalt | None = None
    one_version: bool = False

    @field_validator("target_token_ids", mode="before")
    @classmethod
    def _targets_are_plain(cls, token_ids: Any) -> Any:
        return _plain_ids(token_ids)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_one_stop(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _min_tokens_can_be_reached(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens = {self.max_tokens} (got {self.min_tokens})",
                field="min_tokens",
                value=self.min_tokens,
                limit=self.max_tokens,
            )
        return self

    @model_validator(mode="after")
    def _records_have_a_distribution(self) -> SamplingParams:
        given = dict(top_logprobs=self.top_logprobs, target_token_ids=self.target_token_ids or None)
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None and self.logprobs is None:
            raise InvalidRequestError(
                f"{name} requires logprobs, but logprobs is None (got {name} = {brief(given[name])}); set logprobs to "
                f"the distribution you want, or leave {name} out",
                field=name,
                value=given[name],
            )
        return self

    @property
    def recorded(self) -> Distribution:
        """The distribution to which the log-probs of the samples refer. Raise ConfigError if `logprobs` is None."""
        if self.logprobs is None:
            raise ConfigError("logprobs is None, so the samples have no log-probs", field="logprobs")
        if self.logprobs != "processed":
            return Distribution(temperature=self.temperature if self.logprobs == "temperature" else 1.0)
        return Distribution(**{name: getattr(self, name) for name in Distribution.model_fields})

    @property
    def trainer_temperature(self) -> float:
        """The temperature at which a trainer must compute log-probs to match the worker's log-probs.

        For a plain log-softmax, divide the logits by this temperature; at temperature 0 (greedy), leave the logits
        unchanged.

        Raise ConfigError if `logprobs` is None. Raise ConfigError if a temperature alone does not describe the
        distribution, because filters or parameters that edit logits are set. For an aligned model, pass the parameters
        as the `distribution` of `token_log_probs` instead.
        """
        if self.logprobs is None:
            text = "logprobs is None, so a trainer has no log-probs to match; sample with logprobs='temperature'"
            raise ConfigError(text, field="logprobs")
        if self.logprobs == "raw":
            return 1.0
        found = self._filters + self._edits
        if self.logprobs == "processed" and found:
            raise ConfigError(
                f"with logprobs='processed' and {', '.join(found)}, the log-probs come from a distribution that a "
                "temperature alone does not describe; call token_log_probs(..., distribution=params), or sample with "
                "logprobs='temperature'",
                field="logprobs",
                value=self.logprobs,
            )
        return self.temperature

    def with_max_tokens(self, prompt_len: int, max_model_len: int) -> SamplingParams:
        """Return the parameters with `max_tokens` set, for a prompt of `prompt_len` tokens.

        A `max_tokens` of None becomes the remaining length of the context, but at least `min_tokens` and at least 1.
        """
        if self.max_tokens is not None:
            return self
        rest = max(1, max_model_len - prompt_len, self.min_tokens)
        return self.model_copy(update={"max_tokens": rest})


E = TypeVar("E", bound=TruerollError)
_BOUNDS = {"ge": 0, "gt": 1, "le": 0, "lt": -1, "min_length": 0, "max_length": 0}
"""The bounds in a pydantic fault, each with the offset from the bound to the nearest integer that satisfies the bound.
"""


def from_validation(kind: type[E], error: ValidationError, first_part: int = 0) -> E:
    """Convert a pydantic error to an error of class `kind`. `first_part`: see `about_fault`."""
    return kind(describe_validation_error(error), **about_fault(error, first_part))


def about_fault(error: ValidationError, first_part: int = 0, num_parts: int | None = None) -> dict[str, Any]:
    """Return `field`, `value` and `limit` for the first fault of a pydantic error.

    The field name is made from pydantic's location of the fault: at most `num_parts` parts, starting with part
    `first_part`.
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
    """Format a location as text, such as `stop[3]`. Return None for an empty location."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).strip(".") or None


def describe_validation_error(error: ValidationError) -> str:
    """Describe the first faults of a pydantic error in one line, each with its field and value."""
    shown = [_describe_fault(fault) for fault in error.errors()[:_MAX_SHOWN_FAULTS]]
    hidden = error.error_count() - len(shown)
    return "; ".join(shown + [f"and {hidden} more"] * bool(hidden))


def _describe_fault(fault: Any) -> str:
    where = ".".join(str(part)[:80] for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown parameter; remove it or check its spelling"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] == "missing":
        return f"{where}: field required"
    found = _found_and_limit(fault)[0]
    return f"{where}: {_plain_demand(fault['msg'])} (got {brief(fault['input'] if found is None else found)})"


def _plain_demand(message: str) -> str:
    """Restate the requirement of a pydantic message in plain words, such as `must be at least 2`."""
    message = re.sub(r"^\w+ should ", "must ", message).replace("greater than or equal to", "at least")
    message = re.sub(r" after validation, not \w+$", "", message.replace("less than or equal to", "at most"))
    return message[:1].lower() + message[1:]


_PLACE = struct.Struct("<qq")


class ContentSpan(NamedTuple):
    """Tokens [start, end) of a prompt that represent content other than text, such as an image.

    `content_hash`: a 32-byte hash that identifies the content, including its size. The content itself is never
    compared.
    """

    start: int
    end: int
    content_hash: bytes


def content_within(spans: Sequence[ContentSpan], start: int, end: int) -> bytes:
    """Return the bytes that identify the content within tokens [start, end); empty if there is no content.

    Different content gives different bytes. The bytes encode the sorted spans that overlap the tokens, with positions
    relative to `start`.
    """
    first = bisect_right(spans, start, key=lambda span: span.end)
    touching = takewhile(lambda span: span.start < end, islice(spans, first, None))
    return b"".join(_PLACE.pack(span.start - start, span.end - start) + span.content_hash for span in touching)


def check_spans(spans: Sequence[ContentSpan], num_tokens: int) -> None:
    """Raise InvalidRequestError unless the spans of a prompt with `num_tokens` tokens are sorted and disjoint."""
    before = 0
    for i, span in enumerate(spans):
        if not before <= span.start < span.end <= num_tokens:
            raise InvalidRequestError(
                f"spans[{i}]: the range [{span.start}, {span.end}) is empty, overlaps the previous span, or exceeds "
                f"the prompt's {num_tokens} tokens; give sorted spans that do not overlap",
                field=f"spans[{i}]",
            )
        if len(span.content_hash) != HASH_BYTES:
            raise InvalidRequestError(
                f"spans[{i}]: content_hash must have {HASH_BYTES} bytes (got {len(span.content_hash)})",
                field=f"spans[{i}]",
                value=len(span.content_hash),
                limit=HASH_BYTES,
            )
        before = span.end


@dataclass(frozen=True)
class GenerateRequest:
    """A request for `params.n` samples of one prompt. The prompt is prefilled once for all samples.

    `prompt_token_ids`: int32 [prompt_len]. `spans`: the tokens that represent content other than text, sorted and
    disjoint. A span serves only to distinguish the prompt from prompts with other content. `images`: the images of the
    prompt, sorted and disjoint. A request with images has no spans. `params.seed` must be set. If the request continues
    a sample, the prompt ends with the sample's earlier tokens. `num_prior_tokens` is the number of the sample's earlier
    tokens at the end of the prompt. A stop string may begin in the last `num_prior_tokens` tokens of the prompt.
    """

    id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    num_prior_tokens: int = 0
    spans: tuple[ContentSpan, ...] = ()
    images: tuple[ImageInput, ...] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probs of given tokens.

    `token_ids`: int32 [num_tokens], at least two. `start`: the index of the first token with a log-prob, at least 1. If
    the distribution edits logits, the tokens before `start` are the prompt, and the remaining tokens are the sample.
    `spans`, `images`, `adapter`: as in `GenerateRequest`. `top_logprobs` and `return_routed_experts`: as in
    `SamplingParams`. `target_token_ids`: for each scored token, compute the log-probs of these tokens as well: int32
    [num_tokens - start, K], K at least 1, or None. Rows of `target_token_ids` with fewer tokens are padded with
    NO_TARGET, which has the log-prob 0. `return_sampling_mask`: for each scored token, record the tokens that could be
    drawn from the distribution, as in `SamplingParams`.
    """

    id: str
    token_ids: np.ndarray
    distribution: Distribution = field(default_factory=Distribution)
    cache_salt: str | None = None
    top_logprobs: int | None = None
    return_routed_experts: bool = False
    start: int = 1
    target_token_ids: np.ndarray | None = None
    spans: tuple[ContentSpan, ...] = ()
    images: tuple[ImageInput, ...] = ()
    adapter: str | None = None
    return_sampling_mask: bool = False


Request: TypeAlias = GenerateRequest | ScoreRequest


@dataclass(frozen=True)
class WeightSpan:
    """Tokens [start, end) of a sample that were produced by the weights of `version`, or over old KV of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class SampleOutput:
    """A finished sample.

    `token_ids`: all tokens, including the tokens that ended the sample. `logprobs`: float32 [num_tokens], log-probs
    under the requested distribution, or None. `stop_reason`: the token id or the stop string that ended the sample;
    None unless the finish reason is `stop`. The token in `stop_reason` may be an end-of-sequence token. `seed`: the
    derived seed of this sample. `num_cached_tokens`: the number of prompt tokens that this request did not compute
    itself, because their KV was found in the cache or is shared with another request that computes the same prompt.
    `error`: a description of the error; None unless the finish reason is `error`. `num_drafted_tokens`: the number of
    tokens that were drafted for this sample. `num_accepted_tokens`: the number of drafted tokens that became tokens of
    this sample.

    `old_kv`: the tokens that were drawn over KV that older weights had computed, because a commit with `in_flight`
    `keep` kept the KV. The version of each span in `old_kv` is the version of the weights that computed the oldest part
    of the KV. The spans of `old_kv` are sorted and disjoint. `weight_versions` says which weights drew the tokens.

    `entropy`, `top_token_ids` and `top_logprobs` are None unless `top_logprobs=k` was requested. The entropy and the
    top tokens belong to the distribution under which `logprobs` is computed. `entropy`: float32 [num_tokens], in nats.
    `top_token_ids`: int32 [num_tokens, k], the most probable tokens in descending order of logit; tokens with equal
    logits are sorted by ascending id. `top_logprobs`: float32 [num_tokens, k], the log-probs of `top_token_ids`. If the
    filters kept fewer than k tokens, `top_token_ids` is filled up with dropped tokens, in ascending order of id. The
    log-prob of a dropped token is -inf. `target_logprobs`: float32 [num_tokens, K], the log-probs of `target_token_ids`
    in the same distribution; None without `target_token_ids`.

    `kept_counts`, `kept_log_mass` and `kept_token_ids` are None unless `return_sampling_mask` was requested.
    `kept_token_ids`: int32 [sum of `kept_counts`], the ids of the tokens that could be drawn. For each token of the
    sample, `kept_token_ids` lists all ids that neither filters nor bans excluded, in ascending order. `kept_counts`:
    int32 [num_tokens], how many ids `kept_token_ids` has for each token. A count of 0 means that the whole vocabulary
    could be drawn. `kept_offsets` says where each token's ids begin and end. `kept_log_mass`: float32 [num_tokens], the
    natural logarithm of the total probability of the kept tokens. The total probability is taken from the distribution
    after edits and temperature, but before `top_k`, `top_p` and `min_p`. The log-prob of a token in the distribution
    from which it was drawn is the token's log-prob before `top_k`, `top_p` and `min_p`, minus `kept_log_mass`.
    `kept_log_mass` is computed as a token's log-prob before the filters minus the token's log-prob after the filters,
    rounded to float32.

    `routed_experts` has the shape [num_prompt_tokens + num_tokens - 1, layers with experts, experts per token]. The
    dtype of `routed_experts` is uint8, or uint16 if the model has more than 256 experts. `routed_experts` is None
    unless `return_routed_experts` was requested and the sample has a token. Row t of `routed_experts` lists the experts
    that were chosen for token t, in ascending order of id. In `routed_experts`, the tokens of the sample are numbered
    after the tokens of the prompt. The last token of a sample has no row, because it was never fed to the model. For a
    drawn token t + 1, row t was computed with the same weights as the draw. The rows of all prompt tokens before the
    last one were computed with the weights that drew the sample's first token.
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
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    old_kv: tuple[WeightSpan, ...] = ()
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    target_logprobs: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    kept_log_mass: np.ndarray | None = None
    kept_token_ids: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the promise of equal bits covers the sample: no token was drawn over old KV."""
        return not self.old_kv

    def check_exact(self) -> None:
        """Raise InvalidRequestError if tokens were drawn over old KV. If a token was drawn over old KV, its log-prob
        differs from the log-prob that `score` or an aligned trainer computes, with any version of the weights.
        """
        if self.old_kv:
            first = self.old_kv[0]
            raise InvalidRequestError(
                f"sample {self.index} of request {self.request_id!r}: tokens {first.start} to {first.end - 1} were "
                f"drawn over KV of version {first.version}, which a push with in_flight keep had kept, so no version "
                "of the weights recomputes their log-probs; leave out the tokens in old_kv, or push with in_flight "
                "recompute",
                field="old_kv",
                value=first.start,
            )

    @property
    def kept_offsets(self) -> np.ndarray | None:
        """Where each token's part of `kept_token_ids` begins and ends: int64 [num_tokens + 1]. The ids of token i are
        at the indices [offsets[i], offsets[i + 1]). The result is None unless `return_sampling_mask` was requested.
        """
        return _offsets_of(self.kept_counts)

    @classmethod
    def empty(cls, request_id: str, index: int, seed: int, params: SamplingParams) -> SampleOutput:
        """Return a sample that was aborted before its first token. `seed`: the sample's own seed."""
        return cls(
            request_id=request_id,
            index=index,
            token_ids=[],
            finish_reason="abort",
            seed=seed,
            num_cached_tokens=0,
            weight_versions=(),
            **as_fields(empty_columns(params)),
        )


@dataclass(frozen=True)
class SampleDelta:
    """New tokens of a growing sample, from token `start` on, with their columns.

    A delta without tokens occurs only if the sample restarted (`start` is 0) and then ended without a token.

    `token_ids` and the columns: as in `SampleOutput`, for the new tokens.
    """

    request_id: str
    index: int
    start: int
    token_ids: list[int]
    logprobs: np.ndarray | None
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    target_logprobs: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    kept_log_mass: np.ndarray | None = None
    kept_token_ids: np.ndarray | None = None


@dataclass(frozen=True)
class ScoreOutput:
    """The log-probs of a scored sequence.

    `logprobs`: float32 [num_tokens - start]; entry i is the log-prob of token start + i given all earlier tokens.
    `finish_reason`: `stop`; `abort` for an aborted score; `error` if the masks of the score's grammar cannot be
    computed, or if the records of unfinished requests exceed `max_record_bytes`. If `finish_reason` is `abort` or
    `error`, `logprobs` is empty. `error`: a description of the error, or None. `entropy`, `top_token_ids`,
    `top_logprobs` and `target_logprobs`: as in `SampleOutput`, one row for each entry of `logprobs`.

    `kept_counts`, `kept_log_mass` and `kept_token_ids`: as in `SampleOutput`, for each entry of `logprobs`. The kept
    tokens at a position do not depend on the token that is given at the position. If the given token is not one of the
    kept tokens, its log-prob is -inf, and `kept_log_mass` is computed from the most probable kept token.

    `routed_experts`: as in `SampleOutput`, with num_tokens - 1 rows; None for an aborted score.
    """

    request_id: str
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    error: str | None = None
    entropy: np.ndarray | None = None
    top_token_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    target_logprobs: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    kept_log_mass: np.ndarray | None = None
    kept_token_ids: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @property
    def kept_offsets(self) -> np.ndarray | None:
        """As in `SampleOutput`: int64 [num_tokens - start + 1]."""
        return _offsets_of(self.kept_counts)


def _offsets_of(counts: np.ndarray | None) -> np.ndarray | None:
    return None if counts is None else np.concatenate(([0], counts.cumsum(dtype=np.int64)))


Output: TypeAlias = SampleOutput | ScoreOutput

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def new_id() -> str:
    """Return a random id for a message, a request, a caller or a push: 32 lower-case hexadecimal digits."""
    return uuid.uuid4().hex


def derive_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of sample `index` in a request with the seed `seed`. Every index gets a different seed.

    The algorithm is SplitMix64 (Steele, Lea, Flood 2014). Two indices never get the same seed, because the finalizer is
    a bijection and the increment is odd.
    """
    z = (operator.index(seed) + (operator.index(index) + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _FACTORS[1]) & _MASK
    return z ^ (z >> 31)


def seed_before(sample_seed: int) -> int:
    """Return the request seed from which `derive_seed(..., 0)` derives `sample_seed`."""
    z = sample_seed ^ (sample_seed >> 31) ^ (sample_seed >> 62)
    z = (z * pow(_FACTORS[1], -1, 2**64)) & _MASK
    z = z ^ (z >> 27) ^ (z >> 54)
    z = (z * pow(_FACTORS[0], -1, 2**64)) & _MASK
    z = z ^ (z >> 30) ^ (z >> 60)
    return (z - _GOLDEN) & _MASK


def check_length(field: str, prompt_len: int, num_new: int, max_model_len: int) -> None:
    """Raise InvalidRequestError if prompt and new tokens together exceed `max_model_len`. `field`: the name of the
    field that holds the prompt.
    """
    if prompt_len + num_new > max_model_len:
        raise InvalidRequestError(
            f"length: prompt and max_tokens together exceed max_model_len = {max_model_len} tokens (got "
            f"{prompt_len} + {num_new}); shorten the prompt or lower max_tokens",
            field=field,
            value=prompt_len + num_new,
            limit=max_model_len,
        )


def seed_of(id: str, prompt: bytes) -> int:
    """Derive a 63-bit seed from the id and the prompt of a request without a seed.

    If the same request is sent again, to any worker, the worker draws the same samples.
    """
    digest = hashlib.blake2b(len(id).to_bytes(8, "little") + id.encode() + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
