"""Tool calls with a tag for each argument, such as `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .answers import Call, make_call, parsed_json
from .schemas import Tools

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Tags:
    """The tags of a format, as marked text.

    `head`: regular expression for the beginning of a call; its group 1 is the name. `parameter`: regular expression for
    the beginning of an argument; group 1 is the name, and group 2, if there is one, is the type. `close`: ends an
    argument. `last`: ends a call; empty if the call ends where the region ends. `border`: regular expression for the end
    of a call; in a value, it shows that the end of the argument is missing. `is_line`: whether a value stands between two line breaks, which are not part of it.
    """

    head: str
    parameter: str
    close: str
    last: str
    border: str
    is_line: bool = False
    patterns: tuple[re.Pattern[str], ...] = field(init=False)

    def __post_init__(self) -> None:
        boundary = rf"{re.escape(self.close)}\s*(?={self.parameter}|\Z)"
        sources = (rf"\s*{self.head}", self.parameter, boundary, self.border)
        object.__setattr__(self, "patterns", tuple(map(re.compile, sources)))


def tagged_call(text: str, tags: Tags, tools: Tools, plain: Callable[[str], str]) -> Call | None:
    """Return the call in the region of a call; None if the region has another form.

    The tag that closes the last argument may be missing. `plain`: converts marked text to text.
    """
    head, parameter, boundary, border = tags.patterns
    text = text.rstrip()
    if not text.endswith(tags.last) or (found := head.match(text)) is None:
        return None
    end, at = len(text) - len(tags.last), found.end()
    name, arguments = plain(found[1]).strip(), dict[str, Any]()
    while (at := _skip_space(text, at)) < end:
        if (found := parameter.match(text, at, end)) is None:
            return None
        closed = boundary.search(text, found.end(), end)
        value, at = text[found.end() : closed.start() if closed else end], closed.end() if closed else end
        key = plain(found[1]).strip()
        if key in arguments or border.search(value):
            return None
        value = plain(_without_line_breaks(value) if tags.is_line else value)
        arguments[key] = _typed(name, key, value, found[2] if parameter.groups > 1 else None, tools)
    return make_call(name, arguments)


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _without_line_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _typed(name: str, key: str, value: str, kind: str | None, tools: Tools) -> Any:
    """Return the value of an argument. `kind`: the type that the model wrote; None if the schema has the type."""
    if kind is None:
        return tools.typed(name, key, value)
    if kind in ("true", "string"):
        return value
    found = parsed_json(value)
    return value if found is None and value.strip() != "null" else found
