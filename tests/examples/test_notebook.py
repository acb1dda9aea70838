"""The cells of `examples/grpo.ipynb` run on a tiny model, and the stored outputs come from a run that learned."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tiny import make_tiny_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "grpo.ipynb"
PARAMETERS = 'MODEL, STEPS = "smollm2", 30'
STEPS = 3


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_cells_train_without_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked_workers: None
) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny", dtype="bfloat16")
    monkeypatch.syspath_prepend(NOTEBOOK.parent)
    monkeypatch.delitem(sys.modules, "grpo", raising=False)  # another test may have changed it
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    parameters, *cells = ["".join(cell["source"]) for cell in code_cells()]
    assert parameters == PARAMETERS
    found: dict[str, Any] = dict(MODEL=str(model), STEPS=STEPS)
    try:
        for cell in cells:
            exec(cell, found)
    finally:
        matplotlib.use(before)
        sys.modules.pop("grpo", None)
        found["resources"].close()
    assert found["mismatches"] == [0.0] * STEPS and len(found["rewards"]) == STEPS
    assert all(difference > 0.0 for difference in found["plain_mismatches"]), "premise: the plain forward pass differs"
    assert [axes.lines[0].get_ydata().tolist() for axes in (found["upper"], found["lower"])] == [
        found["rewards"],
        found["mismatches"],
    ]
    assert capsys.readouterr().out.count("mean reward of 64 answers: ") == 2


def test_the_stored_run_learned_without_a_mismatch() -> None:
    cells = code_cells()
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}, "no cell failed"
    text = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    before, after = (float(found) for found in re.findall(r"mean reward of 64 answers: (\S+)", text))
    assert after > before + 0.3
    steps = re.findall(r"^step (\d+): reward \S+, mismatch (\S+), plain (\S+)$", text, re.M)
    assert steps[-1][0] == "29" and {mismatch for _, mismatch, _ in steps} == {"0.0"}
    assert all(float(plain) > 0 for *_, plain in steps)
    pictures = [output["data"]["image/png"] for output in outputs if output["output_type"] == "display_data"]
    assert len(pictures) == 1 and len(pictures[0]) < 200_000
