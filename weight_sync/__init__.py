"""Weight updates from a trainer. Names load on first use, so that workers never import what only a trainer needs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .publisher import PushResult, WeightPublisher

__all__ = ["PushResult", "WeightPublisher"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".publisher", __name__), name)


def __dir__() -> list[str]:
    return __all__
