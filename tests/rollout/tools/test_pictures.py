"""The pictures of commands show what their titles and legends say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from trueroll.errors import ConfigError
from trueroll.rollout import Audit
from trueroll.rollout.foreign.audit import Condition, Distance, EngineAudit
from trueroll.rollout.foreign.causes import Change
from trueroll.rollout.tools import pictures


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the figures that are drawn."""
    drawn: list[Any] = []

    def figure(width: float, height: float) -> tuple[Figure, Any]:
        figure = Figure(figsize=(width, height), layout="constrained")
        drawn.append(figure.subplots())
        return figure, drawn[-1]

    monkeypatch.setattr(pictures, "_figure", figure)
    return drawn


def audit_of(is_aligned: bool, *samples: list[float]) -> Audit:
    rows = tuple(np.array(sample, np.float32) for sample in samples)
    different, largest = sum(int(np.count_nonzero(row)) for row in rows), max(float(np.abs(row).max()) for row in rows)
    return Audit(sum(map(len, rows)), different, largest, 0.0, None, (), (), is_aligned, rows)


def test_each_token_of_each_audit_is_a_dot(axes: list[Any], tmp_path: Path) -> None:
    audits = audit_of(True, [0.0, 0.0], [0.0]), audit_of(False, [0.25, -0.5], [0.0])
    pictures.plot_differences(audits, "a model, a machine", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    aligned, plain = axes[0].collections
    assert aligned.get_offsets().tolist() == [[0, 0], [1, 0], [0, 0]]
    assert plain.get_offsets().tolist() == [[0, 0.25], [1, -0.5], [0, 0]]
    assert aligned.get_label() == "aligned trainer: 0 of 3 differ, by 0 at most"
    assert plain.get_label() == "without alignment: 2 of 3 differ, by 0.5 at most"
    assert (aligned.get_facecolor() != plain.get_facecolor()).any()
    assert axes[0].get_title() == "a model, a machine" and "nats" in axes[0].get_ylabel()


def test_each_token_of_each_condition_is_a_dot(axes: list[Any], tmp_path: Path) -> None:
    same, other = (Distance((np.array(row, np.float32),)) for row in ([0.0, 0.0], [0.25, -0.5]))
    conditions = tuple(Condition(name, same, other, None, Change(2, 0, 0)) for name in ("miss", "hit"))
    audit = EngineAudit("an engine", "bfloat16", "raw", conditions, ())
    pictures.plot_conditions(audit, "a title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plain, aligned = axes[0].collections
    assert plain.get_offsets().tolist() == [[0, 0.25], [0.4, -0.5], [1, 0.25], [1.4, -0.5]]
    assert aligned.get_offsets()[:, 1].tolist() == [0] * 4
    assert (
        plain.get_label() == "transformers: 4 of 4 differ" and aligned.get_label() == "aligned trainer: 0 of 4 differ"
    )
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["miss", "hit"]


def test_titles_are_no_formulas_and_unwritable_files_are_named(axes: list[Any], tmp_path: Path) -> None:
    pictures.plot_differences([audit_of(True, [0.0])], r"a model $\frac{$", tmp_path / "a.png")
    assert (tmp_path / "a.png").exists() and axes[0].get_title() == r"a model $\frac{$"
    with pytest.raises(ConfigError, match="plot: cannot write /dev/full: No space left on device; give another file"):
        pictures.plot_differences([audit_of(True, [0.0])], "a title", Path("/dev/full"))


def test_bars_are_medians_with_the_range_of_all_runs(axes: list[Any], tmp_path: Path) -> None:
    speeds = {("on", "w"): (4.0, 1.0, 2.0), ("off", "w"): (3.0, 3.0, 3.0)}
    pictures.plot_speeds(speeds, "a model, a machine", tmp_path / "a.png")
    bars = [container for container in axes[0].containers if hasattr(container, "patches")]
    assert [[patch.get_height() for patch in bar.patches] for bar in bars] == [[2.0], [3.0]]
    lines = [segment[:, 1].tolist() for line in axes[0].collections for segment in line.get_segments()]
    assert lines == [[1.0, 4.0], [3.0, 3.0]]
    assert axes[0].get_title() == "a model, a machine"
