"""The prefix cache: the index of known prefixes, over the blocks of KV memory that hold them.

| class           | owns                                                                                            |
|-----------------|-------------------------------------------------------------------------------------------------|
| `Pool`          | each block's references, and which blocks of a group are free, in order of reuse                |
| `BlockTables`   | which blocks a sequence needs of each group (`Table`), and gives them                           |
| `BlockIdentity` | what identifies a block (`Chain`), the secret of its hashes, and the epoch                      |
| `Claims`        | which blocks running sequences are about to compute                                             |
| `PrefixCache`   | the hash index: published prefix (`Entry`) -> its blocks; which prefixes can be resumed         |

Not owned here: the tensors that blocks are made of (`model_runner`), which sequence has which table (`sequence`), and
when to allocate, fork or preempt (`scheduler`).

Layers of one window are a group, with a pool of blocks of their own; those without a window are the group of window
None. An entry of the index is a prefix that ends with a full block, and names the block of each group that holds the KV
of its last tokens, as long as that has not been handed out to others. A sequence gives a block back once none of its
later queries can reach the block; if it was published, it may be hit until it is handed out.

A prefix of L tokens can be resumed if the group of window None holds the KV of all its tokens, and a group of window W
that of tokens [L - W + 1, L), which is what the token at L attends to beside itself.

A full block's identity is a chain: a 128-bit hash of its parent's hash, its token ids and its extra identity, keyed by
a secret of this process that changes with every epoch. Extra identity are the request's cache salt and the spans of
content other than text that touch the block, each with its place relative to the block.

Promises: lookup changes nothing; allocation happens whole or not at all; a block in use is never evicted; a cached
block can be hit until it is handed out again, or until one in use, with the same KV, takes its place; a hit has the
same token ids, extra identity and parents, as a hash alone never decides; `invalidate` drops the index, puts the cached
blocks next in line, and changes nothing else; what was computed under an earlier epoch is never published afterwards.
Nothing but `invalidate` and `check_integrity` costs more the more blocks there are.
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


@dataclass(eq=False, slots=True)
class Entry:
    """A published prefix: its place in the index and what it ends with. `parent` is the one a block shorter.

    `blocks`: of each group, that with the KV of its last tokens; None if that was handed out. `num_children`: of how
    many entries in the index it is the parent.
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

    `hashes[i]` identifies block i; each is computed once. `entries[i]` is where block i was found or published. Hashes
    cover the blocks [0, known full blocks); entries, while the sequence runs, the blocks [0, computed full blocks).
    `salt`: extra identity of every block. `spans`: content other than text, sorted. `has_records`: what it publishes is
    published with a record that others may wait for.
    """

    epoch: int
    salt: bytes
    spans: Sequence[ContentSpan] = ()
    has_records: bool = False
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def fork(self) -> Chain:
        """A chain that begins like this one and goes on by itself."""
        return Chain(self.epoch, self.salt, self.spans, self.has_records, self.hashes.copy(), self.entries.copy())


def _extra(salt: bytes, spans: bytes) -> bytes:
    """Bytes that no other salt and spans have."""
    return b"spans:" + len(spans).to_bytes(4, "little") + spans + salt


class BlockIdentity:
    """Hashes blocks of `block_size` tokens. `epoch`: how often `renew` was called."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self._key = secrets.token_bytes(32)

    def renew(self) -> None:
        """Begin the next epoch: chains of the ones before name no block any more."""
        self.epoch += 1
        self._key = secrets.token_bytes(32)

    def new_chain(self, cache_salt: str | None, spans: Sequence[ContentSpan] = (), has_records: bool = False) -> Chain:
        """An empty chain of the current epoch. Chains with different salts never share a block."""
        salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
        return Chain(self.epoch, salt, spans, has_records)

    def restart(self, chain: Chain) -> Chain:
        """An empty chain of the current epoch with the extra identity of another one."""
        return Chain(self.epoch, chain.salt, chain.spans, chain.has_records)

    def extend(self, chain: Chain, tokens: array[int], num_blocks: int) -> None:
        """Compute the hashes of the first `num_blocks` blocks that a chain lacks."""
        for i in range(len(chain.hashes), num_blocks):
            parent = chain.hashes[-1] if chain.hashes else bytes(16)
            chain.hashes.append(self._digest(parent + b"".join(self.content(chain, tokens, i))))

    def content(self, chain: Chain, tokens: array[int], i: int) -> tuple[bytes, bytes]:
        """What block i holds: its token ids, and its extra identity."""
        start, end = i * self.block_size, (i + 1) * self.block_size
        spans = content_within(chain.spans, start, end) if chain.spans else b""
        return tokens[start:end].tobytes(), _extra(chain.salt, spans) if spans else chain.salt

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key).digest()


class Claims:
    """By the hash of a block: the chain that computes it."""

    def __init__(self) -> None:
        self._chains: dict[bytes, Chain] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether the block with this hash is being computed."""
        return key in self._chains

    def find(self, chain: Chain, keys: Iterable[bytes]) -> bytes | None:
        """Of blocks that follow one another and are being computed by other chains, with records if this one has some,
        the hash of the last one in a row; None if the first one is not.
        """
        found = None
        for key in keys:
            other = self._chains.get(key, chain)
            if other is chain or chain.has_records > other.has_records:
                break
            found = key
        return found

    def add(self, chain: Chain) -> None:
        """Announce that the owner of `chain` is about to compute all its known blocks that no one else has claimed."""
        for key in chain.hashes[len(chain.entries) :]:
            self._chains.setdefault(key, chain)

    def withdraw(self, chain: Chain) -> None:
        """Withdraw what `add` announced and nothing has fulfilled."""
        for key in chain.hashes[len(chain.entries) :]:
            self.fulfil(chain, key)

    def fulfil(self, chain: Chain, key: bytes) -> None:
        """A chain no longer computes this block; a claim of another chain on it stays."""
        if self._chains.get(key) is chain:
            del self._chains[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._chains.clear()


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence. Those of each group are as many; block i holds the KV of tokens [i * block_size, (i +
    1) * block_size) in that group's layers, from block `starts[group]` on. Blocks before that are no longer its own.
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

    def stats(self) -> tuple[PoolStats, ...]:
        """How the pool of each window is used."""
        return tuple(
            PoolStats(window, pool.num_blocks - pool.num_free, pool.num_cached, pool.num_free - pool.num_cached)
            for window, pool in zip(self.windows, self.pools, strict=True)
        )

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

    def leaves_block(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Whether a window leaves a block behind, for each sequence that went on from `starts` to `ends`: bool [N]."""
        leaves = np.zeros(len(ends), np.bool_)
        for _, window in self.windowed:
            before, after = ((tokens - window + 1).clip(0) // self.block_size for tokens in (starts, ends))
            leaves |= before < after
        return leaves

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


class PrefixCache:
    """Finds published prefixes of blocks of `block_size` tokens. `num_blocks`: how many the layers of each window
    share; those of window None, if there are such layers, come first.

    `tables`: gives sequences their blocks. `identity`: names blocks. `claims`: the blocks that are being computed. With
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
        self.block_size = block_size
        self.tables = BlockTables(pools, block_size)
        self.claims = Claims()
        self.identity = BlockIdentity(block_size)
        self._index: dict[bytes, Entry] = {}
        self._forget = forget

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
