"""`/v1/chat/completions`: render a conversation with the model's chat template, and write the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trueroll.errors import InvalidRequestError, brief

from .answers import Rows, TokenBytes
from .fields import Fields, NumTop, TextFields, checked, given, recording, take_sampling, unsupported
from .logprobs import TokenName, chat_logprobs, chat_logprobs_bytes, name_by_id
from .model import ServedModel
from .pieces import Piece, Task, Usage, ending
from .samples import MESSAGE_CHARS
from .tools import BEGIN, ToolText

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(Fields):
    """A message of a conversation. Additional fields, such as `tool_calls`, are passed to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | Objects | None = None


class ConversationFields(Fields):
    """The fields that determine the prompt.

    `chat_template_kwargs`: arguments of the chat template, such as `enable_thinking`.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Objects = []
    tool_choice: str | dict[str, Any] = "auto"
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class ChatFields(TextFields, ConversationFields):
    """Fields of a chat completion.

    `logprobs`: return the log-prob of each token. `top_logprobs`: number of most probable tokens to return per
    position, in addition to the generated token.
    """

    logprobs: bool = False
    top_logprobs: NumTop | None = None


@dataclass
class ChatForm:
    """Writes chat completions. `finds_tools`: whether to parse tool calls in the text."""

    id: str
    created: int
    model: str
    fields: ChatFields
    prompt: list[int]
    name: TokenName
    eos_token_ids: frozenset[int]
    finds_tools: bool
    _texts: dict[int, ToolText] = field(default_factory=dict)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        told = self._envelope("chat.completion", Rows(map(self._whole_choice, pieces), None))
        told["usage"] = usage.told()
        return told | ({"prompt_token_ids": self.prompt} if self.fields.return_token_ids else {})

    def event(self, piece: Piece) -> dict[str, Any]:
        told = self._envelope("chat.completion.chunk", [self._delta_choice(piece)])
        if self.fields.stream_options.include_usage:
            told["usage"] = None
        if self.fields.return_token_ids and piece.start == 0 and piece.ended is None:
            told["prompt_token_ids"] = self.prompt
        return told

    def last_event(self, usage: Usage) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage.told()}

    def _envelope(self, kind: str, choices: list[dict[str, Any]] | Rows) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        content, calls = self._parted(piece)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return self._choice(piece, "message", message, calls)

    def _delta_choice(self, piece: Piece) -> dict[str, Any]:
        content, calls = self._parted(piece)
        role = {"role": "assistant"} if piece.start == 0 and piece.token_ids else {}
        delta = role | {"content": content} | ({"tool_calls": calls} if calls else {})
        return self._choice(piece, "delta", delta, calls)

    def _choice(self, piece: Piece, what: str, told: dict[str, Any], calls: list[Any]) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            what: told,
            "logprobs": chat_logprobs(piece, self.name) if self.fields.logprobs else None,
        } | ending(piece, self.eos_token_ids)
        if calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice | ({"token_ids": piece.token_ids} if self.fields.return_token_ids else {})

    def _parted(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """Return the text content of a `Piece`, and the tool calls that the piece completes."""
        if not self.finds_tools:
            return piece.text, []
        text = self._texts.setdefault(piece.index, ToolText())
        content = text.add(piece.text)
        rest, calls = text.finish() if piece.ended else ("", [])
        return content + rest, calls


async def read_chat(body: dict[str, Any], served: ServedModel) -> tuple[Task, ChatForm]:
    """Parse a request for chat completions. Raise InvalidRequestError or HttpError if the request is not supported."""
    fields = given(body)
    if (most := fields.pop("max_completion_tokens", None)) is not None:
        fields["max_tokens"] = most
    params, seed = take_sampling(fields, None)
    own = checked(ChatFields, fields)
    served.check_name(own.model)
    if own.top_logprobs is not None and not own.logprobs:
        text = "top_logprobs requires logprobs; set logprobs to true"
        raise InvalidRequestError(text, field="top_logprobs", value=own.top_logprobs)
    prompt = await token_ids_of(own, served, served.max_model_len)
    served.check_lengths([prompt], params.max_tokens, "messages")
    if not own.stream:
        served.check_answer([prompt], params, _token_bytes(own))
    form = ChatForm(
        id=served.new_id("chatcmpl"),
        created=served.now(),
        model=served.name,
        fields=own,
        prompt=prompt,
        name=name_by_id if own.return_tokens_as_token_ids else served.texts.token,
        eos_token_ids=served.eos_token_ids,
        finds_tools=bool(_tools(own)) and BEGIN in served.texts.chat_template,
    )
    task = Task(
        prompts=[prompt],
        params=served.salted(recording(params, (own.top_logprobs or 0) if own.logprobs else None)),
        seed=seed,
        is_stream=own.stream,
        tells_usage=own.stream_options.include_usage,
        skip_special_tokens=own.skip_special_tokens,
        message=_last_user_message(own.messages),
    )
    return task, form


def _last_user_message(messages: list[Message]) -> str | None:
    """Return the beginning of the last user message's text; None if there is no user message."""
    for position, message in reversed([*enumerate(messages)]):
        if message.role == "user":
            return (_for_template(position, message)["content"] or "")[:MESSAGE_CHARS]
    return None


def _token_bytes(own: ChatFields) -> TokenBytes:
    told = TokenBytes.TEXT + chat_logprobs_bytes((own.top_logprobs or 0) if own.logprobs else None)
    return TokenBytes(told + TokenBytes.ID * own.return_token_ids, TokenBytes.ID * own.return_token_ids)


async def token_ids_of(own: ConversationFields, served: ServedModel, most: int | None = None) -> list[int]:
    """Return the prompt of a conversation as token ids.

    Raise HttpError if the prompt has more than `most` tokens. Raise HttpError or InvalidRequestError if a field is not
    supported.
    """
    if own.tool_choice not in ("auto", "none"):
        raise unsupported("tool_choice", "'auto' or 'none'", own.tool_choice)
    messages = [_for_template(i, message) for i, message in enumerate(own.messages)]
    reserved = {"tools", "add_generation_prompt", "tokenize", "chat_template", "conversation", "messages"}
    if found := reserved & own.chat_template_kwargs.keys():
        text = f"chat_template_kwargs: {sorted(found)} cannot be set here; remove them"
        raise InvalidRequestError(text, field="chat_template_kwargs")
    arguments = own.chat_template_kwargs | dict(
        tools=_tools(own) or None, add_generation_prompt=own.add_generation_prompt
    )
    return await served.encode_conversation(messages, arguments, most)


def _tools(own: ConversationFields) -> list[dict[str, Any]]:
    return own.tools if own.tool_choice == "auto" else []


def _for_template(position: int, message: Message) -> dict[str, Any]:
    """Return a message in the format that chat templates expect, with content as text and tool call arguments as
    objects.
    """
    told = {name: value for name, value in message if value is not None or name == "content"}
    if isinstance(content := message.content, list):
        told["content"] = "\n".join(_text_of(position, part) for part in content)
    if isinstance(calls := told.get("tool_calls"), list):
        told["tool_calls"] = [_with_object(position, call) for call in calls]
    return told


def _text_of(position: int, part: dict[str, Any]) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        text = (
            f"messages[{position}].content: parts of type {brief(part.get('type'))} are not supported; send text only"
        )
        raise InvalidRequestError(text, field=f"messages[{position}].content", value=part.get("type"))
    return part["text"]


def _with_object(position: int, call: Any) -> Any:
    try:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return call | {"function": call["function"] | {"arguments": arguments}}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequestError(
            f"messages[{position}].tool_calls: {brief(call)} is not a function call with JSON arguments; correct the "
            "call",
            field=f"messages[{position}].tool_calls",
        ) from None
