"""Routed experts of published prefixes. For some entries of the prefix index, this module stores one row of expert ids
per token.

This module owns the map from an index entry to the rows of the entry's own tokens, the order in which rows were last
used, and the capacity. The module does not own the published prefixes (`prefix_cache`), the format of rows, the rows of
a sequence (`outputs.routes`), or the decision when rows are added and used (`scheduler`).

An entry gets its rows from a sequence that computes the entry's block and records routed experts. The sequence that
supplies the rows may differ from the sequence that published the block. Rows are not part of an entry's identity, and
are dropped with the entry.

Guarantees: at most `capacity` entries have rows. At the limit, new rows replace the least recently used rows. An entry
that loses its rows stays in the index. A sequence that needs the missing rows computes the block again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .prefix_cache import Entry


class RouteRecords:
    """The routed experts of up to `capacity` blocks, with `block_bytes` bytes per block."""

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.capacity = capacity
        self.block_bytes = block_bytes
        self._rows: OrderedDict[Entry, bytes] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The size of all rows, in bytes."""
        return len(self._rows) * self.block_bytes

    def recorded(self, run: Sequence[Entry]) -> list[Entry]:
        """Return the entries that precede the first entry without rows. `run`: consecutive entries."""
        count = next((i for i, entry in enumerate(run) if entry not in self._rows), len(run))
        return list(run[:count])

    def attach(self, entry: Entry, rows: bytes) -> None:
        """Attach rows to an entry of the index. Rows that the entry already has must be equal to the new rows."""
        self._rows[entry] = rows
        self._rows.move_to_end(entry)
        if len(self._rows) > self.capacity:
            self._rows.popitem(last=False)

    def rows(self, entries: Sequence[Entry]) -> bytes:
        """Return the concatenated rows of entries. Every entry must have rows."""
        # The first entry becomes the most recently used: without its rows, the rows of later entries are useless.
        for entry in reversed(entries):
            self._rows.move_to_end(entry)
        return b"".join([self._rows[entry] for entry in entries])

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop the rows of removed entries."""
        for entry in entries:
            self._rows.pop(entry, None)

    def check_integrity(self, index: Iterable[Entry]) -> None:
        """Raise RuntimeError if an entry with rows is not in the index, or if the number or size of rows is wrong."""
        lost = self._rows.keys() - set(index)
        if lost or len(self._rows) > self.capacity or {*map(len, self._rows.values())} - {self.block_bytes}:
            raise RuntimeError(
                f"routes: {len(lost)} of {len(self._rows)} entries with routed experts are not in the index, or more "
                f"than {self.capacity} entries have routed experts, or the routed experts of an entry do not take "
                f"{self.block_bytes} bytes"
            )
