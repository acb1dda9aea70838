"""The report on pushes and sleeps runs on a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tiny import make_tiny_model

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "push_report.py"


def load_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("push_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_the_report_measures_every_transport_and_both_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_report()
    monkeypatch.setattr(report, "REPEATS", 2)
    monkeypatch.setattr(report, "ROUNDS", 2)
    monkeypatch.setattr(report, "CYCLES", 2)
    monkeypatch.setattr(report, "KV_MEMORY", 2**20)
    monkeypatch.setattr(report, "LEARNING_RATE", 1e-3)
    report.main(str(make_tiny_model("llama", tmp_path / "tiny", dtype="bfloat16")))
    text = capsys.readouterr().out
    for row in ("shared", "collective", "disk", "q_proj, v_proj", "all-linear", "level 1", "level 2"):
        assert re.search(rf"^│ {row} ", text, re.M), row
    assert re.search(r"a push by shared takes \d+\.\d times a warm copy", text)
    assert re.search(r"^│ trainer: copy to shared memory, checksum ", text, re.M)
    share = re.search(r"changes (\d+\.\d+)% of the weights", text)
    assert share is not None and 0.0 < float(share[1]) < 100.0
    assert re.search(r"^saving: .* while saving, decoding has \d\.\d\d of", text, re.M)
    assert len(re.findall(r"\d+", text.rsplit("sleeps:", 1)[1])) == 2
