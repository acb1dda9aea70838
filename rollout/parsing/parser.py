"""The parser of a model's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .answers import Answer
from .formats import FORCED, THINK, Format, format_of
from .markers import Markers
from .schemas import Tools
from .streams import Reading, Syntax

PROMPT_END_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for the beginning of the reasoning."""


class Vocabulary(Protocol):
    """The properties of a model that the parser needs.

    `chat_templates`: the texts of the chat templates by name, as in transformers: `default` and, if there are several,
    for example `tool_use`. `added_tokens`: the ids of the tokens that were added to the vocabulary, by text; they
    include the special tokens.
    """

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...


class AnswerParser:
    """Parses the answers to one request.

    `format`: the format of the answers; None if all text outside of the reasoning is content. `reasoning`: the
    beginning and the end of the reasoning; None if the answers have no reasoning. `tools`: as in OpenAI's field
    `tools`. Without tools, no answer has calls. `token_ids`: the ids of the added tokens, by text.

    `marks`: the characters that stand for markers in the text of an answer, by token id. All methods take marked text,
    in which these characters replace the texts of the markers.
    """

    def __init__(
        self,
        format: Format | None,
        reasoning: tuple[str, str] | None,
        tools: Sequence[Mapping[str, Any]],
        token_ids: Mapping[str, int],
    ) -> None:
        if format is not None and not tools and format.reasoning is None:
            format = None
        self._markers = Markers([*(format.markers if format else ()), *(reasoning or ())], token_ids)
        syntax = format.syntax(self._markers, Tools(tools)) if format else Syntax()
        if not tools:
            syntax = replace(syntax, regions={}, section=None, at_start={})
        opened, closed = map(self._markers.marked, reasoning or ("", ""))
        self._syntax = replace(syntax, reasoning=(opened, closed) if reasoning else None)
        self.marks: Mapping[int, str] = self._markers.by_id

    def begins_reasoning(self, prompt: str) -> bool:
        """Return whether the end of a prompt, as marked text, has begun the reasoning."""
        opened = (self._syntax.reasoning or ("",))[0].rstrip()
        return bool(opened) and prompt.rstrip().endswith(opened)

    def stream(self, prompt: str = "") -> Reading:
        """Return a parser of one growing answer. `prompt`: the end of the prompt, which may begin the reasoning."""
        return self._syntax.stream(self._markers, self.begins_reasoning(prompt))

    def whole(self, text: str, finish_reason: str, prompt: str = "") -> Answer:
        """Return the parts of a whole answer. `finish_reason`: as in `SampleOutput`."""
        stream = self.stream(prompt)
        answer = stream.add(text)
        answer.extend(stream.finish(finish_reason))
        return answer


def parser_for(model: Vocabulary, tools: Sequence[Mapping[str, Any]], is_forced: bool = False) -> AnswerParser | None:
    """Return the parser for a model's answers to a request with these tools; None if all text is content.

    The chat template decides on the formats of tool calls and of reasoning. If the request has tools and the model has
    a template `tool_use`, this template, which transformers also uses in this case, decides on the formats.
    `is_forced`: whether a grammar forces the answer to be one call (`FORCED`).
    """
    templates = model.chat_templates
    template = templates.get("tool_use" if tools and "tool_use" in templates else "default", "")
    format = format_of(template)
    reasoning = format and format.reasoning
    if reasoning is None and THINK[0] in template:
        reasoning = THINK
    if reasoning is None and not is_forced and not (format and tools):
        return None
    return AnswerParser(FORCED if is_forced else format, reasoning, tools, model.added_tokens)
