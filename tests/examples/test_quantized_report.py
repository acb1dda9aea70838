"""The report of products with quantized matrices."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest
import torch

REPORT = runpy.run_path(str(Path(__file__).parents[2] / "examples/benchmarks/quantized_report.py"))


def test_the_report_compares_formats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = REPORT["main"]
    for name, value in (("SIZE", 64), ("COUNT", 2), ("ROUNDS", 1)):
        monkeypatch.setitem(main.__globals__, name, value)
    before = torch.get_num_threads()
    try:
        main(["fp8", "awq"], time.perf_counter, (1,))
    finally:
        torch.set_num_threads(before)
    shown = capsys.readouterr().out
    assert "1 threads, 1 rows" in shown and "1 threads, 64 rows" in shown
    for name in ("bfloat16", "reading", "fp8", "awq"):
        assert shown.count(f"│ {name} ") == 2


def test_the_limit_is_the_slower_of_reading_and_computing(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"bfloat16": [4.0], "reading": [2.0], "fp8": [3.0], "awq": [3.0]}
    sizes = {"bfloat16": 8.0, "reading": 8.0, "fp8": 4.0, "awq": 2.0}
    REPORT["show"]("title", "matrix", times, sizes, {"bfloat16": [1.0], "fp8": [0.5], "awq": [2.5]})
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    found = {name.strip(): limit.strip() for name, *_, limit in lines}
    assert found == {"bfloat16": "2.00", "reading": "", "fp8": "4.00", "awq": "1.60"}
