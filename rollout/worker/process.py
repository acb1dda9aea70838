"""Runs a worker in its own process: signals, exit codes, file descriptors, and the pipe to the parent process.

`launch_worker` starts `python -m trueroll.rollout.worker.process` as a child. `trueroll serve` calls `serve`, without a
parent process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Set
from typing import Any, NoReturn, TextIO

from trueroll.errors import TruerollError

from ...engine.config import EngineConfig
from ..config import WorkerConfig
from ..garbage import bound_pauses
from ..logs import INTERRUPTED, log_to_stderr, tell_interrupted
from ..protocol.error_codes import told
from .engine_thread import ServedEngine
from .worker import Worker

MOST_SECONDS_TO_END = 10.0
"""Maximum time, in seconds, from the drain deadline to the end of a worker that has lost its parent."""

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> ServedEngine:
    """Build the engine. torch is imported here and not when the process starts, so that the worker can answer health
    calls during the import.
    """
    # torch's threads spin for a long time while they wait for each other. If a trainer uses the same cores, long spins
    # make torch's ops several times slower. A short spin costs less. torch reads GOMP_SPINCOUNT when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from ...engine.engine import Engine

    engine = Engine(config)
    gc.freeze()  # otherwise a garbage collection would traverse all of torch, which takes as long as two steps
    return engine


def serve(
    config: WorkerConfig, make_engine: Callable[[], ServedEngine], on_ready: Callable[[str, dict[str, Any]], None]
) -> None:
    """Run a worker in the main thread of this process until SIGTERM or SIGINT arrives and the worker has drained.

    Then end the process with exit code 0, or with 130 after a SIGINT.

    `on_ready`: called with the address and the engine's info. Raises the errors of `Worker` and `Worker.run`.
    """
    raise_descriptor_limit()
    bound_pauses()
    worker = Worker(config, make_engine, lambda info: on_ready(worker.address, info))
    received: set[int] = set()

    def end(number: int, _: object) -> None:
        received.add(number)
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # The system may deliver a signal to any thread. Python writes a byte to `wake_fd` for each signal. The byte wakes
    # the main thread, which runs the handler.
    signal.set_wakeup_fd(worker.wake_fd, warn_on_full_buffer=False)
    _run_to_the_end(worker, received)


def raise_descriptor_limit() -> None:
    """Raise this process's limit on open file descriptors to the hard limit, because every client needs file
    descriptors.

    If the system refuses to raise the limit, log a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning(
            "cannot raise the descriptor limit from %d to %d (%s); raise it with `ulimit -n`", soft, hard, error
        )


def _run_to_the_end(worker: Worker, received: Set[int]) -> None:
    """Run the worker, and end the process after a shutdown. `received`: the signals that the process has received so
    far.

    The process ends with `os._exit`. A normal exit may crash the interpreter if a thread, such as the thread of a push,
    is running torch code.
    """
    try:
        worker.run()
    except BaseException:
        if worker.is_computing:
            _exit(1)
        raise
    if signal.SIGINT in received:
        tell_interrupted()
    _exit(INTERRUPTED if signal.SIGINT in received else 0)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_as_child(load: Callable[[EngineConfig], ServedEngine] = load_engine) -> None:
    """Run the worker of a `launch_worker` call.

    Read the settings from stdin as one line of JSON. Write the outcome to stdout as one line of JSON: `{"address":
    ...}`, or an error in the format of `error_codes.told`. Drain and exit when stdin ends, which means that the parent
    has closed the pipe or died.
    """
    log_to_stderr(logging.WARNING)
    if not (line := _read_line(0)).endswith(b"\n"):
        return  # the parent ended before it had sent the settings
    settings = json.loads(line)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the output of a library is not mistaken for the outcome
    try:
        worker_config, engine_config = WorkerConfig(**settings["worker"]), EngineConfig(**settings["engine"])
        threading.Thread(target=_end_with_parent, args=(worker_config.drain_seconds,), daemon=True).start()
        serve(worker_config, lambda: load(engine_config), lambda address, _: _report(report, address=address))
    except TruerollError as error:
        _report(report, **told(error))
        sys.exit(1)


def _read_line(fd: int) -> bytes:
    """Read one line, byte by byte, so that the bytes after the line stay unread."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return line


def _end_with_parent(drain_seconds: float) -> None:
    """Drain and exit once stdin ends.

    Exit even if the worker hangs, because no parent is left to kill the worker.
    """
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain_seconds + MOST_SECONDS_TO_END)
    os._exit(1)


def _report(stream: TextIO, **outcome: str) -> None:
    print(json.dumps(outcome), file=stream, flush=True)


if __name__ == "__main__":
    run_as_child()
