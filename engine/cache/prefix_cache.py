"""The prefix cache: the index of known prefixes, over the blocks of KV memory that hold them.

| class           | owns                                                                                            |
|-----------------|-------------------------------------------------------------------------------------------------|
| `Pool`          | the references to each block of a group, and its free blocks in order of reuse                  |
| `BlockTables`   | the blocks that a sequence needs of each group (`Table`), and their allocation                  |
| `BlockIdentity` | the identity of blocks (`Chain`), the secret of their hashes, and the epoch                     |
| `Claims`        | the blocks that running sequences are about to compute                                          |
| `PrefixCache`   | the hash index: published prefix (`Entry`) -> its blocks; which prefixes can be resumed         |

Not owned here: the tensors of the blocks (`model_runner`), which sequence has which table (`sequence`), and when to
allocate, fork or preempt (`scheduler`).

Layers with the same window form a group with its own pool of blocks. Layers without a window form the group of window
None. An entry of the index is a prefix that ends with a full block. For each group, it names the block that holds the
KV of the entry's last tokens, until that block is handed out again. A sequence releases a block once none of its later
queries can reach the block. If the block was published, it can be hit until it is handed out.

A prefix of L tokens can be resumed if the group of window None holds the KV of all its tokens, and each group of window
W holds the KV of tokens [L - W + 1, L). Besides itself, the token at L attends to exactly these tokens.

The identity of a full block is a chain: a 128-bit hash of its parent's hash, its token ids and its extra identity. The
hash is keyed by a secret of this process that changes with every epoch. The extra identity is the request's cache salt
and the spans of content other than text that overlap the block, with their places relative to the block.

Promises:

- A lookup changes nothing.
- An allocation succeeds as a whole or changes nothing.
- A block in use is never evicted.
- A cached block can be hit until it is handed out again, or until a block in use with the same KV replaces it.
- A hit has the same token ids, extra identity and parents; the hash alone never decides.
- `invalidate` drops the index, makes the cached blocks the next to be reused, and changes nothing else.
- KV that was computed under an earlier epoch is never published.
- Only `invalidate` and `check_integrity` take time that grows with the number of blocks.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import le
from typing import Generic, TypeVar

import numpy as np

from trueroll.errors import InvalidRequestError

from ..request import ContentSpan, content_within
from ..stats import PoolStats

Owner = TypeVar("Owner")


class Pool(Generic[Owner]):
    """`num_blocks` blocks. Calls `evict(owner)` when it hands out a block that `owner` published."""

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
        """The number of blocks without a reference, published or not."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The number of free blocks that are still published."""
        return len(self._cached)

    def is_cached(self, block: int) -> bool:
        """Return whether a block is free and still published."""
        return block in self._cached

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Return the number of free blocks, not counting the given blocks."""
        return self.num_free - sum(block in self._cached for block in blocks)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. Enough blocks must be free."""
        return [self._take_free() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must be in use or cached; cached blocks are in use again."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block.

        Later blocks are reused before earlier ones, and unpublished blocks before published ones.
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
        """Take a block from its owner. A free block becomes empty."""
        del self.published[block]
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def unpublish_all(self) -> None:
        """Take all blocks from their owners.

        Free blocks are handed out next, in the order of their release: their memory has been used, while other memory
        may never have been touched.
        """
        self._empty.extend(reversed(self._cached))
        self._cached.clear()
        self.published.clear()

    def miscounted(self, held: Iterable[int]) -> set[int]:
        """Return the blocks in a wrong state or with wrong references. `held`: a block for each expected reference."""
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


@dataclass(eq=False, slots=True)
class Entry:
    """A published prefix: its place in the index, and its last block in each group.

    `parent`: the prefix that is one block shorter. `blocks`: for each group, the block with the KV of the last tokens,
    or None if it was handed out again. `num_children`: the number of index entries with this entry as their parent.
    """

    hash: bytes
    parent: Entry | None = field(repr=False)
    tokens: bytes
    extra: bytes
    blocks: list[int | None]
    num_children: int = 0


@dataclass(slots=True)
class Chain:
    """The identity of one sequence's full blocks under one epoch.

    `hashes[i]` identifies block i; each hash is computed once. `entries[i]` is the entry at which block i was found or
    published. Hashes cover the blocks [0, known full blocks). While the sequence runs, entries cover the blocks [0,
    computed full blocks). `salt`: extra identity of every block. `spans`: content other than text, sorted.
    `has_records`: whether the blocks are published with routed experts, for which other sequences may wait.
    """

    epoch: int
    salt: bytes
    spans: Sequence[ContentSpan] = ()
    has_records: bool = False
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def fork(self) -> Chain:
        """Return a chain that begins like this one and continues independently."""
        return Chain(self.epoch, self.salt, self.spans, self.has_records, self.hashes.copy(), self.entries.copy())


def _extra(salt: bytes, spans: bytes) -> bytes:
    """Return bytes that identify this salt and these spans."""
    return b"spans:" + len(spans).to_bytes(4, "little") + spans + salt


class BlockIdentity:
    """Hashes blocks of `block_size` tokens. `epoch`: the number of calls to `renew`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self._key = secrets.token_bytes(32)

    def renew(self) -> None:
        """Begin the next epoch. Chains of earlier epochs no longer identify any block."""
        self.epoch += 1
        self._key = secrets.token_bytes(32)

    def new_chain(self, cache_salt: str | None, spans: Sequence[ContentSpan] = (), has_records: bool = False) -> Chain:
        """Return an empty chain of the current epoch. Chains with different salts never share a block."""
        salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
        return Chain(self.epoch, salt, spans, has_records)

    def restart(self, chain: Chain) -> Chain:
        """Return an empty chain of the current epoch, with the extra identity of `chain`."""
        return Chain(self.epoch, chain.salt, chain.spans, chain.has_records)

    def extend(self, chain: Chain, tokens: array[int], num_blocks: int) -> None:
        """Compute the missing hashes of the first `num_blocks` blocks of a chain."""
        for i in range(len(chain.hashes), num_blocks):
            parent = chain.hashes[-1] if chain.hashes else bytes(16)
            chain.hashes.append(self._digest(parent + b"".join(self.content(chain, tokens, i))))

    def content(self, chain: Chain, tokens: array[int], i: int) -> tuple[bytes, bytes]:
        """Return the token ids and the extra identity of block i."""
        start, end = i * self.block_size, (i + 1) * self.block_size
        spans = content_within(chain.spans, start, end) if chain.spans else b""
        return tokens[start:end].tobytes(), _extra(chain.salt, spans) if spans else chain.salt

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key).digest()


class Claims:
    """The chains that are computing blocks, by the hash of the block."""

    def __init__(self) -> None:
        self._chains: dict[bytes, Chain] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block with this hash is being computed."""
        return key in self._chains

    def find(self, chain: Chain, keys: Iterable[bytes]) -> bytes | None:
        """Return the hash of the last block in an unbroken run of blocks that other chains are computing.

        `keys`: the hashes of consecutive blocks; the run begins with the first. Return None if no other chain computes
        the first block. For a chain with records, only other chains with records count.
        """
        found = None
        for key in keys:
            other = self._chains.get(key, chain)
            if other is chain or chain.has_records > other.has_records:
                break
            found = key
        return found

    def add(self, chain: Chain) -> None:
        """Claim all blocks with known hashes that `chain` has not computed, except blocks claimed by other chains."""
        for key in chain.hashes[len(chain.entries) :]:
            self._chains.setdefault(key, chain)

    def withdraw(self, chain: Chain) -> None:
        """Drop the unfulfilled claims of a chain."""
        for key in chain.hashes[len(chain.entries) :]:
            self.fulfil(chain, key)

    def fulfil(self, chain: Chain, key: bytes) -> None:
        """Drop the claim of this chain on a block; a claim of another chain is kept."""
        if self._chains.get(key) is chain:
            del self._chains[key]

    def clear(self) -> None:
        """Drop all claims."""
        self._chains.clear()


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence, the same number in each group.

    Block i holds the KV of tokens [i * block_size, (i + 1) * block_size) in the layers of its group. The sequence holds
    the blocks from `starts[group]` on. Earlier blocks are released.
    """

    blocks: list[array[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def held(self, group: int) -> array[int]:
        """Return the blocks of a group that the sequence still holds."""
        return self.blocks[group][self.starts[group] :]


class BlockTables:
    """Gives tables their blocks of `block_size` tokens, from the pool of each window.

    If there is a pool of window None, it comes first. `windowed`: the groups with a window, and their windows.
    """

    def __init__(self, pools: Mapping[int | None, Pool[Entry]], block_size: int) -> None:
        self.block_size = block_size
        self.windows, self.pools = list(pools), list(pools.values())
        self.windowed = [(group, window) for group, window in enumerate(pools) if window is not None]

    @property
    def num_available(self) -> int:
        """The number of blocks that each group can provide."""
        return min(pool.num_free for pool in self.pools)

    def stats(self) -> tuple[PoolStats, ...]:
        """Return the usage of each window's pool."""
        return tuple(
            PoolStats(window, pool.num_blocks - pool.num_free, pool.num_cached, pool.num_free - pool.num_cached)
            for window, pool in zip(self.windows, self.pools, strict=True)
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """Return the most blocks of each group that a sequence holds at once while it grows to `num_tokens` tokens.

        Its tokens are computed in chunks of up to `chunk`.
        """
        whole = self.blocks_for(num_tokens)
        return [whole if w is None else min(whole, self.blocks_for(w + chunk - 2) + 1) for w in self.windows]

    def first_needed(self, window: int, num_tokens: int) -> int:
        """Return the first block that the token at `num_tokens` and later tokens can reach."""
        return max(0, num_tokens - window + 1) // self.block_size

    def can_hold(self, hits: Sequence[Entry], num_tokens: int, chunk: int) -> bool:
        """Return whether there is room for a sequence that continues from the hits to `num_tokens` tokens.

        Its tokens are computed in chunks of up to `chunk`, or in shorter chunks where the pool of a window is small.
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
        """Raise InvalidRequestError if a sequence of `num_tokens` tokens does not fit even if it runs alone."""
        for needed, pool in zip(self.blocks_needed(num_tokens), self.pools, strict=True):
            if needed > pool.num_blocks:
                raise InvalidRequestError(
                    f"request needs {needed} KV blocks of {self.block_size} tokens for {num_tokens} tokens, but there "
                    f"are {pool.num_blocks}; ask for fewer tokens or start the worker with more KV memory",
                    value=needed,
                    limit=pool.num_blocks,
                )

    def allocate(self, hits: Sequence[Entry], num_new: int) -> Table:
        """Return a table with the blocks of the hits that are needed to continue, and `num_new` fresh blocks per group.

        Raise RuntimeError if too few blocks are free.
        """
        table = self._hit_table(hits)
        free = min(pool.num_free_beside(table.held(group)) for group, pool in enumerate(self.pools))
        if num_new > free:
            raise RuntimeError(f"prefix cache: {num_new} free blocks needed beside the hits, but there are {free}")
        for group, pool in enumerate(self.pools):
            pool.share(table.held(group))
        self.extend(table, num_new)
        return table

    def extend(self, table: Table, num_new: int) -> None:
        """Add `num_new` fresh blocks of each group to a table. Enough blocks must be free."""
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            blocks.extend(pool.take(num_new))

    def fork(self, table: Table, num_tokens: int) -> tuple[Table, list[dict[int, int]]]:
        """Return a second table for the first `num_tokens` tokens of `table`, and the block copies that it needs.

        It shares the full blocks and gets a fresh block for a partial last block. For each group, the copies map
        destination to source. Enough blocks must be free.
        """
        num_full = num_tokens // self.block_size
        child = Table([blocks[:num_full] for blocks in table.blocks], table.starts.copy())
        for group, pool in enumerate(self.pools):
            pool.share(child.held(group))
        self.extend(child, len(table) - num_full)
        pairs = zip(child.blocks, table.blocks, strict=True)
        return child, [dict(zip(new[num_full:], old[num_full:], strict=True)) for new, old in pairs]

    def give_back(self, table: Table, num_computed: int) -> None:
        """Release the blocks of a table that no query from `num_computed` on can reach.

        Blocks that later sequences should find must be published before this call.
        """
        for group, window in self.windowed:
            start, first = table.starts[group], self.first_needed(window, num_computed)
            if start < first:
                self.pools[group].release(table.blocks[group][start:first])
                table.starts[group] = first

    def leaves_block(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return which sequences left a block behind a window when they advanced from `starts` to `ends`, bool [N]."""
        leaves = np.zeros(len(ends), np.bool_)
        for _, window in self.windowed:
            before, after = ((tokens - window + 1).clip(0) // self.block_size for tokens in (starts, ends))
            leaves |= before < after
        return leaves

    def release(self, table: Table) -> None:
        """Release all blocks of a table."""
        for group, pool in enumerate(self.pools[: len(table.blocks)]):
            pool.release(table.held(group))

    def _hit_table(self, hits: Sequence[Entry]) -> Table:
        """Return a table with the blocks that are needed to resume a prefix. References are not counted."""
        num_tokens = len(hits) * self.block_size
        starts = [0 if window is None else self.first_needed(window, num_tokens) for window in self.windows]
        blocks = [array("q", [entry.blocks[group] or 0 for entry in hits]) for group in range(len(self.pools))]
        return Table(blocks, starts)


class PrefixCache:
    """Finds published prefixes of blocks of `block_size` tokens.

    `num_blocks`: for each window, the number of blocks that its layers share; window None comes first, if there is one.
    `enabled`: if False, nothing is published, so that nothing is found. `forget`: called with entries that can no
    longer be found. `tables`: gives sequences their blocks. `identity`: identifies blocks. `claims`: the blocks that
    are being computed.
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
        self.block_size = block_size
        self.tables = BlockTables(pools, block_size)
        self.claims = Claims()
        self.identity = BlockIdentity(block_size)
        self._index: dict[bytes, Entry] = {}
        self._forget = forget

    @property
    def entries(self) -> Collection[Entry]:
        """All entries of the index."""
        return self._index.values()

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        """Return the entries of the longest prefix of tokens [0, limit) that can be resumed.

        The missing hashes of the chain are filled in.
        """
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
        """Return the longest start of a run of entries that can be resumed and that ends with a ready entry."""
        windowed = self.tables.windowed
        if not windowed and is_ready is None:
            return run
        lost, found = dict.fromkeys(windowed, 0), 0  # for each window, the last entry that lacks its block
        for count, entry in enumerate(run, 1):
            for group, window in windowed:
                if entry.blocks[group] is None:
                    lost[group, window] = count
            needed = (self.tables.first_needed(window, count * self.block_size) for _, window in windowed)
            if (is_ready is None or is_ready(entry)) and all(map(le, lost.values(), needed)):
                found = count
        return run[:found]

    def find_claim(self, chain: Chain, num_hits: int, limit: int) -> bytes | None:
        """Return the hash of the last block in the run after the hits that other chains are computing (`Claims.find`).

        Only blocks within tokens [0, limit) count.
        """
        return self.claims.find(chain, chain.hashes[num_hits : limit // self.block_size]) if self.enabled else None

    def publish(self, chain: Chain, tokens: array[int], table: Table, num_computed: int) -> None:
        """Publish the full blocks of the computed tokens [0, num_computed), if the chain is of the current epoch."""
        if not self.enabled or chain.epoch != self.identity.epoch:
            return
        num_full = num_computed // self.block_size
        self.identity.extend(chain, tokens, num_full)
        for i in range(len(chain.entries), num_full):
            self.claims.fulfil(chain, chain.hashes[i])
            blocks = [group[i] for group in table.blocks]
            chain.entries.append(self._publish(chain, *self.identity.content(chain, tokens, i), blocks))

    def invalidate(self) -> None:
        """Drop every published prefix and begin the next epoch. Blocks and references are unchanged."""
        self.identity.renew()
        for pool in self.tables.pools:
            pool.unpublish_all()
        self._forget([*self._index.values()])
        self._index.clear()
        self.claims.clear()

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise RuntimeError unless each block is accounted for by `tables`, and each published block by the index.

        `tables`: the tables of all sequences.
        """
        tables, index = list(tables), list(self._index.items())
        wrong = {entry.hash for key, entry in index if key != entry.hash or not self._serves(entry)}
        for group, pool in enumerate(self.tables.pools):
            miscounted = pool.miscounted(block for table in tables for block in table.held(group))
            named = {entry.blocks[group]: entry for _, entry in index if entry.blocks[group] is not None}
            if miscounted or wrong or named != pool.published:
                raise RuntimeError(
                    f"prefix cache: blocks {sorted(miscounted)} of window {self.tables.windows[group]} are not counted "
                    "exactly once, or the index does not agree with the published blocks"
                )

    def _find(self, key: bytes, parent: Entry | None, tokens: bytes, extra: bytes) -> Entry | None:
        entry = self._index.get(key)
        same = entry and entry.parent is parent and entry.tokens == tokens and entry.extra == extra
        return entry if same else None

    def _publish(self, chain: Chain, tokens: bytes, extra: bytes, blocks: list[int]) -> Entry:
        """Return the entry for the next block of a chain, new or existing. An existing entry gets its missing blocks.

        A block in use replaces a cached block of the entry. Otherwise the cached block could be handed out while the
        chain continues, and the blocks published after it would be unreachable.
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
        """Remove an entry's block in a group, because the block is handed out again."""
        entry.blocks[group] = None
        if not self._serves(entry):
            self._remove(entry)

    def _serves(self, entry: Entry) -> bool:
        """Return whether an entry can be part of a prefix that can be resumed.

        If there are layers without a window, the entry needs their KV of its last tokens. If all layers have windows,
        the entry serves as long as it has a block or there are entries after it.
        """
        if self.tables.windows[0] is None:
            return entry.blocks[0] is not None
        return entry.num_children > 0 or any(block is not None for block in entry.blocks)

    def _remove(self, entry: Entry) -> None:
        """Remove an entry from the index, and the ancestors that served only this entry."""
        last: Entry | None = entry
        while last is not None:
            del self._index[last.hash]
            self._forget([last])
            for group, block in enumerate(last.blocks):
                if block is not None:
                    self.tables.pools[group].unpublish(block)
            last = self._left_alone(last.parent)

    def _left_alone(self, parent: Entry | None) -> Entry | None:
        """Return the parent of a removed entry if the parent is in the index and no longer serves, otherwise None."""
        if parent is None:
            return None
        parent.num_children -= 1
        return parent if self._index.get(parent.hash) is parent and not self._serves(parent) else None
