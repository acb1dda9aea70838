"""A trainer in a separate process, which stops in a chosen phase so that a test can kill the trainer or a worker.

Reads commands from stdin and answers each command on stdout, in lines of JSON:

- `{"connect": ADDRESSES, "settings": ...}` makes a publisher. Without `settings`, the existing publisher connects
  again.
- `{"push": FOLDER, "version": V, "hold": PHASE or null}` pushes a checkpoint. With `"adapters": true`, only a large
  LoRA adapter of the checkpoint is pushed.

In the phase named by `hold`, the trainer prints `{"held": PHASE, "memory": NAME or null}` and waits for a line: `go`,
or `cut` to cut all its TCP connections first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trueroll.errors import TruerollError
from trueroll.rollout import WeightPublisher
from trueroll.rollout.protocol import CommitPush
from trueroll.rollout.publisher.publisher import WorkerClients
from trueroll.weight_sync.deltas.writer import DeltaWriter
from trueroll.weight_sync.trainer import sender as sender_module
from trueroll.weight_sync.trainer.transaction import Transaction
from trueroll.weight_sync.transports.collective import GroupSlots
from trueroll.weight_sync.transports.disk import FolderWriter

BUCKET_BYTES = 2**15
"""Small buckets, so that a push takes many."""
BUCKET = 3
"""The bucket at which a push is held. The workers know of this bucket. With `collective`, the bucket has not been sent
yet.
"""


def large_adapter(folder: Path) -> Any:
    """Return an adapter of many buckets, with equal values in every process."""
    sys.path.append(str(Path(__file__).parents[2]))
    from adapters import adapt

    return adapt(folder, r=64, target_modules="all-linear")


class Hold:
    """Stops the next push once, in `phase`. `memory`: name of the push's shared memory, if there is any."""

    def __init__(self) -> None:
        self.arm(None)

    def arm(self, phase: str | None) -> None:
        self.phase, self.memory = phase, None
        self.has_written = False
        self.released = threading.Event()
        self.committed = threading.Event()

    def at(self, phase: str) -> None:
        if self.phase != phase:
            return
        say(held=phase, memory=self.memory)
        if sys.stdin.readline() == "cut\n":
            cut_connections()
        self.phase = None
        self.released.set()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def cut_connections() -> None:
    """Shut down every TCP connection of this process, like a network failure."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()
            ):  # a listener has no connection
                connection.shutdown(socket.SHUT_RDWR)


def install(hold: Hold) -> None:
    """Wrap the steps of a push. The phases are:

    - `begin`: the workers have the call. With `collective`, the workers wait for the trainer to join.
    - `stage`: some buckets are staged, or with `disk` and `delta` some tensors are written.
    - `verify`: all buckets are staged, or with `disk` and `delta` all workers have found
      the folder.
    - `lend`: if workers share memory, one worker has verified, and the other workers do not know of the push yet.
    - `commit`: all workers have verified, the first worker has committed, and the other workers have no commit call
      yet.
    """
    begin, stage, verify, lend = Transaction.begin, Transaction.stage, Transaction.verify, Transaction._lend
    ask, join, append, add = WorkerClients._ask, GroupSlots.open, FolderWriter.append, DeltaWriter.add

    def held_begin(self: Transaction, dtype: str, source: Any, *args: Any, **others: Any) -> Any:
        hold.memory = getattr(source(0), "name", None)
        future = begin(self, dtype, source, *args, **others)
        hold.at("begin")
        return future

    def held_join(self: GroupSlots) -> None:
        def run() -> None:
            if hold.phase == "begin":
                hold.released.wait()
            join(self)

        threading.Thread(target=run, daemon=True).start()

    def held_stage(self: Transaction, bucket: Any) -> Any:
        future = stage(self, bucket)
        if bucket.index == BUCKET:
            hold.at("stage")
        return future

    def held_append(self: FolderWriter, name: str, data: memoryview) -> None:
        if hold.has_written:
            hold.at("stage")
        append(self, name, data)
        hold.has_written = True

    def held_add(self: DeltaWriter, *args: Any) -> None:
        if hold.has_written:
            hold.at("stage")
        add(self, *args)
        hold.has_written = True

    def held_verify(self: Transaction) -> None:
        hold.at("verify")
        verify(self)

    def held_lend(self: Transaction, lent: Any) -> None:
        hold.at("lend")
        lend(self, lent)

    async def held_ask(self: WorkerClients, position: int, call: Any, timeout: float) -> Any:
        if hold.phase != "commit" or not isinstance(call, CommitPush):
            return await ask(self, position, call, timeout)
        if position:
            await asyncio.to_thread(hold.committed.wait)
            await asyncio.to_thread(hold.at, "commit")
        try:
            return await ask(self, position, call, timeout)
        finally:
            hold.committed.set()

    Transaction.begin, Transaction.stage, Transaction.verify = held_begin, held_stage, held_verify
    Transaction._lend = held_lend
    WorkerClients._ask, GroupSlots.open = held_ask, held_join
    FolderWriter.append = held_append  # type: ignore[method-assign]
    DeltaWriter.add = held_add  # type: ignore[method-assign]


def main() -> None:
    sender_module.BUCKET_BYTES = dict.fromkeys(sender_module.BUCKET_BYTES, BUCKET_BYTES)
    hold = Hold()
    install(hold)
    publisher: WeightPublisher | None = None
    while line := sys.stdin.readline():
        command = json.loads(line)
        if "push" not in command:
            if "settings" in command:
                publisher = WeightPublisher(**command["settings"])
            assert publisher is not None
            publisher.connect(command["connect"])
            say(connected=command["connect"])
            continue
        assert publisher is not None
        hold.arm(command["hold"])
        try:
            folder, adapters = Path(command["push"]), command.get("adapters", False)
            tensors = large_adapter(folder) if adapters else load_file(folder / "model.safetensors")
            result = publisher.push(tensors, command["version"], adapters=adapters)
            say(version=result.version, num_bytes=result.num_bytes)
        except TruerollError as error:
            say(error=str(error), kind=type(error).__name__)


if __name__ == "__main__":
    main()
