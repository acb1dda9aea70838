"""The tokenizing child process: texts arrive unchanged, and slow answers are cut off by a deadline."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from trueroll.rollout.text_child import _HEAD, TextChild, _answer, _Process, never

NUM_BYTES = 2**10


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

        def ask(self, message: bytes, is_abandoned: object) -> bytes:
            sent.append(message)
            return _answer(Characters(), message)

    monkeypatch.setattr("trueroll.rollout.text_child._Process", Answering)
    assert TextChild(Characters()).encode(text, False, 2**31).tolist() == [*map(ord, text)]
    assert sent[0].endswith(text.encode())


def test_an_answer_that_trickles_in_is_abandoned_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = object.__new__(_Process)
    process._socket, process._seconds = ours, 0.2  # type: ignore[assignment]
    is_over = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            theirs.recv(NUM_BYTES)
            theirs.sendall(_HEAD.pack(NUM_BYTES))
            for _ in range(NUM_BYTES):
                if is_over.wait(0.01):
                    return
                theirs.sendall(b"+")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert process.ask(b"call", never) == b""
    finally:
        is_over.set()
        dripping.join(20)
        ours.close()
        theirs.close()
