"""Routed experts as a record: which ones each layer with experts chose for each token, when the token was fed.

The record of a token is one row: for each layer with experts the ids of those chosen, ascending. The last token of a
sample is never fed, so it has none. A row is written once: after a change of weights the tokens that were drawn before
are fed again, and keep the row that the draw behind them came from, as they keep their log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RouteFormat:
    """The rows of a model: in each of `layers` layers the ids of `top_k` of `num_experts` experts."""

    layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """Of an id: uint8, or uint16 beyond 256 experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """Those of a token."""
        return self.layers * self.top_k * self.dtype.itemsize

    def array(self, rows: bytes) -> np.ndarray:
        """Rows as an array [num_tokens, layers, top_k], writable."""
        return np.frombuffer(rows, self.dtype).reshape(-1, self.layers, self.top_k).copy()


class Routes:
    """The rows of tokens [0, num_rows) of one sequence, each `row_bytes` long.

    `fresh`: from which row on they were computed with the weights of the sequence's chain, so that what is published
    may have them.
    """

    def __init__(self, row_bytes: int, shared: bytes = b"", fresh: int = 0) -> None:
        self.row_bytes = row_bytes
        self.fresh = fresh
        self.shared = shared  # by the samples of a group: the first rows
        self.own = bytearray()

    @property
    def num_rows(self) -> int:
        """Tokens that have their row."""
        return (len(self.shared) + len(self.own)) // self.row_bytes

    def begin(self, rows: bytes) -> None:
        """Takes the place of all that is known, for a sequence that begins to be computed."""
        self.shared, self.own, self.fresh = rows, bytearray(), 0

    def put(self, start: int, rows: memoryview) -> None:
        """Adds what is new in the rows of the tokens from `start` on, none of which lies beyond those known."""
        self.own += rows[(self.num_rows - start) * self.row_bytes :]

    def fork(self) -> Routes:
        """A record that begins with the same rows, in the same memory, and goes on by itself."""
        if self.own:
            self.shared, self.own = self.shared + self.own, bytearray()
        return Routes(self.row_bytes, self.shared, self.fresh)

    def rows(self, start: int, end: int) -> bytes:
        """Those of tokens [start, end), which are known."""
        assert end <= self.num_rows
        first, last, border = start * self.row_bytes, end * self.row_bytes, len(self.shared)
        return self.shared[first:last] + bytes(self.own[max(0, first - border) : max(0, last - border)])
