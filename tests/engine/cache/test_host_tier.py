"""The prefix cache with a host tier, step by step. `test_scheduler` and `test_recurrent` play random orders."""

from __future__ import annotations

from array import array

import pytest

from trueroll.engine.cache.prefix_cache import Entry, PrefixCache, Table

Prefix = tuple[int, ...]


class Player:
    """Plays the scheduler's and the device's part. `memory`: by address, the tokens up to the end of a block."""

    def __init__(self, num_blocks: dict[int | None, int], *host_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, 2, host_blocks=host_blocks)
        self.tables, self.host = self.cache.tables, self.cache.tables.host
        self.memory: list[dict[int, Prefix]] = [{} for _ in num_blocks]
        self.held = list[Table]()

    def hits(self, tokens: list[int]) -> list[Entry]:
        return self.cache.lookup(self.cache.identity.new_chain(None), array("i", tokens), len(tokens))

    def resume(self, hits: list[Entry], num_new: int = 0) -> Table:
        """Allocate a table, and make the copies that the next step makes first."""
        self.held.append(table := self.tables.allocate(hits, num_new))
        for memory, copies in zip(self.memory, self.tables.copies, strict=True):
            for source, destination in copies:
                memory[destination] = memory[source]
            copies.clear()
        self.cache.check_integrity(self.held)
        return table

    def compute(self, tokens: list[int]) -> None:
        """Compute the full blocks of a sequence, publish and release them."""
        table = self.resume([], len(tokens) // 2)
        for memory, blocks in zip(self.memory, table.blocks, strict=True):
            memory.update({block: (*tokens[: 2 * i + 2],) for i, block in enumerate(blocks)})
        self.cache.publish(self.cache.identity.new_chain(None), array("i", tokens), table, len(tokens))
        self.release(table)

    def release(self, table: Table) -> None:
        self.held.remove(table)
        self.tables.release(table)
        self.cache.check_integrity(self.held)

    def content(self, table: Table, group: int = 0) -> list[Prefix]:
        return [self.memory[group][block] for block in table.held(group)]


A, B = [1] * 4, [2] * 8


def test_slots_are_not_reused_before_their_content_has_come_back() -> None:
    player = Player({None: 4}, 2)
    player.compute(A)
    player.compute(B)
    hits = player.hits(A)
    assert len(hits) == 2 and player.host.pools[0].num_free == len(player.host.pools[0].published) == 2, "premise"
    table = player.resume(hits)  # both fresh blocks held tokens of B, and the host is full
    assert player.content(table) == [(1, 1), (1, 1, 1, 1)] and player.hits(A) == hits
    assert [entry.blocks[0] for entry in hits] == [*table.blocks[0]], "others share the blocks that came back"
    assert (player.host.num_stored, player.host.num_restored, player.tables.num_host_hits) == (3, 2, 2)
    assert len(player.hits(B)) == 3 and player.host.num_evicted == 0, "B lost the one block for which no slot was free"


def test_the_least_recently_stored_content_is_dropped_first() -> None:
    player = Player({None: 1}, 2)
    for token in (1, 2, 3, 4):
        player.compute([token] * 2)
    assert [len(player.hits([token] * 2)) for token in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert (player.host.num_stored, player.host.num_evicted) == (3, 1)
    player.release(player.resume(player.hits([2, 2])))  # its slot is held, so [4, 4] replaces [3, 3]
    assert [len(player.hits([token] * 2)) for token in (2, 3, 4)] == [1, 0, 1] and player.host.num_evicted == 2
    player.compute([5, 5])
    assert player.host.num_evicted == 2, "what has come back left an empty slot"
    assert player.content(player.resume(player.hits([4, 4]))) == [(4, 4)]


def test_blocks_for_content_on_the_host_are_counted() -> None:
    player = Player({None: 3}, 3)
    player.compute(A)
    one, two = player.resume([], 1), player.resume([], 2)
    hits = player.hits(A)
    assert [entry.blocks[0] for entry in hits] == [-2, -1], "premise: the end of a prefix is reused first"
    assert not player.tables.can_hold(hits, 4, 1), "no block is free"
    player.release(two)
    assert player.tables.can_hold(hits, 4, 1) and not player.tables.can_hold(hits, 5, 1)
    with pytest.raises(RuntimeError, match="needs 1 new blocks .* but only 0 blocks are free"):
        player.tables.allocate(hits, 1)
    player.cache.check_integrity([one])
    assert player.content(player.resume(hits)) == [(1, 1), (1, 1, 1, 1)]


def test_a_block_that_comes_back_in_several_groups_is_one_hit() -> None:
    player = Player({None: 4, 4: 4}, 4, 4)
    player.compute(A * 2)
    player.release(player.resume([], 4))
    hits = player.hits(A * 2)
    table = player.resume(hits)
    assert player.content(table) == [(1,) * size for size in (2, 4, 6, 8)]
    assert player.content(table, 1) == [(1,) * size for size in (6, 8)], "the window reaches two blocks"
    assert (player.host.num_restored, player.tables.num_host_hits) == (6, 4)
    assert [entry.blocks[1] is not None and entry.blocks[1] < 0 for entry in hits] == [True, True, False, False]


def test_content_computed_again_leaves_its_slot() -> None:
    player = Player({None: 2}, 2)
    player.compute(A)
    player.release(player.resume([], 2))
    assert len(player.host.pools[0].published) == 2, "premise"
    player.compute(A)
    assert not player.host.pools[0].published and player.tables.pools[0].published.keys() == {0, 1}


def test_the_end_of_an_epoch_frees_every_slot() -> None:
    player = Player({None: 4}, 2)
    player.compute(A)
    player.compute(B)
    table = player.resume(player.hits(A))
    before, epoch = [*player.hits(B)], player.cache.identity.epoch
    assert before and player.tables.stats()[0].on_host == 1, "premise"
    player.cache.invalidate()
    assert player.cache.identity.epoch > epoch and not player.hits(A) and not player.hits(B)
    assert player.tables.stats()[0].on_host == 0 and not player.host.pools[0].published
    assert player.content(table) == [(1, 1), (1, 1, 1, 1)], "a running sequence keeps its blocks"
    player.release(player.resume([], 2))
    assert player.host.num_stored == 3, "blocks of an earlier epoch are not stored"
