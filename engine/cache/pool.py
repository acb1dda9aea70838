"""The blocks of one group of layers: who uses them, which are free, and which hold the KV of a published prefix.

Owns each block's reference count, and the free blocks in order of reuse: empty ones, the one released last first, then
cached (published) ones, the one released least recently first. What a published block belongs to is the index's affair
(`prefix_cache`), which is told when a cached block is handed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Pool(Generic[Owner]):
    """`num_blocks` blocks. `evict(owner)` is called when the block that `owner` published is handed out."""

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
        """Blocks without a reference, published or not."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that are still published."""
        return len(self._cached)

    def is_cached(self, block: int) -> bool:
        """Whether a block is free and still published."""
        return block in self._cached

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Free blocks but for some."""
        return self.num_free - sum(block in self._cached for block in blocks)

    def take(self, count: int) -> list[int]:
        """References so many free blocks, of which there are enough."""
        return [self._take_free() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, in use or cached; cached ones are in use again."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each block. The last blocks are reused first, unpublished ones before all."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self.published:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def unpublish(self, block: int) -> None:
        """Takes a block from its owner; a free one is empty then."""
        del self.published[block]
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def unpublish_all(self) -> None:
        """Takes all blocks from their owners. Free ones are handed out next, the longest released one first: their
        memory has been used, that of others perhaps never.
        """
        self._empty.extend(reversed(self._cached))
        self._cached.clear()
        self.published.clear()

    def miscounted(self, held: Iterable[int]) -> set[int]:
        """The blocks that are not accounted for exactly by `held`, a block for each reference."""
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
