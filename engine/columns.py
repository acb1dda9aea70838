"""Columns: what is recorded of each token of a sample beside the token, such as its log-prob.

One table says which columns there are. Whoever slices, joins or makes them, from the engine to the front end, does it
by this table, so that a new column is told to its fields, its message and its maker, and to nobody else.

A column is an array whose first axis goes with the tokens. Columns that nobody asked for are not there. Routed experts
are none of them, as they are recorded of the tokens of the prompt, too (`outputs.routes`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Column:
    """`name`: its field in `SampleOutput`, `SampleDelta` and `ScoreOutput`. `dtype`: of its elements, of which a token
    has one, or as many as `top_logprobs` asks for if it `is_listed`.
    """

    name: str
    dtype: str
    is_listed: bool = False

    def shape(self, rows: int, k: int) -> tuple[int, ...]:
        """That of the column of `rows` tokens with `k` elements listed."""
        return (rows, k) if self.is_listed else (rows,)

    def num_bytes(self, k: int) -> int:
        """Those of a token, with `k` elements listed."""
        return np.dtype(self.dtype).itemsize * (k if self.is_listed else 1)


TOKENS = Column("token_ids", "<i4")
"""The tokens themselves, where these lie beside their columns."""
LOGPROBS = Column("logprobs", "<f4")
TOPS = (Column("entropy", "<f4"), Column("top_token_ids", "<i4", True), Column("top_logprobs", "<f4", True))
"""What `top_logprobs` asks for."""
COLUMNS = (LOGPROBS, *TOPS)

Columns: TypeAlias = dict[str, np.ndarray]
"""Columns of the same tokens, by name, in the order of `COLUMNS`."""


def columns_of(output: Any) -> Columns:
    """Those of a `SampleOutput`, `SampleDelta` or `ScoreOutput`."""
    found = ((column.name, getattr(output, column.name)) for column in COLUMNS)
    return {name: values for name, values in found if values is not None}


def fields(columns: Columns) -> dict[str, Any]:
    """Columns as the fields of an output, None for those that are not there."""
    return {column.name: columns.get(column.name) for column in COLUMNS}


def new_columns(has_logprobs: bool, top_logprobs: int | None, rows: int = 0) -> Columns:
    """Those that are asked for, of `rows` tokens, filled with zeros."""
    asked = (LOGPROBS,) * has_logprobs + (TOPS if top_logprobs is not None else ())
    return {column.name: np.zeros(column.shape(rows, top_logprobs or 0), column.dtype) for column in asked}


def cut(columns: Columns, start: int, end: int | None = None) -> Columns:
    """Those of tokens [start, end)."""
    return {name: values[start:end] for name, values in columns.items()}


def join(first: Columns, rest: Columns) -> Columns:
    """Those of tokens, and of others behind them, of which the same is recorded."""
    return {name: np.concatenate((values, rest[name])) for name, values in first.items()}


class GrowingColumns:
    """Columns to which tokens are added one by one. `k`: how many elements of a token the listed ones have."""

    def __init__(self, columns: Sequence[Column], k: int) -> None:
        self._columns, self._k = columns, k
        self._num_tokens = 0
        self._content = [bytearray() for _ in columns]

    def append(self, values: Sequence[bytes]) -> None:
        """One more token, with its elements in each column."""
        self._num_tokens += 1
        for content, value in zip(self._content, values, strict=True):
            content += value

    def arrays(self, start: int = 0) -> Columns:
        """Those of the tokens from `start` on, writable."""
        k, rows = self._k, self._num_tokens - start
        parts = [(column, content[column.num_bytes(k) * start :]) for column, content in self._pairs()]
        return {column.name: np.frombuffer(part, column.dtype).reshape(column.shape(rows, k)) for column, part in parts}

    def _pairs(self) -> Iterator[tuple[Column, bytearray]]:
        return zip(self._columns, self._content, strict=True)
