"""The prefix cache: the index of published prefixes, and the KV blocks that hold the prefixes.

| class           | owns                                                                                            |
|-----------------|-------------------------------------------------------------------------------------------------|
| `BlockTables`   | the blocks of each group that a sequence needs (`Table`), and their allocation                  |
| `BlockIdentity` | the identity of blocks (`Chain`), the secret of their hashes, and the epoch                     |
| `Claims`        | the blocks that running sequences are about to compute                                          |
| `PrefixCache`   | the hash index: published prefix (`Entry`) -> its blocks; which prefixes can be resumed         |

This module does not own the references to blocks (`pool`), the slots of host memory (`host_tier`), the tensors of the
blocks (`model_runner`), the table of each sequence (`sequence`), or decisions about when to allocate, fork or preempt
(`scheduler`).

Layers with the same attention window form a group with its own pool of blocks. Layers without a window form the group
of window None. An index entry represents a prefix that ends with a full block. For each group of layers, an index entry
names the block that holds the KV of the prefix's last `block_size` tokens. When a block of an entry is reused for other
tokens, the entry no longer names the block. If the host has a copy of the block's content, the entry names the copy's
place instead. A sequence releases a block when no later token of the sequence can attend to the block. Until a released
block is reused, other sequences can still hit the published prefix that ends with this block.

A prefix of L tokens can be resumed if every group holds the KV that resuming needs. The group of window None must hold
the KV of all L tokens. A group of window W must hold the KV of tokens [L - W + 1, L). In a group of window W, the token
at position L attends to tokens [L - W + 1, L].

A full block is identified by a 128-bit hash of three things: the hash of the previous block, the token ids, and the
extra identity of the block. The hash is keyed with a secret of this process. Every call of `invalidate` begins a new
epoch with a new secret. The extra identity consists of the request's adapter, the request's cache salt, and the spans
of non-text content that overlap the block, with positions relative to the block. A later version of an adapter counts
as a different adapter.

Guarantees:

- A lookup changes nothing.
- An allocation succeeds as a whole or changes nothing.
- A block in use is never evicted.
- A cached block can be hit until it is reused, or until it is replaced by a block that is in use and has the same KV.
- A block is hit only if the prompt has the same token ids, the same extra identity and the same preceding blocks. In
  addition to the hash, a lookup compares the token ids, the extra identity and the parent in full.
- `invalidate` drops the index, with all content on the host. The blocks that were cached before `invalidate` are the
  first blocks to be reused. `invalidate` does not affect blocks in use.
- KV that was computed under an earlier epoch is never published.
- Only `invalidate` and `check_integrity` take time that grows with the number of blocks.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import le

import numpy as np

from trueroll.errors import InvalidRequestError

from ..commits import Adapter
from ..request import ContentSpan, content_within
from ..stats import PoolStats
from .host_tier import Copies, HostTier
from .pool import Pool


@dataclass(eq=False, slots=True)
class Entry:
    """A published prefix in the index, with its last block in each group.

    `parent`: the prefix that is one block shorter. `blocks`: for each group, the block with the KV of the prefix's last
    tokens; if that block was reused, the place of its content on the host (see `host_tier`), or None. `num_children`:
    the number of index entries with this entry as their parent.
    """

    hash: bytes
    parent: Entry | None = field(repr=False)
    tokens: bytes
    extra: bytes
    blocks: list[int | None]
    num_children: int = 0


@dataclass(slots=True)
class Chain:
    """The identity of one sequence's full blocks under one epoch of the weights and one epoch of the adapter.

    `hashes[i]`: identifies full block i; computed once. `entries[i]`: the index entry under which block i was found or
    published. While the sequence runs, `entries` covers all full blocks that are computed; `hashes` may cover further
    blocks. `own_salt`: the bytes of the cache salt. `spans`: non-text content, sorted. `has_records`: whether the
    blocks are published with routed experts. If `has_records` is False, sequences that need routed experts do not wait
    for the blocks. `adapter`: the adapter that computes the blocks, or None. `salt`: the bytes that identify the
    adapter's epoch and the cache salt. The bytes in `salt` belong to the extra identity of every block.
    """

    epoch: int
    own_salt: bytes
    spans: Sequence[ContentSpan] = ()
    has_records: bool = False
    adapter: Adapter | None = None
    adapter_epoch: int = 0
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    salt: bytes = field(init=False)

    def __post_init__(self) -> None:
        of_adapter = b"adapter:" + self.adapter_epoch.to_bytes(8, "little") if self.adapter_epoch else b""
        self.salt = of_adapter + self.own_salt

    def fork(self) -> Chain:
        """Return a copy of this chain. The copy and the original are extended independently."""
        return replace(self, hashes=self.hashes.copy(), entries=self.entries.copy())


def _extra(salt: bytes, spans: bytes) -> bytes:
    """Return bytes that identify the combination of `salt` and `spans`."""
    return b"spans:" + len(spans).to_bytes(4, "little") + spans + salt


def _epoch_of(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.epoch


class BlockIdentity:
    """Computes the hashes of blocks; each block has `block_size` tokens. `epoch`: the number of calls to `renew`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self._key = secrets.token_bytes(32)

    def renew(self) -> None:
        """Begin the next epoch. Chains of earlier epochs no longer identify any block."""
        self.epoch += 1
        self._key = secrets.token_bytes(32)

    def new_chain(
        self,
        cache_salt: str | None,
        spans: Sequence[ContentSpan] = (),
        has_records: bool = False,
        adapter: Adapter | None = None,
    ) -> Chain:
        """Return an empty chain of the current epochs. Chains with different salts or adapters never share a block."""
        salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
        return Chain(self.epoch, salt, spans, has_records, adapter, _epoch_of(adapter))

    def restart(self, chain: Chain) -> Chain:
        """Return an empty chain of the current epochs, with the extra identity of `chain`."""
        parts = chain.own_salt, chain.spans, chain.has_records, chain.adapter
        return Chain(self.epoch, *parts, _epoch_of(chain.adapter))

    def is_current(self, chain: Chain) -> bool:
        """Return whether a chain identifies blocks of the current weights and of its adapter's last commit."""
        return chain.epoch == self.epoch and chain.adapter_epoch == _epoch_of(chain.adapter)

    def extend(self, chain: Chain, tokens: array[int], num_blocks: int) -> None:
        """Compute the missing hashes of the first `num_blocks` blocks of a chain."""
        for i in range(len(chain.hashes), num_blocks):
            self.append(chain, *self.content(chain, tokens, i))

    def append(self, chain: Chain, tokens: bytes, extra: bytes) -> None:
        """Append the hash of the next block to a chain. `tokens`, `extra`: the result of `content` for the block."""
        parent = chain.hashes[-1] if chain.hashes else bytes(16)
        chain.hashes.append(self._digest(parent + tokens + extra))

    def content(self, chain: Chain, tokens: array[int], i: int) -> tuple[bytes, bytes]:
        """Return the token ids and the extra identity of block i."""
        start, end = i * self.block_size, (i + 1) * self.block_size
        spans = content_within(chain.spans, start, end) if chain.spans else b""
        return tokens[start:end].tobytes(), _extra(chain.salt, spans) if spans else chain.salt

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key).digest()


class Claims:
    """Claims on blocks that are being computed. Each block's hash is mapped to the chain that computes the block."""

    def __init__(self) -> None:
        self._chains: dict[bytes, Chain] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block with this hash is being computed."""
        return key in self._chains

    def find(self, chain: Chain, keys: Iterable[bytes]) -> bytes | None:
        """Return the hash of the last block in a run of consecutive blocks that other chains are computing.

        `keys`: the hashes of consecutive blocks. The run begins with the first block of `keys`. Return None if no other
        chain computes the first block. If `chain` has records, chains without records are ignored.
        """
        found = None
        for key in keys:
            other = self._chains.get(key, chain)
            if other is chain or chain.has_records > other.has_records:
                break
            found = key
        return found

    def add(self, chain: Chain) -> None:
        """Claim the blocks of `chain` that have a hash, are not computed yet, and are not claimed by another chain."""
        for key in chain.hashes[len(chain.entries) :]:
            self._chains.setdefault(key, chain)

    def withdraw(self, chain: Chain) -> None:
        """Drop the claims of a chain on blocks that the chain has not computed."""
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
    """The blocks of one sequence. Every group has the same number of blocks.

    Block i holds the KV of tokens [i * block_size, (i + 1) * block_size) in the layers of its group. The sequence holds
    only the blocks from index `starts[group]` on, because earlier blocks are released.
    """

    blocks: list[array[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def held(self, group: int) -> array[int]:
        """Return the blocks of a group that the sequence still holds."""
        return self.blocks[group][self.starts[group] :]


class BlockTables:
    """Allocates blocks for the tables of sequences, from the pool of each group.

    The pool of window None, if any, comes first. `windowed`: pairs of (group, window), for the groups with a window.
    `host`: the content of evicted blocks. `num_host_hits`: the number of blocks that were found on the host when a
    sequence resumed. If several groups restore blocks for the same tokens, these blocks count once. `copies`: for
    each group, the copies that the next step must make first (see `host_tier`).
    """

    def __init__(
        self,
        pools: Mapping[int | None, Pool[Entry]],
        block_size: int,
        host: HostTier[Entry],
        copies: Sequence[Copies],
    ) -> None:
        self.block_size = block_size
        self.host, self.copies = host, copies
        self.num_host_hits = 0
        self.windows, self.pools = list(pools), list(pools.values())
        self.windowed = [(group, window) for group, window in enumerate(pools) if window is not None]

    @property
    def num_available(self) -> int:
        """The number of free blocks in the group with the fewest free blocks."""
        return min(pool.num_free for pool in self.pools)

    def stats(self) -> tuple[PoolStats, ...]:
        """Return the usage of each group's pool."""
        return tuple(
            PoolStats(
                window,
                in_use=pool.num_blocks - pool.num_free,
                cached=pool.num_cached,
                empty=pool.num_free - pool.num_cached,
                on_host=slots.num_cached,
            )
            for window, pool, slots in zip(self.windows, self.pools, self.host.pools, strict=True)
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """For each group, return the maximum number of blocks that a sequence of `num_tokens` tokens ever holds.

        The tokens are computed in chunks of up to `chunk` tokens.
        """
        whole = self.blocks_for(num_tokens)
        return [whole if w is None else min(whole, self.blocks_for(w + chunk - 2) + 1) for w in self.windows]

    def first_needed(self, window: int, num_tokens: int) -> int:
        """Return the first block to which the token at position `num_tokens`, or a later token, can attend."""
        return max(0, num_tokens - window + 1) // self.block_size

    def can_hold(self, hits: Sequence[Entry], num_tokens: int, chunk: int) -> bool:
        """Return whether enough blocks are free for a sequence of `num_tokens` tokens that resumes after the cached
        prefix `hits`.

        The tokens are computed in chunks of up to `chunk` tokens, or in shorter chunks if a group with a window has too
        few blocks.
        """
        table, fresh = self._hit_table(hits), self.blocks_for(num_tokens) - len(hits)
        for group, needed in enumerate(self.blocks_needed(num_tokens, chunk)):
            pool, held = self.pools[group], table.held(group)
            if self.windows[group] is not None:
                needed = min(needed, max(1, pool.num_blocks - len(held)))
            if min(fresh, needed) + len(_on_host(held)) > pool.num_free_beside(held):
                return False
        return True

    def check_fits(self, num_tokens: int, chunk: int = 1) -> None:
        """Raise InvalidRequestError if a sequence of `num_tokens` tokens does not fit even if it runs alone. `chunk`:
        the number of tokens that may have to be computed in one step.
        """
        for needed, pool in zip(self.blocks_needed(num_tokens, chunk), self.pools, strict=True):
            if needed > pool.num_blocks:
                raise InvalidRequestError(
                    f"request needs {needed} KV blocks for {num_tokens} tokens ({self.block_size} tokens per block), "
                    f"but the worker has only {pool.num_blocks} blocks; request fewer tokens, or start the worker with "
                    "more KV memory",
                    value=needed,
                    limit=pool.num_blocks,
                )

    def allocate(self, hits: Sequence[Entry], num_new: int) -> Table:
        """Return a table that holds the blocks needed to resume after `hits`, plus `num_new` fresh blocks per group.
        Content of `hits` that is on the host is copied to additional fresh blocks.

        Raise RuntimeError if too few blocks are free.
        """
        table = self._hit_table(hits)
        held = [table.held(group) for group in range(len(self.pools))]
        free = min(
            pool.num_free_beside(each) - len(_on_host(each)) for pool, each in zip(self.pools, held, strict=True)
        )
        if num_new > free:
            raise RuntimeError(
                f"prefix cache: a block table needs {num_new} new blocks in addition to its cached blocks, but only "
                f"{free} blocks are free"
            )
        for group, (pool, each) in enumerate(zip(self.pools, held, strict=True)):
            pool.share(block for block in each if block >= 0)
            self.host.hold(group, _on_host(each))
        if any(map(_on_host, held)):
            self._restore(table, hits)
        self.extend(table, num_new)
        return table

    def extend(self, table: Table, num_new: int) -> None:
        """Add `num_new` fresh blocks of each group to a table. Enough blocks must be free."""
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            blocks.extend(pool.take(num_new))

    def fork(self, table: Table, num_tokens: int) -> Table:
        """Return a new table for the first `num_tokens` tokens of `table`.

        The new table shares the full blocks of `table`. If the last block is partial, the new table gets a fresh block,
        to which the partial block is copied. Enough blocks must be free.
        """
        num_full = num_tokens // self.block_size
        child = Table([blocks[:num_full] for blocks in table.blocks], table.starts.copy())
        for group, pool in enumerate(self.pools):
            pool.share(child.held(group))
        self.extend(child, len(table) - num_full)
        for copies, new, old in zip(self.copies, child.blocks, table.blocks, strict=True):
            copies.extend(zip(old[num_full:], new[num_full:], strict=True))
        return child

    def give_back(self, table: Table, num_computed: int) -> None:
        """Release each block of the table if no token at or after position `num_computed` attends to the block.

        To make a block available to later sequences after its release, publish the block before this call.
        """
        for group, window in self.windowed:
            start, first = table.starts[group], self.first_needed(window, num_computed)
            if start < first:
                self.pools[group].release(table.blocks[group][start:first])
                table.starts[group] = first

    def leaves_block(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """For each of N sequences, return whether it can release a block after advancing from `starts` to `ends`. The
        result is bool [N].
        """
        leaves = np.zeros(len(ends), np.bool_)
        for _, window in self.windowed:
            before, after = ((tokens - window + 1).clip(0) // self.block_size for tokens in (starts, ends))
            leaves |= before < after
        return leaves

    def publishes(self, table: Table) -> bool:
        """Return whether any block of a table is published."""
        pairs = zip(self.pools, range(len(table.blocks)), strict=False)
        return any(block in pool.published for pool, group in pairs for block in table.held(group))

    def release(self, table: Table) -> None:
        """Release all blocks of a table."""
        for group, pool in enumerate(self.pools[: len(table.blocks)]):
            pool.release(table.held(group))

    def _restore(self, table: Table, hits: Sequence[Entry]) -> None:
        """Copy content from held host slots to fresh blocks. In `table` and in the entries `hits`, the fresh blocks
        replace the places of the slots.
        """
        restored = set[int]()
        for group, (pool, blocks) in enumerate(zip(self.pools, table.blocks, strict=True)):
            for i in range(table.starts[group], len(hits)):
                if (place := blocks[i]) >= 0:
                    continue
                [block] = pool.take(1)  # may store another block on the host, but not in a slot that is held
                self.host.restore(group, place, block)
                self.host.drop(group, place)
                self.host.release(group, place)
                blocks[i] = hits[i].blocks[group] = block
                pool.published[block] = hits[i]
                restored.add(i)
        self.num_host_hits += len(restored)

    def _hit_table(self, hits: Sequence[Entry]) -> Table:
        """Return a table with the blocks that are needed to resume a prefix. If the content of a block is on the
        host, the table has the place of the content. No references are added.
        """
        num_tokens = len(hits) * self.block_size
        starts = [0 if window is None else self.first_needed(window, num_tokens) for window in self.windows]
        blocks = [
            array("q", [(entry.blocks[group] or 0) if i >= start else 0 for i, entry in enumerate(hits)])
            for group, start in enumerate(starts)
        ]
        return Table(blocks, starts)


def _on_host(blocks: Sequence[int]) -> list[int]:
    """Return the addresses in `blocks` that are places on the host."""
    return [block for block in blocks if block < 0]


class PrefixCache:
    """Finds published prefixes; each block holds `block_size` tokens.

    `num_blocks`: for each window, the number of blocks in its group. Window None, if any, comes first. `enabled`: if
    False, nothing is published, and no lookup has hits. `forget`: called with the entries that are removed from the
    index. `host_blocks`: for each group, the number of blocks that the host can hold; empty without a host tier.
    `tables`: allocates blocks. `identity`: computes the hashes of blocks. `claims`: the blocks that are being computed.
    """

    def __init__(
        self,
        num_blocks: Mapping[int | None, int],
        block_size: int,
        enabled: bool = True,
        forget: Callable[[Iterable[Entry]], object] = lambda entries: None,
        host_blocks: Sequence[int] = (),
    ) -> None:
        pools = {w: Pool[Entry](count, partial(self._lose, i)) for i, (w, count) in enumerate(num_blocks.items())}
        self.enabled = enabled
        self.block_size = block_size
        copies = [Copies() for _ in num_blocks]
        host = HostTier[Entry](host_blocks or [0] * len(num_blocks), copies, self._lose_on_host)
        self.tables = BlockTables(pools, block_size, host, copies)
        self.claims = Claims()
        self.identity = BlockIdentity(block_size)
        self._index: dict[bytes, Entry] = {}
        self._forget = forget

    @property
    def entries(self) -> Collection[Entry]:
        """All entries of the index."""
        return self._index.values()

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        """Return the entries of the longest prefix within tokens [0, limit) that can be resumed.

        Missing hashes of the chain are computed.
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
        """Return the longest prefix of `run` that can be resumed and that ends with a ready entry.

        `run`: consecutive entries, beginning with the entry of the first block. `is_ready`: tells whether an entry is
        ready; if None, all entries are ready.
        """
        windowed = self.tables.windowed
        if not windowed and is_ready is None:
            return run
        lost, found = dict.fromkeys(windowed, 0), 0  # for each window, the position of the last entry without a block
        for count, entry in enumerate(run, 1):
            for group, window in windowed:
                if entry.blocks[group] is None:
                    lost[group, window] = count
            needed = (self.tables.first_needed(window, count * self.block_size) for _, window in windowed)
            if (is_ready is None or is_ready(entry)) and all(map(le, lost.values(), needed)):
                found = count
        return run[:found]

    def find_claim(self, chain: Chain, num_hits: int, limit: int) -> bytes | None:
        """Find the blocks that other chains are computing and that directly follow the hits (see `Claims.find`). Return
        the hash of the last block that was found. The search is limited to blocks within tokens [0, limit).
        """
        return self.claims.find(chain, chain.hashes[num_hits : limit // self.block_size]) if self.enabled else None

    def publish(self, chain: Chain, tokens: array[int], table: Table, num_computed: int) -> None:
        """Publish the full blocks within tokens [0, num_computed). Chains of an earlier epoch are skipped."""
        if not self.enabled or not self.identity.is_current(chain):
            return
        for i in range(len(chain.entries), num_computed // self.block_size):
            content = self.identity.content(chain, tokens, i)
            if i == len(chain.hashes):
                self.identity.append(chain, *content)
            self.claims.fulfil(chain, chain.hashes[i])
            blocks = [group[i] for group in table.blocks]
            chain.entries.append(self._publish(chain, *content, blocks))

    def invalidate(self) -> None:
        """Drop all published prefixes and begin the next epoch. The references to blocks do not change."""
        self.identity.renew()
        for pool in self.tables.pools:
            pool.unpublish_all()
        self.tables.host.clear()
        self._forget([*self._index.values()])
        self._index.clear()
        self.claims.clear()

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise RuntimeError if `tables` do not account for every block, or if the index does not account for every
        published block.

        `tables`: the tables of all sequences.
        """
        tables, index = list(tables), list(self._index.items())
        wrong = {entry.hash for key, entry in index if key != entry.hash or not self._serves(entry)}
        for group, pool in enumerate(self.tables.pools):
            miscounted = pool.miscounted(block for table in tables for block in table.held(group))
            slots = self.tables.host.pools[group]
            named = {entry.blocks[group]: entry for _, entry in index if entry.blocks[group] is not None}
            listed = pool.published | {~slot: owner for slot, owner in slots.published.items()}
            if miscounted or wrong or named != listed or slots.miscounted([]):
                raise RuntimeError(
                    f"prefix cache: blocks {sorted(miscounted)} of window {self.tables.windows[group]} have wrong "
                    "reference counts, or the index does not match the published blocks"
                )

    def _find(self, key: bytes, parent: Entry | None, tokens: bytes, extra: bytes) -> Entry | None:
        entry = self._index.get(key)
        same = entry and entry.parent is parent and entry.tokens == tokens and entry.extra == extra
        return entry if same else None

    def _publish(self, chain: Chain, tokens: bytes, extra: bytes, blocks: list[int]) -> Entry:
        """Publish the next block of a chain in a new or an existing entry, and return the entry.

        If an existing entry lacks a block in a group, the entry gets the chain's block. If the entry already has a
        cached block, or content on the host, the chain's block replaces the cached block or the content, because the
        chain's block is in use. Without the replacement, the cached block could be reused while the sequence runs, and
        later blocks of the chain could not be found.
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
            if known is not None and known < 0:
                self.tables.host.drop(group, known)
            elif known is not None and pool.is_cached(known):
                pool.unpublish(known)
            elif known is not None:
                continue
            entry.blocks[group] = block
            pool.published[block] = entry
        return entry

    def _lose(self, group: int, entry: Entry) -> None:
        """Move the content of an entry's block in one group to the host, because the pool reuses the block. If the host
        has no slot, the content is lost.
        """
        block = entry.blocks[group]
        assert block is not None
        entry.blocks[group] = self.tables.host.store(group, block, entry)
        if not self._serves(entry):
            self._remove(entry)

    def _lose_on_host(self, group: int, entry: Entry) -> None:
        """Remove an entry's place in one group, because the host reuses the slot."""
        entry.blocks[group] = None
        if not self._serves(entry):
            self._remove(entry)

    def _serves(self, entry: Entry) -> bool:
        """Return whether an entry can be part of a prefix that can be resumed.

        If some layers have no window, the entry must have its block in the group of these layers. If all layers have
        windows, the entry must have a block in at least one group, or a child in the index.
        """
        if self.tables.windows[0] is None:
            return entry.blocks[0] is not None
        return entry.num_children > 0 or any(block is not None for block in entry.blocks)

    def _remove(self, entry: Entry) -> None:
        """Remove an entry from the index, together with ancestors that no longer serve a prefix."""
        last: Entry | None = entry
        while last is not None:
            del self._index[last.hash]
            self._forget([last])
            for group, block in enumerate(last.blocks):
                if block is not None and block < 0:
                    self.tables.host.drop(group, block)
                elif block is not None:
                    self.tables.pools[group].unpublish(block)
            last = self._left_alone(last.parent)

    def _left_alone(self, parent: Entry | None) -> Entry | None:
        """Return the parent of a removed entry if the parent must also be removed; otherwise None."""
        if parent is None:
            return None
        parent.num_children -= 1
        return parent if self._index.get(parent.hash) is parent and not self._serves(parent) else None
