"""`/v1/chat/completions`: render a conversation with the model's chat template, and write the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueroll.errors import InvalidRequestError

from ..parsing.forced import check_reasoning, forced_tools, forcing
from ..parsing.parser import PROMPT_END_TOKENS, parser_for
from ..sessions.messages import NODE_FIELD
from .answers import Rows, TokenBytes
from .conversation import ConversationFields, prompt_of, text_of, tools_of
from .fields import ONE_CALL, NumTop, TextFields, checked, given, recording, take_sampling, unsupported
from .images import Prompt
from .logprobs import TokenName, chat_logprobs, chat_logprobs_bytes, name_by_id
from .model import ServedModel
from .parsed import ChoiceParser
from .pieces import Piece, Task, Usage, ending
from .records import check_records, prompt_records, record_bytes, told_records
from .samples import MESSAGE_CHARS


class ChatFields(TextFields, ConversationFields):
    """Fields of a chat completion.

    `logprobs`: return the log-prob of each token. `top_logprobs`: number of most probable tokens to return per
    position, in addition to the generated token. `parallel_tool_calls`: whether an answer may have several tool calls.
    """

    logprobs: bool = False
    top_logprobs: NumTop | None = None
    parallel_tool_calls: bool = True


@dataclass
class ChatForm:
    """Writes chat completions. `new_parser`: returns the parser of a choice. `told_prompt`: the fields with which the
    answer reports the log-probs of the prompt. `node`: the id of the answer in its session; None without a session.
    """

    id: str
    created: int
    model: str
    fields: ChatFields
    prompt: Prompt
    name: TokenName
    eos_token_ids: frozenset[int]
    new_parser: Callable[[], ChoiceParser]
    told_prompt: dict[str, Any]
    node: str | None = None
    _choices: dict[int, ChoiceParser] = field(default_factory=dict)

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        told = self._envelope("chat.completion", Rows(map(self._whole_choice, pieces), None))
        told["usage"] = usage.told()
        told |= self.told_prompt
        return told | (self._prompt_ids() if self.fields.return_token_ids else {})

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        told = self._envelope("chat.completion.chunk", [self._delta_choice(piece)])
        if self.fields.stream_options.include_usage:
            told["usage"] = None
        if self.fields.return_token_ids and piece.start == 0 and piece.ended is None:
            told |= self._prompt_ids()
        return [told]

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        if not self.fields.stream_options.include_usage:
            return []
        return [self._envelope("chat.completion.chunk", []) | {"usage": usage.told()}]

    def _prompt_ids(self) -> dict[str, Any]:
        images = {"prompt_images": self.prompt.told} if self.prompt.told else {}
        return {"prompt_token_ids": self.prompt.token_ids} | images

    def _envelope(self, kind: str, choices: list[dict[str, Any]] | Rows) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        parser = self.new_parser()
        content, reasoning, calls = parser.add(piece)
        message: dict[str, Any] = self._head() | _texts(content, reasoning)
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return self._choice(piece, "message", message, parser)

    def _delta_choice(self, piece: Piece) -> dict[str, Any]:
        if (parser := self._choices.get(piece.index)) is None:
            parser = self._choices[piece.index] = self.new_parser()
        content, reasoning, calls = parser.add(piece)
        head = self._head() if piece.start == 0 and piece.token_ids else {}
        delta = head | _texts(content, reasoning) | ({"tool_calls": calls} if calls else {})
        return self._choice(piece, "delta", delta, parser)

    def _head(self) -> dict[str, Any]:
        """Return the fields that precede the content of a message."""
        return {"role": "assistant"} | ({} if self.node is None else {NODE_FIELD: self.node})

    def _choice(self, piece: Piece, what: str, told: dict[str, Any], parser: ChoiceParser) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            what: told,
            "logprobs": chat_logprobs(piece, self.name) if self.fields.logprobs else None,
        } | ending(piece, self.eos_token_ids)
        if parser.num_calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        choice |= told_records(piece, self.fields)
        return choice | ({"token_ids": piece.token_ids} if self.fields.return_token_ids else {})


def _texts(content: str, reasoning: str) -> dict[str, str]:
    return {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})


async def read_chat(body: dict[str, Any], served: ServedModel) -> tuple[Task, ChatForm]:
    """Parse a request for chat completions. Raise InvalidRequestError or HttpError if the request is not supported."""
    fields = chat_fields(body)
    params, seed = await take_sampling(fields, None, served.encode_words)
    own = checked(ChatFields, fields)
    served = await served.named(own.model)
    check_top_logprobs(own)
    if forced := forced_tools(own.tool_choice, own.tools):
        params = forcing(params, forced)
    else:
        check_parallel(own)
    prompt = await prompt_of(own, served, served.max_model_len)
    parser = parser_for(served.texts, tools_of(own), is_forced=bool(forced))
    prompt_end = served.texts.decode(prompt.token_ids[-PROMPT_END_TOKENS:], False, parser.marks) if parser else ""
    if forced and parser:
        check_reasoning(parser, prompt_end)
    served.check_lengths([prompt.token_ids], params.max_tokens, "messages")
    check_records(own, [prompt.token_ids], own.stream, params)
    if not own.stream:
        served.check_answer([prompt.token_ids], params, chat_token_bytes(own) + record_bytes(own, params, served))
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
        new_parser=partial(ChoiceParser, parser, prompt_end),
        told_prompt=told_prompt,
    )
    task = Task(
        prompts=[prompt.token_ids],
        media=[prompt.images],
        params=params,
        seed=seed,
        is_stream=own.stream,
        skip_special_tokens=own.skip_special_tokens,
        message=last_user_message([dict(role=each.role, content=each.content) for each in own.messages]),
        marks=parser.marks if parser else {},
        adapter=served.adapter,
    )
    return task, form


def chat_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that have an effect, with `max_completion_tokens` as `max_tokens`."""
    fields = given(body)
    if (most := fields.pop("max_completion_tokens", None)) is not None:
        fields["max_tokens"] = most
    return fields


def check_parallel(own: ChatFields) -> None:
    """Raise HttpError if a request allows at most one tool call per answer, but has the `tool_choice` auto."""
    if own.tools and own.tool_choice == "auto" and not own.parallel_tool_calls:
        raise unsupported("parallel_tool_calls", ONE_CALL, False)


def check_top_logprobs(own: ChatFields) -> None:
    """Raise InvalidRequestError if a request has `top_logprobs` without `logprobs`."""
    if own.top_logprobs is not None and not own.logprobs:
        text = "top_logprobs requires logprobs; set logprobs to true"
        raise InvalidRequestError(text, field="top_logprobs", value=own.top_logprobs)


def last_user_message(messages: list[dict[str, Any]]) -> str | None:
    """Return the beginning of the last user message's text; None if there is no user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            return text_of(message.get("content"))[:MESSAGE_CHARS]
    return None


def chat_token_bytes(own: ChatFields) -> TokenBytes:
    """Return the estimated bytes per token in an answer that is not a stream."""
    told = TokenBytes.TEXT + chat_logprobs_bytes((own.top_logprobs or 0) if own.logprobs else None)
    return TokenBytes(told + TokenBytes.ID * own.return_token_ids, TokenBytes.ID * own.return_token_ids)
