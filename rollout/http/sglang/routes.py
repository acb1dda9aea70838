"""The paths of SGLang's server, with their handlers and methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ..lifecycle import Lifecycle
from ..wire import Handler, refusing
from .adapters import SglangAdapters
from .control import REFUSED, Control
from .generate import Generation
from .info import Info
from .weights import Weights

Entry: TypeAlias = tuple[str, Handler, list[str]]


def sglang_routes(
    generation: Generation,
    info: Info,
    weights: Weights,
    adapters: SglangAdapters,
    control: Control,
    lifecycle: Lifecycle,
) -> Iterator[Entry]:
    """Yield the path, the handler and the methods of each route."""
    yield "/generate", generation.generate, ["POST"]
    yield "/health_generate", lifecycle.health, ["GET"]
    for path, handler in (
        ("/server_info", info.server),
        ("/get_server_info", info.server),
        ("/model_info", info.model),
        ("/get_model_info", info.model),
        ("/get_weight_version", info.weight_version),
        ("/v1/loads", info.loads),
        ("/get_load", info.load),
    ):
        yield path, handler, ["GET"]
    for path, handler in (
        ("/abort_request", control.abort),
        ("/pause_generation", control.pause),
        ("/continue_generation", control.resume),
        ("/release_memory_occupation", control.release),
        ("/resume_memory_occupation", control.allocate),
        ("/pull_weights", weights.pull),
        ("/update_weights_from_disk", weights.update),
        ("/load_lora_adapter", adapters.load),
        ("/unload_lora_adapter", adapters.unload),
    ):
        yield path, handler, ["POST"]
    yield "/flush_cache", control.flush, ["GET", "POST"]
    for path, why in REFUSED.items():
        yield path, refusing(path, why), ["GET", "POST"]
