"""slime's push in two calls: `/pull_weights` stages a weight version while the worker generates, and
`/update_weights_from_disk` commits it. Without a pull, `/update_weights_from_disk` pushes the checkpoint in a folder.

Owns: at most one pulled version, with the publisher that staged it. Promises: a commit serves exactly the pulled
version. If a pull or a commit fails, nothing is staged any more, and the worker serves its previous weights.

A version that is not committed within `STAGED_SECONDS` is dropped, and its commit is then refused.

slime copies a version into the folder `local_checkpoint_dir` of each machine, and names this folder in the second call.
Here the folder only identifies the pull. Nothing is written to it, and nothing is read from it: if its version is not
staged any more, the commit is refused, because the folder may hold the checkpoint from which slime began.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from trueroll.errors import InvalidRequestError, PushError, TruerollError, brief

from ....weight_sync.payload.manifest import LAST_VERSION, Version
from ..errors import as_http_error, error_body
from ..fields import Fields, checked, given
from ..lifecycle import Lifecycle, UpdateFields, changing
from ..wire import answer, read_json

if TYPE_CHECKING:
    from ...publisher.publisher import WeightPublisher
    from ...publisher.staged import Staged

STAGED_SECONDS = 600.0
"""How long a pulled version waits for its commit. A trainer with several engines commits only after the slowest pull.
"""
IGNORED = {"torch_empty_cache", "flush_cache", "token_step"}
"""Fields of `/update_weights_from_disk` that never change the result. Blocks of old weights never serve new ones."""
OFF: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors"),
    "is_async": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False,),
    "manifest": (),
}


class PullFields(Fields):
    """Fields of `/pull_weights`.

    `source_dir`: the folder in which the trainer writes a folder `weight_v000123` for each version. A URL is refused,
    because this front end, which has no list of allowed URLs, would open it. `target_version`: the version to stage.
    `local_checkpoint_dir`: identifies the pull in `/update_weights_from_disk`.
    """

    local_checkpoint_dir: str
    source_dir: str
    target_version: Version


class FromDiskFields(Fields):
    """Fields of `/update_weights_from_disk`.

    `model_path`: `local_checkpoint_dir` of the last pull, or a folder with weights. `weight_version`: the version as a
    decimal number; None means the pulled version, or the served version plus 1. `abort_all_requests`: first end all
    running requests of this front end.
    """

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


@dataclass
class _Pulled:
    """A pulled version. `publisher`, `staged`: what stages it; None if the worker serves the version."""

    local_dir: str
    source_dir: str
    version: int
    publisher: WeightPublisher | None = None
    staged: Staged | None = None


def _telling(handle: Callable[[Any, Request], Awaitable[str]]) -> Callable[[Any, Request], Awaitable[Response]]:
    """Decorator that turns a message, or an error, into SGLang's answer of a push."""

    @wraps(handle)
    async def tell(self: Weights, request: Request) -> Response:
        try:
            message = await handle(self, request)
        except TruerollError as error:
            told = as_http_error(error)
            body = {"success": False, "message": str(told)} | error_body(told)
            return answer(body, told.status)
        return answer({"success": True, "message": message})

    return tell


class Weights:
    """Handlers of SGLang's paths for pushes."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.watch = lifecycle.watch
        self._lifecycle = lifecycle
        self._pulled: _Pulled | None = None
        self._local_dir: str | None = None
        """The folder `local_checkpoint_dir` of the last pull."""

    @changing
    @_telling
    async def pull(self, request: Request) -> str:
        """Stage a version while the worker generates."""
        own = checked(PullFields, given(read_json(request), set(), {}))
        if "://" in own.source_dir:
            text = "source_dir: must be a folder, not a URL; mount or copy the chain to a folder"
            raise InvalidRequestError(text, field="source_dir")
        async with self._lifecycle.push_lock:
            self._local_dir = own.local_checkpoint_dir
            if (await self._lifecycle.report()).weight_version == own.target_version:
                await self._drop()
                self._pulled = _Pulled(own.local_checkpoint_dir, own.source_dir, own.target_version)
                return f"weight version {own.target_version} is served already"
            found, wanted = self._pulled, (own.local_checkpoint_dir, own.source_dir, own.target_version)
            if found is None or (found.local_dir, found.source_dir, found.version) != wanted:
                await self._drop()
                self._pulled = await asyncio.to_thread(self._stage, own)
        return f"weight version {own.target_version} is staged"

    @changing
    @_telling
    async def update(self, request: Request) -> str:
        """Commit the pulled version, or push the weights in a folder."""
        own = checked(FromDiskFields, given(read_json(request), IGNORED, OFF))
        version = _number(own.weight_version)
        async with self._lifecycle.push_lock:
            pulled = self._pulled
            if own.abort_all_requests:
                await self._lifecycle.client.abort_all()
            if pulled is not None and pulled.local_dir == own.model_path:
                await self._commit(pulled, version)
            elif own.model_path == self._local_dir:
                text = f"model_path: no version is staged for {brief(own.model_path)} any more; pull the version again"
                raise PushError(text, field="model_path")
            else:
                await self._drop()
                await self._lifecycle.push(UpdateFields(weight_dir=own.model_path, weight_version=version))
        return f"weight version {(await self._lifecycle.report()).weight_version} is served"

    async def close(self) -> None:
        """Drop a pulled version."""
        async with self._lifecycle.push_lock:
            await self._drop()

    def _stage(self, own: PullFields) -> _Pulled:
        """Stage a version. Call this function on a separate thread, because the publisher blocks."""
        publisher = self._lifecycle.open_publisher(STAGED_SECONDS)
        try:
            staged = publisher.pull(own.source_dir, own.target_version)
        except BaseException:
            publisher.close()
            raise
        return _Pulled(own.local_checkpoint_dir, own.source_dir, own.target_version, publisher, staged)

    async def _commit(self, pulled: _Pulled, version: int | None) -> None:
        if version not in (None, pulled.version):
            raise PushError(
                f"weight_version: version {pulled.version} was pulled (got {version}); pull the version to commit",
                field="weight_version",
                value=version,
            )
        if pulled.staged is None:
            return await self._check_serves(pulled.version)
        self._pulled = None
        try:
            await asyncio.to_thread(pulled.staged.commit)
        finally:
            await asyncio.to_thread(_publisher_of(pulled).close)
        self._pulled = _Pulled(pulled.local_dir, pulled.source_dir, pulled.version)

    async def _check_serves(self, version: int) -> None:
        """Raise PushError unless the worker serves a version, which an earlier call committed."""
        served = (await self._lifecycle.report()).weight_version
        if served != version:
            raise PushError(
                f"weight_version: version {version} was committed earlier, and version {served} has replaced it; pull "
                "the version to commit",
                field="weight_version",
                value=version,
            )

    async def _drop(self) -> None:
        pulled, self._pulled = self._pulled, None
        if pulled is not None and pulled.staged is not None:
            try:
                await asyncio.to_thread(pulled.staged.abort)
            finally:
                await asyncio.to_thread(_publisher_of(pulled).close)


def _publisher_of(pulled: _Pulled) -> WeightPublisher:
    assert pulled.publisher is not None
    return pulled.publisher


def _number(text: str | None) -> int | None:
    """Return the weight version that a text names."""
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
