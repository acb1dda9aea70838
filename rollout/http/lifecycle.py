"""The worker's lifecycle over HTTP, by the names that vLLM has for it: health, pause, sleep, weights, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import ConfigError, InvalidRequestError, PushError, TruerollError, brief

from ...engine.request import InFlight
from ...weight_sync.payload.manifest import LAST_VERSION, MANIFEST_FILE, Version
from .. import protocol
from ..client.client import AsyncRolloutClient
from ..monitoring.metrics import WorkerMetrics, exposition
from ..network.keys import Key
from .errors import HttpError, given_twice
from .fields import Fields, checked
from .guard import Counters
from .watch import Watch
from .wire import answer, read_json

if TYPE_CHECKING:
    import torch

HEALTH_SECONDS = 5.0
PATIENCE_SECONDS = 0.025
"""`/health` waits so long for the worker while there is a recent report."""
_IN_FLIGHT: dict[str, InFlight] = {"abort": "abort", "wait": "drain", "keep": "recompute"}
_PAUSES = tuple(_IN_FLIGHT)
_LISTS = {"tags"}
"""The names that a query may give several times."""

log = logging.getLogger(__name__)


class UpdateFields(Fields):
    """`weight_dir`: a folder with the weights. `weight_version`: what they are called; None: the next one."""

    weight_dir: str
    weight_version: Version | None = None


def _changing(handle: Callable[[Lifecycle, Request], Awaitable[Response]]) -> Any:
    """A handler after which no earlier report of the worker counts."""

    @wraps(handle)
    async def handle_and_note(self: Lifecycle, request: Request) -> Response:
        try:
            return await handle(self, request)
        finally:
            self.watch.note_change()

    return handle_and_note


class Lifecycle:
    """The calls that concern the worker, not a request. `keys`: `server_public_key` and `client_key`. `watch`: of the
    same worker.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        watch: Watch,
        address: str,
        keys: tuple[Key | None, Key | None],
        counters: Counters,
    ) -> None:
        self.watch = watch
        self._client, self._address, self._keys, self._counters = client, address, keys, counters
        self._push_lock = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """200 while the worker answers and has not failed, or did so a moment ago."""
        _queries(request, {})
        health, age = await self._health_or_report()
        told = {"state": health.state, "weight_version": health.weight_version, "age_seconds": round(age, 3)}
        return answer(told, 503 if health.state == "failed" else 200)

    @_changing
    async def pause(self, request: Request) -> Response:
        """Generate nothing until `/resume`."""
        queries = _queries(request, {"mode": _PAUSES, "clear_cache": ("true", "false")})
        mode = queries.get("mode", ["abort"])[0]
        if mode == "wait":
            await self._client.drain()
        else:
            await self._client.pause()
        if mode == "abort":
            await self._client.abort_all()
        if mode != "keep" and queries.get("clear_cache", ["true"])[0] == "true":
            await self._client.invalidate_prefix_cache()
        return answer({"status": "paused"})

    @_changing
    async def resume(self, request: Request) -> Response:
        """End a pause."""
        _queries(request, {})
        await self._client.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        _queries(request, {})
        return answer({"is_paused": (await self._health()).state == "paused"})

    @_changing
    async def sleep(self, request: Request) -> Response:
        """Give memory back until `/wake_up`."""
        queries = _queries(request, {"level": ("1", "2"), "mode": _PAUSES, "tags": protocol.ALL_TAGS})
        status = await self._client.sleep(
            level=2 if queries.get("level") == ["2"] else 1,
            tags=_tags(queries),
            in_flight=_IN_FLIGHT[queries.get("mode", ["abort"])[0]],
        )
        return _told(status)

    @_changing
    async def wake_up(self, request: Request) -> Response:
        """Take memory again."""
        return _told(await self._client.wake_up(_tags(_queries(request, {"tags": protocol.ALL_TAGS}))))

    async def is_sleeping(self, request: Request) -> Response:
        _queries(request, {})
        return answer({"is_sleeping": bool((await self._health()).sleeping)})

    @_changing
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prefixes."""
        _queries(request, {"reset_running_requests": ("false",), "reset_external": ("false",)})
        return _told(await self._client.invalidate_prefix_cache())

    @_changing
    async def update_weights(self, request: Request) -> Response:
        """Serve the weights in a folder: of a push by `disk`, or of a checkpoint in Hugging Face format."""
        _queries(request, {})
        fields = checked(UpdateFields, read_json(request))
        async with self._push_lock:
            version = fields.weight_version
            if version is None:
                version = _next_version((await self._health()).weight_version or 0)
            await asyncio.to_thread(_push, self._address, self._keys, fields, version)
        health = await self._health()
        return answer({"status": "updated", "weight_version": health.weight_version})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' page: the worker's state and counters, and those of this front end."""
        health, stats = await self._health(), await self._client.stats()
        registry = CollectorRegistry()
        registry.register(WorkerMetrics(health, stats))
        registry.register(self._counters)
        content_type, page = exposition(registry, request.headers.get("Accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    async def _health_or_report(self) -> tuple[protocol.Health, float]:
        """What the worker says, 0 seconds old, or its recent report if that takes long."""
        if (report := self.watch.report()) is not None:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return await self._client.health(), 0.0
            except TimeoutError:
                health, age = report
                return health, age + PATIENCE_SECONDS
        return await self._health(), 0.0

    async def _health(self) -> protocol.Health:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._client.health()
        except TimeoutError:
            text = f"worker: expected an answer within {HEALTH_SECONDS} s, found none; is it there?"
            raise HttpError(503, text, code="worker_lost") from None


def _next_version(served: int) -> int:
    """The version after `served`. Raise PushError if there is none."""
    if served >= LAST_VERSION:
        raise PushError(f"weight_version: no version follows {served}, which is served; start the worker anew")
    return served + 1


def _push(address: str, keys: tuple[Key | None, Key | None], fields: UpdateFields, version: int) -> None:
    """On a thread: the publisher blocks, and imports torch."""
    from ..publisher.publisher import WeightPublisher, connect_to

    folder = Path(fields.weight_dir)
    is_push = _is_push(folder)
    tensors = None if is_push else _tensors(folder)
    if is_push and fields.weight_version is not None:
        text = "weight_version: expected none, as the folder names its own; leave it out"
        raise InvalidRequestError(text, field="weight_version", value=fields.weight_version)
    try:
        with WeightPublisher("shared", server_public_key=keys[0], client_key=keys[1]) as publisher:
            connect_to(publisher, address)
            if tensors is None:
                publisher.push_folder(folder)
            else:
                publisher.push(tensors, version)
    except ConfigError as error:
        raise PushError(f"weight_dir: {error}") from None


def _is_push(folder: Path) -> bool:
    """Whether a push by `disk` wrote the folder. Raise PushError if it cannot be read, as `_tensors` does."""
    from ...weight_sync.transports.disk import read_manifest

    with _one_text(folder):
        if not (folder / MANIFEST_FILE).is_file():
            return False
        read_manifest(folder)
        return True


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, whose files have all been opened. Raise PushError if one cannot be read."""
    from ...engine.models.loader import read_checkpoint

    with _one_text(folder):
        tensors = read_checkpoint(folder)
        first = next(tensors)
    return chain([first], tensors)


@contextmanager
def _one_text(folder: Path) -> Iterator[None]:
    """Raise a PushError with the same text whatever keeps a folder from being read, so that no client learns from it
    which files there are. The log has the cause.
    """
    try:
        yield
    except (TruerollError, OSError, ValueError, StopIteration) as error:
        log.warning("weights from %r: refused, for %s", str(folder), error)
        raise PushError(
            f"weight_dir: {brief(str(folder))} is no folder of weights that this server can read; give one that a push "
            "by disk wrote, or a checkpoint in Hugging Face format; the server's log says more"
        ) from None


def _queries(request: Request, known: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """The query parameters by name. Raise HttpError for one that is not known, has another value, or comes twice, but
    for `tags`, which is a list.
    """
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if value.lower() not in known.get(name, ()):
            expected = " or ".join(known[name]) if name in known else f"one of {sorted(known)}" if known else "none"
            text = f"{name}: expected {expected} in the query, found {brief(value)}; correct it"
            raise HttpError(400, text, field=name, value=value, code="invalid_request")
        found.setdefault(name, []).append(value.lower())
        if len(found[name]) > 1 and name not in _LISTS:
            raise given_twice(name)
    return found


def _tags(queries: dict[str, list[str]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(queries.get("tags", protocol.ALL_TAGS)))


def _told(status: protocol.Status) -> Response:
    return answer({"state": status.state, "weight_version": status.weight_version})
