"""Trials: what a child process may not do to this process."""

import os
import signal
import socket

import pytest

from trueroll.engine.models.trials import attempt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_does_not_end_a_trial(number: int) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, _: seen.append(number))
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def work() -> None:
        os.kill(os.getpid(), number)
        assert not seen

    try:
        attempt(work)
        reader.setblocking(False)
        with pytest.raises(BlockingIOError):
            reader.recv(1)
        os.kill(os.getpid(), number)
        assert seen == [number] and reader.recv(1)
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(number, before)
        reader.close()
        writer.close()
