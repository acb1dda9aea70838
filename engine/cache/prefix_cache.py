"""The index of known prefixes, over the blocks of KV memory that hold them.

| owned here                                             | owned elsewhere                                          |
|--------------------------------------------------------|----------------------------------------------------------|
| the hash index: prefix -> its blocks                   | the tensors that blocks are made of (`model_runner`)     |
| which prefixes can be resumed                          | each block's references, and which are free (`pool`)     |
|                                                        | what identifies a block, and its epoch (`chains`)        |
|                                                        | which sequence has which blocks (`tables`)               |
|                                                        | what is being computed (`claims`)                        |
|                                                        | when to allocate, fork or preempt (`scheduler`)          |

An entry of the index is a prefix that ends with a full block, and names the block of each group that holds the KV of
its last tokens, as long as that has not been handed out to others. What a sequence published may be hit after it gave
the block back, until that is handed out.

A prefix of L tokens can be resumed if the group of window None holds the KV of all its tokens, and a group of window W
that of tokens [L - W + 1, L), which is what the token at L attends to beside itself.

Promises: lookup changes nothing; a block in use is never evicted; a cached block can be hit until it is handed out
again, or until one in use, with the same KV, takes its place; a hit has the same token ids, extra identity and parents;
`invalidate` drops the index, puts the cached blocks next in line, and changes nothing else; what was computed under an
earlier epoch is never published afterwards. Nothing but `invalidate` and `check_integrity` costs more the more blocks
there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import le

from .chains import BlockIdentity, Chain, Entry
from .claims import Claims
from .pool import Pool
from .tables import BlockTables, Table


class PrefixCache:
    """Finds published prefixes of blocks of `block_size` tokens. `num_blocks`: how many the layers of each window
    share; those of window None, if there are such layers, come first.

    `tables`: who has which blocks. `identity`: what blocks are named by. `claims`: those that are being computed. With
    `enabled` false nothing is ever published, so that nothing is ever found. `forget` is told of entries that can be
    found no more.
    """

    def __init__(
        self,
        num_blocks: Mapping[int | None, int],
        block_size: int,
        enabled: bool = True,
        forget: Callable[[Iterable[Entry]], object] = lambda entries: None,
    ) -> None:
        pools = {w: Pool[Entry](count, partial(self._lose, i)) for i, (w, count) in enumerate(num_blocks.items())}
        self.enabled = enabled
        self.tables = BlockTables(pools, block_size)
        self.claims = Claims()
        self.identity = BlockIdentity(block_size)
        self._index: dict[bytes, Entry] = {}
        self._forget = forget

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def entries(self) -> Collection[Entry]:
        """All that are in the index."""
        return self._index.values()

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        """The entries of the longest prefix of tokens [0, limit) that can be resumed; fills in the chain's hashes."""
        hits: list[Entry] = []
        if not self.enabled:
            return hits
        self.identity.extend(chain, tokens, len(tokens) // self.block_size)
        for i, key in enumerate(chain.hashes[: limit // self.block_size]):
            entry = self._find(key, hits[-1] if hits else None, *self.identity.content(chain, tokens, i))
            if entry is None:
                break
            hits.append(entry)
        return self.deepest(hits)

    def deepest(self, run: list[Entry], is_ready: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """The longest beginning of a run of entries that can be resumed and ends with one that is ready."""
        windowed = self.tables.windowed
        if not windowed and is_ready is None:
            return run
        lost, found = dict.fromkeys(windowed, 0), 0  # the last entry that lacks a block of each window
        for count, entry in enumerate(run, 1):
            for group, window in windowed:
                if entry.blocks[group] is None:
                    lost[group, window] = count
            needed = (self.tables.first_needed(window, count * self.block_size) for _, window in windowed)
            if (is_ready is None or is_ready(entry)) and all(map(le, lost.values(), needed)):
                found = count
        return run[:found]

    def find_claim(self, chain: Chain, num_hits: int, limit: int) -> bytes | None:
        """Of the blocks after the hits that lie within [0, limit) tokens, the last one in a row that others are
        computing (`Claims.find`).
        """
        return self.claims.find(chain, chain.hashes[num_hits : limit // self.block_size]) if self.enabled else None

    def publish(self, chain: Chain, tokens: array[int], table: Table, num_computed: int) -> None:
        """Makes the full blocks of the computed tokens [0, num_computed) findable, if the epoch is still theirs."""
        if not self.enabled or chain.epoch != self.identity.epoch:
            return
        num_full = num_computed // self.block_size
        self.identity.extend(chain, tokens, num_full)
        for i in range(len(chain.entries), num_full):
            self.claims.fulfil(chain, chain.hashes[i])
            blocks = [group[i] for group in table.blocks]
            chain.entries.append(self._publish(chain, *self.identity.content(chain, tokens, i), blocks))

    def invalidate(self) -> None:
        """Forgets every published prefix and begins the next epoch; blocks and references stay as they are."""
        self.identity.renew()
        for pool in self.tables.pools:
            pool.unpublish_all()
        self._forget([*self._index.values()])
        self._index.clear()
        self.claims.clear()

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise RuntimeError unless `tables`, those of all sequences, account for each block exactly, and the index for
        each that is published.
        """
        tables, index = list(tables), list(self._index.items())
        wrong = {entry.hash for key, entry in index if key != entry.hash or not self._serves(entry)}
        for group, pool in enumerate(self.tables.pools):
            miscounted = pool.miscounted(block for table in tables for block in table.held(group))
            named = {entry.blocks[group]: entry for _, entry in index if entry.blocks[group] is not None}
            if miscounted or wrong or named != pool.published:
                raise RuntimeError(
                    f"prefix cache: blocks {sorted(miscounted)} of window {self.tables.windows[group]} are not counted "
                    "exactly once, or the index does not agree with what is published"
                )

    def _find(self, key: bytes, parent: Entry | None, tokens: bytes, extra: bytes) -> Entry | None:
        entry = self._index.get(key)
        same = entry and entry.parent is parent and entry.tokens == tokens and entry.extra == extra
        return entry if same else None

    def _publish(self, chain: Chain, tokens: bytes, extra: bytes, blocks: list[int]) -> Entry:
        """The entry for the next block of a chain: one that was there, which gets what it lacks, or a new one.

        A block in use takes the place of a cached one, which could be handed out while the chain goes on: what is
        published behind it would be out of reach.
        """
        parent, key = chain.entries[-1] if chain.entries else None, chain.hashes[len(chain.entries)]
        entry = self._find(key, parent, tokens, extra)
        if entry is None:
            if other := self._index.get(key):
                self._remove(other)
            entry = self._index[key] = Entry(key, parent, tokens, extra, [None] * len(blocks))
            if parent is not None:
                parent.num_children += 1
        for pool, group, block in zip(self.tables.pools, range(len(blocks)), blocks, strict=True):
            known = entry.blocks[group]
            if known is not None and pool.is_cached(known):
                pool.unpublish(known)
            elif known is not None:
                continue
            entry.blocks[group] = block
            pool.published[block] = entry
        return entry

    def _lose(self, group: int, entry: Entry) -> None:
        """The block of an entry in a group is handed out."""
        entry.blocks[group] = None
        if not self._serves(entry):
            self._remove(entry)

    def _serves(self, entry: Entry) -> bool:
        """Whether an entry may be a part of a prefix that can be resumed. Without the full KV of its last tokens none
        can; where all layers have windows, one can as long as there are blocks behind.
        """
        if self.tables.windows[0] is None:
            return entry.blocks[0] is not None
        return entry.num_children > 0 or any(block is not None for block in entry.blocks)

    def _remove(self, entry: Entry) -> None:
        """Takes an entry from the index, and those before it that were there for its sake."""
        last: Entry | None = entry
        while last is not None:
            del self._index[last.hash]
            self._forget([last])
            for group, block in enumerate(last.blocks):
                if block is not None:
                    self.tables.pools[group].unpublish(block)
            last = self._left_alone(last.parent)

    def _left_alone(self, parent: Entry | None) -> Entry | None:
        """An entry that has lost a child, if it is in the index and serves no more."""
        if parent is None:
            return None
        parent.num_children -= 1
        return parent if self._index.get(parent.hash) is parent and not self._serves(parent) else None
