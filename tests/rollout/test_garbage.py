"""The collector leaves out objects that it has traversed, and still finds every cycle."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

from trueroll.rollout import garbage


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    gc.collect()
    garbage.bound_pauses()
    yield
    gc.callbacks.remove(garbage._around_collection)
    gc.unfreeze()


def test_a_full_collection_leaves_out_objects_that_survived_an_earlier_one() -> None:
    kept = [[i] for i in range(50_000)]
    assert len(gc.get_objects()) >= len(kept), "premise: the next collection traverses them"
    gc.collect()
    assert len(gc.get_objects()) < 1000 and len(kept) == 50_000


def test_a_cycle_among_old_objects_is_found_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = Cycle()
    found = weakref.ref(cycle)
    gc.collect()
    del cycle
    gc.collect()
    assert found() is not None, "premise: the collection leaves it out"
    monkeypatch.setattr(garbage, "WHOLE_SECONDS", 0.0)
    gc.collect()
    assert found() is None


def test_young_cycles_are_found_at_once() -> None:
    found = weakref.ref(Cycle())
    gc.collect()
    assert found() is None


def test_a_forked_child_never_traverses_the_objects_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "WHOLE_SECONDS", 0.0)
    gc.collect()  # thaws and freezes all objects
    if (pid := os.fork()) == 0:
        before = gc.get_freeze_count()
        gc.collect()
        os._exit(0 if gc.get_freeze_count() == before > 1000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_two_calls_are_as_one() -> None:
    garbage.bound_pauses()
    assert gc.callbacks.count(garbage._around_collection) == 1
