"""Blocks of KV memory, who uses them, and which of them can be reused for the same prefix.

| owned here                                             | owned elsewhere                                          |
|--------------------------------------------------------|----------------------------------------------------------|
| each block's reference count                           | the tensors that blocks are made of (`model_runner`)     |
| free blocks in order of reuse: empty ones, the one     | which sequence holds which blocks (`sequence`)           |
| released last first, then cached (published) ones, the |                                                          |
| one released least recently first                      |                                                          |
| the hash index: prefix -> block, and its epoch         | when to allocate, fork or preempt (`scheduler`)          |
| claims: prefixes that a running sequence is computing  |                                                          |

A full block's identity is a chain: a 128-bit hash of its parent's hash, its token ids and extra identity (the request's
cache salt), keyed by a secret of this process that changes with every epoch. On a hit the token ids, the extra identity
and the parent are compared as well: a hash alone never decides.

Promises: lookup changes nothing; allocation happens whole or not at all; a block in use is never evicted; a cached
block can be hit until it is handed out again; `invalidate` drops the index, puts the cached blocks next in line, and
changes nothing else; what was computed under an earlier epoch is never published afterwards. Nothing but `invalidate`
and `check_integrity` costs more the more blocks there are.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A published block: its place in the index and what it holds. `parent` is the published block before it."""

    hash: bytes
    parent: Entry | None
    tokens: bytes
    extra: bytes
    block: int


@dataclass(slots=True)
class Chain:
    """The identity of one sequence's full blocks under one epoch.

    `hashes[i]` identifies block i; each is computed once. `entries[i]` is where block i was found or published. Hashes
    cover the blocks [0, known full blocks); entries, while the sequence runs, the blocks [0, computed full blocks).
    """

    epoch: int
    extra: bytes
    hashes: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def fork(self) -> Chain:
        """A chain that begins like this one and goes on by itself."""
        return Chain(self.epoch, self.extra, self.hashes.copy(), self.entries.copy())


class PrefixCache:
    """Allocates blocks and finds those that hold a known prefix. `num_blocks` blocks of `block_size` tokens each.

    With `enabled` false nothing is ever published, so that nothing is ever found. `forget` is told of entries that can
    be found no more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enabled: bool = True,
        forget: Callable[[Iterable[Entry]], object] = lambda entries: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self.epoch = 0
        self.evictions = 0
        self._key = secrets.token_bytes(32)
        self._references = [0] * num_blocks
        self._empty = list(reversed(range(num_blocks)))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, Entry] = {}
        self._published: dict[int, Entry] = {}
        self._claims: dict[bytes, Chain] = {}
        self._forget = forget

    @property
    def num_free(self) -> int:
        """Blocks without a reference, published or not."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that are still published."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def new_chain(self, cache_salt: str | None) -> Chain:
        """An empty chain of the current epoch; chains with different salts never share a block."""
        return Chain(self.epoch, b"" if cache_salt is None else b"salt:" + cache_salt.encode())

    def lookup(self, chain: Chain, tokens: array[int], limit: int) -> list[Entry]:
        """The longest published run of blocks that holds a prefix of tokens [0, limit). Fills in the chain's hashes."""
        hits: list[Entry] = []
        if not self.enabled:
            return hits
        self._extend_hashes(chain, tokens, len(tokens) // self.block_size)
        for i, key in enumerate(chain.hashes[: limit // self.block_size]):
            entry = self._find(key, hits[-1] if hits else None, self._block_tokens(tokens, i), chain.extra)
            if entry is None:
                break
            hits.append(entry)
        return hits

    def find_claim(self, chain: Chain, num_hits: int, limit: int) -> bytes | None:
        """Of the blocks after the hits that lie within [0, limit) tokens and are being computed by other chains, the
        hash of the last one in a row; None if the first one is not.
        """
        found = None
        if self.enabled:
            for key in chain.hashes[num_hits : limit // self.block_size]:
                if self._claims.get(key, chain) is chain:
                    break
                found = key
        return found

    def is_claimed(self, key: bytes) -> bool:
        """Whether the block with this hash is being computed."""
        return key in self._claims

    def can_allocate(self, hits: Sequence[Entry], num_new: int) -> bool:
        """Whether `num_new` blocks are free beside the hits."""
        return num_new <= self.num_free - sum(entry.block in self._cached for entry in hits)

    def allocate(self, hits: Sequence[Entry], num_new: int) -> list[int]:
        """References the hit blocks and `num_new` fresh ones, in this order. Raise RuntimeError if too few are free."""
        if not self.can_allocate(hits, num_new):
            raise RuntimeError(f"prefix cache: expected {num_new} free blocks, found {self.num_free} with the hits")
        self.share([entry.block for entry in hits])
        return [entry.block for entry in hits] + [self._take_free() for _ in range(num_new)]

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
            if block in self._published:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def claim(self, chain: Chain) -> None:
        """Announces that the owner of `chain` is about to compute all its known blocks that no one else has claimed."""
        for key in chain.hashes[len(chain.entries) :]:
            self._claims.setdefault(key, chain)

    def unclaim(self, chain: Chain) -> None:
        """Withdraws what `claim` announced and `publish` has not fulfilled."""
        for key in chain.hashes[len(chain.entries) :]:
            self._drop_claim(key, chain)

    def publish(self, chain: Chain, tokens: array[int], table: Sequence[int], num_computed: int) -> None:
        """Makes the full blocks of the computed tokens [0, num_computed) findable, if the epoch is still theirs."""
        if not self.enabled or chain.epoch != self.epoch:
            return
        num_full = num_computed // self.block_size
        self._extend_hashes(chain, tokens, num_full)
        for i in range(len(chain.entries), num_full):
            parent = chain.entries[-1] if chain.entries else None
            self._drop_claim(chain.hashes[i], chain)
            chain.entries.append(
                self._publish(Entry(chain.hashes[i], parent, self._block_tokens(tokens, i), chain.extra, table[i]))
            )

    def invalidate(self) -> None:
        """Forgets every published prefix and begins the next epoch; blocks and references stay as they are.

        Free blocks that held a prefix are handed out next, the longest released one first: their memory has been used,
        that of others perhaps never.
        """
        self.epoch += 1
        self._key = secrets.token_bytes(32)
        self._empty.extend(reversed(self._cached))
        self._cached.clear()
        self._forget([*self._index.values()])
        self._index.clear()
        self._published.clear()
        self._claims.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless `tables`, the blocks of every sequence, account for each block exactly."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        wrong = [b for b in range(self.num_blocks) if counts[b] != self._references[b]]
        free = Counter(self._empty + list(self._cached))
        wrong += [b for b in range(self.num_blocks) if free[b] != (counts[b] == 0)]
        wrong += [b for b in self._empty if b in self._published]
        wrong += [b for b in self._cached if b not in self._published]
        wrong += [e.block for e in self._index.values() if self._published.get(e.block) is not e]
        wrong += [b for b, e in self._published.items() if self._index.get(e.hash) is not e]
        if wrong:
            raise RuntimeError(f"prefix cache: blocks {sorted(set(wrong))} are not counted exactly once")

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

    def _publish(self, entry: Entry) -> Entry:
        """The entry now in the index for this content: one that was there before, or `entry`."""
        if existing := self._find(entry.hash, entry.parent, entry.tokens, entry.extra):
            return existing
        if other := self._index.get(entry.hash):
            self._unpublish(other.block)
        self._index[entry.hash] = self._published[entry.block] = entry
        return entry

    def _unpublish(self, block: int) -> None:
        """Takes the block's place in the index from it; another one has it."""
        self._forget([self._published.pop(block)])
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def _take_free(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            entry = self._published.pop(block)
            del self._index[entry.hash]
            self._forget([entry])
            self.evictions += 1
        self._references[block] = 1
        return block

    def _drop_claim(self, key: bytes, chain: Chain) -> None:
        if self._claims.get(key) is chain:
            del self._claims[key]
