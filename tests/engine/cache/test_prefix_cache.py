"""The prefix cache against a model that knows what every block holds and finds prefixes without hashing."""

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
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from trueroll.engine.cache.prefix_cache import Chain, Entry, PrefixCache

from ..caches import CollidingCache, CountingCache

BLOCK_SIZE = 2
NUM_BLOCKS = 7
PROFILE = settings(derandomize=True, deadline=None, max_examples=300, stateful_step_count=50)
TOKENS = st.builds(lambda shared, own: [0] * shared + own, st.integers(1, 7), st.lists(st.integers(0, 1), max_size=2))

Prefix = tuple[int, ...]
Key = tuple[str | None, Prefix]
Content = tuple[int, str | None, Prefix]
"""What a slot holds: the epoch and the salt it was computed under, and all tokens up to its own."""


@dataclass(eq=False)
class Node:
    """The model's published block."""

    block: int
    parent: Node | None


@dataclass(eq=False)
class Holder:
    """The model's sequence; `contents` is what the slots of its tokens [0, num_computed) must hold."""

    chain: Chain
    salt: str | None
    tokens: array[int]
    table: list[int]
    nodes: list[Node]
    contents: list[Content]

    def key(self, i: int) -> Key:
        return self.salt, tuple(self.tokens[: (i + 1) * BLOCK_SIZE])


@dataclass
class Model:
    """Published prefixes by their whole text, free blocks in order of reuse, and who has claimed which prefix."""

    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    index: dict[Key, Node] = field(default_factory=dict)
    claims: dict[Key, Chain] = field(default_factory=dict)

    def find(self, salt: str | None, tokens: array[int], limit: int) -> list[Node]:
        found: list[Node] = []
        for end in range(BLOCK_SIZE, limit + 1, BLOCK_SIZE):
            node = self.index.get((salt, tuple(tokens[:end])))
            if node is None or node.parent is not (found[-1] if found else None):
                break
            found.append(node)
        return found

    def publish(self, holder: Holder) -> None:
        for i in range(len(holder.nodes), len(holder.contents) // BLOCK_SIZE):
            parent = holder.nodes[-1] if holder.nodes else None
            key = holder.key(i)
            if key not in self.index or self.index[key].parent is not parent:
                self.index[key] = Node(holder.table[i], parent)
            holder.nodes.append(self.index[key])
            if self.claims.get(key) is holder.chain:
                del self.claims[key]

    def take(self, hits: list[int], num_new: int) -> list[int]:
        self.free = [b for b in self.free if b not in hits]
        taken, self.free = self.free[:num_new], self.free[num_new:]
        self.index = {key: node for key, node in self.index.items() if node.block not in taken}
        return taken

    def release(self, unused: list[int]) -> None:
        published = {node.block for node in self.index.values()}
        for block in unused:
            self.free.insert(len(self.free) if block in published else 0, block)


def free_blocks(cache: PrefixCache) -> list[int]:
    """In order of reuse."""
    return cache._empty[::-1] + list(cache._cached)


def state_of(cache: PrefixCache) -> tuple[Any, ...]:
    """Everything a cache knows, as values that later changes do not reach."""
    claims = {key: (id(chain), list(chain.hashes), list(chain.entries)) for key, chain in cache._claims.items()}
    containers = list(cache._references), free_blocks(cache), dict(cache._index), dict(cache._published), claims
    return *containers, cache.epoch, cache.evictions, cache._key


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences that come, compute, grow, fork and go in any order, over far too few blocks."""

    make_cache: type[CountingCache] = CountingCache
    hashes_collide = False
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.make_cache(NUM_BLOCKS, BLOCK_SIZE)
        self.model = Model()
        self.holders: list[Holder] = []
        self.kv: list[list[Content | None]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.chains: list[tuple[Chain, int]] = []

    def new_chain(self, salt: str | None) -> Chain:
        chain = self.cache.new_chain(salt)
        self.chains.append((chain, 0))
        return chain

    def contents(self, salt: str | None, tokens: array[int], start: int, end: int) -> list[Content]:
        return [(self.cache.epoch, salt, tuple(tokens[: p + 1])) for p in range(start, end)]

    def look(self, chain: Chain, salt: str | None, tokens: array[int], limit: int) -> list[Entry]:
        """Looks a prefix up: nothing changes, what is found is what was asked for, and nothing findable is missed."""
        before = state_of(self.cache)
        hits = self.cache.lookup(chain, tokens, limit)
        claim = self.cache.find_claim(chain, len(hits), limit)
        assert state_of(self.cache) == before
        assert len(hits) * BLOCK_SIZE <= limit
        held = [content for hit in hits for content in self.kv[hit.block]]
        assert held == self.contents(salt, tokens, 0, len(hits) * BLOCK_SIZE)
        missed = chain.hashes[len(hits) : limit // BLOCK_SIZE]
        if self.hashes_collide:
            self.seen["collision refused"] += any(key in self.cache._index for key in missed[:1])
        else:
            assert [hit.block for hit in hits] == [node.block for node in self.model.find(salt, tokens, limit)]
            ends = range((len(hits) + 1) * BLOCK_SIZE, limit + 1, BLOCK_SIZE)
            owners = [self.model.claims.get((salt, tuple(tokens[:end])), chain) for end in ends]
            claimed = [key for key, _ in takewhile(lambda pair: pair[1] is not chain, zip(missed, owners, strict=True))]
            assert claim == (claimed[-1] if claimed else None)
            self.seen["wait for several claims"] += len(claimed) > 1
        assert claim is None or self.cache.is_claimed(claim)
        self.seen["hit"] += bool(hits)
        self.seen["hit of a free block"] += any(hit.block in self.cache._cached for hit in hits)
        self.seen["wait for a claim"] += claim is not None
        return hits

    def allocate(self, hits: list[Entry], num_new: int) -> list[int] | None:
        """Allocates: all or nothing, the oldest free blocks first, never a block in use."""
        blocks = [hit.block for hit in hits]
        spare = [b for b in free_blocks(self.cache) if b not in blocks]
        before = state_of(self.cache)
        assert self.cache.can_allocate(hits, num_new) == (num_new <= len(spare))
        if num_new > len(spare):
            with pytest.raises(RuntimeError, match=f"expected {num_new} free blocks"):
                self.cache.allocate(hits, num_new)
            assert state_of(self.cache) == before
            self.seen["refused"] += 1
            return None
        table = self.cache.allocate(hits, num_new)
        assert table[: len(hits)] == blocks
        assert table[len(hits) :] == spare[:num_new]
        taken = self.model.take(blocks, num_new)
        assert self.hashes_collide or table[len(hits) :] == taken
        return table

    def pick(self, number: int) -> Holder:
        return self.holders[number % len(self.holders)]

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
        table = self.allocate(hits, self.cache.blocks_for(len(prompt)) - len(hits))
        if table is None:
            return
        chain.entries = hits
        self.cache.claim(chain)
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
        for p in range(start, end):
            block = holder.table[p // BLOCK_SIZE]
            assert [other for other in self.holders if block in other.table] == [holder]
            self.kv[block][p % BLOCK_SIZE] = holder.contents[p]
        before = state_of(self.cache)
        self.cache.publish(holder.chain, holder.tokens, holder.table, end)
        if holder.chain.epoch == self.cache.epoch:
            self.model.publish(holder)
            self.seen["computed twice"] += holder.table[: len(holder.chain.entries)] != [
                entry.block for entry in holder.chain.entries
            ]
        else:
            assert state_of(self.cache) == before
            self.seen["computed under an old epoch"] += end // BLOCK_SIZE > start // BLOCK_SIZE

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 7), token=st.integers(0, 1))
    def grow(self, number: int, token: int) -> None:
        holder = self.pick(number)
        fresh = self.allocate([], self.cache.blocks_for(len(holder.tokens) + 1) - len(holder.table))
        if fresh is not None:
            holder.tokens.append(token)
            holder.table += fresh

    @precondition(lambda self: any(len(h.contents) == len(h.tokens) for h in self.holders))
    @rule(number=st.integers(0, 7))
    def fork(self, number: int) -> None:
        complete = [h for h in self.holders if len(h.contents) == len(h.tokens)]
        parent = complete[number % len(complete)]
        num_full = len(parent.tokens) // BLOCK_SIZE
        partial = parent.table[num_full:]
        fresh = self.allocate([], len(partial))
        if fresh is None:
            return
        self.cache.share(parent.table[:num_full])
        for source, destination in zip(partial, fresh, strict=True):
            self.kv[destination] = self.kv[source].copy()
        chain, table = parent.chain.fork(), parent.table[:num_full] + fresh
        self.chains.append((chain, len(chain.hashes)))
        child = Holder(chain, parent.salt, parent.tokens[:], table, parent.nodes.copy(), parent.contents.copy())
        self.holders.append(child)
        self.seen["fork"] += 1

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 7))
    def release(self, number: int) -> None:
        holder = self.pick(number)
        self.holders.remove(holder)
        self.cache.unclaim(holder.chain)
        self.cache.release(holder.table)
        self.model.claims = {key: chain for key, chain in self.model.claims.items() if chain is not holder.chain}
        used = {block for other in self.holders for block in other.table}
        self.model.release([block for block in reversed(holder.table) if block not in used])

    @rule(really=st.sampled_from([True, *[False] * 4]))
    def invalidate(self, really: bool) -> None:
        if not really:
            return
        before = state_of(self.cache)
        self.cache.invalidate()
        references, free, index, published, claims, epoch, *_ = state_of(self.cache)
        had_content = [block for block in self.model.free if block in before[3]]
        self.model.free = had_content + [block for block in self.model.free if block not in before[3]]
        assert references == before[0] and sorted(free) == sorted(before[1])
        assert (index, published, claims) == ({}, {}, {})
        assert epoch == before[5] + 1
        self.model.index.clear()
        self.model.claims.clear()
        self.seen["invalidate while in use"] += bool(self.holders)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        tables = [holder.table for holder in self.holders]
        self.cache.check_integrity(tables)
        used = {block for table in tables for block in table}
        assert self.cache.num_free == NUM_BLOCKS - len(used)
        assert used.isdisjoint(free_blocks(self.cache))
        assert self.hashes_collide or free_blocks(self.cache) == self.model.free
        assert self.cache.num_cached == len(set(self.cache._published) - used)
        self.seen["eviction"] += self.cache.evictions > 0

    @invariant()
    def running_sequences_are_whole(self) -> None:
        for holder in self.holders:
            held = [self.kv[holder.table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(len(holder.contents))]
            assert held == holder.contents

    @invariant()
    def each_hash_was_computed_once(self) -> None:
        assert self.cache.digests == sum(len(chain.hashes) - inherited for chain, inherited in self.chains)


class CollidingMachine(PrefixCacheMachine):
    """The same with two hashes in all: what is found is still right, and no block is lost."""

    make_cache = CollidingCache
    hashes_collide = True
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
    ],
)
def test_any_order_of_operations_agrees_with_the_model(machine: type[PrefixCacheMachine], events: set[str]) -> None:
    machine.seen.clear()
    run_state_machine_as_test(machine, settings=PROFILE)
    assert {event for event, count in machine.seen.items() if count} >= events


def publish(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> list[int]:
    """The blocks of a sequence that came, was computed and is still there."""
    chain, text = cache.new_chain(salt), array("i", tokens)
    table = cache.allocate([], cache.blocks_for(len(tokens)))
    cache.publish(chain, text, table, len(tokens))
    return table


def find(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> list[int]:
    return [hit.block for hit in cache.lookup(cache.new_chain(salt), array("i", tokens), len(tokens))]


def test_a_free_block_is_hit_until_it_is_reused() -> None:
    cache = PrefixCache(3, 2)
    table = publish(cache, [1, 2, 3, 4])
    cache.release(table)
    assert cache.num_cached == 2
    assert find(cache, [1, 2, 3, 4]) == table
    assert cache.allocate([], 1) == [2]  # never used so far
    assert find(cache, [1, 2, 3, 4]) == table
    assert cache.allocate([], 1) == table[1:]  # the end of a prefix goes before its beginning
    assert find(cache, [1, 2, 3, 4]) == table[:1]
    assert (cache.evictions, cache.num_cached) == (1, 1)


def test_the_least_recently_released_prefix_is_reused_first() -> None:
    cache = PrefixCache(3, 2)
    first, second, third = (publish(cache, tokens) for tokens in ([1, 1], [2, 2], [3, 3]))
    for table in (second, first, third):
        cache.release(table)
    hits = cache.lookup(cache.new_chain(None), array("i", [2, 2]), 2)
    table = cache.allocate(hits, 0)
    assert table == second  # a hit is a use: second is now the latest
    cache.release(table)
    assert cache.allocate([], 3) == first + third + second


def test_nothing_is_found_before_it_is_published() -> None:
    cache = PrefixCache(4, 2)
    chain, tokens = cache.new_chain(None), array("i", [1, 2, 3, 4])
    table = cache.allocate([], 2)
    assert find(cache, [1, 2, 3, 4]) == []
    cache.publish(chain, tokens, table, 3)  # the second block lacks a token
    assert find(cache, [1, 2, 3, 4]) == table[:1]
    cache.publish(chain, tokens, table, 4)
    assert find(cache, [1, 2, 3, 4]) == table


def test_salts_and_the_lack_of_one_share_nothing() -> None:
    cache = PrefixCache(4, 2)
    tables = {salt: publish(cache, [1, 2], salt) for salt in (None, "", "a", "salt:")}
    assert {salt: find(cache, [1, 2], salt) for salt in tables} == tables
    assert find(cache, [1, 2], "b") == []


def test_a_hash_alone_never_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(4, 2)
    monkeypatch.setattr(cache, "_digest", lambda content: bytes(16))
    first = publish(cache, [1, 2])
    assert find(cache, [1, 2]) == first
    assert find(cache, [1, 3]) == []  # other tokens
    assert find(cache, [1, 2], "a") == []  # another salt
    second = publish(cache, [1, 2, 1, 2])  # its second block takes the place of the first
    assert list(cache._published) == second[1:]
    assert find(cache, [1, 2]) == []  # another parent
    cache.check_integrity([first, second])


def test_a_free_block_that_another_one_takes_the_place_of_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(4, 2)
    monkeypatch.setattr(cache, "_digest", lambda content: bytes(16))
    first = publish(cache, [1, 2])
    cache.release(first)
    assert (cache.num_cached, cache.num_free) == (1, 4)
    second = publish(cache, [3, 4])
    cache.check_integrity([second])
    assert (cache.num_cached, cache.num_free) == (0, 3)
    assert cache.allocate([], 1) == first and cache.evictions == 0


def test_how_much_is_cached_is_known_without_a_look_at_the_blocks() -> None:
    cache, num_blocks = PrefixCache(20_000, 2), 20_000
    table = publish(cache, list(range(2 * num_blocks)))
    cache.release(table)
    tracemalloc.start()
    assert (cache.num_cached, cache.num_free) == (num_blocks, num_blocks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < num_blocks


def test_blocks_of_an_old_epoch_are_never_found_or_published() -> None:
    cache = PrefixCache(4, 2)
    chain, tokens = cache.new_chain(None), array("i", [1, 2, 3, 4])
    table = cache.allocate([], 2)
    cache.publish(chain, tokens, table, 2)
    assert find(cache, [1, 2]) == table[:1]
    cache.invalidate()
    assert find(cache, [1, 2]) == []
    cache.publish(chain, tokens, table, 4)
    assert find(cache, [1, 2, 3, 4]) == []
    cache.check_integrity([table])


def test_blocks_without_content_are_handed_out_before_others_that_were_never_used() -> None:
    cache = PrefixCache(6, 2)
    tokens = array("i", [1, 2, 3, 4])
    table = cache.allocate([], 2)
    cache.publish(cache.new_chain(None), tokens, table, 4)
    cache.release(table)
    other = cache.allocate([], 1)
    assert not set(other) & set(table), "cached blocks go last"
    cache.release(other)
    cache.invalidate()
    assert sorted(cache.allocate([], 3)) == sorted(table + other)


def test_a_disabled_cache_finds_claims_and_hashes_nothing() -> None:
    cache = CountingCache(4, 2, enabled=False)
    publish(cache, [1, 2, 3, 4])
    chain = cache.new_chain(None)
    assert cache.lookup(chain, array("i", [1, 2, 3, 4]), 4) == []
    cache.claim(chain)
    assert cache.find_claim(cache.new_chain(None), 0, 4) is None
    assert (cache.digests, cache.num_cached) == (0, 0)


def test_a_claim_ends_when_its_block_is_published_or_its_owner_gives_up() -> None:
    cache = PrefixCache(4, 2)
    tokens = array("i", [1, 2, 3, 4])
    writer, reader = cache.new_chain(None), cache.new_chain(None)
    for chain in (writer, reader):
        cache.lookup(chain, tokens, 4)
    table = cache.allocate([], 2)
    cache.claim(writer)
    first, last = reader.hashes
    assert cache.find_claim(writer, 0, 4) is None
    assert cache.find_claim(reader, 0, 4) == last  # the one that is published last
    assert cache.find_claim(reader, 0, 3) == first
    assert cache.find_claim(reader, 0, 1) is None  # a block that reaches beyond the limit is of no use
    cache.publish(writer, tokens, table, 2)
    assert (cache.is_claimed(first), cache.is_claimed(last)) == (False, True)
    assert cache.find_claim(reader, 0, 4) is None
    assert cache.find_claim(reader, 1, 4) == last
    cache.claim(reader)  # comes too late, and so has nothing to give up
    cache.unclaim(reader)
    assert cache.find_claim(reader, 1, 4) == last
    cache.unclaim(writer)
    assert cache.find_claim(reader, 1, 4) is None and not cache.is_claimed(last)


def _count_a_reference_too_many(cache: PrefixCache, table: list[int]) -> None:
    cache._references[table[0]] += 1


def _lose_a_reference(cache: PrefixCache, table: list[int]) -> None:
    cache._references[table[0]] -= 1


def _lose_a_free_block(cache: PrefixCache, table: list[int]) -> None:
    cache._empty.pop()


def _free_a_block_in_use(cache: PrefixCache, table: list[int]) -> None:
    cache._empty.append(table[0])


def _free_a_block_twice(cache: PrefixCache, table: list[int]) -> None:
    cache._empty.append(cache._empty[0])


def _keep_an_empty_block_among_the_cached(cache: PrefixCache, table: list[int]) -> None:
    cache._cached[cache._empty.pop()] = None


def _keep_a_cached_block_among_the_empty(cache: PrefixCache, table: list[int]) -> None:
    cache.release(table)
    table.clear()
    cache._empty.append(cache._cached.popitem()[0])


def _hold_a_block_twice(cache: PrefixCache, table: list[int]) -> None:
    table.append(table[0])


def _forget_a_table(cache: PrefixCache, table: list[int]) -> None:
    table.clear()


def _forget_where_an_entry_is(cache: PrefixCache, table: list[int]) -> None:
    del cache._published[table[0]]


def _forget_an_entry(cache: PrefixCache, table: list[int]) -> None:
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
def test_the_integrity_check_finds(corrupt: Callable[[PrefixCache, list[int]], None]) -> None:
    cache = PrefixCache(4, 2)
    table = publish(cache, [1, 2, 3, 4])
    cache.check_integrity([table])
    corrupt(cache, table)
    with pytest.raises(RuntimeError, match="not counted exactly once"):
        cache.check_integrity([table])
