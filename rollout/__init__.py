"""The service around the engine. Names load on first use, so that a client never imports what it does not need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.request import SampleOutput, SamplingParams
    from .client import AsyncRolloutClient, Group, RolloutClient
    from .launch import WorkerProcess, launch_worker

_HOMES = {
    "AsyncRolloutClient": ".client",
    "Group": ".client",
    "RolloutClient": ".client",
    "SampleOutput": "..engine.request",
    "SamplingParams": "..engine.request",
    "WorkerProcess": ".launch",
    "launch_worker": ".launch",
}

__all__ = [
    "AsyncRolloutClient",
    "Group",
    "RolloutClient",
    "SampleOutput",
    "SamplingParams",
    "WorkerProcess",
    "launch_worker",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
