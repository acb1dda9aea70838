"""The worker process, with the fake engine instead of the real one. `model` "broken" fails, "slow" never ends."""

from __future__ import annotations

import time

from fake_engine import FakeEngine

from trueroll.engine.config import EngineConfig
from trueroll.errors import ModelError
from trueroll.rollout.worker.process import run_as_child


def load(config: EngineConfig) -> FakeEngine:
    if config.model == "broken":
        raise ModelError("model: expected a whole one, found 'broken'")
    if config.model == "slow":
        time.sleep(3600)
    engine = FakeEngine()
    engine.weight_version = 0  # as of any worker that was just started
    return engine


if __name__ == "__main__":
    run_as_child(load)
