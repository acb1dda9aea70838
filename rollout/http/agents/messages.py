"""Anthropic's Messages API (`/v1/messages`): read requests as calls of a session, and write the answers.

The API: https://platform.claude.com/docs/en/api/messages. Thinking is the model's reasoning. Each tool result in a
user's message becomes a message of the role `tool`, which precedes the texts of the user's message. The texts of the
blocks of an assistant's message are concatenated. The texts of the blocks of any other message are joined with line
breaks, as in chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ....engine.request import MAX_STOP_STRINGS, StopString
from ..errors import HttpError
from ..fields import ResponseFormat, checked, unsupported
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


def _as_blocks(content: Any) -> Any:
    """Return the content of a message as a list of blocks. Content that is a string becomes one block of type text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Text(Sent):
    IGNORED = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


class _Thinking(Sent):
    """A block of thinking. `signature`: if the block belongs to an answer of this session, the id of this answer's node
    in the session.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinking(Sent):
    """A block of encrypted thinking from another model. Chat templates cannot render encrypted thinking."""

    IGNORED = frozenset({"data"})

    type: Literal["redacted_thinking"]


class _ToolUse(Sent):
    IGNORED = frozenset({"cache_control"})
    OFF = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def told(self) -> dict[str, Any]:
        return tool_call(self.id, self.name, self.input)


_Texts = Annotated[list[_Text], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class _ToolResult(Sent):
    IGNORED = frozenset({"cache_control"})
    OFF = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = []
    is_error: bool = False

    def told(self) -> dict[str, Any]:
        return tool_message(self.tool_use_id, self.content) | ({"is_error": True} if self.is_error else {})


_OfUser = Annotated[_Text | _ToolResult, Field(discriminator="type"), only("type", "text", "tool_result")]
_OfAssistant = Annotated[
    _Text | _Thinking | _RedactedThinking | _ToolUse,
    Field(discriminator="type"),
    only("type", "text", "thinking", "redacted_thinking", "tool_use"),
]


class _System(Sent):
    role: Literal["system"]
    content: _Texts

    def told(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": lines(self.content)}]


class _User(Sent):
    role: Literal["user"]
    content: Annotated[list[_OfUser], Field(fail_fast=True), BeforeValidator(_as_blocks)]

    def told(self) -> list[dict[str, Any]]:
        results = [block.told() for block in self.content if isinstance(block, _ToolResult)]
        texts = [block for block in self.content if isinstance(block, _Text)]
        return [*results, {"role": "user", "content": lines(texts)}] if texts or not results else results


class _Assistant(Sent):
    role: Literal["assistant"]
    content: Annotated[list[_OfAssistant], Field(fail_fast=True), BeforeValidator(_as_blocks)]

    def told(self) -> list[dict[str, Any]]:
        thinking = [block for block in self.content if isinstance(block, _Thinking)]
        told = assistant_message(
            content="".join(block.text for block in self.content if isinstance(block, _Text)),
            reasoning="".join(block.thinking for block in thinking),
            calls=[block.told() for block in self.content if isinstance(block, _ToolUse)],
            node=next((block.signature for block in thinking if block.signature), None),
        )
        return [told]


_Message = Annotated[
    _System | _User | _Assistant, Field(discriminator="role"), only("role", "user", "assistant", "system")
]


class _Tool(Sent):
    """A tool. `strict` is ignored. A tool call is guaranteed to follow the tool's schema only if `tool_choice` requires
    a tool call.
    """

    IGNORED = frozenset({"cache_control", "eager_input_streaming", "strict"})
    OFF = {"allowed_callers": (["direct"], []), "defer_loading": (False,), "input_examples": ([],)}

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def told(self) -> dict[str, Any]:
        return function(self.name, self.description, self.input_schema)


class _ToolChoice(Sent):
    disable_parallel_tool_use: bool = False


class _AnyChoice(_ToolChoice):
    type: Literal["auto", "any", "none"]


class _NamedChoice(_ToolChoice):
    type: Literal["tool"]
    name: str


_Choice = Annotated[_AnyChoice | _NamedChoice, Field(discriminator="type"), only("type", "auto", "any", "none", "tool")]


class _ThinkingConfig(Sent):
    """Whether the model thinks. `budget_tokens` has no effect. Thinking is always returned unabridged."""

    IGNORED = frozenset({"budget_tokens"})
    OFF = {"display": ("summarized",)}
    PATH = "thinking."

    type: Literal["enabled", "disabled", "adaptive"]


class _OutputConfig(Sent):
    OFF = {"effort": ()}
    PATH = "output_config."

    format: FlatFormat = ResponseFormat(type="text")


class _Prompt(Sent):
    """The fields of a request to count tokens."""

    IGNORED = frozenset({"cache_control", "metadata", "service_tier"})
    OFF = {
        "container": (),
        "context_management": ({}, {"edits": []}),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: _Texts = []
    tools: Annotated[list[_Tool], Field(fail_fast=True)] = []
    tool_choice: _Choice = _AnyChoice(type="auto")
    thinking: _ThinkingConfig = _ThinkingConfig(type="adaptive")
    output_config: _OutputConfig = _OutputConfig()


class _Request(_Prompt):
    """All fields of a request for a message. `temperature`, `top_p` and `top_k` are checked later, together with the
    other sampling parameters.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] = []
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    stream: bool = False

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the request sets."""
        return present(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences or None,
            response_format=told_format(self.output_config.format),
        )


def read_messages_call(body: dict[str, Any]) -> AgentCall:
    """Parse a request for a message. Raise HttpError if the request is not supported.

    A request with `thread` gets an error with the code `thread_unsupported_request`. A client that gets this code sends
    the request again without `thread`.
    """
    if body.get("thread") is not None:
        text = "thread: not supported, because a session has the whole conversation; send all messages without thread"
        code = "thread_unsupported_request"
        raise HttpError(400, text, field="thread", code=code, details={"error_code": code})
    own = checked(_Request, body)
    if own.messages[-1].role == "assistant":
        text = (
            "messages: the last message must not have the role assistant, because prefilling an answer is not "
            "supported; remove the message"
        )
        raise HttpError(400, text, field="messages", code="unsupported_parameter")
    return _call(own, sampling=own.sampling(), is_stream=own.stream, names_events=True)


def read_count_call(body: dict[str, Any]) -> AgentCall:
    """Parse a request to count the tokens of a prompt. Raise HttpError if the request is not supported."""
    return _call(checked(_Prompt, body))


def _call(own: _Prompt, **more: Any) -> AgentCall:
    tools = [tool.told() for tool in own.tools]
    messages = [told for message in own.messages for told in message.told()]
    if system := lines(own.system):
        messages.insert(0, {"role": "system", "content": system})
    kwargs = {} if own.thinking.type == "adaptive" else {"enable_thinking": own.thinking.type == "enabled"}
    return AgentCall(messages, MessageForm, tools, _choice(own), kwargs, model=own.model, **more)


def _choice(own: _Prompt) -> str | dict[str, Any]:
    """Convert `tool_choice` to the form of chat completions."""
    choice = own.tool_choice
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "auto" and own.tools and choice.disable_parallel_tool_use:
        text = "false, or set tool_choice to type 'any' or 'tool', which allow one call"
        raise unsupported("tool_choice.disable_parallel_tool_use", text, True)
    return "required" if choice.type == "any" else choice.type


@dataclass
class MessageForm:
    """Writes a message.

    If the model resumes thinking after it has written text, a stream has several blocks of thinking and several blocks
    of text. A message that is not streamed has only one block of each type, with the concatenated texts of the streamed
    blocks of this type. A stream ends with the tool calls.
    """

    context: Context
    _parser: ChoiceParser = field(init=False)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _num_blocks: int = 0
    _open: str | None = None  # the type of the block to which text may be added
    _has_begun: bool = False
    _stop: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parser = self.context.new_parser()

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        [piece] = pieces
        text, thinking, calls = self._parser.add(piece)
        texts = {"thinking": thinking, "text": text}
        content = [_block(kind, each, self.context.node) for kind, each in texts.items() if each]
        content += [_tool_use(call, json.loads(call["function"]["arguments"])) for call in calls]
        return self._message(content, _told_usage(usage)) | self._stop_fields(piece)

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        events = [] if self._has_begun else [self._start()]
        text, thinking, calls = self._parser.add(piece)
        events += self._grown("thinking", thinking)
        events += self._grown("text", text)
        self._calls += calls
        if piece.ended:
            for call in self._calls:
                events += self._begun(_tool_use(call, {}))
                events.append(self._delta("input_json_delta", partial_json=call["function"]["arguments"]))
            events += self._close_block()
            self._stop = self._stop_fields(piece)
        return events

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_delta", "delta": self._stop, "usage": _told_usage(usage)}, {"type": "message_stop"}]

    def _start(self) -> dict[str, Any]:
        self._has_begun = True
        usage = Usage(len(self.context.prompt_token_ids))
        return {"type": "message_start", "message": self._message([], _told_usage(usage))}

    def _message(self, content: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.context.node}",
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _grown(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the events that append a text to the open block. If the open block is not of type `kind`, the text is
        appended to a new block.
        """
        if not text:
            return []
        begun = [] if self._open == kind else self._begun(_block(kind, "", ""))
        return [*begun, self._delta(f"{kind}_delta", **{kind: text})]

    def _begun(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close_block()
        self._open = block["type"]
        self._num_blocks += 1
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": {"type": kind} | fields}

    def _close_block(self) -> list[dict[str, Any]]:
        """Return the events that end the open block."""
        if self._open is None:
            return []
        signed = [self._delta("signature_delta", signature=self.context.node)] if self._open == "thinking" else []
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _stop_fields(self, piece: Piece) -> dict[str, Any]:
        assert piece.ended is not None
        stop = piece.ended.stop_reason
        if piece.ended.finish_reason != "stop":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser.num_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _block(kind: str, text: str, signature: str) -> dict[str, Any]:
    """Return a block of type text or thinking. Thinking has a signature, which agents send back."""
    return {"type": kind, kind: text} | ({"signature": signature} if kind == "thinking" else {})


def _tool_use(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _told_usage(usage: Usage) -> dict[str, int]:
    """Return the token counts in Anthropic's form, in which `input_tokens` excludes the cached tokens."""
    cached = sum(usage.cached_tokens.values())
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
