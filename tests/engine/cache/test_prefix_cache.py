"""The prefix cache against a model that knows the content of every block and finds prefixes without hashes."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from matrix import thinned
from random_calls import run_until_seen

from trueroll.engine.cache.pool import Pool
from trueroll.engine.cache.prefix_cache import Chain, Entry, PrefixCache, Table

from ..caches import CollidingCache, CountingCache

BLOCK_SIZE = 2
NUM_BLOCKS = 7
PROFILE = settings(derandomize=True, deadline=None, max_examples=300, stateful_step_count=50)
TOKENS = st.builds(lambda shared, own: [0] * shared + own, st.integers(1, 7), st.lists(st.integers(0, 1), max_size=2))

Prefix = tuple[int, ...]
Key = tuple[str | None, Prefix]
Content = tuple[int, str | None, Prefix]
"""The content of a slot: the epoch and the salt under which it was computed, and all tokens up to its own."""


@dataclass(eq=False)
class Node:
    """A published prefix in the model. For each group, the node has the prefix's last block until that block is handed
    out.
    """

    blocks: list[int | None]
    parent: Node | None


@dataclass(eq=False)
class Holder:
    """A sequence in the model.

    `contents`: for each group, the expected content of the slots of its tokens [0, num_computed), from the first block
    on that the sequence has not released.
    """

    chain: Chain
    salt: str | None
    tokens: array[int]
    table: Table
    nodes: list[Node]
    contents: list[Content]

    def key(self, i: int) -> Key:
        return self.salt, tuple(self.tokens[: (i + 1) * BLOCK_SIZE])


@dataclass
class Model:
    """Published prefixes by their whole text, the free blocks of each group in order of reuse, and all claims."""

    groups: dict[int | None, int]
    index: dict[Key, Node] = field(default_factory=dict)
    claims: dict[Key, Chain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [list(range(count)) for count in self.groups.values()]

    def walk(self, salt: str | None, tokens: array[int], limit: int) -> list[Node]:
        found: list[Node] = []
        for end in range(BLOCK_SIZE, limit + 1, BLOCK_SIZE):
            node = self.index.get((salt, tuple(tokens[:end])))
            if node is None or node.parent is not (found[-1] if found else None):
                break
            found.append(node)
        return found

    def find(self, salt: str | None, tokens: array[int], limit: int) -> list[Node]:
        """Return the longest prefix with which the cache has every token that the next token attends to."""
        run = self.walk(salt, tokens, limit)
        return run[: max(count for count in range(len(run) + 1) if self.is_whole(run[:count]))]

    def is_whole(self, run: list[Node]) -> bool:
        needed = [
            run[p // BLOCK_SIZE].blocks[group]
            for group, window in enumerate(self.groups)
            for p in range(first_needed(window, len(run) * BLOCK_SIZE) * BLOCK_SIZE, len(run) * BLOCK_SIZE)
        ]
        return None not in needed

    def publish(self, holder: Holder) -> None:
        for i in range(len(holder.nodes), len(holder.contents) // BLOCK_SIZE):
            parent = holder.nodes[-1] if holder.nodes else None
            key = holder.key(i)
            if key not in self.index or self.index[key].parent is not parent:
                self.drop(key)
                self.index[key] = Node([None] * len(self.groups), parent)
            own = [blocks[i] for blocks in holder.table.blocks]
            self.take_over(self.index[key], own)
            holder.nodes.append(self.index[key])
            if self.claims.get(key) is holder.chain:
                del self.claims[key]

    def take_over(self, node: Node, own: list[int]) -> None:
        """Give a node its missing blocks, and replace its free blocks."""
        for group, free in enumerate(self.free):
            old = node.blocks[group]
            if old in free:
                free.remove(old)
                free.insert(0, old)
            if old is None or old in free:
                node.blocks[group] = own[group]

    def take(self, group: int, hits: list[int], num_new: int) -> list[int]:
        free = [b for b in self.free[group] if b not in hits]
        taken, self.free[group] = free[:num_new], free[num_new:]
        for block in taken:
            for node in [node for node in self.index.values() if node.blocks[group] == block]:
                node.blocks[group] = None
                self.drop_useless()
        return taken

    def drop_useless(self) -> None:
        """Remove nodes that can no longer be found."""
        while lost := [key for key, node in self.index.items() if not self.serves(node)]:
            self.drop(lost[0])

    def drop(self, key: Key) -> None:
        """Remove a node, if there is one. The node's blocks become empty, and are handed out first."""
        node = self.index.pop(key, None)
        for free, block in zip(self.free, node.blocks if node else [], strict=False):
            if block in free:
                free.remove(block)
                free.insert(0, block)
        if node:
            self.drop_useless()

    def serves(self, node: Node) -> bool:
        if None in self.groups:
            return node.blocks[0] is not None
        return node.blocks != [None] * len(self.groups) or any(other.parent is node for other in self.index.values())

    def release(self, group: int, unused: list[int]) -> None:
        published = {node.blocks[group] for node in self.index.values()}
        for block in unused:
            self.free[group].insert(len(self.free[group]) if block in published else 0, block)


def first_needed(window: int | None, end: int) -> int:
    return 0 if window is None else max(0, end - window + 1) // BLOCK_SIZE


def free_blocks(pool: Pool[Entry]) -> list[int]:
    """Return the free blocks in order of reuse."""
    return pool._empty[::-1] + list(pool._cached)


def state_of(cache: PrefixCache) -> tuple[Any, ...]:
    """Return the whole state of a cache, as values that later changes do not affect."""
    claims = {key: (id(chain), list(chain.hashes), list(chain.entries)) for key, chain in cache.claims._chains.items()}
    pools = [
        (list(pool._references), free_blocks(pool), dict(pool.published), pool.evictions) for pool in cache.tables.pools
    ]
    index = {key: (entry, list(entry.blocks), entry.num_children) for key, entry in cache._index.items()}
    return pools, index, claims, cache.identity.epoch, cache.identity._key


class PrefixCacheMachine(RuleBasedStateMachine):
    """Adds, computes, extends, forks and releases sequences in any order, in a cache with far too few blocks."""

    make_cache: type[CountingCache] = CountingCache
    num_blocks: dict[int | None, int] = {None: NUM_BLOCKS}
    hashes_collide = False
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.make_cache(self.num_blocks, BLOCK_SIZE)
        self.model = Model(self.num_blocks)
        self.holders: list[Holder] = []
        self.kv: list[list[list[Content | None]]] = [
            [[None] * BLOCK_SIZE for _ in range(count)] for count in self.num_blocks.values()
        ]
        self.chains: list[tuple[Chain, int]] = []

    def new_chain(self, salt: str | None) -> Chain:
        chain = self.cache.identity.new_chain(salt)
        self.chains.append((chain, 0))
        return chain

    def contents(self, salt: str | None, tokens: array[int], start: int, end: int) -> list[Content]:
        return [(self.cache.identity.epoch, salt, tuple(tokens[: p + 1])) for p in range(start, end)]

    def look(self, chain: Chain, salt: str | None, tokens: array[int], limit: int) -> list[Entry]:
        """Look up a prefix. Check that the lookup changes nothing and finds exactly the blocks that can be found."""
        before = state_of(self.cache)
        hits = self.cache.lookup(chain, tokens, limit)
        claim = self.cache.find_claim(chain, len(hits), limit)
        assert state_of(self.cache) == before
        end = len(hits) * BLOCK_SIZE
        assert end <= limit
        expected = self.contents(salt, tokens, 0, end)
        for group, window in enumerate(self.num_blocks):
            first = first_needed(window, end)
            held = [content for block in self.needed(hits, group) for content in self.kv[group][block]]
            assert held == expected[first * BLOCK_SIZE :]
        missed = chain.hashes[len(hits) : limit // BLOCK_SIZE]
        if self.hashes_collide:
            self.seen["collision refused"] += any(key in self.cache._index for key in missed[:1])
        else:
            found = self.model.find(salt, tokens, limit)
            assert [hit.blocks for hit in hits] == [node.blocks for node in found]
            self.seen["shortened"] += len(found) < len(self.model.walk(salt, tokens, limit))
            self.seen["hit of a released block"] += any(None in node.blocks for node in found)
            ends = range((len(hits) + 1) * BLOCK_SIZE, limit + 1, BLOCK_SIZE)
            owners = [self.model.claims.get((salt, tuple(tokens[:end])), chain) for end in ends]
            claimed = [key for key, _ in takewhile(lambda pair: pair[1] is not chain, zip(missed, owners, strict=True))]
            assert claim == (claimed[-1] if claimed else None)
            self.seen["wait for several claims"] += len(claimed) > 1
        assert claim is None or claim in self.cache.claims
        self.seen["hit"] += bool(hits)
        self.seen["hit of a free block"] += any(hit.blocks[0] in self.cache.tables.pools[0]._cached for hit in hits)
        self.seen["wait for a claim"] += claim is not None
        return hits

    def needed(self, hits: list[Entry], group: int) -> list[int]:
        first = first_needed([*self.num_blocks][group], len(hits) * BLOCK_SIZE)
        blocks = [hit.blocks[group] for hit in hits[first:]]
        return [block for block in blocks if block is not None]

    def allocate(self, hits: list[Entry], num_new: int) -> Table | None:
        """Allocate. Check that an allocation is all or nothing, takes the oldest free blocks first, and never takes a
        block in use.
        """
        before = state_of(self.cache)
        needed = [self.needed(hits, group) for group in range(len(self.kv))]
        free = [[b for b in free_blocks(pool) if b not in needed[g]] for g, pool in enumerate(self.cache.tables.pools)]
        if num_new > min(map(len, free)):
            with pytest.raises(RuntimeError, match=f"needs {num_new} new blocks"):
                self.cache.tables.allocate(hits, num_new)
            assert state_of(self.cache) == before
            self.seen["refused"] += 1
            return None
        table = self.cache.tables.allocate(hits, num_new)
        for group, blocks in enumerate(table.blocks):
            assert list(table.held(group)[: len(needed[group])]) == needed[group]
            fresh, taken = list(blocks[len(hits) :]), self.model.take(group, needed[group], num_new)
            assert len(fresh) == num_new and set(fresh) <= set(free[group])
            assert self.hashes_collide or fresh == taken
        return table

    def pick(self, number: int) -> Holder:
        return self.holders[number % len(self.holders)]

    def release_in_model(self, group: int, blocks: list[int]) -> None:
        used = {block for holder in self.holders for block in holder.table.held(group)}
        self.model.release(group, [block for block in reversed(blocks) if block not in used])

    @rule(tokens=TOKENS, salt=st.sampled_from([None, "a"]))
    def probe(self, tokens: list[int], salt: str | None) -> None:
        self.look(self.new_chain(salt), salt, array("i", tokens), len(tokens))

    @rule(
        tokens=TOKENS,
        salt=st.sampled_from([None, None, "a"]),
        may_hit=st.sampled_from([True, True, False]),
    )
    def admit(self, tokens: list[int], salt: str | None, may_hit: bool) -> None:
        prompt, chain = array("i", tokens), self.new_chain(salt)
        hits = self.look(chain, salt, prompt, len(prompt) - 1 if may_hit else 0)
        nodes = self.model.find(salt, prompt, len(hits) * BLOCK_SIZE)
        table = self.allocate(hits, self.cache.tables.blocks_for(len(prompt)) - len(hits))
        if table is None:
            return
        chain.entries = hits
        self.cache.claims.add(chain)
        contents = self.contents(salt, prompt, 0, len(hits) * BLOCK_SIZE)
        holder = Holder(chain, salt, prompt, table, nodes, contents)
        for i in range(len(hits), len(prompt) // BLOCK_SIZE):
            self.model.claims.setdefault(holder.key(i), chain)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 7), size=st.integers(1, 9))
    def compute(self, number: int, size: int) -> None:
        holder = self.pick(number)
        start = len(holder.contents)
        end = min(start + size, len(holder.tokens))
        holder.contents += self.contents(holder.salt, holder.tokens, start, end)
        for group, kv in enumerate(self.kv):
            for p in range(start, end):
                block = holder.table.blocks[group][p // BLOCK_SIZE]
                assert [other for other in self.holders if block in other.table.held(group)] == [holder]
                kv[block][p % BLOCK_SIZE] = holder.contents[p]
        before = state_of(self.cache)
        self.cache.publish(holder.chain, holder.tokens, holder.table, end)
        if holder.chain.epoch == self.cache.identity.epoch:
            self.model.publish(holder)
            named = [entry.blocks[0] for entry in holder.chain.entries[start // BLOCK_SIZE :]]
            self.seen["computed twice"] += list(holder.table.blocks[0][start // BLOCK_SIZE :][: len(named)]) != named
        else:
            assert state_of(self.cache) == before
            self.seen["computed under an old epoch"] += end // BLOCK_SIZE > start // BLOCK_SIZE
        self.give_back(holder, end)

    def give_back(self, holder: Holder, end: int) -> None:
        before = [list(holder.table.held(group)) for group in range(len(self.kv))]
        self.cache.tables.give_back(holder.table, end)
        for group, window in enumerate(self.num_blocks):
            assert holder.table.starts[group] == first_needed(window, end)
            given = before[group][: len(before[group]) - len(holder.table.held(group))]
            self.release_in_model(group, given)
            self.seen["gave back"] += bool(given)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 7), token=st.integers(0, 1))
    def grow(self, number: int, token: int) -> None:
        holder = self.pick(number)
        num_new = self.cache.tables.blocks_for(len(holder.tokens) + 1) - len(holder.table)
        if num_new <= self.cache.tables.num_available:
            holder.tokens.append(token)
            taken = [self.model.take(group, [], num_new) for group in range(len(self.kv))]
            self.cache.tables.extend(holder.table, num_new)
            fresh = [list(blocks[len(blocks) - num_new :]) for blocks in holder.table.blocks]
            assert self.hashes_collide or fresh == taken

    @precondition(lambda self: any(len(h.contents) == len(h.tokens) for h in self.holders))
    @rule(number=st.integers(0, 7))
    def fork(self, number: int) -> None:
        complete = [h for h in self.holders if len(h.contents) == len(h.tokens)]
        parent = complete[number % len(complete)]
        num_full = len(parent.tokens) // BLOCK_SIZE
        num_new = len(parent.table) - num_full
        if num_new > self.cache.tables.num_available:
            return
        taken = [self.model.take(group, [], num_new) for group in range(len(self.kv))]
        table, copies = self.cache.tables.fork(parent.table, len(parent.tokens)), self.cache.tables.copies
        for group, kv in enumerate(self.kv):
            assert table.blocks[group][:num_full] == parent.table.blocks[group][:num_full]
            assert [source for source, _ in copies[group]] == list(parent.table.blocks[group][num_full:])
            assert [destination for _, destination in copies[group]] == list(table.blocks[group][num_full:])
            assert self.hashes_collide or [destination for _, destination in copies[group]] == taken[group]
            for source, destination in copies[group]:
                kv[destination] = kv[source].copy()
            copies[group].clear()
        chain = parent.chain.fork()
        self.chains.append((chain, len(chain.hashes)))
        child = Holder(chain, parent.salt, parent.tokens[:], table, parent.nodes.copy(), parent.contents.copy())
        self.holders.append(child)
        self.seen["fork"] += 1

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 7))
    def release(self, number: int) -> None:
        holder = self.pick(number)
        self.holders.remove(holder)
        self.cache.claims.withdraw(holder.chain)
        self.cache.tables.release(holder.table)
        self.model.claims = {key: chain for key, chain in self.model.claims.items() if chain is not holder.chain}
        for group in range(len(self.kv)):
            self.release_in_model(group, list(holder.table.held(group)))

    @rule(really=st.sampled_from([True, *[False] * 4]))
    def invalidate(self, really: bool) -> None:
        if not really:
            return
        before = state_of(self.cache)
        self.cache.invalidate()
        pools, index, claims, epoch, _ = state_of(self.cache)
        for group, (old, new) in enumerate(zip(before[0], pools, strict=True)):
            free, published = self.model.free[group], old[2]
            self.model.free[group] = [b for b in free if b in published] + [b for b in free if b not in published]
            assert new[0] == old[0] and sorted(new[1]) == sorted(old[1]) and new[2] == {}
        assert (index, claims) == ({}, {})
        assert epoch == before[3] + 1
        self.model.index.clear()
        self.model.claims.clear()
        self.seen["invalidate while in use"] += bool(self.holders)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        tables = [holder.table for holder in self.holders]
        self.cache.check_integrity(tables)
        for group, pool in enumerate(self.cache.tables.pools):
            used = {block for table in tables for block in table.held(group)}
            assert pool.num_free == pool.num_blocks - len(used)
            assert used.isdisjoint(free_blocks(pool))
            assert self.hashes_collide or free_blocks(pool) == self.model.free[group]
            assert pool.num_cached == len(set(pool.published) - used)
        self.seen["eviction"] += sum(pool.evictions for pool in self.cache.tables.pools) > 0

    @invariant()
    def running_sequences_are_whole(self) -> None:
        for holder in self.holders:
            for group, window in enumerate(self.num_blocks):
                first, blocks = first_needed(window, len(holder.contents)) * BLOCK_SIZE, holder.table.blocks[group]
                places = range(first, len(holder.contents))
                assert [self.kv[group][blocks[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in places] == holder.contents[
                    first:
                ]

    @invariant()
    def each_hash_was_computed_once(self) -> None:
        assert self.cache.digests == sum(len(chain.hashes) - inherited for chain, inherited in self.chains)


class CollidingMachine(PrefixCacheMachine):
    """The cache machine with only two different hashes: hits are still correct, and no block is lost."""

    make_cache = CollidingCache
    hashes_collide = True
    seen: Counter[str] = Counter()


class WindowMachine(PrefixCacheMachine):
    """Layers without a window, and layers with one of two windows."""

    num_blocks = {None: NUM_BLOCKS, 3: 5, 4: 6}
    seen: Counter[str] = Counter()


class WindowsAloneMachine(PrefixCacheMachine):
    """All layers have a window."""

    num_blocks = {3: 5}
    seen: Counter[str] = Counter()


class CollidingWindowMachine(CollidingMachine):
    """Layers with a window, and only two different hashes."""

    num_blocks = {None: NUM_BLOCKS, 3: 5}
    seen: Counter[str] = Counter()


EVENTS = {
    "hit",
    "hit of a free block",
    "wait for a claim",
    "refused",
    "computed twice",
    "computed under an old epoch",
    "fork",
    "invalidate while in use",
    "eviction",
}


@pytest.mark.parametrize(
    ("machine", "events"),
    [
        (PrefixCacheMachine, EVENTS | {"wait for several claims"}),
        (CollidingMachine, EVENTS | {"collision refused"}),
        (WindowMachine, EVENTS | {"gave back", "shortened", "hit of a released block"}),
        (WindowsAloneMachine, EVENTS | {"gave back", "shortened", "hit of a released block"}),
        # With two hashes and few blocks, a block is rarely computed twice.
        (CollidingWindowMachine, EVENTS - {"computed twice"} | {"gave back", "collision refused"}),
    ],
)
@pytest.mark.parametrize("examples", [200, 300])
@thinned(lambda machine, events, examples: examples == 200 and machine not in (CollidingMachine, WindowMachine))
def test_any_order_of_operations_agrees_with_the_model(
    machine: type[PrefixCacheMachine], events: set[str], examples: int
) -> None:
    machine.seen.clear()
    run_until_seen(machine, settings(PROFILE, max_examples=examples), lambda: events - (+machine.seen).keys())


def publish(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> Table:
    """Compute and publish the blocks of a sequence, and return the table. The sequence keeps its blocks."""
    chain, text = cache.identity.new_chain(salt), array("i", tokens)
    table = cache.tables.allocate([], cache.tables.blocks_for(len(tokens)))
    cache.publish(chain, text, table, len(tokens))
    return table


def blocks_of(table: Table) -> list[int]:
    return list(table.blocks[0])


def take(cache: PrefixCache, count: int) -> list[int]:
    return blocks_of(cache.tables.allocate([], count))


def find(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> list[int | None]:
    return [hit.blocks[0] for hit in cache.lookup(cache.identity.new_chain(salt), array("i", tokens), len(tokens))]


def test_a_free_block_is_hit_until_it_is_reused() -> None:
    cache = PrefixCache({None: 3}, 2)
    table = publish(cache, [1, 2, 3, 4])
    cache.tables.release(table)
    assert cache.tables.pools[0].num_cached == 2
    assert find(cache, [1, 2, 3, 4]) == blocks_of(table)
    assert take(cache, 1) == [2]  # a block that was never used
    assert find(cache, [1, 2, 3, 4]) == blocks_of(table)
    assert take(cache, 1) == blocks_of(table)[1:]  # the end of a prefix is reused before its beginning
    assert find(cache, [1, 2, 3, 4]) == blocks_of(table)[:1]
    assert (sum(pool.evictions for pool in cache.tables.pools), cache.tables.pools[0].num_cached) == (1, 1)


def test_the_least_recently_released_prefix_is_reused_first() -> None:
    cache = PrefixCache({None: 3}, 2)
    first, second, third = (publish(cache, tokens) for tokens in ([1, 1], [2, 2], [3, 3]))
    for table in (second, first, third):
        cache.tables.release(table)
    hits = cache.lookup(cache.identity.new_chain(None), array("i", [2, 2]), 2)
    table = cache.tables.allocate(hits, 0)
    assert table.blocks == second.blocks  # a hit is a use: `second` is now the most recently used
    cache.tables.release(table)
    assert take(cache, 3) == blocks_of(first) + blocks_of(third) + blocks_of(second)


def test_a_block_in_use_replaces_a_free_one() -> None:
    """A sequence that recomputes a prefix therefore keeps the prefix cached, even when free blocks are taken."""
    cache = PrefixCache({None: 4}, BLOCK_SIZE)
    first = publish(cache, [1, 1])
    cache.tables.release(first)
    second = publish(cache, [1, 1])
    assert blocks_of(first) != blocks_of(second), "premise"
    assert find(cache, [1, 1, 2]) == blocks_of(second)
    third = publish(cache, [1, 1])
    assert find(cache, [1, 1, 2]) == blocks_of(second), "the second block is in use as well"
    take(cache, 2)
    assert sum(pool.evictions for pool in cache.tables.pools) == 0 and find(cache, [1, 1, 2]) == blocks_of(second)
    cache.tables.release(third)


def test_nothing_is_found_before_it_is_published() -> None:
    cache = PrefixCache({None: 4}, 2)
    chain, tokens = cache.identity.new_chain(None), array("i", [1, 2, 3, 4])
    table = cache.tables.allocate([], 2)
    assert find(cache, [1, 2, 3, 4]) == []
    cache.publish(chain, tokens, table, 3)  # the second block lacks a token
    assert find(cache, [1, 2, 3, 4]) == blocks_of(table)[:1]
    cache.publish(chain, tokens, table, 4)
    assert find(cache, [1, 2, 3, 4]) == blocks_of(table)


def test_different_salts_and_no_salt_share_nothing() -> None:
    cache = PrefixCache({None: 4}, 2)
    tables = {salt: publish(cache, [1, 2], salt) for salt in (None, "", "a", "salt:")}
    assert {salt: find(cache, [1, 2], salt) for salt in tables} == {
        salt: blocks_of(table) for salt, table in tables.items()
    }
    assert find(cache, [1, 2], "b") == []


def test_a_hash_alone_never_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache({None: 4}, 2)
    monkeypatch.setattr(cache.identity, "_digest", lambda content: bytes(16))
    first = publish(cache, [1, 2])
    assert find(cache, [1, 2]) == blocks_of(first)
    assert find(cache, [1, 3]) == []  # other tokens
    assert find(cache, [1, 2], "a") == []  # another salt
    second = publish(cache, [1, 2, 1, 2])  # its second block replaces the first one
    assert list(cache.tables.pools[0].published) == blocks_of(second)[1:]
    assert find(cache, [1, 2]) == []  # another parent
    cache.check_integrity([first, second])


def test_a_replaced_free_block_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache({None: 4}, 2)
    monkeypatch.setattr(cache.identity, "_digest", lambda content: bytes(16))
    first = publish(cache, [1, 2])
    cache.tables.release(first)
    assert (cache.tables.pools[0].num_cached, cache.tables.pools[0].num_free) == (1, 4)
    second = publish(cache, [3, 4])
    cache.check_integrity([second])
    assert (cache.tables.pools[0].num_cached, cache.tables.pools[0].num_free) == (0, 3)
    assert take(cache, 1) == blocks_of(first) and sum(pool.evictions for pool in cache.tables.pools) == 0


def test_counting_cached_blocks_does_not_visit_them() -> None:
    cache, num_blocks = PrefixCache({None: 20_000}, 2), 20_000
    table = publish(cache, list(range(2 * num_blocks)))
    cache.tables.release(table)
    tracemalloc.start()
    assert (cache.tables.pools[0].num_cached, cache.tables.pools[0].num_free) == (num_blocks, num_blocks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < num_blocks


def test_blocks_of_an_old_epoch_are_never_found_or_published() -> None:
    cache = PrefixCache({None: 4}, 2)
    chain, tokens = cache.identity.new_chain(None), array("i", [1, 2, 3, 4])
    table = cache.tables.allocate([], 2)
    cache.publish(chain, tokens, table, 2)
    assert find(cache, [1, 2]) == blocks_of(table)[:1]
    cache.invalidate()
    assert find(cache, [1, 2]) == []
    cache.publish(chain, tokens, table, 4)
    assert find(cache, [1, 2, 3, 4]) == []
    cache.check_integrity([table])


def test_empty_blocks_are_handed_out_before_unused_ones() -> None:
    cache = PrefixCache({None: 6}, 2)
    tokens = array("i", [1, 2, 3, 4])
    table = cache.tables.allocate([], 2)
    cache.publish(cache.identity.new_chain(None), tokens, table, 4)
    cache.tables.release(table)
    other = cache.tables.allocate([], 1)
    assert not set(blocks_of(other)) & set(blocks_of(table)), "cached blocks go last"
    cache.tables.release(other)
    cache.invalidate()
    assert sorted(take(cache, 3)) == sorted(blocks_of(table) + blocks_of(other))


def test_a_disabled_cache_finds_claims_and_hashes_nothing() -> None:
    cache = CountingCache({None: 4}, 2, enabled=False)
    publish(cache, [1, 2, 3, 4])
    chain = cache.identity.new_chain(None)
    assert cache.lookup(chain, array("i", [1, 2, 3, 4]), 4) == []
    cache.claims.add(chain)
    assert cache.find_claim(cache.identity.new_chain(None), 0, 4) is None
    assert (cache.digests, cache.tables.pools[0].num_cached) == (0, 0)


def test_a_claim_ends_when_its_block_is_published_or_its_owner_gives_up() -> None:
    cache = PrefixCache({None: 4}, 2)
    tokens = array("i", [1, 2, 3, 4])
    writer, reader = cache.identity.new_chain(None), cache.identity.new_chain(None)
    for chain in (writer, reader):
        cache.lookup(chain, tokens, 4)
    table = cache.tables.allocate([], 2)
    cache.claims.add(writer)
    first, last = reader.hashes
    assert cache.find_claim(writer, 0, 4) is None
    assert cache.find_claim(reader, 0, 4) == last  # the block that is published last
    assert cache.find_claim(reader, 0, 3) == first
    assert cache.find_claim(reader, 0, 1) is None  # a block beyond the limit is useless
    cache.publish(writer, tokens, table, 2)
    assert (first in cache.claims, last in cache.claims) == (False, True)
    assert cache.find_claim(reader, 0, 4) is None
    assert cache.find_claim(reader, 1, 4) == last
    cache.claims.add(reader)  # too late: there are no claims to withdraw
    cache.claims.withdraw(reader)
    assert cache.find_claim(reader, 1, 4) == last
    cache.claims.withdraw(writer)
    assert cache.find_claim(reader, 1, 4) is None and last not in cache.claims


def _count_a_reference_too_many(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._references[table.blocks[0][0]] += 1


def _lose_a_reference(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._references[table.blocks[0][0]] -= 1


def _lose_a_free_block(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._empty.pop()


def _free_a_block_in_use(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._empty.append(table.blocks[0][0])


def _free_a_block_twice(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._empty.append(cache.tables.pools[0]._empty[0])


def _keep_an_empty_block_among_the_cached(cache: PrefixCache, table: Table) -> None:
    cache.tables.pools[0]._cached[cache.tables.pools[0]._empty.pop()] = None


def _keep_a_cached_block_among_the_empty(cache: PrefixCache, table: Table) -> None:
    cache.tables.release(table)
    table.blocks[0] = table.blocks[0][:0]
    cache.tables.pools[0]._empty.append(cache.tables.pools[0]._cached.popitem()[0])


def _hold_a_block_twice(cache: PrefixCache, table: Table) -> None:
    table.blocks[0].append(table.blocks[0][0])


def _forget_a_table(cache: PrefixCache, table: Table) -> None:
    table.blocks[0] = table.blocks[0][:0]


def _forget_where_an_entry_is(cache: PrefixCache, table: Table) -> None:
    del cache.tables.pools[0].published[table.blocks[0][0]]


def _forget_an_entry(cache: PrefixCache, table: Table) -> None:
    cache._index.clear()


@pytest.mark.parametrize(
    "corrupt",
    [
        _count_a_reference_too_many,
        _lose_a_reference,
        _lose_a_free_block,
        _free_a_block_in_use,
        _free_a_block_twice,
        _keep_an_empty_block_among_the_cached,
        _keep_a_cached_block_among_the_empty,
        _hold_a_block_twice,
        _forget_a_table,
        _forget_where_an_entry_is,
        _forget_an_entry,
    ],
)
def test_the_integrity_check_finds_a_corruption(corrupt: Callable[[PrefixCache, Table], None]) -> None:
    cache = PrefixCache({None: 4}, 2)
    table = publish(cache, [1, 2, 3, 4])
    cache.check_integrity([table])
    corrupt(cache, table)
    with pytest.raises(RuntimeError, match="wrong reference counts"):
        cache.check_integrity([table])
