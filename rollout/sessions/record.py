"""Records of sessions: files from which every request of a session can be sent again.

A record has one JSON value in each line. The first line describes the session. Each other line is a request and its
answer: the earlier answer that the prompt continues (the parent), the new tokens of the prompt, all sampling parameters
with the seed, and everything that the worker returned. A line has only the prompt tokens after the tokens of the
parent, so the size of a record is proportional to the number of tokens in the session, not to the total length of all
prompts.

Owns: the format, and the bounds on a record. A record contains no texts of messages. A record also omits `cache_salt`,
because a cache salt changes no bit of a sample. Promises: `read_record` can read every record that `write_record`
returns. The bytes, elements and nesting of a line are bounded before the line is parsed, and the elements of the whole
record are bounded, too.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trueroll.errors import IllegalStateError, InvalidRequestError, brief

from ...engine.request import (
    COLUMNS,
    Columns,
    SampleOutput,
    SamplingParams,
    TokenId,
    WeightSpan,
    as_fields,
    columns_of,
    derive_seed,
    empty_columns,
    from_validation,
)
from ...weight_sync.payload.manifest import AdapterName
from .export import told_array
from .forest import Drawn, Forest, Node, drawn_of

B = TypeVar("B", bound=BaseModel)
FORMAT, FORMAT_VERSION = "trueroll session record", 1
MAX_RECORD_BYTES = 2**30
MAX_LINE_BYTES = 2**29
MAX_REQUESTS = 2**16
MAX_ELEMENTS = 2**22
"""Maximum number of elements of lists and objects in a line."""
MAX_RECORD_ELEMENTS = 2**26
"""Maximum number of elements in all lines together. A parsed element may use ten times the memory of its text."""
MAX_DEPTH = 8
MAX_PROMPT_TOKENS = 2**24

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # runs in linear time, even without a closing quote
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_LEFT_OUT = {"cache_salt", "seed"}
_COUNTED = {column.name for column in COLUMNS if column.counts}
_SPAN_ELEMENTS = 5
"""Number of elements of a span of weight versions: three numbers and two brackets."""
_OTHER_ELEMENTS = 2**10
"""Upper bound on the elements of a line without its tokens, its spans, and the long lists of its parameters."""


@dataclass(frozen=True, eq=False)
class RecordedRequest:
    """A request of a session, and the sample that the worker returned.

    - `node`: id of the answer in the session. `parent`: the request of the answer that the prompt continues, or None.
    - `drops_last`: whether the prompt lacks the last token of the parent's answer
    - `new_token_ids`: the prompt's tokens after the tokens of the parent
    - `params`: the sampling parameters, including the seed
    - `sample`: the worker's sample. The sample's `routed_experts` begin with the row of token `routes_start`, because
      the parent has the earlier rows
    - `kept_len`: the number of prompt tokens before `new_token_ids`
    - `adapter`: the named adapter that drew the sample; None for the base weights
    """

    node: str
    parent: RecordedRequest | None
    drops_last: bool
    new_token_ids: list[int]
    params: SamplingParams
    sample: SampleOutput
    kept_len: int
    adapter: str | None = None

    @property
    def prompt_len(self) -> int:
        """The number of tokens of the prompt."""
        return self.kept_len + len(self.new_token_ids)

    @property
    def routes_start(self) -> int:
        """The index of the token to which the first row of `routed_experts` belongs."""
        return max(0, self.kept_len - 1)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The versions of the weights that drew the sample, in order."""
        return tuple(span.version for span in self.sample.weight_versions)

    def prompt_token_ids(self) -> list[int]:
        """Return the tokens of the prompt."""
        path: list[RecordedRequest] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        token_ids: list[int] = []
        for request in reversed(path):
            if request.drops_last:
                token_ids.pop()
            token_ids += request.new_token_ids
            if request is not self:
                token_ids += request.sample.token_ids
        return token_ids


@dataclass(frozen=True)
class Record:
    """A session. `model`: the name of the session's model. `seed`: the seed of the session. `requests`: the requests,
    in the order in which their answers were added to the session.
    """

    model: str
    seed: int
    requests: list[RecordedRequest]


def write_record(forest: Forest, model: str, seed: int) -> bytes:
    """Return the record of a session. Raise IllegalStateError if the record exceeds a bound."""
    nodes = forest.drawn_nodes()
    _check_sizes(nodes)
    file = io.BytesIO()
    file.write(_encoded(dict(format=FORMAT, version=FORMAT_VERSION, model=model, seed=seed)))
    for node in nodes:
        file.write(_encoded(_told(node, forest)))
        if file.tell() > MAX_RECORD_BYTES:
            raise _too_large(file.tell(), "bytes or more", MAX_RECORD_BYTES)
    return file.getvalue()


def read_record(file: BinaryIO) -> Record:
    """Return the record in a file. Raise InvalidRequestError, which names the line, if the file is not a record or
    exceeds a bound.
    """
    lines = _lines(file)
    model, seed = _read_first(next(lines, None))
    requests: dict[str, RecordedRequest] = {}
    for number, told in enumerate(lines, 2):
        if len(requests) == MAX_REQUESTS:
            raise _bad(number, f"too many requests (limit {MAX_REQUESTS}); replay a shorter record")
        request = _read_request(number, told, requests)
        if request.node in requests:
            raise _bad(number, f"the node {brief(request.node)} occurs twice")
        requests[request.node] = request
    return Record(model, seed, list(requests.values()))


def _check_sizes(nodes: Sequence[Node]) -> None:
    """Raise IllegalStateError if there are too many requests, if a request has too many tokens or elements, or if all
    requests together have too many elements.
    """
    if len(nodes) > MAX_REQUESTS:
        raise _too_large(len(nodes), "requests", MAX_REQUESTS)
    drawn = [drawn_of(node) for node in nodes]
    if (longest := max((each.prompt_len for each in drawn), default=0)) > MAX_PROMPT_TOKENS:
        raise _too_large(longest, "tokens in one prompt", MAX_PROMPT_TOKENS)
    elements = [_num_elements(each) for each in drawn]
    if (most := max(elements, default=0)) > MAX_ELEMENTS:
        raise _too_large(most, "elements in one answer", MAX_ELEMENTS)
    if (total := sum(elements)) > MAX_RECORD_ELEMENTS:
        raise _too_large(total, "elements", MAX_RECORD_ELEMENTS)


def _num_elements(drawn: Drawn) -> int:
    """Return an upper bound on the elements of a line."""
    num_tokens = len(drawn.opening.token_ids) + len(drawn.sample.token_ids)
    grammar = drawn.params.structured_outputs
    lists = drawn.params.model_copy(update=dict(structured_outputs=None)).num_numbers
    lists += len(drawn.params.target_token_ids) + (0 if grammar is None else len(grammar.choice))
    return num_tokens + lists + _SPAN_ELEMENTS * len(drawn.sample.weight_versions) + _OTHER_ELEMENTS


def _told(node: Node, forest: Forest) -> dict[str, Any]:
    drawn = drawn_of(node)
    params = drawn.params.model_dump(exclude=_LEFT_OUT) | dict(seed=forest.seed_of(node))
    parent = next((each for each in reversed(node.path[:-1]) if each.drawn is not None), None)
    sample = drawn.sample
    told = dict(
        node=node.id,
        parent=parent and parent.id,
        drops_last=drawn.opening.dropped,
        new_token_ids=list(drawn.opening.token_ids),
        params=params,
        token_ids=sample.token_ids,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        weight_versions=_told_spans(sample.weight_versions),
        old_kv=_told_spans(sample.old_kv),
        columns={name: told_array(values) for name, values in columns_of(sample).items()},
        routed_experts=None if sample.routed_experts is None else told_array(sample.routed_experts),
    )
    return told if drawn.adapter is None else told | dict(adapter=drawn.adapter)


def _told_spans(spans: Iterable[WeightSpan]) -> list[list[int]]:
    return [[span.version, span.start, span.end] for span in spans]


def _encoded(line: dict[str, Any]) -> bytes:
    encoded = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(encoded) > MAX_LINE_BYTES:
        raise _too_large(len(encoded), "bytes in one answer", MAX_LINE_BYTES)
    return encoded


def _too_large(found: int, what: str, limit: int) -> IllegalStateError:
    text = f"session: its record would have {found} {what} (limit {limit}); record shorter sessions"
    return IllegalStateError(text, value=found, limit=limit)


def _lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in each line."""
    num_bytes = num_elements = 0
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        num_bytes += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise _bad(number, f"too many bytes (limit {MAX_LINE_BYTES}); replay a record of a shorter session")
        if num_bytes > MAX_RECORD_BYTES:
            raise _bad(number, f"the file has too many bytes (limit {MAX_RECORD_BYTES}); replay a shorter record")
        num_elements += _checked_elements(number, line)
        if num_elements > MAX_RECORD_ELEMENTS:
            raise _bad(number, f"the file has too many elements (limit {MAX_RECORD_ELEMENTS}); replay a shorter record")
        yield _parse(number, line)


def _bad(number: int, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"record: line {number}: {text}", field="record", value=number)


def _checked_elements(number: int, line: bytes) -> int:
    """Return the number of elements in a line. Raise InvalidRequestError if there are too many elements, or if the
    elements are nested too deeply.
    """
    bare = _STRING.sub(b"", line)
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    num_elements = bare.count(b",") + bare.count(b":") + len(brackets)
    if num_elements > MAX_ELEMENTS:
        raise _bad(number, f"too many elements (limit {MAX_ELEMENTS}); replay a record of shorter prompts")
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    if steps.cumsum().max(initial=0) > MAX_DEPTH:
        raise _bad(number, f"lists and objects are nested more than {MAX_DEPTH} deep; give a file that trueroll wrote")
    return num_elements


def _parse(number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode())
    except ValueError as error:
        raise _bad(number, f"not valid JSON in UTF-8 ({error!s:.200}); give a file that trueroll wrote") from None
    if not isinstance(found, dict):
        raise _bad(number, f"must be a JSON object (got {brief(found)}); give a file that trueroll wrote")
    return found


def _read_first(told: dict[str, Any] | None) -> tuple[str, int]:
    if told is None:
        raise _bad(1, "missing, because the file is empty; give a file that trueroll wrote")
    if told.get("format") != FORMAT:
        raise _bad(1, f"format: must be {FORMAT!r} (got {brief(told.get('format'))}); give a file that trueroll wrote")
    if told.get("version") != FORMAT_VERSION:
        found = brief(told.get("version"))
        raise _bad(1, f"version: must be {FORMAT_VERSION} (got {found}); use the release of trueroll that wrote it")
    first = _checked(1, _First, told)
    return first.model, first.seed


def _read_request(number: int, told: dict[str, Any], earlier: dict[str, RecordedRequest]) -> RecordedRequest:
    line = _checked(number, _Line, told)
    parent = None if line.parent is None else earlier.get(line.parent)
    if parent is None and (line.parent is not None or line.drops_last):
        raise _bad(number, f"parent: {brief(line.parent)} is not the node of an earlier line")
    kept_len = 0 if parent is None else parent.prompt_len + len(parent.sample.token_ids) - line.drops_last
    if not 1 <= kept_len + len(line.new_token_ids) <= MAX_PROMPT_TOKENS:
        found = kept_len + len(line.new_token_ids)
        raise _bad(number, f"new_token_ids: the prompt must have 1 to {MAX_PROMPT_TOKENS} tokens (got {found})")
    params = _params(number, line.params)
    sample = _sample(number, line, params)
    whence = line.node, parent, line.drops_last
    request = RecordedRequest(*whence, line.new_token_ids, params, sample, kept_len, line.adapter)
    _check_routes(number, request)
    return request


def _params(number: int, told: dict[str, Any]) -> SamplingParams:
    try:
        params = SamplingParams(**_with_one_unknown(told, SamplingParams))
    except InvalidRequestError as error:
        raise _bad(number, f"params: {error}") from None
    if params.n != 1 or params.seed is None:
        raise _bad(number, f"params: n must be 1, and seed must be given (got {params.n} and {params.seed})")
    return params


def _sample(number: int, line: _Line, params: SamplingParams) -> SampleOutput:
    assert params.seed is not None
    spans = tuple(WeightSpan(*span) for span in line.weight_versions)
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(line.token_ids) or ends != sorted({*ends}):
        raise _bad(number, f"weight_versions: must cover the {len(line.token_ids)} tokens in order")
    old_kv = tuple(WeightSpan(*span) for span in line.old_kv)
    if any(not 0 <= span.start < span.end <= len(line.token_ids) for span in old_kv):
        raise _bad(number, f"old_kv: must name some of the {len(line.token_ids)} tokens")
    routes = line.routed_experts
    return SampleOutput(
        request_id=line.node,
        index=0,
        token_ids=line.token_ids,
        finish_reason=line.finish_reason,
        seed=derive_seed(params.seed, 0),
        num_cached_tokens=0,
        weight_versions=spans,
        old_kv=old_kv,
        stop_reason=line.stop_reason,
        routed_experts=None if routes is None else _array(number, "routed_experts", routes),
        **as_fields(_columns(number, line, params)),
    )


def _columns(number: int, line: _Line, params: SamplingParams) -> Columns:
    """Return the columns of a line: the columns that the line's parameters request, with one row for each token."""
    asked = empty_columns(params)
    if asked.keys() != line.columns.keys():
        raise _bad(number, f"columns: must be {sorted(asked)} (got {brief(sorted(line.columns))})")
    columns = {name: _array(number, name, told) for name, told in line.columns.items()}
    for name, values in columns.items():
        if values.dtype != asked[name].dtype or values.shape[1:] != asked[name].shape[1:]:
            found, wanted = asked[name].shape[1:], asked[name].dtype
            raise _bad(number, f"{name}: must be {wanted} with rows {found} (got {values.dtype}, {values.shape})")
        if name not in _COUNTED and len(values) != len(line.token_ids):
            raise _bad(number, f"{name}: must have {len(line.token_ids)} rows, one for each token (got {len(values)})")
    return columns


def _check_routes(number: int, request: RecordedRequest) -> None:
    routes = request.sample.routed_experts
    if routes is None:
        return
    rows = request.prompt_len + len(request.sample.token_ids) - 1 - request.routes_start
    if not request.params.return_routed_experts or routes.ndim != 3 or len(routes) != rows:
        shape = routes.shape
        raise _bad(number, f"routed_experts: must be null, or [{rows}, layers, experts] if requested (got {shape})")


def _array(number: int, name: str, told: Any) -> np.ndarray:
    if not isinstance(told, dict):
        raise _bad(number, f"{name}: must be an object (got {brief(told)})")
    array = _checked(number, _Array, told, f"{name}: ")
    dtype = np.dtype(array.dtype).newbyteorder("<")
    try:
        content = base64.b64decode(array.data, validate=True)
    except ValueError as error:
        raise _bad(number, f"{name}: data is not base64 ({error})") from None
    is_small = max(array.shape) <= MAX_LINE_BYTES  # numpy refuses a shape that is too large, even for an empty array
    if len(content) != math.prod(array.shape) * dtype.itemsize or not is_small:
        raise _bad(number, f"{name}: {len(content)} bytes are not {array.dtype} values of shape {brief(array.shape)}")
    return np.frombuffer(content, dtype).reshape(array.shape).astype(array.dtype)


def _checked(number: int, kind: type[B], told: dict[str, Any], place: str = "") -> B:
    try:
        return kind(**_with_one_unknown(told, kind))
    except ValidationError as error:
        raise _bad(number, f"{place}{from_validation(InvalidRequestError, error)}") from None


def _with_one_unknown(told: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the known fields and only the first unknown field, because pydantic would report every unknown field."""
    known = {name: value for name, value in told.items() if name in kind.model_fields}
    unknown = next((name for name in told if name not in known), None)
    return known if unknown is None else known | {unknown: told[unknown]}


Name = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Span = Annotated[list[Count], Field(min_length=3, max_length=3, fail_fast=True)]


class _Array(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    data: str
    dtype: Literal["float32", "int32", "uint8", "uint16"]
    shape: Annotated[list[Count], Field(min_length=1, max_length=3)]


class _First(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    version: int
    model: str
    seed: Annotated[int, Field(ge=0, lt=2**64)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    node: Name
    parent: Name | None
    drops_last: bool
    new_token_ids: Tokens
    params: dict[str, Any]
    token_ids: Annotated[Tokens, Field(min_length=1)]
    finish_reason: Literal["stop", "length"]
    stop_reason: Annotated[int, Field(ge=0, lt=2**31)] | str | None
    weight_versions: Annotated[list[Span], Field(min_length=1, fail_fast=True)]
    old_kv: Annotated[list[Span], Field(fail_fast=True)]
    columns: dict[str, Any]
    routed_experts: Any
    adapter: AdapterName | None = None
