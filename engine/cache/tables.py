"""Which blocks of KV memory a sequence holds, of each group of layers, and which of them it needs.

Layers of one window are a group, with a pool of blocks of their own; those without a window are the group of window
None. A sequence gives a block back once no later query of its can reach it.

Owns the pools, and what a window needs of a sequence. Does not own which blocks hold the KV of a published prefix
(`prefix_cache`), nor when a sequence gets blocks (`scheduling.scheduler`).

Promise: allocation happens whole or not at all.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trueroll.errors import InvalidRequestError

from .chains import Entry
from .pool import Pool


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence. Those of each group are as many; block i holds the KV of tokens [i * block_size, (i +
    1) * block_size) in that group's layers, from block `starts[group]` on. What is named before is not the sequence's.
    """

    blocks: list[array[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def held(self, group: int) -> array[int]:
        """The sequence's blocks of a group."""
        return self.blocks[group][self.starts[group] :]


class BlockTables:
    """Gives tables their blocks of `block_size` tokens, from the pool of each window; that of None, if there is one,
    comes first. `windowed`: the groups with a window, and their windows.
    """

    def __init__(self, pools: Mapping[int | None, Pool[Entry]], block_size: int) -> None:
        self.block_size = block_size
        self.windows, self.pools = list(pools), list(pools.values())
        self.windowed = [(group, window) for group, window in enumerate(pools) if window is not None]

    @property
    def num_available(self) -> int:
        """Blocks that can be had of each group at once."""
        return min(pool.num_free for pool in self.pools)

    @property
    def evictions(self) -> int:
        """How many cached blocks were handed out so far, of all groups."""
        return sum(pool.evictions for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """The most blocks that a sequence has of each group at a time until it has `num_tokens` tokens, which are
        computed in chunks of up to `chunk`.
        """
        whole = self.blocks_for(num_tokens)
        return [whole if w is None else min(whole, self.blocks_for(w + chunk - 2) + 1) for w in self.windows]

    def first_needed(self, window: int, num_tokens: int) -> int:
        """The first block that the token at `num_tokens`, and those after it, can reach."""
        return max(0, num_tokens - window + 1) // self.block_size

    def can_hold(self, hits: Sequence[Entry], num_tokens: int, chunk: int) -> bool:
        """Whether there is room for a sequence that goes on from the hits to `num_tokens` tokens, in chunks of up to
        `chunk`, or shorter ones where a window has so few blocks.
        """
        table, fresh = self._hit_table(hits), self.blocks_for(num_tokens) - len(hits)
        for group, needed in enumerate(self.blocks_needed(num_tokens, chunk)):
            pool, held = self.pools[group], table.held(group)
            if self.windows[group] is not None:
                needed = min(needed, max(1, pool.num_blocks - len(held)))
            if min(fresh, needed) > pool.num_free_beside(held):
                return False
        return True

    def check_fits(self, num_tokens: int) -> None:
        """Raise InvalidRequestError if a sequence of `num_tokens` could not run even alone."""
        for needed, pool in zip(self.blocks_needed(num_tokens), self.pools, strict=True):
            if needed > pool.num_blocks:
                raise InvalidRequestError(
                    f"request needs {needed} KV blocks of {self.block_size} tokens for {num_tokens} tokens, but there "
                    f"are {pool.num_blocks}; ask for fewer tokens or start the worker with more KV memory",
                    value=needed,
                    limit=pool.num_blocks,
                )

    def allocate(self, hits: Sequence[Entry], num_new: int) -> Table:
        """References what a sequence needs to go on from the hits, and `num_new` fresh blocks of each group, which
        follow. Raise RuntimeError if too few are free.
        """
        table = self._hit_table(hits)
        free = min(pool.num_free_beside(table.held(group)) for group, pool in enumerate(self.pools))
        if num_new > free:
            raise RuntimeError(f"prefix cache: expected {num_new} free blocks beside the hits, found {free}")
        for group, pool in enumerate(self.pools):
            pool.share(table.held(group))
        self.extend(table, num_new)
        return table

    def extend(self, table: Table, num_new: int) -> None:
        """Adds so many fresh blocks of each group to a table; there are enough."""
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            blocks.extend(pool.take(num_new))

    def fork(self, table: Table, num_tokens: int) -> tuple[Table, list[dict[int, int]]]:
        """A second table of the first `num_tokens` tokens of one, with its full blocks, and a fresh one for what is
        left; of each group what has to be copied, destination to source. There are enough free blocks.
        """
        num_full = num_tokens // self.block_size
        child = Table([blocks[:num_full] for blocks in table.blocks], table.starts.copy())
        for group, pool in enumerate(self.pools):
            pool.share(child.held(group))
        self.extend(child, len(table) - num_full)
        pairs = zip(child.blocks, table.blocks, strict=True)
        return child, [dict(zip(new[num_full:], old[num_full:], strict=True)) for new, old in pairs]

    def give_back(self, table: Table, num_computed: int) -> None:
        """Releases the blocks of a table that no query from `num_computed` on can reach. What of them is to be found
        again was published before.
        """
        for group, window in self.windowed:
            start, first = table.starts[group], self.first_needed(window, num_computed)
            if start < first:
                self.pools[group].release(table.blocks[group][start:first])
                table.starts[group] = first

    def leave_windows(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Whether a window leaves a block behind, for each sequence that went on from `starts` to `ends`: bool [N]."""
        left = np.zeros(len(ends), np.bool_)
        for _, window in self.windowed:
            before, after = ((tokens - window + 1).clip(0) // self.block_size for tokens in (starts, ends))
            left |= before < after
        return left

    def release(self, table: Table) -> None:
        """Releases all blocks of a table."""
        for group, pool in enumerate(self.pools[: len(table.blocks)]):
            pool.release(table.held(group))

    def _hit_table(self, hits: Sequence[Entry]) -> Table:
        """What is needed of the blocks of a prefix that can be resumed."""
        num_tokens = len(hits) * self.block_size
        starts = [0 if window is None else self.first_needed(window, num_tokens) for window in self.windows]
        blocks = [array("q", [entry.blocks[group] or 0 for entry in hits]) for group in range(len(self.pools))]
        return Table(blocks, starts)
