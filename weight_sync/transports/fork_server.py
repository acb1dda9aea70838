"""Processes that receive weights through gloo for a worker, so that a crash in gloo does not kill the worker.

`python -m trueroll.weight_sync.transports.fork_server DESCRIPTOR SIDES` is a fork server. The server imports torch
once, which takes seconds. For each push, the server forks two processes, which takes milliseconds. The receiving
process joins the group and receives the buckets. The watcher waits for the receiving process and reports how that
process ended. The watcher and the receiving process exit when the worker closes its side of the push's channel. The
server exits when the worker closes its side of DESCRIPTOR. If the worker is killed, the system closes the channel and
DESCRIPTOR. Therefore only the fork server outlives a push, and no process outlives the worker.

A channel is a socket that keeps message boundaries. Each message is JSON. The receiving process sends `{"did": ...}` in
this order: `start`; `connect`, when it has reached the store; `join`, when it has joined the group; then one `receive`
per request. The worker sends each request as `{"side", "num_bytes"}`. `receive` means that a broadcast of `num_bytes`
bytes has been stored at the beginning of memory number `side`, one of the memories ("sides") that the receiving process
shares with the worker. The last message is `{"failed": REASON}` or `{"ended":
CODE}`, where a negative code is the signal that ended the process. The module `gloo_reader` is the worker's end of the
channel.
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
    """Until `requests` is closed, start the two processes of each requested push.

    Each request comes with the descriptor of the push's channel and `num_sides` descriptors of memory.
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
        _say(channel, failed=f"cannot start a process ({error.strerror})")


def _fork(run: Callable[[], None]) -> int:
    """Fork a process that calls `run` and exits. Return the process id."""
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
    """Fork the receiving process, kill the process when the worker closes the channel, and report how the process
    ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the system discards the exit status
    watcher = os.getpid()
    alive, held = os.pipe()

    def receive() -> None:
        os.close(alive)
        _die_with(watcher)
        _receive(push, channel, sides)

    try:
        pid = _fork(receive)
    except OSError as error:
        _say(channel, failed=f"cannot start a process ({error.strerror})")
        return
    os.close(held)
    poller = select.poll()
    poller.register(alive, 0)  # hangs up when the receiving process, which holds the other end, is gone
    poller.register(channel, 0)
    poller.poll()
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _say(channel, ended=os.waitstatus_to_exitcode(status))


def _die_with(parent: int) -> None:
    """Make the system kill this process when its parent ends. Exit at once if `parent` has already ended."""
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
    with suppress(OSError):  # the worker has closed the channel, so the watcher will kill this process
        channel.send(json.dumps(words).encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a peer that makes gloo abort must not cause core dumps
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the watchers
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
