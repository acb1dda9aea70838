"""Messages as bytes on the wire: a message is one frame, a MessagePack map with `version`, `type` and its fields.

Everything received passes through `from_client` or `from_worker`, so that nothing behind this module meets a field that
is missing, unknown, mistyped or out of its range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from trueroll.errors import ProtocolError, brief

from ...engine.request import from_validation
from ...weight_sync.payload.messages import MAX_ID_CHARS
from .messages import Done, FinishedSample, FromClient, FromWorker, Scores

PROTOCOL_VERSION = 1
MAX_DEPTH = 6
"""How deep maps and arrays of a message lie within each other. The deepest: message, bucket, pieces, piece, shape."""
MAX_ELEMENTS = 2**18
"""Of all the maps and arrays in a client's message together: enough for the pieces of a bucket."""
MAX_FIELDS = 32
"""Of a map in a client's message."""
_ID_WITHIN_BYTES = 1024
_NIL = b"\xc0"

_FROM_CLIENT: TypeAdapter[FromClient] = TypeAdapter(Annotated[FromClient, Field(discriminator="type")])
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="type")])


def message_types(union: Any) -> tuple[str, ...]:
    """The `type` of every message in `FromClient` or `FromWorker`."""
    return tuple(message.model_fields["type"].default for message in get_args(union))


_CLIENT_TYPES, _WORKER_TYPES = message_types(FromClient), message_types(FromWorker)


def encode(message: FromClient | FromWorker) -> bytes:
    """The frame that carries `message`."""
    return msgpack.Packer().pack({"version": PROTOCOL_VERSION, **message.model_dump()})


def encode_for_anyone(message: FinishedSample | Done | Scores) -> bytes:
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
    text = f"message: expected maps and arrays at most {MAX_DEPTH} deep, found deeper ones"
    raise ProtocolError(text, limit=MAX_DEPTH)


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
            f"version: expected {PROTOCOL_VERSION}, found {brief(version)}; use the same release on both sides",
            field="version",
            value=version,
            limit=PROTOCOL_VERSION,
        )
    if fields.get("type") not in types:
        found = fields.get("type")
        text = f"type: expected one of {', '.join(types)}, found {brief(found)}"
        raise ProtocolError(text, field="type", value=found)
    try:
        return union.validate_python({key: value for key, value in fields.items() if key != "version"})
    except ValidationError as error:
        raise from_validation(ProtocolError, error, first_part=1) from None  # the location begins with the type
