"""The cost of parsing a body, computed before the body is parsed.

The event loop is blocked while a JSON body is parsed and its fields are checked. The parsing time depends mainly on the
number of elements, not on the length of the elements. Guarantees that the cost is computed in short steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .errors import HttpError

WEIGHTS = {b",": 1, b":": 4, b"[": 4, b"{": 16, b".": 6}
"""Cost of an element in units of about 0.1 µs, by the character that marks the element. A dot marks a float."""
MAX_DIGITS = 40
"""Maximum number of consecutive digits. Longer numbers are refused, because the time to parse a number grows with the
square of its length.
"""
_STEP_BYTES = 2**18
"""Number of bytes counted in one step. A step takes about a millisecond."""
_BY_BYTE = np.zeros(256, np.uint8)
for _character, _weight in WEIGHTS.items():
    _BY_BYTE[ord(_character)] = _weight
_QUOTE = ord('"')
_AS_ZEROS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def check_elements(body: bytearray, most: int, is_setting: bool) -> Iterator[None]:
    """Check the cost of a body's elements in steps, and yield between steps.

    Raise HttpError if the total cost, computed with `WEIGHTS`, exceeds `most`, or if a number has more than
    `MAX_DIGITS` consecutive digits. The content of strings costs nothing. `is_setting`: whether `most` is the setting
    `max_body_elements`. If `is_setting` is true, the error advises the client to raise `max_body_elements`.
    """
    cost, has_long = 0, False
    for at in range(0, len(body), _STEP_BYTES):
        cost += rough_cost(body, at, at + _STEP_BYTES)
        has_long = has_long or _has_long_number(body[at : at + _STEP_BYTES])
        yield
        if cost > most:
            break
    if cost <= most and not has_long:
        return
    cost, in_string, at = 0, False, 0
    while at < len(body):
        step = _without_half_an_escape(body[at : at + _STEP_BYTES])
        at += len(step)
        outside, in_string = _outside_of_strings(step, in_string)
        if _has_long_number(outside.tobytes()):
            text = f"body: a number has too many digits in a row (limit {MAX_DIGITS}); shorten the number"
            raise HttpError(400, text, limit=MAX_DIGITS, code="invalid_json")
        if (cost := cost + int(_BY_BYTE[outside].sum(dtype=np.int64))) > most:
            advice = "send several requests, or raise --max-body-elements" if is_setting else "send fewer elements"
            raise HttpError(
                413,
                f"body: too many elements (limit {most}, where a comma counts as 1, an object member or an array as 4, "
                f"a float as 6, an object as 16); {advice}",
                limit=most,
                code="too_many_elements",
                setting="max_body_elements" if is_setting else None,
            )
        yield


def rough_cost(body: bytearray, start: int, end: int) -> int:
    """Return an upper bound on the cost of body[start:end].

    The bound includes the content of strings. Skipping strings would be slower, and the bound is usually precise
    enough.
    """
    return sum(weight * body.count(character, start, end) for character, weight in WEIGHTS.items())


def _has_long_number(part: bytes | bytearray) -> bool:
    """Return whether `part` has more than `MAX_DIGITS` consecutive digits.

    Uses `translate`, because a regular expression would take ten times as long.
    """
    return _LONG_NUMBER in part.translate(_AS_ZEROS)


def _without_half_an_escape(step: bytearray) -> bytearray:
    """Return `step`, a part of a body, without its last byte if that byte is a backslash that escapes the next byte of
    the body.

    A `step` of a single byte is returned unchanged.
    """
    num_backslashes = len(step) - len(step.rstrip(b"\\"))
    return step[:-1] if num_backslashes % 2 and len(step) > 1 else step


def _outside_of_strings(step: bytearray, in_string: bool) -> tuple[np.ndarray, bool]:
    """Return the bytes of `step` (a part of a body) that are outside of strings, as a uint8 array. Also return whether
    `step` ends within a string.

    `in_string`: whether the part begins within a string.
    """
    characters = np.frombuffer(step.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    within = np.logical_xor.accumulate(characters == _QUOTE) ^ in_string
    return characters[~within], bool(within[-1]) if len(within) else in_string
