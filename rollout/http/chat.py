"""`/v1/chat/completions`: render a conversation with the model's chat template, and write the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trueroll.errors import InvalidRequestError

from .answers import Rows, TokenBytes
from .conversation import ConversationFields, Message, prompt_of, text_of, tools_of
from .fields import NumTop, TextFields, checked, given, recording, take_sampling
from .images import Prompt
from .logprobs import TokenName, chat_logprobs, chat_logprobs_bytes, name_by_id
from .model import ServedModel
from .pieces import Piece, Task, Usage, ending
from .records import check_records, prompt_records, record_bytes, told_records
from .samples import MESSAGE_CHARS
from .tools import BEGIN, ToolText


class ChatFields(TextFields, ConversationFields):
    """Fields of a chat completion.

    `logprobs`: return the log-prob of each token. `top_logprobs`: number of most probable tokens to return per
    position, in addition to the generated token.
    """

    logprobs: bool = False
    top_logprobs: NumTop | None = None


@dataclass
class ChatForm:
    """Writes chat completions. `finds_tools`: whether to parse tool calls in the text. `told_prompt`: the fields of the
    answer with the log-probs of the prompt.
    """

    id: str
    created: int
    model: str
    fields: ChatFields
    prompt: Prompt
    name: TokenName
    eos_token_ids: frozenset[int]
    finds_tools: bool
    told_prompt: dict[str, Any]
    _texts: dict[int, ToolText] = field(default_factory=dict)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        told = self._envelope("chat.completion", Rows(map(self._whole_choice, pieces), None))
        told["usage"] = usage.told()
        told |= self.told_prompt
        return told | (self._told_prompt() if self.fields.return_token_ids else {})

    def event(self, piece: Piece) -> dict[str, Any]:
        told = self._envelope("chat.completion.chunk", [self._delta_choice(piece)])
        if self.fields.stream_options.include_usage:
            told["usage"] = None
        if self.fields.return_token_ids and piece.start == 0 and piece.ended is None:
            told |= self._told_prompt()
        return told

    def last_event(self, usage: Usage) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage.told()}

    def _told_prompt(self) -> dict[str, Any]:
        images = {"prompt_images": self.prompt.told} if self.prompt.told else {}
        return {"prompt_token_ids": self.prompt.token_ids} | images

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
        choice |= told_records(piece, self.fields)
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
    params, seed = await take_sampling(fields, None, served.encode_words)
    own = checked(ChatFields, fields)
    served.check_name(own.model)
    if own.top_logprobs is not None and not own.logprobs:
        text = "top_logprobs requires logprobs; set logprobs to true"
        raise InvalidRequestError(text, field="top_logprobs", value=own.top_logprobs)
    prompt = await prompt_of(own, served, served.max_model_len)
    served.check_lengths([prompt.token_ids], params.max_tokens, "messages")
    check_records(own, [prompt.token_ids], own.stream, params)
    if not own.stream:
        served.check_answer([prompt.token_ids], params, _token_bytes(own) + record_bytes(own, params, served))
    params = served.salted(recording(params, (own.top_logprobs or 0) if own.logprobs else None))
    for parsed in (body, fields):
        parsed.clear()  # `own` has a compact copy of long lists
    [told_prompt] = await prompt_records(own, [prompt], params, served)
    form = ChatForm(
        id=served.new_id("chatcmpl"),
        created=served.now(),
        model=served.name,
        fields=own,
        prompt=prompt,
        name=name_by_id if own.return_tokens_as_token_ids else served.texts.token,
        eos_token_ids=served.eos_token_ids,
        finds_tools=bool(tools_of(own)) and BEGIN in served.texts.chat_template,
        told_prompt=told_prompt,
    )
    task = Task(
        prompts=[prompt.token_ids],
        media=[prompt.images],
        params=params,
        seed=seed,
        is_stream=own.stream,
        tells_usage=own.stream_options.include_usage,
        skip_special_tokens=own.skip_special_tokens,
        message=_last_user_message(own.messages),
    )
    return task, form


def _last_user_message(messages: list[Message]) -> str | None:
    """Return the beginning of the last user message's text; None if there is no user message."""
    for message in reversed(messages):
        if message.role == "user":
            return text_of(message.content)[:MESSAGE_CHARS]
    return None


def _token_bytes(own: ChatFields) -> TokenBytes:
    told = TokenBytes.TEXT + chat_logprobs_bytes((own.top_logprobs or 0) if own.logprobs else None)
    return TokenBytes(told + TokenBytes.ID * own.return_token_ids, TokenBytes.ID * own.return_token_ids)
