"""Untrusted text can neither control a terminal nor forge a log line."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trueroll.errors import LINES, printable, said
from trueroll.rollout.logs import LineFormatter
from trueroll.rollout.protocol.error_codes import error_from_code
from trueroll.rollout.tools import cli, demo, text

EVIL = "\x1b]0;owned\x07\x1b[2J\u202eevil\x9b31m\r\b\ud800\u2028"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\u202eevil\x9b31m\r\x08\ud800\u2028"
TEXTS: Any = SimpleNamespace(decode=lambda token_ids: f"one\n\ttwo{EVIL}", encode_chat=lambda *given: [1])
GROUP: Any = SimpleNamespace(samples=[SimpleNamespace(index=0, token_ids=[1], finish_reason="length")])


def test_invisible_characters_are_escaped_and_all_others_stay() -> None:
    assert printable(EVIL) == SHOWN
    plain = "C:\\x1b, 你好\u3000\xa0é \U0001f600"
    assert printable(plain) == plain
    assert printable("a\n\tb\x1b") == r"a\n\tb\x1b" and printable("a\n\tb\x1b", LINES) == "a\n\tb\\x1b"
    assert said(f"a\nb {EVIL[:1]}") == r"a b \x1b"


def test_the_errors_of_another_process_are_escaped() -> None:
    assert str(error_from_code("invalid_request", f"prompt: {EVIL}")) == f"prompt: {SHOWN}"


def test_samples_are_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    text._print_group(TEXTS, f"say {EVIL}", GROUP)
    printed = capsys.readouterr().out
    assert f"=== say {SHOWN}\n" in printed and f"one\n\ttwo{SHOWN}\n" in printed


def test_the_demo_shows_samples_with_escapes() -> None:
    written = io.StringIO()
    demo._show_samples(Console(file=written, width=400), TEXTS, [GROUP] * len(demo.QUESTIONS))
    shown = written.getvalue()
    assert SHOWN.removesuffix(r"\u2028") in shown and "\x1b" not in shown and "\u202e" not in shown


def test_names_cannot_add_lines_to_ready_lines(capsys: pytest.CaptureFixture[str]) -> None:
    info = dict.fromkeys(("backend", "isa", "dtype", "architecture", "device"), "x")
    info |= {"model": EVIL, "windows": [None], "window_blocks": []}
    info |= dict.fromkeys(("weight_bytes", "kv_bytes", "state_bytes", "max_num_seqs", "max_model_len"), 1)
    info |= dict.fromkeys(("num_blocks", "block_size"), 1)
    cli._announce(f"ipc:///{EVIL}", info)
    cli._say(f"ready fleet={EVIL}\nready fleet=mine")
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith(f"ready address=ipc:///{SHOWN} model={SHOWN} ") and lines[2:] == [""]
    assert lines[1] == f"ready fleet={SHOWN}\\nready fleet=mine"


def test_the_error_of_a_failed_command_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise cli.ConfigError(f"model: {EVIL}")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"trueroll: model: {SHOWN}\n"


def test_a_log_line_is_one_line_and_a_traceback_is_indented() -> None:
    try:
        raise ValueError(f"bad {EVIL}\n2026-01-01 00:00:00,000 INFO trueroll: forged")
    except ValueError as error:
        caught = error
    record = logging.LogRecord("trueroll.x", logging.WARNING, "f", 1, "%s\nforged", (EVIL,), None)
    assert LineFormatter().format(record).endswith(f" WARNING trueroll.x: {SHOWN}\\nforged")
    record = logging.LogRecord(
        "trueroll.x", logging.ERROR, "f", 1, "failed", (), (ValueError, caught, caught.__traceback__)
    )
    first, *rest = LineFormatter().format(record).split("\n")
    assert first.endswith("ERROR trueroll.x: failed") and rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert any("forged" in line for line in rest)
