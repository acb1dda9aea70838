"""The paths of the Tinker API, with their handlers and methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ..paths import SAMPLER, TINKER
from ..wire import Handler
from .endpoints import TinkerEndpoints

Entry: TypeAlias = tuple[str, Handler, list[str]]
REST = f"{TINKER}/{{rest:path}}"
"""Every other path of the Tinker API."""


def tinker_routes(endpoints: TinkerEndpoints) -> Iterator[Entry]:
    """Yield the path, the handler and the methods of each route. The last route refuses every other path."""
    yield SAMPLER, endpoints.sampler, ["GET"]
    yield f"{TINKER}/healthz", endpoints.health, ["GET"]
    yield f"{TINKER}/get_server_capabilities", endpoints.capabilities, ["GET"]
    for name, handler in (
        ("client/config", endpoints.config),
        ("client/dynamic_config", endpoints.dynamic_config),
        ("create_session", endpoints.begin_session),
        ("session_heartbeat", endpoints.heartbeat),
        ("create_sampling_session", endpoints.begin_sampling_session),
        ("asample", endpoints.sample),
        ("retrieve_future", endpoints.retrieve),
        ("cancel_future", endpoints.cancel),
        ("telemetry", endpoints.telemetry),
    ):
        yield f"{TINKER}/{name}", handler, ["POST"]
    yield REST, endpoints.refuse, ["GET", "POST", "PUT", "DELETE", "PATCH"]
