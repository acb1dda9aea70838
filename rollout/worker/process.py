"""A worker as a process of its own: signals, exit codes, descriptors, and the pipe to the parent that launched it.

`python -m trueroll.rollout.worker.process` is the child that `launch_worker` starts; `trueroll serve` runs `serve`
without a parent.
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
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from trueroll.errors import TruerollError

from ...engine.config import EngineConfig
from ..config import WorkerConfig
from ..logs import log_to_stderr
from ..protocol.error_codes import told
from .engine_thread import ServedEngine
from .worker import Worker

MOST_SECONDS_TO_END = 10.0
"""Beyond its drain deadline, of a worker whose parent is gone."""

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> ServedEngine:
    """The engine. Imports torch only now, so that a worker answers health while that happens."""
    # Read when torch is imported. Its threads spin for long while they wait for each other, which makes the ops that
    # run in torch several times slower where a trainer wants the same cores; this short a spin does so less.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from ...engine.engine import Engine

    engine = Engine(config)
    gc.freeze()  # a collection that walks through all of torch and transformers would take as long as two steps
    return engine


def serve(
    config: WorkerConfig, make_engine: Callable[[], ServedEngine], on_ready: Callable[[str, dict[str, Any]], None]
) -> None:
    """Run a worker in the main thread of this process until SIGTERM or SIGINT has drained it.

    `on_ready` gets the address and the engine's info. Raises what `Worker` and `Worker.run` raise.
    """
    raise_descriptor_limit()
    worker = Worker(config, make_engine, lambda info: on_ready(worker.address, info))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.drain())
    # The system may hand a signal to any thread; the bytes that it leaves here wake the main thread, which handles it.
    signal.set_wakeup_fd(worker.wake_fd, warn_on_full_buffer=False)
    _run_to_the_end(worker)


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as the system lets it, as every client takes some.

    Where that is refused, the limit stays as it is, and a warning says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("may open %d descriptors, expected %d (%s); raise it with `ulimit -n`", soft, hard, error)


def _run_to_the_end(worker: Worker) -> None:
    """Run the worker, and end the process with exit code 0 when it was told to end.

    An interpreter that shuts down around threads which are still inside torch, such as those of a push, may crash.
    """
    try:
        worker.run()
    except BaseException:
        if worker.is_computing:
            _exit(1)
        raise
    _exit(0)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_as_child(load: Callable[[EngineConfig], ServedEngine] = load_engine) -> None:
    """Run the worker that `launch_worker` asks for: settings in one JSON line on stdin, the outcome in one on stdout.

    The outcome is `{"address": ...}`, or the error as `told` puts it. The end of stdin, which comes when the parent
    closes it or dies, means drain and exit.
    """
    log_to_stderr(logging.WARNING)
    settings = json.loads(_read_line(0))
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like the outcome
    try:
        worker_config, engine_config = WorkerConfig(**settings["worker"]), EngineConfig(**settings["engine"])
        threading.Thread(target=_end_with_parent, args=(worker_config.drain_seconds,), daemon=True).start()
        serve(worker_config, lambda: load(engine_config), lambda address, _: _report(report, address=address))
    except TruerollError as error:
        _report(report, **told(error))
        sys.exit(1)


def _read_line(fd: int) -> bytes:
    """The next line, unbuffered, so that nothing after it is consumed."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return line


def _end_with_parent(drain_seconds: float) -> None:
    """Drain and exit once stdin ends; a worker that hangs then exits all the same, as nobody is left to kill it."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain_seconds + MOST_SECONDS_TO_END)
    os._exit(1)


def _report(stream: TextIO, **outcome: str) -> None:
    print(json.dumps(outcome), file=stream, flush=True)


if __name__ == "__main__":
    run_as_child()
