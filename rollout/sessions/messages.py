"""Messages of a conversation, in the form in which chat templates read them, and their comparison.

Owns: the comparison of messages. A message consists of `role`, `content`, `reasoning_content`, `tool_calls` and all
other fields that are neither empty nor added by servers and client libraries. Absent fields, None, "", [] and {} are
equal. The arguments of a tool call are compared as parsed JSON, in which 1.0 and 1 are equal. A received message may
lack reasoning or the ids of tool calls, because many agents drop them. Reasoning and ids that a received message
contains must equal the reasoning and ids of the stored message.

Does not own: how a message is rendered. Promises: no conversation exceeds the bounds of this module. The values in the
JSON texts of arguments count towards the bounds. Each message consists only of JSON values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trueroll.errors import InvalidRequestError, brief

from ..parsing.answers import MAX_DEPTH as MAX_CALL_DEPTH
from ..parsing.answers import MAX_INTEGER_BITS

MAX_MESSAGES = 4096
"""Maximum number of messages in a conversation."""
MAX_CHARS = 2**22
"""Maximum number of characters in a conversation, with the tools. A number counts as `NUMBER_CHARS` characters, a large
integer as its digits.
"""
MAX_VALUES = 2**16
"""Maximum number of JSON values in a conversation."""
MAX_DEPTH = MAX_CALL_DEPTH + 6
"""Maximum depth of nested lists and objects in a conversation. The arguments of a call are at depth 6."""
NUMBER_CHARS = 24

SMALL_CHARS, SMALL_VALUES = 2**15, 2**12
"""A conversation with more characters or values is not small."""

NODE_FIELD = "session_node"
"""The field of a session's answer that contains the id of the answer's node. The id distinguishes equal answers of a
session.
"""
_EMPTY = (None, "", [], {})
_WIRE = {
    *("annotations", "audio", "index", "logprobs", "parsed", "provider_specific_fields", "refusal"),
    *("cache_control", "id", "reasoning_details", "thinking_blocks"),
    *("generation_log_probs", "generation_token_ids", "prompt_token_ids", "token_ids"),
    NODE_FIELD,
}
"""Fields that servers and client libraries add to an assistant message, and that no template reads."""


@dataclass(frozen=True, eq=False)
class Message:
    """A message. `fields`: the fields for the template. Empty fields are left out, but `role` and `content` are always
    present. The arguments of tool calls are objects. `node`: the id of the session's answer that the message claims to
    be; None if the message makes no such claim.
    """

    fields: dict[str, Any]
    node: str | None = None

    @property
    def role(self) -> str:
        """The role, such as `user`."""
        return self.fields["role"]

    @property
    def reasoning(self) -> str:
        """The reasoning; empty if there is none."""
        return self.fields.get("reasoning_content", "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, each with `function` and optionally `id` and `type`."""
        return self.fields.get("tool_calls", [])

    @cached_property
    def key(self) -> str:
        """The text of all fields except reasoning and the ids of tool calls. Equal messages have equal keys."""
        told = {name: value for name, value in self.fields.items() if name != "reasoning_content"}
        if self.calls:
            calls = [{k: v for k, v in call.items() if k != "id"} for call in self.calls]
            told["tool_calls"] = _with_equal_numbers(calls)
        return as_key(told)

    @cached_property
    def spelling(self) -> str:
        """The text of all fields in their order. Templates render two messages with the same spelling identically."""
        return json.dumps(self.fields, ensure_ascii=False)

    def is_(self, stored: Message) -> bool:
        """Return whether this received message equals a stored message. Absent reasoning and absent ids match any
        reasoning and any ids.
        """
        return (
            self.key == stored.key
            and self.reasoning in ("", stored.reasoning)
            and all(
                own.get("id") in (None, other.get("id")) for own, other in zip(self.calls, stored.calls, strict=True)
            )
        )

    @property
    def num_chars(self) -> int:
        """The approximate size in characters."""
        return len(self.spelling)


def as_key(value: Any) -> str:
    """Return a text that is the same for equal JSON values. The order of an object's fields does not matter."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _with_equal_numbers(value: Any) -> Any:
    """Return a JSON value in which each float that equals an integer is replaced by the integer. Equal numbers then
    have equal texts. JavaScript, for example, writes 1.0 as 1.
    """
    if isinstance(value, dict):
        return {name: _with_equal_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_equal_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_messages(messages: Any, tools: Any = ()) -> list[Message]:
    """Return the messages of a conversation. Raise InvalidRequestError if a message is malformed or exceeds a bound.

    `messages`: a list of objects in OpenAI's form. `tools`: the tools of the conversation, which count towards the
    bounds.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _invalid("messages", f"must be a list with at least one message (got {brief(messages)})")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("messages", f"{len(messages)} messages are too many (limit {MAX_MESSAGES}); shorten the history")
    bounds = _Bounds()
    bounds.count(list(tools), 1)
    return [_read(f"messages[{i}]", message, bounds) for i, message in enumerate(messages)]


def drawn_message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    """Return the message of an answer. The bounds on the characters and values of a conversation do not apply, because
    the tokens of the answer bound both.
    """
    fields = dict(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls)
    return _read("answer", fields, _Bounds(has_size=False))


def is_small(value: Any) -> bool:
    """Return whether a value is so small that reading the value takes a few milliseconds at most."""
    chars = count = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            chars += len(each)
        elif isinstance(each, int):
            chars += each.bit_length() // 3
        elif isinstance(each, dict | list | tuple):
            count += len(each)
            if count > SMALL_VALUES:
                return False
            waiting += [*each, *each.values()] if isinstance(each, dict) else each
    return chars <= SMALL_CHARS


def _read(where: str, given: Any, bounds: _Bounds) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or not given["role"]:
        raise _invalid(where, f"must be an object with a role (got {brief(given)})")
    wire = _WIRE if given["role"] == "assistant" else ()
    fields = {name: value for name, value in given.items() if name not in wire}
    bounds.count(fields, 2)
    fields = {name: value for name, value in fields.items() if value not in _EMPTY}
    if "reasoning" in fields:
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    if not isinstance(fields.get("reasoning_content", ""), str):
        raise _invalid(where, f"reasoning_content must be a string (got {brief(fields['reasoning_content'])})")
    if "function_call" in fields:  # an older field, which tool_calls has replaced
        raise _invalid(where, "function_call is not supported; use tool_calls")
    fields["content"] = _text(where, fields.get("content", ""))
    if "tool_calls" in fields:
        fields["tool_calls"] = [_call(where, call, bounds) for call in _listed(where, fields["tool_calls"])]
    node = given.get(NODE_FIELD) if wire else None
    return Message(deepcopy(fields), node if isinstance(node, str) else None)


def _text(where: str, content: Any) -> str:
    """Return the content of a message as one text. The texts of several parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _invalid(where, f"content must be a text or parts of type text (got {brief(part)}); send text only")
        texts.append(part["text"])
    return "\n".join(texts)


def _listed(where: str, calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise _invalid(where, f"tool_calls must be a list (got {brief(calls)})")
    return calls


def _call(where: str, call: Any, bounds: _Bounds) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        if isinstance(arguments, str) and arguments:
            arguments = json.loads(arguments, parse_constant=_no_constant)
            bounds.count(arguments, 6)
        arguments = {} if arguments in (None, "") else arguments
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            raise TypeError
        if not isinstance(call.get("id") or "", str) or (call.get("type") or "function") != "function":
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = f"tool_calls: {brief(call)} is not a function call with JSON arguments; correct the call"
        raise _invalid(where, text) from None
    told: dict[str, Any] = {"id": call["id"]} if call.get("id") else {}
    return told | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Bounds:
    """Counts the characters and values of one conversation. `has_size`: whether the numbers of characters and values
    are bounded.
    """

    def __init__(self, has_size: bool = True) -> None:
        self._chars = self._values = 0
        self._most_chars, self._most_values = (MAX_CHARS, MAX_VALUES) if has_size else (sys.maxsize, sys.maxsize)

    def count(self, value: Any, depth: int) -> None:
        """Count a value and all values in it, including the names of fields. Raise InvalidRequestError if the value is
        not a JSON value, or if the conversation exceeds a bound. `depth`: the number of lists and objects around the
        value.
        """
        waiting = [(value, depth)]
        self._add(0, 1, depth)
        while waiting:
            each, depth = waiting.pop()
            if isinstance(each, dict):
                self._add(1, 2 * len(each), depth)
                if not all(isinstance(name, str) for name in each):
                    name = next(name for name in each if not isinstance(name, str))
                    raise _invalid("messages", f"an object has the name {brief(name)}; names must be strings")
                waiting += [(inner, depth + 1) for pair in each.items() for inner in pair]
            elif isinstance(each, list):
                self._add(1, len(each), depth)
                waiting += [(inner, depth + 1) for inner in each]
            else:
                self._add(_num_chars(each), 0, depth)

    def _add(self, chars: int, values: int, depth: int) -> None:
        self._chars, self._values = self._chars + chars, self._values + values
        for found, limit, what in (
            (self._chars, self._most_chars, "characters"),
            (self._values, self._most_values, "values"),
            (depth, MAX_DEPTH, "levels of nesting"),
        ):
            if found > limit:
                raise _invalid("messages", f"the conversation has more than {limit} {what}; shorten the history")


def _num_chars(value: Any) -> int:
    """Return the number of characters that a string, a number, a boolean or None counts as."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            bad = error.object[error.start]
            raise _invalid("messages", f"{bad!r} is half a character; send valid texts only") from None
        return len(value)
    if isinstance(value, bool) or value is None:
        return 1
    if isinstance(value, int):
        if (bits := value.bit_length()) > MAX_INTEGER_BITS:
            raise _invalid("messages", f"an integer has {bits} bits (limit {MAX_INTEGER_BITS})")
        return max(NUMBER_CHARS, bits // 3)
    if isinstance(value, float) and value - value == 0:
        return NUMBER_CHARS
    raise _invalid("messages", f"{brief(value)} is not a JSON value; send JSON values only")


def _invalid(where: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {text}", field=where)
