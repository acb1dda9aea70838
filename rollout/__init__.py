"""The service around the engine. Names load on first use, so that a client never imports what it does not need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.errors import (
        ConfigError,
        InvalidRequestError,
        ModelError,
        TruerollError,
        UnknownRequestError,
    )
    from ..engine.models.loader import (
        resolve_model,
    )
    from ..engine.request import (
        Distribution,
        SampleOutput,
        SamplingParams,
        ScoreOutput,
        WeightSpan,
        derive_seed,
    )
    from .client import (
        AsyncRolloutClient,
        Group,
        RolloutClient,
    )
    from .errors import (
        DeadlineError,
        ForbiddenError,
        IdConflictError,
        IllegalStateError,
        MessageTooLargeError,
        ProtocolError,
        PushError,
        QueueFullError,
        RequestAbortedError,
        StaleWeightsError,
        UnavailableError,
        UnreadError,
        VersionGapError,
        WorkerFailedError,
        WorkerLostError,
    )
    from .launch import (
        WorkerProcess,
        launch_worker,
    )
    from .protocol import (
        Health,
        Stats,
        Status,
    )

_NAMES = {
    "..engine.errors": ["ConfigError", "InvalidRequestError", "ModelError", "TruerollError", "UnknownRequestError"],
    "..engine.models.loader": ["resolve_model"],
    "..engine.request": [
        "Distribution",
        "SampleOutput",
        "SamplingParams",
        "ScoreOutput",
        "WeightSpan",
        "derive_seed",
    ],
    ".client": ["AsyncRolloutClient", "Group", "RolloutClient"],
    ".errors": [
        "DeadlineError",
        "ForbiddenError",
        "IdConflictError",
        "IllegalStateError",
        "MessageTooLargeError",
        "ProtocolError",
        "PushError",
        "QueueFullError",
        "RequestAbortedError",
        "StaleWeightsError",
        "UnavailableError",
        "UnreadError",
        "VersionGapError",
        "WorkerFailedError",
        "WorkerLostError",
    ],
    ".protocol": ["Health", "Stats", "Status"],
    ".launch": ["WorkerProcess", "launch_worker"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AsyncRolloutClient",
    "ConfigError",
    "DeadlineError",
    "Distribution",
    "ForbiddenError",
    "Group",
    "Health",
    "IdConflictError",
    "IllegalStateError",
    "InvalidRequestError",
    "MessageTooLargeError",
    "ModelError",
    "ProtocolError",
    "PushError",
    "QueueFullError",
    "RequestAbortedError",
    "RolloutClient",
    "SampleOutput",
    "SamplingParams",
    "ScoreOutput",
    "StaleWeightsError",
    "Stats",
    "Status",
    "TruerollError",
    "UnavailableError",
    "UnknownRequestError",
    "UnreadError",
    "VersionGapError",
    "WeightSpan",
    "WorkerFailedError",
    "WorkerLostError",
    "WorkerProcess",
    "derive_seed",
    "launch_worker",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
