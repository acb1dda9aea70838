"""Split the text of a choice into content, reasoning and tool calls. The text may be complete or arrive in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..parsing.answers import Answer, Call
from ..parsing.parser import AnswerParser
from ..protocol import new_id
from .pieces import Piece


def new_call_id(index: int) -> str:
    """Return a new id for a tool call."""
    return f"call_{new_id()}"


class ChoiceParser:
    """Parses the growing text of a choice. Without a parser, all text is content.

    `prompt_end`: the text of the end of the prompt, with `AnswerParser.marks` in place of some tokens. `call_id`:
    returns an id for a tool call to which the model gave no id. `call_id` gets the index of the call in the choice.
    """

    def __init__(
        self, parser: AnswerParser | None, prompt_end: str, call_id: Callable[[int], str] = new_call_id
    ) -> None:
        self._stream = parser.stream(prompt_end) if parser else None
        self._call_id = call_id
        self.num_calls = 0

    def add(self, piece: Piece) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the new content, the new reasoning, and the new tool calls in OpenAI's form with their `index`."""
        answer = self._stream.add(piece.text) if self._stream else Answer(piece.text)
        if self._stream and piece.ended:
            answer.extend(self._stream.finish(piece.ended.finish_reason))
        calls = [self._told_call(self.num_calls + i, call) for i, call in enumerate(answer.calls)]
        self.num_calls += len(calls)
        return answer.content, answer.reasoning, calls

    def _told_call(self, index: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": call.id or self._call_id(index), "type": "function", "function": function}
