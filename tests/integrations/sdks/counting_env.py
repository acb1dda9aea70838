"""An environment of OpenEnv in which an agent adds numbers until their sum is large enough, and its server."""

# pyright: reportMissingImports=false

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

GOAL = 6


class Add(Action):
    number: int


class Total(Observation):
    text: str


class Counting(Environment[Add, Total, State]):
    """The reward of the last step is 1 divided by the number of steps. A step with a number below 1 is an error."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._total = State(), 0

    @property
    def state(self) -> State:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        self._state, self._total = State(episode_id=episode_id), 0
        return Total(text=f"Add numbers until their sum is {GOAL}.")

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self._state.step_count += 1
        if action.number < 1:
            raise ValueError(f"the number must be positive (got {action.number})")
        self._total += action.number
        done = self._total >= GOAL
        return Total(text=f"The sum is {self._total}.", done=done, reward=done / self._state.step_count)


@contextmanager
def serve_counting() -> Iterator[str]:
    """Serve the environment on a thread, over loopback. Yield its URL."""
    app = create_app(Counting, Add, Total, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
