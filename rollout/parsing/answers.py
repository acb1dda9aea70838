"""The parts of an answer, and the class `Writer`, which joins the parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

MAX_DEPTH = 58
"""Maximum depth of nested lists and objects in the arguments of a call."""
MAX_INTEGER_BITS = 4096
"""Maximum size of an integer in the arguments of a call."""


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments`: the text of a JSON object. `id`: the id that the model gave to the call; None if the
    model gave no id.
    """

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
    """Return a call. Return None if the name is not a printable text, or if the arguments are not a JSON object within
    `MAX_DEPTH` and `MAX_INTEGER_BITS`. Sessions apply the bounds `MAX_DEPTH` and `MAX_INTEGER_BITS` also to the
    messages that agents send back.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or not isinstance(arguments, dict):
        return None
    if not _is_bounded(arguments):
        return None
    try:
        return Call(name, _json_of(arguments), id)
    except (ValueError, TypeError, RecursionError):
        return None


def _is_bounded(value: Any) -> bool:
    """Return whether a value has neither more than `MAX_DEPTH` levels nor an integer of more than `MAX_INTEGER_BITS`
    bits.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS for each in level):
            return False
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not lists:
            return True
        level = [inner for each in lists for inner in each]
    return False


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text.

    Return None if the text is not JSON, if an object names a key twice, or if the value cannot be written as JSON in
    UTF-8. For example, a number that is not finite and half of a surrogate pair cannot be written.
    """
    try:
        value = DECODER.decode(text)
        _json_of(value)
    except (ValueError, RecursionError):
        return None
    return value


def _json_of(value: Any) -> str:
    """Return the JSON text of a value. Raise ValueError, TypeError or RecursionError if the value has no JSON text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for half of a surrogate pair, which JSON permits and UTF-8 does not
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a key twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""Parses JSON, and raises ValueError if an object names a key twice."""


class _Part:
    """The content or the reasoning of an answer. `trims`: whether white space before the next text is dropped."""

    def __init__(self, trims: bool) -> None:
        self._trims = trims
        self._new: list[str] = []
        self._space: list[str] = []  # white space that is dropped unless text follows
        self._has_text = self._joins = False

    def add(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        if kept := text.rstrip():
            self._new += ["\n"] if self._joins else self._space
            self._new.append(kept)
            self._space, self._has_text, self._trims, self._joins = [], True, False, False
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def separate(self) -> None:
        """Replace the white space between the earlier text and the next text with a line break."""
        self._space, self._trims, self._joins = [], True, self._has_text

    def take(self) -> str:
        new, self._new = "".join(self._new), []
        return new

    def take_space(self) -> str:
        space, self._space = "".join(self._space), []
        return space


class Writer:
    """Collects the parts of an answer, and drops or replaces the white space between the parts.

    White space around the reasoning is dropped. White space at the end of the content is dropped if the answer has
    calls. If reasoning resumes after content, or content after reasoning, a line break joins the two texts of the same
    kind. `plain`: replaces the characters that stand for markers by the texts of the markers.
    """

    def __init__(self, plain: Callable[[str], str]) -> None:
        self.plain = plain
        self._content, self._reasoning = _Part(trims=False), _Part(trims=True)
        self.content, self.reasoning = self._content.add, self._reasoning.add
        self._calls: list[Call] = []
        self._has_calls, self._ids = False, set[str]()

    def take(self) -> Answer:
        """Return the parts since the last call of this method."""
        calls, self._calls = self._calls, []
        return Answer(self.plain(self._content.take()), self.plain(self._reasoning.take()), calls)

    def separate(self) -> None:
        """Record that the reasoning or a message begins or ends here."""
        self._content.separate()
        self._reasoning.separate()

    def calls(self, calls: list[Call]) -> None:
        """Append calls. If an earlier call has the same id as a new call, the id of the new call is dropped."""
        for call in calls:
            self._calls.append(replace(call, id=None) if call.id in self._ids else call)
            self._ids |= {call.id} if call.id is not None else set()
        self._has_calls = True

    def finish(self) -> Answer:
        """Return the last parts of the answer."""
        last = self.take()
        return last if self._has_calls else replace(last, content=last.content + self.plain(self._content.take_space()))
