"""The fleet report runs on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tiny import make_tiny_model
from trueroll.rollout import SamplingParams

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "fleet_report.py"


@pytest.mark.exhaustive
def test_the_report_has_a_ratio_for_each_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    spec = importlib.util.spec_from_file_location("fleet_report", REPORT)
    assert spec is not None and spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    monkeypatch.setattr(report, "ROUNDS", 1)
    monkeypatch.setattr(report, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(report, "GROUP", SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    monkeypatch.setattr(report, "KV_MEMORY", 2**20)
    monkeypatch.setattr(report, "MANY", 2)
    monkeypatch.setattr(report, "prompts", lambda seed: [[3 + i, 4, 5] for i in range(report.PROMPTS)])
    report.main(str(make_tiny_model("llama", tmp_path / "tiny", dtype="bfloat16")))
    rows = [line for line in capsys.readouterr().out.splitlines() if "at least" in line or "at most" in line]
    assert len(rows) == 3 and all(float(row.split("│")[4]) > 0 for row in rows)
