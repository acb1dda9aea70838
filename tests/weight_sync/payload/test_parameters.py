"""A push must include each parameter, either whole or as all of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trueroll.errors import PushError
from trueroll.weight_sync.payload.manifest import check_complete, describe_unknown, spellings_of

WANTED: Any = SimpleNamespace(
    dtype="float32",
    dtypes={},
    shapes={"l.0.up": (3, 8, 5), "l.0.down": (3, 5, 4), "norm": (5,)},
    parts={"l.0.up": ("l.0.e.{}.a", "l.0.e.{}.b"), "l.0.down": ("l.0.e.{}.c",)},
    tied={},
    ignored=(),
    optional=(),
)
UP = [f"l.0.e.{expert}.{part}" for expert in range(3) for part in "ab"]
DOWN = [f"l.0.e.{expert}.c" for expert in range(3)]


@pytest.mark.parametrize("names", [["l.0.up", "l.0.down"], [*UP, *DOWN], [*UP, "l.0.down"], ["l.0.up", *DOWN]])
def test_each_stack_may_come_whole_or_in_parts(names: list[str]) -> None:
    check_complete({"norm", *names}, WANTED)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*UP, *DOWN[1:]], "missing: l.0.e.0.c; push every"),
        ([*UP[:5], "l.0.down"], "missing: l.0.e.2.b; push every"),
        ([*DOWN], "missing: l.0.up; push every"),
        ([*UP, *DOWN, "l.0.up"], "both whole and in parts: l.0.up; send each tensor whole"),
        (["l.0.up", UP[3], *DOWN], "both whole and in parts: l.0.up; send each tensor whole"),
    ],
)
def test_missing_and_doubled_parameters_are_named(names: list[str], message: str) -> None:
    with pytest.raises(PushError, match=message):
        check_complete({"norm", *names}, WANTED)


def test_parts_are_rows_of_their_stacks() -> None:
    spellings = spellings_of(WANTED)
    assert [*spellings.parts("l.0.up")] == UP and spellings.most == 10 and len(spellings.all_shapes()) == 12
    assert spellings.part("l.0.e.2.b") == ("l.0.up", 2, 4, (4, 5)) and spellings.part("l.0.e.1.c") is not None
    for other in (
        "l.0.e.3.a",
        "l.0.e.01.a",
        "l.0.e.-1.a",
        "l.0.e.{}.a",
        "l.1.e.0.a",
        "l.0.e.0.d",
        "l.0.e.0.a.",
        "norm",
    ):
        assert spellings.part(other) is None
    assert "but l.0.e.1.a is known; push the module inside the wrapper ('module.')" in describe_unknown(
        "module.l.0.e.1.a", WANTED
    )
