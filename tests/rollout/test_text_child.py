"""The process that tokenizes: its answers are bounded in time, however they come."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from trueroll.rollout.text_child import _HEAD, _Process, never

NUM_BYTES = 2**10


def test_an_answer_that_comes_in_drops_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = object.__new__(_Process)
    process._socket, process._seconds = ours, 0.2
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
