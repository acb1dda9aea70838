"""The comparison with transformers measures the same work in both systems."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

REPORT = runpy.run_path(str(Path(__file__).parents[2] / "examples/benchmarks/families_report.py"))
SMALL = dict(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, n_routed_experts=4)


def test_ratios_are_medians_of_consecutive_runs() -> None:
    rates = REPORT["Rates"]([4.0, 2.0, 6.0], [2.0, 4.0, 1.0])
    assert rates.cells == "4 | 2.0 | 2.0"


def test_both_systems_compute_prompts_and_decodes(tmp_path: Path) -> None:
    REPORT["save_model"]("GLM-4.5", tmp_path, torch.float32, **SMALL)
    prompts = torch.randint(3, 512, (2, 20), generator=torch.Generator().manual_seed(0))
    ours, theirs = REPORT["Ours"](tmp_path, "float32"), REPORT["Theirs"](tmp_path, torch.float32)
    assert ours.compute(prompts[0]) == pytest.approx(theirs.compute(prompts[0]), abs=1e-4)
    ours.start(prompts)
    theirs.start(2)
    before = ours.engine.stats().computed_tokens
    ours.decode()
    theirs.decode()
    assert ours.engine.stats().computed_tokens - before == REPORT["STEPS"] * 2
    assert theirs.context == 21 and theirs.last.shape == (2,)


def test_different_results_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    REPORT["save_model"]("GLM-4.5", tmp_path, torch.float32, **SMALL)
    monkeypatch.setattr(REPORT["Ours"], "compute", lambda self, prompt: -1.0)
    with pytest.raises(RuntimeError, match="the log-probs of trueroll and transformers must be equal"):
        next(REPORT["compare"](tmp_path, "float32", 1, torch.full((1, 20), 3)))
