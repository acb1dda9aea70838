"""Answers as JSON: estimate the size of an answer before the request is accepted, and write answers in steps.

Long lists in an answer are `Rows`, which produce their elements only when they are written. One step writes about
`STEP_ENTRIES` list entries. The event loop runs other work after about every `TURN_CHARS` characters of a long
answer. At any time, only a part of a long answer is in memory as JSON.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np

from ...engine.request import SamplingParams
from .errors import HttpError
from .turns import Turns

STEP_ENTRIES = 512
"""Number of entries written in one step. A step takes about a millisecond. Each token is one entry. Each alternative in
a token's list of most probable tokens is another entry.
"""
TURN_CHARS = 2**11
PART_BYTES = 2**16
_CHOICE_BYTES = 512
"""Estimated size of a choice without its tokens, in bytes."""


@dataclass(frozen=True)
class TokenBytes:
    """Estimated JSON size of a token in an answer, in bytes. Most tokens need fewer bytes than estimated, and tokens
    with long texts need more.

    `new`: bytes per generated token. `prompt`: bytes per prompt token; prompt tokens are counted once for each choice.
    """

    new: int
    prompt: int = 0

    ID = 11
    """A token id with its separator."""
    TEXT = 32
    """The text of a token: 32 ASCII letters, or 5 escaped non-ASCII characters."""
    NUMBER = 24
    """A log-prob with its separator."""

    def __add__(self, other: TokenBytes) -> TokenBytes:
        return TokenBytes(self.new + other.new, self.prompt + other.prompt)

    def of_choice(self, prompt_len: int, num_new: int) -> int:
        """Return the estimated size of a choice in bytes."""
        return _CHOICE_BYTES + num_new * self.new + prompt_len * self.prompt


def check_answer(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int, token_bytes: TokenBytes, most: int
) -> None:
    """Raise HttpError if the estimated size of the answer to a request exceeds `most` bytes."""
    lens = [(len(prompt), params.max_tokens or max(1, max_model_len - len(prompt))) for prompt in prompts]
    planned = params.n * sum(token_bytes.of_choice(*each) for each in lens)
    if planned > most:
        raise HttpError(
            400,
            f"max_tokens: the answer may need {planned} bytes (limit {most}) for {params.n * len(prompts)} samples of "
            f"up to {max(new for _, new in lens)} tokens at {token_bytes.new} bytes per token; lower max_tokens, n or "
            "the number of log-probs, set top_k if a sampling mask is requested, set stream to true, or raise "
            "--max-answer-bytes",
            field="max_tokens",
            value=planned,
            limit=most,
            code="answer_too_large",
            setting="max_answer_bytes",
        )


class Rows:
    """A list that produces its elements only when it is written. A `Rows` can be written only once.

    `width`: number of entries per element; None if each element is an object that contains `Rows`.
    """

    def __init__(self, elements: Iterable[Any], width: int | None = 1) -> None:
        self.elements, self.width = iter(elements), width


class Binary:
    """An array that is written as a JSON string: the bytes of a file in NumPy's format .npy, in base64. Only a part of
    the string is in memory at a time.

    `has_header`: whether the string contains the header of the file, with dtype and shape, and not only the elements.
    """

    def __init__(self, array: np.ndarray, has_header: bool = True) -> None:
        self._array, self._has_header = np.ascontiguousarray(array), has_header

    @staticmethod
    def num_chars(num_bytes: int) -> int:
        """Return the length of the base64 string for an array of `num_bytes` bytes, without the header of the .npy
        file.
        """
        return -(-4 * num_bytes // 3)

    def parts(self) -> Iterator[str]:
        """Yield the base64 string in parts of at most `TURN_CHARS` * 4 characters."""
        begun, content = self._header(), self._array.reshape(-1).data.cast("B")
        size = 3 * TURN_CHARS
        first = max(0, size - len(begun))
        yield b64encode(begun + content[:first]).decode()
        for start in range(first, len(content), size):
            yield b64encode(content[start : start + size]).decode()

    def _header(self) -> bytes:
        head = BytesIO()
        if self._has_header:
            np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(self._array))
        return head.getvalue()


def rows(elements: Iterable[Any], count: int, width: int = 1) -> Rows | list[Any]:
    """Return `count` elements as `Rows`. If `count` is small, return a plain list, which is faster to write."""
    return list(elements) if count * width <= STEP_ENTRIES else Rows(elements, width)


def encoded(content: Any) -> bytes:
    """Encode a value as JSON.

    Floats are written with the shortest digits that round-trip. Non-ASCII characters are escaped, because some clients
    treat U+2028 and similar characters in an event as line ends.
    """
    return _dumps(content).encode()


async def encoded_in_parts(content: Any, turns: Turns) -> AsyncGenerator[bytes, None]:
    """Yield the bytes that `encoded` would return, in parts of about `PART_BYTES`. The event loop runs other work
    between two steps of the encoder.
    """
    held, size, since_turn = [], 0, 0
    for step in _steps(content):
        held.append(step)
        size += len(step)
        since_turn += len(step)
        if since_turn >= TURN_CHARS:
            since_turn = 0
            await turns.next()
        if size >= PART_BYTES:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()


def _steps(value: Any) -> Iterator[str]:
    """Yield the JSON of a value as short strings, one string per step."""
    if isinstance(value, dict):
        yield "{"
        for i, (name, member) in enumerate(value.items()):
            yield f"{',' * bool(i)}{_dumps(name)}:"
            yield from _steps(member)
        yield "}"
    elif isinstance(value, Rows) and value.width is None:
        yield "["
        for i, element in enumerate(value.elements):
            yield "," * bool(i)
            yield from _steps(element)
        yield "]"
    elif isinstance(value, Rows) or isinstance(value, list) and len(value) > STEP_ENTRIES:
        yield "["
        for i, step in enumerate(_lists(value)):
            yield "," * bool(i) + _dumps(step)[1:-1]
        yield "]"
    elif isinstance(value, Binary):
        yield '"'
        yield from value.parts()
        yield '"'
    elif isinstance(value, str) and len(value) > TURN_CHARS:
        yield '"'
        for start in range(0, len(value), TURN_CHARS):
            yield _dumps(value[start : start + TURN_CHARS])[1:-1]
        yield '"'
    else:
        yield _dumps(value)


def _lists(value: Rows | list[Any]) -> Iterator[list[Any]]:
    """Yield the elements of a list as short lists, one short list per step."""
    elements, width = (value.elements, value.width) if isinstance(value, Rows) else (iter(value), 1)
    while step := list(islice(elements, max(1, STEP_ENTRIES // (width or 1)))):
        yield step


def _all_of(value: Any) -> list[Any] | str:
    if isinstance(value, Binary):
        return "".join(value.parts())
    if not isinstance(value, Rows):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return list(value.elements)


_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_all_of).encode
