"""Tool calls with a tag for each argument, such as `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import unescape
from typing import Any

from .answers import Call, make_call, parsed_json
from .schemas import Tools

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Tags:
    """The tags of a format, as marked text.

    `head`: regular expression for the beginning of a call; its group 1 is the name. `parameter`: regular expression for
    the beginning of an argument; group 1 is the name, and group 2, if there is one, is the type. `close`: ends an
    argument. `last`: ends a call; empty if the call ends where the region ends. `border`: regular expression for the
    end of a call; in a value, it shows that the end of the argument is missing. `is_line`: whether a value stands
    between two line breaks, which are not part of it; an argument without an end then ends before a line that begins
    another argument of the tool. `has_entities`: whether names have the character references of HTML.
    """

    head: str
    parameter: str
    close: str
    last: str
    border: str
    is_line: bool = False
    has_entities: bool = False
    patterns: tuple[re.Pattern[str], ...] = field(init=False)

    def __post_init__(self) -> None:
        boundary = rf"{re.escape(self.close)}\s*(?={self.parameter}|\Z)"
        sources = (rf"\s*{self.head}", self.parameter, boundary, rf"\n(?={self.parameter}\n)", self.border)
        object.__setattr__(self, "patterns", tuple(map(re.compile, sources)))


def tagged_call(text: str, tags: Tags, tools: Tools, plain: Callable[[str], str]) -> Call | None:
    """Return the call in the region of a call; None if the region has another form.

    The tag that closes the last argument may be missing, if the value does not mention such a tag. `plain`: converts
    marked text to text.
    """
    text = text.rstrip()
    if not text.endswith(tags.last) or (found := tags.patterns[0].match(text)) is None:
        return None
    name = _name(found[1], tags, plain)
    told = _arguments(text[: len(text) - len(tags.last)], name, found.end(), tags, tools, plain)
    if told is None:
        return None
    return make_call(name, {key: _typed(name, key, value, kind, tools) for key, (value, kind) in told.items()})


def _arguments(
    text: str, name: str, at: int, tags: Tags, tools: Tools, plain: Callable[[str], str]
) -> dict[str, tuple[str, str | None]] | None:
    """Return the values and the types of arguments, by name; None if the text has another form."""
    _, parameter, boundary, line, border = tags.patterns
    arguments: dict[str, tuple[str, str | None]] = {}
    closed = boundary.search(text, at)
    while (at := _skip_space(text, at)) < len(text):
        if (found := parameter.match(text, at)) is None:
            return None
        start, key = found.end(), _name(found[1], tags, plain)
        if closed is not None and closed.start() < start:
            closed = boundary.search(text, start)
        end, at = closed.span() if closed else (len(text), len(text))
        for next in line.finditer(text, start, end) if tags.is_line else ():
            if tools.has(name, next[1]) and next[1] not in arguments:
                end = at = next.start()
                break
        value = text[start:end]
        if key in arguments or border.search(value) or (closed is None and tags.close in value):
            return None
        value = value.removeprefix("\n").removesuffix("\n") if tags.is_line else value
        arguments[key] = plain(value), found[2] if parameter.groups > 1 else None
    return arguments


def _name(text: str, tags: Tags, plain: Callable[[str], str]) -> str:
    return unescape(plain(text)) if tags.has_entities else plain(text).strip()


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _typed(name: str, key: str, value: str, kind: str | None, tools: Tools) -> Any:
    """Return the value of an argument. `kind`: the type that the model wrote; None if the schema has the type."""
    if kind is None:
        return tools.typed(name, key, value)
    if kind in ("true", "string"):
        return value
    found = parsed_json(value)
    return value if found is None and value.strip() != "null" else found
