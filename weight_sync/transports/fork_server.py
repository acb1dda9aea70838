"""The processes that receive weights by gloo in a worker's stead, so that a crash in gloo is not the worker's.

`python -m trueroll.weight_sync.transports.fork_server DESCRIPTOR SIDES` is a fork server. It imports torch, which takes
seconds, once; for each push it forks two processes, which takes milliseconds. One joins the group and receives. The
other watches that one and says how it ended. Both end when the worker closes its end of the push's channel, the
server when the worker closes its end of DESCRIPTOR; the system does either for a worker that was killed. So nothing
outlives a push but the server, and nothing outlives the worker.

A channel is a socket that keeps messages apart, each of them JSON. The receiving process says `{"did": ...}` in this
order: `start`; `connect`, to the store; `join`, the group; then `receive` for each `{"side", "num_bytes"}` that it is
sent, once so many bytes of a broadcast lie at the beginning of that memory. `{"failed": REASON}` and `{"ended": CODE}`
are last words; a negative code is the signal that ended it. `gloo_reader` has the worker's end.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from . import gloo

MAX_MESSAGE_BYTES = 2**14
_MAX_REASON_CHARS = 1000
_PR_SET_PDEATHSIG = 1


def serve(requests: socket.socket, num_sides: int) -> None:
    """Begin every push that is asked for, until `requests` ends.

    With each message come the push's channel and `num_sides` descriptors of memory.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 1 + num_sides)
        if not message:
            return
        end, *sides = descriptors
        with socket.socket(fileno=end) as channel:
            _begin(json.loads(message), requests, channel, sides)
        for side in sides:
            os.close(side)


def _begin(push: dict[str, Any], requests: socket.socket, channel: socket.socket, sides: list[int]) -> None:
    def watch() -> None:
        requests.close()
        _watch(push, channel, sides)

    try:
        _fork(watch)
    except OSError as error:
        _say(channel, failed=f"no process for it ({error.strerror})")


def _fork(run: Callable[[], None]) -> int:
    """A process that does this and ends. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _watch(push: dict[str, Any], channel: socket.socket, sides: list[int]) -> None:
    """Let a process receive, kill it when the worker closes the channel, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the system forgets how it ended
    watcher = os.getpid()
    alive, held = os.pipe()

    def receive() -> None:
        os.close(alive)
        _die_with(watcher)
        _receive(push, channel, sides)

    try:
        pid = _fork(receive)
    except OSError as error:
        _say(channel, failed=f"no process for it ({error.strerror})")
        return
    os.close(held)
    poller = select.poll()
    poller.register(alive, 0)  # hangs up when the process is gone, which holds the other end
    poller.register(channel, 0)
    poller.poll()
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _say(channel, ended=os.waitstatus_to_exitcode(status))


def _die_with(parent: int) -> None:
    """Let the system kill this process when its parent is gone, which is that one unless it is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        os._exit(1)


def _receive(push: dict[str, Any], channel: socket.socket, sides: list[int]) -> None:
    timeout = timedelta(seconds=push["timeout"])
    memory = [torch.empty(0, dtype=torch.uint8) for _ in sides]
    try:
        group = _join(push, channel)
        while message := channel.recv(MAX_MESSAGE_BYTES):
            bucket = json.loads(message)
            side, num_bytes = bucket["side"], bucket["num_bytes"]
            if len(memory[side]) < num_bytes:
                memory[side] = torch.frombuffer(mmap.mmap(sides[side], num_bytes), dtype=torch.uint8)
            group.broadcast(memory[side][:num_bytes], 0, timeout).wait(timeout)
            _say(channel, did="receive")
    except (RuntimeError, OSError) as error:
        _say(channel, failed=gloo.reason(error)[:_MAX_REASON_CHARS])


def _join(push: dict[str, Any], channel: socket.socket) -> Any:
    place, timeout = (push["host"], push["port"]), timedelta(seconds=push["join_timeout"])
    _say(channel, did="start")
    store = gloo.connect(*place, push["push_id"], timeout)
    _say(channel, did="connect")
    group = gloo.new_group(store, *place, push["rank"], push["world_size"], timeout)
    _say(channel, did="join")
    return group


def _say(channel: socket.socket, **words: str | int) -> None:
    with suppress(OSError):  # nobody listens any more, and whoever watches ends this process
        channel.send(json.dumps(words).encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a peer that makes gloo abort shall not fill the disk
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps who watched a push
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
