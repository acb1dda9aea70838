"""What is known of a worker while it serves: told to whoever asks, from any thread, without waiting for anything.

Owns: what the engine has said of itself, and what is measured of the process. It reads how requests, the state and the
push under way stand, which change as a whole, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from .. import protocol
from ..config import WorkerConfig
from ..monitoring.resident import ResidentMemory
from ..monitoring.timings import Timings
from .book import Conditions
from .control import Control
from .engine_thread import EngineThread
from .ledger import Ledger


class Vitals:
    """Health, counters and times of one worker. `info`: what the engine is, as a dictionary of its EngineInfo; None
    until the worker's own thread knows that the model has loaded.
    """

    def __init__(
        self, config: WorkerConfig, engine_thread: EngineThread, ledger: Ledger, control: Control, timings: Timings
    ) -> None:
        self.instance = secrets.token_hex(8)
        self.info: dict[str, Any] | None = None
        self._config, self._engine_thread, self._ledger, self._control = config, engine_thread, ledger, control
        self._timings = timings
        self._resident = ResidentMemory()

    def health(self, id: str = "metrics") -> protocol.Health:
        """How the worker is."""
        snapshot, lifecycle = self._engine_thread.snapshot, self._control.lifecycle
        requests = {"open": len(self._ledger.open), "kept": len(self._ledger.kept)}
        if snapshot is not None:
            requests |= {"running": snapshot.stats["num_running"], "waiting": snapshot.stats["num_waiting"]}
        return protocol.Health(
            id=id,
            state=lifecycle.state,
            instance=self.instance,
            seconds_since_progress=None if snapshot is None else time.monotonic() - snapshot.progress_at,
            weight_version=None if snapshot is None else snapshot.weight_version,
            requests=requests,
            memory=self._memory(),
            limits=self._config.limits(),
            engine=self._engine(),
            sleeping=tuple(sorted(lifecycle.standing.sleeping)),
            push=self._control.pushes.progress(),
        )

    def stats(self, id: str = "metrics") -> protocol.Stats:
        """The lifetime counters."""
        snapshot = self._engine_thread.snapshot
        engine = {} if snapshot is None else snapshot.stats
        return protocol.Stats(id=id, engine=engine, service=dataclasses.asdict(self._ledger.stats))

    def timings(self) -> Timings:
        """How long steps, pushes and sleeps took."""
        return self._timings

    def conditions(self) -> Conditions:
        """How the worker stands, as far as it matters to a new request."""
        lifecycle = self._control.lifecycle
        max_model_len = None if self.info is None else self.info["max_model_len"]
        return Conditions(
            lifecycle.state, lifecycle.is_ending, self._control.takes_requests, self.version, max_model_len
        )

    @property
    def version(self) -> int | None:
        """Of the weights that the engine had after its last step or command; None until `info` is known, so that it
        never changes while one message is handled.
        """
        snapshot = self._engine_thread.snapshot
        return None if self.info is None or snapshot is None else snapshot.weight_version

    def close(self) -> None:
        """Measure nothing more."""
        self._resident.close()

    def _engine(self) -> dict[str, Any] | None:
        """With why commits take longer than they could; empty if they do not."""
        target = self._control.pushes.target
        if self.info is None or target is None:
            return None
        return self.info | {"commit_note": target.weights.commit_note}

    def _memory(self) -> dict[str, int]:
        memory = {"process": self._resident.num_bytes()}
        if (snapshot := self._engine_thread.snapshot) is not None:
            memory |= snapshot.memory | {"staging": self._control.pushes.staging_bytes}
        return memory
