"""The training report runs on a tiny model with all options, and prints positive ratios."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matrix import thinned

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("options", "ways"), [([], 3), (["--fsdp", "2"], 1)])
@thinned(lambda options, ways: not options)
def test_training_report(tiny_llama: Path, options: list[str], ways: int) -> None:
    options = [str(tiny_llama), "--pairs", "1", "--shapes", "1x8,2x20", *options]
    command = [sys.executable, "-P", str(ROOT / "examples" / "benchmarks" / "training_report.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "x8" in line or "x20" in line]
    assert len(rows) == 2 * ways and all(float(row[-1]) > 0 for row in rows)
