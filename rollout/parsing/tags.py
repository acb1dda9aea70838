"""Tool calls with a tag for each argument, such as `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from typing import Any

from .answers import Call, make_call
from .literals import after_space
from .schemas import ANY, Tools, value_of


@dataclass(frozen=True)
class Tags:
    """The tags of a format. All texts are marked text.

    `head`: regular expression for the beginning of a call; its group 1 is the name. `parameter`: regular expression for
    the beginning of an argument; group 1 is the name, and group 2, if there is one, is the type. `close`: the text that
    ends an argument. `last`: the text that ends a call; empty if the format has no such text, and a call ends with the
    text that holds the calls. `border`: regular expression for the border between calls; if it matches inside a value,
    the end of the argument is missing. `is_line`: whether each value is enclosed in two line breaks, which are not part
    of the value. If `is_line` is true, an argument without an end ends before the line that begins another argument of
    the tool. `has_entities`: whether names may contain character references of HTML.
    """

    head: str
    parameter: str
    close: str
    last: str
    border: str
    is_line: bool = False
    has_entities: bool = False

    @cached_property
    def heads(self) -> re.Pattern[str]:
        """A pattern for the beginning of a call, with any white space before it."""
        return re.compile(rf"\s*{self.head}")

    @cached_property
    def parameters(self) -> re.Pattern[str]:
        """A pattern for the beginning of an argument."""
        return re.compile(self.parameter)

    @cached_property
    def boundaries(self) -> re.Pattern[str]:
        """A pattern for the end of an argument that is followed by another argument or by the end of the call."""
        return re.compile(rf"{re.escape(self.close)}\s*(?={self.parameter}|\Z)")

    @cached_property
    def lines(self) -> re.Pattern[str]:
        """A pattern for a line break before a line that begins an argument."""
        return re.compile(rf"\n(?={self.parameter}\n)")

    @cached_property
    def borders(self) -> re.Pattern[str]:
        """The compiled pattern `border`."""
        return re.compile(self.border)


def tagged_call(text: str, tags: Tags, tools: Tools, plain: Callable[[str], str]) -> Call | None:
    """Return the call in a region; None if the text of the region is malformed.

    The tag that closes the last argument may be missing, if the value does not contain such a tag. `plain`: replaces
    the characters that stand for markers by the texts of the markers.
    """
    text = text.rstrip()
    if not text.endswith(tags.last) or (found := tags.heads.match(text)) is None:
        return None
    name = _name(found[1], tags, plain)
    values = _arguments(text[: len(text) - len(tags.last)], name, found.end(), tags, tools, plain)
    if values is None:
        return None
    return make_call(name, {key: _typed(name, key, value, kind, tools) for key, (value, kind) in values.items()})


def _arguments(
    text: str, name: str, at: int, tags: Tags, tools: Tools, plain: Callable[[str], str]
) -> dict[str, tuple[str, str | None]] | None:
    """Return the values and the types of arguments, by name; None if the text is malformed."""
    arguments: dict[str, tuple[str, str | None]] = {}
    closed = tags.boundaries.search(text, at)
    while (at := after_space(text, at)) < len(text):
        if (found := tags.parameters.match(text, at)) is None:
            return None
        start, key = found.end(), _name(found[1], tags, plain)
        if closed is not None and closed.start() < start:
            closed = tags.boundaries.search(text, start)
        end, at = closed.span() if closed else (len(text), len(text))
        for next in tags.lines.finditer(text, start, end) if tags.is_line else ():
            if tools.has(name, next[1]) and next[1] not in arguments:
                end = at = next.start()
                break
        value = text[start:end]
        if key in arguments or tags.borders.search(value) or (closed is None and tags.close in value):
            return None
        value = value.removeprefix("\n").removesuffix("\n") if tags.is_line else value
        arguments[key] = plain(value), found[2] if tags.parameters.groups > 1 else None
    return arguments


def _name(text: str, tags: Tags, plain: Callable[[str], str]) -> str:
    return unescape(plain(text)) if tags.has_entities else plain(text).strip()


def _typed(name: str, key: str, value: str, kind: str | None, tools: Tools) -> Any:
    """Return the value of an argument. `kind`: the type that the model wrote; None if the schema determines the
    type.
    """
    if kind is None:
        return tools.typed(name, key, value)
    return value if kind in ("true", "string") else value_of(value, ANY)
