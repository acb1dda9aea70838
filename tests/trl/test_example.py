"""examples/trl_grpo.py runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"


def test_the_example_trains_a_step_and_prints_it(shallow_smollm2: Path) -> None:
    command = [sys.executable, "-P", str(EXAMPLE), str(shallow_smollm2), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d+): reward \d\.\d{3}, max log-prob difference (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [1]
    assert all(difference == "0.0" for _, difference in steps)
    assert len(EXAMPLE.read_text().splitlines()) < 60
