"""Child processes that answer calls: pipes are independent, and slow or missing answers are cut off."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from trueroll.engine.models.child_process import _HEAD, ChildProcess, answer_calls, tell

NUM_BYTES = 2**10


def doubled(pipes: Sequence[socket.socket]) -> None:
    """Answer calls on two pipes, each in a thread; a call `wait` on the first pipe is never answered."""

    def answer(message: bytes) -> bytes:
        if message == b"wait":
            threading.Event().wait()
        return 2 * message

    threading.Thread(target=answer_calls, args=(pipes[0], answer), daemon=True).start()
    answer_calls(pipes[1], answer)


def test_a_pipe_answers_while_the_other_is_stuck() -> None:
    child = ChildProcess(doubled, num_pipes=2)
    assert child.ask(b"wait", 0.01) == b""
    assert child.ask(b"a" * 2**20, 20, pipe=1) == b"a" * 2**21
    child.end()
    assert child.ask(b"b", 20, pipe=1) == b"", "an ended child answers nothing"


def test_a_greeting_comes_before_the_replies() -> None:
    def greet(pipes: Sequence[socket.socket]) -> None:
        tell(pipes[0], b"hello")
        answer_calls(pipes[0], lambda message: 2 * message)

    child = ChildProcess(greet)
    for _ in range(2):
        assert child.greeting(20) == b"hello" and child.ask(b"a", 20) == b"aa" and child.is_alive
    silent = ChildProcess(lambda pipes: None)
    assert silent.greeting(20) == b"" and not silent.is_alive


def test_an_answer_that_trickles_in_is_abandoned_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = object.__new__(ChildProcess)
    process._pipes = [ours]
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
        assert process.ask(b"call", 0.2) == b""
    finally:
        is_over.set()
        dripping.join(20)
        ours.close()
        theirs.close()


class Cycle:
    num_deleted = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.num_deleted += 1


def test_a_child_does_not_finalize_the_garbage_of_its_parent() -> None:
    def answer(message: bytes) -> bytes:
        Cycle()
        gc.collect()
        return bytes([Cycle.num_deleted])

    gc.disable()
    try:
        Cycle()
        child = ChildProcess(lambda pipes: answer_calls(pipes[0], answer))
    finally:
        gc.enable()
    assert child.ask(b"", 20) == b"\1"
    child.end()
    gc.collect()
    assert Cycle.num_deleted == 1, "premise"
