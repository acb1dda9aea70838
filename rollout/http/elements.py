"""What a body costs to parse, counted before it is parsed.

Parsing JSON and checking its fields holds up everything else, for a time that grows with the number of elements and
hardly with their length. Promises that counting goes on in short steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .errors import HttpError

WEIGHTS = {b",": 1, b":": 4, b"[": 4, b"{": 16}
"""What an element costs, by the character that stands for it, in units of about 0.1 µs."""
_STEP_BYTES = 2**18
"""Counted in one step: about a millisecond."""
_BY_BYTE = np.zeros(256, np.uint8)
for _character, _weight in WEIGHTS.items():
    _BY_BYTE[ord(_character)] = _weight
_QUOTE = ord('"')


def check_elements(body: bytearray, most: int, is_setting: bool) -> Iterator[None]:
    """Raise HttpError for a body whose elements cost more than `most`, see `WEIGHTS`. Strings have no elements. Yields
    between steps. `is_setting`: whether `most` is the setting `max_body_elements`, which the error says to raise.
    """
    cost = 0
    for at in range(0, len(body), _STEP_BYTES):
        cost += rough_cost(body, at, at + _STEP_BYTES)
        yield
        if cost > most:
            break
    if cost <= most:
        return
    cost, in_string, at = 0, False, 0
    while at < len(body):
        step = _without_half_an_escape(body[at : at + _STEP_BYTES])
        at += len(step)
        added, in_string = _cost(step, in_string)
        if (cost := cost + added) > most:
            advice = "send several requests, or raise --max-body-elements" if is_setting else "send fewer elements"
            raise HttpError(
                413,
                f"body: its elements cost more than {most} (a comma counts 1, a member of an object and an array 4, an "
                f"object 16); {advice}",
                code="too_many_elements",
                limit="max_body_elements" if is_setting else None,
            )
        yield


def rough_cost(body: bytearray, start: int, end: int) -> int:
    """What a part of a body costs at most: as if strings had elements, too, which is quicker and mostly enough."""
    return sum(weight * body.count(character, start, end) for character, weight in WEIGHTS.items())


def _without_half_an_escape(step: bytearray) -> bytearray:
    """Drop a backslash at the end that escapes the next byte, unless the step has nothing else."""
    num_backslashes = len(step) - len(step.rstrip(b"\\"))
    return step[:-1] if num_backslashes % 2 and len(step) > 1 else step


def _cost(step: bytearray, in_string: bool) -> tuple[int, bool]:
    """What a part of a body costs, and whether it ends within a string. `in_string`: whether it begins in one."""
    characters = np.frombuffer(step.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    within = np.logical_xor.accumulate(characters == _QUOTE) ^ in_string
    cost = int(_BY_BYTE[characters[~within]].sum(dtype=np.int64))
    return cost, bool(within[-1]) if len(within) else in_string
