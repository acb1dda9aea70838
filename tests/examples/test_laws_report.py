"""The report on laws: the verdicts, and some experiments at small sizes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "laws_report.py"
CHOSEN = "context", "waiting", "group", "tops", "spans", "adapters"
"""Experiments in one process; the others are variants of these, or start other processes."""


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("laws_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["laws_report"] = module  # its dataclasses look up their annotations here
    spec.loader.exec_module(module)
    return module


def law(report: ModuleType, costs: list[float]) -> Any:
    sizes = [10**i for i in range(len(costs))]
    return report.Law("topic: law", "thing", sizes, [float(size) for size in sizes], costs)


def test_the_growth_of_a_law_is_its_exponent(report: ModuleType) -> None:
    sizes = [10.0**i for i in range(6)]
    for exponent in (0.0, 0.5, 1.0, 2.0):
        assert law(report, [3e-6 * size**exponent for size in sizes]).growth == pytest.approx(exponent)
    assert law(report, [1e-6 * size for size in sizes]).holds
    assert law(report, [1e-6 * size * math.log(size + 3) for size in sizes]).growth > 1.08
    assert not law(report, [1e-6 * size**1.15 for size in sizes]).holds


def test_constant_costs_do_not_hide_growth(report: ModuleType) -> None:
    costs = [1e-2 + 1e-7 * (10.0**i) ** 1.4 for i in range(7)]
    assert report._slope([10.0**i for i in range(7)], costs) < 1.1, "premise: the slope of all sizes is small"
    assert not law(report, costs).holds


def test_experiments_report_their_laws(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "bound_pauses", lambda: None)
    monkeypatch.setattr(report, "_thaw", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    report.main([*CHOSEN], quick=True, plot=tmp_path / "laws.png")
    text = capsys.readouterr().out
    for name in CHOSEN:
        assert f"{name}: " in text
    assert text.count("at most linear") + text.count("MORE THAN LINEAR") == 14
    assert (tmp_path / "laws.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_experiment_is_refused(report: ModuleType) -> None:
    with pytest.raises(report.typer.BadParameter, match="no experiment is named 'contexts'; choose from context, "):
        report.main(["contexts"])
