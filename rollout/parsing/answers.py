"""The parts of an answer, and the writer that joins them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments`: the text of a JSON object. `id`: the id that the model wrote; None if it wrote none."""

    name: str
    arguments: str
    id: str | None = None


@dataclass
class Answer:
    """The parts of an answer, or the new parts of a growing answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def extend(self, new: Answer) -> None:
        """Append the parts of `new`."""
        self.content += new.content
        self.reasoning += new.reasoning
        self.calls += new.calls


def make_call(name: Any, arguments: Any, id: str | None = None) -> Call | None:
    """Return a call; None if the name is not a text, or if the arguments are not an object with values of JSON."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + told).encode()  # raises for a lone surrogate, which JSON permits and UTF-8 does not
    except (ValueError, TypeError, RecursionError):
        return None
    return Call(name, told, id)


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Writer:
    """Collects the parts of an answer, and decides about the white space between them.

    White space at both ends of the reasoning is dropped, and so is white space between the reasoning and the content.
    White space at the end of the content is dropped if the answer has calls. `plain`: converts marked text to text.
    """

    def __init__(self, plain: Callable[[str], str]) -> None:
        self.plain = plain
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._space: list[str] = []  # white space of the content that may be dropped
        self._late_space: list[str] = []  # white space of the reasoning that may be dropped
        self._trims = self._has_reasoning = self._has_calls = False

    def take(self) -> Answer:
        """Return the parts since the last call of this method."""
        told = Answer(self.plain("".join(self._content)), self.plain("".join(self._reasoning)), self._calls)
        self._content, self._reasoning, self._calls = [], [], []
        return told

    def content(self, text: str) -> None:
        """Append text to the content."""
        if self._trims:
            text = text.lstrip()
        if kept := text.rstrip():
            self._trims = False
            self._content += self._space
            self._content.append(kept)
            self._space = []
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def reasoning(self, text: str) -> None:
        """Append text to the reasoning."""
        if not self._has_reasoning:
            text = text.lstrip()
        if kept := text.rstrip():
            self._has_reasoning = True
            self._reasoning += self._late_space
            self._reasoning.append(kept)
            self._late_space = []
        if len(kept) < len(text):
            self._late_space.append(text[len(kept) :])

    def begin_reasoning(self) -> None:
        """Drop white space before the reasoning."""
        self._space = []

    def end_reasoning(self) -> None:
        """Drop white space at the end of the reasoning, and before the content that follows."""
        self._late_space = []
        self._trims = True

    def calls(self, calls: list[Call]) -> None:
        """Append calls."""
        self._calls += calls
        self._has_calls = True

    def finish(self) -> Answer:
        """Return the last parts of the answer."""
        if not self._has_calls:
            self._content += self._space
        self._space = []
        return self.take()
