"""What an agent asks of a session, and what an answer needs, whatever the API.

Each API has a function that reads a request's body as an `AgentCall`. Does not own: the sessions (`registry`) and the
course of a call (`endpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Discriminator, model_validator
from pydantic_core import PydanticCustomError

from trueroll.errors import brief

from ...parsing.parser import AnswerParser
from ..answers import TokenBytes
from ..fields import Fields, ResponseFormat, is_same, unsupported
from ..parsed import ParsedChoice
from ..pieces import Form


class Sent(Fields):
    """Base class for the objects in an agent's request. A field with the value null is treated as missing.

    `IGNORED`: fields that never change an answer. `OFF`: fields of the API that are not supported, with their neutral
    values. `PATH`: the names of the objects around these fields, for errors.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    OFF: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    PATH: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _only_effective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value is not None and name not in cls.IGNORED}
        for name in [name for name in cls.OFF if name in values]:
            value, neutral = values.pop(name), cls.OFF[name]
            if not any(is_same(value, each) for each in neutral):
                raise unsupported(cls.PATH + name, " or ".join(["null", *map(repr, neutral)]), value)
        return values


def told_apart_by(field: str, default: str | None = None) -> Discriminator:
    """Return the discriminator of classes that a field tells apart. `default`: the value of a missing field."""
    return Discriminator(lambda given: default if given.get(field) is None else given[field])


def only(field: str, names: str, default: str | None = None) -> BeforeValidator:
    """Return a validator that allows only some values of a field. `names`: the values, separated by spaces."""
    allowed = names.split()

    def check(given: Any) -> Any:
        if not isinstance(given, dict):
            raise PydanticCustomError("unsupported", "must be an object")
        value = default if given.get(field) is None else given[field]
        if value not in allowed:
            said = dict(field=field, allowed=", ".join(allowed), value=brief(value))
            raise PydanticCustomError("unsupported", "{field} {value} is not supported (supported: {allowed})", said)
        return given

    return BeforeValidator(check)


def _as_response_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}


FlatFormat: TypeAlias = Annotated[ResponseFormat, BeforeValidator(_as_response_format)]
"""A format of an answer. Unlike in `response_format` of chat completions, the schema is next to the type."""


@dataclass(frozen=True)
class Context:
    """What is known of a call when its answer begins.

    `id`: the answer's node in the session; the API makes an id of it. `created`: seconds since 1970. `model`: the
    served model's name. `token_text`: returns the text of a token. `prompt_token_ids`: the prompt that the worker gets.
    `call_id`: returns the id of the tool call with this index in the answer, unless the model wrote an id. `parser`:
    None if all text is content. `prompt_end`: the end of the prompt, as the parser needs it. `eos_token_ids`:
    end-of-sequence tokens of the model.
    """

    id: str
    created: int
    model: str
    token_text: Callable[[int], str]
    prompt_token_ids: list[int]
    call_id: Callable[[int], str]
    parser: AnswerParser | None
    prompt_end: str
    eos_token_ids: frozenset[int]

    def parsed(self) -> ParsedChoice:
        """Return a parser for the answer."""
        return ParsedChoice(self.parser, self.prompt_end, self.call_id)


@dataclass(frozen=True)
class AgentCall:
    """A request of an agent.

    `messages`, `tools`, `tool_choice`, `chat_template_kwargs`: as in OpenAI's chat completions. `sampling`: sampling
    parameters of the request, with the names and the forms of the fields of `/v1/chat/completions`. `top_logprobs`: the
    number of most probable tokens to record for each token. `form`: returns the form of the answer. `token_bytes`: size
    of an answer that is not a stream. `tells_usage`: whether a stream ends with `Form.last_events`. `names_events`: as
    in `event_stream`.
    """

    messages: list[dict[str, Any]]
    form: Callable[[Context], Form]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None
    token_bytes: TokenBytes = TokenBytes(TokenBytes.TEXT)
    is_stream: bool = False
    tells_usage: bool = False
    names_events: bool = False
