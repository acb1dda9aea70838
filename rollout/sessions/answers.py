"""Convert the tokens of an answer to a message: decode the text, parse its parts, and write them in OpenAI's form.

Does not own the formats of tool calls and reasoning: `parsing`, or a user's own `Parser`, finds tool calls and
reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trueroll.errors import InvalidRequestError

from ...engine.models.detokenizer import REPLACEMENT
from ...engine.request import SampleOutput
from ..parsing.forced import check_reasoning
from ..parsing.parser import PROMPT_END_TOKENS, AnswerParser, parser_for
from ..text import TextModel, before_stop, decode_marked, texts_of_marks
from .messages import Message, drawn_message, read_messages


class Parsed(Protocol):
    """The parts of an answer. `tool_calls`: in OpenAI's form; the arguments are objects or JSON texts."""

    @property
    def content(self) -> str | None: ...

    @property
    def reasoning_content(self) -> str | None: ...

    @property
    def tool_calls(self) -> Sequence[dict[str, Any]]: ...


class Parser(Protocol):
    """Finds reasoning and tool calls in an answer."""

    def whole(self, token_ids: Sequence[int], text: str, finish_reason: str) -> Parsed:
        """Parse a whole answer. `token_ids`: the answer's tokens, without the token that ended the answer. `text`: the
        answer's text, without special tokens and without the string that ended the answer.
        """
        ...


@dataclass(frozen=True)
class ParserSettings:
    """The settings of the parser for an answer.

    `tools`: the tools that the answer may call. `is_forced`: whether a grammar makes the answer one call.
    """

    tools: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False

    def parser(self, texts: TextModel) -> AnswerParser | None:
        """Return the parser of answers; None if all text is content."""
        return parser_for(texts, self.tools, self.is_forced)

    def check(self, texts: TextModel, prompt: Sequence[int]) -> None:
        """Raise InvalidRequestError if the answer to a prompt must be a tool call, but the prompt's end begins the
        reasoning.
        """
        if self.is_forced and (parser := self.parser(texts)) is not None:
            check_reasoning(parser, prompt_end(texts, prompt, parser))


def prompt_end(texts: TextModel, prompt: Sequence[int], parser: AnswerParser) -> str:
    """Return the end of a prompt, as marked text. `prompt`: token ids."""
    return decode_marked(texts.decode, prompt[-PROMPT_END_TOKENS:], False, parser.marks)


def read_answer(
    sample: SampleOutput,
    texts: TextModel,
    parser: Parser | None,
    settings: ParserSettings,
    prompt: Sequence[int],
    seed: int,
) -> Message:
    """Return the message of a sample.

    `parser`: None means the parser for the model's chat template. If the parts that any other parser returns are not a
    valid message, the whole answer is content. `prompt`: the token ids of the sample's prompt. `seed`: the seed of the
    request, from which the ids of tool calls are derived if the model wrote no ids.
    """
    if parser is None:
        return _parsed(sample, texts, settings, prompt, seed)
    text = _text_of(sample, texts, {})
    parts = parser.whole(_without_end(sample), text, sample.finish_reason)
    calls = [_with_id(call, text, call_id(seed, i)) for i, call in enumerate(parts.tool_calls)]
    told = dict(content=parts.content, reasoning_content=parts.reasoning_content, tool_calls=calls)
    try:
        [message] = read_messages([dict(role="assistant", **told)])
    except InvalidRequestError:
        return Message(dict(role="assistant", content=text))
    return message


def call_id(seed: int, index: int) -> str:
    """Return an id for a tool call to which the model gave no id. `index`: index of the call in the answer."""
    return f"call_{seed:016x}{index}"


def _parsed(
    sample: SampleOutput, texts: TextModel, settings: ParserSettings, prompt: Sequence[int], seed: int
) -> Message:
    """Return the message of an answer in the format of the model's chat template."""
    parser = settings.parser(texts)
    if parser is None:
        return drawn_message(_text_of(sample, texts, {}), "", [])
    text = _text_of(sample, texts, parser.marks)
    answer = parser.whole(text, sample.finish_reason, prompt_end(texts, prompt, parser))
    calls = [
        dict(id=call.id or call_id(seed, i), type="function", function=dict(name=call.name, arguments=call.arguments))
        for i, call in enumerate(answer.calls)
    ]
    return drawn_message(answer.content, answer.reasoning, calls)


def _without_end(sample: SampleOutput) -> list[int]:
    """Return the tokens of a sample, without the token that ended it."""
    return sample.token_ids[:-1] if isinstance(sample.stop_reason, int) else sample.token_ids


def _text_of(sample: SampleOutput, texts: TextModel, marks: Mapping[int, str]) -> str:
    """Return the text of a sample, without the token or the string that ended it. `marks`: as in
    `text.decode_marked`.
    """
    token_ids = _without_end(sample)
    text = decode_marked(texts.decode, token_ids, True, marks)
    if isinstance(sample.stop_reason, str):
        mark_texts, stop = texts_of_marks(texts.decode, marks), sample.stop_reason
        before = decode_marked(texts.decode, token_ids[:-1], True, marks).rstrip(REPLACEMENT).translate(mark_texts)
        text = before_stop(text, stop, max(0, len(before) - len(stop) + 1), mark_texts)
    return text


def told_message(message: Message) -> dict[str, Any]:
    """Convert a message that the model drew to OpenAI's form, with the arguments of tool calls as JSON texts."""
    content, calls = message.fields["content"], message.calls
    told: dict[str, Any] = dict(role=message.role, content=content or (None if calls else ""))
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if calls:
        told["tool_calls"] = [_told_call(call) for call in calls]
    return told


def _told_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | dict(function=function | dict(arguments=json.dumps(function["arguments"], ensure_ascii=False)))


def _with_id(call: dict[str, Any], text: str, derived: str) -> dict[str, Any]:
    """Return a tool call with an id. Equal drawn tokens give equal ids."""
    id = call.get("id")
    return call if isinstance(id, str) and id and id in text else call | dict(id=derived)
