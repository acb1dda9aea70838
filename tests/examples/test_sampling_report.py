"""The report on the cost of filters, penalties and bans runs with a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "sampling_report.py"


def test_the_report_compares_each_kind_of_sampling_with_plain_sampling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("sampling_report", REPORT)
    assert spec is not None and spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    for name, value in dict(HIDDEN=128, LAYERS=1, SAMPLES=4, GROUP=2, PROMPT=8, STEPS=3).items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(report.sys, "argv", ["sampling_report.py", "1"])
    report.main()
    rows = re.findall(r"^│ (.+?) +│ +\d+\.\d +│ (.+?) +│ (\d+\.\d{3}) +│", capsys.readouterr().out, re.M)
    assert [name for name, *_ in rows] == [*report.VARIANTS] and rows[0][1:] == ("plain", "1.000")
    assert {name: of for name, of, _ in rows if of != "plain"} == report.BASELINES
