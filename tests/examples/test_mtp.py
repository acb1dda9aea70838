"""The example with a module for multi-token prediction (MTP) trains, saves and drafts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_module_is_trained_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("mtp", EXAMPLES / "mtp.py")
    assert spec is not None and spec.loader is not None
    mtp = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mtp)
    for name, count in dict(MODEL_STEPS=2, MODULE_STEPS=2, BATCH=2, LENGTH=16, PROMPTS=2, NEW_TOKENS=12).items():
        monkeypatch.setattr(mtp, name, count)
    before = {"model": 0.0, "module": 0.0}
    train = mtp.train

    def noting(name: str, parameters: Any, *others: Any) -> None:
        weights = [each.detach().clone() for each in parameters.parameters() if each.requires_grad]
        train(name, parameters, *others)
        after = [each for each in parameters.parameters() if each.requires_grad]
        before[name] = sum(float((a - b).abs().sum()) for a, b in zip(after, weights, strict=True))

    monkeypatch.setattr(mtp, "train", noting)
    mtp.main(tmp_path)  # compares the bits of the samples
    assert min(before.values()) > 0, "both were trained"
    lines = re.findall(r"^(\w+): ([0-9.]+) tokens per step of a sample", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in lines] == ["repeats", "mtp"] and all(float(speed) >= 1 for _, speed in lines)
