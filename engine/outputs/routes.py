"""The record of routed experts: the experts that each layer with experts chose for each token that was fed.

The record of a token is one row. For each layer with experts, the row lists the ids of the chosen experts in ascending
order. The last token of a sample is never fed and has no row. A row is written once. After a change of weights, the
tokens drawn before are fed again but keep their rows: like its log-prob, the row of a token comes from the weights that
drew the next token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RouteFormat:
    """The format of a model's rows: in each of `layers` layers the ids of `top_k` out of `num_experts` experts."""

    layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an expert id: uint8, or uint16 with more than 256 experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """The bytes of the row of one token."""
        return self.layers * self.top_k * self.dtype.itemsize

    def array(self, rows: bytes) -> np.ndarray:
        """Return rows as a writable array [num_tokens, layers, top_k]."""
        return np.frombuffer(rows, self.dtype).reshape(-1, self.layers, self.top_k).copy()

    def count(self, rows: bytes) -> np.ndarray:
        """Return how many of the rows list each expert, int64 [layers, num_experts]."""
        counts = np.zeros((self.layers, self.num_experts), np.int64)
        np.add.at(counts, (np.arange(self.layers)[:, None], self.array(rows)), 1)
        return counts


class Routes:
    """The rows of tokens [0, num_rows) of one sequence, each of `row_bytes` bytes.

    `fresh`: the first row that was computed with the weights of the sequence's chain. Only rows from this row on may be
    published.
    """

    def __init__(self, row_bytes: int, shared: bytes = b"", fresh: int = 0) -> None:
        self.row_bytes = row_bytes
        self.fresh = fresh
        self.shared = shared  # the first rows, shared by the samples of a group
        self.own = bytearray()

    @property
    def num_rows(self) -> int:
        """The number of tokens with a row."""
        return (len(self.shared) + len(self.own)) // self.row_bytes

    def begin(self, rows: bytes) -> None:
        """Replace all rows by `rows`, when the computation of the sequence begins."""
        self.shared, self.own, self.fresh = rows, bytearray(), 0

    def put(self, start: int, rows: memoryview) -> None:
        """Append the rows that are not recorded yet.

        `rows`: the rows of the tokens from `start` on. `start` must be at most `num_rows`.
        """
        self.own += rows[(self.num_rows - start) * self.row_bytes :]

    def fork(self) -> Routes:
        """Return a record that shares the current rows in memory and grows independently."""
        if self.own:
            self.shared, self.own = self.shared + self.own, bytearray()
        return Routes(self.row_bytes, self.shared, self.fresh)

    def rows(self, start: int, end: int) -> bytes:
        """Return the rows of tokens [start, end), which must be recorded."""
        assert end <= self.num_rows
        first, last, border = start * self.row_bytes, end * self.row_bytes, len(self.shared)
        return self.shared[first:last] + bytes(self.own[max(0, first - border) : max(0, last - border)])
