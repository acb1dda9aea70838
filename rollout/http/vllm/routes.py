"""The paths of vLLM's and SkyRL's servers for updates of weights, with their handlers and methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ..wire import Handler, refusing
from .fields import REFUSED
from .phases import Phases

Entry: TypeAlias = tuple[str, Handler, list[str]]


def vllm_routes(phases: Phases) -> Iterator[Entry]:
    """Yield the path, the handler and the methods of each route."""
    for path, handler in (
        ("/init_weight_transfer_engine", phases.init),
        ("/shutdown_weight_transfer_engine", phases.shut_down),
        ("/fetch_weights", phases.fetch),
        ("/start_weight_update", phases.start),
        ("/update_weights", phases.update),
        ("/finish_weight_update", phases.finish),
        ("/abort_requests", phases.abort),
        ("/finish_session", phases.finish_session),
        ("/skyrl/v1/load_lora_adapter", phases.load_adapter),
    ):
        yield path, handler, ["POST"]
    yield "/weight_info", phases.weight_info, ["GET"]
    yield "/get_world_size", phases.world_size, ["GET"]
    for path, why in REFUSED.items():
        yield path, refusing(path, why), ["POST"]
