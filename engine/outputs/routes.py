"""Records of routed experts: the experts that each MoE layer chose for each token fed to the model.

Each token has one row. For each layer with experts, a token's row lists the ids of the chosen experts in ascending
order. The last token of a sample has no row, because it is never fed to the model. A row is written once: if the
weights change and a token is fed to the model again, the token's row stays the same. The row of a token was therefore
computed with the weights that drew the next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import numpy as np


@dataclass(frozen=True)
class RouteFormat:
    """The format of a row: for each of `layers` layers, the ids of the `top_k` experts chosen from `num_experts`."""

    layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an expert id: uint8, or uint16 if there are more than 256 experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """The size of one token's row, in bytes."""
        return self.layers * self.top_k * self.dtype.itemsize

    def array(self, rows: bytes) -> np.ndarray:
        """Return rows as a writable array [num_tokens, layers, top_k]."""
        return np.frombuffer(rows, self.dtype).reshape(-1, self.layers, self.top_k).copy()

    def count(self, rows: bytes) -> np.ndarray:
        """Return the number of rows that list each expert, as an int64 array [layers, num_experts]."""
        counts = np.zeros((self.layers, self.num_experts), np.int64)
        np.add.at(counts, (np.arange(self.layers)[:, None], self.array(rows)), 1)
        return counts


class OpenRoutes:
    """The rows of all sequences that have rows. A sequence that waits for its first step has none, so the memory of the
    rows is counted without a look at waiting sequences.
    """

    def __init__(self) -> None:
        self._filled: WeakSet[Routes] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """The size of all rows, in bytes."""
        shared = {id(routes.shared): len(routes.shared) for routes in self._filled}
        return sum(shared.values()) + sum(len(routes.own) for routes in self._filled)

    def note(self, routes: Routes) -> None:
        """Count the rows of `routes` until the sequence is gone."""
        self._filled.add(routes)


class Routes:
    """The rows of tokens [0, num_rows) of one sequence. Each row takes `row_bytes` bytes. `open_routes` counts the
    bytes of all rows.

    `fresh`: the index of the first row that was computed with the weights of the sequence's current chain
    (`cache.prefix_cache.Chain`). Rows before `fresh` are never attached to entries of the prefix cache.
    """

    def __init__(self, open_routes: OpenRoutes, row_bytes: int, shared: bytes = b"", fresh: int = 0) -> None:
        self._open_routes, self.row_bytes = open_routes, row_bytes
        self.fresh = fresh
        self.shared = shared  # the first rows, shared by all samples of a request
        self.own = bytearray()

    @property
    def num_rows(self) -> int:
        """The number of tokens with a row."""
        return (len(self.shared) + len(self.own)) // self.row_bytes

    def begin(self, rows: bytes) -> None:
        """Replace all rows with `rows`. The scheduler calls `begin` when the sequence starts to run."""
        self.shared, self.own, self.fresh = rows, bytearray(), 0
        self._open_routes.note(self)

    def put(self, start: int, rows: memoryview) -> None:
        """Append rows, skipping the rows that are already recorded.

        `rows`: the rows of the tokens from `start` on. `start` must be at most `num_rows`.
        """
        if not self.own:
            self._open_routes.note(self)
        self.own += rows[(self.num_rows - start) * self.row_bytes :]

    def fork(self) -> Routes:
        """Return a record that shares the memory of the current rows. Rows appended later are not shared."""
        if self.own:
            self.shared, self.own = self.shared + self.own, bytearray()
        child = Routes(self._open_routes, self.row_bytes, self.shared, self.fresh)
        self._open_routes.note(child)
        return child

    def rows(self, start: int, end: int) -> bytes:
        """Return the rows of tokens [start, end). Each of the tokens must have a recorded row."""
        assert end <= self.num_rows
        first, last, border = start * self.row_bytes, end * self.row_bytes, len(self.shared)
        return self.shared[first:last] + bytes(self.own[max(0, first - border) : max(0, last - border)])
