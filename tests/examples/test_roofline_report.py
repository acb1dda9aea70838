"""The roofline report divides a step into parts, each with the time that the machine's best rates allow."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "roofline_report.py"
REPORT = runpy.run_path(str(SCRIPT))
BEST = {"products": 100.0, "reading": 10.0, "updating": 5.0}  # 1e9 per second
Part = REPORT["Part"]


def test_the_slower_of_arithmetic_and_memory_limits_an_op() -> None:
    seconds = dict(qkv=0.4, delta_rule=0.8, gate_up=0.6)
    flops, num_bytes = dict(qkv=20e9, delta_rule=10e9, gate_up=10e9), dict(qkv=1e9, delta_rule=2e9, gate_up=2e9)
    parts = REPORT["parts_of"]([2, 2.0, seconds, flops, num_bytes], BEST, ("delta_rule",))
    expected = {"qkv": (0.2, 0.1), "delta_rule": (0.4, 0.2), "gate_up": (0.3, 0.1), "Python": (0.1, 0.0)}
    assert parts.keys() == expected.keys()
    for name, part in parts.items():
        assert part == pytest.approx(expected[name]), name
    assert REPORT["best_products"]([2, 2.0, seconds, flops, num_bytes]) == pytest.approx(50.0)


def test_the_table_lists_the_largest_gaps_first_and_the_picture_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run_on(isa: str, arguments: list[str]) -> Any:
        asked.append((isa, arguments))
        factor = len(asked)
        parts = {"qkv": Part(0.01 * factor, 0.009), "gate_up": Part(0.02 * factor, 0.004), "Python": Part(0.001, 0.0)}
        return {"group, decode": parts | {"engine": Part(0.025 * factor, 0.013)}}

    of_main = REPORT["main"].__globals__
    monkeypatch.setitem(of_main, "run_on", run_on)
    monkeypatch.setitem(
        of_main, "load_library", lambda: type("L", (), {"instruction_sets": lambda _: ["one", "two"]})()
    )
    picture = tmp_path / "rooflines.png"
    REPORT["main"](["tiny", "--dummy-weights", "--plot", str(picture)])
    assert asked == [(isa, ["tiny", "auto", "--dummy-weights"]) for _ in range(3) for isa in ("one", "two")]
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line] for line in lines]
    # The first instruction set was measured with the factors 1, 3 and 5.
    assert rows[0] == ["group, decode", "engine", "75.00", "100%", "17%", "83%"]
    assert rows[1] == ["", "op by op", "91.00", "100%", "14%", "86%"]
    assert [row[1] for row in rows[2:5]] == ["gate_up", "qkv", "Python"]
    assert rows[2][2:] == ["60.00", "66%", "7%", "62%"]
    assert picture.read_bytes().startswith(b"\x89PNG")
