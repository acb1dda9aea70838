"""The checks of a soak fail on a leak, a lost reply, other bits and a slow tail, and on nothing else."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "benchmarks" / "soak_records.py"
SECONDS, MIB = 3600.0, 2**20


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_records", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_records"] = module  # its dataclasses look up their annotations here
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good(soak: ModuleType) -> Any:
    """The records of an hour in which memory grows only at first, and all other values vary a little."""
    chance = random.Random(0)
    records = soak.Records(SECONDS)
    records.held["worker"] = [
        soak.Held(
            i, int((400 + min(i, 500) / 10) * MIB * chance.uniform(0.998, 1.002)), chance.randint(60, 70), 9 + i % 2
        )
        for i in range(0, int(SECONDS), 2)
    ]
    records.latencies["groups"] = [(i / 2, chance.lognormvariate(-2, 0.3)) for i in range(2 * int(SECONDS))]
    records.sent["groups"] = records.ended["groups"] = 7200
    return records


def changed(held: Any, **change: Callable[[Any], float]) -> Any:
    values = {name: getattr(held, name) for name in ("seconds", "memory", "descriptors", "threads")}
    return type(held)(**values | {name: int(function(held)) for name, function in change.items()})


def test_a_good_soak_passes_and_is_drawn(soak: ModuleType, good: Any, tmp_path: Path) -> None:
    assert soak.judge(good) == []
    soak.draw(good, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    good.save(tmp_path / "soak.json")
    assert (tmp_path / "soak.json").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("memory", lambda held: held.memory * (1 + 0.02 * held.seconds / SECONDS)),
        ("descriptors", lambda held: held.descriptors + held.seconds / 100),
        ("threads", lambda held: held.threads + held.seconds / 600),
    ],
)
def test_a_leak_fails(soak: ModuleType, good: Any, name: str, change: Callable[[Any], float]) -> None:
    good.held["worker"] = [changed(held, **{name: change}) for held in good.held["worker"]]
    [reason] = soak.judge(good)
    assert reason.startswith(f"worker: {name} grew from")


def test_a_lost_reply_fails(soak: ModuleType, good: Any) -> None:
    good.ended["groups"] -= 1
    assert soak.judge(good) == ["groups: 7200 requests, but 7199 ends"]


def test_other_bits_fail(soak: ModuleType, good: Any) -> None:
    good.faults += ["canary: other bits"] * 12
    assert soak.judge(good) == ["canary: other bits"] * 10 + ["2 more faults"]


def test_a_slow_tail_at_the_end_fails(soak: ModuleType, good: Any) -> None:
    """Only 2% of the requests become slower, which the median does not show."""
    latencies = good.latencies["groups"]
    good.latencies["groups"] = [
        (at, late * 3 if at > SECONDS * 5 / 6 and i % 50 == 0 else late) for i, (at, late) in enumerate(latencies)
    ]
    [reason] = soak.judge(good)
    assert "the 99th percentile of latency grew" in reason


def test_a_soak_without_records_fails(soak: ModuleType, good: Any) -> None:
    good.latencies["groups"] = good.latencies["groups"][:-4000]
    good.held["worker"] = good.held["worker"][:100]
    assert [reason.split(":")[0] for reason in soak.judge(good)] == ["worker", "groups"]
