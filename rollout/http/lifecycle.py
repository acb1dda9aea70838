"""The worker's lifecycle over HTTP, on paths that are named as in vLLM: health, pause, sleep, weights, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import ConfigError, InvalidRequestError, PushError, TruerollError, brief

from ...engine.request import InFlight, SleepInFlight
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

    from ..publisher.publisher import WeightPublisher

PATIENCE_SECONDS = 0.025
"""Maximum time, in seconds, for which `/health` waits for the worker if the worker's last health report is recent."""
PUSH_SECONDS = 60.0
_IN_FLIGHT: dict[str, SleepInFlight] = {"abort": "abort", "wait": "drain", "keep": "recompute"}
_PAUSES = tuple(_IN_FLIGHT)
_LISTS = {"tags"}
"""Query parameters that may be given several times."""

log = logging.getLogger(__name__)


class UpdateFields(Fields):
    """Fields of `/update_weights`.

    `weight_dir`: folder with the weights. `weight_version`: version of the weights; None means the served version plus
    1. `in_flight`: what happens to running requests, as in `WeightPublisher`.
    """

    weight_dir: str
    weight_version: Version | None = None
    in_flight: InFlight = "recompute"


class Changes(Protocol):
    """An object with handlers that change the worker's state. `watch`: the `Watch` that polls the worker."""

    watch: Watch


def changing(handle: Callable[[Any, Request], Awaitable[Response]]) -> Any:
    """Decorator for handlers that change the worker's state. After the handler, the decorator discards earlier health
    reports, which are then stale.
    """

    @wraps(handle)
    async def handle_and_note(self: Changes, request: Request) -> Response:
        try:
            return await handle(self, request)
        finally:
            self.watch.note_change()

    return handle_and_note


class Lifecycle:
    """Handlers for calls about the worker as a whole, not about single requests.

    `address`: address of the worker, or path of a fleet's file. `keys`: `server_public_key` and `client_key`. `watch`:
    the `Watch` that polls the worker at `address`. `push_lock`: held while weights are pushed, staged or committed.
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
        self.client, self._address, self._keys, self._counters = client, address, keys, counters
        self.push_lock = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """Return 200 and the worker's state, or 503 if the worker has failed or does not answer.

        If the worker is slow to answer and its last health report is recent, return the state from this report.
        """
        queries_of(request, {})
        health, age = await self._health_or_report()
        told = {"state": health.state, "weight_version": health.weight_version, "age_seconds": round(age, 3)}
        return answer(told, 503 if health.state == "failed" else 200)

    @changing
    async def pause(self, request: Request) -> Response:
        """Stop generating until `/resume`."""
        queries = queries_of(request, {"mode": _PAUSES, "clear_cache": ("true", "false")})
        mode = queries.get("mode", ["abort"])[0]
        if mode == "wait":
            await self.client.drain()
        else:
            await self.client.pause()
        if mode == "abort":
            await self.client.abort_all()
        if mode != "keep" and queries.get("clear_cache", ["true"])[0] == "true":
            await self.client.invalidate_prefix_cache()
        return answer({"status": "paused"})

    @changing
    async def resume(self, request: Request) -> Response:
        """End a pause."""
        queries_of(request, {})
        await self.client.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        queries_of(request, {})
        return answer({"is_paused": (await self.report()).state == "paused"})

    @changing
    async def sleep(self, request: Request) -> Response:
        """Release memory until `/wake_up`."""
        queries = queries_of(request, {"level": ("1", "2"), "mode": _PAUSES, "tags": protocol.ALL_TAGS})
        status = await self.client.sleep(
            level=2 if queries.get("level") == ["2"] else 1,
            tags=_tags(queries),
            in_flight=_IN_FLIGHT[queries.get("mode", ["abort"])[0]],
        )
        return _told(status)

    @changing
    async def wake_up(self, request: Request) -> Response:
        """Wake the worker: allocate the memory that `sleep` released."""
        return _told(await self.client.wake_up(_tags(queries_of(request, {"tags": protocol.ALL_TAGS}))))

    async def is_sleeping(self, request: Request) -> Response:
        queries_of(request, {})
        return answer({"is_sleeping": bool((await self.report()).sleeping)})

    @changing
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop all cached prefixes."""
        queries_of(request, {"reset_running_requests": ("false",), "reset_external": ("false",)})
        return _told(await self.client.invalidate_prefix_cache())

    @changing
    async def update_weights(self, request: Request) -> Response:
        """Make the worker serve the weights in a folder. The folder contains a push that the transport `disk` wrote, or
        a checkpoint in Hugging Face format.
        """
        queries_of(request, {})
        return await self.serve_folder(read_json(request))

    async def serve_folder(self, body: dict[str, Any]) -> Response:
        """Make the worker serve the weights in a folder. `body`: the fields of `UpdateFields`."""
        fields = checked(UpdateFields, body)
        async with self.push_lock:
            await self.push(fields)
        health = await self.report()
        return answer({"status": "updated", "weight_version": health.weight_version})

    async def push(self, fields: UpdateFields) -> None:
        """Push the weights in a folder to the worker. The caller holds `push_lock`.

        Raise PushError if the folder cannot be read, or if the worker refuses the weights.
        """
        version = fields.weight_version
        if version is None:
            version = _next_version((await self.report()).weight_version or 0)
        await asyncio.to_thread(_push, partial(self.open_publisher, in_flight=fields.in_flight), fields, version)

    def open_publisher(self, timeout: float = PUSH_SECONDS, in_flight: InFlight = "recompute") -> WeightPublisher:
        """Return a publisher that is connected to the worker. Call this function on a separate thread.

        `in_flight`: see `WeightPublisher`. `timeout`: after this many seconds without a message, worker and publisher
        consider each other lost, and the worker drops staged weights.
        """
        from ..publisher.publisher import WeightPublisher, connect_to

        server_key, client_key = self._keys
        publisher = WeightPublisher(
            "shared", timeout=timeout, in_flight=in_flight, server_public_key=server_key, client_key=client_key
        )
        try:
            connect_to(publisher, self._address)
        except BaseException:
            publisher.close()
            raise
        return publisher

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the worker and of this front end, in the format of Prometheus."""
        health, stats = await self.report(), await self.client.stats()
        registry = CollectorRegistry()
        registry.register(WorkerMetrics(health, stats))
        registry.register(self._counters)
        content_type, page = exposition(registry, request.headers.get("Accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    async def _health_or_report(self) -> tuple[protocol.Health, float]:
        """Return a health report of the worker and the age of the report in seconds. If the worker answers in time, the
        age of the report is 0. If the worker is slow and the last report is recent, return the last report and the age
        of that report.
        """
        if (report := self.watch.report()) is not None:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return await self.client.health(), 0.0
            except TimeoutError:
                health, age = report
                return health, age + PATIENCE_SECONDS
        return await self.report(), 0.0

    async def report(self) -> protocol.Health:
        """Return the worker's health. Raise HttpError if the worker does not answer in time."""
        return await self.watch.now()


def _next_version(served: int) -> int:
    """Return the weight version that follows the version `served`. Raise PushError if `served` is the largest possible
    version.
    """
    if served >= LAST_VERSION:
        raise PushError(
            f"weight_version: the served version {served} is the largest possible version; restart the worker"
        )
    return served + 1


def version_in(text: str | None) -> int | None:
    """Return the weight version that a text names. Raise InvalidRequestError if the text is not a version."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) > LAST_VERSION:
        raise InvalidRequestError(
            f"weight_version: must be a decimal number of at most {LAST_VERSION} (got {brief(text)})",
            field="weight_version",
            value=text,
            limit=LAST_VERSION,
        )
    return int(text)


def prepare_for_pushes() -> None:
    """Import torch and all modules that a weight push needs. An import during a request would delay other requests."""
    from ...engine.models import loader  # noqa: F401
    from ..publisher import publisher  # noqa: F401


def _push(open_publisher: Callable[[], WeightPublisher], fields: UpdateFields, version: int) -> None:
    """Push the weights in a folder to the worker.

    Call this function on a separate thread, because the publisher blocks.
    """
    folder = Path(fields.weight_dir)
    is_push = _is_push(folder)
    tensors = None if is_push else _tensors(folder)
    if is_push and fields.weight_version is not None:
        text = "weight_version: the folder already specifies a version; omit the field"
        raise InvalidRequestError(text, field="weight_version", value=fields.weight_version)
    try:
        with open_publisher() as publisher:
            if tensors is None:
                publisher.push_folder(folder)
            else:
                publisher.push(tensors, version)
    except ConfigError as error:
        raise PushError(f"weight_dir: {error}") from None


def _is_push(folder: Path) -> bool:
    """Return whether the folder was written by a push through the transport `disk`. Raise PushError if the folder
    cannot be read.
    """
    from ...weight_sync.transports.disk import read_manifest

    with _one_text(folder):
        if not (folder / MANIFEST_FILE).is_file():
            return False
        read_manifest(folder)
        return True


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the tensors of a checkpoint.

    Opens all files of the checkpoint before it returns. Raise PushError if a file cannot be read.
    """
    from ...engine.models.loader import read_checkpoint

    with _one_text(folder):
        tensors = read_checkpoint(folder)
        first = next(tensors)
    return chain([first], tensors)


@contextmanager
def _one_text(folder: Path) -> Iterator[None]:
    """Context manager that converts any error from reading a folder to a PushError.

    The text of the PushError does not depend on the cause, so that clients cannot find out which files exist. The cause
    of the error is logged.
    """
    try:
        yield
    except (TruerollError, OSError, ValueError, StopIteration) as error:
        log.warning("cannot read weights from %r: %s", str(folder), error)
        raise PushError(
            f"weight_dir: {brief(str(folder))} has no weights that this server can read; give the folder of a push by "
            "disk, or a checkpoint in Hugging Face format; see the server's log for the cause"
        ) from None


def queries_of(request: Request, known: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return the values of the query parameters, by name.

    `known`: the permitted values of each known parameter. Raise HttpError if a parameter is unknown, if a value is not
    permitted, or if a parameter that is not in `_LISTS` is given several times.
    """
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if value.lower() not in known.get(name, ()):
            if name in known:
                text = f"{name}: must be {' or '.join(known[name])} in the query (got {brief(value)})"
            else:
                text = f"{name}: unknown query parameter; this path supports {', '.join(sorted(known)) or 'none'}"
            raise HttpError(400, text, field=name, value=value, code="invalid_request")
        found.setdefault(name, []).append(value.lower())
        if len(found[name]) > 1 and name not in _LISTS:
            raise given_twice(name)
    return found


def _tags(queries: dict[str, list[str]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(queries.get("tags", protocol.ALL_TAGS)))


def _told(status: protocol.Status) -> Response:
    return answer({"state": status.state, "weight_version": status.weight_version})
