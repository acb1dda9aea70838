"""The public API of the rollout service. Each name is imported on first use, so a client loads only the modules that it
needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueroll.errors import (
        AlignmentError,
        ConfigError,
        DeadlineError,
        ForbiddenError,
        IdConflictError,
        IllegalStateError,
        InvalidRequestError,
        MessageTooLargeError,
        ModelError,
        OtherBaseError,
        ProtocolError,
        PushError,
        QueueFullError,
        RequestAbortedError,
        StaleWeightsError,
        TruerollError,
        UnavailableError,
        UnknownRequestError,
        UnreadError,
        VersionGapError,
        WorkerFailedError,
        WorkerLostError,
    )

    from ..engine.grammars.source import (
        Grammar,
    )
    from ..engine.media import (
        ImageInput,
    )
    from ..engine.models.names import (
        resolve_model,
    )
    from ..engine.request import (
        Distribution,
        SampleDelta,
        SampleOutput,
        SamplingParams,
        ScoreOutput,
        WeightSpan,
        derive_seed,
    )
    from ..weight_sync.trainer.trainer_tensors import (
        PushResult,
    )
    from .auditing import (
        Audit,
        audit,
    )
    from .client.client import (
        AsyncRolloutClient,
        Group,
        RolloutClient,
    )
    from .client.local_worker import (
        WorkerProcess,
        launch_worker,
    )
    from .fleet.client import (
        AsyncFleetClient,
        FleetClient,
    )
    from .fleet.fleet import (
        Fleet,
    )
    from .images import (
        ImageProcessor,
    )
    from .protocol import (
        Health,
        Stats,
        Status,
    )
    from .publisher.publisher import (
        WeightPublisher,
    )
    from .publisher.staged import (
        Staged,
    )
    from .sessions.export import (
        SessionSample,
        SessionTurn,
        to_safetensors,
    )
    from .sessions.session import (
        Answer,
        AsyncSession,
        Session,
    )
    from .text import (
        TextModel,
    )

_NAMES = {
    "..engine.grammars.source": ["Grammar"],
    "..engine.media": ["ImageInput"],
    "..engine.models.names": ["resolve_model"],
    "..engine.request": [
        "Distribution",
        "SampleDelta",
        "SampleOutput",
        "SamplingParams",
        "ScoreOutput",
        "WeightSpan",
        "derive_seed",
    ],
    "..errors": [
        "AlignmentError",
        "ConfigError",
        "DeadlineError",
        "ForbiddenError",
        "IdConflictError",
        "IllegalStateError",
        "InvalidRequestError",
        "MessageTooLargeError",
        "ModelError",
        "OtherBaseError",
        "ProtocolError",
        "PushError",
        "QueueFullError",
        "RequestAbortedError",
        "StaleWeightsError",
        "TruerollError",
        "UnavailableError",
        "UnknownRequestError",
        "UnreadError",
        "VersionGapError",
        "WorkerFailedError",
        "WorkerLostError",
    ],
    "..weight_sync.trainer.trainer_tensors": ["PushResult"],
    ".auditing": ["Audit", "audit"],
    ".client.client": ["AsyncRolloutClient", "Group", "RolloutClient"],
    ".client.local_worker": ["WorkerProcess", "launch_worker"],
    ".fleet.client": ["AsyncFleetClient", "FleetClient"],
    ".fleet.fleet": ["Fleet"],
    ".images": ["ImageProcessor"],
    ".protocol": ["Health", "Stats", "Status"],
    ".publisher.publisher": ["WeightPublisher"],
    ".publisher.staged": ["Staged"],
    ".sessions.export": ["SessionSample", "SessionTurn", "to_safetensors"],
    ".sessions.session": ["Answer", "AsyncSession", "Session"],
    ".text": ["TextModel"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AlignmentError",
    "Answer",
    "AsyncFleetClient",
    "AsyncRolloutClient",
    "AsyncSession",
    "Audit",
    "ConfigError",
    "DeadlineError",
    "Distribution",
    "Fleet",
    "FleetClient",
    "ForbiddenError",
    "Grammar",
    "Group",
    "Health",
    "IdConflictError",
    "IllegalStateError",
    "ImageInput",
    "ImageProcessor",
    "InvalidRequestError",
    "MessageTooLargeError",
    "ModelError",
    "OtherBaseError",
    "ProtocolError",
    "PushError",
    "PushResult",
    "QueueFullError",
    "RequestAbortedError",
    "RolloutClient",
    "SampleDelta",
    "SampleOutput",
    "SamplingParams",
    "ScoreOutput",
    "Session",
    "SessionSample",
    "SessionTurn",
    "Staged",
    "StaleWeightsError",
    "Stats",
    "Status",
    "TextModel",
    "TruerollError",
    "UnavailableError",
    "UnknownRequestError",
    "UnreadError",
    "VersionGapError",
    "WeightPublisher",
    "WeightSpan",
    "WorkerFailedError",
    "WorkerLostError",
    "WorkerProcess",
    "audit",
    "derive_seed",
    "launch_worker",
    "resolve_model",
    "to_safetensors",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
