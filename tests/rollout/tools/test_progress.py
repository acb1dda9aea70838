"""The progress that commands print: on stderr, and in plain lines without a terminal."""

from __future__ import annotations

import pytest

from trueroll.rollout.tools import progress


def test_without_a_terminal_progress_is_lines_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert list(progress.tracked("ab", "verifying", 2)) == ["a", "b"]
    progress.tell("a\x1b")
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "verifying: 1 of 2\nverifying: 2 of 2\na\\x1b\n"


def test_on_a_terminal_progress_is_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress.tracked("ab", "verifying", 2)) == ["a", "b"]
    assert capsys.readouterr().out == ""
