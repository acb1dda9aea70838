"""The HTTP report runs on a tiny model. The report itself checks bits and responses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from http_fronts import CHAT_TEMPLATE

from trueroll.rollout.tools.bench import Workload

REPORT = Path(__file__).parents[2] / "examples" / "benchmarks" / "http_report.py"


def load_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("http_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "http_report", module)  # its dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def test_the_report_compares_and_floods(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_report(monkeypatch)
    small = dict(
        REPEATS=1,
        FIRST_TOKENS=2,
        GROUP=Workload("group", 2, 0, 8, 2, 6, 1.0),
        SINGLES=Workload("singles", 3, 0, 8, 1, 6, 1.0),
        GOOD=Workload("good", 2, 0, 8, 1, 6, 1.0),
        CONNECTIONS=20,
        MALFORMED=120,
        NUM_BLOCKS=64,
        SESSIONS=4,
    )
    for name, value in small.items():
        monkeypatch.setattr(report, name, value)
    folder = shutil.copytree(tiny_llama, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    report.main(str(folder))
    text = " ".join(capsys.readouterr().out.split())
    for row in ("group", "3 singles", "3 streams"):
        assert re.search(rf"│ {row} │ [\d,.]+", text), row
    for said in (
        "first token: ",
        "20 connections held open",
        "120 malformed requests, all refused",
        "4 sessions of 3 turns",
    ):
        assert said in text
