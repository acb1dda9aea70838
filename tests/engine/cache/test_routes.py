"""The records of routed experts: which cache entries have a record, and which record is replaced."""

from __future__ import annotations

import pytest

from trueroll.engine.cache.prefix_cache import Entry
from trueroll.engine.cache.routes import RouteRecords


def entries(count: int) -> list[Entry]:
    return [Entry(bytes([i]), None, b"", b"", [i]) for i in range(count)]


def test_the_least_recently_used_record_is_replaced() -> None:
    records, found = RouteRecords(3, 2), entries(4)
    for i, entry in enumerate(found[:3]):
        records.attach(entry, bytes([i, i]))
    assert records.rows(found[:2]) == bytes([0, 0, 1, 1]) and records.num_bytes == 6
    records.attach(found[3], bytes([3, 3]))
    assert records.num_bytes == 6
    assert records.recorded(found) == found[:2]
    assert records.recorded(found[2:]) == [] and records.recorded(found[3:]) == found[3:]
    records.check_integrity(found)


def test_the_last_record_of_a_prefix_is_replaced_first() -> None:
    records, found = RouteRecords(3, 1), entries(4)
    for entry in found[:3]:
        records.attach(entry, b"x")
    records.rows(found[:3])
    records.attach(found[3], b"x")
    assert records.recorded(found[:3]) == found[:2]


def test_records_without_an_index_entry_are_found() -> None:
    records, found = RouteRecords(3, 2), entries(2)
    for entry in found:
        records.attach(entry, b"xx")
    with pytest.raises(RuntimeError, match="routes: 1 of 2 entries"):
        records.check_integrity(found[:1])
    records.forget(found[1:])
    records.check_integrity(found[:1])
    assert records.num_bytes == 2
