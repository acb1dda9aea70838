"""Messages of a conversation, in the form in which chat templates read them, and their comparison.

Owns: which messages are equal. A message consists of `role`, `content`, `reasoning_content`, `tool_calls` and all other
fields that are neither empty nor added by servers and client libraries. Absent fields, None, "", [] and {} are equal.
The arguments of a tool call are compared as parsed JSON. Reasoning and the id of a tool call may be absent in a
received message, because many agents drop them; if they are given, they must be equal.

Does not own: how a message is rendered. Promises: no conversation exceeds the bounds below, and each message consists
only of JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trueroll.errors import InvalidRequestError, brief

MAX_MESSAGES = 4096
"""Maximum number of messages in a conversation."""
MAX_CHARS = 2**22
"""Maximum number of characters in a conversation, with the tools. Numbers count as `NUMBER_CHARS`."""
MAX_VALUES = 2**16
"""Maximum number of JSON values in a conversation."""
MAX_DEPTH = 64
"""Maximum depth of nested lists and objects in a conversation."""
NUMBER_CHARS = 24
MAX_INTEGER_BITS = 4096

_EMPTY = (None, "", [], {})
_WIRE = {"annotations", "audio", "index", "logprobs", "provider_specific_fields", "reasoning_details", "refusal"} | {
    "generation_log_probs",
    "generation_token_ids",
    "prompt_token_ids",
    "token_ids",
}
"""Fields that servers and client libraries add to an assistant message, and that no template reads."""


@dataclass(frozen=True, eq=False)
class Message:
    """A message. `fields`: what the template reads, without empty fields, except `role` and `content`, which are always
    present. The arguments of tool calls are objects.
    """

    fields: dict[str, Any]

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
            told["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in self.calls]
        return as_key(told)

    @cached_property
    def exact(self) -> str:
        """The text of all fields. Two messages with this text in common are the same in every field."""
        return as_key(self.fields)

    def is_(self, stored: Message) -> bool:
        """Return whether this received message is the stored message. Absent reasoning and absent ids match."""
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
        return len(self.exact)


def as_key(value: Any) -> str:
    """Return a text that is the same for equal JSON values. The order of an object's fields does not matter."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def read_messages(messages: Any, tools: Any = ()) -> list[Message]:
    """Return the messages of a conversation. Raise InvalidRequestError if a message is malformed or exceeds a bound.

    `messages`: a list of objects in OpenAI's form. `tools`: the tools of the conversation, which count towards the
    bounds.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _invalid("messages", f"must be a list with at least one message (got {brief(messages)})")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("messages", f"{len(messages)} messages are too many (limit {MAX_MESSAGES}); shorten the history")
    _check_bounds([list(messages), list(tools)])
    return [_read(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read(where: str, given: Any) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or not given["role"]:
        raise _invalid(where, f"must be an object with a role (got {brief(given)})")
    fields = {name: value for name, value in given.items() if name not in _WIRE and value not in _EMPTY}
    if isinstance(reasoning := fields.pop("reasoning", None), str):
        fields.setdefault("reasoning_content", reasoning)
    if not isinstance(fields.get("reasoning_content", ""), str):
        raise _invalid(where, f"reasoning_content must be a string (got {brief(fields['reasoning_content'])})")
    if "function_call" in fields:  # the form that preceded tool_calls
        raise _invalid(where, "function_call is not supported; use tool_calls")
    fields["content"] = _text(where, fields.get("content", ""))
    if "tool_calls" in fields:
        fields["tool_calls"] = [_call(where, call) for call in _listed(where, fields["tool_calls"])]
    return Message(deepcopy(fields))


def _text(where: str, content: Any) -> str:
    """Return content as one text. The texts of several parts are joined by line breaks."""
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


def _call(where: str, call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_no_constant)
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            raise TypeError
        if not isinstance(call.get("id") or "", str):
            raise TypeError
        _check_bounds(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = f"tool_calls: {brief(call)} is not a function call with JSON arguments; correct the call"
        raise _invalid(where, text) from None
    told: dict[str, Any] = {"id": call["id"]} if call.get("id") else {}
    return told | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_bounds(value: Any) -> None:
    """Raise InvalidRequestError if a value is not a JSON value, or exceeds a bound."""
    chars = count = 0
    for each, depth in _walk(value):
        count += 1
        if isinstance(each, str):
            chars += len(each)
        elif isinstance(each, dict) and not all(isinstance(name, str) for name in each):
            raise _invalid("messages", f"an object has the name {brief(next(iter(each)))}; names must be strings")
        elif isinstance(each, bool | list | dict) or each is None:
            chars += 1
        elif isinstance(each, float) and each - each == 0 or isinstance(each, int):
            if isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS:
                raise _invalid("messages", f"an integer has {each.bit_length()} bits (limit {MAX_INTEGER_BITS})")
            chars += NUMBER_CHARS
        else:
            raise _invalid("messages", f"{brief(each)} is not a JSON value; send JSON values only")
        for found, limit, what in (
            (chars, MAX_CHARS, "characters"),
            (count, MAX_VALUES, "values"),
            (depth, MAX_DEPTH, "levels of nesting"),
        ):
            if found > limit:
                raise _invalid("messages", f"the conversation has more than {limit} {what}; shorten the history")


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all values inside a JSON value, including the keys of objects, with their depth."""
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        yield each, depth
        if isinstance(each, dict):
            waiting += [(inner, depth + 1) for pair in each.items() for inner in pair]
        elif isinstance(each, list):
            waiting += [(inner, depth + 1) for inner in each]


def _invalid(where: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {text}", field=where)
