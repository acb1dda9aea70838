"""A sample while it grows, put together from deltas and cut into others: the worker does that for clients which read
slowly, the client for callers who take slowly.
"""

from __future__ import annotations

from ...engine.columns import TOKENS, Column
from .columns import bytes_within, fields_of, num_listed
from .messages import Delta, FinishedSample


class Growth:
    """A sample from its first token on, as far as `first` and what was put behind it say.

    `first` begins with token 0; its id and its index are the sample's.
    """

    def __init__(self, first: Delta) -> None:
        self.id, self.index = first.id, first.index
        self._k = num_listed(first)
        self._columns = {column: bytearray(content) for column, content in _columns(first).items()}

    @property
    def num_tokens(self) -> int:
        """How many are known."""
        return len(self._columns[TOKENS]) // 4

    def put(self, delta: Delta) -> bool:
        """Adds what is new in a delta. False, and nothing changes, if it differs from what is known or leaves tokens
        out.
        """
        found, num_known = _columns(delta), self.num_tokens - delta.start
        if num_known < 0 or found.keys() != self._columns.keys() or num_listed(delta) != self._k:
            return False
        widths = {column: column.num_bytes(self._k) for column in found}
        known = self._columns
        if not all(_agree(known[column], new, widths[column] * delta.start) for column, new in found.items()):
            return False
        for column, new in found.items():
            known[column] += new[widths[column] * num_known :]
        return True

    def part(self, start: int, max_bytes: int | None = None) -> Delta:
        """The tokens from `start` on; with `max_bytes` only those which take no more than that, but at least one."""
        widths = {column: column.num_bytes(self._k) for column in self._columns}
        room = self.num_tokens if max_bytes is None else max(1, max_bytes // sum(widths.values()))
        content = {
            column: bytes(known[widths[column] * start : widths[column] * (start + room)])
            for column, known in self._columns.items()
        }
        token_ids = content.pop(TOKENS)
        return Delta(id=self.id, index=self.index, start=start, token_ids=token_ids, **fields_of(content, self._k))


def delta_of(sample: FinishedSample) -> Delta:
    """All of a finished sample, as one delta."""
    return Delta(
        id=sample.id,
        index=sample.index,
        start=0,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        tops=sample.tops,
    )


def _columns(delta: Delta) -> dict[Column, bytes]:
    """The tokens of a delta, and their columns."""
    return {TOKENS: delta.token_ids, **bytes_within(delta)}


def _agree(known: bytearray, new: bytes, start: int) -> bool:
    """Whether what begins at byte `start` has the bytes that are known, as far as both go."""
    count = min(len(known) - start, len(new))
    return known[start : start + count] == new[:count]
