"""The report on steps without a model runs with a small cache and few waiting sequences."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "step_report.py"


def load_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_report_times_steps_with_much_cached_and_many_that_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_report()
    small = dict(CACHED_BLOCKS=1000, WAITING=200, RUNNING=3, STEPS=20, HOST_SEQUENCES=(8, 24))
    for name, value in small.items():
        monkeypatch.setattr(report, name, value)
    report.main()
    text = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"^│ (\d+) +│ +\d+\.\d\d +│ \d+\.\d\d", text, re.M)] == [8, 24]
    for row in ("nothing else", "1,000 blocks are cached", "200 different prompts wait", "200 wait for one prefix"):
        assert re.search(rf"^│ {row} +│ \d+\.\d\d", text, re.M), row
    assert len(re.findall(r"│ \d+\.\d +│$", text, re.M)) == 2, "aborts, where some wait"


def test_each_scenario_has_the_load_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load_report()
    for name, value in dict(CACHED_BLOCKS=1000, WAITING=200, RUNNING=3, STEPS=20).items():
        monkeypatch.setattr(report, name, value)
    assert report.much_is_cached().cache.tables.pools[0].num_cached == 1000
    load = report.one_prefix_is_waited_for()
    for _ in range(report.STEPS):
        load.step()
    assert load.scheduler.running.sequences[-1] is load.unpublished and load.cache.claims._chains
    assert [len(load.scheduler.running.sequences), len(load.scheduler.waiting)] == [4, 200]
    assert all(len(sequence.tokens) == 513 + 16 + 20 for sequence in load.scheduler.running.sequences[:3])
