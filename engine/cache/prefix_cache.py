"""The index of known prefixes, over the blocks of KV memory that hold them.

| owned here                                             | owned elsewhere                                          |
|--------------------------------------------------------|----------------------------------------------------------|
| the hash index: prefix -> its blocks, and its epoch    | the tensors that blocks are made of (`model_runner`)     |
| which blocks a prefix needs so that it can be resumed  | each block's references, and which are free (`pool`)     |
| claims: prefixes that a running sequence is computing  | which sequence has which table (`sequence`)              |
|                                                        | when to allocate, fork or preempt (`scheduler`)          |

Layers of one window are a group, with a pool of blocks of their own; those without a window are the group of window
None. An entry of the index is a prefix that ends with a full block, and names the block of each group that holds the KV
of its last tokens, as long as that has not been handed out to others. A sequence gives a block back once no later query
of its can reach it; what was published of it may be hit until it is handed out.

A prefix of L tokens can be resumed if the group of window None holds the KV of all its tokens, and a group of window W
that of tokens [L - W + 1, L), which is what the token at L attends to beside itself.

A full block's identity is a chain: a 128-bit hash of its parent's hash, its token ids and extra identity (the request's
cache salt), keyed by a secret of this process that changes with every epoch. On a hit the token ids, the extra identity
and the parent are compared as well: a hash alone never decides.

Promises: lookup changes nothing; allocation happens whole or not at all; a block in use is never evicted; a cached
block can be hit until it is handed out again, or until one in use, with the same KV, takes its place; `invalidate`
drops the index, puts the cached blocks next in line, and changes nothing else; what was computed under an earlier epoch
is never published afterwards. Nothing but `invalidate` and `check_integrity` costs more the more blocks there are.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import le

import numpy as np

from .pool import Pool


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
    `has_records`: what it publishes is published with a record that others may wait for.
    """

    epoch: int
    extra: bytes
    has_records: bool = False
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def fork(self) -> Chain:
        """A chain that begins like this one and goes on by itself."""
        return Chain(self.epoch, self.extra, self.has_records, self.hashes.copy(), self.entries.copy())


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


class PrefixCache:
    """Finds and allocates blocks of `block_size` tokens. `num_blocks`: how many the layers of each window share; those
    of window None, if there are such layers, come first.

    With `enabled` false nothing is ever published, so that nothing is ever found. `forget` is told of entries that can
    be found no more.
    """

    def __init__(
        self,
        num_blocks: Mapping[int | None, int],
        block_size: int,
        enabled: bool = True,
        forget: Callable[[Iterable[Entry]], object] = lambda entries: None,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.epoch = 0
        self.windows = list(num_blocks)
        self.pools = [Pool[Entry](count, partial(self._lose, i)) for i, count in enumerate(num_blocks.values())]
        self._windowed = [(group, window) for group, window in enumerate(num_blocks) if window is not None]
        self._key = secrets.token_bytes(32)
        self._index: dict[bytes, Entry] = {}
        self._claims: dict[bytes, Chain] = {}
        self._forget = forget

    @property
    def evictions(self) -> int:
        """How many cached blocks were handed out so far, of all groups."""
        return sum(pool.evictions for pool in self.pools)

    @property
    def entries(self) -> Collection[Entry]:
        """All that are in the index."""
        return self._index.values()

    @property
    def num_available(self) -> int:
        """Blocks that can be had of each group at once."""
        return min(pool.num_free for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def new_chain(self, cache_salt: str | None, has_records: bool = False) -> Chain:
        """An empty chain of the current epoch; chains with different salts never share a block."""
        return Chain(self.epoch, b"" if cache_salt is None else b"salt:" + cache_salt.encode(), has_records)

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        """The entries of the longest prefix of tokens [0, limit) that can be resumed; fills in the chain's hashes."""
        hits: list[Entry] = []
        if not self.enabled:
            return hits
        self._extend_hashes(chain, tokens, len(tokens) // self.block_size)
        for i, key in enumerate(chain.hashes[: limit // self.block_size]):
            entry = self._find(key, hits[-1] if hits else None, self._block_tokens(tokens, i), chain.extra)
            if entry is None:
                break
            hits.append(entry)
        return self.deepest(hits) if self._windowed else hits

    def deepest(self, run: list[Entry], is_ready: Callable[[Entry], bool] = lambda entry: True) -> list[Entry]:
        """The longest beginning of a run of entries that can be resumed and ends with one that is ready."""
        lost, found = dict.fromkeys(self._windowed, 0), 0  # the last entry that lacks a block of each window
        for count, entry in enumerate(run, 1):
            for group, window in self._windowed:
                if entry.blocks[group] is None:
                    lost[group, window] = count
            needed = (self._first_needed(window, count * self.block_size) for _, window in self._windowed)
            if is_ready(entry) and all(map(le, lost.values(), needed)):
                found = count
        return run[:found]

    def find_claim(self, chain: Chain, num_hits: int, limit: int) -> bytes | None:
        """Of the blocks after the hits that lie within [0, limit) tokens and are being computed by other chains, with
        records if this one has some, the hash of the last one in a row; None if the first one is not.
        """
        found = None
        if self.enabled:
            for key in chain.hashes[num_hits : limit // self.block_size]:
                other = self._claims.get(key, chain)
                if other is chain or chain.has_records > other.has_records:
                    break
                found = key
        return found

    def is_claimed(self, key: bytes) -> bool:
        """Whether the block with this hash is being computed."""
        return key in self._claims

    def blocks_needed(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """The most blocks that a sequence has of each group at a time until it has `num_tokens` tokens, which are
        computed in chunks of up to `chunk`.
        """
        whole = self.blocks_for(num_tokens)
        return [whole if w is None else min(whole, self.blocks_for(w + chunk - 2) + 1) for w in self.windows]

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
        for group, window in self._windowed:
            start, first = table.starts[group], self._first_needed(window, num_computed)
            if start < first:
                self.pools[group].release(table.blocks[group][start:first])
                table.starts[group] = first

    def leave_windows(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Whether a window leaves a block behind, for each sequence that went on from `starts` to `ends`: bool [N]."""
        left = np.zeros(len(ends), np.bool_)
        for _, window in self._windowed:
            before, after = ((tokens - window + 1).clip(0) // self.block_size for tokens in (starts, ends))
            left |= before < after
        return left

    def release(self, table: Table) -> None:
        """Releases all blocks of a table."""
        for group, pool in enumerate(self.pools[: len(table.blocks)]):
            pool.release(table.held(group))

    def claim(self, chain: Chain) -> None:
        """Announces that the owner of `chain` is about to compute all its known blocks that no one else has claimed."""
        for key in chain.hashes[len(chain.entries) :]:
            self._claims.setdefault(key, chain)

    def unclaim(self, chain: Chain) -> None:
        """Withdraws what `claim` announced and `publish` has not fulfilled."""
        for key in chain.hashes[len(chain.entries) :]:
            self._drop_claim(key, chain)

    def publish(self, chain: Chain, tokens: array[int], table: Table, num_computed: int) -> None:
        """Makes the full blocks of the computed tokens [0, num_computed) findable, if the epoch is still theirs."""
        if not self.enabled or chain.epoch != self.epoch:
            return
        num_full = num_computed // self.block_size
        self._extend_hashes(chain, tokens, num_full)
        for i in range(len(chain.entries), num_full):
            self._drop_claim(chain.hashes[i], chain)
            blocks = [group[i] for group in table.blocks]
            chain.entries.append(self._publish(chain, self._block_tokens(tokens, i), blocks))

    def invalidate(self) -> None:
        """Forgets every published prefix and begins the next epoch; blocks and references stay as they are."""
        self.epoch += 1
        self._key = secrets.token_bytes(32)
        for pool in self.pools:
            pool.unpublish_all()
        self._forget([*self._index.values()])
        self._index.clear()
        self._claims.clear()

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise RuntimeError unless `tables`, those of all sequences, account for each block exactly, and the index for
        each that is published.
        """
        tables, index = list(tables), list(self._index.items())
        wrong = {entry.hash for key, entry in index if key != entry.hash or not self._serves(entry)}
        for group, pool in enumerate(self.pools):
            miscounted = pool.miscounted(block for table in tables for block in table.held(group))
            named = {entry.blocks[group]: entry for _, entry in index if entry.blocks[group] is not None}
            if miscounted or wrong or named != pool.published:
                raise RuntimeError(
                    f"prefix cache: blocks {sorted(miscounted)} of window {self.windows[group]} are not counted "
                    "exactly once, or the index does not agree with what is published"
                )

    def _first_needed(self, window: int, num_tokens: int) -> int:
        """The first block that the token at `num_tokens`, and those after it, can reach."""
        return max(0, num_tokens - window + 1) // self.block_size

    def _hit_table(self, hits: Sequence[Entry]) -> Table:
        """What is needed of the blocks of a prefix that can be resumed."""
        num_tokens = len(hits) * self.block_size
        starts = [0 if window is None else self._first_needed(window, num_tokens) for window in self.windows]
        blocks = [array("q", [entry.blocks[group] or 0 for entry in hits]) for group in range(len(self.pools))]
        return Table(blocks, starts)

    def _extend_hashes(self, chain: Chain, tokens: array[int], num_blocks: int) -> None:
        for i in range(len(chain.hashes), num_blocks):
            parent = chain.hashes[-1] if chain.hashes else bytes(16)
            chain.hashes.append(self._digest(parent + self._block_tokens(tokens, i) + chain.extra))

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key).digest()

    def _block_tokens(self, tokens: array[int], i: int) -> bytes:
        return tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _find(self, key: bytes, parent: Entry | None, tokens: bytes, extra: bytes) -> Entry | None:
        entry = self._index.get(key)
        same = entry and entry.parent is parent and entry.tokens == tokens and entry.extra == extra
        return entry if same else None

    def _publish(self, chain: Chain, tokens: bytes, blocks: list[int]) -> Entry:
        """The entry for the next block of a chain: one that was there, which gets what it lacks, or a new one.

        A block in use takes the place of a cached one, which could be handed out while the chain goes on: what is
        published behind it would be out of reach.
        """
        parent, key = chain.entries[-1] if chain.entries else None, chain.hashes[len(chain.entries)]
        entry = self._find(key, parent, tokens, chain.extra)
        if entry is None:
            if other := self._index.get(key):
                self._remove(other)
            entry = self._index[key] = Entry(key, parent, tokens, chain.extra, [None] * len(blocks))
            if parent is not None:
                parent.num_children += 1
        for pool, group, block in zip(self.pools, range(len(blocks)), blocks, strict=True):
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
        if self.windows[0] is None:
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
                    self.pools[group].unpublish(block)
            last = self._left_alone(last.parent)

    def _left_alone(self, parent: Entry | None) -> Entry | None:
        """An entry that has lost a child, if it is in the index and serves no more."""
        if parent is None:
            return None
        parent.num_children -= 1
        return parent if self._index.get(parent.hash) is parent and not self._serves(parent) else None

    def _drop_claim(self, key: bytes, chain: Chain) -> None:
        if self._claims.get(key) is chain:
            del self._claims[key]
