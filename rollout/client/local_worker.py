"""Start and stop a worker process.

Owns: the child process, and the cleanup after the child is killed. The child reads its settings from a pipe that stays
open. When the parent closes the pipe or dies, even by SIGKILL, the child drains and exits. Imports neither torch nor
zmq.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trueroll.errors import WorkerFailedError

from ...engine.config import EngineConfig
from ...engine.models.names import check_model
from ..config import WorkerConfig, check_saving
from ..protocol.error_codes import error_from_code

# -P keeps the current folder off the import path. In a clone of trueroll, the folder `kernels` would shadow an
# installed package of that name.
WORKER_COMMAND = (sys.executable, "-P", "-m", "trueroll.rollout.worker.process")
STOP_MARGIN_SECONDS = 10.0
"""Seconds from the drain deadline to the kill. A worker uses this time to abort the remaining requests and exit."""


class WorkerProcess:
    """A worker that runs as a child process. `address`: address for clients. If this object is used as a context
    manager, it stops the worker on exit.

    If this process is forked, the forked process inherits the worker's pipe, so the worker runs until both processes
    have ended.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        engine: EngineConfig,
        startup_timeout: float,
        command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        """Start the child and wait until it is ready. Raise ConfigError, ModelError or WorkerFailedError if the start
        fails.
        """
        self._folder: Path | None = None
        self._drain_seconds = worker.drain_seconds
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        try:
            self._configure(worker, engine)
            self.address = self._wait_until_ready(time.monotonic() + startup_timeout)
            if worker.address is None:
                self._folder = Path(self.address.removeprefix("ipc://")).parent
        except BaseException:
            self.close()  # the worker itself removes its folder, because the path is not known here yet
            raise

    @property
    def pid(self) -> int:
        """Id of the child process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while the process runs, negative if a signal ended it."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait until the process ends. Return the exit code of the process."""
        return self._process.wait()

    def close(self) -> None:
        """Let the worker drain and exit. If the worker has not exited by the deadline, kill the worker. No-op if the
        worker has ended.
        """
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._drain_seconds + STOP_MARGIN_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the worker. Unfinished requests are lost."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a worker that exits by itself removes its folder

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self, worker: WorkerConfig, engine: EngineConfig) -> None:
        settings = {"worker": worker.model_dump(), "engine": engine.model_dump()}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has exited; its outcome says why
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")

    def _wait_until_ready(self, deadline: float) -> str:
        outcome = json.loads(self._read_line(deadline))
        if "address" not in outcome:
            raise error_from_code(**outcome)
        return outcome["address"]

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        line, poll = b"", select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise WorkerFailedError(
                    "worker: the process was not ready within startup_timeout; raise startup_timeout, or see the log "
                    "above"
                )
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                code = self._process.wait()
                raise WorkerFailedError(
                    f"worker: the process ended with exit code {code} during startup; see the worker's log above"
                )
            line += part
        return line


def launch_worker(model: str, *, startup_timeout: float = 600.0, **settings: Any) -> WorkerProcess:
    """Start a worker that serves `model`, and return when the worker is ready.

    `settings`: settings of EngineConfig and WorkerConfig, such as `device="cpu"`, `num_blocks=256` or
    `address="tcp://127.0.0.1:5555"`. `startup_timeout`: maximum number of seconds to wait until the worker is ready.
    Raise ConfigError for an unknown setting or an invalid value, ModelError if the model cannot be loaded, and
    WorkerFailedError if the process ends early or is not ready in time.
    """
    of_worker = {name: settings.pop(name) for name in WorkerConfig.model_fields if name in settings}
    worker, engine = WorkerConfig(**of_worker), EngineConfig(model=model, **settings)
    check_saving(worker, engine)
    check_model(model)
    return WorkerProcess(worker, engine, startup_timeout)
