"""The tokenizing child process: texts arrive unchanged."""

from __future__ import annotations

import pytest

from trueroll.rollout.text_child import TextChild, _answer


class Characters:
    """A stand-in for a tokenizer: each code point of a text is one token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*map(ord, text)]


@pytest.mark.parametrize("text", ["", "a", "a\nb\0c\n", "é\U0001f600", "x" * 2**20], ids=range(5))
def test_a_text_is_sent_without_reencoding(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a long text as JSON would block all threads."""
    sent: list[bytes] = []

    class Answering:
        def __init__(self, *_: object) -> None:
            pass

        def ask(self, message: bytes, seconds: float, is_abandoned: object) -> bytes:
            sent.append(message)
            return _answer(Characters(), message)

    monkeypatch.setattr("trueroll.rollout.text_child.ChildProcess", Answering)
    assert TextChild(Characters()).encode(text, False, 2**31).tolist() == [*map(ord, text)]
    assert sent[0].endswith(text.encode())
