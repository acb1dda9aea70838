"""Parse JSON texts with long strings in steps.

`json.loads` decodes a string of any length in a single call, and blocks all threads meanwhile. Here, the long strings
are decoded piece by piece. The rest of the text is then parsed by `json.loads`, with a constant in place of each long
string. A text with many strings of less than `STEP_CHARS` characters is still parsed in a single call.

Promises: the result is the result of `json.loads`, except that long names in objects are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Refuse: TypeAlias = Callable[[str], Any]
"""A function that raises ValueError. Its argument is the name of a constant that is not JSON, such as `NaN`."""

STEP_CHARS = 2**17
"""Number of characters that one step searches or decodes. Strings of at least this length are long."""
_STAND_IN = "NaN"
_ESCAPE_CHARS = len(r"\u0000")
# The groups are not possessive, because Python 3.11.0 to 3.11.4 matches possessive groups past an unclosed string.
_WHOLE_STRINGS = re.compile(r'[^"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*"[^"]*+)*', re.DOTALL)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_decode = json.JSONDecoder().raw_decode


def parsed_in_steps(text: str, refuse: Refuse, **hooks: Any) -> Steps[Any]:
    """Return the value of a JSON text, which was decoded from UTF-8. Yields between steps. `hooks`: as in `json.loads`.

    Raise ValueError if the text is not valid JSON or if a name in an object is long. Raise RecursionError if the text
    is nested too deeply.
    """
    rest, strings = yield from _without_long_strings(text)
    if not strings:
        return json.loads(text, parse_constant=refuse, **hooks)
    strings.reverse()

    def stood_for(name: str) -> str:
        """Return the next long string. If the text itself contains the constant `NaN`, this constant also takes a
        string. No string is then left for the last stand-in, and `refuse` raises ValueError.
        """
        return strings.pop() if name == _STAND_IN and strings else refuse(name)

    try:
        value = json.loads(rest, parse_constant=stood_for, **hooks)
    except json.JSONDecodeError as error:
        if rest.startswith(_STAND_IN, error.pos) and error.msg.startswith("Expecting property name"):
            raise ValueError(f"a name in an object has {STEP_CHARS} or more characters") from None
        raise _without_place(error) from None
    assert not strings, "every stand-in was read"
    return value


def _without_place(error: json.JSONDecodeError) -> ValueError:
    """Return the error without its position, which is not the position in the whole text."""
    return ValueError(error.msg.removesuffix(" at"))


def _without_long_strings(text: str) -> Steps[tuple[str, list[str]]]:
    """Return the text with a stand-in for each long string, and the values of the long strings."""
    strings, between, told, start = list[str](), list[str](), 0, 0
    while len(text) - start > STEP_CHARS:
        skipped = _WHOLE_STRINGS.match(text, start, start + STEP_CHARS)
        assert skipped is not None, "the pattern matches the empty string"
        yield
        if skipped.end() > start:
            start = skipped.end()
            continue
        value, after = yield from _long_string(text, start + 1)  # a string begins here, and does not end in this step
        strings.append(value)
        between += [text[told:start], _STAND_IN]
        told = start = after
    return "".join([*between, text[told:]]), strings


def _long_string(text: str, start: int) -> Steps[tuple[str, int]]:
    """Return the value of a string, and the position after its closing quotation mark. `start`: the position of the
    string's first character. Raise ValueError if the string is not valid.
    """
    pieces = list[str]()
    while True:
        end = _border(text, start)
        try:
            piece, num_read = _decode(f'"{text[start:end]}"' if end < len(text) else f'"{text[start:]}')
        except json.JSONDecodeError as error:
            raise _without_place(error) from None
        pieces.append(_joined(pieces, piece))
        after = start + num_read - 1
        if after <= end:
            return "".join(pieces), after
        start = end
        yield


def _border(text: str, start: int) -> int:
    """Return where the piece that begins at `start` ends: after about `STEP_CHARS` characters, and not in an escape."""
    end = start + STEP_CHARS
    if end >= len(text):
        return len(text)
    last = text.rfind("\\", max(start, end - _ESCAPE_CHARS), end)
    if last < 0:
        return end
    before = text[start : last + 1]
    is_begin = (len(before) - len(before.rstrip("\\"))) % 2 == 1  # otherwise, it is the second character of an escape
    return last if is_begin else end


def _joined(pieces: list[str], piece: str) -> str:
    """Return the next piece of a string. If the border separates a pair of surrogates, join the pair."""
    if not pieces or _PAIR.fullmatch(pieces[-1][-1:] + piece[:1]) is None:
        return piece
    pair = (pieces[-1][-1] + piece[0]).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    pieces[-1] = pieces[-1][:-1]
    return pair + piece[1:]
