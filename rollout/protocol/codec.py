"""Encoding and decoding of messages, conversion of the engine's results to messages, and assembly of samples from
deltas.

A message is one frame: a MessagePack map with `version`, `type` and the fields of this type of message. Every received
frame is decoded by `from_client` or `from_worker`, which reject missing, unknown, mistyped and out-of-range fields. So
all modules except `codec` get only valid messages.

Arrays are raw little-endian bytes: int32 for tokens, float32 for log-probs, uint8 or uint16 for routed experts. Only
this module maps the columns of `engine.request` to message fields.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from trueroll.errors import InvalidRequestError, ProtocolError, TruerollError, brief

from ...engine.request import (
    COLUMNS,
    KEPT,
    LOGPROBS,
    TARGETS,
    TOKENS,
    TOPS,
    Column,
    Columns,
    SampleDelta,
    SampleOutput,
    ScoreOutput,
    WeightSpan,
    Widths,
    as_fields,
    columns_of,
    from_validation,
    plain,
)
from ...weight_sync.payload.messages import MAX_ID_CHARS
from .binaries import Binaries, without_binaries
from .error_codes import told
from .messages import (
    Delta,
    Done,
    Error,
    FinishedSample,
    FromClient,
    FromWorker,
    KeptArrays,
    RoutedExperts,
    Scores,
    Span,
    TargetArrays,
    TopArrays,
)

PROTOCOL_VERSION = 1
MAX_DEPTH = 6
"""Maximum nesting of maps and arrays in a message. The deepest nesting is message, bucket, pieces, piece, shape."""
MAX_ELEMENTS = 2**18
"""Maximum number of elements over all maps and arrays of a client's message: enough for the pieces of a bucket."""
MAX_FIELDS = 32
"""Maximum number of fields in one map of a client's message."""
_ID_WITHIN_BYTES = 1024
_NIL = b"\xc0"
_CONTAINERS = (tuple, dict)
_SHARED = ("sample", "scores")
"""The types of messages that may share the memory of their frame."""

_FROM_CLIENT: TypeAdapter[FromClient] = TypeAdapter(Annotated[FromClient, Field(discriminator="type")])
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="type")])


def message_types(union: Any) -> tuple[str, ...]:
    """Return the `type` of every message in the union `FromClient` or `FromWorker`."""
    return tuple(message.model_fields["type"].default for message in get_args(union))


_CLIENT_TYPES, _WORKER_TYPES = message_types(FromClient), message_types(FromWorker)


def encode(message: FromClient | FromWorker) -> bytes:
    """Return the frame of `message`."""
    return msgpack.Packer().pack({"version": PROTOCOL_VERSION, **message.model_dump()})


def encode_for_anyone(message: FinishedSample | Done | Scores) -> bytes:
    """Return the frame of a reply, except for the value of the last field, `caller`. The function `address` adds the
    value of `caller`.
    """
    return encode(message.model_copy(update={"caller": None}))[: -len(_NIL)]


def address(reply: bytes, caller: str | None) -> bytes:
    """Complete a frame from `encode_for_anyone` by adding the id of the caller."""
    return reply + msgpack.Packer().pack(caller)


def from_client(frame: bytes, max_elements: int = MAX_ELEMENTS) -> FromClient:
    """Decode a client's frame.

    Raise ProtocolError if the frame is invalid or exceeds a limit: `max_elements` elements in total, `MAX_FIELDS`
    fields in a map, or `MAX_DEPTH` nested levels. The limits keep the cost of decoding proportional to the size of the
    frame. Raise InvalidRequestError if sampling parameters are invalid.
    """
    return _check(_unpack(frame, max_elements, MAX_FIELDS), _FROM_CLIENT, _CLIENT_TYPES)


def from_worker(frame: bytes | memoryview) -> FromWorker:
    """Decode a worker's frame. Raise ProtocolError if the frame is invalid. The long arrays of a sample or of scores
    share the memory of the frame.
    """
    limits = 2 * len(frame), len(frame)
    fields = None
    if (binaries := without_binaries(memoryview(frame))) is not None:
        fields = _unpack(binaries.rest, *limits, binaries)
    if fields is None or fields.get("type") not in _SHARED:
        fields = _unpack(frame, *limits)
    return _check(fields, _FROM_WORKER, _WORKER_TYPES)


def _unpack(
    frame: bytes | memoryview, max_elements: int, max_fields: int, binaries: Binaries | None = None
) -> dict[str, Any]:
    """Return the fields of a frame, without checking them. `binaries`: the long binaries that extensions in the frame
    replace. Raise ProtocolError if the frame cannot be decoded or exceeds a limit.
    """
    count = _element_counter(max_elements)
    try:
        _check_completeness(frame, 0 if binaries is None else 1)
        fields = msgpack.unpackb(
            frame,
            use_list=False,
            strict_map_key=True,
            max_ext_len=0 if binaries is None else 1,
            ext_hook=msgpack.ExtType if binaries is None else binaries.find,
            max_array_len=max_elements,
            max_map_len=max_fields,
            list_hook=count,
            object_hook=lambda fields: _with_string_keys(count(fields)),
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"message: cannot decode the bytes as one MessagePack map ({error})") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"message: must be a MessagePack map (got {type(fields).__name__})")
    _check_depth(fields)
    return fields


def _check_completeness(frame: bytes | memoryview, max_ext_len: int) -> None:
    """Raise msgpack's error if the header of an array or map declares more elements than the frame contains. Call this
    function before unpacking, because unpacking allocates memory for the number of elements in the header.
    """
    unpacker = msgpack.Unpacker(use_list=False, max_ext_len=max_ext_len, max_buffer_size=len(frame) + 1)
    unpacker.feed(frame)
    unpacker.skip()


def _element_counter(limit: int) -> Callable[[Any], Any]:
    """Return a hook that msgpack calls for each decoded map and array. The hook raises ValueError once the total number
    of elements exceeds `limit`.

    Each map and each array counts as an element itself, in addition to its elements.
    """
    num_elements = 0

    def count(values: Any) -> Any:
        nonlocal num_elements
        num_elements += 1 + len(values)
        if num_elements > limit:
            raise ValueError(f"the message has more than {limit} elements in maps and arrays")
        return values

    return count


def _with_string_keys(fields: dict[Any, Any]) -> dict[str, Any]:
    """Return the fields. Raise ValueError if a key is not a string: MessagePack also allows bytes."""
    for key in fields:
        if not isinstance(key, str):
            raise ValueError(f"the key {brief(key)} is not a string")
    return fields


def _check_depth(fields: dict[str, Any]) -> None:
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        level = [value for values in level for value in _values(values) if isinstance(value, _CONTAINERS)]
        if not level:
            return
    text = f"message: maps and arrays are nested more than {MAX_DEPTH} deep"
    raise ProtocolError(text, limit=MAX_DEPTH)


def _values(values: tuple[Any, ...] | dict[str, Any]) -> Iterable[Any]:
    return values.values() if isinstance(values, dict) else values


def id_in(frame: bytes) -> str | None:
    """Return the id of an invalid message, so that the error reply can contain the id. Return None if the message has
    no valid id.

    To bound the cost, only the first `_ID_WITHIN_BYTES` bytes are searched.
    """
    unpacker = msgpack.Unpacker(use_list=False, max_ext_len=0)
    unpacker.feed(memoryview(frame)[:_ID_WITHIN_BYTES])
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                id = unpacker.unpack()
                return id if isinstance(id, str) and 1 <= len(id) <= MAX_ID_CHARS else None
            unpacker.skip()
    except Exception:  # the bytes contain no valid id
        return None
    return None


def _check(fields: dict[str, Any], union: TypeAdapter[Any], types: tuple[str, ...]) -> Any:
    version = fields.get("version")
    if version != PROTOCOL_VERSION or type(version) is not int:
        raise ProtocolError(
            f"version: must be {PROTOCOL_VERSION} (got {brief(version)}); use the same release of trueroll on both "
            "sides",
            field="version",
            value=version,
            limit=PROTOCOL_VERSION,
        )
    if fields.get("type") not in types:
        found = fields.get("type")
        text = f"type: must be one of {', '.join(types)} (got {brief(found)})"
        raise ProtocolError(text, field="type", value=found)
    try:
        return union.validate_python({key: value for key, value in fields.items() if key != "version"})
    except ValidationError as error:
        raise from_validation(
            ProtocolError, error, first_part=1
        ) from None  # the error's location starts with the message type


_TOP_FIELDS = {"entropy": "entropy", "top_token_ids": "token_ids", "top_logprobs": "logprobs"}
_KEPT_FIELDS = {"kept_counts": "counts", "kept_log_mass": "log_mass", "kept_token_ids": "token_ids"}
_ID_BYTES = 4

Carrier: TypeAlias = FinishedSample | Delta | Scores


def bytes_within(message: Carrier) -> dict[Column, bytes]:
    """Return the columns of a message as bytes."""
    found = {} if message.logprobs is None else {LOGPROBS: message.logprobs}
    if message.tops is not None:
        found |= {column: getattr(message.tops, _TOP_FIELDS[column.name]) for column in TOPS}
    if message.targets is not None:
        found[TARGETS] = message.targets.logprobs
    if message.kept is not None:
        found |= {column: getattr(message.kept, _KEPT_FIELDS[column.name]) for column in KEPT}
    return found


def widths_of(message: Carrier) -> Widths:
    """Return the number of top tokens and of target tokens that a message lists at each position."""
    tops, targets = message.tops, message.targets
    return Widths(0 if tops is None else tops.k, 0 if targets is None else targets.k)


def fields_of(content: Mapping[Column, bytes], widths: Widths) -> dict[str, Any]:
    """Convert columns to message fields. `content`: each column as bytes."""
    tops = {_TOP_FIELDS[column.name]: content[column] for column in TOPS if column in content}
    kept = {_KEPT_FIELDS[column.name]: content[column] for column in KEPT if column in content}
    return {
        "logprobs": content.get(LOGPROBS),
        "tops": TopArrays(k=widths.tops, **tops) if tops else None,
        "targets": TargetArrays(k=widths.targets, logprobs=content[TARGETS]) if TARGETS in content else None,
        "kept": KeptArrays(**kept) if kept else None,
    }


def columns_within(message: Carrier, read_only: bool = False) -> Columns:
    """Return the columns of a message as arrays: read-only arrays that share the memory of the message, or writable
    copies.
    """
    found, widths = bytes_within(message), widths_of(message)
    rows = next((len(content) // column.num_bytes(widths) for column, content in found.items()), 0)
    shared = {column.name: column.array(content, rows, widths) for column, content in found.items()}
    return shared if read_only else {name: values.copy() for name, values in shared.items()}


def fields_for(columns: Columns) -> dict[str, Any]:
    """Convert columns to message fields."""
    content = {
        column: columns[column.name].astype(column.dtype).tobytes() for column in COLUMNS if column.name in columns
    }
    widths = {column.listed: columns[column.name].shape[1] for column in content if column.listed}
    return fields_of(content, Widths(**widths))


_BOOLEANS = frozenset((bool, np.bool_))


def tokens_to_bytes(token_ids: Sequence[int] | np.ndarray, field: str) -> bytes:
    """Return token ids as the protocol's int32 array.

    Python and numpy integers are accepted. For all other values, raise InvalidRequestError, which names `field`.
    Booleans are also refused, because numpy would convert them to 0 and 1.
    """
    if isinstance(token_ids, list | tuple) and not (kinds := {*map(type, token_ids)}) <= {int}:
        if not _BOOLEANS.isdisjoint(kinds):
            text = f"{field}: booleans are not token ids ({brief(token_ids)}); give integers"
            raise InvalidRequestError(text, field=field, value=token_ids)
        token_ids = [plain(token) for token in token_ids]
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # numpy raises ValueError for sequences of different lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        text = f"{field}: must be a flat sequence of token ids (got {brief(token_ids)})"
        raise InvalidRequestError(text, field=field, value=token_ids)
    if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
        text = f"{field}: token ids must fit in 32 bits (got ids from {tokens.min()} to {tokens.max()})"
        raise InvalidRequestError(text, field=field, value=int(max(tokens, key=abs)), limit=2**31 - 1)
    return tokens.astype("<i4").tobytes()


def bytes_to_tokens(data: bytes) -> np.ndarray:
    """Decode the protocol's array of token ids. Return a writable array, int32 [num_tokens]."""
    return np.frombuffer(data, "<i4").astype(np.int32)


def sample_message(id: str, output: SampleOutput) -> FinishedSample:
    """Return the message for a finished sample of request `id`."""
    return FinishedSample(
        id=id,
        index=output.index,
        token_ids=np.array(output.token_ids, "<i4").tobytes(),
        finish_reason=output.finish_reason,
        seed=output.seed,
        num_cached_tokens=output.num_cached_tokens,
        weight_versions=_spans(output.weight_versions),
        error=output.error,
        stop_reason=output.stop_reason,
        num_drafted_tokens=output.num_drafted_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
        old_kv=_spans(output.old_kv),
        routed_experts=_routed(output),
        **fields_for(columns_of(output)),
    )


def delta_message(id: str, delta: SampleDelta) -> Delta:
    """Return a `Delta` with the new tokens of a sample of request `id`."""
    return Delta(
        id=id,
        index=delta.index,
        start=delta.start,
        token_ids=np.array(delta.token_ids, "<i4").tobytes(),
        **fields_for(columns_of(delta)),
    )


def scores_message(id: str, output: ScoreOutput) -> Scores:
    """Return the message for the finished scoring request `id`."""
    return Scores(
        id=id,
        finish_reason=output.finish_reason,
        weight_versions=_spans(output.weight_versions),
        routed_experts=_routed(output),
        **fields_for(columns_of(output)),
    )


def error_message(id: str | None, error: TruerollError, caller: str | None = None) -> Error:
    """Return the error reply to message `id`."""
    return Error(id=id, caller=caller, **told(error))


def sample_output(message: FinishedSample, read_only: bool = False) -> SampleOutput:
    """Convert a message to a `SampleOutput` of the engine. `read_only`: as in `columns_within`."""
    return SampleOutput(
        request_id=message.id,
        index=message.index,
        token_ids=bytes_to_tokens(message.token_ids).tolist(),
        finish_reason=message.finish_reason,
        seed=message.seed,
        num_cached_tokens=message.num_cached_tokens,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        error=message.error,
        stop_reason=message.stop_reason,
        num_drafted_tokens=message.num_drafted_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        old_kv=tuple(WeightSpan(*span) for span in message.old_kv),
        routed_experts=_routed_array(message.routed_experts, read_only),
        **as_fields(columns_within(message, read_only)),
    )


def sample_delta(message: Delta) -> SampleDelta:
    """Convert a message to a `SampleDelta` of the engine, with writable arrays."""
    return SampleDelta(
        request_id=message.id,
        index=message.index,
        start=message.start,
        token_ids=bytes_to_tokens(message.token_ids).tolist(),
        **as_fields(columns_within(message)),
    )


def score_output(message: Scores, read_only: bool = False) -> ScoreOutput:
    """Convert a message to a `ScoreOutput` of the engine. `read_only`: as in `columns_within`."""
    return ScoreOutput(
        request_id=message.id,
        finish_reason=message.finish_reason,
        weight_versions=tuple(WeightSpan(*span) for span in message.weight_versions),
        routed_experts=_routed_array(message.routed_experts, read_only),
        **as_fields(columns_within(message, read_only)),
    )


def _routed_array(routed: RoutedExperts | None, read_only: bool) -> np.ndarray | None:
    """Convert a message's field `routed_experts` to the engine's format. `read_only`: as in `columns_within`."""
    if routed is None:
        return None
    elements = np.frombuffer(routed.data, np.dtype(routed.dtype).newbyteorder("<"))
    return elements.astype(routed.dtype, copy=not read_only).reshape(routed.shape)


def _routed(output: SampleOutput | ScoreOutput) -> RoutedExperts | None:
    if (routed := output.routed_experts) is None:
        return None
    tokens, layers, top_k = routed.shape
    data = routed.astype(routed.dtype.newbyteorder("<")).tobytes()
    dtype = "uint8" if routed.dtype == np.uint8 else "uint16"
    return RoutedExperts(dtype=dtype, shape=(tokens, layers, top_k), data=data)


def _spans(versions: tuple[WeightSpan, ...]) -> tuple[Span, ...]:
    return tuple((span.version, span.start, span.end) for span in versions)


class Growth:
    """The tokens of a sample so far, assembled from deltas.

    `first`: a delta that starts with token 0. The id and index of the sample are also taken from `first`.
    """

    def __init__(self, first: Delta) -> None:
        self.id, self.index = first.id, first.index
        self._listed = widths_of(first)
        self._columns = {column: bytearray(content) for column, content in _columns(first).items()}
        self._ids_before = array("q", [0])
        self._count_ids()

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self._columns[TOKENS]) // 4

    def put(self, delta: Delta) -> bool:
        """Append the new tokens of a delta, and return True.

        Change nothing and return False in three cases: a token of the delta is already known with other values, the
        delta has other columns than the known tokens, or the delta would leave a gap after the known tokens.
        """
        found = _columns(delta)
        if delta.start > self.num_tokens or found.keys() != self._columns.keys() or widths_of(delta) != self._listed:
            return False
        known, starts = self._columns, self._sizes(delta.start)
        if not all(_agree(known[column], new, starts[column]) for column, new in found.items()):
            return False
        for column, new in found.items():
            known[column] += new[len(known[column]) - starts[column] :]
        self._count_ids()
        return True

    def part(self, start: int, max_bytes: int | None = None) -> Delta:
        """Return a delta that begins with token `start`. The delta has as many tokens as fit into `max_bytes`, but at
        least one.
        """
        end = self.num_tokens if max_bytes is None else self._end(start, max_bytes)
        firsts, ends = self._sizes(start), self._sizes(end)
        content = {column: bytes(known[firsts[column] : ends[column]]) for column, known in self._columns.items()}
        token_ids = content.pop(TOKENS)
        return Delta(id=self.id, index=self.index, start=start, token_ids=token_ids, **fields_of(content, self._listed))

    def _end(self, start: int, max_bytes: int) -> int:
        """Return the largest `end` for which tokens [start, end) fit into `max_bytes`, but at least `start + 1`."""
        most = sum(self._sizes(start).values()) + max_bytes
        ends = range(start + 2, self.num_tokens + 1)
        return start + 1 + bisect_right(ends, most, key=lambda end: sum(self._sizes(end).values()))

    def _sizes(self, num_tokens: int) -> dict[Column, int]:
        """Return the number of bytes in each column for the first `num_tokens` tokens."""
        of_ids = _ID_BYTES * self._ids_before[min(num_tokens, len(self._ids_before) - 1)]
        sizes = (
            (column, of_ids if column.counts else column.num_bytes(self._listed) * num_tokens)
            for column in self._columns
        )
        return dict(sizes)

    def _count_ids(self) -> None:
        """Extend `_ids_before`, which has the number of kept ids before each token, to all known tokens. No-op if the
        deltas list no kept ids.
        """
        known = _ID_BYTES * (len(self._ids_before) - 1)
        counts = np.frombuffer(bytes(self._columns.get(KEPT[0], b"")[known:]), "<i4")
        self._ids_before.frombytes((self._ids_before[-1] + counts.cumsum(dtype=np.int64)).tobytes())


def delta_of(sample: FinishedSample) -> Delta:
    """Return a whole finished sample as one delta."""
    return Delta(
        id=sample.id,
        index=sample.index,
        start=0,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        tops=sample.tops,
        targets=sample.targets,
        kept=sample.kept,
    )


def _columns(delta: Delta) -> dict[Column, bytes]:
    """Return all columns of a delta, including the tokens, as bytes."""
    return {TOKENS: delta.token_ids, **bytes_within(delta)}


def _agree(known: bytearray, new: bytes, start: int) -> bool:
    """Return whether `new`, placed at byte `start` of `known`, has the same bytes as `known` where the two overlap."""
    count = min(len(known) - start, len(new))
    return known[start : start + count] == new[:count]
