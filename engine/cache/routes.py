"""The routed experts of published prefixes: for some entries of the index, the rows of their block's tokens.

| owned here                                           | owned elsewhere                                            |
|------------------------------------------------------|------------------------------------------------------------|
| entry of the prefix index -> rows of its own tokens  | which prefixes there are (`prefix_cache`)                  |
| which of them were used least recently               | what a row is, and those of a sequence (`outputs.routes`)  |
| how many there may be                                | who needs them, and when there are new ones (`scheduler`)  |

An entry gets its rows from a sequence that records them while it computes the block, be that later than the one that
published it. They are no part of its identity, and they go with it. Promises: there are at most `capacity`; one more
takes the place of the one used least recently, whose entry stays, and is then computed again by whoever needs the rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .prefix_cache import Entry


class RouteRecords:
    """Rows of up to `capacity` blocks, each of `block_bytes` bytes."""

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.capacity = capacity
        self.block_bytes = block_bytes
        self._rows: OrderedDict[Entry, bytes] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What the rows take now."""
        return len(self._rows) * self.block_bytes

    def recorded(self, run: Sequence[Entry]) -> list[Entry]:
        """The longest beginning of a run of entries that all have their rows."""
        count = next((i for i, entry in enumerate(run) if entry not in self._rows), len(run))
        return list(run[:count])

    def attach(self, entry: Entry, rows: bytes) -> None:
        """Makes rows those of an entry of the index. Those that it has already are the same."""
        self._rows[entry] = rows
        self._rows.move_to_end(entry)
        if len(self._rows) > self.capacity:
            self._rows.popitem(last=False)

    def rows(self, entries: Sequence[Entry]) -> bytes:
        """The rows of entries that all have theirs, one behind the other."""
        # The first one is used last: without it, those behind it are of no use.
        for entry in reversed(entries):
            self._rows.move_to_end(entry)
        return b"".join([self._rows[entry] for entry in entries])

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drops the rows of entries that go."""
        for entry in entries:
            self._rows.pop(entry, None)

    def check_integrity(self, index: Iterable[Entry]) -> None:
        """Raise RuntimeError unless all that have rows are in the index, and there are not too many."""
        lost = self._rows.keys() - set(index)
        if lost or len(self._rows) > self.capacity or {*map(len, self._rows.values())} - {self.block_bytes}:
            raise RuntimeError(f"routes: {len(lost)} of {len(self._rows)} blocks are not in the index, or too many")
