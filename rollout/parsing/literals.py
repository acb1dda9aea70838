"""Values in the notations of Python and of Gemma, parsed without evaluating code."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .answers import Call, make_call, parsed_json

_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_PYTHON_STRING = re.compile(r"""'[^'\\\n]*(?:\\.[^'\\\n]*)*'|"[^"\\\n]*(?:\\.[^"\\\n]*)*\"""", re.DOTALL)
_BARE = re.compile(r"[^\s,:{}\[\]()'\"]+")
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


class _Malformed(ValueError):
    pass


def after_space(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space; the length of the text if there
    is no such character.
    """
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


class _Reader(ABC):
    """Reads values from a text, by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self._depth = text, 0, 0

    def takes(self, literal: str) -> bool:
        """Skip white space, then `literal`. Return whether `literal` was found."""
        self.space()
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def need(self, literal: str) -> None:
        if not self.takes(literal):
            raise _Malformed

    def match(self, pattern: re.Pattern[str]) -> str:
        self.space()
        if (found := pattern.match(self.text, self.at)) is None:
            raise _Malformed
        self.at = found.end()
        return found.group()

    def space(self) -> None:
        self.at = after_space(self.text, self.at)

    def is_at_end(self) -> bool:
        self.space()
        return self.at == len(self.text)

    def listed(self, end: str, read: Callable[[], None]) -> None:
        """Read a comma-separated list up to the text `end`. Call `read` for each item."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Malformed
        while not self.takes(end):
            read()
            if not self.takes(","):
                self.need(end)
                break
        self._depth -= 1

    def value(self) -> Any:
        if self.takes("["):
            items: list[Any] = []
            self.listed("]", lambda: items.append(self.value()))
            return items
        return self.object() if self.takes("{") else self.scalar()

    def object(self) -> dict[str, Any]:
        """Read an object, after its opening brace."""
        found: dict[str, Any] = {}

        def pair() -> None:
            key = self.key()
            self.need(":")
            if key in found:
                raise _Malformed
            found[key] = self.value()

        self.listed("}", pair)
        return found

    @abstractmethod
    def key(self) -> str:
        """Read the key of a member of an object."""

    @abstractmethod
    def scalar(self) -> Any:
        """Read a value that is neither an object nor a list."""


class _Python(_Reader):
    def key(self) -> str:
        if not isinstance(key := self.scalar(), str):
            raise _Malformed
        return key

    def scalar(self) -> Any:
        self.space()
        if self.text.startswith(("'", '"'), self.at):
            return ast.literal_eval(self.match(_PYTHON_STRING))
        word = self.match(_BARE)
        return _PYTHON_CONSTANTS[word] if word in _PYTHON_CONSTANTS else _number(word)

    def call(self) -> Call:
        name, arguments = self.match(_NAME), dict[str, Any]()

        def argument() -> None:
            key = self.match(_NAME)
            self.need("=")
            if key in arguments:
                raise _Malformed
            arguments[key] = self.value()

        self.need("(")
        self.listed(")", argument)
        if (call := make_call(name, arguments)) is None:
            raise _Malformed
        return call


class _Gemma(_Reader):
    def __init__(self, text: str, quote: str, plain: Callable[[str], str]) -> None:
        super().__init__(text)
        self._quote, self._plain = quote, plain
        self._bare = re.compile(rf"(?:(?!{re.escape(quote)})[^,:{{}}\[\]])+")

    def key(self) -> str:
        return self._string() if self.takes(self._quote) else self.match(self._bare).strip()

    def scalar(self) -> Any:
        return self._string() if self.takes(self._quote) else _constant(self.match(self._bare).strip())

    def _string(self) -> str:
        end = self.text.find(self._quote, self.at)
        if end < 0:
            raise _Malformed
        text, self.at = self.text[self.at : end], end + len(self._quote)
        return self._plain(text)


def _number(word: str) -> int | float:
    if type(value := parsed_json(word)) not in (int, float):
        raise _Malformed
    return value


def _constant(word: str) -> Any:
    value = parsed_json(word)
    if value is None and word != "null":
        raise _Malformed
    return value


def python_calls(text: str) -> list[Call] | None:
    """Return the calls in a text such as `[f(a=1), g()]`; None if the text does not have this form."""
    reader, calls = _Python(text), list[Call]()
    try:
        reader.need("[")
        reader.listed("]", lambda: calls.append(reader.call()))
        return calls if calls and reader.is_at_end() else None
    except (ValueError, SyntaxError, RecursionError):
        return None


def gemma_call(text: str, quote: str, plain: Callable[[str], str]) -> Call | None:
    """Return the call in a text such as `call:f{a:1}`; None if the text does not have this form.

    `quote`: the text that encloses strings. `plain`: replaces the characters that stand for markers by
    the texts of the markers.
    """
    reader = _Gemma(text, quote, plain)
    try:
        reader.need("call:")
        name = reader.match(_NAME)
        reader.need("{")
        arguments = reader.object()
        return make_call(name, arguments) if reader.is_at_end() else None
    except (ValueError, RecursionError):
        return None
