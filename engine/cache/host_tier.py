"""The host tier: which slots of host memory hold the content of blocks and state checkpoints that left the device.

When the device reuses a cached block, the block's content is copied to a slot. The entry of the prefix index then
refers to the slot instead of the block. A lookup finds such an entry like any other entry: by epoch, hash, token ids,
extra identity and parent. Before a sequence resumes after an entry that refers to a slot, the slot's content is copied
to a fresh block. A block's content is therefore either on the device or on the host. To restore a checkpoint, the
checkpoint is copied to the running sequence's own slot on the device; the host keeps the checkpoint.

The address of a host slot is called its place: slot s has the place -1 - s. The addresses of blocks are never negative.
Every copy is a pair (source, destination) of addresses. Copies are appended to a list, and are made in the order of the
list, before the next step computes. A slot can therefore be reused as soon as the copy that reads the slot is in the
list of copies.

This module does not own the memory of the slots (`host_memory`) or the entries (`prefix_cache`).

Guarantees:

- A slot is reused only after all copies that read the slot, so a hit restores the content of the entry.
- The least recently used slot is reused first. Reusing a slot removes the slot from its entry.
- `clear` makes all slots unreachable at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic

from .pool import Owner, Pool

Copies = list[tuple[int, int]]


class HostTier(Generic[Owner]):
    """`sizes[i]` slots for blocks of group i. When the tier reuses a slot, it calls `lose(i, owner)`. The tier appends
    its copies to `copies[i]`. `num_stored`: the number of copies to the host so far. `num_restored`: the number of
    copies back to the device so far.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        copies: Sequence[Copies],
        lose: Callable[[int, Owner], object] = lambda i, owner: None,
    ) -> None:
        self.pools = [Pool[Owner](size, partial(lose, group)) for group, size in enumerate(sizes)]
        self.num_stored = self.num_restored = 0
        self._copies = copies

    @property
    def num_evicted(self) -> int:
        """The number of slots that were reused while they held content."""
        return sum(pool.evictions for pool in self.pools)

    def store(self, group: int, block: int, owner: Owner) -> int | None:
        """Copy a block to a slot and return the slot's place, or return None if no slot is available."""
        pool = self.pools[group]
        if not pool.num_free:
            return None
        [slot] = pool.take(1)
        pool.published[slot] = owner
        pool.release([slot])
        self._copies[group].append((block, ~slot))
        self.num_stored += 1
        return ~slot

    def hold(self, group: int, places: Iterable[int]) -> None:
        """Keep slots from being reused until `release`."""
        self.pools[group].share([~place for place in places])

    def restore(self, group: int, place: int, block: int) -> None:
        """Copy a held slot to a block."""
        self._copies[group].append((place, block))
        self.num_restored += 1

    def release(self, group: int, place: int) -> None:
        """Allow a held slot to be reused again. The slot becomes the most recently used slot."""
        self.pools[group].release([~place])

    def drop(self, group: int, place: int) -> None:
        """Forget the content of a slot."""
        self.pools[group].unpublish(~place)

    def clear(self) -> None:
        """Forget the content of all slots."""
        for pool in self.pools:
            pool.unpublish_all()
