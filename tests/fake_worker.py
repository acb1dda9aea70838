"""A worker process with the fake engine. If `model` is "broken", loading fails. If `model` is "slow", loading never
ends.
"""

from __future__ import annotations

import time

from fake_engine import FakeEngine

from trueroll.engine.config import EngineConfig
from trueroll.errors import ModelError
from trueroll.rollout.worker.process import run_as_child


def load(config: EngineConfig) -> FakeEngine:
    if config.model == "broken":
        raise ModelError("model 'broken' cannot be loaded")
    if config.model == "slow":
        time.sleep(3600)
    engine = FakeEngine()
    engine.weight_version = 0  # the fake starts like any new worker
    return engine


if __name__ == "__main__":
    run_as_child(load)
