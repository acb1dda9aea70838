"""The parser of a model's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .answers import Answer
from .formats import FORCED, FORMATS, HARMONY, THINK, Format, format_of
from .harmony import HarmonyStream
from .markers import Markers
from .schemas import Tools
from .streams import AnswerStream, Reading, Syntax

PROMPT_END_TOKENS = 32
"""The number of tokens at the end of a prompt that tell whether the prompt has begun the reasoning."""


class Vocabulary(Protocol):
    """What the parser needs to know of a model.

    `chat_template`: the text of the chat template, or None. `added_tokens`: the ids of the tokens that were added to
    the vocabulary, by text; special tokens are among them.
    """

    @property
    def chat_template(self) -> str | None: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...


class AnswerParser:
    """Parses the answers to one request.

    `format`: the format of tool calls; None if all text outside of the reasoning is content. `reasoning`: the beginning
    and the end of the reasoning; None if all of it is content. `tools`: as in OpenAI's field `tools`; calls are only
    found if there are tools. `token_ids`: the ids of the added tokens, by text.

    `marks`: the characters that stand for markers in the text of an answer, by token id. All methods take text in which
    each of these tokens is its character.
    """

    def __init__(
        self,
        format: Format | None,
        reasoning: tuple[str, str] | None,
        tools: Sequence[Mapping[str, Any]],
        token_ids: Mapping[str, int],
    ) -> None:
        if format is not HARMONY and not tools:
            format = None
        self._is_harmony, self._tools = format is HARMONY, Tools(tools)
        self._markers = Markers([*(format.markers if format else ()), *_markers_in(reasoning)], token_ids)
        syntax = format.syntax(self._markers, self._tools) if format else Syntax(self._markers)
        opened, closed = map(self._markers.marked, reasoning or ("", ""))
        self._syntax = replace(syntax, reasoning=(opened, closed) if reasoning else None)
        self.marks: Mapping[int, str] = self._markers.by_id

    def begins_reasoning(self, prompt: str) -> bool:
        """Return whether the end of a prompt, as marked text, has begun the reasoning."""
        opened = (self._syntax.reasoning or ("",))[0].rstrip()
        return bool(opened) and prompt.rstrip().endswith(opened)

    def stream(self, prompt: str = "") -> Reading:
        """Return a parser of one growing answer. `prompt`: the end of the prompt, which may begin the reasoning."""
        if self._is_harmony:
            return HarmonyStream(self._markers, self._tools)
        return AnswerStream(self._syntax, self.begins_reasoning(prompt))

    def whole(self, text: str, finish_reason: str, prompt: str = "") -> Answer:
        """Return the parts of a whole answer. `finish_reason`: as in `SampleOutput`."""
        stream = self.stream(prompt)
        answer = stream.add(text)
        answer.extend(stream.finish(finish_reason))
        return answer


def parser_for(model: Vocabulary, tools: Sequence[Mapping[str, Any]], is_forced: bool = False) -> AnswerParser | None:
    """Return the parser for a model's answers to a request with these tools; None if all text is content.

    The chat template decides on the formats of tool calls and of reasoning. `is_forced`: whether a grammar forces the
    answer to be one call (`FORCED`).
    """
    template = model.chat_template or ""
    format = format_of(template)
    reasoning = format and format.reasoning
    if reasoning is None and format is not HARMONY and THINK[0] in template:
        reasoning = THINK
    if reasoning is None and format is not HARMONY and not is_forced and not (format and tools):
        return None
    return AnswerParser(FORCED if is_forced else format, reasoning, tools, model.added_tokens)


def _markers_in(reasoning: tuple[str, str] | None) -> tuple[str, ...]:
    """Return the texts in the beginning and the end of the reasoning that may be tokens."""
    if reasoning in (None, THINK):
        return reasoning or ()
    return next(format.markers for format in FORMATS if format.reasoning == reasoning)
