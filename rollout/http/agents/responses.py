"""OpenAI's Responses API (`/v1/responses`): read requests as calls of a session, and write the answers.

The API: https://developers.openai.com/api/reference/resources/responses. Consecutive items of the assistant become one
message, with the concatenated texts of these items. The texts of the parts of any other item are joined with line
breaks, as in chat completions. The reasoning of a response is in the `content` of items of type `reasoning`, as OpenAI
specifies for open models. Responses are never stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..fields import ONE_CALL, ResponseFormat, checked, unsupported
from ..parsed import ChoiceParser
from ..pieces import Piece, Usage
from .call import (
    AgentCall,
    Context,
    FlatFormat,
    Sent,
    assistant_message,
    function,
    lines,
    only,
    present,
    told_format,
    tool_call,
    tool_message,
)

MAX_METADATA = 16
"""Maximum number of fields of `metadata`, as in OpenAI's API."""
_MARKS = frozenset({"status", "phase"})
"""Fields of output items that have no meaning in a request."""
_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]+)_[0-9]+")
"""The id of an output item, which contains the node of the answer."""


class _Text(Sent):
    IGNORED = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


def _as_texts(content: Any) -> Any:
    """Return the content of a message as a list of parts. Content that is a string becomes one part."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Texts = Annotated[list[_Text], Field(fail_fast=True), BeforeValidator(_as_texts)]


class _Item(Sent):
    IGNORED = _MARKS

    id: str | None = None

    @property
    def node(self) -> str | None:
        """The node id in the field `id`: the item claims to belong to the session's answer with this node id. None if
        the field names no answer.
        """
        found = _ID.fullmatch(self.id or "")
        return found and found[1]

    @property
    def is_of_assistant(self) -> bool:
        return True


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts

    @property
    def is_of_assistant(self) -> bool:
        return self.role == "assistant"

    def told(self) -> dict[str, Any]:
        return {"role": self.role, "content": lines(self.content)}


class _ReasoningText(Sent):
    type: Literal["reasoning_text"]
    text: str


class _Reasoning(_Item):
    """An item of reasoning. Summaries and encrypted reasoning are ignored, because no chat template renders either."""

    IGNORED = _MARKS | {"summary", "encrypted_content"}

    type: Literal["reasoning"]
    content: Annotated[list[_ReasoningText], Field(fail_fast=True)] = []


_CALL_OFF = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}


class _FunctionCall(_Item):
    OFF = _CALL_OFF

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def told(self) -> dict[str, Any]:
        return tool_call(self.call_id, self.name, self.arguments)


class _FunctionCallOutput(_Item):
    IGNORED = _MARKS | {"name"}
    OFF = _CALL_OFF

    type: Literal["function_call_output"]
    call_id: str
    output: _Texts

    @property
    def is_of_assistant(self) -> bool:
        return False

    def told(self) -> dict[str, Any]:
        return tool_message(self.call_id, self.output)


_AnyItem = Annotated[
    _Message | _Reasoning | _FunctionCall | _FunctionCallOutput,
    Field(discriminator="type"),
    only("type", "message", "reasoning", "function_call", "function_call_output", default="message"),
]


def _as_items(given: Any) -> Any:
    """Return the field `input` of a request as a list of items. An input that is a string becomes one user message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Tool(Sent):
    """A function. `strict` is ignored. A call of the function is guaranteed to follow the function's schema only if
    `tool_choice` requires a tool call.
    """

    IGNORED = frozenset({"strict"})
    OFF = {"allowed_callers": (["direct"], []), "async": (False,), "defer_loading": (False,), "output_schema": ()}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def told(self) -> dict[str, Any]:
        return function(self.name, self.description, self.parameters)


class _TextConfig(Sent):
    OFF = {"verbosity": ()}
    PATH = "text."

    format: FlatFormat = ResponseFormat(type="text")


class _ReasoningConfig(Sent):
    """The settings of the reasoning. Reasoning is always returned in full, whatever summary is requested."""

    IGNORED = frozenset({"summary", "generate_summary"})
    OFF = {"context": ("auto",), "effort": (), "mode": ("standard",)}
    PATH = "reasoning."


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_METADATA:
        raise PydanticCustomError("too_long", "must have at most {limit} fields", {"limit": MAX_METADATA})
    return given


_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], BeforeValidator(_few)
]


class _Request(Sent):
    """The fields of a request for a response. `temperature` and `top_p` are checked later, together with the other
    sampling parameters.
    """

    IGNORED = frozenset(
        {
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("safety_identifier", "service_tier", "store", "user"),
        }
    )
    OFF = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Annotated[list[_AnyItem], Field(min_length=1, fail_fast=True), BeforeValidator(_as_items)]
    instructions: str | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: _TextConfig = _TextConfig()
    stream: bool = False
    metadata: _Metadata = {}
    reasoning: _ReasoningConfig = _ReasoningConfig()

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the request sets."""
        return present(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=told_format(self.text.format),
        )


def read_response_call(body: dict[str, Any]) -> AgentCall:
    """Parse a request for a response. Raise HttpError if the request is not supported."""
    own = checked(_Request, body)
    messages = [*_messages(own.input)]
    if own.instructions:
        messages.insert(0, {"role": "system", "content": own.instructions})
    return AgentCall(
        messages,
        partial(ResponseForm, _settings(own, body)),
        [tool.told() for tool in own.tools],
        _choice(own),
        sampling=own.sampling(),
        model=own.model,
        is_stream=own.stream,
        names_events=True,
    )


def _messages(items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a conversation in the form of chat completions."""
    for is_of_assistant, group in groupby(items, lambda item: item.is_of_assistant):
        if is_of_assistant:
            yield _assistant([*group])
        else:
            yield from (item.told() for item in group)


def _assistant(items: Sequence[Any]) -> dict[str, Any]:
    texts = {
        kind: "".join(part.text for item in items if isinstance(item, kind) for part in item.content)
        for kind in (_Message, _Reasoning)
    }
    calls = [item.told() for item in items if isinstance(item, _FunctionCall)]
    node = next((item.node for item in items if item.node), None)
    return assistant_message(texts[_Message], texts[_Reasoning], calls, node)


def _choice(own: _Request) -> str | dict[str, Any]:
    """Convert `tool_choice` to the form of chat completions."""
    choice = own.tool_choice
    if isinstance(choice, dict):
        if choice.keys() == {"type", "name"} and choice["type"] == "function" and isinstance(choice["name"], str):
            return {"type": "function", "function": {"name": choice["name"]}}
    elif choice == "auto" and own.tools and not own.parallel_tool_calls:
        raise unsupported("parallel_tool_calls", ONE_CALL, False)
    elif choice in ("auto", "none", "required"):
        return choice
    raise unsupported("tool_choice", "'auto', 'none', 'required' or {'type': 'function', 'name': NAME}", choice)


def _settings(own: _Request, body: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a request that the response repeats."""
    told = {name: getattr(own, name) for name in ("instructions", "metadata", "parallel_tool_calls", "tool_choice")}
    return told | {
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "text": {"format": _told_format(own.text.format)},
        "tools": body.get("tools") or [],
    }


def _told_format(format: ResponseFormat) -> dict[str, Any]:
    """Return the format of a response, without the format's description, which may be long."""
    if format.json_schema is None:
        return {"type": format.type}
    name = str(format.json_schema.get("name"))[:64]
    return {"type": format.type, "name": name, "schema": format.json_schema["schema"]}


@dataclass
class _OpenItem:
    """A streamed item of type message or reasoning, to which text may still be appended. `index`: the index of the item
    in the output.
    """

    type: str
    id: str
    index: int
    texts: list[str] = field(default_factory=list)

    @property
    def part_type(self) -> str:
        return "output_text" if self.type == "message" else "reasoning_text"

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.type == "message" else {}

    def part(self) -> dict[str, Any]:
        annotations = {"annotations": []} if self.type == "message" else {}
        return {"type": self.part_type, "text": "".join(self.texts)} | annotations | self.logprobs

    def told(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"role": "assistant"} if self.type == "message" else {"summary": []}
        return {"id": self.id, "type": self.type, "status": status} | about | {"content": content}


@dataclass
class ResponseForm:
    """Writes a response. `settings`: the settings of the request that the response repeats.

    If the model resumes reasoning after it has written text, a stream has several items of reasoning and several items
    of text. A response that is not streamed has only one item of each type, with the concatenated texts of the streamed
    items of this type. A stream ends with the tool calls. An answer with neither text nor tool calls has a message with
    an empty text, so that a client which sends all messages back also sends this answer back. The tokens of the
    reasoning are not counted separately.
    """

    settings: dict[str, Any]
    context: Context
    _parser: ChoiceParser = field(init=False)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: _OpenItem | None = None
    _new: list[dict[str, Any]] = field(default_factory=list)  # events to send next
    _num_events: int = 0
    _is_cut: bool = False

    def __post_init__(self) -> None:
        self._parser = self.context.new_parser()

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        [piece] = pieces
        self.events(piece)
        return self._final_response(usage)

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        if not self._num_events:
            for what in ("created", "in_progress"):
                self._tell(f"response.{what}", response=self._response("in_progress", [], None))
        text, reasoning, calls = self._parser.add(piece)
        self._grow("reasoning", reasoning)
        self._grow("message", text)
        self._calls += calls
        if piece.ended:
            self._is_cut = piece.ended.finish_reason != "stop"
            self._finish()
        return self._take()

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        response = self._final_response(usage)
        self._tell(f"response.{response['status']}", response=response)
        return self._take()

    def _tell(self, kind: str, **fields: Any) -> None:
        self._new.append({"type": kind, "sequence_number": self._num_events} | fields)
        self._num_events += 1

    def _take(self) -> list[dict[str, Any]]:
        new, self._new = self._new, []
        return new

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.context.node}_{len(self._output)}"

    def _grow(self, kind: str, text: str) -> None:
        """Append a text to the open item. If the open item is not of type `kind`, append the text to a new item."""
        if text:
            item = self._open if self._open is not None and self._open.type == kind else self._begin(kind)
            item.texts.append(text)
            self._tell(f"response.{item.part_type}.delta", **item.place, delta=text, **item.logprobs)

    def _begin(self, kind: str) -> _OpenItem:
        self._close_item("completed")
        self._open = item = _OpenItem(kind, self._id("msg" if kind == "message" else "rs"), len(self._output))
        self._tell("response.output_item.added", output_index=item.index, item=item.told("in_progress", []))
        self._tell("response.content_part.added", **item.place, part=item.part())
        return item

    def _close_item(self, status: str) -> None:
        """End the open item."""
        if (item := self._open) is None:
            return
        self._open, part = None, item.part()
        self._output.append(item.told(status, [part]))
        self._tell(f"response.{item.part_type}.done", **item.place, text=part["text"], **item.logprobs)
        self._tell("response.content_part.done", **item.place, part=part)
        self._tell("response.output_item.done", output_index=item.index, item=self._output[-1])

    def _call(self, call: dict[str, Any]) -> None:
        index, id = len(self._output), self._id("fc")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": id, "type": "function_call", "call_id": call["id"], "name": name}
        begun = item | {"arguments": "", "status": "in_progress"}
        self._output.append(item | {"arguments": arguments, "status": "completed"})
        self._tell("response.output_item.added", output_index=index, item=begun)
        place = {"item_id": id, "output_index": index}
        self._tell("response.function_call_arguments.delta", **place, delta=arguments)
        self._tell("response.function_call_arguments.done", **place, arguments=arguments)
        self._tell("response.output_item.done", output_index=index, item=self._output[-1])

    def _finish(self) -> None:
        types = {item["type"] for item in self._output} | ({self._open.type} if self._open else set())
        if not self._calls and "message" not in types:
            self._begin("message")
        self._close_item("incomplete" if self._is_cut and not self._calls else "completed")
        for call in self._calls:
            self._call(call)

    def _final_response(self, usage: Usage) -> dict[str, Any]:
        return self._response("incomplete" if self._is_cut else "completed", self._output, _told_usage(usage))

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        params = self.context.params
        about = {
            "id": f"resp_{self.context.node}",
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.context.model,
            "output": output,
            "max_output_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        return about | self.settings | {"usage": usage}


def _told_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(usage.cached_tokens.values()), "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
