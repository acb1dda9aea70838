"""How many bytes an answer may take, estimated before its request is accepted, and how it is written without delaying
others.

An answer is JSON whose long lists are `Rows`, which are made while they are written. Promises that a step of writing
makes about `STEP_ENTRIES` entries, that everything else has a turn after about `TURN_CHARS` characters of any answers,
and that only a part of a long answer is in memory as JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...engine.request import SamplingParams
from .errors import HttpError
from .turns import Turns

STEP_ENTRIES = 512
"""Tokens, or tokens among the most probable ones, that are written in one step: about a millisecond."""
TURN_CHARS = 2**11
PART_BYTES = 2**16
_CHOICE_BYTES = 512
"""A choice without its tokens."""


@dataclass(frozen=True)
class TokenBytes:
    """Estimated bytes of JSON for a token in an answer. Most tokens take less; the few with long texts may take more.
    `new`: for a generated token. `prompt`: for a token of the prompt, in each choice.
    """

    new: int
    prompt: int = 0

    ID = 11
    """A token id with its separator."""
    TEXT = 32
    """The text of a token: 32 ASCII letters, or five characters beyond ASCII."""
    NUMBER = 24

    def of_choice(self, prompt_len: int, num_new: int) -> int:
        """The bytes of a choice."""
        return _CHOICE_BYTES + num_new * self.new + prompt_len * self.prompt


def check_answer(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int, token_bytes: TokenBytes, most: int
) -> None:
    """Raise HttpError if the answer to these prompts may take more than `most` bytes."""
    lens = [(len(prompt), params.max_tokens or max(1, max_model_len - len(prompt))) for prompt in prompts]
    planned = params.n * sum(token_bytes.of_choice(*each) for each in lens)
    if planned > most:
        raise HttpError(
            400,
            f"max_tokens: the answer may take {planned} bytes, more than {most}: {params.n * len(prompts)} samples of "
            f"up to {max(new for _, new in lens)} tokens, {token_bytes.new} bytes each with what is asked for; lower "
            "max_tokens, n or the number of log-probs, ask for a stream, or raise --max-answer-bytes",
            field="max_tokens",
            value=planned,
            limit=most,
            code="answer_too_large",
            setting="max_answer_bytes",
        )


class Rows:
    """A list whose elements are made while it is written, which can be done once. `width`: how many entries an element
    counts as; None: each element is an object with Rows of its own.
    """

    def __init__(self, elements: Iterable[Any], width: int | None = 1) -> None:
        self.elements, self.width = iter(elements), width


def rows(elements: Iterable[Any], count: int, width: int = 1) -> Rows | list[Any]:
    """`count` elements as `Rows`, or as a list where there are few, which is written faster."""
    return list(elements) if count * width <= STEP_ENTRIES else Rows(elements, width)


def encoded(content: Any) -> bytes:
    """Encode a value as JSON. Floats have the shortest digits that round-trip. Characters beyond ASCII are escaped,
    because some clients take U+2028 and the like for the end of an event's line.
    """
    return _dumps(content).encode()


async def encoded_in_parts(content: Any, turns: Turns) -> AsyncGenerator[bytes, None]:
    """Yield what `encoded` returns, in parts of about `PART_BYTES`. Everything else has a turn in between."""
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
    """The JSON of a value, cut where a step ends."""
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
    elif isinstance(value, str) and len(value) > TURN_CHARS:
        yield '"'
        for start in range(0, len(value), TURN_CHARS):
            yield _dumps(value[start : start + TURN_CHARS])[1:-1]
        yield '"'
    else:
        yield _dumps(value)


def _lists(value: Rows | list[Any]) -> Iterator[list[Any]]:
    """Yield the elements in lists that are one step long."""
    elements, width = (value.elements, value.width) if isinstance(value, Rows) else (iter(value), 1)
    while step := list(islice(elements, max(1, STEP_ENTRIES // (width or 1)))):
        yield step


def _all_of(value: Any) -> list[Any]:
    if not isinstance(value, Rows):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return list(value.elements)


_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_all_of).encode
