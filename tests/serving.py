"""Helpers for tests of the service: workers on threads, worker processes with the fake engine, and a plain client."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from fake_engine import FakeEngine, expected_tokens

from trueroll.engine.config import EngineConfig
from trueroll.engine.request import Output
from trueroll.errors import TruerollError
from trueroll.rollout import Group, WorkerProcess, protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.network.keys import client_keys, use_curve
from trueroll.rollout.network.router import Peer
from trueroll.rollout.worker.engine_thread import ServedEngine
from trueroll.rollout.worker.worker import Dispatch, Worker

RECEIVE_MS = 60_000


class WorkerOnThread:
    """A worker on a thread of this process. `error`: the exception that `run` raised."""

    def __init__(self, config: WorkerConfig, make_engine: Callable[[], ServedEngine]) -> None:
        self.worker = Worker(config, make_engine)
        self.address = self.worker.address
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@contextmanager
def serving(engine: FakeEngine, **settings: Any) -> Iterator[WorkerOnThread]:
    """Run a worker in front of `engine` and wait until the worker is ready. At the end the worker must drain, unless it
    has failed.
    """
    running = WorkerOnThread(WorkerConfig(**settings), lambda: engine)
    while running.worker._vitals.health().state == "loading":
        time.sleep(0.001)
    try:
        yield running
    finally:
        engine.gate.set()
        engine.flow.set()
        running.worker.drain()
        running.worker.drain()
        running.join()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns true."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stop_after_a_step(engine: FakeEngine) -> None:
    """Let the engine add exactly one token to each sample."""
    step = engine.step

    def step_once() -> list[Output]:
        outputs = step()
        engine.flow.clear()
        return outputs

    engine.step = step_once


class FaultyWorker(Worker):
    """A worker in front of `engine` that tests can make misbehave. `ready`: set once the worker is ready.

    `calls`: the types of the received messages, without `health`. `refuse`: by message type, an error that the worker
    returns once. `mute`: message types that get no answer.
    """

    def __init__(self, config: WorkerConfig, engine: FakeEngine) -> None:
        self.ready = threading.Event()
        super().__init__(config, lambda: engine, lambda info: self.ready.set())
        self.engine = engine
        self.calls: list[str] = []
        self.refuse: dict[str, TruerollError] = {}
        self.mute: set[str] = set()
        self._dispatch._handle = lambda peer, message: self._handle(peer, message)  # type: ignore[method-assign]

    def _handle(self, peer: Peer, message: protocol.Call) -> None:
        if message.type != "health":
            self.calls.append(message.type)
        if message.type in self.refuse:
            raise self.refuse.pop(message.type)
        if message.type not in self.mute:
            Dispatch._handle(self._dispatch, peer, message)


def fake_process(model: str = "fake", **settings: Any) -> WorkerProcess:
    """Start a worker process with the fake engine."""
    command = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
    return WorkerProcess(WorkerConfig(**settings), EngineConfig(model=model), startup_timeout=60, command=command)


class RawClient:
    """A DEALER socket that sends and receives MessagePack maps. It can also send arbitrary bytes."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.RCVTIMEO, RECEIVE_MS)
        self.socket.set(zmq.LINGER, 0)
        if identity is not None:
            self.socket.set(zmq.IDENTITY, identity)
        if (keys := client_keys(address, None, None)) is not None:
            use_curve(self.socket, keys)
        self.socket.connect(address)

    def send(self, type: str, **fields: Any) -> None:
        self.socket.send(msgpack.packb({"version": 1, "type": type, **fields}))

    def generate(
        self, id: str, prompt: list[int] | None = None, caller: str | None = None, deltas: bool = False, **params: Any
    ) -> None:
        tokens = np.array([1, 2, 3] if prompt is None else prompt, "<i4").tobytes()
        params = {"max_tokens": 4, "seed": 7, **params}
        self.send("generate", id=id, prompt_token_ids=tokens, params=params, caller=caller, deltas=deltas)

    def receive(self) -> dict[str, Any]:
        return msgpack.unpackb(self.socket.recv())

    def receive_until(self, *types: str) -> list[dict[str, Any]]:
        """Return the replies up to the first one of these types."""
        replies = [self.receive()]
        while replies[-1]["type"] not in types:
            replies.append(self.receive())
        return replies

    def health(self) -> dict[str, Any]:
        self.send("health", id="health")
        return self.receive_until("health")[-1]

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_group(group: Group, num_samples: int) -> None:
    """Check that the group is complete, and that the tokens follow from the seed."""
    assert [sample.index for sample in group.samples] == list(range(num_samples)) and group.params.seed is not None
    for sample in group.samples:
        assert group.params.max_tokens is not None
        count = max(1, group.params.max_tokens - sample.index)
        assert sample.finish_reason == "length"
        assert sample.token_ids == expected_tokens(group.params.seed, sample.index, count)
