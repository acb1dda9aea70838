"""What a body costs to parse, counted before it is parsed.

Parsing JSON and checking its fields holds up everything else, for a time that grows with the number of elements and
hardly with their length. Promises that counting goes on in short steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .errors import HttpError

WEIGHTS = {b",": 1, b":": 4, b"[": 4, b"{": 16, b".": 6}
"""What an element costs, by the character that stands for it, in units of about 0.1 µs. A dot stands for a float."""
MAX_DIGITS = 40
"""Of a number: the time to read one grows with the square of its digits."""
_STEP_BYTES = 2**18
"""Counted in one step: about a millisecond."""
_BY_BYTE = np.zeros(256, np.uint8)
for _character, _weight in WEIGHTS.items():
    _BY_BYTE[ord(_character)] = _weight
_QUOTE = ord('"')
_AS_ZEROS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def check_elements(body: bytearray, most: int, is_setting: bool) -> Iterator[None]:
    """Raise HttpError for a body whose elements cost more than `most`, see `WEIGHTS`, or that has a number of more than
    `MAX_DIGITS` digits in a row. Strings have no elements. Yields between steps. `is_setting`: whether `most` is the
    setting `max_body_elements`, which the error says to raise.
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
            text = f"body: a number has more than {MAX_DIGITS} digits in a row; give fewer"
            raise HttpError(400, text, limit=MAX_DIGITS, code="invalid_json")
        if (cost := cost + int(_BY_BYTE[outside].sum(dtype=np.int64))) > most:
            advice = "send several requests, or raise --max-body-elements" if is_setting else "send fewer elements"
            raise HttpError(
                413,
                f"body: its elements cost more than {most} (a comma counts 1, a member of an object and an array 4, a "
                f"float 6, an object 16); {advice}",
                limit=most,
                code="too_many_elements",
                setting="max_body_elements" if is_setting else None,
            )
        yield


def rough_cost(body: bytearray, start: int, end: int) -> int:
    """What a part of a body costs at most: as if strings had elements, too, which is quicker and mostly enough."""
    return sum(weight * body.count(character, start, end) for character, weight in WEIGHTS.items())


def _has_long_number(part: bytes | bytearray) -> bool:
    """Whether there are more than `MAX_DIGITS` digits in a row. A regular expression takes ten times as long."""
    return _LONG_NUMBER in part.translate(_AS_ZEROS)


def _without_half_an_escape(step: bytearray) -> bytearray:
    """Drop a backslash at the end that escapes the next byte, unless the step has nothing else."""
    num_backslashes = len(step) - len(step.rstrip(b"\\"))
    return step[:-1] if num_backslashes % 2 and len(step) > 1 else step


def _outside_of_strings(step: bytearray, in_string: bool) -> tuple[np.ndarray, bool]:
    """The bytes of a part that are in no string, uint8, and whether it ends within one. `in_string`: whether it begins
    in one.
    """
    characters = np.frombuffer(step.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    within = np.logical_xor.accumulate(characters == _QUOTE) ^ in_string
    return characters[~within], bool(within[-1]) if len(within) else in_string
