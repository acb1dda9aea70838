"""Weights are merged with their adapters as soon as all tensors have arrived, each weight once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from fake_engine import FakeStaging

from trueroll.errors import PushError
from trueroll.weight_sync.payload.manifest import Adapters, factor_names
from trueroll.weight_sync.worker.adapters import Merging

NAMES = ("a.weight", "b.weight", "c.weight")


class NotingStaging(FakeStaging):
    """Notes the merged weights. The merge of `bad` is not finite."""

    def __init__(self, bad: str | None = None) -> None:
        super().__init__({}, in_place=False)
        self.merged: list[str] = []
        self._bad = bad

    def to_merge(self) -> Sequence[str]:
        return (*NAMES, "kept.weight")

    def merge(self, name: str) -> bool:
        self.merged.append(name)
        return name != self._bad


def merging(staging: NotingStaging, arrived: set[str], alone: bool = True, reject_nonfinite: bool = True) -> Merging:
    base = tuple((name, 0) for name in (*NAMES, "kept.weight")) if alone else None
    adapters = Adapters(weights=tuple((name, 4, 1.0) for name in NAMES), base=base)
    return Merging(adapters, staging, arrived.__contains__, reject_nonfinite, nullcontext)


@pytest.mark.parametrize("alone", [True, False])
def test_a_weight_is_merged_once_all_of_its_tensors_have_arrived(alone: bool) -> None:
    staging, arrived = NotingStaging(), set[str]()
    found = merging(staging, arrived, alone)
    needed = [each for name in NAMES for each in (*factor_names(name), *([] if alone else [name]))]
    for number, name in enumerate(needed):
        assert staging.merged == list(NAMES[: number // (2 if alone else 3)])
        arrived.add(name)
        found.merge_arrived()
    assert staging.merged == list(NAMES)
    found.check()
    found.merge_rest()
    assert staging.merged == [*NAMES, "kept.weight"]


def test_without_early_merges_all_weights_are_merged_at_the_end() -> None:
    staging = NotingStaging()
    merging(staging, set()).merge_rest()
    assert staging.merged == [*NAMES, "kept.weight"]


def test_the_error_of_an_early_merge_is_raised_for_the_next_call() -> None:
    staging, arrived = NotingStaging("b.weight"), {each for name in NAMES for each in factor_names(name)}
    found = merging(staging, arrived)
    found.merge_arrived()
    assert staging.merged == ["a.weight", "b.weight"], "the merge ends at the error"
    for _ in range(2):
        with pytest.raises(PushError, match=r"tensor b\.weight: the sum with its adapter has infinities or NaN"):
            found.check()


def test_sums_need_not_be_finite_without_reject_nonfinite() -> None:
    staging, arrived = NotingStaging("b.weight"), {each for name in NAMES for each in factor_names(name)}
    found = merging(staging, arrived, reject_nonfinite=False)
    found.merge_arrived()
    found.check()
    assert staging.merged == list(NAMES)
