"""Both ends of a push through gloo, and the worker's helper processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import psutil
import torch

from trueroll.weight_sync.payload.manifest import CollectiveSource
from trueroll.weight_sync.transports.collective import GroupSlots
from trueroll.weight_sync.transports.gloo_reader import GlooReader

PUSH_ID = "0123456789abcdef" * 2
SECONDS = 20.0
SLOT_BYTES = 4096
DAY = 86400.0


def new_slots(num_workers: int = 1, timeout: float = SECONDS, join_timeout: float = SECONDS) -> GroupSlots:
    slots = [torch.zeros(SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
    return GroupSlots("gloo", slots, "127.0.0.1", num_workers, PUSH_ID, timeout, join_timeout)


def joined(timeout: float = SECONDS) -> tuple[GroupSlots, GlooReader]:
    slots = new_slots(timeout=timeout)
    slots.open()
    reader = GlooReader(slots.source(0), PUSH_ID, timeout, SECONDS, lambda: False)
    slots.opened()
    return slots, reader


def warm_up() -> None:
    """Wait until this process's fork server has imported torch, so that later pushes begin at once."""
    for each in joined():
        each.close()


def receiving_process(worker: psutil.Process) -> psutil.Process:
    """Return the receiving process of a worker during a push. This process is the child of the watcher, and the watcher
    is a child of the fork server.
    """
    *_, last = descendants(worker)
    return last


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the current descendants, each before its own children."""
    try:
        return [found for child in process.children() for found in (child, *descendants(child))]
    except psutil.NoSuchProcess:
        return []


def held_by(process: psutil.Process) -> tuple[int, int, int]:
    """Return the numbers of threads, descriptors and processes."""
    return process.num_threads(), process.num_fds(), len(descendants(process))


def silent_store() -> socket.socket:
    """Return a socket that accepts connections and sends nothing."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def source_at(store: socket.socket) -> CollectiveSource:
    host, port = store.getsockname()
    return CollectiveSource(host=host, port=port, rank=1, world_size=2)


def wait_until(condition: Callable[[], bool], found: Callable[[], str] = str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, found()
        time.sleep(0.01)
