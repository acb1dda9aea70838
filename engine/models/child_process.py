"""A forked process that answers calls, one at a time on each of its pipes.

A call and its reply are bytes, preceded by their length. Guarantees: a call returns within its time limit, whatever the
child does; replies have a bounded length; and the child ends when its `ChildProcess` object is garbage-collected or
when this process ends.
"""

from __future__ import annotations

import gc
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeAlias

from .trials import close_all_but, end, forked, room_for_a_process

MAX_REPLY_BYTES = 2**26
_LOOK_SECONDS = 0.05
_HEAD = struct.Struct("<Q")

IsAbandoned: TypeAlias = Callable[[], bool]


def never() -> bool:
    """Return False. The default `is_abandoned`, for calls that are never abandoned."""
    return False


class ChildProcess:
    """A child process that runs `work`. The argument of `work` is the list of the child's ends of `num_pipes` pipes;
    `work` calls `answer_calls` for each pipe. Before it calls `answer_calls`, `work` may call `tell` once for each
    pipe, to send a greeting.

    `pid`: process id of the child. `end`: ends the child; also called when this object is garbage-collected.
    """

    def __init__(self, work: Callable[[Sequence[socket.socket]], object], num_pipes: int = 1) -> None:
        """Raise UnavailableError if the system cannot start another process."""
        with ExitStack() as ours, ExitStack() as theirs:
            with room_for_a_process():
                pairs = [socket.socketpair() for _ in range(num_pipes)]
            self._pipes = [ours.enter_context(pipe) for pipe, _ in pairs]
            others = [theirs.enter_context(pipe) for _, pipe in pairs]
            for pipe in self._pipes:
                pipe.setblocking(False)
            self._greetings = [b""] * num_pipes
            self.pid = forked(partial(_run, work, others))
            ours.pop_all()
        self.end = weakref.finalize(self, _end, self.pid, self._pipes)

    @property
    def is_alive(self) -> bool:
        """Return whether `end` was not called and the child still has its end of the first pipe."""
        if not self.end.alive:
            return False
        poll = select.poll()
        poll.register(self._pipes[0], 0)  # with the mask 0, `poll` reports only a hang-up
        return not poll.poll(0)

    def ask(self, message: bytes, seconds: float, is_abandoned: IsAbandoned = never, pipe: int = 0) -> bytes:
        """Send a call and return the reply. The reply is empty if the child was killed or took more than `seconds`, if
        the reply is longer than `MAX_REPLY_BYTES`, or if the call was abandoned. After an empty reply, the caller must
        end the child.
        """
        return self._begin(_HEAD.pack(len(message)) + message, seconds, is_abandoned, pipe)()

    def begin(self, message: bytes, seconds: float, pipe: int = 0) -> Callable[[], bytes]:
        """Send a call, and return a function that waits for the reply and returns what `ask` returns. Call the returned
        function before the next call over the pipe. Sending and waiting together take at most `seconds`.
        """
        return self._begin(_HEAD.pack(len(message)) + message, seconds, never, pipe)

    def greeting(self, seconds: float, is_abandoned: IsAbandoned = never, pipe: int = 0) -> bytes:
        """Wait for the greeting of the child, and return it. If children send greetings, call this method before the
        first call over a pipe. The result is empty in the cases in which `ask` returns an empty reply.
        """
        self._greetings[pipe] = self._greetings[pipe] or self._begin(b"", seconds, is_abandoned, pipe)()
        return self._greetings[pipe]

    def _begin(self, sent: bytes, seconds: float, is_abandoned: IsAbandoned, pipe: int) -> Callable[[], bytes]:
        """Send bytes, and return a function that waits for the reply."""
        deadline, channel = time.monotonic() + seconds, self._pipes[pipe]

        def wait(events: int) -> None:
            poll = select.poll()
            poll.register(channel, events)
            while True:
                is_ready = bool(poll.poll(_LOOK_SECONDS * 1000))
                if time.monotonic() > deadline or not is_ready and is_abandoned():
                    raise TimeoutError  # checked before every read: a child that sends single bytes prolongs no call
                if is_ready:
                    return

        def receive() -> bytes:
            nonlocal deadline
            deadline = time.monotonic() + left
            with suppress(OSError, ValueError):
                [size] = _HEAD.unpack(_receive(channel, _HEAD.size, wait))
                return _receive(channel, size, wait) if size <= MAX_REPLY_BYTES else b""
            return b""

        try:
            _send(channel, sent, wait)
        except (OSError, ValueError):  # TimeoutError is an OSError; a closed pipe has no descriptor: ValueError
            return lambda: b""
        left = deadline - time.monotonic()
        return receive


def answer_calls(pipe: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    """Answer calls until the parent closes the pipe. This function runs in the child process."""
    with suppress(EOFError, ConnectionError), pipe.makefile("rb") as file:
        while head := file.read(_HEAD.size):
            tell(pipe, answer(file.read(_HEAD.unpack(head)[0])))


def tell(pipe: socket.socket, message: bytes) -> None:
    """Send a reply or the greeting to the parent. This function runs in the child process."""
    pipe.sendall(_HEAD.pack(len(message)) + message)


def _run(work: Callable[[Sequence[socket.socket]], object], pipes: Sequence[socket.socket]) -> None:
    gc.freeze()  # garbage collection would copy the parent's objects, and finalize some of them, such as GPU memory
    close_all_but(*(pipe.fileno() for pipe in pipes))
    work(pipes)


def _end(pid: int, pipes: Sequence[socket.socket]) -> None:
    end(pid)
    for pipe in pipes:
        pipe.close()


def _send(channel: socket.socket, message: bytes, wait: Callable[[int], None]) -> None:
    left = memoryview(message)
    while left:
        wait(select.POLLOUT)
        left = left[channel.send(left) :]


def _receive(channel: socket.socket, size: int, wait: Callable[[int], None]) -> bytes:
    parts = []
    while size:
        wait(select.POLLIN)
        parts.append(channel.recv(min(size, 2**20)))
        size -= len(parts[-1])
        if not parts[-1]:
            raise ConnectionError
    return b"".join(parts)
