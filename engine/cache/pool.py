"""The references to the blocks of one pool, and the order in which free blocks are reused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Pool(Generic[Owner]):
    """The `num_blocks` blocks of a group. When a published block is reused, the pool calls `evict(owner)`."""

    def __init__(self, num_blocks: int, evict: Callable[[Owner], object]) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self.published: dict[int, Owner] = {}
        self._evict = evict
        self._references = [0] * num_blocks
        self._empty = list(reversed(range(num_blocks)))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """The number of blocks without a reference, whether they are published or unpublished."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The number of blocks that are free and still published."""
        return len(self._cached)

    def is_cached(self, block: int) -> bool:
        """Return whether a block is free and still published."""
        return block in self._cached

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Return the number of free blocks that are not in `blocks`."""
        return self.num_free - sum(block in self._cached for block in blocks)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. Enough blocks must be free."""
        return [self._take_free() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference per block. Each block must be in use or cached. A cached block becomes a block in use."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference per block.

        Unpublished blocks are reused before published blocks. If several of the freed blocks are published, the blocks
        that come later in `blocks` are reused first.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self.published:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def unpublish(self, block: int) -> None:
        """Remove the owner of a block. A free block is no longer cached afterwards."""
        del self.published[block]
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def unpublish_all(self) -> None:
        """Remove the owners of all blocks.

        Cached blocks become the next blocks to be reused, in the order of their release, because their memory is
        already allocated. Other free blocks may never have been used, so the system may not have allocated their memory
        yet.
        """
        self._empty.extend(reversed(self._cached))
        self._cached.clear()
        self.published.clear()

    def miscounted(self, held: Iterable[int]) -> set[int]:
        """Return the blocks with a wrong state or reference count.

        `held`: the blocks that should have references, each listed once per reference.
        """
        counts, free = Counter(held), Counter([*self._empty, *self._cached])
        blocks = range(self.num_blocks)
        wrong = {b for b in blocks if counts[b] != self._references[b] or free[b] != (counts[b] == 0)}
        wrong |= {b for b in self._empty if b in self.published}
        return wrong | {b for b in self._cached if b not in self.published}

    def _take_free(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.evictions += 1
            self._evict(self.published.pop(block))
        self._references[block] = 1
        return block
