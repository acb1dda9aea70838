"""The form to which the requests of all APIs are converted, and the data from which each API writes an answer.

For each API, a function converts a request's body to an `AgentCall`. Does not own: the sessions (`registry`) and the
handling of calls (`endpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from trueroll.errors import brief

from ....engine.request import SamplingParams
from ...sessions.messages import NODE_FIELD
from ..answers import TokenBytes
from ..fields import Fields, ResponseFormat, given
from ..parsed import ChoiceParser
from ..pieces import Form


class Sent(Fields):
    """Base class for the objects in an agent's request. A field with the value null is treated as missing.

    `IGNORED`: fields that never change an answer. `OFF`: fields of the API that are not supported, with their neutral
    values. `PATH`: the names of the objects that enclose these fields, for error texts.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    OFF: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    PATH: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _only_effective(cls, values: Any) -> Any:
        return given(values, cls.IGNORED, cls.OFF, cls.PATH) if isinstance(values, dict) else values


def only(field: str, *allowed: str, default: str | None = None) -> BeforeValidator:
    """Return a validator for objects that allows only the values `allowed` for the field `field`. If the field is
    missing, the validator sets the field to `default`.
    """

    def check(given: Any) -> Any:
        if not isinstance(given, dict):
            raise PydanticCustomError("unsupported", "must be an object")
        value = default if given.get(field) is None else given[field]
        if value not in allowed:
            said = dict(field=field, allowed=", ".join(allowed), value=brief(value))
            raise PydanticCustomError("unsupported", "{field} {value} is not supported; use {allowed}", said)
        return given | {field: value}

    return BeforeValidator(check)


def lines(parts: Iterable[Any]) -> str:
    """Join the texts of several content parts with line breaks, as chat completions do."""
    return "\n".join(part.text for part in parts)


def assistant_message(content: str, reasoning: str, calls: list[dict[str, Any]], node: str | None) -> dict[str, Any]:
    """Return an assistant message in the form of chat completions. `node`: id of the answer in the session, if the
    agent sent this id back with the message; otherwise None.
    """
    told = {"reasoning_content": reasoning, "tool_calls": calls, NODE_FIELD: node}
    return {"role": "assistant", "content": content} | {name: value for name, value in told.items() if value}


def tool_call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form of chat completions."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(id: str, content: Iterable[Any]) -> dict[str, Any]:
    """Return the result of a tool call as a message of chat completions."""
    return {"role": "tool", "tool_call_id": id, "content": lines(content)}


def function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the form of chat completions."""
    return {"type": "function", "function": present(name=name, description=description, parameters=parameters)}


def present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _as_response_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}


FlatFormat: TypeAlias = Annotated[ResponseFormat, BeforeValidator(_as_response_format)]
"""The requested format of an answer, with `schema` as a field beside `type`. In `response_format` of chat completions,
`schema` is nested in `json_schema` instead.
"""


def told_format(format: ResponseFormat) -> dict[str, Any] | None:
    """Convert the requested format of an answer to `response_format` of chat completions; None for plain text."""
    return None if format.type == "text" else dict(format)


@dataclass(frozen=True)
class Context:
    """The data from which an API writes its answer.

    `node`: id of the answer's node in the session; the ids in the answer contain this id. `created`: seconds since
    1970. `model`: the served model's name. `token_text`: returns the text of a token. `prompt_token_ids`: the prompt
    that the worker gets. `params`: the sampling parameters of the session and the request. `new_parser`: returns a
    parser for the answer. `eos_token_ids`: end-of-sequence tokens of the model.
    """

    node: str
    created: int
    model: str
    token_text: Callable[[int], str]
    prompt_token_ids: list[int]
    params: SamplingParams
    new_parser: Callable[[], ChoiceParser]
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class AgentCall:
    """A request of an agent.

    `messages`, `tools`, `tool_choice`, `chat_template_kwargs`: as in OpenAI's chat completions. `sampling`: sampling
    parameters of the request, with the names and the forms of the fields of `/v1/chat/completions`. `model`: the name
    of the model in the request. `top_logprobs`: for each generated token, the number of most probable tokens to record.
    `form`: returns the object that writes the answer in the API's format. `token_bytes`: estimated bytes per token in
    an answer that is not a stream. `names_events`: as in `event_stream`.
    """

    messages: list[dict[str, Any]]
    form: Callable[[Context], Form]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    top_logprobs: int | None = None
    token_bytes: TokenBytes = TokenBytes(TokenBytes.TEXT)
    is_stream: bool = False
    names_events: bool = False
