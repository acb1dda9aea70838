"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from trueroll.engine.running import executor


@pytest.fixture(params=[0, 1], ids=["in-step", "ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many steps an engine queues ahead: 0 as on a CPU, or 1 as on a GPU."""
    monkeypatch.setattr(executor, "runs_ahead", lambda device: bool(request.param))
    return request.param
